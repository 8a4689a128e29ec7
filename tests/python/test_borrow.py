"""Lending arrays to the library: the DLTensor says what the array is, and what can't be lent is refused by name."""

import array
import ctypes
import gc
import sys
import types
import weakref

import numpy as np
import pytest

import libfsdp
from libfsdp import abi
from libfsdp.borrow import borrow

ml_dtypes = pytest.importorskip("ml_dtypes")


def facts(tensor):
    n = tensor.ndim
    dtype = tensor.dtype
    return tuple(tensor.shape[:n]), tuple(tensor.strides[:n]), (dtype.code, dtype.bits, dtype.lanes)


def first_bytes(tensor, count):
    return ctypes.string_at(tensor.data + tensor.byte_offset, count)


DTYPES = [
    ("float64", abi.kDLFloat, 64),
    ("float32", abi.kDLFloat, 32),
    ("float16", abi.kDLFloat, 16),
    ("int8", abi.kDLInt, 8),
    ("int16", abi.kDLInt, 16),
    ("int32", abi.kDLInt, 32),
    ("int64", abi.kDLInt, 64),
    ("longlong", abi.kDLInt, 64),
    ("uint8", abi.kDLUInt, 8),
    ("uint16", abi.kDLUInt, 16),
    ("uint32", abi.kDLUInt, 32),
    ("uint64", abi.kDLUInt, 64),
    ("bool", abi.kDLBool, 8),
    ("complex64", abi.kDLComplex, 64),
    ("complex128", abi.kDLComplex, 128),
    (ml_dtypes.bfloat16, abi.kDLBfloat, 16),
    (ml_dtypes.float8_e4m3fn, abi.kDLFloat8_e4m3fn, 8),
    (ml_dtypes.float8_e5m2, abi.kDLFloat8_e5m2, 8),
]


@pytest.mark.parametrize("dtype, code, bits", DTYPES, ids=lambda value: str(getattr(value, "__name__", value)))
def test_numpy_dtypes(dtype, code, bits):
    x = np.arange(6).reshape(2, 3).astype(dtype)
    tensor = borrow(x, "x")
    assert facts(tensor) == ((2, 3), (3, 1), (code, bits, 1))
    assert (tensor.device.device_type, tensor.device.device_id, tensor.byte_offset) == (1, 0, 0)
    assert first_bytes(tensor, x.nbytes) == x.tobytes()


@pytest.mark.parametrize(
    "view, shape, strides",
    [
        (lambda x: x[2:, 1:], (2, 4), (5, 1)),
        (lambda x: x[:, 0], (4,), (5,)),
        (lambda x: x.T, (5, 4), (1, 5)),
        (lambda x: x[::-2], (2, 5), (-10, 1)),
        (lambda x: np.broadcast_to(x[:, :1], (4, 3)), (4, 3), (5, 0)),
        (lambda x: x[1:1], (0, 5), (5, 1)),
        (lambda x: x[2, 3].reshape(()), (), ()),
        (lambda x: x.reshape(1, 4, 1, 5), (1, 4, 1, 5), (20, 5, 5, 1)),
    ],
)
def test_numpy_views_keep_their_strides(view, shape, strides):
    x = np.arange(20, dtype="int32").reshape(4, 5)
    y = view(x)
    tensor = borrow(y, "y")
    assert facts(tensor) == (shape, strides, (abi.kDLInt, 32, 1))
    if y.size:
        assert first_bytes(tensor, 4) == y.ravel()[:1].tobytes()


def test_misaligned_arrays_are_lent_as_they_are():
    raw = np.zeros(17, "uint8")
    x = raw[1:].view("float32")
    assert borrow(x, "x").data == raw.ctypes.data + 1


def test_32_dimensions():
    x = np.zeros((1,) * 31 + (2,), "float32")
    assert borrow(x, "x").ndim == 32


class OneHolder:
    """Speaks DLPack by lending a NumPy array, as producers of several ages do."""

    def __init__(self, x, versions=(True,), device=(1, 0)):
        self.x, self.versions, self.device = x, versions, device
        self.requests = []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **keywords):
        self.requests.append(keywords)
        if keywords and True not in self.versions:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self.x.__dlpack__(**keywords)


@pytest.mark.parametrize("versions", [(True,), (False,)], ids=["versioned", "legacy"])
def test_dlpack_objects(versions):
    x = np.arange(20, dtype="float64").reshape(4, 5)[1:, ::2]
    holder = OneHolder(x, versions)
    tensor = borrow(holder, "x", writable=True)
    assert facts(tensor) == ((3, 3), (5, 2), (abi.kDLFloat, 64, 1))
    assert tensor.data + tensor.byte_offset == x.ctypes.data
    assert holder.requests[0] == {"max_version": (1, 3)}
    assert len(holder.requests) == (1 if True in versions else 2)


def test_a_capsule_lives_as_long_as_the_tensor_and_is_not_consumed():
    class Tracked(np.ndarray):
        pass

    x = np.zeros(3, "float32").view(Tracked)
    alive = weakref.ref(x)
    holder = OneHolder(x)
    tensor = borrow(holder, "x")
    holder.x = None
    del x, holder
    gc.collect()
    assert alive() is not None
    del tensor
    gc.collect()
    assert alive() is None  # the capsule's own destructor ran: nobody had taken it


def test_an_array_lives_as_long_as_its_tensor():
    class Tracked(np.ndarray):
        pass

    x = np.zeros(3, "float32").view(Tracked)
    alive = weakref.ref(x)
    tensor = borrow(x, "x")
    del x
    gc.collect()
    assert alive() is not None
    del tensor
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("make", [bytearray, lambda data: memoryview(bytearray(data)), lambda data: array.array("B", data)])
def test_buffers(make):
    x = make(b"\1\2\3\4")
    tensor = borrow(x, "x", writable=True)
    assert facts(tensor) == ((4,), (1,), (abi.kDLUInt, 8, 1))
    assert first_bytes(tensor, 4) == b"\1\2\3\4"


def test_typed_buffers():
    assert facts(borrow(array.array("d", [1, 2]), "x")) == ((2,), (1,), (abi.kDLFloat, 64, 1))
    assert facts(borrow((ctypes.c_int16 * 3 * 2)(), "x")) == ((2, 3), (3, 1), (abi.kDLInt, 16, 1))
    strided = memoryview(array.array("i", range(6)))[::2]
    assert facts(borrow(strided, "x")) == ((3,), (2,), (abi.kDLInt, 32, 1))


def test_a_buffer_is_released_with_its_tensor():
    x = bytearray(4)
    tensor = borrow(x, "x")
    with pytest.raises(BufferError):
        x.append(1)
    del tensor
    gc.collect()
    x.append(1)


def read_only(x):
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    "make",
    [
        lambda: read_only(np.zeros(3, "float32")),
        lambda: np.broadcast_to(np.zeros(1, "float32"), 3),
        lambda: OneHolder(read_only(np.zeros(3, "float32"))),
        lambda: b"abc",
        lambda: memoryview(b"abc"),
    ],
    ids=["numpy", "broadcast", "dlpack", "bytes", "memoryview"],
)
def test_read_only_arrays_are_inputs_but_not_outputs(make):
    x = make()
    borrow(x, "it")
    with pytest.raises(ValueError, match="^it is read-only") as caught:
        borrow(x, "it", writable=True)
    assert isinstance(caught.value, libfsdp.InvalidArgument)


def masked():
    return np.ma.masked_array([1.0, 2.0], [False, True])


@pytest.mark.parametrize(
    "make, kind, says",
    [
        (lambda: None, TypeError, "NoneType"),
        (lambda: [1.0, 2.0], TypeError, "list"),
        (lambda: 3.0, TypeError, "float"),
        (masked, libfsdp.InvalidArgument, "mask"),
        (lambda: np.zeros(2, ">f4"), libfsdp.Unsupported, "byte order"),
        (lambda: np.zeros(2, "datetime64[s]"), libfsdp.Unsupported, "datetime64"),
        (lambda: np.array([{}]), libfsdp.Unsupported, "object"),
        (lambda: np.array(["a"]), libfsdp.Unsupported, "str"),
        (lambda: np.zeros(2, np.longdouble), libfsdp.Unsupported, "longdouble|float128"),
        (lambda: np.zeros(2, ml_dtypes.float8_e8m0fnu), libfsdp.Unsupported, "float8_e8m0fnu"),
        (lambda: np.zeros(3, [("a", "i1"), ("b", "f4")])["b"], libfsdp.InvalidArgument, "strides"),
        (lambda: OneHolder(np.zeros(2), device=(2, 0)), libfsdp.Unsupported, "device"),
        (lambda: array.array("u", "ab"), libfsdp.Unsupported, "format"),
    ],
)
def test_what_is_refused_is_named(make, kind, says):
    with pytest.raises(kind, match=says) as caught:
        borrow(make(), "some_argument")
    assert str(caught.value).startswith("some_argument")


def test_a_producer_that_fails_is_named():
    class Broken(OneHolder):
        def __dlpack__(self, **keywords):
            raise BufferError("sparse")

    with pytest.raises(libfsdp.InvalidArgument, match="x: Broken.__dlpack__ failed: sparse"):
        borrow(Broken(np.zeros(2)), "x")


def test_a_capsule_that_was_taken_is_refused():
    class Stale(OneHolder):
        def __dlpack__(self, **keywords):
            self.taken = self.x.__dlpack__(**keywords)
            np.from_dlpack(OneHolder.of(self.taken))
            return self.taken

    class Once:
        def __init__(self, capsule):
            self.capsule = capsule

        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **keywords):
            return self.capsule

    OneHolder.of = Once
    with pytest.raises(libfsdp.InvalidArgument, match="unconsumed"):
        borrow(Stale(np.zeros(2)), "x")


# ---- The C exchange API, with a producer made here -------------------------------------------------------------------


def exchange_type(major=1, with_quick=True, older=None):
    """A type that hands out its array through __dlpack_c_exchange_api__, and notes that it did."""

    class Exchanged:
        calls = 0

        def __init__(self, x):
            self.x = x
            self.lent = borrow(x, "x")

        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **keywords):
            return self.x.__dlpack__(**keywords)

    @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(abi.DLTensor))
    def quick(it, out):
        Exchanged.calls += 1
        out[0] = it.lent
        return 0

    table = abi.DLPackExchangeAPI()
    table.header.version.major = major
    if older is not None:
        table.header.prev_api = ctypes.pointer(older.table.header)
    if with_quick:
        table.dltensor_from_py_object_no_sync = ctypes.cast(quick, ctypes.c_void_p)
    name = b"dlpack_exchange_api"
    new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    capsule = new(("PyCapsule_New", ctypes.pythonapi))(ctypes.addressof(table), name, None)
    Exchanged.table, Exchanged.quick, Exchanged.name = table, quick, name
    Exchanged.__dlpack_c_exchange_api__ = capsule
    return Exchanged


def test_exchange_api_is_used_where_a_type_has_it():
    kind = exchange_type()
    x = np.arange(6, dtype="float32").reshape(2, 3)
    tensor = borrow(kind(x), "x")
    assert facts(tensor) == ((2, 3), (3, 1), (abi.kDLFloat, 32, 1))
    assert tensor.data == x.ctypes.data
    assert kind.calls == 1


def test_exchange_api_has_no_flags_so_outputs_go_the_long_way():
    kind = exchange_type()
    borrow(kind(np.zeros(2, "float32")), "out", writable=True)
    with pytest.raises(libfsdp.InvalidArgument, match="read-only"):
        borrow(kind(read_only(np.zeros(2, "float32"))), "out", writable=True)
    assert kind.calls == 0


def test_exchange_api_of_an_unknown_version_or_without_the_quick_form_is_left_alone():
    for kind in (exchange_type(major=2), exchange_type(with_quick=False)):
        borrow(kind(np.zeros(2, "float32")), "x")
        assert kind.calls == 0
    older = exchange_type()
    newer = exchange_type(major=2, older=older)
    tensor = borrow(newer(np.zeros(2, "float32")), "x")
    assert older.calls == 1 and newer.calls == 0 and tensor.ndim == 1


def test_lazy_conjugates_are_refused():
    class Lazy(exchange_type()):
        lazy = False

        def is_conj(self):
            return self.lazy

        def is_neg(self):
            return False

    x = Lazy(np.zeros(2, "complex64"))
    borrow(x, "x")
    x.lazy = True
    with pytest.raises(libfsdp.InvalidArgument, match="^x is a lazy conjugate"):
        borrow(x, "x")


# ---- Torch, as far as it matters here --------------------------------------------------------------------------------


class Gradual(OneHolder):
    """A tensor as torch makes them: it may require grad, and counts what is written."""

    requires_grad, inference, version = False, False, 0

    def detach(self):
        assert self.requires_grad
        return OneHolder(self.x)

    def is_inference(self):
        return self.inference

    def __dlpack__(self, **keywords):
        if self.requires_grad:
            raise BufferError("can't export tensors that require gradient")
        return super().__dlpack__(**keywords)


@pytest.fixture
def torch(monkeypatch):
    def increment_version(tensor):
        tensor.version += 1

    class Tensor(Gradual):
        pass

    fake = types.SimpleNamespace(
        Tensor=Tensor,
        enabled=True,
        is_grad_enabled=lambda: fake.enabled,
        autograd=types.SimpleNamespace(graph=types.SimpleNamespace(increment_version=increment_version)),
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


def test_a_tensor_that_requires_grad_is_an_output_only_without_autograd(torch):
    x = torch.Tensor(np.arange(3, dtype="float32"))
    x.requires_grad = True
    assert borrow(x, "x").data == x.x.ctypes.data  # read: nothing that autograd would miss
    with pytest.raises(libfsdp.InvalidArgument, match=r"^x requires grad.*x\.detach\(\).*no_grad"):
        borrow(x, "x", True)
    assert x.version == 0
    torch.enabled = False
    assert borrow(x, "x", True).data == x.x.ctypes.data
    assert x.version == 1


def test_autograd_hears_what_is_written(torch):
    x = torch.Tensor(np.zeros(3, "float32"))
    borrow(x, "x")
    assert x.version == 0
    libfsdp.Group.single().all_reduce(x)
    assert x.version == 1
    x.inference = True  # has no version
    borrow(x, "x", True)
    assert x.version == 1


def test_an_old_torch_counts_nothing(torch):
    torch.autograd.graph = None
    borrow(torch.Tensor(np.zeros(3, "float32")), "x", True)
