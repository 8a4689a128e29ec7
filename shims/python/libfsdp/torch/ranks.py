"""The ranks that a module is sharded over: a torch DeviceMesh, and the library's groups for it.

The mesh's own groups may be of any backend. Where the group of a one-dimensional mesh is of the backend "fsdp" its
library group is used; otherwise the ranks of the mesh meet once through torch's store, and later units over the same
ranks use the same group.
"""

import weakref

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ..errors import FsdpError
from ..mesh import Mesh
from ..model import Model
from .errors import in_torch
from .rendezvous import meet
from .work import seconds


class Ranks:
    """Of a mesh of one dimension (shards), or of two (replicas, shards).

    shards: False, on one dimension: all of its ranks are replicas, for units whose strategy is "no_shard". They may
    share a model with units that are sharded over the same ranks. spmd: the Spmd of which these ranks are the part that
    is data-parallel.
    """

    spmd = None

    def __init__(self, mesh, shards=True):
        self.mesh, self.shards = mesh, shards
        self.shard_group = mesh.get_group(mesh.ndim - 1)
        self.replicate_group = mesh.get_group(0) if mesh.ndim == 2 else None
        self.shard_size, self.shard_rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
        self.replicate_size = mesh.size(0) if mesh.ndim == 2 else 1
        self.replicate_rank = mesh.get_local_rank(0) if mesh.ndim == 2 else 0
        self._group = self.shard_group
        self._ranks = tuple(mesh.mesh.flatten().tolist())
        self.key = (self._ranks, mesh.ndim, self.replicate_size)
        if not shards:
            self.replicate_group, self.replicate_size = self.shard_group, self.shard_size
            self.replicate_rank = self.shard_rank
            self.shard_group, self.shard_size, self.shard_rank = None, 1, 0

    def model(self, name, **options):
        """A libfsdp.Model over these ranks. Collective."""
        try:
            if self.mesh.ndim == 1:
                return Model(_group_of(self._group, self._ranks), name, **options)
            group = _group_of(None, self._ranks)
            mesh = Mesh(group, {"replicate": self.replicate_size, "shard": self.shard_size})
            return Model(mesh, name, strategy="hybrid_shard", **options)
        except FsdpError as error:
            raise in_torch(error) from None


_groups = weakref.WeakValueDictionary()  # (the default group's name, ranks): libfsdp.Group
_met = {}  # and how often such ranks have met


def _group_of(process_group, ranks):
    own = getattr(process_group, "_group", None)
    if own is not None and getattr(process_group, "backend", None) == "fsdp":
        return own
    world = dist.group.WORLD
    key = (id(world), ranks)
    group = _groups.get(key)
    if group is None:
        _met[key] = _met.get(key, 0) + 1
        store = dist.PrefixStore(f"libfsdp/mesh/{'-'.join(map(str, ranks))}/{_met[key]}/", _get_default_store())
        rank = ranks.index(dist.get_rank())
        timeout = seconds(dist.distributed_c10d.default_pg_timeout)
        group = _groups[key] = meet(store, rank, len(ranks), f"mesh of {len(ranks)}", timeout, {})
    return group


def group_over(ranks):
    """The library's group of these ranks, in this order; None without a process group. Collective over them."""
    if not dist.is_initialized():
        return None
    every = tuple(range(dist.get_world_size()))
    ranks = every if ranks is None else tuple(ranks)
    return _group_of(dist.group.WORLD if ranks == every else None, ranks)


def default_mesh():
    """All ranks; without a process group, one is made as the environment says, and of this process alone where it says
    nothing."""
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        import os

        if "RANK" in os.environ:
            dist.init_process_group("fsdp")
        else:
            dist.init_process_group("fsdp", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (dist.get_world_size(),))


def check_mesh(mesh):
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
    check_device(mesh)


def check_device(mesh):
    if torch.device(mesh.device_type).type != "cpu":
        raise ValueError(
            f"fully_shard of libfsdp shards host memory, and this mesh is of {mesh.device_type}: give a mesh of 'cpu', or "
            "use torch.distributed.fsdp.fully_shard"
        )
