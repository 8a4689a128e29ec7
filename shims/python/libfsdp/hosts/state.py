"""The state of one unit: what fully_shard leaves in its modules, and the hooks around their forward and backward."""

import sys
import weakref

from ..options import Precision
from . import tree
from .comm import Comm, added
from .iteration import Iteration


def gather_function(Function):
    """The autograd function through which trainable parameters come when they are full: from nothing but the unit, whose
    reduction is its backward. `anchor` is a tensor that requires a gradient, so that the results do; it gets none. `use`
    says which unit, and for which call of its module."""

    class FullParameters(Function):
        @staticmethod
        def forward(ctx, anchor, use):
            ctx.use = use
            ctx.trainable = [not param.frozen for param in use.unit().params]  # as they are now
            ctx.set_materialize_grads(False)
            return tuple(use.unit().twins(frozen=False))

        @staticmethod
        def backward(ctx, *grads):
            grads = iter(grads)
            grads = [next(grads) if trainable else None for trainable in ctx.trainable]
            ctx.use.unit().gradients(grads, ctx.use.call)
            return None, None

    return FullParameters


class Use:
    """unit: a weak reference to a State, which a graph must not keep alive. call: stands for one call of its module.
    Adapters may keep something of their own in it."""

    def __init__(self, unit, call):
        self.unit, self.call = unit, call


class State:
    """One call of fully_shard.

    modules     those that were given; the first one's name is the unit's in messages
    params      ShardedParameters; none: the hooks only cast, and mark where the iteration begins
    ranks       over which ranks (see Iteration)
    reshard     reshard_after_forward: True, False, a number of ranks; None: True, but False for the root
    policy      the framework's MixedPrecisionPolicy: param_dtype, reduce_dtype, output_dtype, cast_forward_inputs
    """

    model_options = {}  # of the library's models, where this is the root

    def __init__(self, host, modules, params, ranks, reshard, policy):
        self.host, self.modules, self.params, self.ranks = host, tuple(modules), params, ranks
        self.reshard, self.policy = reshard, policy
        self.strategy = None if ranks.shards else "no_shard"  # of the library's unit; None: its model's
        self.comm = Comm(self)
        self.name = type(self.modules[0]).__name__
        self.iteration = None  # an Iteration from the first forward on
        self.is_root = False
        self.unit = None  # the libfsdp.Unit
        # Settings that programs change.
        self.reduce_grads = self.all_reduce_grads = True
        self.reshard_after_backward = self.unshard_in_backward = True
        self.divisor = None
        self.is_last_backward = True
        self.prefetch = {"forward": None, "backward": None}  # lists of States
        self.told = None  # of the settings, what the unit knows
        self.prefetch_told = {}  # of these, what the library knows: lists of units
        # Where it is.
        self.in_backward = False  # from the first gradient of an output to the reduction
        self.by_hand = False  # unshard() was called, and nothing has resharded since
        self.ran_forward = self.reduced = False  # since the last backward ended; in this one
        self.unsynced = False  # the library has gradients that no `.grad` shows yet
        self._full = None  # the tensors of the last graph, which modules show again for its backward
        self._pass = None  # the backward pass of in_backward
        self._waiting = []  # gradients from passes inside that one
        self._running = set()  # of several modules, those that forward has yet to reach
        self._call = None  # stands for the last call of the module
        self._open = set()  # the calls whose backward has begun, and is not known to be over
        self._self = weakref.ref(self)
        self._anchor = None
        self._raising = None  # the exception that was being handled when forward began

    # ---- Full and sharded ----

    def twins(self, frozen):
        """Tensors on the memory of the full parameters that are frozen, or that are not."""
        return [self.host.twin(param.full) for param in self.params if param.frozen == frozen]

    def show(self):
        """The modules show full parameters, which are part of the graph that is being recorded."""
        if self.comm.all_gather is not None:
            self.comm.gather()
        if self._anchor is None:
            self._anchor = self.host.anchor()
        if self.host.grad_enabled() and self.is_trainable:
            trainable = self.host.gather(self._anchor, Use(self._self, self._call))
        else:
            trainable = self.twins(frozen=False)
        trainable, frozen = iter(trainable), iter(self.twins(frozen=True))
        full = [
            self.host.present(next(frozen if param.frozen else trainable), param.placement) for param in self.params
        ]
        if self.host.grad_enabled():  # else an earlier graph may be waiting for its backward
            self._full = full
        self._show(full)

    def _show(self, full):
        self.host.readable([param.full for param in self.params])
        for param, tensor in zip(self.params, full):
            param.show(tensor)

    def hide(self):
        self.by_hand = False
        if self.unit is not None:
            self.host.unreadable([param.full for param in self.params])
        self.show_shards()

    def show_shards(self):
        for param in self.params:
            param.hide()

    @property
    def is_trainable(self):
        return any(not param.frozen for param in self.params)

    @property
    def is_full(self):
        return self.unit is not None and self.unit.state == "unsharded"

    def unshard(self, async_op=False):
        """By hand. A handle with wait(), for async_op; else None."""
        self.begin()
        if self.unit is None:
            return None
        work = self.unit.unshard(async_op=async_op)
        self.by_hand = True
        if async_op:
            return work
        self.show()
        return None

    def unsharded(self):
        """After an asynchronous unshard() has been waited for."""
        if self.unit is not None and self.by_hand:
            self.show()

    def reshard_now(self):
        if self.unit is None:
            return
        if self.by_hand and self.host.writes_back and self.is_full:
            self.unit.write_back()
        self.unit.reshard()
        self.hide()

    def set_is_last_backward(self, last):
        self.is_last_backward = last
        if self.iteration is not None:
            self.iteration.is_last_backward = last

    # ---- Forward ----

    def begin(self):
        """Before anything that needs the library's unit."""
        if self.iteration is None:
            Iteration(self)

    def pre_forward(self, module, args, kwargs):
        """The forward pre-hook: (args, kwargs) to go on with."""
        self._raising = sys.exc_info()[1]
        if self.iteration is not None:
            self.iteration.notice_failed_backward()
        if self.in_backward:  # forward once more, for backward: what it needs is here
            if self.unit is not None:
                self.unit.pre_backward()
                self._show(self._full)
            return self._cast(args), self._cast(kwargs)
        if len(self.modules) > 1:
            if self._running:
                self._running.discard(id(module))
                return args, kwargs
            self._running = {id(other) for other in self.modules if other is not module}
        self.begin()
        self.iteration.begin_forward(self)
        args, kwargs = self._cast(args), self._cast(kwargs)
        self._call = object()
        if self.unit is not None:
            self.unit.pre_forward()
            self.show()
            if self.host.grad_enabled() and not self.is_trainable:
                self._watch_inputs((args, kwargs))
        return args, kwargs

    def after_forward(self, module, output):
        """The forward hook, which is called after an exception too."""
        if sys.exc_info()[1] is not self._raising:
            self.forward_failed()
            return None
        return self.post_forward(module, output)

    def post_forward(self, module, output):
        if self.in_backward or self.iteration is None:
            return self._cast_output(output)
        if self._running:
            return self._hooked(output)
        self.ran_forward = self.host.grad_enabled()
        if self.unit is not None:
            self.unit.post_forward()
            if self.reshards_after_forward():
                self.hide()
        output = self._hooked(output)
        self.iteration.end_forward(self)
        return self._cast_output(output)

    def forward_failed(self):
        """An exception leaves the module."""
        if self.iteration is not None:
            self.iteration.forward_failed()
            if not self.in_backward:
                self.show_shards()

    def reshards_after_forward(self):
        return not self.is_root if self.reshard is None else bool(self.reshard)

    def precision(self):
        """What the library is to know of the policy."""
        policy = self.policy
        if policy.param_dtype is None and policy.reduce_dtype is None:
            return None
        return Precision(param=policy.param_dtype, reduce=policy.reduce_dtype)

    def _cast(self, value):
        return self._in_dtype(value, self.policy.param_dtype if self.policy.cast_forward_inputs else None)

    def _cast_output(self, value):
        return self._in_dtype(value, self.policy.output_dtype)

    def _in_dtype(self, value, dtype):
        if dtype is None:
            return value
        return tree.mapped(value, self.host.Tensor, lambda tensor: self.host.cast(tensor, dtype))

    def _hooked(self, output):
        if self.host.grad_enabled():
            for tensor in tree.tensors_in(output, self.host.Tensor):
                if tensor.requires_grad:
                    self.host.on_gradient(tensor, self._weakly(State.pre_backward, self._call))
        return output

    def _watch_inputs(self, inputs):
        """A unit without trainable parameters has no reduction by which it is known that its backward is over: that is
        so when the gradients of all its inputs are there."""
        tensors = [tensor for tensor in tree.tensors_in(inputs, self.host.Tensor) if tensor.requires_grad]
        left = set(range(len(tensors)))
        for index, tensor in enumerate(tensors):
            self.host.on_gradient(tensor, self._weakly(State.input_gradient, self._call, left, index))

    def _weakly(self, function, *arguments):
        """A hook for a tensor, which must not keep the module alive."""
        reference = self._self

        def hook(grad):
            state = reference()
            if state is not None:
                function(state, *arguments)

        return hook

    # ---- Backward ----

    def pre_backward(self, call):
        """A gradient of an output of this call of the module is here."""
        self.iteration.begin_backward(self)
        self._open.add(call)
        if self.in_backward:
            return
        self.in_backward, self._pass = True, self.host.backward_id()
        if self.unit is not None and self.unshard_in_backward:
            self.unit.pre_backward()
            if self.comm.all_gather is not None:
                self.comm.gather()
            self._show(self._full)

    def input_gradient(self, call, left, index):
        """A gradient of an input is here, of a unit without trainable parameters."""
        left.discard(index)
        if left or not self.in_backward:
            return
        self._open.discard(call)  # the gradient of an input may be that of another call's output, which is open then
        if not self._open and self.reshards_after_backward():
            self.in_backward = False
            self.unit.reshard()
            self.hide()

    def gradients(self, grads, call):
        """The gradients of all full parameters from a call of the module are here, None for those that were not used:
        from the autograd function's backward. While another call is in the middle of its backward (an engine may go
        through two of them in turns) they wait for it."""
        self.iteration.begin_backward(self)
        self._open.discard(call)
        if not self.in_backward and self.unshard_in_backward and not self.is_full:
            raise RuntimeError(
                f"gradients have reached the parameters of {self.name} but none of its outputs, so they were computed "
                "without its full parameters: fully_shard found no tensor in what its forward returned. Return tensors, or "
                "tuples, lists, dicts or dataclasses of them"
            )
        inside = self.in_backward and self._pass != self.host.backward_id()  # a part that is computed again
        if inside or self._open:
            self._waiting.append(grads)
            return
        self.reduce(grads)

    def reduce(self, grads):
        """Reduce gradients of full parameters, and those that wait, and shard the parameters again."""
        first, self._waiting = self._waiting, []
        for earlier in first:
            grads = [added(one, grad) for one, grad in zip(earlier, grads)]
        grads = [grad if param.parameter.requires_grad else None for grad, param in zip(grads, self.params)]
        self.in_backward = False
        self._open.clear()
        if self.comm.reduces:
            self.comm.reduce(grads)
            if self.reshards_after_backward():
                self.unit.reshard()
        else:
            self._tell_settings()
            with self.host.named(f"libfsdp::post_backward {self.name}"):
                self.unit.post_backward(grads, lend=self.host.lend)
        self.reduced = True
        self.unsynced = not (self.reduce_grads and self.all_reduce_grads)
        if self.reshards_after_backward():
            self.hide()

    def reshards_after_backward(self):
        """Not when backward is recorded itself: then its graph needs the full parameters in the next one."""
        return self.reshard_after_backward and not self.iteration.recording

    def _tell_settings(self):
        wanted = self.reduce_grads, self.all_reduce_grads, self.divisor, self.reshards_after_backward()
        if self.told != wanted:
            self.unit.set_gradient_sync(self.reduce_grads)
            self.unit.set_all_reduce(self.all_reduce_grads)
            self.unit.set_gradient_divisor(self.divisor)
            self.unit.set_reshard_after_backward(self.reshards_after_backward())
            self.told = wanted

    def settle_gradients(self):
        """The library's sharded gradients hold what `.grad` holds: what is None there is zeros from now on."""
        trainable = [param for param in self.params if not param.frozen]
        empty = [param for param in trainable if not param.begin_gradient()]
        if not empty:
            return
        if len(empty) == len(trainable):
            self.unit.zero_grad()
        else:
            for param in empty:
                self.unit.zero_grad(param.library.name)
        if self.comm.reduces:  # which adds to the memory itself
            for param in empty:
                param.clear_gradient()

    def finish_backward(self):
        """The pass is over. What was not used still takes part in the reductions, as other ranks may have used it."""
        if self.unit is not None:
            if self._waiting or (self.ran_forward and not self.reduced and self.is_trainable):
                self.reduce([None] * len(self.params))
        self.in_backward = False
        self._open.clear()
        self._running = set()

    def end_backward(self):
        """After the library has finished: sharded gradients become `.grad`."""
        if self.reduced and self.reduce_grads:
            used = [True] * len(self.params) if self.comm.reduces else self.unit.used()
            for param, by_some_rank in zip(self.params, used):
                if not param.frozen and (by_some_rank or param.parameter.grad is not None):
                    param.end_gradient()
        self.reduced = self.ran_forward = False

    def forget(self):
        """After an exception."""
        self.in_backward = self.by_hand = self.ran_forward = self.reduced = self.unsynced = False
        self._waiting, self._running, self._open, self._pass = [], set(), set(), None
        self.comm.forget()
        self.hide()
