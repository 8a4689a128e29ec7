"""TensorPlay's tensors as the library sees them: a DLTensor on the tensor's own memory, nothing copied.

Through DLPack: `__dlpack__` is one call that says address, dtype, strides and device, about as quick as asking for each
by itself. And its capsule, which stays with the DLTensor, keeps the memory to the end of an operation even if the tensor
is given other memory meanwhile (`set_`, `.data = ...`). Python drops it, and what frees it is TensorPlay's own.
"""

import ctypes
import struct

import tensorplay

from .. import abi
from ..borrow import _capsule_pointer, _describe
from ..dtypes import NAMES
from ..errors import InvalidArgument, Unsupported, last
from ..hosts import tensors

_fields = struct.Struct("=QiiiBBHQQQ").unpack  # a DLTensor's, in one go: field by field takes ctypes longer
_SIZE = ctypes.sizeof(abi.DLTensor)
_bytes_at = ctypes.string_at


class Memory(tensors.Memory):
    kind = tensorplay.Tensor
    kind_name = "tensorplay.Tensor"

    def lend(self, tensor, name):
        return _lend(tensor, name, True)

    def lend_bits(self, tensor, name):
        return _lend(tensor, name, False)

    def empty(self, count, like):
        return tensorplay.empty(count, dtype=like.dtype)

    def failed(self, status):
        raise last(status)


def _lend(tensor, name, known_only):
    try:
        capsule = tensor.__dlpack__()
        fields = _bytes_at(_capsule_pointer(capsule, b"dltensor"), _SIZE)
        contiguous = tensor.is_contiguous()
    except Exception as error:
        raise _refusal(tensor, name, error) from None
    address, device, _, ndim, code, bits, lanes, shape, strides, offset = _fields(fields)
    if device != abi.kDLCPU or lanes != 1:
        raise _refusal(tensor, name, None)
    if (code, bits) not in NAMES:
        if known_only or bits not in (8, 16, 32, 64):
            raise Unsupported(f"{name}: dtype {tensor.dtype} is not one that the library reduces or sends")
        code = abi.kDLUInt
    address += offset
    if contiguous:
        return _describe(capsule, address, code, bits, (tensor.numel(),), (1,))
    dims = abi.c_int64 * ndim
    return _describe(capsule, address, code, bits, dims.from_address(shape), dims.from_address(strides))


def _refusal(tensor, name, error):
    if not isinstance(tensor, tensorplay.Tensor):
        return TypeError(f"{name}: a {type(tensor).__name__} is not a tensorplay.Tensor")
    if getattr(tensor, "is_sparse", False):
        return Unsupported(f"{name} is sparse; give {name}.to_dense()")
    if tensor.device.type != "cpu":
        return Unsupported(f"{name} is on {tensor.device}; the backend 'fsdp' handles host memory: give {name}.cpu()")
    return InvalidArgument(f"{name}: this tensor (dtype {tensor.dtype}) can't be shared through DLPack: {error}")
