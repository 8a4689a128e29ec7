"""The backward of one unit: how it is known where it begins and that all its gradients are there, and their reduction.

It begins with the first gradient of an output of its module, which is when the unit is full again. Its end is the
backward of the autograd function that its full parameters come out of, which has their gradients. Calls of one module may
be gone through in turns, or a part of them in a pass inside another, so gradients may have to wait for others.
"""

import weakref

from . import tree
from .comm import added


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
            ctx.use.unit().backward.gradients(grads, ctx.use.call)
            return None, None

    return FullParameters


class Use:
    """unit: a weak reference to a State, which a graph must not keep alive. call: stands for one call of its module.
    Adapters may keep something of their own in it."""

    def __init__(self, unit, call):
        self.unit, self.call = unit, call


class Backward:
    """Of one State."""

    def __init__(self, state):
        self._state, self._host = state, state.host
        self.running = False  # from the first gradient of an output to the reduction
        self.ran_forward = self.reduced = False  # since the last backward ended; in this one
        self.unsynced = False  # the library has gradients that no `.grad` shows yet
        self.told = None  # of the settings, what the unit knows
        self._pass = None  # the engine's backward pass of `running`
        self._waiting = []  # gradients from passes inside that one
        self._open = set()  # the calls whose backward has begun, and is not known to be over
        self._self = weakref.ref(self)

    # ---- In forward: what will tell where it is ----

    def watch_outputs(self, output, call):
        if self._host.grad_enabled():
            for tensor in tree.tensors_in(output, self._host.Tensor):
                if tensor.requires_grad:
                    self._host.on_gradient(tensor, self._weakly(Backward.begin, call))
        return output

    def watch_inputs(self, inputs, call):
        """A unit without trainable parameters has no reduction by which it is known that its backward is over: that is
        so when the gradients of all its inputs are there."""
        tensors = [tensor for tensor in tree.tensors_in(inputs, self._host.Tensor) if tensor.requires_grad]
        left = set(range(len(tensors)))
        for index, tensor in enumerate(tensors):
            self._host.on_gradient(tensor, self._weakly(Backward._input_gradient, call, left, index))

    def _weakly(self, function, *arguments):
        """A hook for a tensor, which must not keep the module alive."""
        reference = self._self

        def hook(grad):
            backward = reference()
            if backward is not None:
                function(backward, *arguments)

        return hook

    # ---- Its course ----

    def begin(self, call):
        """A gradient of an output of this call of the module is here."""
        state = self._state
        state.iteration.begin_backward()
        self._open.add(call)
        if self.running:
            return
        self.running, self._pass = True, self._host.backward_id()
        if state.unit is not None and state.unshard_in_backward:
            state.unit.pre_backward()
            state.show_again()

    def _input_gradient(self, call, left, index):
        """A gradient of an input is here, of a unit without trainable parameters."""
        left.discard(index)
        if left or not self.running:
            return
        self._open.discard(call)  # the gradient of an input may be that of another call's output, which is open then
        if not self._open and self.reshards():
            self.running = False
            self._state.unit.reshard()
            self._state.hide()

    def gradients(self, grads, call):
        """The gradients of all full parameters from a call of the module are here, None for those that were not used:
        from the autograd function's backward. While another call is in the middle of its backward (an engine may go
        through two of them in turns) they wait for it."""
        state = self._state
        state.iteration.begin_backward()
        self._open.discard(call)
        if not self.running and state.unshard_in_backward and not state.is_full:
            raise RuntimeError(
                f"gradients have reached the parameters of {state.name} but none of its outputs, so they were computed "
                "without its full parameters: fully_shard found no tensor in what its forward returned. Return tensors, or "
                "tuples, lists, dicts or dataclasses of them"
            )
        inside = self.running and self._pass != self._host.backward_id()  # a part that is computed again
        if inside or self._open:
            self._waiting.append(grads)
            return
        self._reduce(grads)

    def _reduce(self, grads):
        """Reduce gradients of full parameters, and those that wait, and shard the parameters again."""
        state = self._state
        first, self._waiting = self._waiting, []
        for earlier in first:
            grads = [added(one, grad) for one, grad in zip(earlier, grads)]
        grads = [grad if param.parameter.requires_grad else None for grad, param in zip(grads, state.params)]
        self.running = False
        self._open.clear()
        if state.comm.reduces:
            state.comm.reduce(grads)
            if self.reshards():
                state.unit.reshard()
        else:
            self._tell_settings()
            with self._host.named(f"libfsdp::post_backward {state.name}"):
                state.unit.post_backward(grads, lend=self._host.lend)
        self.reduced = True
        self.unsynced = not (state.reduce_grads and state.all_reduce_grads)
        if self.reshards():
            state.hide()

    def reshards(self):
        """Not when backward is recorded itself: then its graph needs the full parameters in the next one."""
        return self._state.reshard_after_backward and not self._state.iteration.recording

    def _tell_settings(self):
        state = self._state
        wanted = state.reduce_grads, state.all_reduce_grads, state.divisor, self.reshards()
        if self.told != wanted:
            state.unit.set_gradient_sync(state.reduce_grads)
            state.unit.set_all_reduce(state.all_reduce_grads)
            state.unit.set_gradient_divisor(state.divisor)
            state.unit.set_reshard_after_backward(self.reshards())
            self.told = wanted

    # ---- The whole pass, of all units ----

    def settle_gradients(self):
        """Before it: the library's sharded gradients hold what `.grad` holds: what is None there is zeros from now
        on."""
        unit, comm = self._state.unit, self._state.comm
        trainable = [param for param in self._state.params if not param.frozen]
        empty = [param for param in trainable if not param.begin_gradient()]
        if not empty:
            return
        if len(empty) == len(trainable):
            unit.zero_grad()
        else:
            for param in empty:
                unit.zero_grad(param.library.name)
        if comm.reduces:  # which adds to the memory itself
            for param in empty:
                param.clear_gradient()

    def finish(self):
        """The pass is over. What was not used still takes part in the reductions, as other ranks may have used it."""
        state = self._state
        if state.unit is not None:
            if self._waiting or (self.ran_forward and not self.reduced and state.is_trainable):
                self._reduce([None] * len(state.params))
        self.running = False
        self._open.clear()

    @property
    def has_gradients(self):
        """In the pass that is running."""
        return self.reduced or bool(self._waiting)

    def leave(self):
        """A pass without any."""
        self.running, self._pass = False, None
        self._open.clear()

    def end(self):
        """After the library has finished: sharded gradients become `.grad`."""
        state = self._state
        if self.reduced and state.reduce_grads:
            used = [True] * len(state.params) if state.comm.reduces else state.unit.used()
            for param, by_some_rank in zip(state.params, used):
                if not param.frozen and (by_some_rank or param.parameter.grad is not None):
                    param.end_gradient()
        self.reduced = self.ran_forward = False

    def forget(self):
        """After an exception."""
        self.running = self.ran_forward = self.reduced = self.unsynced = False
        self._waiting, self._open, self._pass = [], set(), None
