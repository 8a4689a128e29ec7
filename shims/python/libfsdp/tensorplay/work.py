"""Work handles of the engine: what TensorPlay's own Work wraps.

Its waits are in milliseconds, negative for none. One that runs out gives False and the operation goes on, as on gloo.
"""

from ..errors import FsdpError, Pending
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

    def __init__(self, work, tensors, after, collectives):
        self._ending = Ending(work, after)
        self._tensors = tensors
        self._collectives = collectives

    def wait(self, timeout_ms=-1):
        """True when the operation is complete, False when timeout_ms passed first. Raises what it failed with."""
        ending = self._ending
        try:
            ending.work.wait(None if timeout_ms < 0 else timeout_ms / 1000)
        except Pending:
            return False
        except FsdpError:
            pass  # which `finish` finds
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
