"""ProcessGroup: a group of the library as torch.distributed wants a group: what it is, how it is made, and its end.
What it does is in operations.py.

Threads: any; operations take effect in the order of the calls, which is the same on all ranks.
"""

import torch
import torch.distributed as dist

from .. import abi
from ..errors import FsdpError
from ..hosts.collectives import Collectives
from ..hosts.options import group_options, with_options
from .errors import in_torch
from .names import Names
from .operations import Operations
from .rendezvous import meet
from .tensors import MEMORY
from .work import DONE, Work, seconds


class ProcessGroup(Operations, Names, dist.ProcessGroup):
    """A group of the backend "fsdp". Made by init_process_group, new_group and init_device_mesh."""

    backend = "fsdp"
    _is_part = False  # made by split_group, and so not by torch

    def __init__(self, options, backend_options=None):
        """options: what torch hands to a backend's creator (store, group_rank, group_size, timeout, group_id)."""
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        own = group_options(backend_options, __package__)
        name = f"fsdp:{options.group_id}"[:63]
        try:
            group = meet(options.store, rank, size, name, seconds(options.timeout), own)
        except FsdpError as error:
            raise in_torch(error) from error.__cause__
        self._take(group, options.store, str(options.group_id))

    def _take(self, group, store, name):
        self._group = group
        self._pointer = abi.c_void_p(group._handle._as_parameter_)
        self._torch_store = store
        self._name = name
        self._description = "undefined"
        self._operations = Collectives(group, MEMORY, Work, DONE, in_torch)

    # ---- What a group is ---------------------------------------------------------------------------------------------

    def getBackendName(self):
        return self.backend

    _get_backend_name = name = getBackendName

    def getGroupName(self):
        return self._name

    def setGroupName(self, name):
        self._name = str(name)

    def getGroupDesc(self):
        return self._description

    def setGroupDesc(self, description):
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def get_group_store(self):
        return self._torch_store

    @property
    def _device_types(self):
        """What torch's checkpoints look at. Nothing while torch makes the group: 2.15 attaches a recorder in C++ then to
        one that names devices, which needs what a class of Python's does not have."""
        made = self._is_part or self in dist.distributed_c10d._world.pg_map
        return [torch.device("cpu")] if made else []

    def _get_backend(self, device):
        if torch.device(device).type != "cpu":
            kind = torch.device(device).type
            raise RuntimeError(f"No backend type associated with device type {kind}: 'fsdp' is for cpu")
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def supports_tensor_alloc(self, device):
        return False

    def _set_sequence_number_for_group(self):
        pass

    def _get_sequence_number_for_group(self):
        return self._group.info().operations

    def _has_hooks(self):
        return False

    def _wait_for_pending_works(self):
        pass

    def __repr__(self):
        state = "closed" if self._group._owned is None else f"rank {self.rank()} of {self.size()}"
        return f"<libfsdp.torch.ProcessGroup {self._name!r} {state}>"

    # ---- Its end -----------------------------------------------------------------------------------------------------

    def abort(self):
        """torch's: end the group at once, here and on the other ranks."""
        self._operations.end(f"rank {self.rank()} aborted the process group")
        self._group.close()

    def shutdown(self):
        """destroy_process_group's: leave, after this rank's operations. A peer that then waits for this rank is told.
        Operations that other ranks don't join within a few seconds end the group, instead of keeping this rank."""
        self._operations.leave()

    def split_group(self, ranks, timeout=None, opts=None, group_name=None, group_desc=None):
        """A group of some of this one's ranks, in that order. Every rank of this group calls it, with the ranks of
        its own part; a rank that is not among those it gives gets None."""
        ranks = list(ranks)
        mine = self.rank() in ranks
        options = group_options(opts if opts is None or hasattr(opts, "spin_us") else None, __package__)
        try:
            color, key = (min(ranks), ranks.index(self.rank())) if mine else (None, 0)
            options = {"interruptible": self._group.interruptible} | options
            group = with_options(self._group.split, color, key, timeout=seconds(timeout), **options)
        except FsdpError as error:
            raise in_torch(error) from None
        if group is None:
            return None
        part = ProcessGroup.__new__(ProcessGroup)
        dist.ProcessGroup.__init__(part, group.rank, group.size)
        part._take(group, self._torch_store, group_name or group.name)
        part._description = group_desc or "undefined"
        part._is_part = True
        return part

    splitGroup = split_group

    def mergeRemoteGroup(self, *arguments, **options):
        raise NotImplementedError("the backend 'fsdp' can't take in ranks of another job; make a new group of all")

    merge_remote_group = mergeRemoteGroup
