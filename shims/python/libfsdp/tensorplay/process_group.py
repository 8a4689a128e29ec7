"""ProcessGroup: a group on libfsdp beside a default group of any backend.

TensorPlay takes it wherever it takes a group. For its functions it is one of gloo's whose engine is ours, so nothing of
TensorPlay needs to be replaced for it.
"""

import datetime

import tensorplay.distributed as dist

from .engine import key_of
from .register import create


class ProcessGroup(dist.ProcessGroup):
    """A group of `ranks` (of the default group; None: all of them), which these ranks make together; others don't call.

    timeout     a timedelta, to meet and for each operation; None: the default group's
    group_name  the same on all its ranks; None: by the ranks, and by how many such groups they have made before
    pg_options  a libfsdp.tensorplay.Options
    """

    def __init__(self, ranks=None, *, timeout=None, group_name=None, pg_options=None):
        core = dist.distributed_core
        world = core._check_default_pg()
        ranks = list(world.ranks if ranks is None else ranks)
        if len(set(ranks)) != len(ranks) or not set(ranks) <= set(world.ranks):
            raise ValueError(f"ranks: {ranks}; give different ranks of the default group, 0 .. {world.size() - 1}")
        rank = core._global_rank()
        if rank not in ranks:
            raise ValueError(f"ranks: {ranks} are without this rank, {rank}; only the group's own ranks make it")
        name = group_name or _name(ranks)
        if name in core._groups:
            raise ValueError(f"group_name: there is a group {name!r} already; give another name")
        super().__init__(ranks, name, backend="gloo")
        timeout = datetime.timedelta(seconds=world._timeout_s) if timeout is None else timeout
        self._timeout_s = timeout.total_seconds()
        self._backend_config = "cpu:gloo"
        self.gloo_pg = create(
            core._current_store(), ranks.index(rank), ranks, timeout, group_name=name, pg_options=pg_options
        )
        core._groups[name] = self


_made = {}  # ranks: how many groups of these were made by this process


def _name(ranks):
    key = tuple(ranks)
    _made[key] = _made.get(key, 0) + 1
    return f"fsdp:{key_of(ranks)}#{_made[key]}"
