"""Threads, signals and the end of the interpreter, in the host that is installed here: nothing hangs, nothing crashes,
and who waits for a rank that was interrupted is told which one it was."""

import importlib.util
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time

import pytest
from conftest import environment

HOST = next((name for name in ("torch", "tensorplay") if importlib.util.find_spec(name)), None)
if HOST is None:
    pytest.skip("neither torch nor TensorPlay is installed here", allow_module_level=True)
PROGRAMS = pathlib.Path(__file__).with_name("thread_programs.py")
ANSWER = 0.2  # seconds in which Ctrl-C is answered
SLACK = 0.8  # on a machine with as many ranks as processors and more


class Leader:
    """The process that ranks are forked from."""

    def __init__(self):
        self.begin()

    def begin(self):
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS), HOST],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # or `select` would not see a line that has been read together with another
        )
        self.codes = {}

    def start(self, folder, n, program, *arguments):
        folder.mkdir()
        self.process.stdin.write(f"{json.dumps([program, arguments, n, str(folder)])}\n".encode())
        self.codes = {}
        return [Rank(self, pid, folder, rank) for rank, pid in enumerate(self.answer(60))]

    def end(self, killed=False):
        if killed:
            self.process.kill()
        self.process.stdin.close()
        self.process.wait()

    def answer(self, seconds):
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        assert ready, f"not done after {seconds} s"
        return json.loads(self.process.stdout.readline())

    def code(self, pid, seconds):
        while pid not in self.codes:
            ended, code = self.answer(seconds)
            self.codes[ended] = code
        return self.codes[pid]


class Rank:
    def __init__(self, leader, pid, folder, number):
        self.leader, self.pid = leader, pid
        self._out, self._err = folder / f"out{number}", folder / f"err{number}"

    def written(self):
        return self._out.read_text() if self._out.exists() else ""

    def until(self, word, seconds=30):
        """The line that begins with `word`, as words."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            for line in self.written().splitlines(keepends=True):
                if line.startswith(word) and line.endswith("\n"):
                    return line.split()
            time.sleep(0.01)
        raise AssertionError(f"no {word!r}: {self.written()} {self._err.read_text()}")

    def interrupt(self):
        os.kill(self.pid, signal.SIGINT)

    def end(self, seconds):
        """(its exit code, what it wrote to standard error)"""
        code = self.leader.code(self.pid, seconds)
        return code, self._err.read_text()


@pytest.fixture(scope="module")
def leader():
    leader = Leader()
    yield leader
    leader.end()


@pytest.fixture
def ranks(leader, tmp_path):
    """ranks(n, program, *arguments): start it on n ranks."""
    started = []

    def go(n, program, *arguments):
        started.extend(leader.start(tmp_path / "job", n, program, *arguments))
        return started

    yield go
    for rank in started:
        if rank.pid not in leader.codes:
            os.kill(rank.pid, signal.SIGKILL)  # a number that no other process has: nobody has waited for it
    try:
        for rank in started:
            leader.code(rank.pid, 30)
    except AssertionError:  # a machine that hardly runs: what comes late would be taken for the next job's pids
        leader.end(killed=True)
        leader.begin()
        raise


def ended(started, seconds=60):
    """All ranks ended well: what each wrote to standard error."""
    for rank in started:
        code, err = rank.end(seconds)
        assert code == 0, (code, rank.written(), err)
        yield err


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------

PLACES = ["sync", "work", "forward", "backward", "replicas"] + (["future", "then"] if HOST == "torch" else [])


def interrupted(*ranks):
    """Once they wait for a peer, these get SIGINT: when."""
    for rank in ranks:
        rank.until("waiting")
    time.sleep(0.3)
    sent = time.monotonic()
    for rank in ranks:
        rank.interrupt()
    return sent


def answered(rank, sent):
    """The rank raised KeyboardInterrupt in time, and ended as a program does that did not catch it."""
    _, when = rank.until("interrupted")
    assert float(when) - sent < ANSWER + SLACK, float(when) - sent
    code, err = rank.end(15)
    assert code == -signal.SIGINT and err.rstrip().endswith("KeyboardInterrupt"), (code, err)


@pytest.mark.parametrize("where", PLACES)
def test_a_rank_that_waits_answers_ctrl_c_and_the_other_is_told(ranks, where):
    first, second = ranks(2, "interrupt", where, [1], {})
    answered(first, interrupted(first))
    _, kind, rank, _ = second.until("told")
    assert kind in ("Aborted", "PeerLost") and rank == "0"
    assert second.end(15)[0] == 7


@pytest.mark.parametrize("where", ["sync", "forward"])
def test_ctrl_c_for_all_ranks_ends_all(ranks, where):
    started = ranks(3, "interrupt", where, [2], {})
    sent = interrupted(*started)
    for rank in started:
        answered(rank, sent)


def test_with_interruptible_an_operation_goes_on_after_ctrl_c(ranks):
    first, second = ranks(2, "goes_on")
    sent = interrupted(first)
    assert float(first.until("interrupted")[1]) - sent < ANSWER + SLACK
    assert list(ended([first, second])) == ["", ""]


def test_a_programs_own_handler_runs_when_the_call_returns(ranks):
    started = ranks(2, "own_handler")
    interrupted(started[0])
    assert list(ended(started)) == ["", ""]


# ---- The rest --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["nothing", "pending", "models", "daemon", "daemons"])
def test_a_program_ends_cleanly_whatever_is_left(ranks, how):
    started = ranks(2, "end", how)
    for err in ended(started):
        assert "Fatal" not in err and "terminate" not in err, err
    assert [rank.written() for rank in started] == ["done\n"] * 2


PROGRAMS_LEFT = ["deleters", "callbacks", "forked"] + (["lasts"] if HOST == "torch" else [])  # TensorPlay has its own


@pytest.mark.parametrize("program", PROGRAMS_LEFT)
def test_threads_processes_and_memory(ranks, program):
    list(ended(ranks(2, program), 85))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
