"""The rank processes of a benchmark, in Python: what worker.h describes, for contenders that are Python programs."""

import ctypes
import os
import signal
import socket
import time

now = time.monotonic_ns  # CLOCK_MONOTONIC, as in C


def serve(rank, check, turn):
    """Serve until the driver hangs up.

    check(task, bytes) does the task once and compares; turn(task, bytes, repetitions) meets the other ranks, repeats the
    task and returns (begin, end), or the nanoseconds that count as one number. Both raise when something is wrong.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the driver starts Python ranks itself
    anywhere = os.sched_getaffinity(0)
    driver = socket.socket(socket.AF_UNIX)
    driver.connect(os.environ["BENCH_SOCKET"])
    driver.sendall(b"hello %d\n" % rank)
    for line in driver.makefile("r"):
        order, *words = line.split()
        try:
            answer = "ok"
            if order == "check":
                check(words[0], int(words[1]))
            elif order == "turn":
                took = turn(words[0], int(words[1]), int(words[2]))
                answer = f"took {took}" if isinstance(took, int) else "span {} {}".format(*took)
            elif order == "pin":
                os.sched_setaffinity(0, anywhere if words[0] == "-1" else {int(words[0])})
            else:
                raise ValueError("not understood")
        except Exception as error:
            answer = "bad " + " ".join(f"{type(error).__name__}: {error}".split())[:400]
        driver.sendall(answer.encode() + b"\n")
