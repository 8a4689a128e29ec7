"""Tensors that the library owns, seen from Python.

A `Tensor` holds one handle on a piece of the library's memory and gives it back, exactly once, when Python drops it.
Array packages reach the same memory without a copy: `tensor.numpy()`, `numpy.from_dlpack(tensor)`,
`torch.from_dlpack(tensor)`; each such view keeps the memory alive by itself.

How a capsule is freed. A consumer that takes a DLPack capsule over renames it; a capsule that nobody took must be freed
by us. The usual way, a destructor on the capsule, would run Python code inside another package's error handling, and
wipe out the error. So the capsule has no destructor: a reference to it is kept in `_exports`, and the next export (or
the death of a tensor) frees what only this list still holds and nobody took.
"""

import ctypes
import operator
import sys
from ctypes import POINTER, PYFUNCTYPE, byref, c_char_p, c_int64, c_void_p, py_object

from . import abi
from .borrow import _capsule_is, _capsule_pointer, borrow, capsule_of
from .dtypes import TABLE, name_in, name_of
from .errors import check
from .handle import integer

_capsule_new = PYFUNCTYPE(py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))
_capsule_rename = PYFUNCTYPE(ctypes.c_int, py_object, c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))

_VERSIONED, _LEGACY = b"dltensor_versioned", b"dltensor"  # PyCapsule keeps the pointer: these live as long as we do
_USED_VERSIONED, _USED_LEGACY = b"used_dltensor_versioned", b"used_dltensor"


def _delete(handle):
    """Call a managed tensor's deleter."""
    deleter = handle.contents.deleter
    if deleter:
        deleter(handle)


class Tensor:
    """A tensor in memory of the library: `shape`, `dtype` (a name such as "bfloat16"), `nbytes`, and ways to see it.

    Made by `libfsdp.zeros`, `libfsdp.from_dlpack` and a unit's `shard`, `full` and `grad`; accepted wherever an array is.

    `copy.copy(tensor)` is another Tensor on the same memory, `copy.deepcopy(tensor)` one on memory of its own. To store
    one or send it elsewhere, take `tensor.numpy()`: a Tensor itself can't be pickled.
    """

    __slots__ = ("_managed", "_again", "__weakref__")

    def __init__(self, managed, again=None):
        """Takes over `managed`, a pointer to a DLManagedTensorVersioned. `again()` gives another handle on the same
        memory, where the library has a call for that."""
        self._managed = managed
        self._again = again

    def __del__(self, delete=_delete):  # bound here: at interpreter exit the module's names may be gone
        managed, self._managed = getattr(self, "_managed", None), None
        if managed:
            delete(managed)
        if _exports:
            _sweep()

    def __copy__(self):
        return Tensor(self._again() if self._again else _share(self), self._again)

    def __deepcopy__(self, memo):
        return copy(self, zeros(self.shape, self.dtype))

    def __reduce__(self):
        raise TypeError("a libfsdp.Tensor can't be pickled: it is memory of this process; pickle its .numpy()")

    @property
    def shape(self):
        tensor = self._managed.contents.dl_tensor
        return tuple(tensor.shape[: tensor.ndim])

    @property
    def strides(self):
        """In elements."""
        tensor = self._managed.contents.dl_tensor
        return tuple(tensor.strides[: tensor.ndim])

    @property
    def dtype(self):
        return name_in(self._managed.contents.dl_tensor)

    @property
    def ndim(self):
        return self._managed.contents.dl_tensor.ndim

    @property
    def size(self):
        """The number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def nbytes(self):
        return self.size * self._managed.contents.dl_tensor.dtype.bits // 8

    @property
    def data_ptr(self):
        """The address of element 0; 0 where there may be none because the tensor has no elements."""
        tensor = self._managed.contents.dl_tensor
        return (tensor.data or 0) + tensor.byte_offset

    @property
    def read_only(self):
        return bool(self._managed.contents.flags & abi.DLPACK_FLAG_BITMASK_READ_ONLY)

    def __len__(self):
        if not self.ndim:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __repr__(self):
        return f"libfsdp.Tensor(shape={self.shape}, dtype={self.dtype})"

    def numpy(self):
        """A NumPy array over the same memory, no copy; it keeps the memory alive.

        bfloat16 and float8 come as the ml_dtypes package's dtypes where that package can be imported. Where it can't,
        NumPy has no such dtypes: the array then holds the bits, as uint16 and uint8.
        """
        import numpy

        dtype = self.dtype
        if self.size:
            array = numpy.asarray(_ArrayInterface(self, TABLE[dtype][2]))
        else:
            array = numpy.empty(self.shape, TABLE[dtype][2])
        if dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            try:
                import ml_dtypes
            except ImportError:
                return array
            array = array.view(getattr(ml_dtypes, dtype))
        return array

    def __array__(self, dtype=None, copy=None):
        import numpy

        array = self.numpy()
        if dtype is not None and numpy.dtype(dtype) != array.dtype:
            if copy is False:
                raise ValueError(f"a {self.dtype} tensor can't become {numpy.dtype(dtype)} without a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    def __dlpack_device__(self):
        return abi.kDLCPU, 0

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """A DLPack capsule of the same memory: versioned when `max_version` is (1, 0) or newer, else legacy."""
        if stream is not None:
            raise BufferError("stream: host memory has no streams; give None")
        if dl_device is not None and tuple(map(int, dl_device)) != (abi.kDLCPU, 0):
            raise BufferError(f"dl_device: the tensor is in host memory (1, 0), not on {tuple(dl_device)}")
        _sweep()
        if copy:
            handle = _copied(self)
        else:
            handle = self._again() if self._again else _share(self)
        try:
            if max_version is not None and max_version[0] >= 1:
                capsule = _capsule_new(ctypes.addressof(handle.contents), _VERSIONED, None)
            else:
                legacy = POINTER(abi.DLManagedTensor)()
                status = abi.lib.fsdp_tensor_to_legacy(handle, byref(legacy))
                if status == abi.FSDP_ERR_INVALID:
                    raise BufferError("a read-only tensor has no form before DLPack 1.0; ask with max_version=(1, 0)")
                check(status)
                handle = legacy
                capsule = _capsule_new(ctypes.addressof(handle.contents), _LEGACY, None)
        except BaseException:
            _delete(handle)
            raise
        _exports.append((capsule, handle))
        return capsule


class _ArrayInterface:
    """What NumPy reads a tensor's memory through, and keeps as the array's base."""

    def __init__(self, tensor, typestr):
        head = tensor._managed.contents.dl_tensor
        size = head.dtype.bits // 8
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "shape": tensor.shape,
            "typestr": ("<" if sys.byteorder == "little" else ">") + typestr,
            "data": (tensor.data_ptr, tensor.read_only),
            "strides": tuple(stride * size for stride in tensor.strides),
        }


# ---- Handing memory out ----------------------------------------------------------------------------------------------

_exports = []  # (capsule, handle) of what was handed out and, as far as is known, not taken


def _references(entry):
    return sys.getrefcount(entry[0])


_ALONE = _references((object(),))  # what _references says for an object that only its entry holds


def _sweep():
    """Forget the capsules that were taken; free those that were dropped untaken."""
    in_use = []
    while _exports:
        entry = _exports.pop()  # one by one: a deleter, or another thread, may come back here
        if not (_capsule_is(entry[0], _VERSIONED) or _capsule_is(entry[0], _LEGACY)):
            continue
        if _references(entry) > _ALONE:
            in_use.append(entry)
        else:
            _delete(entry[1])
    _exports.extend(in_use)


_shares = {}  # address of a handle that _share made: (its struct, the tensor whose memory it shows)


@abi.VersionedDeleter
def _share_deleter(handle):
    _shares.pop(ctypes.addressof(handle.contents), None)


def _share(tensor):
    """Another handle on a tensor's memory: the library's, whose deleter runs anywhere, or, for memory of others, one made
    here, whose deleter needs the interpreter."""
    shared = POINTER(abi.DLManagedTensorVersioned)()
    if abi.lib.fsdp_tensor_share(tensor._managed, byref(shared)) == abi.FSDP_OK:
        return shared
    source = tensor._managed.contents
    return _held(source.dl_tensor, tensor, source.flags)


def _held(dl_tensor, owner, flags):
    """A handle on memory that `owner`, kept until the handle's deleter runs, describes as `dl_tensor`."""
    struct = abi.DLManagedTensorVersioned()
    struct.version.major, struct.version.minor = abi.DLPACK_MAJOR_VERSION, abi.DLPACK_MINOR_VERSION
    struct.flags = flags
    struct.dl_tensor = dl_tensor
    struct.deleter = _share_deleter
    _shares[ctypes.addressof(struct)] = struct, owner
    return ctypes.pointer(struct)


def lend(array, name, writable=True):
    """A handle on an array's own memory for a call of the library that takes ownership; the array lives as long. Its
    deleter needs the interpreter. Raises as `borrow` does."""
    if isinstance(array, Tensor):
        borrow(array, name, writable)
        return _share(array)
    borrowed = borrow(array, name, writable)
    return _held(borrowed, (array, borrowed), 0 if writable else abi.DLPACK_FLAG_BITMASK_READ_ONLY)


def _copied(tensor):
    """A handle on a copy."""
    twin = zeros(tensor.shape, tensor.dtype)
    copy(tensor, twin)
    handle, twin._managed = twin._managed, None
    handle.contents.flags |= abi.DLPACK_FLAG_BITMASK_IS_COPIED
    return handle


# ---- Functions -------------------------------------------------------------------------------------------------------


def zeros(shape, dtype="float32"):
    """A new Tensor of zeros, in memory of the library (row-major, 64-byte aligned).

    shape: an integer or a sequence of them. dtype: a name, or a NumPy, ml_dtypes or torch dtype.
    Raises InvalidArgument (negative size), Unsupported (dtype), OutOfMemory.
    """
    try:
        lengths = [operator.index(shape)]
    except TypeError:
        lengths = [integer(length, "shape", bits=64) for length in shape]
    code, bits, _ = TABLE[name_of(dtype)]
    managed = POINTER(abi.DLManagedTensorVersioned)()
    dims = (c_int64 * len(lengths))(*lengths)
    check(abi.lib.fsdp_zeros(byref(abi.DLDataType(code, bits, 1)), len(lengths), dims, byref(managed)))
    return Tensor(managed)


def from_dlpack(array):
    """A Tensor over the memory of `array`, an object with `__dlpack__`. No copy; the array's memory stays alive with it.

    Raises as `borrow` does for arrays that are no use to the library: TypeError, InvalidArgument, Unsupported.
    """
    borrow(array, "array")  # says in words what is wrong with it
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"array: a {type(array).__name__} has no __dlpack__; give numpy.asarray(array)")
    capsule = capsule_of(array, "array")
    if _capsule_is(capsule, _VERSIONED):
        managed = ctypes.cast(_capsule_pointer(capsule, _VERSIONED), POINTER(abi.DLManagedTensorVersioned))
        _capsule_rename(capsule, _USED_VERSIONED)
        return Tensor(managed)
    legacy = ctypes.cast(_capsule_pointer(capsule, _LEGACY), POINTER(abi.DLManagedTensor))
    managed = POINTER(abi.DLManagedTensorVersioned)()
    check(abi.lib.fsdp_tensor_from_legacy(legacy, byref(managed)))
    _capsule_rename(capsule, _USED_LEGACY)
    return Tensor(managed)


def copy(input, out):
    """out[...] = input[...], and return `out`. Same shape, any strides; casts between dtypes.

    Floats round to nearest even; float to integer truncates and saturates. Raises InvalidArgument (shapes differ, `out`
    is read-only, overlaps itself or `input`).
    """
    check(abi.lib.fsdp_copy(borrow(input, "input"), borrow(out, "out", True)))
    return out


def shard_extent(rows, rank, world_size):
    """(start, length): which of `rows` rows are `rank`'s when they are cut for `world_size` ranks.

    Chunks of ceil(rows / world_size); trailing ranks get fewer or none, and an empty shard starts at `rows`.
    """
    start, length = c_int64(), c_int64()
    arguments = integer(rows, "rows", bits=64), integer(rank, "rank"), integer(world_size, "world_size")
    check(abi.lib.fsdp_shard_extent(*arguments, byref(start), byref(length)))
    return start.value, length.value


def shard(full, out, *, rank, world_size, dim=0):
    """Copy `rank`'s part of `full` along `dim` to `out`, casting, and return `out`. No communication.

    `out` has `full`'s shape but for `out.shape[dim]`, which is `shard_extent(full.shape[dim], rank, world_size)[1]`.
    """
    arguments = integer(dim, "dim"), integer(rank, "rank"), integer(world_size, "world_size")
    check(abi.lib.fsdp_shard(borrow(full, "full"), *arguments, borrow(out, "out", True)))
    return out
