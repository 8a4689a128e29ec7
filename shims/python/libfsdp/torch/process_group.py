"""ProcessGroup: torch.distributed's operations on a group of the library.

torch calls a Python process group in three ways, and all end here: its functions with an options object
(`allreduce([t], opts)`), code that has the group in hand with the short forms of the C++ binding (`allreduce(t,
op)`), and C++, for which the names overridden here are virtual functions. `opts.asyncOp` False is a call that runs to
its end on the calling thread, with no hand-off and no handle; otherwise a Work is given.

One operation of torch is one of the library. Where torch has a list of tensors and the library one tensor, the list
goes as it is when it lies in one piece, as the chunks of a tensor do, else through one buffer.

Threads: any; operations take effect in the order of the calls, which is the same on all ranks. `_lock` is for the batch
between _start_coalescing and _end_coalescing only.
"""

import functools
import time

import torch
import torch.distributed as dist

from .. import abi
from ..errors import FsdpError, InvalidArgument, Pending
from ..group import Coalesced
from ..work import pending, start
from .errors import Timeout, in_torch, last
from .options import group_options
from .rendezvous import meet
from .tensors import joined, lend, lend_bits, like, packed, unpack
from .work import Done, Work, seconds

lib = abi.lib
_BARRIER_TAG = 0x7FFFFFF0  # of monitored_barrier's messages; the next number, too
_PATIENCE = 3  # seconds that leaving a group waits for operations that other ranks have not joined
_done = Done()

_Kind = dist.ReduceOp.RedOpType
_OP_TYPES = {_Kind, type(dist.ReduceOp(_Kind.SUM))}
# By hash, which torch defines as the operation's number, for an operation and for its plain name: looking those up as
# they are takes longer than a small operation.
_OPS = {
    hash(dist.ReduceOp(kind)): code
    for kind, code in (
        (_Kind.SUM, abi.FSDP_SUM),
        (_Kind.AVG, abi.FSDP_AVG),
        (_Kind.PRODUCT, abi.FSDP_PROD),
        (_Kind.MIN, abi.FSDP_MIN),
        (_Kind.MAX, abi.FSDP_MAX),
        (_Kind.BAND, abi.FSDP_BAND),
        (_Kind.BOR, abi.FSDP_BOR),
        (_Kind.BXOR, abi.FSDP_BXOR),
    )
}


def _reduction(op):
    """(the library's number, what inputs are multiplied with before, or None)."""
    if type(op) in _OP_TYPES:
        code = _OPS.get(hash(op))
        if code is not None:
            return code, None
        if op == _Kind.PREMUL_SUM and type(op) is not _Kind:
            return abi.FSDP_SUM, op.__getstate__()[1]
    raise InvalidArgument(f"op: {op!r} is not a reduction of this backend")


def _scaled(tensor, factor):
    with torch.no_grad():
        return tensor * (factor[0] if isinstance(factor, list) else factor)


def _is_op(opts):
    return type(opts) in _OP_TYPES


def _one(tensors, name):
    """The only tensor of a list, or the tensor itself."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise InvalidArgument(f"{name}: {len(tensors)} tensors; this call takes one")
    return tensors[0]


def _is_async(opts):
    return opts is None or getattr(opts, "asyncOp", True)


def _root(opts):
    """(the root's rank, whether to run to the end), of an options object or a rank in its place."""
    if opts is None or isinstance(opts, int):
        return opts or 0, False
    return opts.rootRank, not _is_async(opts)


class ProcessGroup(dist.ProcessGroup):
    """A group of the backend "fsdp". Made by init_process_group, new_group and init_device_mesh."""

    backend = "fsdp"

    def __init__(self, options, backend_options=None):
        """options: what torch hands to a backend's creator (store, group_rank, group_size, timeout, group_id)."""
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        own = group_options(backend_options)
        name = f"fsdp:{options.group_id}"[:63]
        try:
            group = meet(options.store, rank, size, name, seconds(options.timeout), own)
        except FsdpError as error:
            raise in_torch(error) from error.__cause__
        self._take(group, options.store, str(options.group_id))

    def _take(self, group, store, name):
        self._group = group
        self._torch_store = store
        self._name = name
        self._description = "undefined"
        self._batch = None

    # ---- What a group is ---------------------------------------------------------------------------------------------

    def getBackendName(self):
        return self.backend

    _get_backend_name = name = getBackendName

    def getGroupName(self):
        return self._name

    def setGroupName(self, name):
        self._name = str(name)

    def getGroupDesc(self):
        return self._description

    def setGroupDesc(self, description):
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def get_group_store(self):
        return self._torch_store

    @property
    def _device_types(self):
        return [torch.device("cpu")]

    def _get_backend(self, device):
        if torch.device(device).type != "cpu":
            kind = torch.device(device).type
            raise RuntimeError(f"No backend type associated with device type {kind}: 'fsdp' is for cpu")
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def supports_tensor_alloc(self, device):
        return False

    def _set_sequence_number_for_group(self):
        pass

    def _get_sequence_number_for_group(self):
        return self._group.info().operations

    def _has_hooks(self):
        return False

    def _wait_for_pending_works(self):
        pass

    def __repr__(self):
        state = "closed" if self._group._owned is None else f"rank {self.rank()} of {self.size()}"
        return f"<libfsdp.torch.ProcessGroup {self._name!r} {state}>"

    # ---- Its end -----------------------------------------------------------------------------------------------------

    def end(self, reason):
        """End the group for all ranks: calls under way and later ones raise, with the reason."""
        if self._group._owned is not None:
            self._group.abort(reason[:200])

    def abort(self):
        """torch's: end the group at once, here and on the other ranks."""
        self.end(f"rank {self.rank()} aborted the process group")
        self._group.close()

    def shutdown(self):
        """destroy_process_group's: leave, after this rank's operations. A peer that then waits for this rank is told.
        Operations that other ranks don't join within a few seconds end the group, instead of keeping this rank."""
        deadline = time.monotonic() + _PATIENCE
        while self._group in pending():
            if time.monotonic() > deadline:
                self.end(f"rank {self.rank()} left the process group while an operation of it waited for other ranks")
                break
            time.sleep(0.002)
        self._group.close()

    def set_timeout(self, timeout):
        raise NotImplementedError(
            "the backend 'fsdp' takes its timeout when a group is made: give timeout= to init_process_group or to "
            "new_group"
        )

    _set_default_timeout = set_timeout

    def split_group(self, ranks, timeout=None, opts=None, group_name=None, group_desc=None):
        """A group of some of this one's ranks, in that order. Every rank of this group calls it, with the ranks of
        its own part; a rank that is not among those it gives gets None."""
        ranks = list(ranks)
        mine = self.rank() in ranks
        options = group_options(opts if opts is None or hasattr(opts, "spin_us") else None)
        try:
            color, key = (min(ranks), ranks.index(self.rank())) if mine else (None, 0)
            group = self._group.split(color, key, timeout=seconds(timeout), **options)
        except FsdpError as error:
            raise in_torch(error) from None
        if group is None:
            return None
        part = ProcessGroup.__new__(ProcessGroup)
        dist.ProcessGroup.__init__(part, group.rank, group.size)
        part._take(group, self._torch_store, group_name or group.name)
        part._description = group_desc or "undefined"
        return part

    splitGroup = split_group

    def mergeRemoteGroup(self, *arguments, **options):
        raise NotImplementedError("the backend 'fsdp' can't take in ranks of another job; make a new group of all")

    merge_remote_group = mergeRemoteGroup

    # ---- Running an operation ----------------------------------------------------------------------------------------

    def _do(self, wait, kind, function, args, tensors, after=None, timeout=None, **fields):
        """Run one operation of the library. wait: to its end, here. tensors: the call's results, for its Work. after:
        what is left to do when it is complete. fields: the arguments by name, for a batch."""
        group = self._group
        if self._batch is not None:
            self._batch.add(kind, function, args, after, fields)
            return _done
        if wait and not group.interruptible and timeout is None:
            status = function(group._handle, *args, None)
            if status:
                raise last(status)
            if after is not None:
                after()
            return _done
        try:
            started = start(function, group._handle, args, None, group)
        except FsdpError as error:
            raise in_torch(error) from None
        work = Work(started, self, tensors, after)
        if wait or timeout is not None:
            work.wait(timeout)
        return work

    def _do_all(self, wait, items, tensors, after=None):
        """Several operations of the library as one: (kind, arguments, fields) each."""
        batch = self._batch or _Batch(self)
        for kind, args, fields in items:
            batch.add(kind, None, args, None, fields)
        if batch is self._batch:
            batch.afters.append(after)
            return _done
        return batch.run(wait, tensors, after)

    # ---- Reductions --------------------------------------------------------------------------------------------------

    def allreduce(self, tensors, opts=None, timeout=None, *, op=None):
        if opts is None or _is_op(opts):
            wait, reduction = False, op or opts or _Kind.SUM
        else:
            wait, reduction = not _is_async(opts), opts.reduceOp
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        elif len(tensors) != 1:
            return self._allreduce_all(wait, tensors, reduction)
        code, factor = _reduction(reduction)
        tensor = tensors[0]
        input = output = lend(tensor, "tensor")
        if factor is not None:
            input = lend(_scaled(tensor, factor), "tensor")
        return self._do(
            wait,
            abi.FSDP_OP_ALL_REDUCE,
            lib.fsdp_all_reduce,
            (input, output, code),
            tensors,
            timeout=seconds(timeout),
            op=code,
        )

    def allreduce_coalesced(self, tensors, opts=None):
        return self._allreduce_all(not _is_async(opts), tensors, opts.reduceOp if opts else _Kind.SUM)

    def _allreduce_all(self, wait, tensors, reduction):
        code, factor = _reduction(reduction)
        items = []
        for tensor in tensors:
            output = lend(tensor, "tensors")
            input = output if factor is None else lend(_scaled(tensor, factor), "tensors")
            items.append((abi.FSDP_OP_ALL_REDUCE, (input, output), {"op": code}))
        return self._do_all(wait, items, list(tensors))

    def reduce(self, tensors, opts=None, op=None, timeout=None):
        if opts is None or isinstance(opts, int):
            root, wait, reduction = opts or 0, False, op or _Kind.SUM
        else:
            root, wait, reduction = opts.rootRank, not _is_async(opts), opts.reduceOp
        tensor = _one(tensors, "tensors")
        code, factor = _reduction(reduction)
        root = self._peer(root, "root")
        output = lend(tensor, "tensor")
        input = output if factor is None else lend(_scaled(tensor, factor), "tensor")
        args = input, output if root == self.rank() else None, code, root
        return self._do(
            wait,
            abi.FSDP_OP_REDUCE,
            lib.fsdp_reduce,
            args,
            [tensor],
            timeout=seconds(timeout),
            op=code,
            peer=root,
        )

    def _reduce_scatter_base(self, output, input, opts=None, timeout=None):
        if opts is None or _is_op(opts):
            wait, reduction = False, opts or _Kind.SUM
        else:
            wait, reduction = not _is_async(opts), opts.reduceOp
        code, factor = _reduction(reduction)
        if input.numel() != output.numel() * self.size():
            raise InvalidArgument(
                f"input has {input.numel()} elements, expected {self.size()} times output's {output.numel()}"
            )
        args = lend(input if factor is None else _scaled(input, factor), "input"), lend(output, "output"), code
        return self._do(
            wait,
            abi.FSDP_OP_REDUCE_SCATTER,
            lib.fsdp_reduce_scatter,
            args,
            [output],
            timeout=seconds(timeout),
            op=code,
        )

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        code, factor = _reduction(opts.reduceOp if opts else _Kind.SUM)
        _pairs(outputs, inputs)
        items = []
        for output, input in zip(outputs, inputs):
            lent = lend(input if factor is None else _scaled(input, factor), "inputs")
            items.append((abi.FSDP_OP_REDUCE_SCATTER, (lent, lend(output, "outputs")), {"op": code}))
        return self._do_all(not _is_async(opts), items, list(outputs))

    def reduce_scatter(self, outputs, inputs, opts=None, timeout=None, *, op=None):
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        if opts is None or _is_op(opts):
            wait, reduction = False, op or opts or _Kind.SUM
        else:
            wait, reduction = not _is_async(opts), opts.reduceOp
        output, parts = _one(outputs, "output"), _one(inputs, "input_list")
        self._length(parts, "input_list")
        code, factor = _reduction(reduction)
        for index, part in enumerate(parts):
            if part.dtype != output.dtype:
                raise InvalidArgument(f"input_list[{index}] has dtype {part.dtype}, expected {output.dtype}")
        if parts[self.rank()].numel() != output.numel():
            raise InvalidArgument(
                f"input_list[{self.rank()}] has shape {tuple(parts[self.rank()].shape)}, expected the output's, "
                f"{tuple(output.shape)}"
            )
        whole = joined(parts, "input_list") if factor is None else None
        if whole is None:
            flat = packed(parts)
            whole = lend(flat if factor is None else _scaled(flat, factor), "input_list")
        counts = [part.numel() for part in parts]
        if len(set(counts)) == 1:
            args = whole, lend(output, "output"), code
            return self._do(
                wait,
                abi.FSDP_OP_REDUCE_SCATTER,
                lib.fsdp_reduce_scatter,
                args,
                [output],
                timeout=seconds(timeout),
                op=code,
            )
        rows, flat, after = self._rows(counts), *self._flat_output(output)
        return self._do(
            wait,
            abi.FSDP_OP_REDUCE_SCATTER,
            lib.fsdp_reduce_scatter_v,
            (whole, lend(flat, "output"), rows, code),
            [output],
            after,
            seconds(timeout),
            op=code,
            input_rows=rows,
        )

    # ---- Gathering and scattering ------------------------------------------------------------------------------------

    def _allgather_base(self, output, input, opts=None, timeout=None):
        if input.dtype != output.dtype:
            raise InvalidArgument(f"output has dtype {output.dtype}, expected the input's, {input.dtype}")
        if output.numel() != input.numel() * self.size():
            raise InvalidArgument(
                f"output has {output.numel()} elements, expected {self.size()} times input's {input.numel()}"
            )
        args = lend_bits(input, "input"), lend_bits(output, "output")
        return self._do(
            not _is_async(opts),
            abi.FSDP_OP_ALL_GATHER,
            lib.fsdp_all_gather,
            args,
            [output],
            timeout=seconds(timeout),
        )

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        _pairs(outputs, inputs)
        items = [
            (abi.FSDP_OP_ALL_GATHER, (lend_bits(input, "inputs"), lend_bits(output, "outputs")), {})
            for output, input in zip(outputs, inputs)
        ]
        return self._do_all(not _is_async(opts), items, list(outputs))

    def allgather(self, outputs, inputs, opts=None, timeout=None):
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        tensor, parts = _one(inputs, "input"), _one(outputs, "output")
        self._length(parts, "output tensor list")
        like(parts, tensor, "output tensor list")
        whole, after = _list_output(parts, "output tensor list")
        return self._do(
            not _is_async(opts),
            abi.FSDP_OP_ALL_GATHER,
            lib.fsdp_all_gather,
            (lend_bits(tensor, "input"), whole),
            parts,
            after,
            seconds(timeout),
        )

    def allgather_coalesced(self, output_lists, inputs, opts=None):
        """output_lists[i][r] = rank r's inputs[i]."""
        _pairs(output_lists, inputs)
        items, afters = [], []
        for parts, tensor in zip(output_lists, inputs):
            self._length(parts, "output tensor list")
            like(parts, tensor, "output tensor list")
            whole, after = _list_output(parts, "output tensor list")
            items.append((abi.FSDP_OP_ALL_GATHER, (lend_bits(tensor, "inputs"), whole), {}))
            afters.append(after)
        tensors = [part for parts in output_lists for part in parts]
        return self._do_all(not _is_async(opts), items, tensors, _all_of(afters))

    def gather(self, outputs, inputs, opts=None, timeout=None):
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        root, wait = _root(opts)
        root = self._peer(root, "root")
        tensor = _one(inputs, "input")
        whole = after = None
        parts = []
        if root == self.rank():
            parts = _one(outputs, "output")
            self._length(parts, "gather_list")
            like(parts, tensor, "gather_list")
            whole, after = _list_output(parts, "gather_list")
        elif outputs and outputs[0]:
            raise InvalidArgument(f"gather_list: only rank {root}, the root, gives one")
        return self._do(
            wait,
            abi.FSDP_OP_GATHER,
            lib.fsdp_gather,
            (lend_bits(tensor, "input"), whole, root),
            parts,
            after,
            seconds(timeout),
            peer=root,
        )

    def scatter(self, outputs, inputs, opts=None, timeout=None):
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        root, wait = _root(opts)
        root = self._peer(root, "root")
        tensor = _one(outputs, "output")
        whole = None
        if root == self.rank():
            parts = _one(inputs, "input")
            self._length(parts, "scatter_list")
            like(parts, tensor, "scatter_list")
            whole = joined(parts, "scatter_list")
            if whole is None:
                whole = lend_bits(packed(parts), "scatter_list")
        elif inputs and inputs[0]:
            raise InvalidArgument(f"scatter_list: only rank {root}, the root, gives one")
        return self._do(
            wait,
            abi.FSDP_OP_SCATTER,
            lib.fsdp_scatter,
            (whole, lend_bits(tensor, "output"), root),
            [tensor],
            timeout=seconds(timeout),
            peer=root,
        )

    def broadcast(self, tensors, opts=None, timeout=None):
        root, wait = _root(opts)
        tensor = _one(tensors, "tensors")
        root = self._peer(root, "root")
        return self._do(
            wait,
            abi.FSDP_OP_BROADCAST,
            lib.fsdp_broadcast,
            (lend_bits(tensor, "tensor"), root),
            [tensor],
            timeout=seconds(timeout),
            peer=root,
        )

    # ---- All to all --------------------------------------------------------------------------------------------------

    def alltoall_base(self, output, input, output_split_sizes, input_split_sizes, opts=None, timeout=None):
        wait, limit = not _is_async(opts), seconds(timeout)
        if input.dtype != output.dtype:
            raise InvalidArgument(f"output has dtype {output.dtype}, expected the input's, {input.dtype}")
        sent = self._splits(input, input_split_sizes, "input")
        received = self._splits(output, output_split_sizes, "output")
        with torch.no_grad():
            input = input.contiguous()
        flat, after = self._flat_output(output)
        args = lend_bits(input, "input"), lend_bits(flat, "output"), self._rows(sent), self._rows(received)
        return self._do(
            wait,
            abi.FSDP_OP_ALL_TO_ALL,
            lib.fsdp_all_to_all_v,
            args,
            [output],
            after,
            limit,
            input_rows=args[2],
            output_rows=args[3],
        )

    def alltoall(self, outputs, inputs, opts=None, timeout=None):
        self._length(outputs, "output_tensor_list")
        self._length(inputs, "input_tensor_list")
        for index, tensor in enumerate((*outputs, *inputs)):
            if tensor.dtype != inputs[0].dtype:
                raise InvalidArgument(f"tensor {index} has dtype {tensor.dtype}, expected {inputs[0].dtype}")
        whole = joined(inputs, "input_tensor_list")
        if whole is None:
            whole = lend_bits(packed(inputs), "input_tensor_list")
        target, after = _list_output(outputs, "output_tensor_list")
        args = (
            whole,
            target,
            self._rows([tensor.numel() for tensor in inputs]),
            self._rows([tensor.numel() for tensor in outputs]),
        )
        return self._do(
            not _is_async(opts),
            abi.FSDP_OP_ALL_TO_ALL,
            lib.fsdp_all_to_all_v,
            args,
            list(outputs),
            after,
            seconds(timeout),
            input_rows=args[2],
            output_rows=args[3],
        )

    def _splits(self, tensor, sizes, name):
        """How many elements of a tensor go to (come from) each rank."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not sizes:
            if rows % self.size():
                raise InvalidArgument(f"{name} has {rows} rows, not a multiple of the group's {self.size()} ranks")
            return [tensor.numel() // self.size()] * self.size()
        if len(sizes) != self.size():
            raise InvalidArgument(f"{name}_split_sizes has {len(sizes)} entries for a group of {self.size()} ranks")
        if sum(sizes) != rows or min(sizes) < 0:
            raise InvalidArgument(f"Split sizes {list(sizes)} of {name} don't match its first dimension, {rows}")
        length = tensor.numel() // rows if rows else 0
        return [size * length for size in sizes]

    # ---- Point to point ----------------------------------------------------------------------------------------------

    def send(self, tensors, dst, tag=0):
        tensor = _one(tensors, "tensors")
        args = lend_bits(tensor, "tensor"), self._peer(dst, "dst"), tag
        return self._do(False, abi.FSDP_OP_SEND, lib.fsdp_send, args, [tensor], peer=dst, tag=tag)

    def recv(self, tensors, src, tag=0):
        tensor = _one(tensors, "tensors")
        args = lend_bits(tensor, "tensor"), self._peer(src, "src"), tag
        return self._do(False, abi.FSDP_OP_RECV, lib.fsdp_recv, args, [tensor], peer=src, tag=tag)

    def recv_anysource(self, tensors, tag=0):
        tensor = _one(tensors, "tensors")
        args = lend_bits(tensor, "tensor"), abi.FSDP_ANY_RANK, tag
        return self._do(False, abi.FSDP_OP_RECV, lib.fsdp_recv, args, [tensor], peer=abi.FSDP_ANY_RANK, tag=tag)

    # ---- Barriers ----------------------------------------------------------------------------------------------------

    def barrier(self, opts=None, timeout=None):
        if opts is not None and not hasattr(opts, "asyncOp"):
            opts, timeout = None, opts
        return self._do(not _is_async(opts), abi.FSDP_OP_BARRIER, lib.fsdp_barrier, (), [], timeout=seconds(timeout))

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """A barrier in which rank 0 finds out who does not come, and tells all: it raises with the first of those
        ranks, or with `wait_all_ranks` all of them. The group has then ended."""
        limit = seconds(timeout)
        deadline = None if limit is None else time.monotonic() + limit
        token = torch.zeros(1, dtype=torch.uint8)
        if self.rank():
            arrived = self.send([token], 0, _BARRIER_TAG)
            released = self.recv([token], 0, _BARRIER_TAG + 1)
            arrived.wait(limit)
            released.wait(limit)
            return
        others = range(1, self.size())
        arrivals = {rank: self.recv([torch.zeros(1, dtype=torch.uint8)], rank, _BARRIER_TAG) for rank in others}
        missing = []
        for rank, arrival in arrivals.items():
            try:
                arrival._work.wait(None if deadline is None else max(0, deadline - time.monotonic()))
            except Pending:
                missing.append(rank)
            except FsdpError as error:
                if not wait_all_ranks:
                    raise in_torch(error) from None
                missing.append(rank)
            if missing and not wait_all_ranks:
                break
        if missing:
            who = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
            message = f"{who} failed to pass monitoredBarrier" + (f" in {limit * 1000:.0f} ms" if limit else "")
            self.end(message)
            raise Timeout(message, ranks=missing)
        for work in [self.send([token], rank, _BARRIER_TAG + 1) for rank in others]:
            work.wait(limit)

    # ---- Several calls as one ----------------------------------------------------------------------------------------

    def _start_coalescing(self, device=None):
        if self._batch is not None:
            raise RuntimeError("coalescing has been started on this group already; end it first")
        self._batch = _Batch(self)

    def _end_coalescing(self, device=None):
        batch, self._batch = self._batch, None
        if batch is None:
            raise RuntimeError("coalescing has not been started on this group")
        return batch.run(False, [])

    # ---- Checks ------------------------------------------------------------------------------------------------------

    def _peer(self, rank, name):
        if not 0 <= rank < self.size():
            raise InvalidArgument(f"invalid {name} rank: {rank} is not in 0 .. {self.size() - 1}")
        return rank

    def _length(self, tensors, name):
        if len(tensors) != self.size():
            raise InvalidArgument(f"invalid {name}: {len(tensors)} tensors, expected {self.size()}, one for each rank")

    def _rows(self, counts):
        return (abi.c_int64 * len(counts))(*counts)

    def _flat_output(self, output):
        """Where an operation that knows elements only can write, and what is left to do then."""
        if output.is_contiguous():
            return output, None
        flat = torch.empty(output.numel(), dtype=output.dtype)
        return flat, functools.partial(unpack, flat, [output])


def _pairs(outputs, inputs):
    if len(outputs) != len(inputs):
        raise InvalidArgument(f"{len(outputs)} outputs for {len(inputs)} inputs; give one for each")


def _list_output(tensors, name):
    """(a DLTensor that takes the elements of all these tensors, what is left to do then)."""
    whole = joined(tensors, name)
    if whole is not None:
        return whole, None
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype)
    return lend_bits(flat, name), functools.partial(unpack, flat, list(tensors))


def _all_of(functions):
    functions = [function for function in functions if function is not None]
    if not functions:
        return None

    def call():
        for function in functions:
            function()

    return call


class _Batch:
    """Operations that are to run as one."""

    def __init__(self, owner):
        self._owner = owner
        self._operations = Coalesced(owner._group)
        self.afters = []

    def add(self, kind, function, args, after, fields):
        if kind == abi.FSDP_OP_BARRIER:
            raise RuntimeError("a barrier can't be coalesced with other operations; call it before or after them")
        self._operations._do(kind, function, args, None, False, **fields)
        self.afters.append(after)

    def run(self, wait, tensors, after=None):
        items = self._operations.take()
        after = _all_of([*self.afters, after])
        return self._owner._do(wait, 0, lib.fsdp_coalesced, items, tensors, after)
