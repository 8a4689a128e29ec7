"""Checkpoints of any kind, for the command line: `open_any(path)` finds out what a path is, and gives it as a Content.

A Content has libfsdp's names, whatever the file: a model's tensors under the names that the model without wrappers
gives them, "optimizer/<key>/<parameter>", "rank/<name>", and JSON values (training.py has the meaning). Its tensors
are read when they are wanted, where the kind of file allows it.
"""

import fnmatch
import math
import os
import re
import zipfile
from dataclasses import dataclass, field, replace

from ..borrow import _describe, borrow
from ..dtypes import TABLE
from ..errors import Corrupt, InvalidArgument, NotFound, Unsupported
from ..tensor import Tensor, _held, copy, from_dlpack, zeros
from .table import count

OPTIMIZER, OF_RANK = "optimizer/", "rank/"
MODULES = "modules"  # the JSON value that has modules' extra states, by the names that their state dicts give them
TARGETS = {
    "sharded": "libfsdp's folder of one file for each rank",
    "full": "whole tensors: a .safetensors file, or a folder like Hugging Face's",
    "dcp": "a folder of torch.distributed.checkpoint's",
    "torch": "a file of torch.save's",
    "tensorplay": "a file of tensorplay.save's (.pt, .pth, .mega), or a folder of tensorplay.distributed.checkpoint's",
}
PICKLES = (".pt", ".pth", ".bin", ".ckpt")
_SHOWN = 3  # names that a line has of many


@dataclass
class Item:
    """A tensor of a checkpoint, whole.

    read     read() gives an array of this shape and dtype: anything that the library borrows
    tied_to  the name of the earlier Item that this one is; its `read` reads that one
    parts    [(file, offset, length, bytes), ...] where it lies; None: not known
    pieces   [(offset, array), ...] of a file that has only one rank's part
    local    True: the file of a rank says nothing of the tensor's being a part
    """

    shape: tuple
    dtype: str
    read: object = None
    tied_to: str = None
    parts: list = None
    pieces: list = None
    local: bool = False

    @property
    def nbytes(self):
        return math.prod(self.shape) * TABLE[self.dtype][1] // 8

    @property
    def floats(self):
        return self.dtype.startswith(("float", "bfloat"))


@dataclass(frozen=True)
class Scalar:
    """A number that an optimizer keeps as a tensor without dimensions."""

    value: object
    dtype: str


@dataclass
class Content:
    """What a checkpoint holds.

    kind      in words
    items     {name: Item} in order
    json      {name: value}
    of_ranks  [(rank, name, Item)], of each rank's own entries
    ranks     that wrote it; 0: not known
    left_out  what the file has and libfsdp has no place for: "NAME: reason" each
    facts     [(what, text), ...] for `list`
    verify    verify(progress) gives the list of damage, in words; None: reading everything is the check
    """

    path: str
    kind: str
    items: dict = field(default_factory=dict)
    json: dict = field(default_factory=dict)
    of_ranks: list = field(default_factory=list)
    ranks: int = 0
    left_out: list = field(default_factory=list)
    facts: list = field(default_factory=list)
    verify: object = None

    @property
    def nbytes(self):
        """Of all tensors, tied ones once."""
        whole = [item for item in self.items.values() if item.tied_to is None]
        return sum(item.nbytes for item in [*whole, *(item for _, _, item in self.of_ranks)])

    def check(self, progress):
        """The list of damage, in words."""
        if self.verify is not None:
            return self.verify(progress)
        damage, done = [], 0
        entries = [(name, item) for name, item in self.items.items() if item.tied_to is None]
        for name, item in [*entries, *((f"{name} of rank {rank}", item) for rank, name, item in self.of_ranks)]:
            progress(done, self.nbytes)
            try:
                item.read()
            except (Corrupt, OSError, RuntimeError, ValueError, EOFError) as error:
                text = first_line(error)
                damage.append(text if repr(name) in text else f"{name}: {text}")
            done += item.nbytes
        return damage


def open_any(path, trust=False):
    """The Content of whatever lies at `path`. trust: pickles may run code.

    Raises NotFound, Corrupt, Unsupported (a framework that is needed is not installed), InvalidArgument.
    """
    from . import formats_dcp, formats_libfsdp, formats_pickle

    kind = kind_of(path)
    if kind in ("sharded", "full"):
        return formats_libfsdp.read(path)
    if kind == "dcp":
        return formats_dcp.read(path, trust)
    return formats_pickle.read(path, kind, trust)


def kind_of(path):
    """What a path is, by looking: "sharded", "full", "dcp", "pickle", "mega" or "ranks" (a folder of pickles).

    Raises NotFound, Corrupt.
    """
    path = os.fspath(path)
    if os.path.isdir(path):
        return _kind_of_folder(path)
    if not os.path.exists(path):
        raise NotFound(f"{path or repr(path)}: no such file or folder")
    if not os.path.isfile(path):  # reading from a pipe may wait for ever
        raise NotFound(f"{path}: is neither a file nor a folder")
    with open(path, "rb") as file:
        head = file.read(16)
    if head.startswith((b"PK\x03\x04", b"\x80")):
        _check_zip(path)
        return "pickle"
    if head.startswith(b"MEGA"):
        return "mega"
    if path.endswith(".safetensors") or (len(head) > 8 and head[8:9] == b"{"):
        return "full"
    if path.endswith(PICKLES):
        raise Corrupt(f"{path}: is no file of torch.save's: it begins with {head[:4]!r}")
    raise NotFound(
        f"{path}: is no checkpoint: neither a .safetensors file nor one of torch.save's or tensorplay.save's"
    )


def _check_zip(path):
    """Refuse zip files that are none of torch.save's: NumPy's .npz, TorchScript. What is cut short torch will tell."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.rpartition("/")[2] for name in archive.namelist()}
    except (zipfile.BadZipFile, OSError):
        return
    if "data.pkl" not in names:
        raise NotFound(f"{path}: is no checkpoint, but another kind of zip file (it has no data.pkl)")
    if "constants.pkl" in names:
        raise Unsupported(f"{path}: is a program of TorchScript's; torch.save its state_dict(), and convert that")


def _kind_of_folder(path):
    names = sorted(os.listdir(path))
    if "manifest.json" in names:
        return "sharded"
    if any(name.endswith(".mega.index.json") for name in names):
        return "mega"
    if ".metadata" in names:
        return "dcp"
    if "model.safetensors.index.json" in names or any(name.endswith(".safetensors") for name in names):
        return "full"
    if pickles_of(path):
        return "ranks"
    if any(name.endswith(".distcp") for name in names):
        raise Corrupt(
            f"{path}: has .distcp files but no .metadata: this save of torch.distributed.checkpoint never ended"
        )
    raise NotFound(
        f"{path}: no checkpoint is there: neither manifest.json (libfsdp), a .safetensors file, .metadata "
        f"(torch.distributed.checkpoint) nor files that end in {', '.join(PICKLES)}"
    )


def pickles_of(folder):
    """Its files of torch.save's, those of rank 2 before those of rank 10."""

    def numbers(name):
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]

    return [os.path.join(folder, name) for name in sorted(os.listdir(folder), key=numbers) if name.endswith(PICKLES)]


def some(names):
    """A few of many names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def of_ranks_left_out(content, reason):
    """What is to be said where a target has no place for entries of single ranks."""
    names = sorted({name for _, name, _ in content.of_ranks})
    return [f"{some(names)} of {count(content.ranks, 'rank')}: {reason}"] if names else []


def first_line(error):
    """An exception in one line; torch adds its C++ stack, and advice."""
    text = str(error).strip().partition("\n")[0].strip()
    return text or type(error).__name__


def cast(array, shape, dtype):
    """A libfsdp.Tensor of another dtype, or a copy."""
    return copy(array, zeros(shape, dtype))


def part_of(array, offset, length):
    """A Tensor on a part of an array: the array's own memory."""
    head = borrow(array, "array")
    if head.strides:
        strides = tuple(head.strides[: head.ndim])
    else:
        strides = [1]
        for extent in reversed(head.shape[1 : head.ndim]):
            strides.insert(0, strides[0] * extent)
    address = (head.data or 0) + head.byte_offset
    if address:
        address += sum(at * stride for at, stride in zip(offset, strides)) * head.dtype.bits // 8
    view = _describe((array, head), address, head.dtype.code, head.dtype.bits, length, strides)
    return Tensor(_held(view, view, 0))


def bits(array):
    """The bytes of an array as a NumPy array."""
    import numpy

    return numpy.ascontiguousarray(from_dlpack(array).numpy()).reshape(-1).view(numpy.uint8)


def same_bits(a, b):
    """Whether two arrays have the same bytes."""
    a, b = bits(a), bits(b)
    return a.shape == b.shape and bool((a == b).all())


def number(item):
    """The number in an Item of one element. Raises Unsupported."""
    if item.dtype.startswith("complex"):
        raise Unsupported(f"a complex number ({item.dtype}) has no form in JSON")
    return cast(item.read(), item.shape, "float64" if item.floats else item.dtype).numpy().item()


def select(content, globs, dtype):
    """A Content of the names that `globs` choose, floats of the model as `dtype`; None, or empty: as they are.

    globs  patterns; "!..." leaves out what it matches. Without any that doesn't begin so, all others are chosen
    """
    wanted = [glob for glob in globs if not glob.startswith("!")] or ["*"]
    unwanted = [glob[1:] for glob in globs if glob.startswith("!")]

    def chosen(name):
        return any(fnmatch.fnmatchcase(name, glob) for glob in wanted) and not any(
            fnmatch.fnmatchcase(name, glob) for glob in unwanted
        )

    items, moved = {}, {}
    for name, item in content.items.items():
        if not chosen(name):
            continue
        if item.tied_to is not None:
            first = moved.setdefault(item.tied_to, name if not chosen(item.tied_to) else item.tied_to)
            item = replace(item, tied_to=None if first == name else first)
        items[name] = _as(item, dtype) if dtype and not name.startswith(OPTIMIZER) else item
    if globs and not items:
        raise InvalidArgument(f"--names: none of {content.path}'s {len(content.items)} names matches")
    json, of_ranks = dict(content.json), content.of_ranks
    if globs:
        of_ranks = [entry for entry in of_ranks if chosen(entry[1])]
        states = any(name.startswith(OPTIMIZER) for name in content.items)  # SGD's has groups alone
        kept = any(name.startswith(OPTIMIZER) for name in items) if states else chosen(OPTIMIZER)
        if "optimizer" in json:
            about = {name.split("/", 2)[2] if name.startswith(OPTIMIZER) else name for name in items}
            json["optimizer"] = _groups_of(json["optimizer"], about)
            if not kept or not json["optimizer"]["groups"]:
                del json["optimizer"]
        if isinstance(json.get(MODULES), dict):
            json[MODULES] = {name: value for name, value in json[MODULES].items() if chosen(name)}
            if not json[MODULES]:
                del json[MODULES]
    return replace(content, items=items, json=json, of_ranks=of_ranks, left_out=list(content.left_out), verify=None)


def _groups_of(optimizer, names):
    """An optimizer's JSON value, of the parameters that are among these names."""
    groups = [group | {"params": [name for name in group["params"] if name in names]} for group in optimizer["groups"]]
    numbers = {name: values for name, values in optimizer["numbers"].items() if name in names}
    return optimizer | {"groups": [group for group in groups if group["params"]], "numbers": numbers}


def _as(item, dtype):
    if not item.floats or item.dtype == dtype:
        return item
    return replace(item, dtype=dtype, read=lambda: cast(item.read(), item.shape, dtype), parts=None)
