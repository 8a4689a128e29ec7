"""The ranks that a module is sharded over: a TensorPlay DeviceMesh, and the library's groups for it.

Which dimensions of a mesh shard and which replicate, and what is wrong with a mesh, says TensorPlay's own
`_get_mesh_info`. The mesh's groups may be of any backend. Where one of the backend "fsdp" has the mesh's ranks in the
mesh's order, its library group is used; otherwise these ranks meet once through TensorPlay's store, and later units
over the same ranks use the same group.
"""

import weakref

from tensorplay.distributed import distributed_core as core
from tensorplay.distributed.fsdp._fully_shard import _fsdp_init
from tensorplay.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from ..hosts.rendezvous import meet
from ..mesh import Mesh
from ..model import Model
from .engine import Engine
from .store import Service

_DEFAULT_MESH, _GROUPS = "_libfsdp_mesh", "_libfsdp_groups"  # what the default process group keeps for us


class Ranks:
    """Of a mesh: shards; replicas and shards; or, with dp_mesh_dims, replicas only, for units whose strategy is "no_shard".
    These share a model with units that are sharded over the same ranks."""

    def __init__(self, mesh, dp_mesh_dims):
        if str(getattr(mesh, "device_type", "cpu")).partition(":")[0] != "cpu":
            raise ValueError(
                f"fully_shard of libfsdp shards host memory, and this mesh is of {mesh.device_type}: give a mesh of "
                "'cpu', or use tensorplay.distributed.fsdp.fully_shard"
            )
        info = _fsdp_init._get_mesh_info(mesh, dp_mesh_dims)
        self.mesh = info.mesh
        self.shards = isinstance(info, FSDPMeshInfo)
        self.shard_group = getattr(info, "shard_process_group", None)
        self.shard_size, self.shard_rank = info.shard_world_size, getattr(info, "shard_mesh_rank", 0)
        self.replicate_size = info.replicate_world_size
        self.replicate_group = getattr(info, "replicate_process_group", None)
        self._ranks = tuple(_fsdp_init._flatten_mesh_value(info.mesh.mesh))
        self.replicate_rank = self._ranks.index(_rank()) // self.shard_size if self.replicate_size > 1 else 0
        self._shard_group = None  # the library's, of the shard dimension
        self.key = (self._ranks, self.replicate_size if self.shards else 1)

    def model(self, name, **options):
        """A libfsdp.Model over these ranks. Collective."""
        group = self._group()
        if not self.shards or self.replicate_size == 1:
            return Model(group, name, **options)
        mesh = Mesh(group, {"replicate": self.replicate_size, "shard": self.shard_size})
        return Model(mesh, name, strategy="hybrid_shard", **options)

    def over_shards(self):
        """The library's group of the ranks that hold the shards of one replica. Collective over all the first time."""
        if self._shard_group is None:
            group = self._group()
            if self.replicate_size > 1:
                group = Mesh(group, {"replicate": self.replicate_size, "shard": self.shard_size}).group("shard")
            self._shard_group = group
        return self._shard_group

    def _group(self):
        return group_over(self._ranks, self.shard_group)


def _rank():
    return core.get_rank() if core.is_initialized() else 0


def group_over(ranks, known=None):
    """The library's group of these ranks, in this order; None: all. Without a process group, one of this process alone.
    Collective over them the first time. known: a process group that may be of them."""
    if not core.is_initialized() or len(ranks or ()) == 1:
        return meet(None, 0, 1, "mesh of 1", None, {})
    world = core._check_default_pg()
    ranks = tuple(range(core.get_world_size())) if ranks is None else tuple(ranks)
    for group in (known, world):
        if group is not None and tuple(group.ranks) == ranks and isinstance(group.gloo_pg, Engine):
            return group.gloo_pg._on.group
    groups = vars(world).setdefault(_GROUPS, weakref.WeakValueDictionary())
    group = groups.get(ranks)
    if group is None:
        prefix = f"libfsdp/mesh/{'-'.join(map(str, ranks))}/"
        store = core._current_store()
        group = groups[ranks] = meet(
            lambda more: Service(store, prefix + more),
            ranks.index(core.get_rank()),
            len(ranks),
            f"mesh of {len(ranks)}",
            world._timeout_s,
            {},
        )
    return group


def default_mesh():
    """All ranks; of this process alone where there is no process group. The same one for every call."""
    if not core.is_initialized():
        return _fsdp_init._init_default_mesh("cpu")
    kept = vars(core._check_default_pg())
    if _DEFAULT_MESH not in kept:
        kept[_DEFAULT_MESH] = _fsdp_init._init_default_mesh("cpu")
    return kept[_DEFAULT_MESH]
