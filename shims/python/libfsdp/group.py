"""Groups: ranks that communicate, and the operations they run together.

Arrays are NumPy arrays, libfsdp.Tensor, torch or TensorPlay tensors, or any object with `__dlpack__`, in host memory;
the library reads and writes them where they are. Any strides; an array that is not contiguous costs a copy inside.

Every rank of a group calls the same operations in the same order. Below, N is the group's size; `(s...)` a shape, `d0`
its first dimension. Every operation takes `async_op`: False runs it to its end and returns its output array; True
returns a `Work` at once, which keeps the arrays alive until it is complete.
"""

import atexit
import ctypes
import enum
import logging
import sys
import threading
import time
import weakref
from ctypes import byref, c_int64, c_void_p
from dataclasses import dataclass

from . import abi
from .borrow import borrow
from .errors import BY_STATUS, InvalidArgument, check, last
from .handle import Handle, integer, milliseconds, text
from .store import Store, explained
from .work import pending, start

lib = abi.lib
ANY_RANK = abi.FSDP_ANY_RANK


class ReduceOp(enum.IntEnum):
    """How values of several ranks become one. The names in small letters do as well: "sum", "avg", ...

    Low-precision floats accumulate in float32 and round once. AVG: floats and complex only; integers are refused.
    BAND, BOR, BXOR: integers and bool only. SUM of bool is OR, PROD is AND. NaN in any input gives NaN.
    """

    SUM = abi.FSDP_SUM
    AVG = abi.FSDP_AVG
    PROD = abi.FSDP_PROD
    MIN = abi.FSDP_MIN
    MAX = abi.FSDP_MAX
    BAND = abi.FSDP_BAND
    BOR = abi.FSDP_BOR
    BXOR = abi.FSDP_BXOR


_OPS = {op: int(op) for op in ReduceOp} | {op.name.lower(): int(op) for op in ReduceOp}


def _op(op):
    try:
        code = _OPS[op]
        if not isinstance(op, (bool, float)):  # which equal numbers of operations
            return code
    except (KeyError, TypeError):
        pass
    names = ", ".join(repr(known.name.lower()) for known in ReduceOp)
    raise InvalidArgument(f"op: {op!r} is not one of {names}")


def _no_op(out):
    """`out`, where a reduction's name may have been given by mistake."""
    if isinstance(out, (str, ReduceOp)):
        name = out.name.lower() if isinstance(out, ReduceOp) else out
        raise TypeError(f"out: {out!r} is not an array; give the reduction as op={name!r}")
    return out


@dataclass(frozen=True)
class GroupInfo:
    """What `Group.info()` gives."""

    rank: int
    size: int
    name: str
    transport: str  # "self", "shm"
    direct_read: bool  # whether peers' memory is read directly
    failed: type  # None, or the class of exception that ended the group
    operations: int  # collectives begun so far
    bytes_moved: int  # read from peers and written to shared memory by this rank, so far
    segment_bytes: int  # shared memory of the whole group
    timeout: float  # seconds, of operations that begin now


def _group_options(name, transport, timeout, staging_bytes, direct_read, spin_us):
    options = abi.fsdp_group_options()
    options.name = text(name, "name")
    options.transport = text(transport, "transport")
    options.timeout_ms = milliseconds(timeout, "timeout")
    options.staging_bytes = 0 if staging_bytes is None else integer(staging_bytes, "staging_bytes", bits=64)
    if direct_read is not None and not isinstance(direct_read, bool):
        raise TypeError(f"direct_read: {direct_read!r} is not True, False or None")
    options.direct_read = {None: 0, True: 1, False: 2}[direct_read]
    options.spin_us = 0 if spin_us is None else (integer(spin_us, "spin_us") or -1)
    return options


class _Operations:
    """The operations, for a group and for a list of them: both have them in the same words."""

    def all_gather(self, input, out, *, rows=None, async_op=False):
        """out = the ranks' `input`, in rank order.

        input (s...), out (N, s...) or (N*d0, ...), same dtype. In place: `input` may be this rank's rows of `out`.
        Uneven: `rows`, N integers and the same on all ranks, says how many rows each rank gives; then input
        (rows[rank], ...), out (sum(rows), ...).
        """
        args = borrow(input, "input"), borrow(out, "out", True)
        if rows is None:
            return self._do(abi.FSDP_OP_ALL_GATHER, lib.fsdp_all_gather, args, out, async_op)
        args += (self._rows(rows, "rows"),)
        return self._do(abi.FSDP_OP_ALL_GATHER, lib.fsdp_all_gather_v, args, out, async_op, output_rows=args[2])

    def all_gather_v(self, input, out, rows, *, async_op=False):
        """`all_gather` with `rows`."""
        return self.all_gather(input, out, rows=rows, async_op=async_op)

    def reduce_scatter(self, input, out, op="sum", *, rows=None, async_op=False):
        """out = this rank's part of the reduction of the ranks' `input`.

        input (N*d0, ...) or (N, s...), out with 1/N of its elements, same dtype. In place: `out` may be this rank's rows
        of `input`. Uneven: `rows`, N integers and the same on all ranks, says how many rows each rank receives; then
        input (sum(rows), ...), out (rows[rank], ...).
        """
        code = _op(op)
        args = borrow(input, "input"), borrow(out, "out", True)
        if rows is None:
            return self._do(
                abi.FSDP_OP_REDUCE_SCATTER, lib.fsdp_reduce_scatter, (*args, code), out, async_op, op=code
            )
        rows = self._rows(rows, "rows")
        return self._do(
            abi.FSDP_OP_REDUCE_SCATTER,
            lib.fsdp_reduce_scatter_v,
            (*args, rows, code),
            out,
            async_op,
            op=code,
            input_rows=rows,
        )

    def reduce_scatter_v(self, input, out, rows, op="sum", *, async_op=False):
        """`reduce_scatter` with `rows`."""
        return self.reduce_scatter(input, out, op, rows=rows, async_op=async_op)

    def all_reduce(self, input, out=None, op="sum", *, async_op=False):
        """out = the reduction of the ranks' `input`, on all ranks. Same shape and dtype; `out` None: in place."""
        code = _op(op)
        if out is None:
            out = input
            tensor = borrow(input, "input", True)
            args = tensor, tensor, code
        else:
            args = borrow(input, "input"), borrow(_no_op(out), "out", True), code
        return self._do(abi.FSDP_OP_ALL_REDUCE, lib.fsdp_all_reduce, args, out, async_op, op=code)

    def reduce(self, input, out=None, op="sum", *, root=0, async_op=False):
        """out on rank `root` = the reduction of the ranks' `input`. Elsewhere `out` may be None and is not touched, and
        the call gives None. In place on root: `out` may be `input`."""
        code = _op(op)
        root = self._peer(root, "root")
        on_root = self._here(root)
        if out is None and on_root:
            raise InvalidArgument(f"out: rank {root} is the root and needs an array for the result")
        args = borrow(input, "input"), None if out is None else borrow(_no_op(out), "out", on_root), code, root
        result = out if on_root else None
        return self._do(abi.FSDP_OP_REDUCE, lib.fsdp_reduce, args, result, async_op, op=code, peer=root)

    def broadcast(self, tensor, root=0, *, async_op=False):
        """`tensor` of rank `root` to all, in place: read on root, written elsewhere. Same shape and dtype on all."""
        root = self._peer(root, "root")
        args = borrow(tensor, "tensor", not self._here(root)), root
        return self._do(abi.FSDP_OP_BROADCAST, lib.fsdp_broadcast, args, tensor, async_op, peer=root)

    def gather(self, input, out=None, *, root=0, async_op=False):
        """out on rank `root` = the ranks' `input`, in rank order. input (s...), out (N, s...) or (N*d0, ...); elsewhere
        `out` may be None and is not touched, and the call gives None."""
        root = self._peer(root, "root")
        on_root = self._here(root)
        if out is None and on_root:
            raise InvalidArgument(f"out: rank {root} is the root and needs an array for the result")
        args = borrow(input, "input"), None if out is None else borrow(out, "out", on_root), root
        result = out if on_root else None
        return self._do(abi.FSDP_OP_GATHER, lib.fsdp_gather, args, result, async_op, peer=root)

    def scatter(self, input, out, *, root=0, async_op=False):
        """out = this rank's part of root's `input`. input (N, s...) or (N*d0, ...), out (s...) or (d0, ...); on other
        ranks than `root` input may be None and is not read."""
        root = self._peer(root, "root")
        if input is None and self._here(root):
            raise InvalidArgument(f"input: rank {root} is the root and needs an array to scatter")
        args = None if input is None else borrow(input, "input"), borrow(out, "out", True), root
        return self._do(abi.FSDP_OP_SCATTER, lib.fsdp_scatter, args, out, async_op, peer=root)

    def all_to_all(self, input, out, *, input_rows=None, output_rows=None, async_op=False):
        """Part r of `input` goes to rank r, whose part `rank` of `out` it becomes.

        Even: input and out of equal shape, d0 a multiple of N. Uneven: input_rows[r] rows of input go to rank r, output_rows[r]
        rows of out come from it (N integers each). Not in place.
        """
        if (input_rows is None) != (output_rows is None):
            missing = "input_rows" if input_rows is None else "output_rows"
            raise InvalidArgument(f"{missing}: give input_rows and output_rows together, or neither")
        args = borrow(input, "input"), borrow(out, "out", True)
        if input_rows is None:
            return self._do(abi.FSDP_OP_ALL_TO_ALL, lib.fsdp_all_to_all, args, out, async_op)
        rows = self._rows(input_rows, "input_rows"), self._rows(output_rows, "output_rows")
        return self._do(
            abi.FSDP_OP_ALL_TO_ALL,
            lib.fsdp_all_to_all_v,
            args + rows,
            out,
            async_op,
            input_rows=rows[0],
            output_rows=rows[1],
        )

    def all_to_all_v(self, input, out, input_rows, output_rows, *, async_op=False):
        """`all_to_all` with `input_rows` and `output_rows`."""
        return self.all_to_all(input, out, input_rows=input_rows, output_rows=output_rows, async_op=async_op)

    def send(self, tensor, dst, tag=0, *, async_op=False):
        """Send `tensor` to rank `dst`. Complete when it was read there. `tag` >= 0 says which `recv` it is for."""
        dst, tag = self._peer(dst, "dst"), integer(tag, "tag")
        args = borrow(tensor, "tensor"), dst, tag
        return self._do(abi.FSDP_OP_SEND, lib.fsdp_send, args, None, async_op, peer=dst, tag=tag)

    def recv(self, tensor, src=ANY_RANK, tag=0, *, async_op=False):
        """Receive into `tensor` from rank `src` (ANY_RANK: from any) what was sent with `tag`. Same count and dtype."""
        src, tag = integer(src, "src"), integer(tag, "tag")
        if src != ANY_RANK:
            src = self._peer(src, "src")
        args = borrow(tensor, "tensor", True), src, tag
        return self._do(abi.FSDP_OP_RECV, lib.fsdp_recv, args, tensor, async_op, peer=src, tag=tag)

    # What a group and a list of operations do differently: `_do`, and whose size and rank these are.

    def _rows(self, rows, name):
        values = [integer(value, name, bits=64) for value in rows]
        if len(values) != self.size:
            raise InvalidArgument(f"{name}: {len(values)} entries for a group of {self.size} ranks")
        return (c_int64 * len(values))(*values)

    def _peer(self, rank, name):
        rank = integer(rank, name)
        if not 0 <= rank < self.size:
            raise InvalidArgument(f"{name}: rank {rank} is not in 0 .. {self.size - 1}")
        return rank

    def _here(self, rank):
        return rank == self.rank


class Group(_Operations):
    """Ranks that communicate: a "process group". Made by `libfsdp.init`, `Group.single`, `split`, or here from a Store.

    Collective: every rank of the store makes it, in the same order as its other groups. A context manager: leaving it
    closes the group, and aborts it first when an exception is on its way, so that the other ranks don't wait.

    store          None: a group of one rank
    name           for messages
    transport      "self" (one rank), "shm" (one host); None: by size and host
    timeout        seconds, of each operation and of making the group; None: 600. Also an attribute, to read and to set
    staging_bytes  shared memory for staging, for each rank; None: 512 KiB. Rank 0's counts.
    direct_read    read peers' memory directly: None where the kernel allows it and it is the faster way, True always,
                   False never. Rank 0's counts.
    spin_us        how long a wait spins before it sleeps; None: chosen by ranks and cores; 0: never

    Failures. A Mismatch fails one operation, on every rank alike, and the group stays usable. Timeout, PeerLost, Aborted
    end the group for good, on every rank: each operation now queued, and each later call, raises the same at once.

    rank, size     this rank's number in the group, and how many there are
    interruptible  whether Ctrl-C is answered (within 0.1 s) while a call waits for other ranks. A call with
                   async_op=False runs on the calling thread, inside the library, and Python answers signals only when
                   it returns, at the latest after the group's timeout: that is the quick way, some 10 us for a small
                   operation. True makes the same call a Work and waits for it in slices, for a hand-off to another
                   thread each time. True in an interactive session, else False; set it as you like. After a
                   KeyboardInterrupt the operation goes on, as other ranks count on it, and uses its arrays until it is
                   complete; to end it, `abort` the group.
    """

    def __init__(
        self,
        store=None,
        *,
        name=None,
        transport=None,
        timeout=None,
        staging_bytes=None,
        direct_read=None,
        spin_us=None,
    ):
        if store is not None and not isinstance(store, Store):
            raise TypeError(f"store: {type(store).__name__} is not a libfsdp.Store")
        options = _group_options(name, transport, timeout, staging_bytes, direct_read, spin_us)
        pointer = c_void_p()
        status = lib.fsdp_group_create(store and store._handle, options, byref(pointer))
        if status:
            raise explained(status)
        self._take(pointer, store)

    @classmethod
    def single(cls, **options):
        """A group of this process alone. Takes the options of `Group`."""
        return cls(None, **options)

    def _take(self, pointer, store):
        self._owned = Handle(pointer, lib.fsdp_group_release)
        self.store = store
        self.interruptible = hasattr(sys, "ps1")
        info = self.info()
        self.rank, self.size, self.name = info.rank, info.size, info.name
        _open_groups.add(self)

    @property
    def _handle(self):
        handle = self._owned
        if handle is None:
            raise InvalidArgument("the group is closed")
        return handle

    def _do(self, kind, function, args, result, async_op, **_):
        if async_op:
            return start(function, self._handle, args, result, self)
        if self.interruptible:
            return start(function, self._handle, args, result, self).wait()
        status = function(self._handle, *args, None)
        if status:
            raise last(status)
        return result

    def __reduce__(self):
        raise TypeError(
            "a libfsdp.Group can't be copied or pickled: it is this process's place among the ranks; pass the object "
            "itself, `split` it for another group, and call libfsdp.init() in another process"
        )

    def barrier(self, *, async_op=False):
        """Return when every rank has called it."""
        return self._do(abi.FSDP_OP_BARRIER, lib.fsdp_barrier, (), None, async_op)

    def coalesced(self, *, async_op=False):
        """Several operations as one, with one exchange between the ranks instead of one each:

            with group.coalesced() as several:
                several.all_reduce(a)
                several.all_reduce(b)

        `several` has the operations of a group, without `barrier`; they are checked together and begin when the block
        ends (never, when it ends with an exception). With async_op=True, `several.work` is the Work of all of them.
        Either collectives, which take effect in their order, or `send` and `recv`, all at once; not both. An output must
        not overlap the others' arrays.
        """
        return Coalesced(self, async_op)

    @property
    def timeout(self):
        """Seconds that an operation may take. Set it (None: 600) for operations that this rank starts from then on, from
        any thread; those under way keep theirs, and so do groups split off before. Local: where ranks differ, the
        shortest that passes ends the group on all of them, with a Timeout that names who did not come. For a few calls
        only: `call_timeout`."""
        return self.info().timeout

    @timeout.setter
    def timeout(self, seconds):
        check(lib.fsdp_group_set_timeout(self._handle, milliseconds(seconds, "timeout")))

    def split(self, color, key=0, **options):
        """Cut the group into disjoint ones. Collective. Ranks that give the same `color` >= 0 form one group, ordered by
        `key`, then by rank; color None: this rank takes part in none, and the call gives None.

        Options as for Group; without any they are as this group's.
        """
        code = -1 if color is None else integer(color, "color")
        if color is not None and code < 0:
            raise InvalidArgument(f"color: {code}; give a number >= 0, or None to take no part")
        defaults = dict.fromkeys(("name", "transport", "timeout", "staging_bytes", "direct_read", "spin_us"))
        for option in options:
            if option not in defaults:
                raise TypeError(f"{option}: split has no such option")
        c_options = _group_options(**(defaults | options)) if options else None
        pointer = c_void_p()
        status = lib.fsdp_group_split(self._handle, code, integer(key, "key"), c_options, byref(pointer))
        if status:
            raise explained(status)
        if not pointer.value:
            return None
        group = Group.__new__(type(self))
        group._take(pointer, self.store)
        return group

    def abort(self, reason=None):
        """End the group for all its ranks: operations under way and later ones raise Aborted with `reason`. From any
        thread, at any time; does not block. A second abort does nothing."""
        check(lib.fsdp_group_abort(self._handle, text(reason, "reason")))

    def info(self):
        """A GroupInfo: this group's transport, counters and state."""
        info = abi.fsdp_group_info()
        check(lib.fsdp_group_query(self._handle, byref(info)))
        return GroupInfo(
            rank=info.rank,
            size=info.size,
            name=info.name.decode(),
            transport=info.transport.decode(),
            direct_read=bool(info.direct_read),
            failed=BY_STATUS.get(info.status),
            operations=info.operations,
            bytes_moved=info.bytes_moved,
            segment_bytes=info.segment_bytes,
            timeout=info.timeout_ms / 1000,
        )

    def close(self):
        """Leave the group, after this rank's queued operations; a second close does nothing. A peer that then waits for
        this rank gets PeerLost. To leave at once, `abort` first.

        Models and Units of the group, and their Tensors, hold it too: this rank leaves when the last of them is closed
        or dropped, and until then a peer that waits for it goes on waiting."""
        self._owned = None
        _open_groups.discard(self)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        as_planned = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        if not as_planned and self._owned is not None:
            self._abort_because(error)
        self.close()

    def _abort_because(self, error):
        reason = f"rank {self.rank} ended with {type(error).__name__}: {error}"
        lib.fsdp_group_abort(self._handle, reason.replace("\0", " ")[:200].encode())

    def __repr__(self):
        if self._owned is None:
            return f"<libfsdp.Group {self.name!r} closed>"
        return f"<libfsdp.Group {self.name!r} rank {self.rank} of {self.size}>"


class call_timeout:
    """A timeout of their own for the operations that this thread starts in a block, on whatever group:

        with call_timeout(5):
            group.barrier()

    seconds: a number, shorter or longer than the groups' timeouts; None: the groups'. Blocks nest: the inner one counts.
    What other threads start meanwhile is not touched. It counts as the group's does; but a call with async_op=False on
    a group that is not `interruptible` counts it from the call, also while it waits for this rank's earlier operations,
    and ends the group with Timeout when it passes there."""

    __slots__ = ("_ms", "_outer")
    _thread = threading.local()  # .ms: what the library has for this thread

    def __init__(self, seconds):
        self._ms = milliseconds(seconds, "timeout")

    def __enter__(self):
        self._outer = getattr(self._thread, "ms", 0)
        self._set(self._ms)

    def __exit__(self, kind, error, traceback):
        self._set(self._outer)

    def _set(self, ms):
        check(lib.fsdp_set_thread_timeout(ms))
        self._thread.ms = ms


class Coalesced(_Operations):
    """Operations that are to run as one: see `Group.coalesced`."""

    def __init__(self, group, async_op=False):
        self._group = group
        self._async = async_op
        self.size, self.rank = group.size, group.rank
        self._items = []
        self.work = None

    def _do(self, kind, function, args, result, async_op, *, op=0, input_rows=None, output_rows=None, peer=0, tag=0):
        if async_op:
            raise InvalidArgument("async_op: give it to coalesced(), for all operations together")
        item = abi.fsdp_collective(kind, op)
        first, second = args[0], args[1] if isinstance(args[1], abi.DLTensor) else None
        if kind == abi.FSDP_OP_RECV:
            first, second = None, first
        for field, tensor in (("input", first), ("output", second)):
            if tensor is not None:
                setattr(item, field, _pointer(tensor))
        if input_rows is not None:
            item.input_rows = input_rows
        if output_rows is not None:
            item.output_rows = output_rows
        item.peer, item.tag = peer, tag
        self._items.append((item, args))
        return result

    def barrier(self, *, async_op=False):
        raise InvalidArgument("barrier: not in coalesced(); call group.barrier() before or after the block")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if error is None:
            self._run()

    def take(self):
        """The operations so far, as the arguments of fsdp_coalesced."""
        items, self._items = self._items, []
        return _Kept(items), len(items)

    def _run(self):
        done = self._group._do(0, lib.fsdp_coalesced, self.take(), None, self._async)
        self.work = done if self._async else None


def _pointer(tensor):
    return ctypes.pointer(tensor)


class _Kept:
    """Passes as an array of `fsdp_collective`, and keeps what its pointers point to."""

    def __init__(self, items):
        self._items = items
        self._array = (abi.fsdp_collective * max(1, len(items)))(*(item for item, _ in items))
        # not ctypes.cast, which would tie the array and the pointer in a cycle: tensors would last until Python looks for those
        self._as_parameter_ = ctypes.pointer(self._array[0])


def init(url="env://", *, rank=None, world_size=None, timeout=None, job_key=None, **options):
    """Meet the other ranks at `url` and return the Group of all of them.

    The usual call is `libfsdp.init()`: rank and size come from the launcher's variables (`python -m libfsdp.run`,
    torchrun, mpirun, Slurm); with none of them set, it is a group of one.

    timeout: seconds, for meeting and for each operation; None: 300 for meeting, 600 for each operation. Other options as
    for Group. The group's `store` attribute is the Store: another group of the same ranks, in the same process, is
    `libfsdp.Group(group.store)`. Raises what Store and Group raise.

    Ctrl-C: a call that waits for other ranks does so inside the library, and Python answers signals when it returns, at
    the latest after `timeout`. `libfsdp.run` ends its ranks all the same, after its grace. For a program that handles
    KeyboardInterrupt set `group.interruptible = True`: it is then answered within 0.1 s (see Group).

    At exit a rank waits 3 seconds for what it started with async_op=True and other ranks haven't joined; then it aborts
    the group, so that neither side hangs. When an exception ended the program, it aborts at once.
    """
    store = Store(url, rank=rank, world_size=world_size, timeout=timeout, job_key=job_key)
    return Group(store, timeout=timeout, **options)


# ---- At exit ---------------------------------------------------------------------------------------------------------

_open_groups = weakref.WeakSet()
_PATIENCE = 3  # seconds that a program's end waits for operations that other ranks have not joined


def _leave():
    """Close what is still open, so that callbacks run while there is an interpreter to run them. When an exception
    ended the program, the other ranks are told so, and this one does not wait for them. (SystemExit leaves no trace that
    could be seen here, whatever its code.)"""
    error = getattr(sys, "last_value", None) if not hasattr(sys, "ps1") else None
    if error is None:
        _wait_for_pending()
    for group in list(_open_groups):
        if error is not None and group.size > 1:
            group._abort_because(error)
        group.close()


def _wait_for_pending():
    """Closing a group waits for its operations, as long as its timeout allows: too long for a program's end."""
    deadline = time.monotonic() + _PATIENCE
    say_at = deadline - _PATIENCE + 0.2
    while waiting := pending():
        now = time.monotonic()
        if now >= deadline:
            break
        if say_at is not None and now >= say_at:
            say_at = None
            logging.getLogger("libfsdp").warning(
                "libfsdp: the program ended with %d operations pending; waiting at most %g s for the other ranks. "
                "Work.wait() says when one is done",
                len(waiting),
                _PATIENCE,
            )
        time.sleep(0.005)
    for group in {group for group in waiting if group is not None}:
        if group._owned is not None:
            reason = f"rank {group.rank} ended while an operation of it waited for other ranks"
            lib.fsdp_group_abort(group._handle, reason.encode())


atexit.register(_leave)
