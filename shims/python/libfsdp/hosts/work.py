"""The end of an operation that goes on: what hosts' work handles have in common.

Some operations have something left to do when the library is done: results of a list that went through one buffer are
copied to their tensors. `finish` does that, once, on whichever thread comes first: one that waits or asks, or the
library's own, which calls back when the operation is complete. So a work that nobody keeps ends as well.
"""

import threading


class Ending:
    """One operation under way, a libfsdp.Work, and what is left to do after it.

    work     the library's
    failure  the exception that the operation ended with, None for none; defined once `finish` has returned
    """

    def __init__(self, work, after=None, raised=None):
        """after: what is left to do, or None. raised: turns the library's exceptions into the host's."""
        self.work = work
        self.failure = None
        self._after = after
        self._raised = raised or (lambda error: error)
        self._finished = False
        self._lock = threading.Lock()
        if after is not None:
            work.on_done(self.finish)

    def finish(self, _=None):
        """Do what is left, once the library is done. Who comes second waits for the first."""
        with self._lock:
            if self._finished:
                return
            error = self.work.error
            if error is not None:
                self.failure = self._raised(error)
            elif self._after is not None:
                try:
                    self._after()
                except Exception as failure:
                    self.failure = failure
            self._after = None
            self._finished = True

    def completed(self):
        """Whether all of it is done, well or not. Never blocks for other ranks."""
        if not self.work.test():
            return False
        self.finish()
        return True
