"""Loss scaling for sharded gradients: all ranks find the same infinities, skip the same steps and keep the same scale.

    scaler = ShardedGradScaler(group)
    for batch in batches:
        loss = scaler.scale(compute(batch))     # and backward from it
        model.finish_backward()
        scaler.unscale(model)
        model.clip_grad_norm(1.0)
        if scaler.should_step():
            optimizer.step()
        scaler.update()

The rules are those of torch's GradScaler, with one optimizer for a scaler. Every rank makes the same calls.
"""

import ctypes
from ctypes import POINTER, byref, c_int32, c_void_p
from dataclasses import dataclass

from . import abi
from .borrow import borrow
from .errors import InvalidArgument, check
from .group import Group
from .handle import Handle, integer, real
from .model import Model

lib = abi.lib


@dataclass(frozen=True)
class ScalerInfo:
    """How a scaler is, from `ShardedGradScaler.info()`. The same on every rank."""

    scale: float  # what to multiply the loss by; 1.0 when disabled
    growth_tracker: int  # updates without an infinity since the scale last changed
    found_inf: bool  # the last unscale found an infinity or NaN, on some rank
    steps: int  # how often should_step said yes
    skipped: int  # how often it said no


class ShardedGradScaler:
    """Keeps small gradients of low precision from vanishing: multiplies the loss, and divides the gradients again.

    group            the ranks that skip steps together; not collective
    init_scale       a power of two is exact
    growth_factor    above 1: what the scale is multiplied by after `growth_interval` steps without an infinity
    backoff_factor   below 1: what it is multiplied by after a step that was skipped
    growth_interval  in steps
    enabled          False: the scale is 1, `unscale` and `update` do nothing, `should_step` says yes
    """

    def __init__(
        self, group, init_scale=65536.0, *, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True
    ):
        if not isinstance(group, Group):
            raise TypeError(f"group: {type(group).__name__} is not a libfsdp.Group; Group.single() is one of one rank")
        options = abi.fsdp_scaler_options()
        for name, value in (
            ("init_scale", init_scale),
            ("growth_factor", growth_factor),
            ("backoff_factor", backoff_factor),
        ):
            setattr(options, name, real(value, name))
            if value == 0:  # to the C side, the default
                raise InvalidArgument(f"{name}: {value!r}; give a positive number")
        options.growth_interval = integer(growth_interval, "growth_interval")
        if options.growth_interval == 0:
            raise InvalidArgument("growth_interval: 0; give at least 1")
        options.disabled = not enabled
        pointer = c_void_p()
        check(lib.fsdp_scaler_create(group._handle, options, byref(pointer)))
        self._owned = Handle(pointer, lib.fsdp_scaler_release)
        self.enabled = bool(enabled)

    @property
    def _handle(self):
        handle = self._owned
        if handle is None:
            raise InvalidArgument("the scaler is closed")
        return handle

    def __reduce__(self):
        raise TypeError("a libfsdp.ShardedGradScaler can't be copied or pickled: store its state_dict()")

    def info(self):
        """A ScalerInfo."""
        info = abi.fsdp_scaler_info()
        check(lib.fsdp_scaler_query(self._handle, byref(info)))
        return ScalerInfo(info.scale, info.growth_tracker, bool(info.found_inf), info.steps, info.skipped)

    def get_scale(self):
        """The scale as it is now; 1.0 when disabled."""
        return self.info().scale

    def scale(self, loss):
        """`loss` times the scale: a number, or anything that multiplies with one."""
        return loss * self.get_scale()

    def unscale(self, gradients):
        """Divide gradients by the scale, in place, and find out whether any rank's hold an infinity or NaN.

        gradients: a Model (its sharded gradients), or a sequence of writable arrays, None among them for none. Once for
        each `update`; ranks whose gradients are empty call it too. Collective.
        """
        if isinstance(gradients, Model):
            check(lib.fsdp_scaler_unscale(self._handle, gradients._handle))
            return
        tensors = [
            None if gradient is None else borrow(gradient, f"gradients[{index}]", True)
            for index, gradient in enumerate(gradients)
        ]
        array = (POINTER(abi.DLTensor) * max(1, len(tensors)))()
        for index, tensor in enumerate(tensors):
            if tensor is not None:
                array[index] = ctypes.pointer(tensor)
        check(lib.fsdp_scaler_unscale_tensors(self._handle, array, len(tensors)))

    def should_step(self):
        """Whether the optimizer may step, by what `unscale` found: the same on every rank. Once for each `update`."""
        step = c_int32()
        check(lib.fsdp_scaler_step(self._handle, byref(step)))
        return bool(step.value)

    def step(self, optimizer, *args, **kwargs):
        """`optimizer.step(*args, **kwargs)`, and its result, where `should_step()`; else None."""
        return optimizer.step(*args, **kwargs) if self.should_step() else None

    def update(self):
        """End of the step: a lower scale after an infinity, a higher one after `growth_interval` steps without."""
        check(lib.fsdp_scaler_update(self._handle))

    def state_dict(self):
        """What a checkpoint keeps: a dict of numbers, the same on every rank. Not between `unscale` and `update`."""
        state = abi.fsdp_scaler_state()
        check(lib.fsdp_scaler_save(self._handle, byref(state)))
        return {name: getattr(state, name) for name, _ in abi.fsdp_scaler_state._fields_[1:]}

    def load_state_dict(self, state):
        """Take over what `state_dict` gave, on every rank alike."""
        names = [name for name, _ in abi.fsdp_scaler_state._fields_[1:]]
        missing = [name for name in names if name not in state]
        if missing:
            raise InvalidArgument(f"state: {missing[0]!r} is missing; give what state_dict gave")
        loaded = abi.fsdp_scaler_state()
        for name, kind in abi.fsdp_scaler_state._fields_[1:]:
            if kind is abi.c_double:
                setattr(loaded, name, real(state[name], f"state[{name!r}]"))
            else:
                setattr(loaded, name, integer(state[name], f"state[{name!r}]", 8 * ctypes.sizeof(kind)))
        check(lib.fsdp_scaler_load(self._handle, byref(loaded)))

    def close(self):
        """Give the scaler back; a second close does nothing."""
        self._owned = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __repr__(self):
        return "<libfsdp.ShardedGradScaler>"
