"""The state of one unit: what fully_shard leaves in its modules, when they show full parameters, and the hooks around their
forward. backward.py has the rest of its life."""

import sys
import weakref

from ..options import Precision
from . import tree
from .backward import Backward, Use
from .comm import Comm
from .iteration import Iteration


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
        self.prefetch_told = {}  # of these, what the library knows: lists of units
        # Where it is.
        self.backward = Backward(self)
        self.by_hand = False  # unshard() was called, and nothing has resharded since
        self._full = None  # the tensors of the last graph, which modules show again for its backward
        self._running = set()  # of several modules, those that forward has yet to reach
        self._call = None  # stands for the last call of the module
        self._self = weakref.ref(self)
        self._raising = None  # the exception that was being handled when forward began

    # ---- Full and sharded ----

    def twins(self, frozen):
        """Tensors on the memory of the full parameters that are frozen, or that are not."""
        return [self.host.twin(param.full) for param in self.params if param.frozen == frozen]

    def show(self):
        """The modules show full parameters, which are part of the graph that is being recorded."""
        if self.comm.all_gather is not None:
            self.comm.gather()
        if self.host.grad_enabled() and self.is_trainable:
            trainable = self.host.gather(self.iteration.anchor(), Use(self._self, self._call))
        else:
            trainable = self.twins(frozen=False)
        trainable, frozen = iter(trainable), iter(self.twins(frozen=True))
        full = [
            self.host.present(next(frozen if param.frozen else trainable), param.placement) for param in self.params
        ]
        if self.host.grad_enabled():  # else an earlier graph may be waiting for its backward
            self._full = full
        self._show(full)

    def show_again(self):
        """In backward, what forward used."""
        if self.comm.all_gather is not None:
            self.comm.gather()
        self._show(self._full)

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
        if self.backward.running:  # forward once more, for backward: what it needs is here
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
                self.backward.watch_inputs((args, kwargs), self._call)
        return args, kwargs

    def after_forward(self, module, output):
        """The forward hook, which is called after an exception too."""
        if sys.exc_info()[1] is not self._raising:
            self.forward_failed()
            return None
        return self.post_forward(module, output)

    def post_forward(self, module, output):
        if self.backward.running or self.iteration is None:
            return self._cast_output(output)
        if self._running:
            return self.backward.watch_outputs(output, self._call)
        self.backward.ran_forward = self.host.grad_enabled()
        if self.unit is not None:
            self.unit.post_forward()
            if self.reshards_after_forward():
                self.hide()
        output = self.backward.watch_outputs(output, self._call)
        self.iteration.end_forward(self)
        return self._cast_output(output)

    def forward_failed(self):
        """An exception leaves the module."""
        if self.iteration is not None:
            self.iteration.forward_failed()
            if not self.backward.running:
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

    # ---- The end of an iteration ----

    def finish_backward(self):
        self.backward.finish()
        self._running = set()

    def leave_backward(self):
        """One that has reduced nothing."""
        self.backward.leave()
        if self.unit is not None and self.reshard_after_backward:
            self.unit.reshard()
            self.hide()

    def forget(self):
        """After an exception."""
        self._running = set()
        self.backward.forget()
        self.comm.forget()
        self.hide()
