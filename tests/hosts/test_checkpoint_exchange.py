"""Training that one host has saved goes on in another, on another number of ranks. Each host has its own Python here: those
that ci/test has made and that are there are tried."""

import os
import pathlib
import subprocess
import sys

import pytest
from conftest import ROOT, environment

BUILD = pathlib.Path(os.environ.get("FSDP_BUILD", ROOT / "build"))
PYTHONS = {
    "torch": BUILD / "torch-venv" / "bin" / "python",
    "tensorplay": BUILD / "tensorplay-1.1-venv" / "bin" / "python",
    "numpy": pathlib.Path(sys.executable),
}
CUDA = "/usr/local/cuda/lib64"


def run(host, ranks, wrap, what, folder):
    """One run of checkpoint_run.py, under the launcher where it has several ranks."""
    launcher = [] if ranks == 1 else ["-m", "libfsdp.run", "-n", str(ranks), "--grace", "2"]
    env = environment()
    env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [CUDA, env.get("LD_LIBRARY_PATH")]))
    program = pathlib.Path(__file__).with_name("checkpoint_run.py")
    command = [PYTHONS[host], *launcher, program, host, wrap, what, folder]
    done = subprocess.run([*map(str, command)], env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"{host} {what}: {done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(
    "writer, reader",
    [
        (("tensorplay", 2, "fully_shard"), ("torch", 3, "fully_shard")),
        (("tensorplay", 3, "classic"), ("numpy", 2, "fully_shard")),
        (("torch", 2, "classic"), ("tensorplay", 1, "none")),
        (("torch", 4, "hybrid"), ("numpy", 1, "none")),
        (("numpy", 2, "fully_shard"), ("torch", 1, "none")),
        (("numpy", 3, "fully_shard"), ("tensorplay", 2, "fully_shard")),
        (("tensorplay", 2, "ddp"), ("torch", 3, "fully_shard")),
        (("torch", 2, "fully_shard"), ("tensorplay", 3, "ddp")),
    ],
    ids=lambda run: "-".join(map(str, run)),
)
def test_training_goes_on_in_another_host(tmp_path, writer, reader):
    for host, *_ in (writer, reader):
        if not PYTHONS[host].exists():
            pytest.skip(f"no {PYTHONS[host]}: ci/test hosts tensorplay makes it")
    run(*writer, "save", tmp_path / "saved")
    run(*reader, "load", tmp_path / "saved")
