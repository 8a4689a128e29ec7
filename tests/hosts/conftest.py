"""What the tests of hosts share: `hosted(n, worker, ...)` runs a function of the test module on n ranks, each a
process of its own under libfsdp.run, as `worker(job, ...)` with a Job: the host's default group on "fsdp" and one of the
same ranks on gloo beside it. Every assertion in it counts. A module's RANK names its host's program for a rank.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "shims" / "python"


def environment(**more):
    paths = os.pathsep.join([str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | more


def run_python(*arguments, timeout=60, env=None):
    """Run Python in a process of its own and give the finished process; whatever it started ends with it."""
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=env or environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # launchers then end their ranks
        try:
            out, err = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        pytest.fail(f"not done after {timeout} s: {arguments}\n{out}\n{err}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _gloo_failed(done):
    """Whether gloo failed by itself: all ranks waited for each other inside it (three ranks on a loaded machine, in
    TensorPlay's wheels), or it took a rank down at its end (seen in a program with gloo alone). No rank was in libfsdp
    then."""
    inside = any(f"libfsdp/{host}/" in done.stderr for host in ("tensorplay", "torch", "hosts"))
    waited = "gloo/transport" in done.stderr and "Timed out" in done.stderr
    ended = "terminate called without an active exception" in done.stderr and "Traceback" not in done.stderr
    return done.returncode != 0 and (waited or ended) and not inside


@pytest.fixture
def hosted(request, tmp_path):
    def go(
        n,
        worker,
        *arguments,
        timeout=100,
        check=True,
        limit=20,
        before=True,
        grace=2,
        launcher=("-m", "libfsdp.run"),
    ):
        """Run worker(job, *arguments). limit: the groups' timeout in seconds. before: the groups are made for it."""
        count = ("-n", n, "--grace", grace) if launcher[1] == "libfsdp.run" else ()
        command = (
            *launcher,
            *count,
            pathlib.Path(__file__).with_name(getattr(request.module, "RANK", "torch_rank.py")),
            pathlib.Path(request.module.__file__),
            worker.__name__,
            tmp_path / "store",
            json.dumps([arguments, limit, before]),
        )
        for _ in range(2):
            done = run_python(*command, timeout=timeout)
            (tmp_path / "store").unlink(missing_ok=True)
            if not _gloo_failed(done):
                break
        assert not check or done.returncode == 0, f"code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return go


@pytest.fixture
def installed(tmp_path):
    """An environment in which Python takes libfsdp for an installed distribution, with pyproject.toml's entry
    points."""
    import tomllib  # here: Python 3.10 has none

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = tmp_path / "site" / "libfsdp-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: libfsdp\nVersion: 0\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    base = environment()
    return base | {"PYTHONPATH": os.pathsep.join([str(info.parent), base["PYTHONPATH"]])}
