"""Files of torch.save's and tensorplay.save's, for the command line: one whole state dict, or a folder of one file for
each rank, whose DTensors or ShardedTensors are put together. Nothing in a file is run unless it is trusted.
"""

import math
import os
import zipfile

from ..errors import InvalidArgument
from ..tensor import copy, zeros
from .formats import MODULES, Content, Item, of_ranks_left_out, part_of, pickles_of, same_bits, some
from .formats_dict import content_of, value_of
from .frameworks import framework, sync_file, writing
from .table import count

_KIND = "file of torch.save's or tensorplay.save's"


def read(path, kind, trust):
    path = os.fspath(path)
    if kind == "mega":
        return _read_mega(path)
    files = pickles_of(path) if kind == "ranks" else [path]
    host = framework("torch", "tensorplay")
    contents, ties = [], {}
    for file in files:
        contents.append(_read_file(host, file, trust, ties))
        if file == files[0]:  # other ranks may have nothing of a tensor, and then not see that it has two names
            ties = {name: item.tied_to for name, item in contents[0].items.items() if item.tied_to is not None}
    content = contents[0] if len(contents) == 1 else _merged(path, contents)
    for name, item in content.items.items():
        if item.tied_to is not None:
            content.items[name] = Item(item.shape, item.dtype, content.items[item.tied_to].read, item.tied_to)
        elif item.pieces is not None:
            content.items[name] = _whole(content.path, name, item, len(files))
    content.verify = lambda progress: _damage(files, progress) or _unchecked(content, progress)
    summed = all(zipfile.is_zipfile(file) and _summed(file) for file in files)
    content.facts = [("files", str(len(files))), ("checksums", "crc32" if summed else "none")]
    return content


def _read_file(host, path, trust, ties):
    mmap = zipfile.is_zipfile(path)  # the old kind of file has to be read from its beginning
    value = host.items(host.load(path, trust, mmap), "")
    return content_of(value, path, _KIND if mmap else f"{_KIND}, of the old kind", ties)


def _read_mega(path):
    """A file or folder of TensorPlay's own kind."""
    host = framework("tensorplay")
    file = path
    if os.path.isdir(path):
        file = os.path.join(path, next(name for name in sorted(os.listdir(path)) if name.endswith(".mega.index.json")))
    content = content_of(host.items(host.load(file), ""), path, "TensorPlay's .mega")
    content.facts = [("checksums", "checked by TensorPlay whenever it reads")]
    return content


def _unchecked(content, progress):
    verify, content.verify = content.verify, None
    try:
        return content.check(progress)
    finally:
        content.verify = verify


def _summed(file):
    """The entries of a zip file that have a checksum: torch can be told to write none."""
    with zipfile.ZipFile(file) as archive:
        return [info for info in archive.infolist() if info.CRC]


def _damage(files, progress):
    """What is wrong by the checksums in zip files, which torch does not look at when it loads."""
    damage, done, total = [], 0, sum(map(os.path.getsize, files))
    for file in filter(zipfile.is_zipfile, files):
        with zipfile.ZipFile(file) as archive:
            for info in _summed(file):
                try:
                    with archive.open(info) as entry:
                        while block := entry.read(1 << 20):
                            done += len(block)
                            progress(done, total)
                except zipfile.BadZipFile:
                    damage.append(f"{file}: the checksum of its entry {info.filename} is wrong")
    return damage


# ---- Files of ranks --------------------------------------------------------------------------------------------------


def _merged(path, contents):
    """One Content of those of several files: parts of ranks, or tensors spread over files."""
    result = Content(path, f"{count(len(contents), 'file')} of torch.save's", ranks=len(contents))
    parts = any(item.pieces is not None for content in contents for item in content.items.values())
    first_of, differ, others = {}, [], []
    for content in contents:
        for name, item in content.items.items():
            if name not in result.items:
                result.items[name] = item
                first_of[name] = content
                continue
            first = result.items[name]
            if first.tied_to is not None or item.tied_to is not None:
                continue
            if (item.shape, item.dtype) != (first.shape, first.dtype) or (item.pieces is None) != (
                first.pieces is None
            ):
                raise InvalidArgument(
                    f"{content.path}: {name} is a {item.dtype} of shape {list(item.shape)}, and in "
                    f"{first_of[name].path} a "
                    f"{first.dtype} of shape {list(first.shape)}: nothing says how these are parts of one tensor; "
                    "save with "
                    "libfsdp.checkpoint or torch.distributed.checkpoint"
                )
            if item.pieces is not None:
                first.pieces += item.pieces
            elif not same_bits(first.read(), item.read()):
                differ.append(name)
        for name, value in content.json.items():
            if name not in result.json:
                result.json[name] = value
            elif name == "optimizer":
                others += _add_optimizer(result.json[name], value)
            elif name == MODULES:
                there = result.json[name]
                others += [f"{key!r}" for key, state in value.items() if there.setdefault(key, state) != state]
            elif value != result.json[name]:
                others.append(f"{name!r}")
        result.left_out += [text for text in content.left_out if text not in result.left_out]
    if differ and not parts:
        raise InvalidArgument(
            f"{path}: {differ[0]} differs between its files, and nothing says that it is a part of a tensor: these "
            "are local "
            "state dicts, which have a meaning on their ranks only; save with libfsdp.checkpoint or "
            "torch.distributed.checkpoint"
        )
    if differ:  # buffers: each rank has its own
        result.left_out.append(f"{some(differ)} of other ranks than the first: these differ, and nothing says how")
    if others:
        names = some(list(dict.fromkeys(others)))
        result.left_out.append(f"{names} of other files than the first: these differ, and there can be one only")
    if not parts:
        result.ranks = 0
    return result


def _add_optimizer(result, other):
    """Put together the optimizer's JSON values of two files, in the first. Gives what of the other has no place."""
    lost = []
    for name, values in other["numbers"].items():
        there = result["numbers"].setdefault(name, {})
        differ = [key for key, state in values.items() if there.setdefault(key, state) != state]
        lost += [f"the optimizer's {key} of {name}" for key in differ]
    known = {name: group for group in result["groups"] for name in group["params"]}
    for index, group in enumerate(other["groups"]):
        options = {key: value for key, value in group.items() if key != "params"}
        fresh = [name for name in group["params"] if name not in known]
        if any(known[name] != options | {"params": known[name]["params"]} for name in group["params"] if name in known):
            lost.append(f"the options of the optimizer's group {index}")
        if not fresh:
            continue
        at = result["groups"][index] if index < len(result["groups"]) else None
        if at is not None and at == options | {"params": at["params"]}:
            at["params"] += fresh
        else:
            result["groups"].append(options | {"params": fresh})
    return lost


def _whole(path, name, item, files):
    """The Item of a tensor whose parts these are, each place once: replicas are dropped."""
    pieces = {}
    for offset, array in item.pieces:
        if math.prod(array.shape):
            pieces.setdefault((tuple(map(int, offset)), tuple(map(int, array.shape))), array)
    if sum(math.prod(length) for _, length in pieces) != math.prod(item.shape):
        raise InvalidArgument(
            f"{path}: {name} has parts of {list(item.shape)} only; give the folder with the files of all ranks"
            if files == 1
            else f"{path}: the parts of {name} in its {files} files don't make up {list(item.shape)}: is a rank's "
                 "file missing?"
        )

    def read():
        whole = zeros(item.shape, item.dtype)
        for (offset, length), array in pieces.items():
            copy(array, part_of(whole, offset, length))
        return whole

    return Item(item.shape, item.dtype, read)


# ---- Writing ---------------------------------------------------------------------------------------------------------


def write(content, path, progress, to):
    """A file that torch.load and tensorplay.load read. Gives what was left out."""
    hosts = ("tensorplay", "torch") if to == "tensorplay" else ("torch", "tensorplay")
    if path.endswith(".mega"):
        hosts = ("tensorplay",)
    host = framework(*hosts)
    left_out = of_ranks_left_out(content, "this kind of file has no place for them")
    value = host.tensors(value_of(content, left_out), progress, content.nbytes)
    with open(path, "xb"):  # what can't be made is told better here
        pass
    with writing(path, host):
        host.save(value, path)
    sync_file(path)
    return left_out
