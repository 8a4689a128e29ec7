"""What torch's callers give: an options object, the short forms of the C++ binding in its place, or nothing.

torch's functions fill an options object, whose `asyncOp` False asks for a call that runs to its end. Code that has the
group in hand may give an operation or a root instead, and C++ whatever its virtual functions take. Here each is read
into plain values. A timeout of a call's own, in milliseconds here, counts for that call; torch says "none" with a
negative one.
"""

import datetime

import torch
import torch.distributed as dist

from .. import abi
from ..errors import InvalidArgument
from .work import milliseconds

_Kind = dist.ReduceOp.RedOpType
_OP_TYPES = {_Kind, type(dist.ReduceOp(_Kind.SUM))}
UNSET = datetime.timedelta(0)  # and less
# By hash, which torch defines as the operation's number, for an operation and for its plain name: looking those up as
# they are takes longer than a small operation.
OPS = {
    hash(dist.ReduceOp(kind)): code
    for kind, code in (
        (_Kind.SUM, abi.FSDP_SUM),
        (_Kind.AVG, abi.FSDP_AVG),
        (_Kind.PRODUCT, abi.FSDP_PROD),
        (_Kind.MIN, abi.FSDP_MIN),
        (_Kind.MAX, abi.FSDP_MAX),
        (_Kind.BAND, abi.FSDP_BAND),
        (_Kind.BOR, abi.FSDP_BOR),
        (_Kind.BXOR, abi.FSDP_BXOR),
    )
}


def called(opts, timeout=None):
    """(whether to run to the end, the call's own timeout or None), of an options object or None."""
    if opts is None:
        return False, timeout if timeout is None else milliseconds(timeout)
    if timeout is None:
        timeout = opts.timeout
        if timeout <= UNSET:
            return not opts.asyncOp, None
    return not opts.asyncOp, milliseconds(timeout)


def reducing(opts, op=None, timeout=None):
    """(the library's number of the reduction, what inputs are multiplied with before or None, whether to run to the
    end, the call's own timeout or None), of an options object, an operation in its place, or none."""
    if opts is None or type(opts) in _OP_TYPES:
        reduction = opts or op or _Kind.SUM
        wait, timeout = called(None, timeout)
    else:
        reduction = opts.reduceOp
        wait, timeout = called(opts, timeout)
    if type(reduction) in _OP_TYPES:
        code = OPS.get(hash(reduction))
        if code is not None:
            return code, None, wait, timeout
        if reduction == _Kind.PREMUL_SUM and type(reduction) is not _Kind:
            return abi.FSDP_SUM, reduction.__getstate__()[1], wait, timeout
    raise InvalidArgument(f"op: {reduction!r} is not a reduction of this backend")


def rooted(opts, timeout=None):
    """(the root's rank, whether to run to the end, the call's own timeout or None), of an options object or a rank in
    its place."""
    if opts is None or isinstance(opts, int):
        return opts or 0, *called(None, timeout)
    return opts.rootRank, *called(opts, timeout)


def scaled(tensor, factor):
    """What goes in for a tensor: itself, or a scaled copy where the reduction has a factor."""
    if factor is None:
        return tensor
    with torch.no_grad():
        return tensor * (factor[0] if isinstance(factor, list) else factor)


def one(tensors, name):
    """The only tensor of a list, or the tensor itself."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise InvalidArgument(f"{name}: {len(tensors)} tensors; this call takes one")
    return tensors[0]
