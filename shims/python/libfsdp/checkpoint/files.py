"""Checkpoint files: writing a StateDict (`write`), a save that goes on (`Save`), and reading (`Checkpoint`).

Nothing here knows of models. abi/checkpoint.md describes the files.
"""

import atexit
import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from ctypes import byref, c_int64, c_void_p
from dataclasses import dataclass

from .. import abi
from ..borrow import borrow
from ..errors import InvalidArgument, NotFound, Pending, check
from ..group import Group
from ..handle import Handle, integer, real
from ..state import Loading, StateDict, progress_function, read_entry, read_json
from ..tensor import zeros

lib = abi.lib
_SLICE_MS = 100  # a wait on the main thread looks for Ctrl-C so often


def path_text(path):
    """A path for the C side: of any bytes, not UTF-8 alone."""
    path = os.fsencode(path)
    if b"\0" in path:
        raise InvalidArgument(f"path: {path!r} contains a zero character")
    return path


def write(path, state, group=None, *, full=False, background=False, sync=True, max_file_bytes=None):
    """Save a StateDict. Collective over `group` (None: this process alone): the same names in the same order on all ranks.

    path            a folder; with full=True also a file, whose name ends in ".safetensors"
    full            False: each rank writes a file of its own parts. True: whole tensors, gathered by rank 0 one at a time
    background      True: return when values are copied, and write them on a thread of the library's
    sync            False: don't wait for the disk
    max_file_bytes  with full: begin another file rather than exceed this

    Returns a Save with background=True, else None when all is written. An earlier checkpoint at `path` stays as it is
    until this one is complete. Raises InvalidArgument, Unsupported (complex128), InvalidState (another save there is
    under way), SystemFailure (disk full, say), Mismatch; a failure of one rank is told on all.
    """
    if not isinstance(state, StateDict):
        raise TypeError(f"state: {type(state).__name__} is not a libfsdp.StateDict")
    if group is not None and not isinstance(group, Group):
        raise TypeError(f"group: {type(group).__name__} is not a libfsdp.Group")
    options = abi.fsdp_save_options()
    options.format = abi.FSDP_CHECKPOINT_FULL if full else abi.FSDP_CHECKPOINT_SHARDED
    options.no_sync, options.background = not sync, bool(background)
    if max_file_bytes is not None:
        options.max_file_bytes = integer(max_file_bytes, "max_file_bytes", 64)
        if options.max_file_bytes <= 0 or not full:
            raise InvalidArgument("max_file_bytes: give a positive number of bytes, with full=True")
    pointer = c_void_p()
    handle = None if group is None else group._handle
    check(lib.fsdp_checkpoint_save(handle, state._handle, path_text(path), byref(options), byref(pointer)))
    save = Save(pointer, os.fsdecode(path))
    if background:
        return save
    save.wait()


class Save:
    """A save in the background. It goes on also when nobody holds this object; at the end of the program it is waited for.

    path  where it goes
    """

    def __init__(self, pointer, path):
        self._owned = Handle(pointer, lib.fsdp_save_release)
        self.path = path
        with _lock:
            _running[:] = [save for save in _running if not save.done] + [self]

    def __reduce__(self):
        raise TypeError("a libfsdp.checkpoint.Save can't be copied or pickled: wait() for it here")

    def _info(self):
        info = abi.fsdp_save_info()
        check(lib.fsdp_save_query(self._owned, byref(info)))
        return info

    @property
    def done(self):
        """Whether it is complete, or has failed."""
        return bool(self._info().done)

    @property
    def progress(self):
        """(bytes that this rank has written, bytes that it will write)."""
        info = self._info()
        return info.written_bytes, info.total_bytes

    def wait(self, timeout=None):
        """Wait until it is complete. timeout: seconds; 0: only look; None: as long as it takes. Raises Pending, a TimeoutError,
        when `timeout` passes first (the save goes on), else what the save failed with."""
        deadline = math.inf if timeout is None else time.monotonic() + real(timeout, "timeout")
        main = threading.current_thread() is threading.main_thread()
        while True:
            left = deadline - time.monotonic()
            most = _SLICE_MS if main else 3_600_000
            slice_ms = most if left * 1000 > most else max(0, math.ceil(left * 1000))
            status = lib.fsdp_save_wait(self._owned, slice_ms)
            if status != abi.FSDP_ERR_PENDING:
                check(status)
                return
            if time.monotonic() >= deadline:
                raise Pending(f"the save of {self.path} is not complete after {timeout} s; it goes on")

    def __repr__(self):
        return f"<libfsdp.checkpoint.Save of {self.path!r}>"


_lock = threading.Lock()
_running = []  # saves that may go on: their files would be lost with the process
os.register_at_fork(after_in_child=_running.clear)  # the parent's


@atexit.register
def _finish():
    for save in _running:
        try:
            save.wait()
        except Exception as error:  # nobody is there to catch it
            print(f"libfsdp: the save of {save.path} failed: {error}", file=sys.stderr)


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint is, from `Checkpoint.info`."""

    full: bool  # whole tensors; else parts of ranks
    ranks: int  # that wrote it; 0: not known
    checksums: bool
    n_entries: int
    n_files: int  # that hold tensors
    nbytes: int  # of all tensors
    save_id: str  # of this save alone; "": not written by libfsdp


@dataclass(frozen=True)
class Part:
    """A part of an entry that lies in one file."""

    file: str
    offset: tuple  # in the whole tensor
    length: tuple
    nbytes: int


class Checkpoint(Mapping):
    """An open checkpoint: of libfsdp's, a safetensors file, or a folder of Hugging Face's. As a mapping: from names to
    Entries; those of ranks, which are not in it, are in `of_ranks`.

    Opening reads all headers and checks them. Raises NotFound, Corrupt (naming file and tensor), SystemFailure,
    Unsupported. Any thread may use it.
    """

    def __init__(self, path):
        pointer = c_void_p()
        check(lib.fsdp_checkpoint_open(path_text(path), byref(pointer)))
        self._owned = Handle(pointer, lib.fsdp_checkpoint_release)
        self.path = os.fsdecode(path)
        raw = abi.fsdp_checkpoint_info()
        check(lib.fsdp_checkpoint_query(self._owned, byref(raw)))
        self.info = CheckpointInfo(
            full=raw.format == abi.FSDP_CHECKPOINT_FULL,
            ranks=raw.ranks,
            checksums=bool(raw.checksums),
            n_entries=raw.n_entries,
            n_files=raw.n_files,
            nbytes=raw.bytes,
            save_id=raw.save_id.decode(),
        )
        self.json = read_json(lib.fsdp_checkpoint_json, self._owned, raw.n_json)
        self._at, self._entries, self.of_ranks = {}, {}, []
        for index in range(raw.n_entries):
            entry = abi.fsdp_entry()
            check(lib.fsdp_checkpoint_entry(self._owned, index, byref(entry)))
            entry = read_entry(entry)
            self._at[entry.name, entry.rank] = index
            if entry.rank is None:
                self._entries[entry.name] = entry
            else:
                self.of_ranks.append(entry)

    def __reduce__(self):
        raise TypeError("a libfsdp.checkpoint.Checkpoint can't be copied or pickled: open it again from its path")

    @property
    def _handle(self):
        if self._owned is None:
            raise InvalidArgument("the checkpoint is closed")
        return self._owned

    def __len__(self):
        return len(self._entries)

    def __iter__(self):
        return iter(self._entries)

    def __getitem__(self, name):
        return self._entries[name]

    def __eq__(self, other):
        return self is other

    __hash__ = object.__hash__

    def _index(self, name, rank):
        try:
            return self._at[name, rank]
        except KeyError:
            of = "" if rank is None else f" of rank {rank}"
            raise NotFound(f"{self.path}: has no entry {name!r}{of}") from None

    def read(self, name, out=None, *, offset=None, rank=None):
        """Read an entry, or the part of it that begins at `offset` and has `out`'s shape, into the array `out`, and return it.

        out   None: a new Tensor for all of the entry. Floats are cast to its dtype
        rank  of an entry of a rank: whose

        Reads no more of the files than it needs. Raises NotFound, InvalidArgument, Corrupt, SystemFailure.
        """
        index = self._index(name, rank)
        if out is None:
            entry = abi.fsdp_entry()
            check(lib.fsdp_checkpoint_entry(self._handle, index, byref(entry)))
            entry = read_entry(entry)
            out = zeros(entry.shape, entry.dtype)
        tensor = borrow(out, "out", True)
        corner = None
        if offset is not None:
            offset = tuple(integer(at, "offset", 64) for at in offset)
            if len(offset) != tensor.ndim:
                raise InvalidArgument(f"offset: {offset} has not one number for each of {tensor.ndim} dimensions")
            corner = (c_int64 * max(1, len(offset)))(*offset)
        check(lib.fsdp_checkpoint_read(self._handle, index, corner, ctypes.byref(tensor)))
        return out

    def load(self, state, *, partial=False, prefix=None, progress=None):
        """Read into the arrays of a StateDict what the checkpoint has under the same names; floats are cast.

        partial, prefix  as for `StateDict.load`
        progress         progress(bytes done, bytes in all), now and then

        Returns a LoadResult. Not collective: each rank loads its own parts. Raises InvalidArgument with nothing written;
        after Corrupt or SystemFailure the arrays are undefined.
        """
        if not isinstance(state, StateDict):
            raise TypeError(f"state: {type(state).__name__} is not a libfsdp.StateDict")
        return Loading(partial, False, prefix, progress).run(lib.fsdp_checkpoint_load, self._handle, state._handle)

    def verify(self, progress=None):
        """Read everything and compare it with its checksums. Raises Corrupt for the first damage."""
        self.raised = None
        function = abi.fsdp_progress_fn() if progress is None else progress_function(self, progress)
        status = lib.fsdp_checkpoint_verify(self._handle, function, None)
        raised, self.raised = self.raised, None
        if raised is not None:
            raise raised
        check(status)

    def parts(self, name, rank=None):
        """Where an entry lies: a list of Parts."""
        index, n = self._index(name, rank), c_int64()
        check(lib.fsdp_checkpoint_n_parts(self._handle, index, byref(n)))
        found = []
        for part in range(n.value):
            raw = abi.fsdp_checkpoint_part()
            check(lib.fsdp_checkpoint_part_of(self._handle, index, part, byref(raw)))
            dims = range(raw.ndim)
            found.append(
                Part(raw.file.decode(), tuple(raw.offset[d] for d in dims), tuple(raw.length[d] for d in dims), raw.bytes)
            )
        return found

    def close(self):
        """Close its files; a second close does nothing."""
        self._owned = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __repr__(self):
        return f"<libfsdp.checkpoint.Checkpoint {self.path!r} of {len(self)} tensors>"
