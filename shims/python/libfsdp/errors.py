"""Exceptions: one class for each status of the library, so that a caller can catch what it can handle.

Each also is the built-in exception that Python code expects for that kind of failure: a `Timeout` is a `TimeoutError`,
a `PeerLost` a `ConnectionError`, and so on. `FsdpError` catches them all.
"""

import ctypes
import re

from . import abi

OPERATIONS = {
    value: name[len("FSDP_OP_") :].lower() for name, value in vars(abi).items() if name.startswith("FSDP_OP_")
}


class FsdpError(RuntimeError):
    """A call of the library failed.

    status     the number that the library returned (`abi.FSDP_ERR_*`)
    message    one sentence: what was wrong and what to do
    operation  the operation that failed, e.g. "all_reduce"; None where the failure is no operation's
    sequence   that operation's number on its group, from 1; 0 when there is none
    ranks      the ranks that the failure names: the missing one, or the two that differ
    """

    status = 0
    operation = None
    sequence = 0
    ranks = ()

    def __init__(self, message="", *, status=None, operation=None, sequence=0, ranks=()):
        super().__init__(message)
        self.message = message
        if status is not None:
            self.status = status
        self.operation = operation
        self.sequence = sequence
        self.ranks = tuple(ranks)

    def __str__(self):
        return self.message


class InvalidArgument(FsdpError, ValueError):
    """An argument is wrong; the message names it. Nothing was done."""

    status = abi.FSDP_ERR_INVALID


class StructSizeError(FsdpError):
    """A struct's size is not one that the library knows: this package and the shared object don't fit together."""

    status = abi.FSDP_ERR_STRUCT_SIZE


class VersionMismatch(FsdpError):
    """An ABI or DLPack version that the library does not speak."""

    status = abi.FSDP_ERR_VERSION


class Unsupported(FsdpError, NotImplementedError):
    """Meaningful, but not available here: a dtype, a device, a transport."""

    status = abi.FSDP_ERR_UNSUPPORTED


class OutOfMemory(FsdpError, MemoryError):
    """Out of memory or address space."""

    status = abi.FSDP_ERR_NOMEM


class SystemFailure(FsdpError):
    """A system call failed; the message has its error text."""

    status = abi.FSDP_ERR_SYSTEM


class Timeout(FsdpError, TimeoutError):
    """The group's or the store's time is up. The group has failed for good."""

    status = abi.FSDP_ERR_TIMEOUT


class Pending(FsdpError, TimeoutError):
    """`Work.wait(timeout)`: the timeout passed first. The operation goes on; wait again."""

    status = abi.FSDP_ERR_PENDING


class Mismatch(FsdpError):
    """Ranks called different operations, or the same one with different arguments. The group stays usable."""

    status = abi.FSDP_ERR_MISMATCH


class PeerLost(FsdpError, ConnectionError):
    """Another rank's process ended, or it released the group. `ranks[0]` is that rank."""

    status = abi.FSDP_ERR_PEER_LOST


class Aborted(FsdpError):
    """The group was aborted, here or on another rank."""

    status = abi.FSDP_ERR_ABORTED


class Forked(FsdpError):
    """The object was made before `fork()` and this is the child: make a new one here."""

    status = abi.FSDP_ERR_FORKED


class InvalidState(FsdpError):
    """Not now: the object is in another state; the message says which call comes first."""

    status = abi.FSDP_ERR_STATE


class RendezvousFailed(FsdpError):
    """Ranks could not find each other, or disagree about who they are."""

    status = abi.FSDP_ERR_RENDEZVOUS


class CallbackFailed(FsdpError):
    """A callback of the host (a store's, say) reported a failure; `__cause__` is its exception where there is one."""

    status = abi.FSDP_ERR_CALLBACK


class InternalFault(FsdpError):
    """A defect of the library: please report it."""

    status = abi.FSDP_ERR_INTERNAL


class Corrupt(FsdpError, ValueError):
    """A file is not what it should be: damaged, cut short, or made so. The message names it."""

    status = abi.FSDP_ERR_CORRUPT


class NotFound(FsdpError, FileNotFoundError, LookupError):
    """No such file, checkpoint or name."""

    status = abi.FSDP_ERR_NOT_FOUND


BY_STATUS = {
    kind.status: kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, FsdpError)
}
del BY_STATUS[0]


# The library speaks of the C functions and their arguments. What Python calls otherwise:
_OP_NAMES = ["sum", "avg", "prod", "min", "max", "band", "bor", "bxor"]
_STRATEGIES = ["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_grad_op"]
_STRATEGY = "|".join(_STRATEGIES).upper()
_IN_PYTHON = [
    (re.compile(r"^op (\d)(?= is not defined)"), lambda found: f"op {_OP_NAMES[int(found[1])]!r}"),
    (re.compile(r"use SUM and divide"), "use 'sum' and divide"),
    (re.compile(r"see fsdp_reduce_op in fsdp\.h"), "see libfsdp.ReduceOp"),
    (re.compile(r"(?:^|(?<=\]\.)|(?<=and )|(?<=with ))output(?= |$)"), "out"),
    (re.compile(r"\bfsdp_scaler_save\b"), "state_dict"),
    (re.compile(r"\bfsdp_scaler_(\w+)"), r"\1"),
    (re.compile(r"\buse fsdp_model_create_on_mesh\b"), "give Model a Mesh"),
    (re.compile(r"\bfsdp_model_(\w+)"), r"Model.\1"),
    (re.compile(r"\b(?:options(?:\.|->))?timeout_ms\b"), "timeout"),
    (re.compile(r"\bfsdp_unit_(\w+)"), r"Unit.\1"),
    (re.compile(r"\boptions(?:\.|->|: )(?=\w+ is )"), ""),
    (re.compile(r"\bstrategy is ([1-5])(?=,)"), lambda found: f"strategy is {_STRATEGIES[int(found[1]) - 1]!r}"),
    (re.compile(rf"\bFSDP_({_STRATEGY})\b"), lambda found: repr(found[1].lower())),
    (re.compile(r"(?<=': )shard_dim(?= is )"), "dim"),
    (re.compile(r"\boptions\.partial 1\b"), "partial=True"),
    (re.compile(r"\bentry\.(?=\w)"), ""),
]


def in_python(message):
    """A message of the library with the names that Python has for things."""
    for pattern, names in _IN_PYTHON:
        message = pattern.sub(names, message)
    return message


def from_info(info):
    """The exception that an `abi.fsdp_error_info` describes."""
    kind = BY_STATUS.get(info.status, FsdpError)
    return kind(
        in_python(info.message.decode("utf-8", "replace")) or f"status {info.status}",
        status=info.status,
        operation=OPERATIONS.get(info.operation, f"operation {info.operation}") if info.operation else None,
        sequence=info.sequence,
        ranks=[rank for rank in (info.rank_a, info.rank_b) if rank >= 0],
    )


def last(status):
    """The exception for a call on this thread that has just returned `status`."""
    info = abi.fsdp_error_info()
    abi.lib.fsdp_last_error_info(ctypes.byref(info))
    if info.status != status:  # a number alone: say at least its name
        info = abi.fsdp_error_info()
        info.status = status
        info.message = abi.lib.fsdp_status_name(status)
    return from_info(info)


def check(status):
    """Raise the exception for `status` unless it is FSDP_OK."""
    if status:
        raise last(status)
