"""Whether ranks are of one mind before they write: none has failed (`agreed`), and what several hold is the same where
each writes a slice of it, or one of them all (`Copies`). And whether what is under several names of a checkpoint is
the same, before a model that has one tensor for them takes one (`same_values`).
"""

from ctypes import c_char, c_uint64, string_at
from zlib import crc32

from ..errors import BY_STATUS, FsdpError, InvalidArgument, Mismatch
from ..tensor import copy, zeros

_CHUNK = 8 << 20  # bytes that are compared at a time
_TEXT = 500  # bytes of a message that others are told


def agreed(path, group, error):
    """Raise `error`, or what another rank had to give here. Collective, so that a rank whose call was wrong does not
    leave the others waiting in a save."""
    if group is not None and group.size > 1:
        text = "" if error is None else str(error) or type(error).__name__
        status = 0 if error is None else getattr(error, "status", 0) or InvalidArgument.status
        mine, every = zeros((_TEXT,), "uint8"), zeros((group.size, _TEXT), "uint8")
        message = status.to_bytes(4, "little") + text.encode()[: _TEXT - 4]
        (c_char * len(message)).from_address(mine.data_ptr)[:] = message
        group.all_gather(mine, every)
        for rank in range(group.size):
            told = string_at(every.data_ptr + rank * _TEXT, _TEXT)
            kind = BY_STATUS.get(int.from_bytes(told[:4], "little"), FsdpError)
            if any(told[:4]) and error is None:
                text = told[4:].rstrip(b"\0").decode(errors="ignore")
                raise kind(f"saving to {str(path)!r}: rank {rank} reported: {text}", ranks=(rank,))
    if error is not None:
        raise error


class Copies:
    """Entries of a StateDict that several ranks hold, and that nothing keeps alike.

    Each rank reads its copies once, 2.7 GiB/s here, and 8 bytes of each entry are exchanged.
    """

    def __init__(self):
        self._entries = {}  # name: (where the part begins, as bytes; what, advice)

    def add(self, name, offset, what, advice):
        """what: the entry, and advice: what to do where its copies differ, for a message."""
        self._entries[name] = repr(tuple(offset)).encode(), what, advice

    def check(self, state, group):
        """Collective, with the same entries on all ranks; where those differ, saving tells. Raises Mismatch on all."""
        if group is None or group.size == 1:
            return
        names = list(self._entries)
        if len({row[0] for row in _gathered([crc32("\n".join(names).encode())], group)}) > 1 or not names:
            return
        sums = [(crc32(self._entries[name][0]) << 32) + _sum(state[name]) for name in names]
        rows = _gathered(sums, group)
        for index, name in enumerate(names):
            first = {}  # {the part: the first rank that holds it}
            for rank, row in enumerate(rows):
                other = first.setdefault(row[index] >> 32, rank)
                if row[index] != rows[other][index]:
                    _, what, advice = self._entries[name]
                    message = f"{what} has other values on rank {rank} than on rank {other}: {advice}"
                    raise Mismatch(message, ranks=(other, rank))


def _gathered(numbers, group):
    """All ranks' lists of uint64."""
    n = len(numbers)
    mine, every = zeros((n,), "uint64"), zeros((group.size, n), "uint64")
    (c_uint64 * n).from_address(mine.data_ptr)[:] = numbers
    group.all_gather(mine, every)
    found = list((c_uint64 * (group.size * n)).from_address(every.data_ptr))
    return [found[rank * n : (rank + 1) * n] for rank in range(group.size)]


def _sum(part):
    """A checksum of a Tensor's values."""
    if not part.nbytes:
        return 0
    dense, strides = 1, []
    for extent in reversed(part.shape):
        strides.append(dense)
        dense *= extent
    if tuple(part.strides) != tuple(reversed(strides)):
        part = copy(part, zeros(part.shape, part.dtype))
    return crc32((c_char * part.nbytes).from_address(part.data_ptr))


def same_values(checkpoint, one, other):
    """Whether two entries of a Checkpoint are equal bit for bit. Reads both, some rows at a time."""
    first, second = checkpoint[one], checkpoint[other]
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    shape = tuple(first.shape)
    if not shape or not first.nbytes:
        return _bytes(checkpoint.read(one)) == _bytes(checkpoint.read(other))
    rows = max(1, _CHUNK * shape[0] // first.nbytes)
    for row in range(0, shape[0], rows):
        part, offset = (min(rows, shape[0] - row), *shape[1:]), (row,) + (0,) * (len(shape) - 1)
        a, b = (checkpoint.read(name, zeros(part, first.dtype), offset=offset) for name in (one, other))
        if _bytes(a) != _bytes(b):
            return False
    return True


def _bytes(tensor):
    return string_at(tensor.data_ptr, tensor.nbytes) if tensor.nbytes else b""
