"""Folders of torch.distributed.checkpoint's, and of TensorPlay's package of the same name, for the command line:
without a process group, and tensor by tensor.

Both keep `.metadata` and plain values as pickles, which these packages' own readers run whatever they name. Here only
the classes that belong there are made, unless the folder is trusted.
"""

import contextlib
import io
import os
import pickle

from ..dtypes import name_of
from ..errors import Corrupt, FsdpError, InvalidArgument
from .formats import Item, first_line, of_ranks_left_out, some
from .formats_dict import content_of, value_of
from .frameworks import framework, writing

_CLASSES = {
    "metadata": (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "filesystem": ("_StorageInfo",),
}
_HARMLESS = {
    "pathlib": ("Path", "PosixPath", "PurePosixPath", "PurePath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),
    "collections": ("OrderedDict",),
    "builtins": ("set", "frozenset", "complex", "slice", "bytearray"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "device"),
    "tensorplay": ("Size", "DType", "dtype"),
}


class _Unpickler(pickle.Unpickler):
    """Makes nothing but what belongs into a checkpoint."""

    def __init__(self, file, host):
        super().__init__(file)
        self.host = host

    def find_class(self, module, name):
        package, _, last = module.rpartition(".")
        belongs = package == f"{self.host.name}.distributed.checkpoint" and name in _CLASSES.get(last, ())
        if belongs or name in _HARMLESS.get(module, ()):
            return super().find_class(module, name)
        if module == self.host.name:  # torch.float32
            value = getattr(self.host.module, name, None)
            if isinstance(value, self.host.module.dtype):
                return value
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint")


def read(path, trust):
    path = os.fspath(path)
    with open(os.path.join(path, ".metadata"), "rb") as file:
        text = file.read()
    host = framework("tensorplay" if b"tensorplay.distributed" in text[:200] else "torch")
    dcp = host.dcp
    metadata = _unpickled(text, host, trust, os.path.join(path, ".metadata"))
    if not isinstance(metadata, dcp.Metadata):
        raise Corrupt(f"{path}/.metadata: is no metadata of {host.name}.distributed.checkpoint's")

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args, **kwargs):
            return metadata

    class Planner(dcp.DefaultLoadPlanner):
        def load_bytes(self, read_item, value):
            value.seek(0)
            plain[read_item.dest_index.fqn] = _loaded(value, host, trust, path)

    def load(values):
        try:
            with plainly(dcp):
                dcp.load(values, storage_reader=Reader(path), planner=Planner(flatten_state_dict=False), no_dist=True)
        except FsdpError:
            raise
        except Exception as error:
            raise Corrupt(f"{path}: {first_line(error)}") from None

    def read_tensor(name, shape, dtype):
        values = {name: host.empty(shape, dtype)}
        load(values)
        return values[name]

    def item(name, entry):
        shape, dtype = tuple(map(int, entry.size)), entry.properties.dtype
        return Item(shape, name_of(dtype, name), lambda: read_tensor(name, shape, dtype), parts=places.get(name, []))

    nested, plain, places = {}, {}, _places(metadata)
    entries = metadata.state_dict_metadata
    load({name: None for name, entry in entries.items() if not isinstance(entry, dcp.TensorStorageMetadata)})
    for name, entry in entries.items():
        where = (metadata.planner_data or {}).get(name, (name,))
        _place(nested, where, plain.get(name) if name in plain else item(name, entry))
    kind = f"folder of {host.name}.distributed.checkpoint's"
    content = content_of(nested, path, kind)
    files = {info.relative_path for info in (metadata.storage_data or {}).values()}
    content.facts = [("files", str(len(files))), ("checksums", "none")]
    return content


@contextlib.contextmanager
def plainly(dcp):
    """What a load or save ends with is raised as it is: CheckpointException, which is no Exception, holds one of each
    rank, among them those of Ctrl-C."""
    try:
        yield
    except dcp.CheckpointException as error:
        for failure in error.failures.values():  # (exception, stack)
            raise (failure[0] if isinstance(failure, tuple) else failure) from None
        raise RuntimeError(first_line(error)) from None


def _unpickled(text, host, trust, path):
    try:
        return pickle.loads(text) if trust else _Unpickler(io.BytesIO(text), host).load()
    except pickle.UnpicklingError as error:
        if trust:
            raise Corrupt(f"{path}: {first_line(error)}") from error
        raise InvalidArgument(
            f"{path}: has objects that could run code when they are read ({first_line(error)}); --trust reads them "
            "all the same"
        ) from error
    except Exception as error:
        raise Corrupt(f"{path}: is no pickle that can be read: {first_line(error)}") from error


def _loaded(value, host, trust, path):
    """A plain value: torch keeps it as a file of torch.save's, TensorPlay as a pickle."""
    if host.name == "torch":
        return host.load(value, trust)
    return _unpickled(value.read(), host, trust, path)


def _places(metadata):
    """{name: [(file, offset, length or None), ...]}: where each tensor's chunks lie."""
    found = {}
    for index, info in (metadata.storage_data or {}).items():
        entry = metadata.state_dict_metadata.get(index.fqn)
        at = None if index.offset is None else tuple(map(int, index.offset))
        sizes = {tuple(map(int, chunk.offsets)): tuple(map(int, chunk.sizes)) for chunk in getattr(entry, "chunks", ())}
        if at in sizes:
            found.setdefault(index.fqn, []).append((info.relative_path, at, sizes[at], info.length))
    return found


def _place(nested, where, value):
    """Put a value into dicts and lists at a path of keys and indices."""
    here = nested
    for key, following in zip(where, where[1:]):
        fresh = [] if isinstance(following, int) else {}
        if isinstance(key, int):
            here.extend([None] * (key + 1 - len(here)))
            here[key] = fresh if here[key] is None else here[key]
        else:
            here.setdefault(key, fresh)
        here = here[key]
    last = where[-1]
    if isinstance(last, int):
        here.extend([None] * (last + 1 - len(here)))
    here[last] = value


def write(content, path, progress, to):
    """A folder that the package's `load` reads, into any number of ranks. Gives what was left out."""
    host = framework("tensorplay" if to == "tensorplay" else "torch")
    dcp, left_out = host.dcp, of_ranks_left_out(content, "this kind of checkpoint has no place for them")
    tied = [name for name, item in content.items.items() if item.tied_to is not None]
    if tied:
        left_out.append(f"that {some(tied)} is tied to another tensor: its values are there once more")
    value = host.tensors(value_of(content, left_out), progress, content.nbytes)
    os.mkdir(path)  # what can't be made is told better here
    with writing(path, host), plainly(dcp):
        dcp.save(value, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return left_out
