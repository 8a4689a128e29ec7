"""What the tests of hosts share: `hosted(n, worker, ...)` runs a function of the test module on n ranks, each a
process of its own under libfsdp.run, as `worker(job, ...)` with a Job: the host's default group on "fsdp" and one of the
same ranks on gloo beside it. Every assertion in it counts. A module's RANK names its host's program for a rank.

Ranks are forked from a process that has imported the host (zygote.py). Tests of what a process finds at its start, does
at its end or starts itself say `fresh`, as do a few of each host's, as only processes that were started by themselves
hash strings in their own ways. FSDP_TEST_FRESH=1 does so for all.
"""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import warnings

import pytest

HERE = pathlib.Path(__file__).parent
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background: programs of tests would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "shims" / "python"


def environment(**more):
    paths = os.pathsep.join([str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | more


def run_python(*arguments, timeout=60, env=None, cwd=None):
    """Run Python in a process of its own and give the finished process; whatever it started ends with it."""
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=env or environment(),
        cwd=cwd,
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


class Zygote:
    """zygote.py for one rank program. Without `ready`, it can't be forked."""

    def __init__(self, program):
        self.environment = _start_environment()
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py"), str(other.fileno()), str(program)],
            env=self.environment | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[other.fileno()],
            start_new_session=True,
        )
        other.close()
        try:
            threads = self._answer(60)
        except RuntimeError as error:
            threads = error
        self.ready = threads == 1
        if not self.ready:
            warnings.warn(f"ranks are started one by one: {program.name} can't be forked ({threads} threads)")

    def lost(self):
        return self.ready and self._process.poll() is not None

    def _answer(self, timeout):
        """The number that it sends next; None after the timeout."""
        self._socket.settimeout(timeout)
        try:
            data = self._socket.recv(100)
        except TimeoutError:
            return None
        if not data:
            raise RuntimeError(f"the process that ranks are forked from ended with code {self._process.wait(10)}")
        return int(data)

    def run(self, arguments, timeout):
        """What run_python(-m libfsdp.run arguments) does."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:

            def printed():
                return [file.seek(0) or file.read().decode(errors="replace") for file in (out, err)]

            message = json.dumps([str(argument) for argument in arguments]).encode()
            socket.send_fds(self._socket, [message], [out.fileno(), err.fileno()])
            pid, code = self._answer(10), None
            try:
                code = self._answer(timeout)
                if code is None:
                    os.kill(pid, signal.SIGTERM)  # the launcher then ends its ranks
                    code = self._answer(5)
                    pytest.fail("\n".join([f"not done after {timeout} s: {arguments}", *printed()]))
            finally:
                if code is None:
                    os.killpg(pid, signal.SIGKILL)  # its guard ends the ranks
                    self._answer(10)
                self._socket.send(b"!")
            return subprocess.CompletedProcess(arguments, code, *printed())

    def close(self):
        self._socket.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _start_environment():
    """What decides what a rank finds at its start."""
    return {name: value for name, value in environment().items() if name != "PYTEST_CURRENT_TEST"}


@pytest.fixture(scope="session")
def zygotes():
    """{rank program: its Zygote}, filled as tests need them."""
    started = {}
    yield started
    for zygote in started.values():
        zygote.close()


def _gloo_failed(done):
    """Whether gloo failed by itself: all ranks waited for each other inside it (three ranks on a loaded machine, in
    TensorPlay's wheels), or it took a rank down at its end (seen in a program with gloo alone). No rank was in libfsdp
    then, but for the thread that waits for Ctrl-C."""
    lines = [line for line in done.stderr.splitlines() if not re.search(r'hosts/interrupt\.py", line \d+ in _run', line)]
    inside = any(f"libfsdp/{host}/" in line for line in lines for host in ("tensorplay", "torch", "hosts"))
    waited = "gloo/transport" in done.stderr and "Timed out" in done.stderr
    ended = "terminate called without an active exception" in done.stderr and "Traceback" not in done.stderr
    return done.returncode != 0 and (waited or ended) and not inside


@pytest.fixture
def hosted(request, tmp_path, zygotes):
    program = HERE / getattr(request.module, "RANK", "torch_rank.py")
    all_fresh = getattr(request.module, "FRESH", "FSDP_TEST_FRESH" in os.environ)

    def runner(launcher, fresh):
        """What starts a job: run_python, or a Zygote that was started in this environment."""
        if fresh or all_fresh or launcher[1] != "libfsdp.run":
            return lambda arguments, timeout: run_python(*launcher, *arguments, timeout=timeout)
        if program not in zygotes or zygotes[program].lost():
            zygotes[program] = Zygote(program)
        zygote = zygotes[program]
        if not zygote.ready or zygote.environment != _start_environment():
            return runner(launcher, True)
        return zygote.run

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
        fresh=False,
    ):
        """Run worker(job, *arguments). limit: the groups' timeout in seconds. before: the groups are made for it. fresh:
        ranks are processes that start by themselves (a module's FRESH: all of its)."""
        count = ("-n", n, "--grace", grace) if launcher[1] == "libfsdp.run" else ()
        settings = json.dumps([arguments, limit, before])
        job = (*count, program, request.module.__file__, worker.__name__, tmp_path / "store", settings)
        run = runner(launcher, fresh)
        for _ in range(3):
            done = run(job, timeout)
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


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """The command line in this process, in a folder of its own: run(...) gives (code, output, error output)."""
    from libfsdp.checkpoint import table  # here: modules of other tests set up their host first
    from libfsdp.checkpoint.__main__ import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table, "_EVERY_S", 3600)  # on a slow disk there would be lines of progress

    def go(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        said = [line for line in err.splitlines() if not line.startswith("libfsdp.checkpoint: left out: ")]
        assert "Traceback" not in err and len(said) <= 1, err
        return code, out, err

    return go


@pytest.fixture
def convert(run):
    def go(*arguments):
        code, out, err = run("convert", *arguments)
        assert code == 0, err
        return err

    return go
