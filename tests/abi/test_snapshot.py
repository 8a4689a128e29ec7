"""abi/libfsdp.abi: the ABI as it was last agreed on."""
import shutil

from conftest import LIBRARY, ROOT, run


def test_abi_is_the_snapshots():
    assert shutil.which("abidiff"), "abidiff is not installed (Debian: abigail-tools)"
    run(ROOT / "abi" / "check-snapshot", LIBRARY)


def test_snapshot_holds_no_path_of_the_machine_that_made_it():
    text = (ROOT / "abi" / "libfsdp.abi").read_text()
    for sign in ("/home", "/work", "/tmp", "/usr", "comp-dir", "filepath"):
        assert sign not in text
