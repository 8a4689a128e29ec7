"""How the ranks of a group meet: through the store that torch has made already, as hosts.rendezvous has it."""

import datetime
import time

from ..hosts import rendezvous


class _Service(rendezvous.Service):
    """A torch store, with a prefix before its keys."""

    def wait(self, key, timeout):
        end = time.monotonic() + timeout
        try:
            self._store.wait([self._prefix + key], datetime.timedelta(seconds=timeout))
        except RuntimeError as error:  # a DistStoreError in newer ones; says the same for a store that has gone
            if time.monotonic() >= end - 0.01 or "timeout" in str(error).lower():
                raise TimeoutError(str(error).partition("\n")[0]) from None
            raise


def meet(store, rank, size, name, timeout, options):
    """The libfsdp.Group of the `size` ranks that share a torch store. timeout: seconds, to meet and for operations."""

    def service(prefix):
        return _Service(store, f"libfsdp/{prefix}")

    return rendezvous.meet(service, rank, size, name, timeout, options)
