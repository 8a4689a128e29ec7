"""Lends arrays to the library: any Python array becomes a DLTensor that points at the array's own memory.

`borrow(array, name, writable)` is all there is. The DLTensor that it returns keeps the array alive, so whoever holds it
until the operation is done need not think about ownership. Nothing is copied and nothing is consumed: a DLPack
capsule is read while it is held, and its producer frees it afterwards.

One reader is chosen for each type of array and remembered:

  NumPy arrays          shape, strides and address straight from the array; ml_dtypes' bfloat16 and float8 by name
  libfsdp.Tensor        its own DLTensor
  torch                 by one of the next two, with autograd's rules for outputs
  C exchange API        types with `__dlpack_c_exchange_api__` (torch 2.10 and newer), one C call
  `__dlpack__`          everything else that speaks DLPack, versioned or not
  buffer protocol       bytearray, memoryview, array.array, ctypes arrays

A DLTensor has no room to say "read-only", so an array that may not be written is refused here as an output.
"""

import ctypes
import struct
import sys
from ctypes import POINTER, PYFUNCTYPE, Structure, c_char_p, c_int, c_int64, c_ssize_t, c_void_p, py_object

from . import abi
from .dtypes import TABLE, name_of
from .errors import InvalidArgument, Unsupported, VersionMismatch

_capsule_is = PYFUNCTYPE(c_int, py_object, c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_capsule_pointer = PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


def borrow(array, name, writable=False):
    """The DLTensor of `array`, which `name` calls in messages; `writable` for one that the library will write.

    Raises TypeError for what is no array, InvalidArgument for one that can't be used as it is (read-only, masked,
    strides between elements), Unsupported for a dtype or device that the library does not handle.
    """
    reader = _readers.get(type(array))
    if reader is None:
        reader = _readers[type(array)] = _choose(array, name)
    return reader(array, name, writable)


def _choose(array, name):
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, numpy.ndarray):
        return _from_masked if isinstance(array, numpy.ma.MaskedArray) else _from_numpy
    from .tensor import Tensor  # here, not above: tensor.py needs this module

    if isinstance(array, Tensor):
        return _from_tensor
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _torch_reader(_dlpack_reader(array), torch)
    reader = _dlpack_reader(array)
    if reader is not None:
        return reader
    try:
        memoryview(array)
    except TypeError:
        raise TypeError(
            f"{name}: a {type(array).__name__} is not an array; give a NumPy array, or an object with __dlpack__"
        ) from None
    return _from_buffer


_readers = {}  # type of array: its reader


def _dlpack_reader(array):
    """The reader for an object that speaks DLPack in some way, else None."""
    exchange = _exchange_function(type(array))
    if exchange is not None:
        return _exchange_reader(exchange, type(array))
    return _from_dlpack if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__") else None


def _read_only(name):
    return InvalidArgument(f"{name} is read-only, and this call writes it; give a writable array")


# ---- Building a DLTensor ---------------------------------------------------------------------------------------------

_layouts = {}  # ndim: (struct of a DLTensor with its shape and strides behind it, packer of all its fields)
_SIZE = ctypes.sizeof(abi.DLTensor)


def _layout(ndim):
    layout = type(f"DLTensor{ndim}", (Structure,), {"_fields_": [("head", abi.DLTensor), ("dims", c_int64 * (2 * ndim))]})
    packer = struct.Struct(f"=QiiiBBHQQQ{2 * ndim}q")  # DLTensor's fields have no gaps
    assert packer.size == ctypes.sizeof(layout)
    _layouts[ndim] = layout, packer.pack_into
    return _layouts[ndim]


def _describe(owner, address, code, bits, shape, strides):
    """A DLTensor for memory of `owner`, strides in elements."""
    ndim = len(shape)
    layout, pack = _layouts.get(ndim) or _layout(ndim)
    block = layout()
    base = ctypes.addressof(block) + _SIZE
    pack(block, 0, address, abi.kDLCPU, 0, ndim, code, bits, 1, base, base + 8 * ndim, 0, *shape, *strides)
    tensor = block.head  # keeps block
    tensor.owner = owner
    return tensor


# ---- NumPy -----------------------------------------------------------------------------------------------------------

_numpy_dtypes = {}  # numpy.dtype: (code, bits, size of an element)


def _from_numpy(array, name, writable):
    try:
        code, bits, size = _numpy_dtypes[array.dtype]
    except KeyError:
        code, bits, _ = TABLE[name_of(array.dtype, name)]
        size = array.dtype.itemsize
        _numpy_dtypes[array.dtype] = code, bits, size
    address, read_only = array.__array_interface__["data"]
    if read_only and writable:
        raise _read_only(name)
    strides = array.strides
    if size != 1:
        strides = tuple([stride // size for stride in strides])
        if tuple([stride * size for stride in strides]) != array.strides:
            raise InvalidArgument(
                f"{name}: strides {array.strides} in bytes are not whole elements of {size} bytes (a field of a "
                "structured array?); give a copy"
            )
    return _describe(array, address, code, bits, array.shape, strides)


def _from_masked(array, name, writable):
    raise InvalidArgument(f"{name}: a masked array would lose its mask; give its .data, or .filled(value)")


# ---- The library's own -----------------------------------------------------------------------------------------------


def _from_tensor(tensor, name, writable):
    if writable and tensor.read_only:
        raise _read_only(name)
    head = tensor._managed.contents.dl_tensor
    head.owner = tensor
    return head


# ---- DLPack ----------------------------------------------------------------------------------------------------------


def _check_device(device_type, name):
    if device_type != abi.kDLCPU:
        raise Unsupported(f"{name} is on a device (DLPack device type {int(device_type)}); only host memory (1) is supported")


def capsule_of(array, name):
    """An unconsumed DLPack capsule of `array`, an object with `__dlpack__`."""
    try:
        try:
            capsule = array.__dlpack__(max_version=(abi.DLPACK_MAJOR_VERSION, abi.DLPACK_MINOR_VERSION))
        except TypeError:  # a producer from before DLPack 1.0
            capsule = array.__dlpack__()
    except Exception as error:
        raise InvalidArgument(f"{name}: {type(array).__name__}.__dlpack__ failed: {error}") from error
    if not _capsule_is(capsule, b"dltensor_versioned") and not _capsule_is(capsule, b"dltensor"):
        raise InvalidArgument(f"{name}: {type(array).__name__}.__dlpack__ gave no unconsumed DLPack capsule")
    return capsule


def _from_dlpack(array, name, writable):
    try:
        device_type, _ = array.__dlpack_device__()
        device_type = int(device_type)
    except Exception as error:
        raise InvalidArgument(f"{name}: {type(array).__name__}.__dlpack_device__ gave no device: {error}") from error
    _check_device(device_type, name)
    capsule = capsule_of(array, name)
    if _capsule_is(capsule, b"dltensor_versioned"):
        managed = abi.DLManagedTensorVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if managed.version.major != abi.DLPACK_MAJOR_VERSION:
            raise VersionMismatch(f"{name}: DLPack {managed.version.major}.x tensors can't be read, only 1.x")
        if writable and managed.flags & abi.DLPACK_FLAG_BITMASK_READ_ONLY:
            raise _read_only(name)
    else:
        managed = abi.DLManagedTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    tensor = managed.dl_tensor
    _check_device(tensor.device.device_type, name)
    tensor.owner = capsule, array
    return tensor


def _exchange_function(kind):
    """The C function by which a type hands out DLTensors, or None."""
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if capsule is None or not _capsule_is(capsule, b"dlpack_exchange_api"):
        return None
    header = ctypes.cast(_capsule_pointer(capsule, b"dlpack_exchange_api"), POINTER(abi.DLPackExchangeAPIHeader))
    while header and header.contents.version.major != abi.DLPACK_MAJOR_VERSION:
        header = header.contents.prev_api
    if not header:
        return None
    address = ctypes.cast(header, POINTER(abi.DLPackExchangeAPI)).contents.dltensor_from_py_object_no_sync
    return PYFUNCTYPE(c_int, py_object, POINTER(abi.DLTensor))(address) if address else None


def _exchange_reader(function, kind):
    # The quick form carries no flags. Torch has no read-only tensors; any other producer's outputs go the long way.
    flags_matter = kind.__module__.partition(".")[0] != "torch" and hasattr(kind, "__dlpack__")
    lazy_bits = hasattr(kind, "is_conj")  # torch: bits that say "conjugate, negate when read", which DLPack can't tell

    def read(array, name, writable):
        if lazy_bits and (array.is_conj() or array.is_neg()):
            raise InvalidArgument(f"{name} is a lazy conjugate or negation; give {name}.resolve_conj().resolve_neg()")
        if writable and flags_matter:
            return _from_dlpack(array, name, writable)
        tensor = abi.DLTensor()
        try:
            failed = function(array, tensor)
        except Exception as error:
            why = str(error).partition("\n")[0]  # torch adds a C++ stack
            raise InvalidArgument(f"{name}: this {kind.__name__} can't be shared through DLPack: {why}") from error
        if failed:
            raise InvalidArgument(f"{name}: this {kind.__name__} can't be shared through DLPack")
        _check_device(tensor.device.device_type, name)
        tensor.owner = array
        return tensor

    return read


# ---- Torch: what autograd must know ----------------------------------------------------------------------------------


def _torch_reader(read, torch):
    """A reader for torch's tensors: autograd does not see what the library writes, so it is told, or refused."""
    written = getattr(getattr(torch.autograd, "graph", None), "increment_version", None)

    def read_torch(array, name, writable):
        lent = array
        if array.requires_grad:
            if writable and torch.is_grad_enabled():
                raise InvalidArgument(
                    f"{name} requires grad, and autograd would not see that this call writes it; give {name}.detach(), "
                    "or call under torch.no_grad()"
                )
            lent = array.detach()  # the same memory, which __dlpack__ then lends
        tensor = read(lent, name, writable)
        if writable and written is not None and not array.is_inference():
            written(array)  # backward through a value that was saved before this call now fails, as it must
        return tensor

    return read_torch


# ---- The buffer protocol ---------------------------------------------------------------------------------------------


class _PyBuffer(Structure):  # CPython's Py_buffer
    _fields_ = [
        ("buf", c_void_p),
        ("obj", c_void_p),
        ("len", c_ssize_t),
        ("itemsize", c_ssize_t),
        ("readonly", c_int),
        ("ndim", c_int),
        ("format", c_char_p),
        ("shape", POINTER(c_ssize_t)),
        ("strides", POINTER(c_ssize_t)),
        ("suboffsets", POINTER(c_ssize_t)),
        ("internal", c_void_p),
    ]


_get_buffer = PYFUNCTYPE(c_int, py_object, POINTER(_PyBuffer), c_int)(("PyObject_GetBuffer", ctypes.pythonapi))
_release_buffer = PYFUNCTYPE(None, POINTER(_PyBuffer))(("PyBuffer_Release", ctypes.pythonapi))
_PYBUF_RECORDS_RO = 0x10 | 0x08 | 0x04  # strides (with shape), format; read-only will do

_FORMATS = {"e": "float", "f": "float", "d": "float", "?": "bool", "Zf": "complex", "Zd": "complex"}
_FORMATS.update(dict.fromkeys("bhilqn", "int"))
_FORMATS.update(dict.fromkeys("BHILQN", "uint"))


class _Buffer:
    """Holds a buffer of another object for as long as this object lives."""

    def __init__(self, exporter):
        self.view = _PyBuffer()
        # Through a memoryview, which fills in the strides that an exporter may leave out.
        _get_buffer(memoryview(exporter), self.view, _PYBUF_RECORDS_RO)

    def __del__(self):
        if self.view.obj:
            _release_buffer(self.view)


def _from_buffer(array, name, writable):
    try:
        buffer = _Buffer(array)
    except (BufferError, ValueError) as error:
        raise InvalidArgument(f"{name}: {error}") from error
    view = buffer.view
    if writable and view.readonly:
        raise _read_only(name)
    text = (view.format or b"B").decode()
    kind = _FORMATS.get(text.lstrip("@=<"))
    if kind is None:
        raise Unsupported(f"{name}: elements of format {text!r} are not numbers that the library handles")
    dtype = kind if kind == "bool" else f"{kind}{8 * view.itemsize}"
    shape = view.shape[: view.ndim]
    strides = [stride // view.itemsize for stride in view.strides[: view.ndim]]
    if any(stride * view.itemsize != view.strides[dim] for dim, stride in enumerate(strides)):
        raise InvalidArgument(f"{name}: its strides are not whole elements of {view.itemsize} bytes; give a copy")
    return _describe(buffer, view.buf or 0, *TABLE[dtype][:2], shape, strides)
