"""FullyShardedDataParallel for torch: the names, arguments and results of torch.distributed.fsdp's class, on the
library.

    from libfsdp.torch import FullyShardedDataParallel as FSDP

    model = FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({Block}), sharding_strategy=ShardingStrategy.FULL_SHARD)

Parameters are DTensors over the ranks' mesh, as those of fully_shard, whether use_orig_params is True or False: there
is no flat parameter, so frozen and trainable parameters mix, and optimizers, clipping and checkpoints see each by its
name. What is here is torch's side only; the rest is libfsdp.hosts.classic.
"""

import weakref

import torch
import torch.distributed as dist
import torch.distributed.fsdp as api
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
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
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ..hosts import wrap
from ..hosts.classic import ClassicHost, Policy, Wrapper
from ..hosts.classic_names import NAMES
from ..tensor import shard_extent
from . import state_dict
from .host import Placement, TorchHost
from .ranks import Ranks, check_mesh, default_mesh

__all__ = ["FullyShardedDataParallel", *NAMES]

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_STAYS_FULL = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
_BACKWARD = {BackwardPrefetch.BACKWARD_PRE: "pre", BackwardPrefetch.BACKWARD_POST: "post", None: None}


def _compressed(dtype):
    """torch's hook of that dtype but for its end, which records a stream, and host memory has none."""

    def hook(state, grad, output=None):
        low = grad.to(dtype)
        if output is None:
            default_hooks.allreduce_hook(state, low)
            grad.copy_(low)
        else:
            part = output.to(dtype)
            default_hooks.reduce_scatter_hook(state, low, part)
            output.copy_(part)

    return hook


class _Host(ClassicHost, TorchHost):
    api = api
    KeyMisuse = AssertionError
    hooks = {
        default_hooks.fp16_compress_hook: _compressed(torch.float16),
        default_hooks.bf16_compress_hook: _compressed(torch.bfloat16),
    }

    def broadcast(self, tensor, group):
        local = self.local(tensor)
        dense = local.contiguous()
        dist.broadcast(dense, group=group, group_src=0)
        if dense is not local:
            local.copy_(dense)

    def norm(self, tensor, p):
        return torch.linalg.vector_norm(tensor, p, dtype=torch.float64).item()

    def norm_tensor(self, norm, gradients):
        dtype = torch.float32
        if gradients:
            dtype = gradients[0].dtype
            for grad in gradients:
                dtype = torch.promote_types(dtype, grad.dtype)
        return torch.tensor(norm, dtype=dtype)

    def placement(self, parameter, dim, ranks):
        if ranks.shards:
            return super().placement(parameter, dim, ranks)
        if isinstance(parameter, DTensor):
            inner = parameter._spec
            mesh = DeviceMesh._concatenate([ranks.mesh, inner.mesh])
            spec = DTensorSpec(mesh, (Replicate(), *inner.placements), tensor_meta=inner.tensor_meta)
            return Placement(dim, spec, inner)
        meta = TensorMeta(parameter.size(), parameter.stride(), parameter.dtype)
        return Placement(dim, DTensorSpec(ranks.mesh, (Replicate(),), tensor_meta=meta))

    def gradient(self, parameter, tensor):
        if tensor.dtype != parameter.dtype:  # keep_low_precision_grads
            parameter.grad_dtype = tensor.dtype
        return super().gradient(parameter, tensor)

    # ---- Whole parameters ----

    def whole_parameter(self, tensor, placement, requires_grad):
        return torch.nn.Parameter(self.whole_gradient(tensor, placement), requires_grad=requires_grad)

    def whole_gradient(self, tensor, placement):
        inner = placement.inner
        if inner is None:
            return tensor
        return DTensor.from_local(
            tensor, inner.mesh, inner.placements, run_check=False, shape=inner.shape, stride=inner.stride
        )

    def whole_value(self, tensor, placement):
        return self.whole_of(self.whole_gradient(tensor, placement))

    def whole_of(self, value):
        return value.full_tensor() if isinstance(value, DTensor) else value

    def whole_shape(self, param):
        return tuple(param.placement.spec.shape)

    def gathered(self, local, param, ranks):
        return DTensor(local.detach(), _of_dtype(param.placement.spec, local.dtype), requires_grad=False).full_tensor()

    def shard_of_value(self, value, param, ranks, local):
        spec, inner = param.placement.spec, param.placement.inner
        if isinstance(value, DTensor):
            if value.device_mesh == spec.mesh and tuple(value.placements) == tuple(spec.placements):
                return value
            value, local = value.full_tensor(), False
        if local:
            if tuple(value.shape) != tuple(self.local(param.parameter).shape):
                return value
        else:
            if tuple(value.shape) != tuple(spec.shape):
                return value
            if inner is not None:
                value = distribute_tensor(value, inner.mesh, inner.placements, src_data_rank=None).to_local()
            dim = param.placement.dim
            value = value.narrow(dim, *shard_extent(param.shape[dim], ranks.shard_rank, ranks.shard_size))
        return DTensor(value.detach().contiguous(), _of_dtype(spec, value.dtype), requires_grad=False)

    def legacy(self, name, replacement):
        api.FullyShardedDataParallel._warn_legacy_optim_state_dict(name, replacement, stacklevel=3)

    # ---- Objects ----

    def rank(self, group):
        return dist.get_rank(group)

    def all_gather_object(self, value, group):
        values = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return values

    def broadcast_object(self, value, group):
        values = [value]
        dist.broadcast_object_list(values, group=group, group_src=0)
        return values[0]


def _of_dtype(spec, dtype):
    """A DTensor's spec for values of another dtype: of an optimizer, say."""
    meta = spec.tensor_meta
    if meta.dtype == dtype:
        return spec
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, dtype))


HOST = _Host()
state_dict.replace()


class FullyShardedDataParallel(Wrapper, torch.nn.Module):
    """Wrap a module: its parameters are sharded over the ranks, whole while its forward and backward need them.

    module             not wrapped yet; its parameters but for those of wrappers below become one unit
    process_group      the ranks to shard over, all by default; for hybrid strategies (ranks to shard over, replicas)
    sharding_strategy  FULL_SHARD; SHARD_GRAD_OP: whole from forward to backward; NO_SHARD: whole always, gradients are
                       reduced; HYBRID_SHARD and _HYBRID_SHARD_ZERO2: sharded within a group, or a mesh's second
                       dimension, replicated over the other; without either over all ranks, which are on one host
    cpu_offload        parameters are in host memory already
    auto_wrap_policy   which modules below become wrappers: a policy or function of torch.distributed.fsdp.wrap
    backward_prefetch  when units are gathered ahead in backward; of the root
    mixed_precision    with auto_wrap_policy, modules of its _module_classes_to_ignore keep full precision
    ignored_modules, ignored_states   what stays as it is, whole on every rank, and is not reduced
    param_init_fn      module -> None, for modules on the meta device; else their reset_parameters()
    device_id          None or "cpu"
    sync_module_states   begin with the first rank's parameters and buffers
    forward_prefetch   whether units are gathered ahead in forward; of the root
    limit_all_gathers, use_orig_params   accepted: the library limits itself, and parameters are the original ones
    device_mesh        in place of process_group

    Raises ValueError for arguments that contradict each other, scalar parameters, parameters on other devices and
    parameters that another wrapper has; RuntimeError without a process group that the arguments need.
    """

    host = HOST

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
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module: a {type(module).__name__} is not an nn.Module")
        _check_device(device_id)
        strategy = ShardingStrategy.FULL_SHARD if sharding_strategy is None else sharding_strategy
        if not isinstance(strategy, ShardingStrategy):
            raise ValueError(f"sharding_strategy: {strategy!r} is not a ShardingStrategy")
        if backward_prefetch not in _BACKWARD:
            raise ValueError(f"backward_prefetch: {backward_prefetch!r} is not a BackwardPrefetch or None")
        ignored = wrap.Ignored(HOST, module, ignored_modules, ignored_states)
        ranks = _ranks(strategy, process_group, device_mesh)
        if auto_wrap_policy is not None:
            options = {
                "process_group": process_group,
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
                "device_mesh": device_mesh,
            }
            kept = () if mixed_precision is None else tuple(mixed_precision._module_classes_to_ignore)
            wrap.auto_wrap(HOST, module, auto_wrap_policy, ignored, options, type(self), kept)
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
        self.process_group = ranks.shard_group or ranks.replicate_group
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self.sharding_strategy = strategy
        self.cpu_offload, self.mixed_precision = cpu_offload or CPUOffload(), mixed_precision or MixedPrecision()
        self.compute_device = torch.device("cpu")

    @classmethod
    def full_optim_state_dict(cls, model, optim, optim_input=None, rank0_only=True, group=None):
        """An optimizer's state, whole tensors keyed by name; with rank0_only {} on other ranks. Collective."""
        HOST.legacy("full_optim_state_dict", "optim_state_dict")
        return cls._full_optim_state_dict(model, optim, optim_input, rank0_only, group)

    @classmethod
    def sharded_optim_state_dict(cls, model, optim, group=None):
        """An optimizer's state, DTensors keyed by name. Collective."""
        HOST.legacy("sharded_optim_state_dict", "optim_state_dict")
        return cls._sharded_optim_state_dict(model, optim, group)


def _check_device(device_id):
    if device_id is None:
        return
    device = device_id if isinstance(device_id, torch.device) else torch.device(device_id)
    if device.type != "cpu":
        raise ValueError(
            f"device_id: {device_id!r}; libfsdp shards host memory: give 'cpu' or nothing, or use "
            "torch.distributed.fsdp.FullyShardedDataParallel"
        )


# ---- Which ranks -----------------------------------------------------------------------------------------------------

_known = weakref.WeakValueDictionary()  # by what says which ranks: wrappers with the same arguments share Ranks


def _ranks(strategy, process_group, mesh):
    """The Ranks that the arguments mean."""
    if process_group is not None and mesh is not None:
        raise ValueError(
            "Cannot pass both process_group and device_mesh at the same time. Please just pass only one of them."
        )
    hybrid, shards = strategy in _HYBRID, strategy is not ShardingStrategy.NO_SHARD
    groups = process_group if isinstance(process_group, tuple) else (process_group,)
    key = (hybrid, shards, id(mesh), id(dist.group.WORLD), *map(id, groups))
    ranks = _known.get(key)
    if ranks is None:
        if mesh is None:
            mesh = _mesh(groups, process_group, hybrid)
        elif mesh.ndim != 2 and hybrid:
            raise ValueError(f"Expected device_mesh to have ndim=2 but got {mesh.ndim}")
        elif mesh.ndim != 1 and not hybrid:
            raise ValueError(
                f"{strategy} shards over one dimension, and device_mesh has {mesh.ndim}: give one of them, such as "
                "device_mesh['shard'], or HYBRID_SHARD"
            )
        check_mesh(mesh)
        ranks = Ranks(mesh, shards)
        ranks.given = (process_group, mesh)  # alive for as long as their ids are a key
        ranks.is_first = all(coordinate == 0 for coordinate in mesh.get_coordinate())
        _known[key] = ranks
    return ranks


def _mesh(groups, process_group, hybrid):
    if process_group is None:
        return default_mesh()
    if hybrid and len(groups) != 2 or not all(isinstance(group, dist.ProcessGroup) for group in groups):
        raise ValueError(
            "Expected process_group to be passed in as either None or Tuple[dist.ProcessGroup, dist.ProcessGroup] but "
            f"got {type(process_group)}"
        )
    if not hybrid:
        if len(groups) != 1:
            raise ValueError("process_group: a tuple of groups is for HYBRID_SHARD; give one group, that of the shards")
        return DeviceMesh.from_group(groups[0], "cpu")
    shard, replicate = groups
    rows = [None] * replicate.size()
    dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicate)
    return DeviceMesh.from_group(
        [replicate, shard], "cpu", mesh=torch.tensor(rows), mesh_dim_names=("replicate", "shard")
    )
