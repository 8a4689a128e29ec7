"""What the units under one root module share: the library's models, and where forward and backward begin and end.

Which module is the root shows when one of them runs forward first. Then, on all ranks alike, the library's units are
made: one model for all units over the same ranks, so that they take memory slots in turn.
"""

from ..unit import Unit
from . import discover

ATTRIBUTE = "_libfsdp_state"  # of a module that fully_shard was called on


def state_of(module):
    """The State of a module that was given to fully_shard; None."""
    return module.__dict__.get(ATTRIBUTE)


class _End:
    """What the autograd engine calls when a backward is over, and drops uncalled when an exception has ended it."""

    def __init__(self, iteration):
        self.iteration = iteration

    def __call__(self):
        iteration, self.iteration = self.iteration, None
        iteration.end_backward()

    def __del__(self):
        if self.iteration is not None:
            self.iteration.backward_failed()


class Iteration:
    """root: the State whose module runs forward first. Collective: it makes the library's units.

    states      all States under the root, in the order of the modules
    models      {key of the ranks: libfsdp.Model}
    """

    def __init__(self, root):
        self.root, self.host = root, root.host
        self.states, self.models = [], {}
        self.forward_root = None  # the State in whose forward we are, the outermost
        self._anchor = None  # of the last forward
        self.depth = 0  # how often that one has been entered
        self.broken = False  # a forward or backward ended with an exception
        self.in_backward = False  # also after one that failed, until the next forward
        self.failed = False  # that one
        self.unfinished = set()  # see Host.anchor
        self.recording = False  # of the last backward: it was recorded, and its graph holds the full parameters
        self.is_last_backward = root.is_last_backward
        self._generation = 0  # of units that were made anew, as their parameters' dtype changed
        self._find()
        for state in self.states:
            if state.params:
                self._make(state)
        for state in self.states:
            state.iteration = self

    def _find(self):
        if len(self.root.modules) > 1:
            raise RuntimeError(
                f"the outermost fully_shard must be of one module, and not of {len(self.root.modules)}: call fully_shard on the "
                "module around them as well"
            )
        top = self.root.modules[0]
        named = {}
        for path, module in top.named_modules():
            state = state_of(module)
            if state is not None and state not in self.states:
                if state.iteration is not None:
                    raise RuntimeError(
                        f"FSDP state has already been lazily initialized for {path}: its forward ran by itself before; run "
                        f"forward of {self.root.name}, the outermost module, first"
                    )
                state.name = discover.clean(path) or type(module).__name__
                self.states.append(state)
            named.setdefault(id(module), path)
        for state in self.states:
            for param in state.params:
                module, attribute = param.places[0]
                path = discover.clean(named.get(id(module), ""))
                param.name = f"{path}.{attribute}" if path else attribute
        self.root.is_root = True
        self._check()

    def _check(self):
        unfilled = [param.name for state in self.states for param in state.params if self.host.is_meta(param.parameter)]
        if unfilled:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but these are on meta device "
                f"still: {', '.join(unfilled)}. Call module.to_empty(device='cpu') and initialize them"
            )

    # ---- The library's units ----

    def model(self, ranks):
        model = self.models.get(ranks.key)
        if model is None:
            model = self.models[ranks.key] = ranks.model(self.root.name, **self.root.model_options)
        return model

    def _make(self, state):
        for param in state.params:
            if param.replaced():
                param.take(param.shown())
            param.frozen = not param.parameter.requires_grad
            param.dtype = self.host.local(param.parameter).dtype
        suffix = f" ({self._generation})" if self._generation else ""
        names = [param.name + suffix for param in state.params]
        unit = Unit(
            self.model(state.ranks),
            state.name,
            {name: param.meta() for name, param in zip(names, state.params)},
            frozen=[name for name, param in zip(names, state.params) if param.frozen],
            dim={name: param.placement.dim for name, param in zip(names, state.params)},
            strategy=state.strategy,
            precision=state.precision(),
            reshard_after_forward=state.reshard if state.reshard is not None else state is not self.root,
        )
        for param, library in zip(state.params, unit):
            param.bind(library)
        state.unit, state.backward.told = unit, None

    def _make_again(self, state):
        """The dtype of parameters has changed: `module.half()`, say."""
        self._generation += 1
        for param in state.params:
            param.unbind()
        state.unit.close()
        state.unit = None
        self._make(state)
        for each in self.states:
            each.prefetch_told = {}

    # ---- Forward ----

    def begin_forward(self, state):
        if self.forward_root is None:
            if self.broken or (self.in_backward and state is self.root):
                self._go_on()
            self.forward_root, self.depth, self._anchor = state, 1, None
            self.settle()
        elif self.forward_root is state:
            self.depth += 1

    def anchor(self):
        """What the full parameters of this forward hang on in the graph."""
        if self._anchor is None:
            self._anchor = self.host.anchor(self)
        return self._anchor

    def end_forward(self, state):
        if self.forward_root is state:
            self.depth -= 1
            if not self.depth:
                self.forward_root = None

    def forward_failed(self):
        """An exception leaves a forward."""
        if not self.in_backward:  # where it may be a part that is computed again, and need not go to its end
            self.broken = True
        self.forward_root, self.depth = None, 0

    def notice_failed_backward(self):
        """In a forward, which finds that no backward is running."""
        if self.in_backward and self.host.backward_id() == -1:
            self._go_on()

    def settle(self):
        """Between iterations programs write shards, put other values or tensors in their place, freeze and thaw. Does
        nothing in backward."""
        if self.in_backward:
            return
        for state in self.states:
            unit = state.unit
            if unit is None or state.by_hand:
                continue
            if state.is_full:  # kept so after a forward without backward: the shards may have changed
                unit.reshard()
                state.hide()
            remake = False
            for param in state.params:
                if param.replaced():
                    param.take(param.shown())
                if not param.settle():
                    remake = True
                elif param.frozen == param.parameter.requires_grad:
                    self._freeze(state, param)
            if remake:
                self._make_again(state)
        for state in self.states:
            self._tell_prefetch(state)

    def _freeze(self, state, param):
        param.frozen = not param.parameter.requires_grad
        state.unit.set_frozen(param.library.name, param.frozen)
        param.forget_gradient()

    def _tell_prefetch(self, state):
        for phase, ahead in state.prefetch.items():
            if ahead is None or state.unit is None:
                continue
            units = [other.unit for other in ahead if other.unit is not None]
            if state.prefetch_told.get(phase) != units:
                state.unit.set_prefetch(phase, units)
                state.prefetch_told[phase] = units

    # ---- Backward ----

    def begin_backward(self):
        """The first gradient of this pass is here."""
        if self.failed:
            raise RuntimeError("the backward before has failed, so this one's graph can't be used any more: run forward again")
        if self.in_backward:
            return
        self.host.at_end_of_backward(_End(self))
        self._begin_backward(self.host.records_backward())

    def _begin_backward(self, recording):
        self.in_backward, self.recording = True, recording
        self.settle_gradients()
        for each in self.states:
            for param in each.params:
                if each.unit is not None and not param.frozen:
                    param.own_gradient()

    def settle_gradients(self):
        """The library's sharded gradients hold what `.grad` holds, of all parameters."""
        for state in self.states:
            if state.unit is not None:
                state.backward.settle_gradients()

    def finalize(self):
        """Outside of a backward: reduce what backwards without sync have accumulated, and shard everything."""
        last, self.is_last_backward = self.is_last_backward, True
        try:
            self._begin_backward(False)
            if any(state.backward.unsynced for state in self.states):
                for state in self.states:
                    state.backward.ran_forward = True  # so that all are reduced
            self.finish()
        finally:
            self.is_last_backward = last

    def end_backward(self):
        """The engine says so. Not all ranks may have come to the end, so where it is not known that this one did, nothing
        is reduced that it has no gradients for: that would end the others' backward without its part."""
        unfinished, self.unfinished = self.unfinished, set()
        if not unfinished:
            self.finish()
        elif any(state.backward.has_gradients for state in self.states):
            self.backward_failed()
        else:  # it may be one of which only the gradients of inputs were asked
            self.in_backward = False
            for state in self.states:
                state.leave_backward()

    def finish(self):
        """The backward is over."""
        complete = False
        try:
            for state in self.states:
                state.finish_backward()
            if self.is_last_backward and not self.recording:
                for model in self.models.values():
                    model.finish_backward()
                for state in self.states:
                    if state.unit is not None:
                        state.hide()
            elif self.recording:
                for state in self.states:
                    state.show_shards()
            for state in self.states:
                state.backward.end()
            complete = True
        finally:
            self.in_backward = not complete  # then the next forward notices
            self.forward_root, self.depth = None, 0

    # ---- After an exception ----

    def backward_failed(self):
        """What programs do before the next forward, they do to the shards: `zero_grad`, say."""
        if self.in_backward:
            self.failed = True
            for state in self.states:
                state.show_shards()

    def _go_on(self):
        """After a forward or backward that failed: what earlier backwards have put into `.grad` stays. A backward that
        failed has added to it what it had reduced by then, as it does to any parameter whose turn it was."""
        if any(state.backward.unsynced for state in self.states):
            raise RuntimeError(
                f"a {'backward' if self.in_backward else 'forward'} has failed while gradients were being accumulated without "
                f"sync, which can't be kept: call reset_iter_state() of {self.root.name}, the outermost module, and begin "
                "the accumulation anew"
            )
        kept = [
            (param, self.host.local(param.parameter.grad))
            for state in self.states
            for param in state.params
            if not param.frozen and param.parameter.grad is not None
        ]
        with self.host.no_grad():
            kept = [(param, grad.clone()) for param, grad in kept]
        self.reset()
        for param, grad in kept:
            param.parameter.grad = self.host.gradient(param.parameter, grad)

    def reset(self):
        """As between iterations again, on all ranks alike: units sharded, gradients dropped."""
        for model in self.models.values():
            model.reset()
        for state in self.states:
            state.forget()
            for param in state.params:
                if not param.frozen:
                    param.parameter.grad = None
        self.forward_root, self.depth, self.unfinished = None, 0, set()
        self.broken = self.in_backward = self.failed = self.recording = False
