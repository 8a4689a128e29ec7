"""Work handles: what a collective with async_op=True gives to Python, and to torch's C++ code, which only waits and
asks for a future. How an operation ends is hosts.work's.
"""

import atexit
import threading
import time

import torch
import torch.distributed as dist

from ..errors import FsdpError, Pending
from ..hosts.work import Ending
from .errors import Timeout, in_torch


def seconds(timeout):
    """A datetime.timedelta, or a number of seconds, as seconds; None for none: torch says that with 0 or less."""
    if timeout is None:
        return None
    value = timeout.total_seconds() if hasattr(timeout, "total_seconds") else float(timeout)
    return value if value > 0 else None


def milliseconds(timeout):
    """The same in whole milliseconds, at least 1."""
    value = seconds(timeout)
    return None if value is None else max(1, round(value * 1000))


class Done(dist.Work):
    """What was run to its end before the call returned."""

    def __init__(self, tensors=()):
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return True

    def is_success(self):
        return True

    def exception(self):
        return None

    def synchronize(self):
        pass

    def result(self):
        return self._tensors

    def get_future(self):
        future = torch.futures.Future()
        future.set_result(self._tensors)
        return future


DONE = Done()


class Work(dist.Work):
    """An operation that goes on. Keeps its tensors, and its group, until it is complete."""

    def __init__(self, work, tensors, after=None):
        """work: the library's; tensors: the call's results; after: what is left to do then, or None."""
        super().__init__()
        self._work = work
        self._group = work._group()
        self._tensors = tensors
        self._ending = Ending(work, after, in_torch)
        self._future = None
        self._lock = threading.Lock()

    def wait(self, timeout=None):
        """Wait to the end; raise what the operation failed with. A timeout that passes first ends the whole group,
        for all ranks, as it does on gloo: its tensors are still being written, so there is nothing that could go
        on."""
        limit = seconds(timeout)
        try:
            self._work.wait(limit)
        except Pending:
            message = f"an operation was not complete after {limit:g} s, as long as Work.wait was told to wait"
            if self._group._owned is not None:
                self._group.abort(message)
            raise Timeout(message) from None
        except FsdpError as error:
            raise in_torch(error) from None
        self._ending.finish()
        if self._ending.failure is not None:
            raise self._ending.failure
        return True

    def is_completed(self):
        return self._ending.completed()

    def is_success(self):
        return self.is_completed() and self._ending.failure is None

    def exception(self):
        return self._ending.failure if self.is_completed() else None

    def synchronize(self):
        self.wait()

    def result(self):
        return self._tensors

    def source_rank(self):
        try:
            return self._work.source
        except FsdpError as error:
            raise in_torch(error) from None

    _source_rank = source_rank

    def get_future(self):
        """A future of the list of output tensors. The library's thread completes it, unless it is complete already."""
        with self._lock:
            first = self._future is None
            if first:
                self._future = _Future()
        if first:
            self._work.on_done(self._complete)
        return self._future

    def _complete(self, _):
        self._ending.finish()
        if self._ending.failure is None:
            self._future.set_result(self._tensors)
        else:
            self._future.set_exception(self._ending.failure)


# ---- Futures ---------------------------------------------------------------------------------------------------------


class _Future(torch.futures.Future):
    """A future whose Python callbacks run on a thread of their own: one of them may wait for another operation, which
    the library's thread, by which this future is completed, has to run. What C++ chains to it is not concerned. A wait
    for it answers Ctrl-C."""

    def wait(self):
        if not self.done():
            done = threading.Event()
            super().add_done_callback(lambda _: done.set())
            done.wait()
        return super().wait()

    def then(self, callback):
        result = _Future()

        def call(future):
            try:
                result.set_result(callback(future))
            except Exception as failure:
                result.set_exception(failure)

        self.add_done_callback(call)
        return result

    def add_done_callback(self, callback):
        if self.done():
            return super().add_done_callback(lambda _: callback(self))

        def run():
            try:
                callback(self)
            finally:
                _threads.discard(threading.current_thread())

        def start(_):
            thread = threading.Thread(target=run, name="libfsdp future", daemon=True)
            _threads.add(thread)
            thread.start()

        super().add_done_callback(start)


_threads = set()  # that run callbacks of futures


@atexit.register
def _finish_callbacks():
    """A thread that wants the interpreter while it ends takes the process down, where it has C++ below it. One that waits
    for another rank is left to the end of its group."""
    deadline = time.monotonic() + 1
    for thread in list(_threads):
        thread.join(max(0, deadline - time.monotonic()))
