"""How the ranks of a host's group meet: through the key-value store that the host has made already.

A store may outlive a group (a launcher keeps one for all), and a second group of the same name must not read what the
first one left. Making a group is collective, so the ranks that arrive count themselves in the store: the first `size`
of them are the first group, the next the second.
"""

from ..group import Group
from ..store import Store


def meet(service, rank, size, name, timeout, options):
    """The libfsdp.Group of the `size` ranks that share a store.

    service: a function that takes a prefix and gives the store, with that prefix before its keys, as
    libfsdp.Store.from_callbacks wants it. The prefix is to be the same on all ranks and no other group's.
    timeout: seconds, to meet and for operations. Raises what Store and Group raise.
    """
    if size == 1:
        return Group(None, name=name, timeout=timeout, **options)
    arrived = service("").add("arrived", 1)
    with Store.from_callbacks(
        service(f"{(arrived - 1) // size}/"), rank=rank, world_size=size, timeout=timeout
    ) as meeting:
        return Group(meeting, name=name, timeout=timeout, **options)
