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
_DTYPES = {getattr(torch, name): code for name, code in _BY_NAME.items() if hasattr(torch, name)}
_PLAIN = {torch.Tensor, torch.nn.Parameter}


def lend(tensor, name):
    """The DLTensor of a tensor, which `name` calls in messages; it keeps the tensor.

    Raises TypeError for what is no tensor, InvalidArgument or Unsupported for one that can't be lent as it is.
    """
    kind = type(tensor)
    if kind not in _PLAIN:
        tensor = _plain(tensor, name)
    code = _DTYPES.get(tensor.dtype)
    if code is None or not tensor.is_cpu or tensor.layout is not _strided or tensor.is_neg() or tensor.is_conj():
        raise _refusal(tensor, name)
    if tensor.is_contiguous():
        return _describe(tensor, tensor.data_ptr(), code[0], code[1], (tensor.numel(),), (1,))
    return _describe(tensor, tensor.data_ptr(), code[0], code[1], tensor.shape, tensor.stride())


def lend_bits(tensor, name):
    """`lend` for operations that only move elements: dtypes unknown to the library go as integers of their size."""
    if tensor.dtype in _DTYPES or tensor.dtype.itemsize not in (1, 2, 4, 8):
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


# ---- Lists of tensors ------------------------------------------------------------------------------------------------


def like(tensors, first, name):
    """Raise unless the tensors have the shape and dtype of `first`."""
    shape, dtype = first.shape, first.dtype
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}[{index}]: a {type(tensor).__name__} is not a torch.Tensor")
        if tensor.dtype != dtype:
            raise InvalidArgument(f"{name}[{index}] has dtype {tensor.dtype}, expected {dtype}")
        if tensor.shape != shape:
            raise InvalidArgument(f"{name}[{index}] has shape {tuple(tensor.shape)}, expected {tuple(shape)}")


def joined(tensors, name):
    """The DLTensor of tensors of one dtype that lie one after the other without gaps, as the chunks of a tensor do;
    None when these don't."""
    if not tensors:
        return None
    parts = [lend_bits(tensor, name) for tensor in tensors]
    address = end = parts[0].data
    count = 0
    for tensor, part in zip(tensors, parts):
        if part.ndim != 1 or part.data != end or not tensor.is_contiguous():
            return None
        count += part.shape[0]
        end = (end or 0) + part.shape[0] * tensor.element_size()
    head = parts[0].dtype
    return _describe(list(tensors), address or 0, head.code, head.bits, (count,), (1,))


def packed(tensors):
    """A new flat tensor of the tensors' elements, one after the other."""
    with torch.no_grad():
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unpack(flat, tensors):
    """Copy the elements of `flat` to the tensors, in order. By the library: autograd does not see it, as it does not
    see what a collective writes, and it may run on any thread."""
    start = 0
    for tensor in tensors:
        count = tensor.numel()
        part = flat.narrow(0, start, count).view(tensor.shape)
        start += count
        input, output = lend_bits(part, "part"), lend_bits(tensor, "output")
        if output.ndim != 1:  # strided: element by element in the tensor's own shape
            input = _describe(part, part.data_ptr(), input.dtype.code, input.dtype.bits, part.shape, part.stride())
        status = abi.lib.fsdp_copy(input, output)
        if status:
            raise last(status)
