"""Work handles: what a collective with async_op=True gives to Python, and to torch's C++ code, which only waits and
asks for a future.

Some operations have something left to do when the library is done: results of a list that went through one buffer are
copied to their tensors. `_finish` does that, once, on whichever thread comes first: one that waits or asks, or the
library's own, which calls back when the operation is complete. So a Work that nobody keeps ends as well.
"""

import threading

import torch
import torch.distributed as dist

from ..errors import FsdpError, Pending
from .errors import Timeout, in_torch


def seconds(timeout):
    """A datetime.timedelta, or a number of seconds, as seconds; None for none: torch says that with 0 or less."""
    if timeout is None:
        return None
    value = timeout.total_seconds() if hasattr(timeout, "total_seconds") else float(timeout)
    return value if value > 0 else None


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


class Work(dist.Work):
    """An operation that goes on. Keeps its tensors, and its group, until it is complete."""

    def __init__(self, work, group, tensors, after=None):
        super().__init__()
        self._work = work
        self._group = group
        self._tensors = tensors
        self._after = after
        self._failure = None
        self._finished = False
        self._future = None
        self._lock = threading.Lock()
        if after is not None:
            work.on_done(self._finish)

    def wait(self, timeout=None):
        """Wait to the end; raise what the operation failed with. A timeout that passes first ends the whole group,
        for all ranks, as it does on gloo: its tensors are still being written, so there is nothing that could go
        on."""
        limit = seconds(timeout) if timeout is not None else None
        try:
            self._work.wait(limit)
        except Pending:
            message = f"an operation was not complete after {limit:g} s, as long as Work.wait was told to wait"
            self._group.end(message)
            raise Timeout(message) from None
        except FsdpError as error:
            raise in_torch(error) from None
        if self._after is not None:  # until it is done, on whichever thread
            self._finish()
        if self._failure is not None:
            raise self._failure
        return True

    def is_completed(self):
        if not self._work.test():
            return False
        self._finish()
        return True

    def is_success(self):
        return self.is_completed() and self._failure is None

    def exception(self):
        return self._failure if self.is_completed() else None

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
                self._future = torch.futures.Future()
        if first:
            self._work.on_done(self._complete)
        return self._future

    def _finish(self, _=None):
        """After the library's part: the rest, and the failure in torch's terms. Who comes second waits for the
        first."""
        with self._lock:
            if self._finished:
                return
            error = self._work.error
            if error is not None:
                self._failure = in_torch(error)
            elif self._after is not None:
                try:
                    self._after()
                except Exception as failure:
                    self._failure = failure
            self._after = None
            self._finished = True

    def _complete(self, _):
        self._finish()
        if self._failure is None:
            self._future.set_result(self._tensors)
        else:
            self._future.set_exception(self._failure)
