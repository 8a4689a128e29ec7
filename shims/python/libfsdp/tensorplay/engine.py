"""Engine: what does the work of a TensorPlay process group, in the place of its ProcessGroupGloo.

TensorPlay finds an engine's methods by their names. They get tensors in lists, a reduction as a number (the library's
numbers are the same), ranks of the group, and milliseconds; or one of its options objects in place of what comes last.
Complex tensors come as pairs of real ones, strided ones as contiguous copies, but neither is asked for here.

TensorPlay does not tell an engine whether a call is asynchronous: it waits for the work right after a call that is
not. A hand-off to another thread and back takes twenty times as long as a small operation, so `_at_once` looks at the
caller: a function of distributed_core whose `async_op` is False would wait next. Every other caller gets a work that is
under way.

An engine leaves its group when TensorPlay drops it, in destroy_process_group. Works of it don't keep it.
"""

import hashlib
import sys

from .. import abi
from ..errors import InvalidArgument
from ..hosts.collectives import Collectives
from ..hosts.rendezvous import meet
from .store import Service
from .tensors import Memory
from .work import Done, Work

_done = Done()
_memory = Memory()
_CORE = "tensorplay.distributed.distributed_core"


def _at_once(caller):
    """Whether the calling frame waits for the operation before it does anything else."""
    return caller.f_globals.get("__name__") == _CORE and caller.f_locals.get("async_op") is False


def _reduction(op):
    """(the library's number of a reduction, the timeout of the options object that it may have been in)."""
    options, op = op, getattr(op, "reduceOp", op)
    try:
        code = int(op)
    except (TypeError, ValueError):
        code = -1
    if not abi.FSDP_SUM <= code <= abi.FSDP_BXOR:
        raise InvalidArgument(f"op: {op!r} is not a reduction of the backend 'fsdp': SUM, AVG, PRODUCT, MIN, MAX, B*")
    return code, getattr(options, "timeout", None)


def _root(root):
    """(a root's rank, the timeout of the options object that it may have been in)."""
    return getattr(root, "rootRank", root), getattr(root, "timeout", None)


def _one(tensors, name):
    if len(tensors) != 1:
        raise InvalidArgument(f"{name}: {len(tensors)} tensors; this call takes one")
    return tensors[0]


def key_of(ranks):
    """A short word for a list of ranks, the same on all of them and in every process."""
    text = "-".join(map(str, ranks))
    return text if len(text) <= 40 else hashlib.sha256(text.encode()).hexdigest()[:40]


class Engine:
    """The operations of one group. Made by its ranks together, from the store that they share."""

    def __init__(self, store, rank, ranks, group_name, timeout, options):
        """timeout: seconds, to meet and for operations. options: libfsdp.Group's."""
        self._name = str(group_name)
        self._timeout_ms = int(timeout * 1000)
        prefix, name = f"libfsdp/{self._name}/{key_of(ranks)}/", f"fsdp:{self._name}"[:63]
        group = meet(lambda more: Service(store, prefix + more), rank, len(ranks), name, timeout, options)
        self._on = collectives = Collectives(group, _memory, lambda *about: Work(*about, collectives), _done)

    def __del__(self):
        collectives = getattr(self, "_on", None)
        if collectives is not None and not sys.is_finalizing():
            collectives.leave()

    def size(self):
        return self._on.size

    def rank(self):
        return self._on.rank

    def group_name(self):
        return self._name

    def sequence_number(self):
        return self._on.group.info().operations

    def set_timeout(self, timeout_ms):
        """Of operations from now on; TensorPlay also hands it to each of them."""
        self._on.set_timeout(timeout_ms)
        self._timeout_ms = timeout_ms

    def abort(self):
        """End the group at once, here and on the other ranks."""
        self._on.end(f"rank {self._on.rank} aborted the process group")

    def __repr__(self):
        state = "closed" if self._on.group._owned is None else f"rank {self._on.rank} of {self._on.size}"
        return f"<libfsdp.tensorplay.Engine {self._name!r} {state}>"

    def _limit(self, timeout):
        """The milliseconds that an operation may take where they are not the group's, else None. timeout: a number, or
        an options object or its timedelta."""
        timeout = getattr(timeout, "timeout", timeout)
        if hasattr(timeout, "total_seconds"):
            timeout = int(timeout.total_seconds() * 1000)
        return timeout if timeout > 0 and timeout != self._timeout_ms else None

    # ---- Reductions --------------------------------------------------------------------------------------------------

    def allreduce(self, tensors, op=0, timeout_ms=-1):
        code, limit = _reduction(op)
        return self._on.all_reduce(
            _one(tensors, "tensors"), code, _at_once(sys._getframe(1)), self._limit(limit or timeout_ms)
        )

    allreduce_sparse = allreduce  # which says that a sparse tensor is to be made dense

    def allreduce_coalesced(self, tensors, op=0, timeout_ms=-1):
        code, limit = _reduction(op)
        return self._on.all_reduce_coalesced(
            tensors, code, _at_once(sys._getframe(1)), self._limit(limit or timeout_ms)
        )

    def reduce(self, tensors, root_rank, op=0, root_tensor=0, timeout_ms=-1):
        root, limit = _root(root_rank)
        code, _ = _reduction(getattr(root_rank, "reduceOp", op))
        return self._on.reduce(
            _one(tensors, "tensors"), root, code, _at_once(sys._getframe(1)), self._limit(limit or timeout_ms)
        )

    def reduce_scatter(self, outputs, input_lists, op=0, timeout_ms=-1):
        code, limit = _reduction(op)
        return self._on.reduce_scatter(
            _one(outputs, "outputs"),
            _one(input_lists, "input_lists"),
            code,
            _at_once(sys._getframe(1)),
            self._limit(limit or timeout_ms),
        )

    def reduce_scatter_single(self, output, input, op=0, timeout_ms=-1):
        code, limit = _reduction(op)
        return self._on.reduce_scatter_tensor(
            output, input, code, _at_once(sys._getframe(1)), self._limit(limit or timeout_ms)
        )

    reduce_scatter_tensor = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs, inputs, op=0, timeout_ms=-1):
        code, limit = _reduction(op)
        return self._on.reduce_scatter_tensor_coalesced(
            outputs, inputs, code, _at_once(sys._getframe(1)), self._limit(limit or timeout_ms)
        )

    # ---- Gathering and scattering ------------------------------------------------------------------------------------

    def all_gather_single(self, output, input, timeout_ms=-1):
        return self._on.all_gather_tensor(output, input, _at_once(sys._getframe(1)), self._limit(timeout_ms))

    all_gather_into_tensor = all_gather_single

    def all_gather_single_coalesced(self, outputs, inputs, timeout_ms=-1):
        return self._on.all_gather_tensor_coalesced(
            outputs, inputs, _at_once(sys._getframe(1)), self._limit(timeout_ms)
        )

    def allgather(self, output_lists, inputs, timeout_ms=-1):
        return self._on.all_gather(
            _one(output_lists, "output_lists"),
            _one(inputs, "inputs"),
            _at_once(sys._getframe(1)),
            self._limit(timeout_ms),
        )

    def allgather_coalesced(self, output_lists, inputs, timeout_ms=-1):
        """output_lists[r][i]: rank r's inputs[i]."""
        self._on.length(output_lists, "output_lists")
        for rank, outputs in enumerate(output_lists):
            if len(outputs) != len(inputs):
                raise InvalidArgument(f"output_lists[{rank}]: {len(outputs)} tensors for {len(inputs)} inputs")
        by_input = [list(outputs) for outputs in zip(*output_lists)]
        return self._on.all_gather_coalesced(by_input, inputs, _at_once(sys._getframe(1)), self._limit(timeout_ms))

    def gather(self, output_lists, inputs, root_rank, timeout_ms=-1):
        root, limit = _root(root_rank)
        parts = _one(output_lists, "output_lists") if output_lists else None
        return self._on.gather(
            parts, _one(inputs, "inputs"), root, _at_once(sys._getframe(1)), self._limit(limit or timeout_ms)
        )

    def gather_single(self, output, input, root_rank, timeout_ms=-1):
        root, limit = _root(root_rank)
        return self._on.gather_tensor(output, input, root, _at_once(sys._getframe(1)), self._limit(limit or timeout_ms))

    def scatter(self, outputs, input_lists, root_rank, timeout_ms=-1):
        root, limit = _root(root_rank)
        parts = _one(input_lists, "input_lists") if input_lists else None
        return self._on.scatter(
            _one(outputs, "outputs"), parts, root, _at_once(sys._getframe(1)), self._limit(limit or timeout_ms)
        )

    def broadcast(self, tensors, root_rank, root_tensor=0, timeout_ms=-1):
        root, limit = _root(root_rank)
        return self._on.broadcast(
            _one(tensors, "tensors"), root, _at_once(sys._getframe(1)), self._limit(limit or timeout_ms)
        )

    # ---- All to all --------------------------------------------------------------------------------------------------

    def all_to_all_single(self, output, input, output_counts=(), input_counts=(), timeout_ms=-1):
        return self._on.all_to_all_tensor(
            output, input, output_counts, input_counts, _at_once(sys._getframe(1)), self._limit(timeout_ms)
        )

    def alltoall(self, outputs, inputs, timeout_ms=-1):
        return self._on.all_to_all(outputs, inputs, _at_once(sys._getframe(1)), self._limit(timeout_ms))

    # ---- Point to point, barriers ------------------------------------------------------------------------------------

    def send(self, tensors, dst, tag):
        return self._on.send(_one(tensors, "tensors"), dst, tag)

    def recv(self, tensors, src, tag):
        return self._on.recv(_one(tensors, "tensors"), src, tag)

    def recv_anysource(self, tensors, tag):
        return self._on.recv(_one(tensors, "tensors"), abi.FSDP_ANY_RANK, tag)

    def barrier(self, timeout_ms=-1):
        return self._on.barrier(_at_once(sys._getframe(1)), self._limit(timeout_ms))

    def monitored_barrier(self, timeout_ms=-1, wait_all_ranks=False):
        """A barrier that names, on all ranks, who does not come; the group has then ended."""
        self._on.monitored_barrier(timeout_ms / 1000 if timeout_ms > 0 else None, wait_all_ranks)
