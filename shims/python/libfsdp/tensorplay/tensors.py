"""TensorPlay's tensors as the library sees them: a DLTensor on the tensor's own memory, nothing copied.

Through DLPack: `__dlpack__` is one call that says address, dtype, strides and device, where asking for each by itself
takes longer (a dtype's hash alone is slower). The capsule stays with the DLTensor, so the memory lives to the end of an
operation even if the tensor is given other memory meanwhile (`set_`, `.data = ...`). It is dropped by Python, and what
frees it is TensorPlay's own.
"""

import tensorplay

from .. import abi
from ..borrow import _capsule_pointer, _describe
from ..dtypes import NAMES
from ..errors import InvalidArgument, Unsupported, last
from ..hosts import tensors

_managed = abi.DLManagedTensor.from_address
_known = frozenset(NAMES)


class Memory(tensors.Memory):
    kind = tensorplay.Tensor
    kind_name = "tensorplay.Tensor"

    def lend(self, tensor, name):
        return _lend(tensor, name, _known)

    def lend_bits(self, tensor, name):
        return _lend(tensor, name, None)

    def empty(self, count, like):
        return tensorplay.empty(count, dtype=like.dtype)

    def failed(self, status):
        raise last(status)


def _lend(tensor, name, known):
    try:
        capsule = tensor.__dlpack__()
        head = _managed(_capsule_pointer(capsule, b"dltensor")).dl_tensor
        contiguous = tensor.is_contiguous()
    except Exception as error:
        raise _refusal(tensor, name, error) from None
    dtype = head.dtype
    code, bits = dtype.code, dtype.bits
    if head.device.device_type != abi.kDLCPU or dtype.lanes != 1:
        raise _refusal(tensor, name, None)
    if (code, bits) not in NAMES:
        if known is not None or bits not in (8, 16, 32, 64):
            raise Unsupported(f"{name}: dtype {tensor.dtype} is not one that the library reduces or sends")
        code = abi.kDLUInt
    address = (head.data or 0) + head.byte_offset
    if contiguous:
        return _describe(capsule, address, code, bits, (tensor.numel(),), (1,))
    return _describe(capsule, address, code, bits, head.shape[: head.ndim], head.strides[: head.ndim])


def _refusal(tensor, name, error):
    if not isinstance(tensor, tensorplay.Tensor):
        return TypeError(f"{name}: a {type(tensor).__name__} is not a tensorplay.Tensor")
    if getattr(tensor, "is_sparse", False):
        return Unsupported(f"{name} is sparse; give {name}.to_dense()")
    if tensor.device.type != "cpu":
        return Unsupported(f"{name} is on {tensor.device}; the backend 'fsdp' handles host memory: give {name}.cpu()")
    return InvalidArgument(f"{name}: this tensor (dtype {tensor.dtype}) can't be shared through DLPack: {error}")
