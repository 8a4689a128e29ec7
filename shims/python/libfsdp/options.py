"""What models and units can be told: strategies, resharding, dtypes. Where Python's words become the C side's."""

import enum
from dataclasses import dataclass

from . import abi
from .dtypes import TABLE, name_of
from .errors import InvalidArgument
from .handle import integer


class Strategy(enum.IntEnum):
    """How a unit's parameters lie on the model's ranks. The names in small letters do as well: "full_shard", ...

    FULL_SHARD             sharded over all ranks, also between forward and backward
    SHARD_GRAD_OP          sharded over all ranks, full from forward to backward
    NO_SHARD               whole on every rank; gradients are all-reduced, a unit at a time (plain data parallelism)
    HYBRID_SHARD           sharded over one dimension of a Mesh, replicated over another
    HYBRID_SHARD_GRAD_OP   the same, full from forward to backward
    """

    FULL_SHARD = abi.FSDP_FULL_SHARD
    SHARD_GRAD_OP = abi.FSDP_SHARD_GRAD_OP
    NO_SHARD = abi.FSDP_NO_SHARD
    HYBRID_SHARD = abi.FSDP_HYBRID_SHARD
    HYBRID_SHARD_GRAD_OP = abi.FSDP_HYBRID_SHARD_GRAD_OP


_STRATEGIES = {strategy: int(strategy) for strategy in Strategy} | {
    strategy.name.lower(): int(strategy) for strategy in Strategy
}
_BACKWARD_PREFETCH = {
    None: abi.FSDP_BACKWARD_NONE,
    "pre": abi.FSDP_BACKWARD_PRE,
    "post": abi.FSDP_BACKWARD_POST,
}
PHASES = {"forward": abi.FSDP_FORWARD, "backward": abi.FSDP_BACKWARD}
CASTS = {"input": abi.FSDP_CAST_INPUT, "output": abi.FSDP_CAST_OUTPUT, "buffer": abi.FSDP_CAST_BUFFER}


def choice(value, table, name):
    """The C side's number for one of the words in `table`."""
    try:
        if not isinstance(value, (bool, float)):  # which equal some numbers
            return table[value]
    except (KeyError, TypeError):
        pass
    words = ", ".join(repr(word) for word in table if word is None or type(word) is str)
    raise InvalidArgument(f"{name}: {value!r} is not one of {words}")


def strategy_code(strategy):
    return abi.FSDP_STRATEGY_DEFAULT if strategy is None else choice(strategy, _STRATEGIES, "strategy")


def backward_prefetch_code(when):
    return choice(when, _BACKWARD_PREFETCH, "backward_prefetch")


def reshard_code(reshard):
    """None: as the strategy says; True and False; n of 2 or more: over groups of n ranks."""
    if reshard is None:
        return abi.FSDP_RESHARD_DEFAULT
    if isinstance(reshard, bool):
        return abi.FSDP_RESHARD_ALWAYS if reshard else abi.FSDP_RESHARD_NEVER
    try:
        ranks = integer(reshard, "reshard_after_forward")
    except TypeError:
        raise TypeError(
            f"reshard_after_forward: {reshard!r} is neither True, False, None nor a number of ranks"
        ) from None
    if ranks < 2:
        raise InvalidArgument(f"reshard_after_forward: {ranks}; give True, False, or a number of ranks of 2 or more")
    return ranks


def reshard_value(code):
    """The Python value that reshard_code makes `code` of."""
    words = {abi.FSDP_RESHARD_DEFAULT: None, abi.FSDP_RESHARD_ALWAYS: True, abi.FSDP_RESHARD_NEVER: False}
    return words.get(code, code)


def dtype_struct(name):
    """A DLDataType for one of the library's names; None: the empty one."""
    if name is None:
        return abi.DLDataType()
    code, bits, _ = TABLE[name]
    return abi.DLDataType(code, bits, 1)


@dataclass(frozen=True)
class Precision:
    """Dtypes of a model or a unit: names, or NumPy, ml_dtypes or torch dtypes; None: as the host gives them.

    Shards, which the optimizer updates, keep the parameters' own dtype whatever is chosen here.

    param   of full parameters, and so of computation and of the gradients given to `post_backward`
    reduce  each rank's gradients are rounded to it before they travel; sums are in float32 (float64) all the same
    output  of forward's outputs, for `Unit.cast(y, "output")`
    buffer  of buffers, for `Unit.cast(b, "buffer")`
    keep_low_precision_grads  True: sharded gradients have `reduce`, or else `param`; False: the shard's dtype
    keep_inputs               True: `Unit.cast(x)` leaves forward's inputs as they are

    Raises Unsupported for a dtype that the library does not handle, TypeError for what is none.
    """

    param: str = None
    reduce: str = None
    output: str = None
    buffer: str = None
    keep_low_precision_grads: bool = False
    keep_inputs: bool = False

    def __post_init__(self):
        for field in ("param", "reduce", "output", "buffer"):
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, name_of(value, field))

    def _struct(self):
        return abi.fsdp_precision(
            dtype_struct(self.param),
            dtype_struct(self.reduce),
            dtype_struct(self.output),
            dtype_struct(self.buffer),
            bool(self.keep_low_precision_grads),
            bool(self.keep_inputs),
        )


def precision_pointer(precision):
    """A pointer for an options struct, which keeps what it points to; None: NULL."""
    if precision is None:
        return None
    if not isinstance(precision, Precision):
        raise TypeError(f"precision: {precision!r} is not a libfsdp.Precision; give Precision(param='bfloat16')")
    return abi.POINTER(abi.fsdp_precision)(precision._struct())
