"""TensorPlay on libfsdp: the backend "fsdp" of tensorplay.distributed, for tensors in host memory.

    import libfsdp.tensorplay
    import tensorplay.distributed as dist

    dist.init_process_group("fsdp")          # or "cpu:fsdp"; also new_group(backend="fsdp"), meshes, split_group

Import it before the names that it stands behind are taken one by one (`from tensorplay.distributed import new_group`).

Options           for new_group's pg_options: how a group talks, where the defaults won't do
ProcessGroup      such a group beside a default group of any backend, made by its own ranks alone: for `group=`,
                  `DeviceMesh.from_group`, `process_group=`

What a group raises are the library's classes: all are RuntimeErrors, as gloo's are; a lost peer is a ConnectionError
too, a timeout a TimeoutError, wrong arguments a ValueError.

TensorPlay 1.0 and 1.1 have a register of backends but make groups of their own three only; register.py says what is
replaced for that. Importing this module starts no thread; a group does.
"""

from .register import BACKEND, NEEDS, register

__all__ = ["BACKEND", "NEEDS", "Options", "ProcessGroup", "register"]


def __getattr__(name):
    if name == "ProcessGroup":
        from .process_group import ProcessGroup

        return ProcessGroup
    if name == "Options":
        from ..hosts.options import Options

        return Options
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
