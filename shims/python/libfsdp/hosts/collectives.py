"""Collectives: the operations of hosts' process groups, on a libfsdp.Group and on the host's own tensors.

A host's process group finds out what it was asked for (each host has its own options objects and short forms) and
calls the method here. One operation of a host is one of the library. Where a host has a list of tensors and the
library one tensor, the list goes as it is when it lies in one piece, else through one buffer.

In all methods: `wait` True runs the operation to its end on the calling thread, with no hand-off and no handle, and
gives the host's `done`; False gives a work. `code` is a reduction of the library (`abi.FSDP_SUM`...), `timeout` the
milliseconds that this operation may take, None for the group's, `input` what to read where that is not the tensor.

Threads: any; operations take effect in the order of the calls, which is the same on all ranks.
"""

import time

from .. import abi
from ..errors import FsdpError, InvalidArgument, Pending, Timeout, check, last
from ..group import Coalesced
from ..work import pending, start

lib = abi.lib
_BARRIER_TAG = 0x7FFFFFF0  # of monitored_barrier's messages; the next number, too
_PATIENCE = 3  # seconds that leaving a group waits for operations that other ranks have not joined


class Collectives:
    """A group's operations.

    group      a libfsdp.Group
    memory     the host's hosts.tensors.Memory
    make_work  make_work(work, tensors, after): the host's handle for a libfsdp.Work
    done       what the host gives for an operation that is over
    raised     raised(error): the host's exception for the library's
    """

    def __init__(self, group, memory, make_work, done, raised=lambda error: error):
        self.group = group
        self.rank, self.size = group.rank, group.size
        self._memory = memory
        self._make_work = make_work
        self._done = done
        self._raised = raised
        self._batch = None

    # ---- Running an operation ----------------------------------------------------------------------------------------

    def do(self, wait, kind, function, args, tensors, after=None, timeout=None, **fields):
        """Run one operation of the library. tensors: the call's results, for its work. after: what is left to do when
        it is complete. fields: the arguments by name, for a batch."""
        group = self.group
        if self._batch is not None:
            self._batch.add(kind, function, args, after, fields)
            return self._done
        if timeout is None:
            return self._run(group, wait, function, args, tensors, after)
        check(lib.fsdp_set_thread_timeout(timeout))
        try:
            return self._run(group, wait, function, args, tensors, after)
        finally:
            lib.fsdp_set_thread_timeout(0)

    def _run(self, group, wait, function, args, tensors, after):
        if wait and not group.interruptible:
            status = function(group._handle, *args, None)
            if status:
                raise self._raised(last(status))
            if after is not None:
                after()
            return self._done
        try:
            started = start(function, group._handle, args, None, group)
        except FsdpError as error:
            raise self._raised(error) from None
        work = self._make_work(started, tensors, after)
        if wait:
            work.wait()
        return work

    def do_all(self, wait, items, tensors, after=None, timeout=None):
        """Several operations of the library as one: (kind, arguments, fields) each."""
        batch = self._batch or _Batch(self)
        for kind, args, fields in items:
            batch.add(kind, None, args, None, fields)
        if batch is self._batch:
            batch.afters.append(after)
            return self._done
        return batch.run(wait, tensors, after, timeout)

    def begin_batch(self):
        """What is called from here on runs as one operation, at end_batch. One thread at a time."""
        if self._batch is not None:
            raise RuntimeError("coalescing has been started on this group already; end it first")
        self._batch = _Batch(self)

    def end_batch(self):
        batch, self._batch = self._batch, None
        if batch is None:
            raise RuntimeError("coalescing has not been started on this group")
        return batch.run(False, [])

    # ---- Reductions --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor, code, wait, timeout=None, input=None):
        output = self._memory.lend(tensor, "tensor")
        lent = output if input is None else self._memory.lend(input, "tensor")
        args = lent, output, code
        return self.do(
            wait, abi.FSDP_OP_ALL_REDUCE, lib.fsdp_all_reduce, args, [tensor], timeout=timeout, op=code
        )

    def all_reduce_coalesced(self, tensors, code, wait, timeout=None, inputs=None):
        items = []
        for tensor, input in zip(tensors, inputs or tensors):
            output = self._memory.lend(tensor, "tensors")
            lent = output if input is tensor else self._memory.lend(input, "tensors")
            items.append((abi.FSDP_OP_ALL_REDUCE, (lent, output), {"op": code}))
        return self.do_all(wait, items, list(tensors), timeout=timeout)

    def reduce(self, tensor, root, code, wait, timeout=None, input=None):
        root = self.peer(root, "root")
        output = self._memory.lend(tensor, "tensor")
        lent = output if input is None else self._memory.lend(input, "tensor")
        args = lent, output if root == self.rank else None, code, root
        return self.do(
            wait, abi.FSDP_OP_REDUCE, lib.fsdp_reduce, args, [tensor], timeout=timeout, op=code, peer=root
        )

    def reduce_scatter_tensor(self, output, input, code, wait, timeout=None):
        """output: this rank's part of the reduction of the ranks' `input`."""
        if input.numel() != output.numel() * self.size:
            raise InvalidArgument(
                f"input has {input.numel()} elements, expected {self.size} times output's {output.numel()}"
            )
        args = self._memory.lend(input, "input"), self._memory.lend(output, "output"), code
        return self.do(
            wait, abi.FSDP_OP_REDUCE_SCATTER, lib.fsdp_reduce_scatter, args, [output], timeout=timeout, op=code
        )

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, code, wait, timeout=None):
        _pairs(outputs, inputs)
        lend = self._memory.lend
        items = [
            (abi.FSDP_OP_REDUCE_SCATTER, (lend(input, "inputs"), lend(output, "outputs")), {"op": code})
            for output, input in zip(outputs, inputs)
        ]
        return self.do_all(wait, items, list(outputs), timeout=timeout)

    def reduce_scatter(self, output, parts, code, wait, timeout=None):
        """output: the reduction of the ranks' parts[rank]. Parts may have different lengths."""
        self.length(parts, "input_list")
        for index, part in enumerate(parts):
            if part.dtype != output.dtype:
                raise InvalidArgument(f"input_list[{index}] has dtype {part.dtype}, expected {output.dtype}")
        if parts[self.rank].numel() != output.numel():
            raise InvalidArgument(
                f"input_list[{self.rank}] has shape {tuple(parts[self.rank].shape)}, expected the output's, "
                f"{tuple(output.shape)}"
            )
        target = self._memory.lend(output, "output")
        whole = self._memory.input(parts, "input_list")
        counts = [part.numel() for part in parts]
        if len(set(counts)) == 1:
            return self.do(
                wait,
                abi.FSDP_OP_REDUCE_SCATTER,
                lib.fsdp_reduce_scatter,
                (whole, target, code),
                [output],
                timeout=timeout,
                op=code,
            )
        rows = self.rows(counts)
        flat, after = self._memory.flat_output(output, "output")
        return self.do(
            wait,
            abi.FSDP_OP_REDUCE_SCATTER,
            lib.fsdp_reduce_scatter_v,
            (whole, flat, rows, code),
            [output],
            after,
            timeout,
            op=code,
            input_rows=rows,
        )

    # ---- Gathering and scattering ------------------------------------------------------------------------------------

    def all_gather_tensor(self, output, input, wait, timeout=None):
        """output: the ranks' inputs, one after the other. `input` may be this rank's part of it."""
        self._fits(output, input)
        args = self._memory.lend_bits(input, "input"), self._memory.lend_bits(output, "output")
        return self.do(wait, abi.FSDP_OP_ALL_GATHER, lib.fsdp_all_gather, args, [output], timeout=timeout)

    def all_gather_tensor_coalesced(self, outputs, inputs, wait, timeout=None):
        _pairs(outputs, inputs)
        items = []
        for output, input in zip(outputs, inputs):
            self._fits(output, input)
            args = self._memory.lend_bits(input, "inputs"), self._memory.lend_bits(output, "outputs")
            items.append((abi.FSDP_OP_ALL_GATHER, args, {}))
        return self.do_all(wait, items, list(outputs), timeout=timeout)

    def all_gather(self, parts, tensor, wait, timeout=None):
        """parts[r]: rank r's tensor."""
        whole, after = self._parts(parts, tensor, "output tensor list")
        args = self._memory.lend_bits(tensor, "input"), whole
        return self.do(wait, abi.FSDP_OP_ALL_GATHER, lib.fsdp_all_gather, args, parts, after, timeout)

    def all_gather_coalesced(self, output_lists, inputs, wait, timeout=None):
        """output_lists[i][r]: rank r's inputs[i]."""
        _pairs(output_lists, inputs)
        items, afters = [], []
        for parts, tensor in zip(output_lists, inputs):
            whole, after = self._parts(parts, tensor, "output tensor list")
            items.append((abi.FSDP_OP_ALL_GATHER, (self._memory.lend_bits(tensor, "inputs"), whole), {}))
            afters.append(after)
        tensors = [part for parts in output_lists for part in parts]
        return self.do_all(wait, items, tensors, all_of(afters), timeout)

    def gather(self, parts, tensor, root, wait, timeout=None):
        """parts[r] on root: rank r's tensor; elsewhere None or []."""
        root = self.peer(root, "root")
        whole = after = None
        if root == self.rank:
            whole, after = self._parts(parts, tensor, "gather_list")
        elif parts:
            raise InvalidArgument(f"gather_list: only rank {root}, the root, gives one")
        args = self._memory.lend_bits(tensor, "input"), whole, root
        return self.do(wait, abi.FSDP_OP_GATHER, lib.fsdp_gather, args, parts or [], after, timeout, peer=root)

    def gather_tensor(self, output, tensor, root, wait, timeout=None):
        """output on root: the ranks' tensors, one after the other; not looked at elsewhere."""
        root = self.peer(root, "root")
        whole = None
        if root == self.rank:
            self._fits(output, tensor)
            whole = self._memory.lend_bits(output, "output")
        args = self._memory.lend_bits(tensor, "input"), whole, root
        results = [] if whole is None else [output]
        return self.do(wait, abi.FSDP_OP_GATHER, lib.fsdp_gather, args, results, timeout=timeout, peer=root)

    def scatter(self, tensor, parts, root, wait, timeout=None):
        """tensor: this rank's entry of root's `parts`; elsewhere parts is None or []."""
        root = self.peer(root, "root")
        whole = None
        if root == self.rank:
            self.length(parts, "scatter_list")
            self._memory.like(parts, tensor, "scatter_list")
            whole = self._memory.input(parts, "scatter_list")
        elif parts:
            raise InvalidArgument(f"scatter_list: only rank {root}, the root, gives one")
        args = whole, self._memory.lend_bits(tensor, "output"), root
        return self.do(wait, abi.FSDP_OP_SCATTER, lib.fsdp_scatter, args, [tensor], timeout=timeout, peer=root)

    def broadcast(self, tensor, root, wait, timeout=None):
        root = self.peer(root, "root")
        args = self._memory.lend_bits(tensor, "tensor"), root
        return self.do(wait, abi.FSDP_OP_BROADCAST, lib.fsdp_broadcast, args, [tensor], timeout=timeout, peer=root)

    # ---- All to all --------------------------------------------------------------------------------------------------

    def all_to_all_tensor(self, output, input, output_splits, input_splits, wait, timeout=None):
        """Splits are rows of the first dimension for each rank; none of them: equal parts."""
        if input.dtype != output.dtype:
            raise InvalidArgument(f"output has dtype {output.dtype}, expected the input's, {input.dtype}")
        sent = self._splits(input, input_splits, "input")
        received = self._splits(output, output_splits, "output")
        whole = self._memory.flat_input(input, "input")
        target = self._memory.flat_output(output, "output")
        return self._exchange(whole, sent, target, received, [output], wait, timeout)

    def all_to_all(self, outputs, inputs, wait, timeout=None):
        """inputs[r] goes to rank r, whose outputs[rank] it becomes."""
        self.length(outputs, "output_tensor_list")
        self.length(inputs, "input_tensor_list")
        for index, tensor in enumerate((*outputs, *inputs)):
            if tensor.dtype != inputs[0].dtype:
                raise InvalidArgument(f"tensor {index} has dtype {tensor.dtype}, expected {inputs[0].dtype}")
        whole = self._memory.input(inputs, "input_tensor_list")
        target = self._memory.output(outputs, "output_tensor_list")
        counts = [[tensor.numel() for tensor in tensors] for tensors in (inputs, outputs)]
        return self._exchange(whole, counts[0], target, counts[1], list(outputs), wait, timeout)

    def _exchange(self, whole, sent, target, received, tensors, wait, timeout):
        target, after = target
        sent, received = self.rows(sent), self.rows(received)
        return self.do(
            wait,
            abi.FSDP_OP_ALL_TO_ALL,
            lib.fsdp_all_to_all_v,
            (whole, target, sent, received),
            tensors,
            after,
            timeout,
            input_rows=sent,
            output_rows=received,
        )

    def _splits(self, tensor, sizes, name):
        """How many elements of a tensor go to (come from) each rank."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not sizes:
            if rows % self.size:
                raise InvalidArgument(f"{name} has {rows} rows, not a multiple of the group's {self.size} ranks")
            return [tensor.numel() // self.size] * self.size
        if len(sizes) != self.size:
            raise InvalidArgument(f"{name}_split_sizes has {len(sizes)} entries for a group of {self.size} ranks")
        if sum(sizes) != rows or min(sizes) < 0:
            raise InvalidArgument(f"Split sizes {list(sizes)} of {name} don't match its first dimension, {rows}")
        length = tensor.numel() // rows if rows else 0
        return [size * length for size in sizes]

    # ---- Point to point ----------------------------------------------------------------------------------------------

    def send(self, tensor, dst, tag):
        args = self._memory.lend_bits(tensor, "tensor"), self.peer(dst, "dst"), tag
        return self.do(False, abi.FSDP_OP_SEND, lib.fsdp_send, args, [tensor], peer=dst, tag=tag)

    def recv(self, tensor, src, tag):
        """src: a rank, or abi.FSDP_ANY_RANK."""
        if src != abi.FSDP_ANY_RANK:
            src = self.peer(src, "src")
        args = self._memory.lend_bits(tensor, "tensor"), src, tag
        return self.do(False, abi.FSDP_OP_RECV, lib.fsdp_recv, args, [tensor], peer=src, tag=tag)

    # ---- Barriers and the end ----------------------------------------------------------------------------------------

    def barrier(self, wait, timeout=None):
        return self.do(wait, abi.FSDP_OP_BARRIER, lib.fsdp_barrier, (), [], timeout=timeout)

    def set_timeout(self, timeout):
        """Let operations from here on take at most `timeout` milliseconds. Not collective."""
        try:
            check(lib.fsdp_group_set_timeout(self.group._handle, timeout))
        except FsdpError as error:
            raise self._raised(error) from None

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """A barrier in which rank 0 finds out who does not come, and tells all: it raises with the first of those
        ranks, or with `wait_all_ranks` all of them. The group has then ended. timeout: seconds."""
        try:
            missing = self._monitor(timeout, wait_all_ranks)
        except FsdpError as error:
            raise self._raised(error) from None
        if missing:
            who = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
            message = f"{who} failed to pass monitoredBarrier" + (f" in {timeout * 1000:.0f} ms" if timeout else "")
            self.end(message)
            raise self._raised(Timeout(message, ranks=missing))

    def _monitor(self, timeout, wait_all_ranks):
        group = self.group
        deadline = None if timeout is None else time.monotonic() + timeout
        if self.rank:
            arrived = group.send(bytearray(1), 0, _BARRIER_TAG, async_op=True)
            released = group.recv(bytearray(1), 0, _BARRIER_TAG + 1, async_op=True)
            arrived.wait(timeout)
            released.wait(timeout)
            return []
        others = range(1, self.size)
        arrivals = {rank: group.recv(bytearray(1), rank, _BARRIER_TAG, async_op=True) for rank in others}
        missing = []
        for rank, arrival in arrivals.items():
            try:
                arrival.wait(None if deadline is None else max(0, deadline - time.monotonic()))
            except Pending:
                missing.append(rank)
            except FsdpError:
                if not wait_all_ranks:
                    raise
                missing.append(rank)
            if missing and not wait_all_ranks:
                break
        if not missing:
            for work in [group.send(bytearray(1), rank, _BARRIER_TAG + 1, async_op=True) for rank in others]:
                work.wait(timeout)
        return missing

    def end(self, reason):
        """End the group for all ranks: calls under way and later ones raise, with the reason."""
        if self.group._owned is not None:
            self.group.abort(reason[:200])

    def leave(self):
        """Leave the group, after this rank's operations. A peer that then waits for this rank is told. Operations that
        other ranks don't join within a few seconds end the group, instead of keeping this rank."""
        deadline = time.monotonic() + _PATIENCE
        while self.group in pending():
            if time.monotonic() > deadline:
                self.end(f"rank {self.rank} left the process group while an operation of it waited for other ranks")
                break
            time.sleep(0.002)
        self.group.close()

    # ---- Checks ------------------------------------------------------------------------------------------------------

    def peer(self, rank, name):
        if not 0 <= rank < self.size:
            raise InvalidArgument(f"invalid {name} rank: {rank} is not in 0 .. {self.size - 1}")
        return rank

    def length(self, tensors, name):
        if tensors is None or len(tensors) != self.size:
            count = 0 if tensors is None else len(tensors)
            raise InvalidArgument(f"invalid {name}: {count} tensors, expected {self.size}, one for each rank")

    def rows(self, counts):
        return (abi.c_int64 * len(counts))(*counts)

    def _fits(self, output, input):
        if input.dtype != output.dtype:
            raise InvalidArgument(f"output has dtype {output.dtype}, expected the input's, {input.dtype}")
        if output.numel() != input.numel() * self.size:
            raise InvalidArgument(
                f"output has {output.numel()} elements, expected {self.size} times input's {input.numel()}"
            )

    def _parts(self, parts, tensor, name):
        self.length(parts, name)
        self._memory.like(parts, tensor, name)
        return self._memory.output(parts, name)


def _pairs(outputs, inputs):
    if len(outputs) != len(inputs):
        raise InvalidArgument(f"{len(outputs)} outputs for {len(inputs)} inputs; give one for each")


def all_of(functions):
    """One function that calls those of the functions that are not None; None where there is nothing to call."""
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
        self._operations = Coalesced(owner.group)
        self.afters = []

    def add(self, kind, function, args, after, fields):
        if kind == abi.FSDP_OP_BARRIER:
            raise RuntimeError("a barrier can't be coalesced with other operations; call it before or after them")
        self._operations._do(kind, function, args, None, False, **fields)
        self.afters.append(after)

    def run(self, wait, tensors, after=None, timeout=None):
        items = self._operations.take()
        return self._owner.do(wait, 0, lib.fsdp_coalesced, items, tensors, all_of([*self.afters, after]), timeout)
