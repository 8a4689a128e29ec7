"""libfsdp: fully sharded data parallelism, and the collectives under it, for any array package.

    import numpy, libfsdp

    group = libfsdp.init()                         # rank and size from the launcher; alone: a group of one
    x = numpy.full(4, group.rank, "float32")
    group.all_reduce(x)                            # sum over the ranks, in place

Run it with `python -m libfsdp.run -n 2 script.py`.

Group         operations between ranks: all_gather, reduce_scatter, all_reduce, broadcast, send, ...
Work          a pending operation, from `async_op=True`
Store         how ranks meet; `init` makes one
Model, Unit   fully sharded parameters; Strategy, Precision: how
Mesh          a group's ranks as a grid: shard inside, replicate across
ShardedGradScaler  loss scaling that skips steps on all ranks alike
StateDict     named tensors, each whole or this rank's part, for checkpoints
checkpoint    (imported by itself) save and load training runs; `python -m libfsdp.checkpoint` for files
Tensor        memory of the library, shared with NumPy and others without a copy
FsdpError     what goes wrong; one subclass for each kind
abi           the C functions themselves, in ctypes
numpy         (imported by itself) a small training host: layers, losses, optimizers, `fully_shard`

The shared object is looked for when it is first needed: in $FSDP_LIBRARY, beside this package, in the repository's
build/release, then where the system's loader looks. `libfsdp.abi.LibraryNotFound`, an ImportError, says what was tried.
"""

from . import abi
from .errors import (
    Aborted,
    CallbackFailed,
    Corrupt,
    Forked,
    FsdpError,
    InternalFault,
    InvalidArgument,
    InvalidState,
    Mismatch,
    NotFound,
    OutOfMemory,
    PeerLost,
    Pending,
    RendezvousFailed,
    StructSizeError,
    SystemFailure,
    Timeout,
    Unsupported,
    VersionMismatch,
)
from .group import ANY_RANK, Group, GroupInfo, ReduceOp, init
from .mesh import Mesh
from .model import MemoryInfo, Model
from .options import Precision, Strategy
from .scaler import ScalerInfo, ShardedGradScaler
from .state import StateDict
from .store import Store
from .tensor import Tensor, copy, from_dlpack, shard, shard_extent, zeros
from .unit import Meta, Param, ParamInfo, Unit, UnitInfo
from .work import Work

__version__ = f"{abi.VERSION_MAJOR}.{abi.VERSION_MINOR}.{abi.VERSION_PATCH}"

__all__ = [
    "ANY_RANK",
    "Aborted",
    "CallbackFailed",
    "Corrupt",
    "Corrupt",
    "Forked",
    "FsdpError",
    "Group",
    "GroupInfo",
    "InternalFault",
    "InvalidArgument",
    "InvalidState",
    "MemoryInfo",
    "Mesh",
    "Meta",
    "Mismatch",
    "Model",
    "NotFound",
    "NotFound",
    "OutOfMemory",
    "Param",
    "ParamInfo",
    "PeerLost",
    "Pending",
    "Precision",
    "ReduceOp",
    "RendezvousFailed",
    "ScalerInfo",
    "ShardedGradScaler",
    "Store",
    "StateDict",
    "Strategy",
    "StructSizeError",
    "SystemFailure",
    "Tensor",
    "Timeout",
    "Unit",
    "UnitInfo",
    "Unsupported",
    "VersionMismatch",
    "Work",
    "abi",
    "copy",
    "from_dlpack",
    "init",
    "shard",
    "shard_extent",
    "zeros",
]
