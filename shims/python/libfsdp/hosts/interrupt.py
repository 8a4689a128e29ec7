"""Ctrl-C while the main thread waits for other ranks in a call of the library.

Python runs signal handlers on the main thread between two of its own instructions, and such a call is one instruction
until the other ranks have come. So a thread sleeps until the process gets a signal (signal.set_wakeup_fd). When that is
SIGINT, Python's own handler is to answer it, and the main thread is still at the same place in this package SETTLE
seconds later, the thread aborts the process's groups. The call then returns and KeyboardInterrupt is raised; the other
ranks get Aborted, which names this rank. What was under way on a group could not go on without this rank, so nothing
less would help them. A call that does not wait costs nothing.

Work.wait looks for signals itself, so a work that is waited for goes on after Ctrl-C, and its group stays.

Nothing is done where the program has a SIGINT handler of its own (it runs when the call returns), or where something
else, asyncio say, has the process's wakeup descriptor; and for calls on other threads, which Ctrl-C does not concern.
"""

import os
import pathlib
import signal
import sys
import threading
import time

from .. import group as groups
from ..work import Work

SETTLE = 0.05  # seconds in which Python answers a signal, where it can
_PACKAGE = str(pathlib.Path(__file__).resolve().parents[1]) + os.sep
_ANSWERS = {Work._wait.__code__}  # what looks for signals itself
_pipe = None  # (read, write) once there is a thread; it lasts as long as the process


def watch():
    """Answer Ctrl-C from here on. Only the main thread can ask for it; elsewhere it does nothing."""
    global _pipe
    if threading.current_thread() is not threading.main_thread():
        return
    if _pipe is None:
        _pipe = os.pipe()
        os.set_blocking(_pipe[1], False)
        threading.Thread(target=_run, args=(_pipe[0],), name="libfsdp interrupt", daemon=True).start()
    _set_wakeup(_pipe[1], instead_of=-1)


def _set_wakeup(descriptor, instead_of):
    """Have signals written to a descriptor, unless somebody else has them."""
    other = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    if other not in (descriptor, instead_of):
        signal.set_wakeup_fd(other)


def _run(descriptor):
    while True:
        signals = os.read(descriptor, 64)
        if signal.SIGINT in signals and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            _settle()


def _settle():
    before = _place()
    if before is None:
        return
    time.sleep(SETTLE)
    if _place() != before:
        return
    for group in list(groups._open_groups):
        if group._owned is not None and group.size > 1:
            group.abort(f"rank {group.rank} was interrupted (Ctrl-C) while it waited for other ranks")


def _place():
    """Where the main thread is, if that is a call in this package; None."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    if frame is None or frame.f_code in _ANSWERS or not frame.f_code.co_filename.startswith(_PACKAGE):
        return None
    return frame, frame.f_lasti


def _forget():
    """In a forked child, which has neither the thread nor groups: signals of the child are not the parent's."""
    global _pipe
    if _pipe is not None:
        pipe, _pipe = _pipe, None
        _set_wakeup(-1, instead_of=pipe[1])
        for descriptor in pipe:
            os.close(descriptor)


os.register_at_fork(after_in_child=_forget)
