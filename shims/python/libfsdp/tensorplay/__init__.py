"""TensorPlay on libfsdp, for tensors in host memory: the backend "fsdp" of tensorplay.distributed, and fully_shard.

    import libfsdp.tensorplay
    import tensorplay.distributed as dist
    from libfsdp.tensorplay import fully_shard

    dist.init_process_group("fsdp")          # or "cpu:fsdp"; also new_group(backend="fsdp"), meshes, split_group
    for layer in model:
        fully_shard(layer)                   # as tensorplay.distributed.fsdp's, whatever the backend of the group
    fully_shard(model)

Import it before the names that it stands behind are taken one by one (`from tensorplay.distributed import new_group`).

Options           for new_group's pg_options: how a group talks, where the defaults won't do
ProcessGroup      such a group beside a default group of any backend, made by its own ranks alone: for `group=`,
                  `DeviceMesh.from_group`, `process_group=`
fully_shard       and what belongs to it: FSDPModule, MixedPrecisionPolicy, clip_grad_norm_, ... (composable.py)
FullyShardedDataParallel, ShardedGradScaler   the classic wrapper (classic.py) and loss scaling, with TensorPlay's arguments
StateDictType, FullStateDictConfig, ...   TensorPlay's own classes, which go with the wrapper: what
                  tensorplay.distributed.fsdp exports has its name here too
get_state_dict    and the others of TensorPlay's checkpoint package, for sharded models (state_dict.py)

What a group raises are the library's classes: all are RuntimeErrors, as gloo's are; a lost peer is a ConnectionError
too, a timeout a TimeoutError, wrong arguments a ValueError.

TensorPlay 1.0 and 1.1 have a register of backends but make groups of their own three only; register.py says what is
replaced for that. Importing this module starts no thread; a group does.
"""

import importlib

from ..hosts import classic_names
from .register import BACKEND, NEEDS, register

_HOMES = {  # what is imported when it is asked for
    "Options": "..hosts.options",
    "ProcessGroup": ".process_group",
    "CPUOffloadPolicy": ".composable",
    "DataParallelMeshDims": ".composable",
    "FSDPModule": ".composable",
    "MixedPrecisionPolicy": ".composable",
    "OffloadPolicy": ".composable",
    "UnshardHandle": ".composable",
    "clip_grad_norm_": ".composable",
    "fully_shard": ".composable",
    "register_fsdp_forward_method": ".composable",
    "share_comm_ctx": ".composable",
    "FullyShardedDataParallel": ".classic",
    "ShardedGradScaler": ".scaler",
    **{
        name: ".state_dict"
        for name in (
            "StateDictOptions",
            "get_model_state_dict",
            "get_optimizer_state_dict",
            "get_state_dict",
            "set_model_state_dict",
            "set_optimizer_state_dict",
            "set_state_dict",
        )
    },
}
__all__ = ["BACKEND", "NEEDS", "register", *_HOMES, *classic_names.NAMES]


def __getattr__(name):
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    if name in classic_names.NAMES:
        return getattr(importlib.import_module("tensorplay.distributed.fsdp"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return [*globals(), *_HOMES, *classic_names.NAMES]


register()
