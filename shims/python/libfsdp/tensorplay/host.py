"""TensorPlay, as the adapter core (libfsdp.hosts) wants a framework to be described.

Parameters stay the Parameters that they were: the same objects, which hold this rank's shard (`.data`) from fully_shard
on. So an optimizer that was built before fully_shard steps the shards as well.

What differs between 1.0 and 1.1 and matters here: 1.0 has no meta device; the first `Function.apply` of a process must
see a tensor that needs no gradient, or it fails; the context of a Function and its outputs keep each other alive in a
way that garbage collection does not see. Neither says which backward pass is running, and both go through a graph in an
order that needs Gate, below. `.grad` is another Python object each time that it is read, so nobody can tell who else
holds one.
"""

import functools
import weakref

import tensorplay as tp
import tensorplay.distributed as dist
from tensorplay import nn
from tensorplay.autograd import Function
from tensorplay.autograd.variable import Variable
from tensorplay.nn.modules.container import ModuleDict, ModuleList

from .. import abi
from ..borrow import _capsule_pointer
from ..hosts import tree
from ..hosts.api import refuse_shards
from ..hosts.backward import gather_function
from ..hosts.host import Host
from ..tensor import shard_extent
from .clip import mark
from .tensors import _refusal

_managed = abi.DLManagedTensor.from_address


class Placement:
    """How a parameter lies: `dim` is the dimension that is cut."""

    def __init__(self, dim):
        self.dim = dim


class TensorPlayHost(Host):
    name = "TensorPlay"
    Tensor, Parameter, Module = tp.Tensor, nn.Parameter, nn.Module
    Containers = (ModuleList, ModuleDict)
    NotSharded = TypeError
    writes_back = True
    no_grad = staticmethod(tp.no_grad)
    grad_enabled = staticmethod(tp.is_grad_enabled)

    def __init__(self):
        self._gather = _remembered(gather_function(Function))
        nothing = tp.empty(0)
        Anchor.apply(nothing, Progress(self))  # 1.0, see above
        Gate.apply(nothing, nothing, Progress(self))
        self._leaf = tp.empty(0, requires_grad=True)

    # ---- Memory ----

    def lend(self, tensor, name):
        try:
            capsule = (tensor.detach() if tensor.requires_grad else tensor).__dlpack__()
            head = _managed(_capsule_pointer(capsule, b"dltensor")).dl_tensor
        except Exception as error:
            raise _refusal(tensor, name, error) from None
        if head.device.device_type != abi.kDLCPU:
            raise _refusal(tensor, name, None)
        head.owner = capsule
        return head

    def adopt(self, tensor):
        return tp.from_dlpack(tensor)

    def twin(self, tensor):
        return tensor.data

    def address(self, tensor):
        return tensor.data_ptr()

    def cast(self, tensor, dtype):
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    def is_meta(self, parameter):
        return parameter.device.type == "meta"

    # ---- Communication of TensorPlay's own ----

    SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG

    class Buffers:
        @staticmethod
        def allocate(size, *, dtype, device):
            return tp.empty(tuple(size), dtype=dtype, device=device)

    def reduce_scatter(self, output, input, group, average):
        dist.reduce_scatter_tensor(output, input, self.AVG if average else self.SUM, group)

    def all_reduce(self, tensor, group):
        dist.all_reduce(tensor, group=group)

    # ---- Autograd ----

    def anchor(self, iteration):
        progress = Progress(iteration)
        tensor = Anchor.apply(self._leaf, progress)
        _forget_outputs(progress)
        tensor.progress = progress
        return tensor

    def gather(self, anchor, use):
        tensors = self._gather.apply(anchor, use)
        _forget_outputs(use)
        return tensors

    def on_gradient(self, tensor, function):
        tensor.register_hook(function)

    def at_end_of_backward(self, function):
        Variable._execution_engine.queue_callback(function)

    # ---- Modules ----

    def class_name(self, original):
        return f"{original.__name__}FSDPModule"

    def hook(self, module, state):
        def after(module, args, output):
            output = state.after_forward(module, output)
            if not tp.is_grad_enabled() or state.iteration is None:
                return output
            return tree.mapped(output, tp.Tensor, functools.partial(_gated, state.iteration.anchor()))

        module.register_forward_pre_hook(state.pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)
        if module is state.modules[0]:
            _hook_parts(state)
        module.register_state_dict_pre_hook(lambda module, prefix, keep_vars: state.reshard_now())
        module.register_load_state_dict_pre_hook(lambda *arguments: state.reshard_now())

    # ---- Parameters ----

    def check_parameter(self, parameter, name):
        if parameter.device.type not in ("cpu", "meta"):
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}; libfsdp shards host memory: move the module to cpu first"
            )

    def placement(self, parameter, dim, ranks):
        return Placement(dim)

    def shard_of(self, parameter, placement, ranks):
        """The same parameter, on a copy of this rank's part."""
        start, length = shard_extent(parameter.shape[placement.dim], ranks.shard_rank, ranks.shard_size)
        with tp.no_grad():
            if self.is_meta(parameter):
                shape = [*parameter.shape]
                shape[placement.dim] = length
                parameter.data = tp.empty(shape, dtype=parameter.dtype, device="meta")
            else:
                parameter.data = parameter.detach().narrow(placement.dim, start, length).clone().contiguous()
        mark(parameter, ranks)
        return parameter

    def local(self, parameter):
        return parameter

    def set_local(self, parameter, tensor):
        parameter.data = tensor


def _hook_parts(state):
    """A module inside a unit that is called from outside would compute with its shard, which is a plain tensor, and
    give a part of its result."""
    parts = {module: param for param in state.params for module, _ in param.places}
    for part, param in parts.items():
        if part not in state.modules:
            part.register_forward_pre_hook(functools.partial(_before_part, param))


def _before_part(param, part, args):
    refuse_shards(param, f"forward of {type(part).__name__}, which has {param.name!r},")


class Gate(Function):
    """An output of a unit, as it is, but behind a Function.

    The engine goes through all nodes of its own that are ready before it takes one of Python's, and of those the one
    that was made last. Without a gate it would go through the whole model before the first unit's gradients reach the
    library, and all units would be full by then; with one, the layers before wait until the units after them are done.

    It needs the anchor too, so that the engine, if it comes to its end, has gone through that after every gate.
    """

    @staticmethod
    def forward(ctx, tensor, anchor, progress):
        progress.context, ctx.progress = ctx, progress
        return tensor.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.progress.begin()
        return grad, None, None


def _gated(anchor, tensor):
    if not tensor.requires_grad:
        return tensor
    tensor = Gate.apply(tensor, anchor, anchor.progress)
    _forget_outputs(anchor.progress)
    return tensor


class Progress:
    """Of the backward of one forward: the engine says that a pass is over after an exception too. It is also where an
    application of a Function leaves its context."""

    def __init__(self, iteration):
        self._iteration = weakref.ref(iteration)

    def begin(self):
        iteration = self._iteration()
        if iteration is not None:
            iteration.unfinished.add(self)

    def end(self):
        iteration = self._iteration()
        if iteration is not None:
            iteration.unfinished.discard(self)


class Anchor(Function):
    """Full parameters and gates come out of it, so the engine goes through it when it has gone through all of them."""

    @staticmethod
    def forward(ctx, leaf, progress):
        progress.context, ctx.progress = ctx, progress
        return leaf.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.progress.end()
        return None, None


def _remembered(function):
    """The autograd function `function`, which leaves its context in `use`."""

    class FullParameters(function):
        @staticmethod
        def forward(ctx, anchor, use):
            use.context = ctx
            return function.forward(ctx, anchor, use)

    return FullParameters


def _forget_outputs(use):
    context = vars(use).pop("context")
    if getattr(context, "_outputs", None):
        context._outputs = ()  # 1.0, see above


HOST = TensorPlayHost()
