"""fully_shard for TensorPlay: the names, arguments and results of tensorplay.distributed.fsdp's, on the library.

    from libfsdp.tensorplay import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)

Works on TensorPlay 1.0 too, and without a process group. What is here is TensorPlay's side only: its meshes, policies
and messages. The rest is libfsdp.hosts.
"""

import warnings

from tensorplay.distributed._composable.contract import _get_registry
from tensorplay.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from tensorplay.distributed.fsdp import FSDPModule as _TensorPlayModule
from tensorplay.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
from tensorplay.distributed.tensor import Replicate, Shard

from ..hosts.api import ShardedModule, UnshardHandle, share_comm_ctx
from ..hosts.api import register_forward_method as register_fsdp_forward_method
from ..hosts.fully_shard import check_reshard, shard
from ..hosts.iteration import state_of
from ..hosts.state_dict import cut_entries, names_of
from . import clip
from .classic import HOST
from .clip import clip_grad_norm_
from .ranks import Ranks, default_mesh

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "clip_grad_norm_",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

_KEY = "fully_shard"  # in the registry by which TensorPlay's composable functions know of each other
_REPLICATED = ("replicate", "__replicate_state_key__", "__replicate_with_fsdp_state__")


class FSDPModule(ShardedModule, _TensorPlayModule):
    """What a module's class also is after fully_shard. See libfsdp.hosts.api for the methods.

    state_dict() gives this rank's shards; load_state_dict() takes shards and whole tensors, each rank its part of them.
    """

    def _load_from_state_dict(self, entries, prefix, metadata, strict, missing, unexpected, errors):
        state = state_of(self)
        state.reshard_now()
        cut_entries(HOST, entries, prefix, prefix, names_of(self, state.params), state.ranks, False, errors)
        super()._load_from_state_dict(entries, prefix, metadata, strict, missing, unexpected, errors)


def fully_shard(
    module,
    *,
    mesh=None,
    reshard_after_forward=None,
    shard_placement_fn=None,
    mp_policy=None,
    offload_policy=None,
    ignored_params=None,
    dp_mesh_dims=None,
):
    """Shard the parameters of a module, or of several that run together, over the ranks of a mesh, in place.

    module                 an nn.Module or a list of them. Its parameters, but for those of modules below that are
                           sharded already, are one unit: gathered and reduced together. Call it bottom-up: layers,
                           then the model
    mesh                   a DeviceMesh of "cpu": of one dimension, to shard over; of two with names, to replicate over
                           the first and shard over the second. None: all ranks; without a process group this process
    reshard_after_forward  True: parameters are sharded between forward and backward; False: full; n: over groups of n
                           ranks; None: True, but False for the outermost module
    shard_placement_fn     parameter -> Shard(dim) or None: which dimension to cut; 0 by default. Need not divide evenly
    mp_policy              MixedPrecisionPolicy: dtypes of computation, reduction and outputs
    offload_policy         parameters are in host memory already: CPUOffloadPolicy changes nothing
    ignored_params         parameters that stay as they are, whole on every rank
    dp_mesh_dims           DataParallelMeshDims: which dimensions, by name, of a mesh of any number of them shard and
                           which replicate; with none that shard, every rank keeps whole parameters

    Parameters stay the objects that they are, with the same names, and hold this rank's shard from here on. Returns the
    module (the list), whose class is then a subclass of FSDPModule and of what it was.

    Raises ValueError for containers without forward, 0-dim parameters, wrong meshes and parameters that another call
    has sharded; RuntimeError for a module that fully_shard was called on already.
    """
    for item in module if isinstance(module, list) else (module,):
        _check(item)
    ranks = Ranks(default_mesh() if mesh is None else mesh, dp_mesh_dims)
    if isinstance(offload_policy, CPUOffloadPolicy) and offload_policy.pin_memory:
        _say_once("CPUOffloadPolicy: parameters stay in host memory that is not pinned, as no device reads it")
    if type(reshard_after_forward) is int and reshard_after_forward == 1 < ranks.shard_size:
        warnings.warn("reshard_after_forward=1 keeps whole parameters after forward, as False does", stacklevel=2)
    result = shard(
        HOST,
        FSDPModule,
        module,
        ranks,
        reshard=check_reshard(reshard_after_forward, ranks),
        dim_of=lambda parameter: _dim(parameter, shard_placement_fn, ranks),
        policy=mp_policy or MixedPrecisionPolicy(),
        ignored=ignored_params,
    )
    for item in result if isinstance(result, list) else (result,):
        state = state_of(item)
        if state is not None:
            _get_registry(item)[_KEY] = state
    return result


fully_shard.state = state_of


def _check(module):
    """What TensorPlay's other composable functions have done to a module."""
    if not isinstance(module, HOST.Module) or state_of(module) is not None:
        return  # which the core says
    registry = _get_registry(module)
    if _KEY in registry:
        raise RuntimeError(
            "fully_shard has already been applied to this module: TensorPlay's own; use one of the two for a model"
        )
    if any(key in registry for key in _REPLICATED):
        raise RuntimeError("fully_shard cannot be applied to a replicated module")


def _dim(parameter, placement_fn, ranks):
    result = placement_fn(parameter) if placement_fn else None
    if isinstance(result, ShardPlacementResult):
        if (result.mesh_info or result.mesh) not in (None, ranks.mesh):
            raise ValueError(
                "shard_placement_fn gave a mesh of its own: parameters over different ranks are different units; call "
                "fully_shard on the modules that have them, with that mesh"
            )
        result = result.placement
    if result is None or (isinstance(result, Replicate) and not ranks.shards):
        return 0
    if isinstance(result, Replicate):
        raise ValueError(
            "shard_placement_fn gave Replicate(): pass such a parameter in ignored_params, or its module over a mesh "
            "that replicates (dp_mesh_dims)"
        )
    if not isinstance(result, Shard):
        raise TypeError("shard placement must be a Shard or ShardPlacementResult")
    rank = len(parameter.shape)
    if not -rank <= result.dim < rank:
        raise ValueError(f"shard dimension {result.dim} is outside parameter rank")
    return result.dim


_said = set()


def _say_once(text):
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=3)


clip.replace()
