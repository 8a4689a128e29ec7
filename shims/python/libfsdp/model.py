"""Fully sharded parameters: a Model over a group, and its Units.

A unit is one all-gather group of parameters. Between uses each rank holds only its rows of each parameter ("shard"),
which its optimizer updates. Around forward and backward the whole parameters ("full") are there, and afterwards the
gradients' rows, reduced over the ranks ("grad"). A host calls, for every unit and in the same order on every rank:

    unit.pre_forward()     full parameters          unit.post_forward()        sharded again
    unit.pre_backward()    full again               unit.post_backward(grads)  gradients to the shards

then `model.finish_backward()`, then its optimizer, then `model.zero_grad()`. Each call does nothing when there is
nothing to do. All calls for one model come from one thread at a time. `libfsdp.numpy` is a whole host to read.
"""

import contextlib
import ctypes
from collections.abc import Iterable, Mapping
from ctypes import POINTER, byref, c_double, c_int32, c_void_p
from dataclasses import dataclass

from . import abi
from .borrow import borrow
from .errors import InvalidArgument, check
from .group import Group
from .handle import Handle, real, text
from .tensor import Tensor
from .work import start

lib = abi.lib
_STATES = {
    abi.FSDP_UNIT_SHARDED: "sharded",
    abi.FSDP_UNIT_UNSHARDING: "unsharding",
    abi.FSDP_UNIT_UNSHARDED: "unsharded",
}


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of tensor data, from `Model.memory()`."""

    shards: int  # this rank's parameter shards
    gradients: int  # this rank's sharded gradients and accumulation buffers
    unsharded: int  # full parameters: this rank's own, or shared and counted once a host
    unsharded_peak: int  # the most that there was of them
    host_parameters: int  # all ranks' shards and full parameters, as held by the whole host
    total_parameters: int  # the model's parameters, were they all there at once
    reduced_bytes: int  # gradient bytes given to reductions by this rank so far
    published_bytes: int  # shard bytes written by this rank's unshards so far


class Model:
    """The root of a sharded model: the group that parameters are sharded over, and the state of an iteration.

    group                  a Group; not collective
    name                   for messages
    reshard_after_forward  False: parameters stay full from forward to backward, for more memory and less traffic.
                           Where no backward follows, call `Unit.reshard`: else the next forward uses the same values
    private_unshard        True: full parameters in each rank's own memory, filled by all-gather. False: one copy a
                           host, in shared memory, where the transport can
    gradient_divisor       gradients are summed over the ranks and divided by this; None: the group's size
    """

    def __init__(
        self, group, name=None, *, reshard_after_forward=True, private_unshard=False, gradient_divisor=None
    ):
        if not isinstance(group, Group):
            raise TypeError(f"group: {type(group).__name__} is not a libfsdp.Group; Group.single() is one of one rank")
        options = abi.fsdp_model_options()
        options.name = text(name, "name")
        options.no_reshard_after_forward = not reshard_after_forward
        options.private_unshard = bool(private_unshard)
        if gradient_divisor is not None:
            gradient_divisor = real(gradient_divisor, "gradient_divisor")
            if not gradient_divisor > 0:
                raise InvalidArgument(f"gradient_divisor: {gradient_divisor!r}; give a positive number")
            options.gradient_divisor = gradient_divisor
        pointer = c_void_p()
        check(lib.fsdp_model_create(group._handle, options, byref(pointer)))
        self._owned = Handle(pointer, lib.fsdp_model_release)
        self.group = group
        self.name = name or "model"
        self.reshard_after_forward = bool(reshard_after_forward)
        self._sync = True

    @property
    def _handle(self):
        handle = self._owned
        if handle is None:
            raise InvalidArgument("the model is closed")
        return handle

    def __reduce__(self):
        raise TypeError("a libfsdp.Model can't be copied or pickled: make another one of the same group")

    def unit(self, name, params, *, frozen=()):
        """Make a Unit of this model: `Unit(self, name, params, frozen=frozen)`. Collective."""
        return Unit(self, name, params, frozen=frozen)

    def finish_backward(self):
        """Backward is over: wait for reductions under way, reshard every unit. The optimizer's turn comes next."""
        check(lib.fsdp_model_finish_backward(self._handle))

    def zero_grad(self):
        """Sharded gradients, and what was accumulated without sync, to zero."""
        check(lib.fsdp_model_zero_grad(self._handle))

    def reset(self):
        """After an exception in the middle of forward or backward: every unit sharded, gradients dropped. Collective."""
        check(lib.fsdp_model_reset(self._handle))

    def set_gradient_sync(self, sync):
        """False: following `post_backward` calls only accumulate on this rank; True: they reduce, what was accumulated
        included."""
        check(lib.fsdp_model_set_gradient_sync(self._handle, bool(sync)))
        self._sync = bool(sync)

    @contextlib.contextmanager
    def no_sync(self):
        """A block whose backward passes accumulate gradients on this rank and send nothing. Afterwards it is as before."""
        before = self._sync
        self.set_gradient_sync(False)
        try:
            yield self
        finally:
            self.set_gradient_sync(before)

    def grad_norm(self, p=2.0):
        """The p-norm of all sharded gradients over all ranks, as one vector: p = 1, 2, any other number above 0, or
        `math.inf`. Summed in float64; the same on every rank, infinite or NaN where any gradient is. Collective."""
        norm = c_double()
        check(lib.fsdp_model_grad_norm(self._handle, real(p, "p"), byref(norm)))
        return norm.value

    def clip_grad_norm(self, max_norm, p=2.0, error_if_nonfinite=False):
        """Scale all sharded gradients by min(1, max_norm / (norm + 1e-6)), so that their p-norm is at most `max_norm`.

        Returns the norm before. error_if_nonfinite=True: a norm that is infinite or NaN raises InvalidState on every
        rank and changes no gradient. Collective; with a ShardedGradScaler, unscale first.
        """
        norm = c_double()
        check(
            lib.fsdp_model_clip_grad_norm(
                self._handle, real(max_norm, "max_norm"), real(p, "p"), bool(error_if_nonfinite), byref(norm)
            )
        )
        return norm.value

    def memory(self):
        """A MemoryInfo of this model."""
        info = abi.fsdp_memory_info()
        check(lib.fsdp_model_memory(self._handle, byref(info)))
        return MemoryInfo(**{name: getattr(info, name) for name, _ in abi.fsdp_memory_info._fields_[1:]})

    def close(self):
        """Give the model back; a second close does nothing. Its units keep what they need."""
        self._owned = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __repr__(self):
        return f"<libfsdp.Model {self.name!r}>"


class Param:
    """One parameter of a unit. Its tensors keep their addresses for the unit's life.

    shard  this rank's rows, in the parameter's dtype, private memory; the host's to update between iterations
    full   the whole parameter; its content is defined while the unit is unsharded; private to this rank
    grad   this rank's rows of the gradient; None for a frozen parameter
    """

    def __init__(self, unit, index, name, frozen):
        self.index, self.name, self.frozen = index, name, frozen
        self.shard = unit._tensor(lib.fsdp_unit_param_shard, index)
        self.full = unit._tensor(lib.fsdp_unit_param_full, index)
        self.grad = None if frozen else unit._tensor(lib.fsdp_unit_param_grad, index)

    def __reduce__(self):
        raise TypeError(
            "a libfsdp.Param can't be copied or pickled: it belongs to its unit; take .shard.numpy() or .full.numpy()"
        )

    @property
    def shape(self):
        return self.full.shape

    @property
    def dtype(self):
        return self.full.dtype

    def __repr__(self):
        frozen = ", frozen" if self.frozen else ""
        return f"<libfsdp.Param {self.name!r} {self.dtype}{self.shape}, here {self.shard.shape}{frozen}>"


def frozen_names(frozen, names):
    """Which of `names` an argument `frozen` means: a set."""
    if isinstance(frozen, bool) or frozen is None:
        return set(names if frozen else ())
    if isinstance(frozen, str):
        frozen = [frozen]
    try:
        chosen = set(frozen)
    except TypeError:
        raise TypeError(f"frozen: {frozen!r} is neither a name, nor names, nor True") from None
    for unknown in sorted(chosen.difference(names), key=str):
        raise InvalidArgument(f"frozen: {unknown!r} is not one of the parameters: {', '.join(map(str, names))}")
    return chosen


class Unit:
    """Parameters that become full and sharded together.

    model   a Model
    name    for messages
    params  {name: array}, whole values, equal on all ranks: each rank copies its own rows. Names are unique in the
            model; floats, at least one dimension. The arrays are not needed afterwards.
    frozen  the names (or one name) of those that get no gradient (no memory and no traffic for it); True: all

    Collective: all ranks give the same names, shapes and dtypes (Mismatch otherwise). It begins sharded.

    `unit[name]` or `unit.params[index]` is a Param. The hooks and `unshard` wait for the other ranks inside the library:
    Ctrl-C is answered when they return, at the latest after the group's timeout.
    """

    def __init__(self, model, name, params, *, frozen=()):
        if not isinstance(model, Model):
            raise TypeError(f"model: {type(model).__name__} is not a libfsdp.Model")
        if not isinstance(name, str):
            raise TypeError(f"name: {name!r} is not a string")
        names = list(params)
        frozen = frozen_names(frozen, names)
        tensors = [borrow(params[key], f"params[{key!r}]") for key in names]
        array = (abi.fsdp_param * len(names))()
        for entry, key, tensor in zip(array, names, tensors):
            entry.struct_size = ctypes.sizeof(abi.fsdp_param)
            entry.name = text(key, "params")
            entry.full = ctypes.pointer(tensor)
            entry.frozen = key in frozen
        pointer = c_void_p()
        check(lib.fsdp_unit_create(model._handle, text(name, "name"), array, len(names), byref(pointer)))
        self._owned = Handle(pointer, lib.fsdp_unit_release)
        self.model, self.name = model, name
        self.params = [Param(self, index, key, key in frozen) for index, key in enumerate(names)]
        self._by_name = {param.name: param for param in self.params}

    @property
    def _handle(self):
        handle = self._owned
        if handle is None:
            raise InvalidArgument("the unit is closed")
        return handle

    def __reduce__(self):
        raise TypeError("a libfsdp.Unit can't be copied or pickled: make another one of the same values")

    def _tensor(self, function, index):
        handle = self._handle

        def once_more():
            managed = POINTER(abi.DLManagedTensorVersioned)()
            check(function(handle, index, byref(managed)))
            return managed

        return Tensor(once_more(), once_more)

    def __getitem__(self, name):
        return self._by_name[name]

    def __iter__(self):
        return iter(self.params)

    def __len__(self):
        return len(self.params)

    def pre_forward(self):
        """Before the unit's forward: its parameters become full."""
        check(lib.fsdp_unit_pre_forward(self._handle))

    def post_forward(self):
        """After it: sharded again, where the model reshards after forward."""
        check(lib.fsdp_unit_post_forward(self._handle))

    def pre_backward(self):
        """Before its backward: full again."""
        check(lib.fsdp_unit_pre_backward(self._handle))

    def post_backward(self, grads, *, async_op=False):
        """After its backward: reduce the gradients to the shards' `grad`, and reshard.

        grads: {parameter's name: array}, or an iterable with one entry for each parameter; this rank's gradient of the
        full parameter, in its shape and dtype. What is missing or None (frozen, or unused on this rank) counts as zeros.
        Summed over the ranks, divided, and added to what `grad` holds. With gradient sync off, only accumulated here.
        async_op=True returns a Work; `Model.finish_backward` waits for it.
        """
        if isinstance(grads, Mapping):
            for unknown in set(grads) - self._by_name.keys():
                raise InvalidArgument(f"grads: {unknown!r} is not a parameter of unit {self.name!r}")
            grads = [grads.get(param.name) for param in self.params]
        elif not isinstance(grads, Iterable) or hasattr(grads, "__array__") or hasattr(grads, "__dlpack__"):
            raise TypeError(
                f"grads: {'None' if grads is None else 'a ' + type(grads).__name__} is neither a dict of arrays nor a list "
                "of them; give {} when there are none"
            )
        else:
            grads = list(grads)
        if len(grads) != len(self.params):
            raise InvalidArgument(f"grads: {len(grads)} entries for {len(self.params)} parameters")
        keep = _Gradients(grads, self.params)
        return self._do(lib.fsdp_unit_post_backward, (keep, len(self.params)), async_op)

    def unshard(self, *, async_op=False):
        """Make the parameters full, outside the hooks. Collective. Does nothing when they are."""
        return self._do(lib.fsdp_unit_unshard, (), async_op)

    def _do(self, function, args, async_op):
        if async_op:
            return start(function, self._handle, args, None, self.model.group)
        check(function(self._handle, *args, None))
        return None

    def reshard(self):
        """Sharded again. Edits of the full parameters are dropped."""
        check(lib.fsdp_unit_reshard(self._handle))

    def shard_changed(self):
        """Say that a shard's values changed at a time other than between `Model.finish_backward` and the next
        `pre_forward`: the next unshard publishes them."""
        check(lib.fsdp_unit_shard_changed(self._handle))

    @property
    def state(self):
        """ "sharded", "unsharding" or "unsharded"."""
        state = c_int32()
        check(lib.fsdp_unit_query_state(self._handle, byref(state)))
        return _STATES.get(state.value, f"state {state.value}")

    def close(self):
        """Give the unit back; a second close does nothing. Its tensors stay valid for as long as something holds them."""
        self._owned = None
        self.params, self._by_name = [], {}

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __repr__(self):
        return f"<libfsdp.Unit {self.name!r} of {len(self.params)} parameters>"


class _Gradients:
    """Passes as an array of `const DLTensor *`, and keeps what its pointers point to."""

    def __init__(self, grads, params):
        self._tensors = [
            None if grad is None else borrow(grad, f"grads[{param.name!r}]") for grad, param in zip(grads, params)
        ]
        self._array = (POINTER(abi.DLTensor) * len(params))()
        for index, tensor in enumerate(self._tensors):
            if tensor is not None:
                self._array[index] = ctypes.pointer(tensor)
        self._as_parameter_ = ctypes.cast(self._array, POINTER(POINTER(abi.DLTensor)))
