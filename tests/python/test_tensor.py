"""Memory of the library in Python: views without a copy, capsules of both ages, and each deleter called exactly once."""

import copy
import ctypes
import gc
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
from conftest import environment

import libfsdp
import libfsdp.numpy
from libfsdp import abi
from libfsdp import tensor as tensor_module
from libfsdp.borrow import borrow
from libfsdp.tensor import Tensor

ml_dtypes = pytest.importorskip("ml_dtypes")


class Made:
    """Handles on one NumPy array, as the library would give them, that count their deletions."""

    def __init__(self, x, flags=0):
        self.x, self.flags = x, flags
        self.handles, self.deleted = [], []
        self.lent = borrow(x, "x")

        @abi.VersionedDeleter
        def deleter(handle):
            self.deleted.append(ctypes.addressof(handle.contents))

        self.deleter = deleter

    def __call__(self):
        handle = abi.DLManagedTensorVersioned()
        handle.version.major, handle.version.minor = 1, 3
        handle.flags = self.flags
        handle.deleter = self.deleter
        handle.dl_tensor = self.lent
        self.handles.append(handle)
        return ctypes.pointer(handle)

    def assert_all_deleted_once(self, n):
        gc.collect()
        tensor_module._sweep()
        assert len(self.handles) == n
        assert sorted(self.deleted) == sorted(map(ctypes.addressof, self.handles))


def made_tensor(x, **more):
    made = Made(x, **more)
    return made, Tensor(made(), made)


def test_the_deleter_is_called_once():
    made, tensor = made_tensor(np.arange(6, dtype="float32"))
    assert made.deleted == []
    del tensor
    made.assert_all_deleted_once(1)


def test_numpy_view_shares_and_keeps_the_memory():
    x = np.arange(6, dtype="float32").reshape(2, 3)
    made, tensor = made_tensor(x)
    view = tensor.numpy()
    assert (view.shape, view.dtype, view.ctypes.data) == ((2, 3), np.float32, x.ctypes.data)
    view[1, 2] = 50
    assert x[1, 2] == 50
    part = view[1:]
    del tensor, view
    gc.collect()
    assert made.deleted == []
    del part
    made.assert_all_deleted_once(1)


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (1, 3), (2, 0)])
def test_from_dlpack_keeps_the_memory(version):
    if version in (None, (0, 8)) and not library_is_there():
        pytest.skip("libfsdp.so is not built")
    x = np.arange(6, dtype="int64").reshape(3, 2)
    made, tensor = made_tensor(x)
    taken = np.from_dlpack(Request(tensor, version))
    assert taken.ctypes.data == x.ctypes.data and taken.tolist() == x.tolist()
    del tensor
    gc.collect()
    assert len(made.deleted) == 1
    del taken
    made.assert_all_deleted_once(2)


class Request:
    """Asks a tensor for a capsule of one version, whatever the consumer asks for."""

    def __init__(self, tensor, version):
        self.tensor, self.version = tensor, version

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **keywords):
        return self.tensor.__dlpack__(max_version=self.version)


def library_is_there():
    try:
        abi.lib.fsdp_version()
    except ImportError:
        return False
    return True


def test_capsules_that_nobody_takes_are_freed():
    made, tensor = made_tensor(np.zeros(3))
    capsule = tensor.__dlpack__(max_version=(1, 0))
    tensor_module._sweep()
    assert made.deleted == []  # somebody still has it
    del capsule
    tensor.__dlpack__(max_version=(1, 0))
    del tensor
    made.assert_all_deleted_once(3)


def test_an_untaken_capsule_outlives_its_tensor():
    x = np.arange(3.0)
    made, tensor = made_tensor(x)
    capsule = tensor.__dlpack__(max_version=(1, 0))
    del tensor

    class Holder:
        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **keywords):
            return capsule

    taken = np.from_dlpack(Holder())
    assert len(made.deleted) == 1
    assert taken.tolist() == [0, 1, 2]
    del taken
    made.assert_all_deleted_once(2)


def test_a_consumer_that_fails_keeps_its_own_error():
    made, tensor = made_tensor(np.ones(4, "uint16").view(ml_dtypes.bfloat16))
    with pytest.raises((BufferError, RuntimeError, TypeError)) as caught:
        np.from_dlpack(tensor)  # NumPy has no bfloat16
    assert not isinstance(caught.value, SystemError)
    del tensor, caught
    made.assert_all_deleted_once(2)


def test_memory_without_a_second_handle_can_be_shared_too():
    made = Made(np.arange(3.0))
    tensor = Tensor(made())
    views = [np.from_dlpack(tensor) for _ in range(3)]
    del tensor
    gc.collect()
    assert made.deleted == []
    views.pop()
    gc.collect()
    assert made.deleted == [] and views[1].tolist() == [0, 1, 2]
    views.clear()
    made.assert_all_deleted_once(1)
    assert not tensor_module._shares


def test_read_only_tensors():
    made, tensor = made_tensor(np.arange(3.0), flags=abi.DLPACK_FLAG_BITMASK_READ_ONLY)
    assert tensor.read_only and not tensor.numpy().flags.writeable
    with pytest.raises(libfsdp.InvalidArgument, match="out is read-only"):
        borrow(tensor, "out", True)
    assert not np.from_dlpack(tensor).flags.writeable
    if library_is_there():
        with pytest.raises(BufferError, match="max_version"):
            tensor.__dlpack__()


def test_dlpack_arguments():
    _, tensor = made_tensor(np.arange(3.0))
    with pytest.raises(BufferError, match="stream"):
        tensor.__dlpack__(stream=1)
    with pytest.raises(BufferError, match="dl_device"):
        tensor.__dlpack__(dl_device=(2, 0))
    assert tensor.__dlpack__(max_version=(1, 0), dl_device=(1, 0), copy=False)
    assert tensor.__dlpack_device__() == (1, 0)


def test_attributes():
    _, tensor = made_tensor(np.zeros((4, 3), "int16")[::2])
    assert (tensor.shape, tensor.strides, tensor.dtype, tensor.ndim) == ((2, 3), (6, 1), "int16", 2)
    assert (tensor.size, tensor.nbytes, len(tensor)) == (6, 12, 2)
    assert repr(tensor) == "libfsdp.Tensor(shape=(2, 3), dtype=int16)"
    assert np.asarray(tensor).strides == (12, 2)
    _, scalar = made_tensor(np.array(5.0))
    assert scalar.numpy() == 5 and scalar.shape == ()
    with pytest.raises(TypeError):
        len(scalar)


def test_a_tensor_in_asarray_copies_only_when_it_must():
    x = np.arange(3, dtype="float32")
    _, tensor = made_tensor(x)
    assert np.shares_memory(np.asarray(tensor), x)
    assert not np.shares_memory(np.array(tensor), x)
    assert np.asarray(tensor, "float64").tolist() == [0, 1, 2]


# ---- With the library ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(libfsdp.dtypes.TABLE))
def test_empty_is_zeros_of_every_dtype(dtype):
    tensor = libfsdp.zeros((3, 5), dtype)
    assert (tensor.shape, tensor.dtype, tensor.strides) == ((3, 5), dtype, (5, 1))
    assert tensor.data_ptr % 64 == 0
    view = tensor.numpy()
    assert view.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
    assert view.flags.writeable and not view.astype("complex128").any()
    again = libfsdp.zeros(2, view.dtype)
    assert again.dtype == dtype and again.shape == (2,)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0, 2), 1, (1,) * 32])
def test_empty_shapes(shape):
    tensor = libfsdp.zeros(shape)
    expected = shape if isinstance(shape, tuple) else (shape,)
    assert tensor.shape == tensor.numpy().shape == expected
    assert tensor.size == math.prod(expected)
    if tensor.size:
        assert np.from_dlpack(tensor).shape == expected


@pytest.mark.parametrize(
    "arguments, kind, says",
    [
        (((-1,),), ValueError, "-1|negative"),
        (((2.5,),), TypeError, "shape"),
        ((("a",),), TypeError, "shape"),
        ((2, "float31"), NotImplementedError, "float31"),
        ((2, np.dtype(">f4")), NotImplementedError, "byte order"),
        ((2, 5), TypeError, "dtype"),
        (((1,) * 33,), ValueError, "32|33"),
        (((2**62, 8),), (ValueError, MemoryError), None),
    ],
)
def test_empty_refuses(arguments, kind, says):
    with pytest.raises(kind, match=says):
        libfsdp.zeros(*arguments)


def test_copy_casts_and_strides():
    x = np.arange(12, dtype="float32").reshape(3, 4)
    out = np.full((8, 3), -1, "int16")
    every_other = out[::2]
    assert libfsdp.copy(x.T, every_other) is every_other
    np.testing.assert_array_equal(out[::2], x.T)
    assert (out[1::2] == -1).all()
    rounded = np.zeros(3, ml_dtypes.bfloat16)
    libfsdp.copy(np.array([1.00390625, 1.01171875, 3.0], "float32"), rounded)
    assert rounded.tolist() == [1.0, 1.015625, 3.0]  # ties go to even
    with pytest.raises(ValueError, match="out"):
        libfsdp.copy(x, np.broadcast_to(np.zeros(1, "float32"), (3, 4)))
    with pytest.raises(ValueError):
        libfsdp.copy(x, np.zeros((4, 3), "float32"))
    with pytest.raises(ValueError):
        libfsdp.copy(x[1:], x[:-1])


def test_copy_of_a_dlpack_request():
    tensor = libfsdp.zeros(3)
    tensor.numpy()[:] = [1, 2, 3]
    twin = np.from_dlpack(Copying(tensor))
    tensor.numpy()[:] = 0
    assert twin.tolist() == [1, 2, 3]


class Copying(Request):
    def __init__(self, tensor):
        super().__init__(tensor, (1, 0))

    def __dlpack__(self, **keywords):
        return self.tensor.__dlpack__(max_version=(1, 0), copy=True)


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_from_dlpack_takes_the_memory_over(version):
    made, source = made_tensor(np.arange(4.0))
    tensor = libfsdp.from_dlpack(Request(source, version))
    del source
    gc.collect()
    assert tensor.numpy().tolist() == [0, 1, 2, 3]
    assert tensor.data_ptr == made.x.ctypes.data
    del tensor
    made.assert_all_deleted_once(3)  # one to look at, one to take over, the source's own


def test_shard_extents_are_chunks():
    for rows in (0, 1, 5, 7, 8):
        for world in (1, 2, 3, 8):
            pieces = [libfsdp.shard_extent(rows, rank, world) for rank in range(world)]
            chunk = -(-rows // world)
            assert pieces == [(min(r * chunk, rows), max(0, min(chunk, rows - r * chunk))) for r in range(world)]
    with pytest.raises(ValueError):
        libfsdp.shard_extent(4, 2, 2)
    with pytest.raises(ValueError):
        libfsdp.shard_extent(-1, 0, 2)


@pytest.mark.parametrize("dim", [0, 1])
def test_shard(dim):
    full = np.arange(35, dtype="float32").reshape(7, 5)
    for rank in range(4):
        start, length = libfsdp.shard_extent(full.shape[dim], rank, 4)
        expected = np.take(full, range(start, start + length), axis=dim)
        out = np.full_like(expected, -1, dtype="float64")
        assert libfsdp.shard(full, out, rank=rank, world_size=4, dim=dim) is out
        np.testing.assert_array_equal(out, expected)
    with pytest.raises(ValueError):
        libfsdp.shard(full, np.zeros((3, 5), "float32"), rank=0, world_size=4)
    with pytest.raises(ValueError):
        libfsdp.shard(full, np.zeros((2, 5), "float32"), rank=0, world_size=4, dim=2)


def test_tensors_alive_at_exit_do_no_harm():
    code = """
import libfsdp, numpy as np
kept = libfsdp.zeros(3)
view, taken = kept.numpy(), np.from_dlpack(kept)
capsule = kept.__dlpack__(max_version=(1, 0))
cycle = [libfsdp.zeros(2)]; cycle.append(cycle)
class Late:
    def __del__(self, kept=kept): assert kept.shape == (3,)
late = Late()
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code], env=environment(), capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")


# ---- Copies ----------------------------------------------------------------------------------------------------------


def of_others():
    return libfsdp.from_dlpack(np.arange(6, dtype="float32").reshape(2, 3))


def of_the_library():
    return libfsdp.copy(of_others(), libfsdp.zeros((2, 3)))


@pytest.mark.parametrize("make", [of_others, of_the_library])
def test_a_copy_shares_and_a_deep_copy_does_not(make):
    first = make()
    shallow, deep = copy.copy(first), copy.deepcopy(first)
    assert shallow.data_ptr == first.data_ptr != deep.data_ptr
    first.numpy()[0, 0] = 9
    del first
    gc.collect()
    again = copy.copy(shallow)
    del shallow
    gc.collect()
    assert again.numpy().tolist() == [[9, 1, 2], [3, 4, 5]]
    assert deep.numpy().tolist() == [[0, 1, 2], [3, 4, 5]] and deep.dtype == "float32"


def test_a_copy_of_a_units_tensor():
    unit = libfsdp.Model(libfsdp.Group.single()).unit("u", {"w": np.arange(4, dtype="float32")})
    shallow = copy.copy(unit["w"].shard)
    unit["w"].shard.numpy()[0] = 7
    del unit
    gc.collect()
    assert copy.copy(shallow).numpy().tolist() == [7, 1, 2, 3]


def test_what_can_not_be_copied_says_what_to_do():
    group = libfsdp.Group.single()
    unit = libfsdp.Model(group).unit("u", {"w": np.arange(4, dtype="float32")})
    work = group.barrier(async_op=True)
    scaler = libfsdp.ShardedGradScaler(group)
    net = libfsdp.numpy.fully_shard(libfsdp.numpy.Sequential(libfsdp.numpy.Linear(3, 2)))
    for thing, says in [
        (group, "split"),
        (unit.model, "make another"),
        (unit, "make another"),
        (unit["w"], "shard.numpy"),
        (work, "wait"),
        (scaler, "state_dict"),
        (net, "before fully_shard"),
        (net.layer.layers[0], "before fully_shard"),
        (group._handle, "once"),
    ]:
        for how in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=f"can't be copied or pickled: .*{says}"):
                how(thing)
    with pytest.raises(TypeError, match="pickle its .numpy"):
        pickle.dumps(unit["w"].shard)
    work.wait()


def test_from_dlpack_says_what_is_wrong():
    class Silent:
        def __dlpack_device__(self):
            return None

        def __dlpack__(self, **keywords):
            return None

    class Wrong(Silent):
        def __dlpack_device__(self):
            return 1, 0

    with pytest.raises(libfsdp.InvalidArgument, match="^array: Silent.__dlpack_device__ gave no device"):
        libfsdp.from_dlpack(Silent())
    with pytest.raises(libfsdp.InvalidArgument, match="^array: Wrong.__dlpack__ gave no unconsumed"):
        libfsdp.from_dlpack(Wrong())
    with pytest.raises(TypeError, match="^array: a bytearray has no __dlpack__"):
        libfsdp.from_dlpack(bytearray(4))
