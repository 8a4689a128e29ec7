"""The example programs for hosts, run as their users would."""

import re

import pytest
from conftest import ROOT, run_python

pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")

ADAPTER = ROOT / "shims" / "python" / "examples" / "adapter.py"


def losses(n):
    done = run_python("-m", "libfsdp.run", "-n", n, ADAPTER)
    assert done.returncode == 0, done.stderr
    return [float(line.split()[-1]) for line in done.stdout.splitlines()]


def test_the_adapter_of_a_page_trains_alike_on_any_number_of_ranks():
    assert len(ADAPTER.read_text().splitlines()) < 100
    alone, two, three = losses(1), losses(2), losses(3)
    assert len(two) == 2 and len(three) == 3
    for loss in (*two, *three):
        assert abs(loss - alone[0]) <= 2e-6


README = [
    program
    for program in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    if "import torch" in program
]


@pytest.mark.parametrize("index", range(len(README)))
def test_the_readme_runs_as_printed(tmp_path, installed, index):
    path = tmp_path / "readme.py"
    path.write_text(README[index])
    done = run_python("-m", "libfsdp.run", "-n", 2, path, env=installed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if "checkpoint" in README[index]:  # which goes on from there, on another number of ranks
        again = run_python("-m", "libfsdp.run", "-n", 3, path, env=installed, cwd=tmp_path)
        assert again.returncode == 0 and "at step 40" in again.stdout, again.stderr
