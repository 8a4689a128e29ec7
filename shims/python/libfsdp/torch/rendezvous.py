"""How the ranks of a group meet: through the store that torch has made already.

The library asks a host's key-value service; here that is the torch store of the group, under a prefix of its own for
each time that a group of this name is made. A store may outlive a group (torchrun keeps one for all), and a second
group of the same name must not read what the first one left. Making a group is collective, so the ranks that arrive
count themselves in the store: the first `size` of them are the first group, the next the second.
"""

import datetime
import time

from ..group import Group
from ..store import Store


class _Service:
    """A torch store as libfsdp.Store.from_callbacks wants it."""

    def __init__(self, store, prefix):
        self._store = store
        self._prefix = prefix

    def set(self, key, value):
        self._store.set(self._prefix + key, value)

    def get(self, key, timeout):
        self.wait(key, timeout)
        return self._store.get(self._prefix + key)

    def add(self, key, amount):
        return self._store.add(self._prefix + key, amount)

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
    if size == 1:
        return Group(None, name=name, timeout=timeout, **options)
    arrived = store.add("libfsdp/arrived", 1)
    service = _Service(store, f"libfsdp/{(arrived - 1) // size}/")
    with Store.from_callbacks(service, rank=rank, world_size=size, timeout=timeout) as meeting:
        return Group(meeting, name=name, timeout=timeout, **options)
