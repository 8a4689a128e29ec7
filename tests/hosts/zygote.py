"""A process that has imported a host framework, and from which the ranks of tests are forked: imports are most of what a
rank of a test costs. conftest.py starts one for each rank program, by `zygote.py SOCKET RANK_PROGRAM`, and sends it jobs.

A job runs as libfsdp.run would run it: a fork of this process is the launcher, and where that would start a Python, it
forks. What a rank finds is what a program finds that starts (arguments, environment, `__main__`, signals, files, a
session of its own), except that modules are there already and that all ranks hash strings alike. It ends as a program
does, with everything that belongs to the end of an interpreter.

It has one thread, has called nothing of the host's that starts others, and checks that before each fork. It does one job
at a time and dies with pytest.

Over the socket, a message each: how many threads there are after the imports (more than one: it is of no use, and ends).
Then for each job: the arguments of libfsdp.run, with the job's standard output and error; the launcher's pid; its exit
status as subprocess has it, while it is a zombie, so that its number can still be used; anything, when conftest.py is
done with that number.
"""

import gc
import importlib
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
from unittest import mock

from libfsdp import run


def threads():
    return len(os.listdir("/proc/self/task"))


def open_files():
    numbers = os.listdir("/proc/self/fd")  # and the listing's own
    return {int(number) for number in numbers if os.path.lexists(f"/proc/self/fd/{number}")}


class Program(Exception):
    """In a rank, thrown to the bottom of the stack: what it is to run."""

    def __init__(self, command, environment):
        self.command, self.environment = command, environment

    def run(self):
        self.__traceback__ = None  # nothing of the launcher's stays
        os.environ.clear()
        os.environ.update(self.environment)
        sys.argv = self.command[1:]
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


class Rank:
    """The fork of a rank, as far as libfsdp.run uses a Popen."""

    stdin = None

    def __init__(self, pid, stdout, stderr):
        self.pid, self.stdout, self.stderr = pid, stdout, stderr

    def wait(self):
        return os.waitpid(self.pid, 0)


class Job(run.Job):
    """kept: the numbers of files that ranks inherit."""

    def __init__(self, arguments, kept):
        super().__init__(run._parse(arguments))
        self.kept = kept

    def _start(self):
        with mock.patch.object(run.subprocess, "Popen", self._fork):
            super()._start()

    def _fork(self, command, env, preexec_fn, **_):
        pipes = [os.pipe(), os.pipe()]
        pid = os.fork()
        if not pid:
            os.setsid()
            for number, (_, end) in enumerate(pipes, start=1):
                os.dup2(end, number)
            preexec_fn()
            self.ranks, self.streams, self.guard = [], [], mock.Mock()  # these are the launcher's
            raise Program(command, env)
        for _, end in pipes:
            os.close(end)
        return Rank(pid, *(os.fdopen(begin, "rb", buffering=0) for begin, _ in pipes))

    def close_files(self):
        """In a rank."""
        for number in open_files() - self.kept:
            os.close(number)


def launch(arguments, out, err, kept):
    """In a fork: the job. Comes back in ranks only, with their program."""
    os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    try:
        job = Job(arguments, kept)
        code = job.run()
    except Program as program:
        job.close_files()
        return program
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    os._exit(code)


def serve(connection, kept):
    """Do jobs until pytest goes. Comes back in ranks, with their program, and at the end, with None."""
    while True:
        data, files, _, _ = socket.recv_fds(connection, 1 << 16, 2)
        if not data:
            return None
        if threads() > 1:
            raise RuntimeError(f"{threads()} threads run here: a fork would have one of them only")
        zygote = os.getpid()
        pid = os.fork()
        if not pid:
            run._die_with(zygote)
            connection.close()
            return launch(json.loads(data), *files, kept)
        for number in files:
            os.close(number)
        connection.send(b"%d" % pid)
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        connection.send(b"%d" % (info.si_status if info.si_code == os.CLD_EXITED else -info.si_status))
        connection.recv(1)
        os.waitpid(pid, 0)


def main():
    path = sys.argv[2]
    connection = socket.socket(fileno=int(sys.argv[1]))
    run._libc.prctl(run.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    kept = {0, 1, 2}
    spec = importlib.util.spec_from_file_location("rank", path)
    rank = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rank)
    for name in rank.PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a rank's collections leave these pages alone
    kept |= open_files() - {connection.fileno()}
    connection.send(b"%d" % threads())
    return serve(connection, kept) if threads() == 1 else None


if __name__ == "__main__":
    program = main()
    if program is not None:
        program.run()
