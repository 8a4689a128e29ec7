"""PyTorch on libfsdp, for tensors in host memory: the backend "fsdp" of torch.distributed, and fully_shard.

    import torch.distributed as dist
    from libfsdp.torch import fully_shard

    dist.init_process_group("fsdp")          # or "cpu:fsdp"; also new_group(backend="fsdp")
    for layer in model.layers:
        fully_shard(layer)                   # as torch.distributed.fsdp's, whatever the backend of the group
    fully_shard(model)

Where libfsdp is installed, torch finds this module by itself, through the entry point group `torch.backends`. Where
it is only on the path, or TORCH_DEVICE_BACKEND_AUTOLOAD is 0, `import libfsdp.torch` registers the backend.

Options           for pg_options: how a group talks, where the defaults won't do
ProcessGroup      the class of groups with this backend
fully_shard       and what belongs to it: FSDPModule, MixedPrecisionPolicy, ... (composable.py)
FullyShardedDataParallel, ShardedGradScaler   the classic wrapper (classic.py) and loss scaling, with torch's arguments
StateDictType, FullStateDictConfig, ...   torch's own classes, which go with the wrapper: what torch.distributed.fsdp
                  exports has its name here too

Importing this module starts no thread and loads no shared object: the first group does. What a group raises are torch's
classes and the library's at once (see errors.py).
"""

import importlib

from ..hosts import classic_names

BACKEND = "fsdp"
NEEDS = (2, 11)  # the oldest torch that this was tried with


def register():
    """Make "fsdp" a backend of torch.distributed. Does nothing where it is one already, or torch has no distributed."""
    import torch

    if not torch.distributed.is_available() or BACKEND in torch.distributed.Backend.backend_list:
        return
    torch.distributed.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
    _extend_monitored_barrier(torch.distributed)


def _create(options, backend_options):
    """Called by torch on the ranks of a new group."""
    _check_version()
    from .process_group import ProcessGroup

    return ProcessGroup(options, backend_options)


def _check_version():
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < NEEDS:
        raise RuntimeError(
            f"libfsdp.torch needs torch {NEEDS[0]}.{NEEDS[1]} or newer, and this is {torch.__version__}: upgrade torch, "
            "or use its own backend gloo and fully_shard"
        )


def _extend_monitored_barrier(distributed):
    """torch's function asks for gloo by name before it looks at the group: groups of ours answer themselves."""
    import functools

    original = distributed.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(group=None, timeout=None, wait_all_ranks=False):
        chosen = distributed.distributed_c10d._get_default_group() if group is None else group
        if getattr(chosen, "backend", None) != BACKEND:
            return original(group, timeout, wait_all_ranks)
        return chosen.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    distributed.monitored_barrier = distributed.distributed_c10d.monitored_barrier = monitored_barrier


_HOMES = {  # what is imported when it is asked for: `import torch` comes through here
    "Options": ".hosts.options",
    "ProcessGroup": "process_group",
    "CPUOffloadPolicy": "composable",
    "FSDPModule": "composable",
    "MixedPrecisionPolicy": "composable",
    "OffloadPolicy": "composable",
    "UnshardHandle": "composable",
    "fully_shard": "composable",
    "register_fsdp_forward_method": "composable",
    "share_comm_ctx": "composable",
    "FullyShardedDataParallel": "classic",
    "ShardedGradScaler": "scaler",
}
_NEWER = ("DataParallelMeshDims", "GradientReductionHandle")  # torch's own, where it has them
__all__ = ["BACKEND", "register", *_HOMES, *classic_names.NAMES]


def __getattr__(name):
    if name in _HOMES:
        _check_version()
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    if name in (*classic_names.NAMES, *_NEWER):
        return getattr(importlib.import_module("torch.distributed.fsdp"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return [*globals(), *_HOMES, *classic_names.NAMES, *_NEWER]


register()  # last: `import torch` in it may come back here through the entry point
