"""FullyShardedDataParallel for TensorPlay: the names and arguments of tensorplay.distributed.fsdp's class, on the
library.

    from libfsdp.tensorplay import FullyShardedDataParallel as FSDP

    model = FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({Block}))

The wrapped module is the child "module"; parameters stay the objects that they were and hold this rank's shard. Sharded
and local state dicts hold shards, plain tensors; the default, a full one, whole tensors. What is here is TensorPlay's
side only; the rest is libfsdp.hosts.classic.
"""

import tensorplay as tp
import tensorplay.distributed as dist
import tensorplay.distributed.fsdp as api
from tensorplay import nn
from tensorplay.distributed.device_mesh import DeviceMesh
from tensorplay.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    DataParallelMeshDims,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from ..hosts import wrap
from ..hosts.classic import ClassicHost, Policy, Wrapper
from ..hosts.classic_names import NAMES
from ..tensor import shard_extent
from .host import TensorPlayHost
from .ranks import Ranks, default_mesh

__all__ = ["FullyShardedDataParallel", *NAMES]

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_STAYS_FULL = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
_BACKWARD = {BackwardPrefetch.BACKWARD_PRE: "pre", BackwardPrefetch.BACKWARD_POST: "post", None: None}


class _Host(ClassicHost, TensorPlayHost):
    api = api
    SummonMisuse = ValueError

    def check_parameter(self, parameter, name):
        super().check_parameter(parameter, name)
        if not tuple(parameter.shape):
            raise ValueError(
                "fully_shard does not support scalar parameters; use a one-dimensional parameter: "
                f"{name!r} has no dimension"
            )

    def broadcast(self, tensor, group):
        dist.broadcast(tensor, group_src=0, group=group)

    def norm(self, tensor, p):
        return tp.linalg.vector_norm(tensor.to(tp.float64), p).item() if tensor.numel() else 0.0

    def norm_tensor(self, norm, gradients):
        dtype = tp.float32
        if gradients:
            dtype = gradients[0].dtype
            for grad in gradients:
                dtype = tp.promote_types(dtype, grad.dtype)
        return tp.tensor(norm, dtype=dtype)

    def whole_parameter(self, tensor, placement, requires_grad):
        return nn.Parameter(tensor, requires_grad=requires_grad)

    def shard_of_value(self, value, param, ranks, local):
        if tuple(value.shape) != param.shape:
            return value  # a shard, or what the module says
        dim = param.placement.dim
        start, length = shard_extent(param.shape[dim], ranks.shard_rank, ranks.shard_size)
        return value.detach().narrow(dim, start, length).contiguous()

    def gathered(self, local, param, ranks):
        if ranks.shard_size == 1:
            return local.detach().clone()
        dim, shape = param.placement.dim, param.shape
        rows = [shard_extent(shape[dim], rank, ranks.shard_size)[1] for rank in range(ranks.shard_size)]
        part = local.detach().movedim(dim, 0).contiguous()
        whole = tp.empty((shape[dim], *part.shape[1:]), dtype=local.dtype)
        ranks.over_shards().all_gather(part, whole, rows=rows)
        return whole if dim == 0 else whole.movedim(0, dim).contiguous()

    def rank(self, group):
        return dist.get_rank(group) if dist.is_initialized() else 0

    def all_gather_object(self, value, group):
        values = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return values

    def broadcast_object(self, value, group):
        values = [value]
        dist.broadcast_object_list(values, group_src=0, group=group)
        return values[0]


HOST = _Host()


class FullyShardedDataParallel(Wrapper, nn.Module):
    """Wrap a module: its parameters are sharded over the ranks, whole while its forward and backward need them.

    The arguments mean what they mean for libfsdp.torch's. process_group: None works without a process group too, alone;
    device_mesh: of two dimensions for hybrid strategies, replicas first.
    """

    host = HOST
    _wrapped_name = "module"

    def __init__(
        self,
        module,
        process_group=None,
        sharding_strategy=None,
        cpu_offload=None,
        auto_wrap_policy=None,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=None,
        ignored_modules=None,
        param_init_fn=None,
        device_id=None,
        sync_module_states=False,
        forward_prefetch=False,
        limit_all_gathers=True,
        use_orig_params=False,
        ignored_states=None,
        device_mesh=None,
        *,
        _full_precision=False,
    ):
        if not isinstance(module, nn.Module):
            raise TypeError("module must be an instance of Module")
        if process_group is not None and device_mesh is not None:
            raise ValueError("process_group and device_mesh are mutually exclusive")
        if ignored_modules is not None and ignored_states is not None:
            raise ValueError("ignored_modules and ignored_states cannot both be supplied")
        super().__init__()
        if device_id is not None and str(getattr(device_id, "type", device_id)).partition(":")[0] != "cpu":
            raise ValueError(
                f"device_id: {device_id!r}; libfsdp shards host memory: give 'cpu' or nothing, or use "
                "tensorplay.distributed.fsdp.FullyShardedDataParallel"
            )
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        if not isinstance(strategy, ShardingStrategy):
            raise ValueError(f"sharding_strategy: {strategy!r} is not a ShardingStrategy")
        if backward_prefetch not in _BACKWARD:
            raise ValueError(f"backward_prefetch: {backward_prefetch!r} is not a BackwardPrefetch or None")
        ignored = wrap.Ignored(HOST, module, ignored_modules, ignored_states)
        mesh = _mesh(strategy, process_group) if device_mesh is None else device_mesh
        if auto_wrap_policy is not None:
            options = {
                "process_group": None,
                "sharding_strategy": sharding_strategy,
                "cpu_offload": cpu_offload,
                "backward_prefetch": backward_prefetch,
                "mixed_precision": mixed_precision,
                "param_init_fn": param_init_fn,
                "device_id": device_id,
                "sync_module_states": sync_module_states,
                "forward_prefetch": forward_prefetch,
                "limit_all_gathers": limit_all_gathers,
                "use_orig_params": use_orig_params,
                "ignored_states": ignored.params,
                "device_mesh": mesh,
            }
            kept = () if mixed_precision is None else tuple(mixed_precision._module_classes_to_ignore)
            wrap.auto_wrap(HOST, module, auto_wrap_policy, ignored, options, type(self), kept)
        ranks = _ranks(strategy, mesh)
        self._set_up(
            module,
            ranks,
            ignored=ignored,
            reshard=False if strategy in _STAYS_FULL else None,
            policy=Policy.of(mixed_precision, _full_precision),
            param_init_fn=param_init_fn,
            sync_module_states=sync_module_states,
            model_options={
                "forward_prefetch": int(bool(forward_prefetch)),
                "backward_prefetch": _BACKWARD[backward_prefetch],
            },
        )
        self.process_group, self.device_mesh = process_group, mesh
        self.sharding_strategy = strategy
        self.cpu_offload, self.mixed_precision = cpu_offload or CPUOffload(), mixed_precision or MixedPrecision()

    @classmethod
    def get_state_dict_type(cls, module):
        """As Wrapper's, but a module without wrappers is an error here."""
        settings = super().get_state_dict_type(module)
        if settings is None:
            raise ValueError("module does not contain a fully sharded wrapper")
        return settings

    def full_optim_state_dict(self, optim, optim_input=None, rank0_only=True, group=None):
        """An optimizer's state, whole tensors keyed by name; with rank0_only {} on other ranks. Collective."""
        return FullyShardedDataParallel._full_optim_state_dict(self, optim, optim_input, rank0_only, group)

    def sharded_optim_state_dict(self, optim, group=None):
        """An optimizer's state, shards keyed by name. Collective."""
        return FullyShardedDataParallel._sharded_optim_state_dict(self, optim, group)


def _mesh(strategy, process_group):
    if process_group is None:
        return default_mesh()
    groups = process_group if isinstance(process_group, tuple) else (process_group,)
    if strategy not in _HYBRID:
        if len(groups) != 1:
            raise ValueError("process_group: a tuple of groups is for HYBRID_SHARD; give one group, that of the shards")
        ranks = dist.get_process_group_ranks(groups[0])
        return DeviceMesh.from_group(groups[0], device_type="cpu", mesh=ranks, mesh_dim_names=("dp",))
    if len(groups) != 2:
        raise ValueError("process_group: HYBRID_SHARD takes two groups: (that of the shards, that of the replicas)")
    shard, replicate = groups
    rows = [None] * len(dist.get_process_group_ranks(replicate))
    dist.all_gather_object(rows, list(dist.get_process_group_ranks(shard)), group=replicate)
    mesh = DeviceMesh("cpu", rows, mesh_dim_names=("replicate", "shard"))
    mesh._dim_groups = {0: replicate, 1: shard}
    return mesh


def _ranks(strategy, mesh):
    if mesh.ndim != 1 and strategy not in _HYBRID:
        raise ValueError(f"{strategy} shards over one dimension, and device_mesh has {mesh.ndim}: give HYBRID_SHARD")
    dims = None
    if strategy is ShardingStrategy.NO_SHARD:
        if mesh.mesh_dim_names is None:
            mesh = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=("dp",))
        dims = DataParallelMeshDims(replicate=mesh.mesh_dim_names[0])
    ranks = Ranks(mesh, dims)
    ranks.is_first = not dist.is_initialized() or dist.get_rank() == ranks._ranks[0]
    return ranks


from . import state_dict  # noqa: E402, last: it imports this module

state_dict.replace()
