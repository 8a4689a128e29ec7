"""Work handles of the engine: what TensorPlay's own Work wraps.

Its waits are in milliseconds, negative for none. One that runs out gives False and the operation goes on, as on gloo;
only the time that the operation itself may take ends the group.
"""

import time

from ..errors import FsdpError, Pending, Timeout
from ..hosts.work import Ending


class Done:
    """What was run to its end before the call returned."""

    def wait(self, timeout_ms=-1):
        return True

    def is_completed(self):
        return True

    def result(self):
        return []

    def source_rank(self):
        return -1

    def abort(self):
        raise RuntimeError("the operation is over; there is nothing to abort")


class Work:
    """An operation that goes on. Keeps its tensors, and the library's group, until it is complete."""

    def __init__(self, work, tensors, after, timeout, collectives):
        """timeout: seconds that the operation may take from now on, None: as long as the group's own timeout."""
        self._ending = Ending(work, after)
        self._tensors = tensors
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._collectives = collectives

    def wait(self, timeout_ms=-1):
        """True when the operation is complete, False when timeout_ms passed first. Raises what it failed with."""
        ending = self._ending
        now = time.monotonic()
        until = None if timeout_ms < 0 else now + timeout_ms / 1000
        if self._deadline is not None and (until is None or self._deadline < until):
            until = self._deadline
        try:
            ending.work.wait(None if until is None else max(0, until - now))
        except Pending:
            if until is not self._deadline:
                return False
            message = f"an operation was not complete after {self._timeout:g} s, the timeout of its process group"
            self._collectives.end(message)
            raise Timeout(message) from None
        except FsdpError:
            pass  # `finish` finds it
        ending.finish()
        if ending.failure is not None:
            raise ending.failure
        return True

    def is_completed(self):
        return self._ending.completed()

    def result(self):
        return list(self._tensors)

    def source_rank(self):
        """The rank in the group whose message a complete recv took."""
        return self._ending.work.source

    def abort(self):
        """End the group, here and on the other ranks: an operation can't be taken back alone."""
        self._collectives.end(f"rank {self._collectives.rank} aborted an operation")
