"""Options of a group of a host, for the `pg_options` of init_process_group and new_group."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """How a group of the backend "fsdp" talks. All ranks give the same; None is the library's own choice.

    staging_bytes  shared memory for staging, for each rank
    direct_read    read peers' memory directly: True always, False never
    spin_us        how long a wait spins before it sleeps; 0: never
    interruptible  what Ctrl-C does while a collective waits for other ranks. Either way it raises KeyboardInterrupt
                   within 0.2 s. False: the group ends, and the other ranks are told by which one; True: the operation
                   and the group go on, for a hand-off to another thread in each call, several times what a small one
                   takes otherwise. None: True in an interactive session. What fully_shard waits for always is as with
                   False
    """

    staging_bytes: int = None
    direct_read: bool = None
    spin_us: int = None
    interruptible: bool = None


def group_options(options, module):
    """What `with_options` takes, of an Options or None. module: where the host's users find Options."""
    if options is None:
        return {}
    if not isinstance(options, Options):
        raise TypeError(
            f"pg_options: a {type(options).__name__} is for another backend; give {module}.Options(...) or nothing"
        )
    if options.interruptible not in (None, True, False):
        raise TypeError(f"pg_options: interruptible is {options.interruptible!r}, and not True, False or None")
    return vars(options)


def with_options(make, *arguments, interruptible=None, **options):
    """The libfsdp.Group, or None, that a function of libfsdp makes with what group_options gave."""
    group = make(*arguments, **options)
    if group is not None and interruptible is not None:
        group.interruptible = interruptible
    return group
