"""torch's dispatcher: what lets modes and tensor subclasses see the collectives of a group.

A group of torch's own is C++, and hands each call to an operator of torch.ops.c10d: CommDebugMode counts those,
FakeTensorMode answers for them without communication, and a subclass with `__torch_dispatch__` may take its tensor
apart. A Python group is called directly. So while a mode is on (`watched`), each method here calls its base class
instead (`super()`), which is C++ and goes that way: pybind11 sees that the call comes from the method that it
would call. Below all modes the operator's kernel for host memory is reached, and that looks for a C++ backend.
`kernels()` puts others in its place, which call our method for groups of ours, and for all others the kernel that was
there.

They are there for the length of that call only: with them in place gloo's groups of three ranks and more lose their
way now and then (seen with torch 2.11; the kernel is called from Python then). PREMUL_SUM, whose factor the operators
lose, is applied to the inputs before.
"""

import contextlib
import datetime
import threading
import warnings

import torch
import torch.distributed as dist
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import _disable_current_modes

from .arguments import reducing, scaled

_c10d = torch._C._distributed_c10d
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_lock = threading.Lock()
_library = None  # the torch.library.Library that holds our kernels, while calls need it
_calls = 0  # how many do
_running = threading.local()  # .work: the last Work of a kernel on this thread; C++ does not keep its Python half


watched = _len_torch_dispatch_stack  # how many dispatch modes are on, on this thread


# ---- The way up: arguments for the base class ------------------------------------------------------------------------


@contextlib.contextmanager
def kernels():
    """A block in which the operators come back to groups of ours."""
    global _library, _calls
    with _lock:
        _calls += 1
        if _library is None:
            _library = _install()
    try:
        yield
    finally:
        with _lock:
            _calls -= 1
            if not _calls:
                _library._destroy()
                _library = None


def given(*arguments):
    """The arguments up to the last that is not None."""
    count = len(arguments)
    while count and arguments[count - 1] is None:
        count -= 1
    return arguments[:count]


def summing(opts):
    """The options, or their operation, without a factor, which was applied to the inputs."""
    if opts is None or isinstance(opts, int) or reducing(opts)[1] is None:
        return opts
    plain = type(opts)(dist.ReduceOp.SUM) if isinstance(opts, dist.ReduceOp) else type(opts)()
    if plain is not None and not isinstance(plain, dist.ReduceOp):
        for field in ("reduceOp", "rootRank", "rootTensor", "timeout", "asyncOp"):
            if hasattr(opts, field):
                setattr(plain, field, dist.ReduceOp.SUM if field == "reduceOp" else getattr(opts, field))
    return plain


def scaled_in_place(tensors, opts):
    """Apply the factor of a reduction, if it has one, to tensors that are inputs and outputs at once."""
    factor = None if opts is None or isinstance(opts, int) else reducing(opts)[1]
    if factor is not None:
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            with torch.no_grad():
                tensor.copy_(scaled(tensor, factor))


# ---- The way down: kernels -------------------------------------------------------------------------------------------


def _options(kind, async_op, timeout=-1, **fields):
    opts = getattr(_c10d, kind)()
    opts.asyncOp = async_op
    if timeout > 0:
        opts.timeout = datetime.timedelta(milliseconds=timeout)
    for field, value in fields.items():
        setattr(opts, field, value)
    return opts


def _op(boxed):
    return dist.ReduceOp(dist.ReduceOp.RedOpType(boxed.op()))


def _all_reduce(group, tensors, op, sparse_indices, async_op=True, timeout=-1):
    return group.allreduce(tensors, _options("AllreduceOptions", async_op, timeout, reduceOp=_op(op)))


def _all_reduce_coalesced(group, tensors, op, async_op=True, timeout=-1):
    opts = _options("AllreduceCoalescedOptions", async_op, timeout, reduceOp=_op(op))
    return group.allreduce_coalesced(tensors, opts)


def _reduce(group, tensors, op, root, root_tensor, async_op=True, timeout=-1):
    return group.reduce(tensors, _options("ReduceOptions", async_op, timeout, reduceOp=_op(op), rootRank=root))


def _reduce_scatter_base(group, output, input, op, async_op=True, timeout=-1):
    opts = _options("ReduceScatterOptions", async_op, timeout, reduceOp=_op(op))
    return group._reduce_scatter_tensor(output, input, opts)


def _reduce_scatter_coalesced(group, outputs, inputs, op, async_op=True, timeout=-1):
    opts = _options("ReduceScatterOptions", async_op, timeout, reduceOp=_op(op))
    return group._reduce_scatter_tensors(outputs, inputs, opts)


def _reduce_scatter(group, outputs, inputs, op, async_op=True, timeout=-1):
    return group.reduce_scatter(outputs, inputs, _options("ReduceScatterOptions", async_op, timeout, reduceOp=_op(op)))


def _all_gather_base(group, output, input, async_op=True, timeout=-1):
    return group._all_gather_tensor(output, input, _options("AllgatherOptions", async_op, timeout))


def _all_gather(group, outputs, inputs, async_op=True, timeout=-1):
    return group.allgather(outputs, inputs, _options("AllgatherOptions", async_op, timeout))


def _all_gather_coalesced(group, outputs, inputs, async_op=True):
    return group.allgather_coalesced(outputs, inputs, _options("AllgatherOptions", async_op))


def _all_gather_into_coalesced(group, outputs, inputs, async_op=True):
    return group._all_gather_tensors(outputs, inputs, _options("AllgatherOptions", async_op))


def _broadcast(group, tensors, root, root_tensor, async_op=True, timeout=-1):
    return group.broadcast(tensors, _options("BroadcastOptions", async_op, timeout, rootRank=root))


def _gather(group, outputs, inputs, root, async_op=True, timeout=-1):
    return group.gather(outputs, inputs, _options("GatherOptions", async_op, timeout, rootRank=root))


def _gather_tensor(group, output, input, root, async_op=True, timeout=-1):
    return group.gather_single(output, input, _options("GatherOptions", async_op, timeout, rootRank=root))


def _scatter(group, outputs, inputs, root, async_op=True, timeout=-1):
    return group.scatter(outputs, inputs, _options("ScatterOptions", async_op, timeout, rootRank=root))


def _all_to_all(group, outputs, inputs, async_op=True, timeout=-1):
    return group.alltoall(outputs, inputs, _options("AllToAllOptions", async_op, timeout))


def _all_to_all_base(group, output, input, received, sent, async_op=True, timeout=-1):
    return group._all_to_all_tensor(output, input, received, sent, _options("AllToAllOptions", async_op, timeout))


def _barrier(group, tensor, device_ids, async_op=True, timeout=-1):
    return group.barrier(_options("BarrierOptions", async_op, timeout))


def _monitored_barrier(group, tensor, device_ids, timeout, wait_all_ranks):
    group.monitored_barrier(timeout / 1000 if timeout > 0 else None, wait_all_ranks)


def _send(group, tensors, dst, tag):
    return group.send(tensors, dst, tag)


def _recv(group, tensors, src, tag):
    return group.recv(tensors, src, tag)


def _recv_anysource(group, tensors, tag):
    return group.recv_anysource(tensors, tag)


_KERNELS = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce_coalesced,
    "reduce_": _reduce,
    "_reduce_scatter_base_": _reduce_scatter_base,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_coalesced,
    "reduce_scatter_": _reduce_scatter,
    "_allgather_base_": _all_gather_base,
    "allgather_": _all_gather,
    "allgather_coalesced_": _all_gather_coalesced,
    "allgather_into_tensor_coalesced_": _all_gather_into_coalesced,
    "broadcast_": _broadcast,
    "gather_": _gather,
    "gather_into_tensor_": _gather_tensor,
    "scatter_": _scatter,
    "alltoall_": _all_to_all,
    "alltoall_base_": _all_to_all_base,
    "barrier": _barrier,
    "monitored_barrier_": _monitored_barrier,
    "send": _send,
    "recv_": _recv,
    "recv_any_source_": _recv_anysource,
}


def _kernel(schema, ours, before):
    """The kernel of one operator. ours: for groups of ours; before: what was there."""
    place = [argument.name for argument in schema.arguments].index("process_group")
    shape = [str(result.type) for result in schema.returns]

    def run(keys, *arguments):
        group = dist.ProcessGroup.unbox(arguments[place])
        if getattr(group, "backend", None) != "fsdp":
            return before.call_boxed(keys, *arguments)
        with _disable_current_modes() if _len_torch_dispatch_stack() else contextlib.nullcontext():
            work = ours(group, *arguments[:place], *arguments[place + 1 :])
        if not shape:
            return None
        _running.work = work
        return work.boxed() if len(shape) == 1 else (arguments[0], work.boxed())

    return run


def _install():
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that kernels are replaced, which is what this is for
        for name, ours in _KERNELS.items():
            operator = f"c10d::{name}"
            for key in ("CPU", "SparseCPU"):
                if hasattr(torch.ops.c10d, name) and _has_kernel(operator, key):
                    schema = getattr(torch.ops.c10d, name).default._schema
                    kernel = _kernel(schema, ours, torch.library.get_kernel(operator, key))
                    library.impl(name, kernel, key, with_keyset=True)
    return library
