"""torch tensors as the library sees them: a DLTensor on the tensor's own memory, nothing copied.

A contiguous tensor is lent as one dimension of so many elements, whatever its shape: what ranks compare are counts and
dtypes. Others keep shape and strides, and the library packs them. `lend` looks at the tensor's address itself instead
of going through DLPack, which takes longer than a small operation.

Autograd is not told of what is written, as with torch's own backends.
"""

import torch

from .. import abi
from ..borrow import _describe
from ..errors import InvalidArgument, Unsupported
from ..hosts.tensors import Memory
from .errors import last

_strided = torch.strided

_BY_NAME = {
    "float64": (abi.kDLFloat, 64),
    "float32": (abi.kDLFloat, 32),
    "float16": (abi.kDLFloat, 16),
    "bfloat16": (abi.kDLBfloat, 16),
    "float8_e4m3fn": (abi.kDLFloat8_e4m3fn, 8),
    "float8_e5m2": (abi.kDLFloat8_e5m2, 8),
    "int8": (abi.kDLInt, 8),
    "int16": (abi.kDLInt, 16),
    "int32": (abi.kDLInt, 32),
    "int64": (abi.kDLInt, 64),
    "uint8": (abi.kDLUInt, 8),
    "uint16": (abi.kDLUInt, 16),
    "uint32": (abi.kDLUInt, 32),
    "uint64": (abi.kDLUInt, 64),
    "bool": (abi.kDLBool, 8),
    "complex64": (abi.kDLComplex, 64),
    "complex128": (abi.kDLComplex, 128),
}
DTYPES = {getattr(torch, name): code for name, code in _BY_NAME.items() if hasattr(torch, name)}
PLAIN = {torch.Tensor, torch.nn.Parameter}


def lend(tensor, name):
    """The DLTensor of a tensor, which `name` calls in messages; it keeps the tensor.

    Raises TypeError for what is no tensor, InvalidArgument or Unsupported for one that can't be lent as it is.
    """
    if type(tensor) not in PLAIN:
        tensor = _plain(tensor, name)
    code = DTYPES.get(tensor.dtype)
    if code is None or not tensor.is_cpu or tensor.layout is not _strided or tensor.is_neg() or tensor.is_conj():
        raise _refusal(tensor, name)
    if tensor.is_contiguous():
        return _describe(tensor, tensor.data_ptr(), *code, (tensor.numel(),), (1,))
    return _describe(tensor, tensor.data_ptr(), *code, tensor.shape, tensor.stride())


def lend_bits(tensor, name):
    """`lend` for operations that only move elements: dtypes unknown to the library go as integers of their size."""
    if tensor.dtype in DTYPES or tensor.dtype.itemsize not in (1, 2, 4, 8):
        return lend(tensor, name)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return lend(tensor.view(integer), name)


def _plain(tensor, name):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: a {type(tensor).__name__} is not a torch.Tensor")
    wait = getattr(tensor, "trigger_wait", None)  # the result of a functional collective that is perhaps under way
    if wait is not None:
        return wait()
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise InvalidArgument(
            f"{name}: a {type(tensor).__name__} has no memory of its own to send; give the plain tensor inside it "
            "(to_local(), for a DTensor)"
        )
    return tensor


def _refusal(tensor, name):
    if tensor.layout is not _strided:
        return Unsupported(f"{name} is sparse ({tensor.layout}); give {name}.to_dense()")
    if not tensor.is_cpu:
        where = "holds no values (device meta)" if tensor.is_meta else f"is on {tensor.device}"
        return Unsupported(f"{name} {where}; the backend 'fsdp' handles host memory: give {name}.cpu()")
    if tensor.is_neg() or tensor.is_conj():
        return InvalidArgument(f"{name} is a lazy conjugate or negation; give {name}.resolve_conj().resolve_neg()")
    return Unsupported(f"{name}: dtype {tensor.dtype} is not one that the library reduces or sends")


class TorchMemory(Memory):
    """torch's tensors, for the operations that hosts share."""

    kind = torch.Tensor
    kind_name = "torch.Tensor"
    lend = staticmethod(lend)
    lend_bits = staticmethod(lend_bits)

    def empty(self, count, like):
        return torch.empty(count, dtype=like.dtype)

    def failed(self, status):
        raise last(status)


MEMORY = TorchMemory()
