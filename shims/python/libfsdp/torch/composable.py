"""fully_shard for torch: the names, arguments and results of torch.distributed.fsdp.fully_shard, on the library.

    from libfsdp.torch import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)

What is here is torch's side only: its meshes, DTensors, policies and state dict hooks. The rest is libfsdp.hosts.
"""

import inspect

import torch.distributed.fsdp
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.fsdp import FSDPModule as _TorchModule
from torch.distributed.fsdp import fully_shard as _torch_fully_shard
from torch.distributed.tensor import Shard

from ..hosts.api import ShardedModule, UnshardHandle, share_comm_ctx
from ..hosts.api import register_forward_method as register_fsdp_forward_method
from ..hosts.fully_shard import check_reshard, shard
from ..hosts.iteration import state_of
from .host import HOST
from .ranks import Ranks, check_device, check_mesh, default_mesh

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


class FSDPModule(ShardedModule, _TorchModule):
    """What a module's class also is after fully_shard. See libfsdp.hosts.api for the methods; those here torch 2.15 has."""

    def set_manual_backward_finalization(self, enabled):
        """Whether backward passes leave their end to finalize_backward: then parameters that were told to stay full
        (set_reshard_after_backward) stay so until it. On the outermost module."""
        state = self._get_fsdp_state()
        if state.iteration is not None and not state.is_root:
            raise RuntimeError("set_manual_backward_finalization must be called on the root FSDP module")
        state.set_is_last_backward(not enabled)

    def finalize_backward(self, *, async_op=False):
        """After the backward passes of an iteration: reduce what they have accumulated without sync, which is on again,
        and shard all parameters. On the outermost module; collective. With async_op a handle with wait(): of what is
        done already."""
        iteration = self._get_fsdp_state().iteration
        if iteration is not None:
            if iteration.root is not self._get_fsdp_state():
                raise RuntimeError("finalize_backward must be called on the root FSDP module")
            iteration.finalize()
        return torch.distributed.fsdp.GradientReductionHandle() if async_op else None

    def set_keep_unsharded_storage(self, keep, *, recurse=True):
        """Without effect: full parameters always have the same addresses."""
        self._states(recurse)


def fully_shard(
    module,
    *,
    mesh=None,
    reshard_after_forward=None,
    shard_placement_fn=None,
    mp_policy=MixedPrecisionPolicy(),
    offload_policy=OffloadPolicy(),
    ignored_params=None,
    dp_mesh_dims=None,
):
    """Shard the parameters of a module, or of several that run together, over the ranks of a mesh, in place.

    module                 an nn.Module or a list of them. Its parameters, but for those of modules below that are sharded
                           already, are one unit: gathered and reduced together. Call it bottom-up: layers, then the model
    mesh                   a DeviceMesh of "cpu": of one dimension, to shard over; of two with names, to replicate over
                           the first and shard over the second. None: all ranks
    reshard_after_forward  True: parameters are sharded between forward and backward; False: full; n: over groups of n
                           ranks; None: True, but False for the outermost module
    shard_placement_fn     parameter -> Shard(dim) or None: which dimension to cut; 0 by default. Need not divide evenly
    mp_policy              MixedPrecisionPolicy: dtypes of computation, reduction and outputs
    offload_policy         parameters are in host memory already: CPUOffloadPolicy changes nothing
    ignored_params         parameters that stay as they are, whole on every rank
    dp_mesh_dims           DataParallelMeshDims, in a torch that has it: which dimensions, by name, of a mesh of any
                           number of them shard and which replicate. Parameters are DTensors on the mesh, whole along
                           these

    Parameters become DTensors of the mesh and keep their names; build the optimizer afterwards. Returns the module (the
    list), whose class is then a subclass of FSDPModule and of what it was.

    Raises ValueError for containers without forward, 0-dim parameters, meshes of other devices, and parameters that
    another call has sharded.
    """
    mesh = default_mesh() if mesh is None else mesh
    if dp_mesh_dims is None:
        check_mesh(mesh)
        ranks = Ranks(mesh)
    else:
        ranks = _data_parallel(mesh, dp_mesh_dims)
    shard(
        HOST,
        FSDPModule,
        module,
        ranks,
        reshard=check_reshard(reshard_after_forward, ranks),
        dim_of=lambda parameter: _dim(parameter, shard_placement_fn, ranks),
        policy=mp_policy,
        ignored=ignored_params,
    )
    for each in [module] if isinstance(module, HOST.Module) else module:
        each.__dict__.setdefault(STATE_KEY, {})[_torch_fully_shard.__wrapped__] = _StageState(each)
        if state_of(each) is not None:
            state_of(each)._comm_ctx = object()  # by which torch's schedules see whether stages share communication
    return module


class _StageState:
    """What a pipeline stage of torch before 2.15 finds as the state of torch's own fully_shard. A stage lets all
    micro-batches accumulate without sync, and calls this after the last one."""

    all_states = ()  # those whose reduction the stage would begin one by one

    def __init__(self, module):
        self._state, self._state_ctx = state_of(module), self

    def _root_post_backward_final_callback(self):
        if self._state is not None and self._state.iteration is not None:
            self._state.iteration.finalize()


fully_shard.state = state_of
if hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
    DataParallelMeshDims = torch.distributed.fsdp.DataParallelMeshDims
else:  # to be seen as torch's own
    _seen = inspect.signature(fully_shard)
    fully_shard.__signature__ = _seen.replace(parameters=[*_seen.parameters.values()][:-1])


def _data_parallel(mesh, dims):
    check_device(mesh)
    if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
        raise TypeError(
            f"dp_mesh_dims: torch {torch.__version__} has no DataParallelMeshDims; give a mesh of one or two dimensions"
        )
    from .spmd import Spmd

    return Spmd(mesh, dims).ranks


def _dim(parameter, placement_fn, ranks):
    if ranks.spmd is not None:
        ranks.spmd.check(parameter)
    placement = placement_fn(parameter) if placement_fn else None
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise AssertionError(f"Expected Shard, got {type(placement)}: {placement}")
    return placement.dim
