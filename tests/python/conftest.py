"""What the Python tests share: starting ranks, and catching what they leave.

`ranks(n, worker, ...)` runs a function of the test module on n ranks, each a process of its own under libfsdp.run, as
`worker(group, ...)`. Every assertion in it counts: a rank that fails fails the test, with all that the ranks printed.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background: programs of tests would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "shims" / "python"
if str(PACKAGE) not in sys.path:
    sys.path.insert(0, str(PACKAGE))


def environment(**more):
    paths = os.pathsep.join([str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | more


def run_python(*arguments, timeout=30, env=None, stdin=subprocess.DEVNULL, **options):
    """Run Python in a process of its own and give the finished process; whatever it started ends with it."""
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=env or environment(),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # libfsdp.run then ends its ranks
        try:
            out, err = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        pytest.fail(f"not done after {timeout} s: {arguments}\n{out}\n{err}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def launch(n, *arguments, options=(), **more):
    """python -m libfsdp.run -n N arguments..."""
    return run_python("-m", "libfsdp.run", "-n", n, "--grace", 2, *options, *arguments, **more)


@pytest.fixture
def ranks(request):
    def go(n, worker, *arguments, timeout=30, check=True, **settings):
        """Run worker(group, *arguments) on n ranks; `settings` go to libfsdp.init."""
        done = launch(
            n,
            pathlib.Path(__file__).with_name("rank_main.py"),
            pathlib.Path(request.module.__file__),
            worker.__name__,
            json.dumps([arguments, {"timeout": 15} | settings]),
            timeout=timeout,
        )
        assert not check or done.returncode == 0, f"code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return go
