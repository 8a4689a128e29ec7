"""Starts the ranks of a job on this host:  python -m libfsdp.run -n 2 script.py arguments...

Each rank is a process of its own with RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
FSDP_JOB_KEY set, so that `libfsdp.init()` there finds the others. Lines that ranks print come out whole, each behind
its rank's number. When a rank fails, the others are ended and this program exits with that rank's code (128 + the
signal's number when a signal ended it). A rank whose output ends with libfsdp's Aborted or PeerLost failed because of
another one: that one is given a second to end, and is then the one that failed.

Nothing is left behind. Each rank leads a session of its own, and that whole process group is killed at the end, while
its leader still exists as a zombie so that its number can't have been reused. A rank dies with the launcher
(PR_SET_PDEATHSIG); its children then are killed by the guard, a small process that notices the launcher's end by a
pipe that closes.

This module needs nothing but the standard library; it does not load libfsdp.so.
"""

import argparse
import ctypes
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time

# How the last line of a Python rank begins that failed only because another one had: what libfsdp, or its module for a
# host, raised there. torch puts the rank's number before it, once for each time that a program made its first group.
CONSEQUENCE = re.compile(rb"(\[rank\d+\]: )*libfsdp(\.\w+)*\.(Aborted|PeerLost)\b")
SETTLE = 1  # seconds that the rank that failed first is waited for, after one that failed because of it
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def say(message):
    print(f"libfsdp.run: {message}", file=sys.stderr, flush=True)


def main(arguments=None):
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    return Job(options).run()


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m libfsdp.run",
        usage="%(prog)s -n RANKS [options] (script.py | -m module | --no-python program) [arguments...]",
        description="Start the ranks of a job on this host.",
    )
    parser.add_argument("-n", "--nproc", type=int, required=True, metavar="RANKS", help="how many ranks")
    parser.add_argument(
        "--prefix",
        action=argparse.BooleanOptionalAction,
        default=None,
        help='put "[rank] " before each line that a rank prints; without it ranks write straight to this terminal '
        "(default: with more than one rank)",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-m", "--module", action="store_true", help="the program is a Python module, as with python -m")
    how.add_argument("--no-python", action="store_true", help="the program is any executable, not a Python script")
    parser.add_argument("--stdin", action="store_true", help="rank 0 reads this program's input (default: no rank does)")
    parser.add_argument("--port", type=int, default=0, help="MASTER_PORT (default: a free one)")
    parser.add_argument(
        "--grace", type=float, default=5, metavar="SECONDS", help="from SIGINT to SIGTERM to SIGKILL, when ranks don't end (default: %(default)s)"
    )
    parser.add_argument("program", help="what each rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    if options.nproc < 1:
        parser.error(f"argument -n: {options.nproc}; there is at least one rank")
    if not 0 <= options.port < 65536:
        parser.error(f"argument --port: {options.port} is not in 0 .. 65535")
    if options.grace < 0:
        parser.error(f"argument --grace: {options.grace} is negative")
    if not options.module and not options.no_python and not os.path.exists(options.program):
        parser.error(f"no such script: {options.program}")
    if options.prefix is None:
        options.prefix = options.nproc > 1
    return options


def _command(options):
    if options.no_python:
        return [options.program, *options.arguments]
    module = ["-m"] if options.module else []
    return [sys.executable, *module, options.program, *options.arguments]


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(options):
    """What all ranks share."""
    common = dict(os.environ)
    common["WORLD_SIZE"] = common["LOCAL_WORLD_SIZE"] = str(options.nproc)
    common["MASTER_ADDR"] = "127.0.0.1"
    common["MASTER_PORT"] = str(options.port or _free_port())
    common.setdefault("FSDP_JOB_KEY", secrets.token_hex(16))
    common.setdefault("PYTHONUNBUFFERED", "1")
    cores = len(os.sched_getaffinity(0))
    if "OMP_NUM_THREADS" not in common and options.nproc > 1:
        threads = max(1, cores // options.nproc)
        common["OMP_NUM_THREADS"] = str(threads)
        say(f"OMP_NUM_THREADS={threads} for each of {options.nproc} ranks on {cores} cores; set it to choose otherwise")
    return common


class Rank:
    """One rank's process, and what it has printed of a line that is not whole yet."""

    def __init__(self, number, process):
        self.number = number
        self.process = process
        self.pid = process.pid  # also its process group's and its session's
        self.ended = None  # (code, signal), one of them None, once it has
        self.prefix = f"[{number}] ".encode()
        self.last_line = b""  # on standard error, as far as it went through here


class Stream:
    """A pipe from a rank, copied to our own output line by line."""

    LONGEST = 1 << 16  # of a line that is held back until it is whole

    def __init__(self, rank, pipe, out):
        self.fd = pipe.fileno()
        self.pipe, self.rank, self.out, self.held = pipe, rank, out, b""

    def pump(self):
        """Copy what has come. False at the end."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return True
        self.held += data
        # A carriage return ends a line too: progress bars are rewritten in place.
        end = max(self.held.rfind(b"\n"), self.held.rfind(b"\r")) + 1
        if not data or len(self.held) > self.LONGEST:
            end = len(self.held)
        whole, self.held = self.held[:end], self.held[end:]
        if whole:
            if not data and not whole.endswith((b"\n", b"\r")):
                whole += b"\n"  # the next rank's line starts on a line of its own
            lines = list(_lines(whole))
            if self.out == 2:
                self.rank.last_line = lines[-1]
            _write(self.out, b"".join(self.rank.prefix + line for line in lines))
        return bool(data)


def _lines(data):
    """Split after each newline or carriage return, keeping them; "\\r\\n" is one."""
    line = bytearray()
    for index, byte in enumerate(data):
        line.append(byte)
        if byte == 10 or (byte == 13 and data[index + 1 : index + 2] != b"\n"):
            yield bytes(line)
            line.clear()
    if line:
        yield bytes(line)


def _write(fd, data):
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select((), (fd,), ())


class Job:
    def __init__(self, options):
        self.options = options
        self.ranks = []
        self.streams = []
        self.failed = None  # the rank that failed first
        self.suspects = []  # those that failed because of it, in their order, until it is found
        self.settle_at = None  # when the first of them counts as the one that failed
        self.interrupted = None  # the first signal that ended the job from outside
        self.last_signal = None  # the last that was sent to all ranks
        self.kill_at = None  # when what is still there gets a stronger one

    def run(self):
        # Signals and the ends of children come as bytes in a pipe, so that one loop waits for everything.
        wake, wake_write = os.pipe()
        for fd in (wake, wake_write):
            os.set_blocking(fd, False)
        previous = {number: signal.signal(number, lambda *_: None) for number in (*FORWARDED, signal.SIGCHLD)}
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.guard = Guard()
        try:
            self._start()
            self._loop(wake)
        finally:
            self._kill_and_reap()
            signal.set_wakeup_fd(-1)
            for number, handler in previous.items():
                signal.signal(number, handler)
            self.guard.dismiss()
        if self.failed is not None:
            code, number = self.failed.ended
            return 128 + number if code is None else code
        return 0 if self.interrupted is None else 128 + self.interrupted

    def _start(self):
        common, command = _environment(self.options), _command(self.options)
        launcher = os.getpid()
        for number in range(self.options.nproc):
            environment = common | {"RANK": str(number), "LOCAL_RANK": str(number)}
            relayed = self.options.stdin and number == 0
            output = subprocess.PIPE if self.options.prefix else None
            try:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE if relayed else subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    bufsize=0,
                    start_new_session=True,
                    preexec_fn=lambda: _die_with(launcher),
                )
            except OSError as error:
                say(f"can't start {command[0]}: {error.strerror}")
                raise SystemExit(126 if isinstance(error, PermissionError) else 127) from None
            rank = Rank(number, process)
            self.guard.watch(rank.pid)
            self.ranks.append(rank)
            if self.options.prefix:
                self.streams += [Stream(rank, process.stdout, 1), Stream(rank, process.stderr, 2)]
        for stream in self.streams:
            os.set_blocking(stream.fd, False)
        if self.options.stdin:
            threading.Thread(target=_relay_input, args=(self.ranks[0].process.stdin,), daemon=True).start()

    def _loop(self, wake):
        while any(rank.ended is None for rank in self.ranks):
            timeout = None
            times = [at for at in (self.kill_at, self.settle_at) if at is not None]
            if times:
                timeout = max(0, min(times) - time.monotonic())
            self._pump(wake, timeout)
            for number in _drain(wake):
                if number in FORWARDED:
                    self._forward(number)
            self._note_ends()
            if self.settle_at is not None and time.monotonic() >= self.settle_at:
                self._blame(self.suspects[0])
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self._harder()

    def _pump(self, wake, timeout):
        ready, _, _ = select.select([wake, *self.streams_by_fd()], (), (), timeout)
        for stream in [stream for stream in self.streams if stream.fd in ready]:
            if not stream.pump():
                self._close(stream)

    def streams_by_fd(self):
        return [stream.fd for stream in self.streams]

    def _close(self, stream):
        self.streams.remove(stream)
        stream.pipe.close()

    def _note_ends(self):
        for rank in self.ranks:
            if rank.ended is not None:
                continue
            info = os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # it stays a zombie
            if info is None:
                continue
            by_signal = info.si_code != os.CLD_EXITED
            rank.ended = (None, info.si_status) if by_signal else (info.si_status, None)
            if rank.ended == (0, None) or self.failed is not None:
                continue
            self._last_words(rank)
            if not by_signal and CONSEQUENCE.match(rank.last_line):
                self.suspects.append(rank)
                if self.settle_at is None:
                    self.settle_at = time.monotonic() + SETTLE
            else:
                self._blame(rank)
        if self.failed is None and self.suspects and all(rank.ended is not None for rank in self.ranks):
            self._blame(self.suspects[0])

    def _last_words(self, rank):
        for stream in [stream for stream in self.streams if stream.rank is rank]:
            while select.select([stream.fd], (), (), 0)[0]:
                if not stream.pump():
                    self._close(stream)
                    break

    def _blame(self, rank):
        """This one failed first: say so, and end the others."""
        self.failed, self.settle_at = rank, None
        code, number = rank.ended
        if code is None:
            how = f"was ended by {signal.Signals(number).name} (signal {number})"
        else:
            how = f"exited with code {code}"
        others = [other for other in self.ranks if other.ended is None]
        say(f"rank {rank.number} (pid {rank.pid}) {how}" + ("; ending the other ranks" if others else ""))
        if self.interrupted is None:
            self._end()

    def _forward(self, number):
        again = self.interrupted is not None
        if again:  # a second Ctrl-C means it
            self._harder()
        else:
            self.interrupted = self.last_signal = number
            self._signal_all(number)
            self.kill_at = time.monotonic() + self.options.grace

    def _end(self):
        self.last_signal = signal.SIGTERM
        self._signal_all(signal.SIGTERM)
        self.kill_at = time.monotonic() + self.options.grace

    def _harder(self):
        """What did not go by the last signal goes by a stronger one."""
        if self.last_signal == signal.SIGTERM:
            self._signal_all(signal.SIGKILL)
            self.kill_at = None
        else:
            self._end()

    def _signal_all(self, number):
        for rank in self.ranks:
            if rank.ended is None or number == signal.SIGKILL:
                _signal_group(rank.pid, number)

    def _kill_and_reap(self):
        for rank in self.ranks:
            _signal_group(rank.pid, signal.SIGKILL)  # whatever the rank left running; the zombie keeps the number ours
        for rank in self.ranks:
            rank.process.wait()
        deadline = time.monotonic() + 1
        while self.streams and time.monotonic() < deadline:  # last words; a process that left the group may hold a pipe
            ready, _, _ = select.select(self.streams_by_fd(), (), (), max(0, deadline - time.monotonic()))
            for stream in [stream for stream in self.streams if stream.fd in ready]:
                if not stream.pump():
                    self._close(stream)


def _drain(fd):
    try:
        return os.read(fd, 4096)
    except BlockingIOError:
        return b""


def _signal_group(leader, number):
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        pass


def _die_with(launcher):
    """In a rank's process, before its program: end when the launcher does."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # it was quicker than that call
        os._exit(1)


def _relay_input(pipe):
    try:
        while data := os.read(0, 1 << 16):
            pipe.write(data)
    except OSError:
        pass  # rank 0 does not read any more
    finally:
        try:
            pipe.close()
        except OSError:
            pass


class Guard:
    """A process that outlives the launcher just long enough to kill what it left.

    It reads process group numbers from a pipe. An end of the pipe without the word that all is done means that the
    launcher died: the ranks die with it, their children are killed here.
    """

    def __init__(self):
        read, self._write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.setsid()
                os.close(self._write)
                for number in FORWARDED:
                    signal.signal(number, signal.SIG_IGN)
                self._watch(read)
            finally:
                os._exit(0)
        os.close(read)

    @staticmethod
    def _watch(read):
        words = b""
        while data := os.read(read, 4096):
            words += data
        if b"done" not in words:
            for leader in words.split():
                _signal_group(int(leader), signal.SIGKILL)

    def watch(self, leader):
        os.write(self._write, b"%d\n" % leader)

    def dismiss(self):
        os.write(self._write, b"done\n")
        os.close(self._write)
        os.waitpid(self._pid, 0)


if __name__ == "__main__":
    try:
        status = main()
    except BrokenPipeError:  # nobody reads what the ranks print; they are ended by now
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 128 + signal.SIGPIPE
    sys.exit(status)
