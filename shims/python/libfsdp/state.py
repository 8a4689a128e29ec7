"""State dicts: named tensors, each whole or this rank's part of a larger one, and named JSON values.

    state = model.state_dict()                     # this rank's shards themselves, under their parameters' names
    state.add("running_mean", mean, copies=group.size, copy=group.rank)      # the same on every rank
    state.set_json("training", {"step": 10})
    libfsdp.checkpoint.write(path, state, group)   # and Checkpoint(path).load(state) reads it back, into the shards

A dict holds no values of its own: what `load` writes goes to the arrays that were added. Entries keep the order in which
they were added, which must be the same on all ranks. One thread at a time.
"""

import json
from collections.abc import Mapping
from ctypes import POINTER, byref, c_char_p, c_int64, c_void_p
from dataclasses import dataclass, field

from . import abi
from .borrow import borrow
from .dtypes import NAMES, TABLE, name_of
from .errors import InvalidArgument, NotFound, check
from .group import Group
from .handle import Handle, integer, text
from .tensor import Tensor, lend

lib = abi.lib
_KINDS = {"sharded": abi.FSDP_STATE_SHARDED, "full": abi.FSDP_STATE_FULL, "local": abi.FSDP_STATE_LOCAL}


@dataclass(frozen=True)
class Entry:
    """What an entry is: of a StateDict, or of a Checkpoint (whose tensors are whole: `offset` all 0)."""

    name: str
    shape: tuple  # of the whole tensor
    offset: tuple  # where this rank's part begins in it
    length: tuple  # and its extents
    dtype: str  # in which it is kept in files
    copies: int  # so many ranks hold this very part
    copy: int  # which of them this rank is
    tied_to: str  # the name of the earlier entry that this one is, or None
    rank: int  # whose it is, of an entry of a rank; else None

    @property
    def nbytes(self):
        """Of the part, as kept in files."""
        count = 1
        for extent in self.length:
            count *= extent
        return count * TABLE[self.dtype][1] // 8


def read_entry(raw):
    """An Entry of an abi.fsdp_entry."""
    dims = range(raw.ndim)
    return Entry(
        name=raw.name.decode(),
        shape=tuple(raw.shape[d] for d in dims),
        offset=tuple(raw.offset[d] for d in dims),
        length=tuple(raw.length[d] for d in dims),
        dtype=NAMES[raw.dtype.code, raw.dtype.bits],
        copies=raw.copies,
        copy=raw.copy,
        tied_to=raw.tied_to.decode() if raw.tied_to else None,
        rank=raw.rank if raw.kind == abi.FSDP_ENTRY_OF_RANK else None,
    )


@dataclass
class LoadResult:
    """What a load found: names that were wanted and not there, and names that were there and not wanted."""

    missing: list = field(default_factory=list)
    unexpected: list = field(default_factory=list)


class Loading:
    """Options of a load, whose callbacks fill `result`. An exception of `progress` ends the load, and is raised."""

    def __init__(self, partial=False, from_rank0=False, prefix=None, progress=None):
        self.result, self.raised = LoadResult(), None
        self.options = abi.fsdp_load_options()
        self.options.partial, self.options.from_rank0 = bool(partial), bool(from_rank0)
        self.options.prefix = text(prefix, "prefix")
        self._on_name = abi.fsdp_name_fn(self._name)
        self.options.on_name = self._on_name
        self._progress = progress
        if progress is not None:
            self._on_progress = progress_function(self, progress)
            self.options.on_progress = self._on_progress

    def _name(self, kind, name, user):
        names = self.result.missing if kind == abi.FSDP_NAME_MISSING else self.result.unexpected
        names.append(name.decode())

    def run(self, function, *arguments):
        """function(*arguments, options), checked."""
        status = function(*arguments, byref(self.options))
        if self.raised is not None:
            raise self.raised
        check(status)
        return self.result


def progress_function(keeper, progress):
    """A C function that calls progress(done, total); what it raises goes to keeper.raised, and ends the work."""

    def call(done, total, user):
        try:
            progress(done, total)
        except BaseException as error:
            keeper.raised = error
            return 1
        return 0

    return abi.fsdp_progress_fn(call)


class StateDict(Mapping):
    """Named tensors and JSON values. As a mapping: from names to Tensors, this rank's parts.

    Made empty, by `Model.state_dict` or by `gather`.
    """

    def __init__(self, _pointer=None):
        pointer = _pointer
        if pointer is None:
            pointer = c_void_p()
            check(lib.fsdp_state_dict_create(byref(pointer)))
        self._owned = Handle(pointer, lib.fsdp_state_dict_release)

    @property
    def _handle(self):
        return self._owned

    def __reduce__(self):
        raise TypeError("a libfsdp.StateDict can't be copied or pickled: save it with libfsdp.checkpoint")

    def add(self, name, array, *, shape=None, offset=None, dtype=None, copies=1, copy=0, of_rank=False, read_only=False):
        """Add this rank's part of a tensor: `array`'s own memory.

        shape      of the whole tensor; None: the array is all of it
        offset     where the array begins in it; None: at its first element
        dtype      in which it is kept in files; None: the array's
        copies     how many ranks hold this very part, and `copy`, which of them this rank is
        of_rank    True: this rank's own, another on each rank (the state of a random generator, say)
        read_only  True: for saving only

        Raises InvalidArgument (name taken, a part that leaves the shape), Unsupported (dtype).
        """
        part = borrow(array, name, not read_only)
        length = tuple(part.shape[: part.ndim])
        shape = length if shape is None else tuple(integer(extent, "shape", 64) for extent in shape)
        if len(shape) != len(length):
            raise InvalidArgument(f"{name}: an array of {len(length)} dimensions is no part of one of {len(shape)}")
        entry = abi.fsdp_entry()
        entry.name = text(name, "name")
        entry.kind = abi.FSDP_ENTRY_OF_RANK if of_rank else abi.FSDP_ENTRY_TENSOR
        entry.ndim = len(shape)
        entry.shape = (c_int64 * max(1, len(shape)))(*shape)
        if offset is not None:
            offset = tuple(integer(at, "offset", 64) for at in offset)
            if len(offset) != len(shape):
                raise InvalidArgument(f"{name}: offset {offset} has not one number for each of {len(shape)} dimensions")
            entry.offset = (c_int64 * max(1, len(shape)))(*offset)
        if dtype is not None:
            entry.dtype.code, entry.dtype.bits = TABLE[name_of(dtype)][:2]
            entry.dtype.lanes = 1
        entry.copies, entry.copy = integer(copies, "copies"), integer(copy, "copy")
        managed = lend(array, name, not read_only)
        try:
            check(lib.fsdp_state_dict_add(self._handle, byref(entry), managed))
        except BaseException:
            Tensor(managed)  # which gives it back
            raise

    def tie(self, name, to):
        """Add a name for the tensor of an earlier entry."""
        entry = abi.fsdp_entry()
        entry.name, entry.tied_to = text(name, "name"), text(to, "to")
        check(lib.fsdp_state_dict_add(self._handle, byref(entry), None))

    def set_json(self, name, value):
        """Add, or replace, a value that JSON can hold. In a checkpoint it is rank 0's that is kept."""
        check(lib.fsdp_state_dict_set_json(self._handle, text(name, "name"), dump_json(value, name)))

    @property
    def json(self):
        """{name: value} of the JSON values."""
        return read_json(lib.fsdp_state_dict_json, self._handle, self._info().n_json)

    def _info(self):
        info = abi.fsdp_state_dict_info()
        check(lib.fsdp_state_dict_query(self._handle, byref(info)))
        return info

    @property
    def nbytes(self):
        """Of this rank's parts, as kept in files."""
        return self._info().bytes

    @property
    def whole_nbytes(self):
        """Of all tensors, were they whole."""
        return self._info().whole_bytes

    def _find(self, name):
        index = c_int64()
        try:
            check(lib.fsdp_state_dict_find(self._handle, text(name, "name"), byref(index)))
        except NotFound:
            raise KeyError(name) from None
        return index.value

    def entry(self, name):
        """The Entry of a name. Raises KeyError."""
        return self._entry(self._find(name))

    def _entry(self, index):
        raw = abi.fsdp_entry()
        check(lib.fsdp_state_dict_entry(self._handle, index, byref(raw)))
        return read_entry(raw)

    def entries(self):
        """All Entries, in their order."""
        return [self._entry(index) for index in range(len(self))]

    def __len__(self):
        return self._info().n_entries

    def __iter__(self):
        return iter([entry.name for entry in self.entries()])

    def __contains__(self, name):
        try:
            self._find(name)
        except KeyError:
            return False
        return True

    def __getitem__(self, name):
        managed = POINTER(abi.DLManagedTensorVersioned)()
        check(lib.fsdp_state_dict_tensor(self._handle, self._find(name), byref(managed)))
        return Tensor(managed)

    def __eq__(self, other):
        return self is other

    __hash__ = object.__hash__

    def gather(self, group, *, rank0_only=False, prefix=None):
        """A StateDict of whole tensors, in memory of its own, one gathered after the other. rank0_only: rank 0's alone
        has entries. Collective; all ranks have the same names in the same order. Entries of a rank are left out."""
        if not isinstance(group, Group):
            raise TypeError(f"group: {type(group).__name__} is not a libfsdp.Group")
        pointer = c_void_p()
        options = dict_options("full", rank0_only=rank0_only, prefix=prefix)
        check(lib.fsdp_state_dict_gather(self._handle, group._handle, byref(options), byref(pointer)))
        return StateDict(pointer)

    def load(self, source, *, partial=False, prefix=None):
        """Write what another StateDict has under the same names into this one's arrays; floats are cast.

        partial  False: all names must agree. True: what is missing keeps its values, what is unexpected is passed over
        prefix   of the source's names, of which those without it are not looked at

        Returns a LoadResult. Raises InvalidArgument, with nothing written, for names, shapes, dtypes or parts that don't
        fit, and for arrays that share memory under two names (tie them: see `tie`).
        """
        if not isinstance(source, StateDict):
            raise TypeError(f"source: {type(source).__name__} is not a libfsdp.StateDict")
        return Loading(partial, prefix=prefix).run(lib.fsdp_state_dict_load, self._handle, source._handle)

    def __repr__(self):
        return f"<libfsdp.StateDict of {len(self)} entries>"


def dict_options(kind, *, rank0_only=False, copy=False, prefix=None):
    """An abi.fsdp_state_dict_options."""
    if kind not in _KINDS:
        raise InvalidArgument(f"kind: {kind!r}; give one of {', '.join(map(repr, _KINDS))}")
    options = abi.fsdp_state_dict_options()
    options.kind, options.rank0_only, options.copy = _KINDS[kind], bool(rank0_only), bool(copy)
    options.prefix = text(prefix, "prefix")
    return options


def dump_json(value, name):
    """JSON text of a value, as bytes; NaN and infinities are refused, and keys that would come back as texts."""
    try:
        dumped = json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name}: is nothing that JSON can hold: {error}") from None
    _check_keys(value, name)
    return dumped


def _check_keys(value, name):
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidArgument(
                    f"{name}: is nothing that JSON can hold: the key {key!r} would come back as a text; make it one, or give "
                    "a list of [key, value] pairs"
                )
            _check_keys(item, name)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_keys(item, name)


def read_json(function, handle, n):
    """{name: value} of n JSON values, each by function(handle, index, &name, &text)."""
    found = {}
    for index in range(n):
        name, value = c_char_p(), c_char_p()
        check(function(handle, index, byref(name), byref(value)))
        found[name.value.decode()] = json.loads(value.value)
    return found
