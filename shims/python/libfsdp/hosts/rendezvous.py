"""How the ranks of a host's group meet: through the key-value store that the host has made already.

A store may outlive a group (a launcher keeps one for all), and a second group of the same name must not read what the
first one left. Making a group is collective, so the ranks that arrive count themselves in the store: the first `size`
of them are the first group, the next the second.
"""

from ..group import Group
from ..store import Store
from .interrupt import watch
from .options import with_options


class Service:
    """A host's store as libfsdp.Store.from_callbacks wants it, with a prefix before its keys. A subclass says how the host
    waits: wait(key, timeout), which raises TimeoutError when that many seconds have passed."""

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


def meet(service, rank, size, name, timeout, options):
    """The libfsdp.Group of the `size` ranks that share a store.

    service: a function that takes a prefix and gives the store, with that prefix before its keys, as
    libfsdp.Store.from_callbacks wants it. The prefix is to be the same on all ranks and no other group's.
    timeout: seconds, to meet and for operations. options: of group_options. Raises what Store and Group raise.
    """
    if size == 1:
        return with_options(Group, None, name=name, timeout=timeout, **options)
    watch()
    arrived = service("").add("arrived", 1)
    with Store.from_callbacks(
        service(f"{(arrived - 1) // size}/"), rank=rank, world_size=size, timeout=timeout
    ) as meeting:
        return with_options(Group, meeting, name=name, timeout=timeout, **options)
