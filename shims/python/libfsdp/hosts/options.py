"""Options of a group of a host, for the `pg_options` of init_process_group and new_group."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """How a group of the backend "fsdp" talks. All ranks give the same; None is the library's own choice.

    staging_bytes  shared memory for staging, for each rank
    direct_read    read peers' memory directly: True always, False never
    spin_us        how long a wait spins before it sleeps; 0: never
    """

    staging_bytes: int = None
    direct_read: bool = None
    spin_us: int = None


def group_options(options, module):
    """What libfsdp.Group takes, of an Options or None. module: where the host's users find Options."""
    if options is None:
        return {}
    if not isinstance(options, Options):
        raise TypeError(
            f"pg_options: a {type(options).__name__} is for another backend; give {module}.Options(...) or nothing"
        )
    return {"staging_bytes": options.staging_bytes, "direct_read": options.direct_read, "spin_us": options.spin_us}
