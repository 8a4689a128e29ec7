"""libfsdp's own checkpoints and safetensors files, for the command line: read lazily, and written by one rank or by
many, each of which is a thread here with its part of the tensors: views, so nothing is copied.
"""

import json
import os
import tempfile
import threading

from ..errors import Aborted, Corrupt, PeerLost
from ..group import Group
from ..state import StateDict
from ..store import Store
from ..tensor import shard_extent
from .files import Checkpoint, write
from .formats import Content, Item, first_line, of_ranks_left_out, part_of
from .table import count

_NOTE = 40  # characters of a note that are shown
_DAY_S = 86400  # ranks write at different speeds, and none can die alone


def read(path):
    checkpoint = Checkpoint(path)
    info = checkpoint.info
    ours = bool(info.save_id)
    if not info.full:
        kind = f"libfsdp checkpoint, sharded, written by {count(info.ranks, 'rank')}"
    elif ours:
        kind = "libfsdp checkpoint, whole tensors" + (f", saved by {count(info.ranks, 'rank')}" if info.ranks else "")
    else:
        kind = "safetensors, not written by libfsdp"
    facts = [("files", str(info.n_files)), ("checksums", "yes, xxh3" if info.checksums else "none")]
    if ours:
        facts.insert(0, ("save", info.save_id))
    content = Content(os.fspath(path), kind, json=dict(checkpoint.json), ranks=info.ranks, facts=facts)
    for name, entry in checkpoint.items():
        content.items[name] = _item(checkpoint, entry)
    if not ours:
        content.left_out = _notes(content)
    content.of_ranks = [(entry.rank, entry.name, _item(checkpoint, entry)) for entry in checkpoint.of_ranks]
    content.verify = lambda progress: _verify(checkpoint, content, progress)
    return content


def _item(checkpoint, entry):
    def parts():
        found = checkpoint.parts(entry.name, rank=entry.rank)
        return [(part.file, part.offset, part.length, part.nbytes) for part in found]

    return Item(
        entry.shape,
        entry.dtype,
        lambda: checkpoint.read(entry.name, rank=entry.rank),
        entry.tied_to,
        parts=[] if entry.tied_to is not None else parts(),
    )


def _notes(content):
    """What other programs have noted in the headers of safetensors files."""
    folder = content.path if os.path.isdir(content.path) else os.path.dirname(content.path)
    notes = {}
    for name in dict.fromkeys(part[0] for item in content.items.values() for part in item.parts):
        with open(os.path.join(folder, name), "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))  # the library has checked it
        notes |= header.get("__metadata__", {})
    notes.pop("format", None)  # of what framework the tensors were
    return [f"{key!r} ({_short(text)}): a note in the file's header" for key, text in notes.items()]


def _short(text):
    return text if len(text) <= _NOTE else f"{text[:_NOTE]}..."


def _verify(checkpoint, content, progress):
    try:
        checkpoint.verify(progress)
        return []
    except Corrupt as error:
        first = first_line(error)
    content.verify = None  # the library tells the first damage: read all to find the rest
    try:
        damage = content.check(progress)
    finally:
        content.verify = lambda progress: _verify(checkpoint, content, progress)
    return damage or [first]


def write_full(content, path, progress, max_file_bytes=None):
    """Whole tensors. Gives what was left out."""
    state = _state(content, 0, 1, _arrays(content, progress), {})
    write(path, state, full=True, max_file_bytes=max_file_bytes)
    return of_ranks_left_out(content, "whole tensors belong to no rank")


def write_sharded(content, path, progress, ranks):
    """A file for each of so many ranks. Gives what was left out."""
    arrays = _arrays(content, progress)
    own, left_out = {}, []
    if content.ranks == ranks or not content.ranks:
        for rank, name, item in content.of_ranks:
            own.setdefault(rank, {})[name] = item.read()
    else:
        left_out = of_ranks_left_out(content, f"the target has {count(ranks, 'rank')}")
    states = [_state(content, rank, ranks, arrays, own.get(rank, {})) for rank in range(ranks)]
    if ranks == 1:
        write(path, states[0])
    else:
        _write_as_ranks(path, states)
    return left_out


def _arrays(content, progress):
    """{name: array} of all tensors but the tied."""
    found, done, total = {}, 0, content.nbytes
    for name, item in content.items.items():
        if item.tied_to is None:
            progress(done, total)
            found[name] = item.read()
            done += item.nbytes
    return found


def _state(content, rank, ranks, arrays, own):
    """The StateDict of a rank: rows of each tensor, as sharding along the first dimension cuts them."""
    state = StateDict()
    for name, item in content.items.items():
        if item.tied_to is not None:
            state.tie(name, item.tied_to)
        elif ranks == 1:
            state.add(name, arrays[name], read_only=True)
        elif not item.shape:
            state.add(name, arrays[name], copies=ranks, copy=rank, read_only=True)
        else:
            start, rows = shard_extent(item.shape[0], rank, ranks)
            offset = (start,) + (0,) * (len(item.shape) - 1)
            part = part_of(arrays[name], offset, (rows, *item.shape[1:]))
            state.add(name, part, shape=item.shape, offset=offset, read_only=True)
    for name, array in own.items():
        state.add(name, array, of_rank=True, read_only=True)
    for name, value in content.json.items():
        state.set_json(name, value)
    return state


def _write_as_ranks(path, states):
    """Write the states of all ranks, each on a thread, which together are a group of their own."""
    failures, groups, lock = {}, [], threading.Lock()

    def rank_main(url, rank):
        try:
            store = Store(url, rank=rank, world_size=len(states), timeout=60)
            with store, Group(store, timeout=_DAY_S) as group:
                with lock:
                    groups.append(group)
                write(path, states[rank], group)
        except BaseException as error:
            failures[rank] = error

    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/store"
        threads = [threading.Thread(target=rank_main, args=(url, rank), daemon=True) for rank in range(len(states))]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():  # in slices: Ctrl-C is answered
                    thread.join(0.2)
        except BaseException:
            for group in list(groups):
                group.abort("the conversion was interrupted")
            for thread in threads:
                thread.join(5)
            raise
    if failures:
        raise min(failures.values(), key=lambda error: isinstance(error, (Aborted, PeerLost)))
