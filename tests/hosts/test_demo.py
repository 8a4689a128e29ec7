"""ci/demo with the modules of the host that is installed here: torch or TensorPlay. What compares and draws is in
build/venv, which has the data; only its ranks run in this Python."""

import importlib.util
import os
import re
import sys

import pytest
from conftest import ROOT, run_python

HOST = next((name for name in ("tensorplay", "torch") if importlib.util.find_spec(name)), None)
COMPARES = ROOT / "build" / "venv" / "bin" / "python"
RANKS = 2 if HOST == "torch" else 3  # three get parts of a batch that differ in size; torch takes long to import
START = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"  # another Python in a process that run_python ends

pytestmark = [
    pytest.mark.skipif(HOST is None, reason="neither torch nor TensorPlay is installed here; ci/test makes venvs"),
    pytest.mark.skipif(not os.access(COMPARES, os.X_OK), reason="there is no build/venv; ci/build makes it"),
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """What `ci/demo` prints, and its picture."""
    picture = tmp_path_factory.mktemp("demo") / "curves.png"
    options = ("--host", HOST, "--python", sys.executable, "--epochs", 6, "--ranks", RANKS, "--plot", picture)
    done = run_python("-c", START, COMPARES, ROOT / "ci" / "digits" / "compare.py", *options, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, picture


def row(printed, label):
    """The cells of a row of the table."""
    (line,) = [line for line in printed.splitlines() if line.startswith(label)]
    return line[len(label) :].split()


def test_several_ranks_come_to_one_process_model(demo):
    printed, _ = demo
    assert printed.splitlines()[-1].startswith("HOLDS: after 72 steps"), printed
    one, alone, several, *own = map(float, row(printed, "loss, last epoch"))
    assert abs(alone - one) <= 2e-6 and abs(several - one) <= 2e-6
    differences = row(printed, "off from one process by")
    assert differences[0] == "-" and float(differences[1]) <= 1e-6 and 0 < float(differences[2]) <= 1e-5


def test_parameters_are_cut(demo):
    """17,226 of them, of 4 bytes. Rows are cut, and the first rank has most."""
    printed, _ = demo
    whole, alone, several, *own = map(int, row(printed, "bytes kept by a rank"))
    assert whole == alone == 4 * 17226
    assert several == 4 * sum(-(-rows // RANKS) * (columns + 1) for rows, columns in ((128, 64), (64, 128), (10, 64)))
    assert own in ([], [several])


def test_the_hosts_own_fsdp_is_beside_it_or_a_line_says_why_not(demo):
    printed, _ = demo
    seconds = row(printed, "seconds of training")
    if "own FSDP raises in backward" in printed:
        assert len(seconds) == 3 and "TensorPlay 1.0" in printed
    else:
        assert len(seconds) == 4 and re.search(rf"own FSDP, {RANKS} ranks\s*\n", printed)
    assert all(float(number) > 0 for number in seconds)


def test_the_curves_are_drawn(demo):
    printed, picture = demo
    assert str(picture) in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
