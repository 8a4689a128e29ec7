"""torch and TensorPlay as the converters need them: reading and writing their files, and their tensors."""

import contextlib
import importlib
import io
import logging
import os
import pickle

from ..dtypes import name_of
from ..errors import Corrupt, FsdpError, InvalidArgument, SystemFailure, Unsupported
from .formats import Item, Scalar, first_line
from .table import human


class Bag:
    """Stands for an object of a class that a file names and that need not exist here: it keeps what it was made of."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __setstate__(self, state):
        slots = isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict)
        for values in state if slots else (state,):
            if isinstance(values, dict):
                self.__dict__.update(values)
            elif values is not None:
                self.state = values


class Framework:
    """What both have: both read and write torch's files."""

    name = None

    def __init__(self):
        self.module = importlib.import_module(self.name)

    @property
    def dcp(self):
        """Its package of distributed checkpoints."""
        return importlib.import_module(f"{self.name}.distributed.checkpoint")

    def is_tensor(self, value):
        return isinstance(value, self.module.Tensor)

    def items(self, value, path):
        """`value`, nested, with Items for its tensors; tensors that are one and the same give one Item, and Items tied
        to it, within a dict."""
        if self.is_tensor(value):
            return self.item(value, path)
        if isinstance(value, dict):
            found, seen = {}, {}
            for key, entry in value.items():
                item = self.items(entry, f"{path}[{key!r}]" if path else str(key))
                if isinstance(item, Item) and item.tied_to is None and 0 not in item.shape:
                    first = seen.setdefault(self.identity(entry), key)
                    item.tied_to = None if first == key else str(first)
                found[key] = item
            return found
        if isinstance(value, (list, tuple)):
            found = [self.items(entry, f"{path}[{index}]") for index, entry in enumerate(value)]
            return found if isinstance(value, list) else tuple(found)
        return value

    def item(self, tensor, name):
        dtype = name_of(tensor.dtype, name)
        return Item(tuple(map(int, tensor.shape)), dtype, lambda: tensor)

    def tensors(self, value, progress, total):
        """The reverse: `value` with tensors for its Items and Scalars; progress(bytes done, total) meanwhile."""
        made, done = {}, 0

        def of(key, item, items):
            nonlocal done
            if item.tied_to is not None and item.tied_to in items:
                return of(item.tied_to, items[item.tied_to], items)
            if id(item) not in made:
                progress(done, total)
                made[id(item)] = self.tensor(item.read(), item.dtype, key)
                done += item.nbytes
            return made[id(item)]

        def walk(value):
            if isinstance(value, dict):
                return {key: of(key, v, value) if isinstance(v, Item) else walk(v) for key, v in value.items()}
            if isinstance(value, list):
                return [walk(entry) for entry in value]
            if isinstance(value, Scalar):
                return self.module.tensor(value.value, dtype=getattr(self.module, value.dtype))
            return value

        return walk(value)


class Torch(Framework):
    name = "torch"

    def __init__(self):
        super().__init__()
        logging.getLogger("torch.distributed").setLevel(
            logging.ERROR
        )  # about meshes without groups: there are none here

    def load(self, file, trust=False, mmap=False):
        import torch.distributed.tensor  # which says that its own classes are safe to unpickle

        safe = [] if trust else stand_ins(self.module)
        try:
            with self.module.serialization.safe_globals(safe):
                return self.module.load(file, map_location="cpu", weights_only=not trust, mmap=mmap)
        except pickle.UnpicklingError as error:
            if trust:
                raise Corrupt(f"{_file(file)}: {first_line(error)}") from error
            raise InvalidArgument(
                f"{_file(file)}: has objects that could run code when they are read ({_named(error)}); --trust reads "
                "them all "
                "the same"
            ) from error
        except (EOFError, RuntimeError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise Corrupt(f"{_file(file)}: torch can't read it: {first_line(error)}") from error

    def save(self, value, path):
        self.module.save(value, path)

    def identity(self, tensor):
        shape = tensor.shape
        if type(tensor).__name__ == "DTensor":
            tensor = tensor.to_local()
        elif type(tensor).__name__ == "ShardedStandIn":
            tensor = tensor.state[0][0].tensor if tensor.state[0] else tensor
        if type(tensor) not in (self.module.Tensor, self.module.nn.Parameter) or not tensor.numel():
            return id(tensor)
        return shape, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.stride(), tensor.dtype

    def item(self, tensor, name):
        sharded = getattr(tensor, "state", None)
        if type(tensor).__name__ == "ShardedStandIn":
            return _of_sharded_tensor(sharded, name)
        if hasattr(tensor, "placements") and hasattr(tensor, "device_mesh"):
            return _of_dtensor(tensor, name)
        if tensor.layout is not self.module.strided or tensor.is_quantized:
            raise Unsupported(
                f"{name}: a {tensor.layout} or quantized tensor has no form in a checkpoint; make it dense"
            )
        item = super().item(tensor.detach().resolve_conj().resolve_neg(), name)
        item.local = True
        return item

    def tensor(self, array, dtype, name):
        if self.is_tensor(array):
            return array
        return self.module.from_dlpack(array)

    def empty(self, shape, dtype):
        return self.module.empty(tuple(shape), dtype=dtype)


class TensorPlay(Framework):
    name = "tensorplay"

    def load(self, file, trust=False, mmap=False):
        try:
            return self.module.load(file, map_location="cpu")  # mapping hides its errors
        except NotImplementedError as error:
            raise Unsupported(f"{_file(file)}: TensorPlay can't read it: {first_line(error)}") from error
        except ImportError as error:
            raise Unsupported(f"{_file(file)}: {first_line(error)}: pip install megatensors") from error
        except (EOFError, RuntimeError, ValueError, KeyError, AttributeError, TypeError, pickle.PickleError) as error:
            raise Corrupt(f"{_file(file)}: TensorPlay can't read it: {first_line(error)}") from error

    def save(self, value, path):
        try:
            self.module.save(value, path)
        except ImportError as error:
            raise Unsupported(f"{path}: {first_line(error)}: pip install megatensors, or write a .pt file") from error

    def identity(self, tensor):
        return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype)

    def item(self, tensor, name):
        item = super().item(tensor.detach(), name)
        item.local = True
        return item

    def tensor(self, array, dtype, name):
        if self.is_tensor(array):
            return array
        if dtype.startswith("float8"):
            raise Unsupported(f"{name}: TensorPlay has no {dtype}; --dtype float32 casts the model's floats")
        return self.module.from_dlpack(array)

    def empty(self, shape, dtype):
        return self.module.empty(list(shape), dtype=dtype)


_found = {}


def framework(*names):
    """The first of these that is installed. Raises Unsupported."""
    for name in names:
        try:
            return _found.get(name) or _found.setdefault(name, {"torch": Torch, "tensorplay": TensorPlay}[name]())
        except ImportError:
            continue
    titles = {"torch": "torch", "tensorplay": "TensorPlay"}
    raise Unsupported(
        f"this needs {' or '.join(titles[name] for name in names)}, which is not installed here: "
        f"pip install 'libfsdp[{names[0]}]'"
    )


def _file(file):
    return str(getattr(file, "name", None) or file) if not isinstance(file, io.BytesIO) else "a value"


def _named(error):
    """What of an unpickling error says what was found."""
    text = str(error)
    for line in text.splitlines():
        if "GLOBAL" in line or "Unsupported" in line:
            return line.strip().split("WeightsUnpickler error: ")[-1].partition(" was not")[0]
    return first_line(error)


# ---- Parts of ranks --------------------------------------------------------------------------------------------------


def _of_dtensor(tensor, name):
    """An Item with this rank's piece of a DTensor, which is cut as torch.chunk cuts."""
    shape = tuple(map(int, tensor.shape))
    offset, length = [0] * len(shape), list(shape)
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    local = tensor.to_local().detach()
    for dim, placement in enumerate(tensor.placements):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind != "Shard" or place is None:
            raise Unsupported(
                f"{name}: lies as {placement!r}; save it with torch.distributed.checkpoint, and convert that"
            )
        cut = placement.dim
        chunk = -(-length[cut] // mesh.size(dim))
        begin = min(chunk * place[dim], length[cut])
        offset[cut] += begin
        length[cut] = min(chunk, length[cut] - begin)
    if tuple(local.shape) != tuple(length):
        raise Unsupported(
            f"{name}: a part of shape {list(local.shape)} where {length} was due; save it with "
            "torch.distributed.checkpoint, and "
            "convert that"
        )
    return Item(shape, name_of(tensor.dtype, name), None, pieces=[(tuple(offset), local)])


def _of_sharded_tensor(state, name):
    shards, metadata = state[0], state[1]
    pieces = [(tuple(shard.metadata.shard_offsets), shard.tensor.detach()) for shard in shards]
    dtype = name_of(metadata.tensor_properties.state[0], name)
    return Item(tuple(map(int, metadata.size)), dtype, None, pieces=pieces)


_SHARDED_NAMES = [
    "torch.distributed._shard.metadata.ShardMetadata",
    "torch.distributed._shard.sharded_tensor.metadata.ShardedTensorMetadata",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.shard.Shard",
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
    "torch.distributed._shard.sharding_spec.api.EnumerableShardingSpec",
    "torch.distributed.remote_device._remote_device",
]


def stand_ins(torch):
    """What torch's unpickler may make for the names in a file with ShardedTensors: those themselves can only be made by
    the rank that saved them, in a process group like its own."""

    class ShardedStandIn(torch.Tensor):
        __torch_dispatch__ = classmethod(lambda cls, function, *_: NotImplemented)

        def __setstate__(self, state):
            self.state = state

    def member(owner, name):
        if owner is ShardedStandIn and name == "ProcessGroupState":
            return Bag
        raise pickle.UnpicklingError(f"getattr of {name!r}")

    found = [(Bag, name) for name in _SHARDED_NAMES]
    found.append((ShardedStandIn, "torch.distributed._shard.sharded_tensor.api.ShardedTensor"))
    found += [(member, f"{module}.getattr") for module in ("builtins", "__builtin__")]
    return found


@contextlib.contextmanager
def writing(path, host):
    """What a framework says when it can't write does not tell the place, nor that the disk is full."""
    try:
        yield
    except FsdpError:
        raise
    except Exception as error:
        place = os.statvfs(os.path.dirname(path))
        raise SystemFailure(
            f"{path}: {host.name} can't write it ({human(place.f_bavail * place.f_frsize)} are free there): "
            f"{first_line(error)}"
        ) from error


def sync_file(path):
    """Let a file reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
