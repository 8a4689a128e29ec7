"""The operations of a process group, as torch calls them: what was asked for is read here; hosts.Collectives does it.

torch calls a Python process group in three ways, and all end here: its functions with an options object
(`allreduce([t], opts)`), code that has the group in hand with the short forms of the C++ binding (`allreduce(t,
op)`), and C++, for which these names are virtual functions. `opts.asyncOp` False is a call that runs to its end on the
calling thread, with no hand-off and no handle; otherwise a Work is given.

Each method first looks whether a dispatch mode is watching, and then goes through torch's dispatcher (dispatch.py). The
three operations that programs call in their inner loops then try the shortest way (quick.py).
"""

import torch
import torch.distributed as dist

from .. import abi
from . import quick
from .arguments import OPS, UNSET, called, one, reducing, rooted, scaled
from .dispatch import given, kernels, scaled_in_place, summing, watched
from .errors import last
from .work import DONE, milliseconds, seconds

_AllreduceOptions = dist.AllreduceOptions


class Operations:
    """The part of a ProcessGroup that communicates; what is on whole tensors is called by names.py. `_operations` is its
    hosts.Collectives, `_pointer` the library's group as a c_void_p."""

    # ---- Reductions --------------------------------------------------------------------------------------------------

    def allreduce(self, tensors, opts=None, timeout=None, *, op=None):
        if watched():
            scaled_in_place(tensors, opts)
            with kernels():
                return super().allreduce(*given(tensors, summing(opts) or op, timeout))
        if type(opts) is _AllreduceOptions and not opts.asyncOp and len(tensors) == 1:  # as dist.all_reduce calls
            code = OPS.get(hash(opts.reduceOp))
            if code is not None and opts.timeout <= UNSET and self._at_once_in_place(tensors[0], code):
                return DONE
        code, factor, wait, limit = reducing(opts, op, timeout)
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        elif len(tensors) != 1:
            return self._all_reduce_several(tensors, code, factor, wait, limit)
        input = None if factor is None else scaled(tensors[0], factor)
        return self._operations.all_reduce(tensors[0], code, wait, limit, input)

    def allreduce_coalesced(self, tensors, opts=None):
        if watched():
            scaled_in_place(tensors, opts)
            with kernels():
                return super().allreduce_coalesced(*given(tensors, summing(opts)))
        return self._all_reduce_several(tensors, *reducing(opts))

    def _all_reduce_several(self, tensors, code, factor, wait, limit):
        inputs = None if factor is None else [scaled(tensor, factor) for tensor in tensors]
        return self._operations.all_reduce_coalesced(tensors, code, wait, limit, inputs)

    def reduce(self, tensors, opts=None, op=None, timeout=None):
        if watched():
            scaled_in_place(tensors, opts)
            with kernels():
                return super().reduce(*given(tensors, summing(opts), op, timeout))
        root, options = (opts or 0, None) if opts is None or isinstance(opts, int) else (opts.rootRank, opts)
        code, factor, wait, limit = reducing(options, op, timeout)
        tensor = one(tensors, "tensors")
        input = None if factor is None else scaled(tensor, factor)
        return self._operations.reduce(tensor, root, code, wait, limit, input)

    def _reduce_scatter_tensor(self, output, input, opts=None, timeout=None):
        code, factor, wait, limit = reducing(opts, None, timeout)
        if wait and limit is factor is None and input.numel() == output.numel() * self._operations.size:
            if self._at_once(quick.lib.fsdp_reduce_scatter, input, output, code):
                return DONE
        return self._operations.reduce_scatter_tensor(output, scaled(input, factor), code, wait, limit)

    def _reduce_scatter_tensors(self, outputs, inputs, opts=None):
        code, factor, wait, limit = reducing(opts)
        inputs = [scaled(input, factor) for input in inputs]
        return self._operations.reduce_scatter_tensor_coalesced(outputs, inputs, code, wait, limit)

    def reduce_scatter(self, outputs, inputs, opts=None, timeout=None, *, op=None):
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        code, factor, wait, limit = reducing(opts, op, timeout)
        parts = [scaled(part, factor) for part in one(inputs, "input_list")]
        if watched():
            with kernels():
                return super().reduce_scatter(*given(outputs, [parts], summing(opts) or op, timeout))
        return self._operations.reduce_scatter(one(outputs, "output"), parts, code, wait, limit)

    # ---- All-gather --------------------------------------------------------------------------------------------------

    def _all_gather_tensor(self, output, input, opts=None, timeout=None):
        wait, limit = called(opts, timeout)
        if wait and limit is None and output.dtype is input.dtype:
            if output.numel() == input.numel() * self._operations.size:
                if self._at_once(quick.lib.fsdp_all_gather, input, output):
                    return DONE
        return self._operations.all_gather_tensor(output, input, wait, limit)

    def _all_gather_tensors(self, outputs, inputs, opts=None):
        return self._operations.all_gather_tensor_coalesced(outputs, inputs, *called(opts))

    def allgather(self, outputs, inputs, opts=None, timeout=None):
        if watched():
            with kernels():
                return super().allgather(*given(outputs, inputs, opts, timeout))
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        tensor, parts = one(inputs, "input"), one(outputs, "output")
        return self._operations.all_gather(parts, tensor, *called(opts, timeout))

    def allgather_coalesced(self, output_lists, inputs, opts=None):
        """output_lists[i][r] = rank r's inputs[i]."""
        if watched():
            with kernels():
                return super().allgather_coalesced(*given(output_lists, inputs, opts))
        return self._operations.all_gather_coalesced(output_lists, inputs, *called(opts))

    # ---- From and to a root ------------------------------------------------------------------------------------------

    def gather(self, outputs, inputs, opts=None, timeout=None):
        if watched():
            with kernels():
                return super().gather(*given(outputs, inputs, opts, timeout))
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        parts = one(outputs, "output") if outputs else None
        return self._operations.gather(parts, one(inputs, "input"), *rooted(opts, timeout))

    def scatter(self, outputs, inputs, opts=None, timeout=None):
        if watched():
            with kernels():
                return super().scatter(*given(outputs, inputs, opts, timeout))
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        parts = one(inputs, "input") if inputs else None
        return self._operations.scatter(one(outputs, "output"), parts, *rooted(opts, timeout))

    def broadcast(self, tensors, opts=None, timeout=None):
        if watched():
            with kernels():
                return super().broadcast(*given(tensors, opts, timeout))
        return self._operations.broadcast(one(tensors, "tensors"), *rooted(opts, timeout))

    # ---- All to all --------------------------------------------------------------------------------------------------

    def _all_to_all_tensor(self, output, input, output_split_sizes, input_split_sizes, opts=None, timeout=None):
        return self._operations.all_to_all_tensor(
            output, input, output_split_sizes, input_split_sizes, *called(opts, timeout)
        )

    def alltoall(self, outputs, inputs, opts=None, timeout=None):
        if watched():
            with kernels():
                return super().alltoall(*given(outputs, inputs, opts, timeout))
        return self._operations.all_to_all(outputs, inputs, *called(opts, timeout))

    # ---- Messages and barriers ---------------------------------------------------------------------------------------

    def send(self, tensors, dst, tag=0):
        if watched():
            with kernels():
                return super().send(tensors, dst, tag)
        return self._operations.send(one(tensors, "tensors"), dst, tag)

    def recv(self, tensors, src, tag=0):
        if watched():
            with kernels():
                return super().recv(tensors, src, tag)
        self._operations.peer(src, "src")
        return self._operations.recv(one(tensors, "tensors"), src, tag)

    def recv_anysource(self, tensors, tag=0):
        if watched():
            with kernels():
                return super().recv_anysource(tensors, tag)
        return self._operations.recv(one(tensors, "tensors"), abi.FSDP_ANY_RANK, tag)

    def barrier(self, opts=None, timeout=None):
        if watched():
            with kernels():
                return super().barrier(*given(opts, timeout))
        if opts is not None and not hasattr(opts, "asyncOp"):
            opts, timeout = None, opts
        return self._operations.barrier(*called(opts, timeout))

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """A barrier in which rank 0 finds out who does not come, and tells all: it raises with the first of those
        ranks, or with `wait_all_ranks` all of them. The group has then ended."""
        if watched():
            with kernels():
                return super().monitored_barrier(*given(timeout), wait_all_ranks=wait_all_ranks)
        return self._operations.monitored_barrier(seconds(timeout), wait_all_ranks)

    # ---- The shortest way --------------------------------------------------------------------------------------------

    def _at_once(self, function, input, output, *rest):
        """Run an operation of quick.lib to its end, and say whether that could be done."""
        group = self._group
        handle = group._owned  # kept until the call is over, should another thread close the group
        if self._operations._batch is not None or group.interruptible or handle is None:
            return False
        first = quick.take(input)
        second = None if first is None else quick.take(output)
        if second is None:
            return False
        status = function(self._pointer, first[1], second[1], *rest, None)
        quick.give(first)
        quick.give(second)
        if status:
            raise last(status)
        return True

    def _at_once_in_place(self, tensor, op):
        """The same for an all-reduce."""
        group = self._group
        handle = group._owned
        if self._operations._batch is not None or group.interruptible or handle is None:
            return False
        block = quick.take(tensor)
        if block is None:
            return False
        status = quick.lib.fsdp_all_reduce(self._pointer, block[1], block[1], op, None)
        quick.give(block)
        if status:
            raise last(status)
        return True

    # ---- Several calls as one ----------------------------------------------------------------------------------------

    def _start_coalescing(self, device=None):
        self._operations.begin_batch()

    def _end_coalescing(self, device=None):
        return self._operations.end_batch()

    # ---- Times -------------------------------------------------------------------------------------------------------

    def set_timeout(self, timeout):
        """How long each later operation of this rank may take; none: as long as by default."""
        self._operations.set_timeout(milliseconds(timeout) or 0)

    _set_default_timeout = set_timeout
