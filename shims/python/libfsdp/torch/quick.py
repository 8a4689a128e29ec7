"""The shortest way into the library, for calls that run to their end on tensors that have no gaps.

Through Python a small operation costs what Python does around it, many times what the ranks need for the exchange. So
DLTensors are kept and filled anew, one 64-bit word for each field that differs, and functions are called without the
prototypes by which ctypes checks and converts each argument. Whoever calls one gives it exactly what it takes: a
c_void_p, `byref` of a DLTensor, a small int, None. Everything else goes the long way, by tensors.lend and
ProcessGroup._do, which also says what is wrong with a tensor.

A kept DLTensor is one call's until it is given back, on whichever thread: taking one from the list is atomic.
"""

import ctypes

import torch

from .. import abi
from .tensors import DTYPES, PLAIN

_WORDS = 8  # a DLTensor of one dimension: data, device, ndim and dtype, shape, strides, byte_offset; then the dimension
_DATA, _DEVICE, _DTYPE, _SHAPE, _STRIDES, _COUNT, _STRIDE = 0, 1, 2, 3, 4, 6, 7
_Block = ctypes.c_int64 * _WORDS
assert ctypes.sizeof(abi.DLTensor) == 8 * _COUNT and abi.DLTensor.dtype.offset == 8 * _DTYPE + 4

_dtype_words = {
    dtype: int.from_bytes(bytes(abi.DLDataType(code, bits, 1)), "little") << 32 | 1
    for dtype, (code, bits) in DTYPES.items()
}
_strided = torch.strided
_free = []  # (words of a DLTensor, what to pass for it) that no call has


class _Functions:
    """The functions of the library without their prototypes."""

    def __getattr__(self, name):
        getattr(abi.lib, name)  # loads the library
        function = ctypes.CDLL(abi.lib.path)[name]
        function.restype = ctypes.c_int32
        setattr(self, name, function)
        return function


lib = _Functions()


def _block():
    words = _Block()
    start = ctypes.addressof(words)
    words[_DEVICE] = abi.kDLCPU
    words[_SHAPE], words[_STRIDES], words[_STRIDE] = start + 8 * _COUNT, start + 8 * _STRIDE, 1
    return words, ctypes.byref(words)


def take(tensor):
    """(its words, what to pass to a function) of a tensor, to be handed to `give` after the call; the caller keeps the
    tensor. None for a tensor that has gaps, or can't be lent by itself."""
    if type(tensor) not in PLAIN:
        return None
    word = _dtype_words.get(tensor.dtype)
    if (
        word is None
        or tensor.layout is not _strided
        or not (tensor.is_cpu and tensor.is_contiguous())
        or tensor.is_neg()
        or tensor.is_conj()
    ):
        return None
    try:
        block = _free.pop()
    except IndexError:
        block = _block()
    words = block[0]
    words[_DATA], words[_DTYPE], words[_COUNT] = tensor.data_ptr(), word, tensor.numel()
    return block


give = _free.append
