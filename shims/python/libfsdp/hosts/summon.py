"""summon_full_params: a block in which modules show whole parameters, for programs to read and write.

Each rank has copies of its own, in the parameters' own dtype, made one parameter at a time; they are no part of what
forward uses. With writeback each rank's part of them goes into its shard afterwards.
"""

import contextlib

from ..tensor import shard_extent


@contextlib.contextmanager
def summoned(wrappers, states, writeback, rank0_only, with_grads):
    """The block. wrappers: to be told (`_summoned`); states: theirs."""
    for wrapper, state in zip(wrappers, states):
        if wrapper._summoned:
            raise AssertionError("Cannot manually unshard parameters when already unsharding parameters")
        state.begin()
        if state.iteration.forward_root is not None or state.iteration.in_backward:
            raise AssertionError("Cannot manually unshard parameters during forward/backward")
    shown = []
    try:
        for wrapper, state in zip(wrappers, states):
            state.iteration.settle()
            wrapper._summoned = True
            shown.append(_Summoned(state, show=not rank0_only or state.ranks.is_first, with_grads=with_grads))
        yield
    finally:
        for summoned_state in reversed(shown):
            summoned_state.end(writeback)
        for wrapper in wrappers:
            wrapper._summoned = False


class _Summoned:
    """One unit. show: False where this rank only takes part in the gathers."""

    def __init__(self, state, show, with_grads):
        self.state, self.show, self.grads = state, show, {}
        state.by_hand = True  # what the modules show is no parameter that a program has put there
        for param in state.params:
            whole = state.host.adopt(state.unit.gather_param(param.library.name))
            if show:
                param.show(state.host.whole_parameter(whole, param.placement, param.parameter.requires_grad))
        if with_grads:
            self._gather_gradients()

    def _gather_gradients(self):
        """By a sum in which each rank has its own part and zeros: whichever rank lacks a `.grad`, all take part."""
        state, host = self.state, self.state.host
        for param in state.params:
            if param.frozen:
                continue
            with host.no_grad():
                grad = param.parameter.grad
                like = param.shard if grad is None else host.local(grad)
                whole = host.Buffers.allocate((*param.shape,), dtype=_gradient_dtype(param), device=like.device).zero_()
                has = host.Buffers.allocate((1,), dtype=whole.dtype, device=like.device).zero_()
                if grad is not None:
                    _part(state, param, whole).copy_(host.local(grad))
                    has.add_(1)
                for tensor in (whole, has):
                    if state.ranks.shard_group is not None:
                        host.all_reduce(tensor, state.ranks.shard_group)
                if has.item() and self.show:
                    self.grads[param] = param.shown().grad = host.whole_gradient(whole, param.placement)

    def end(self, writeback):
        """Write back, and show the shards again."""
        state, host = self.state, self.state.host
        if writeback and self.show:
            with host.no_grad():
                for param in state.params:
                    whole = host.local(param.shown())
                    if tuple(whole.shape) != param.shape:
                        state.hide()
                        raise ValueError(
                            f"parameter {param.name!r} has shape {tuple(whole.shape)} at the end of summon_full_params "
                            f"and had {param.shape}: only values can change there"
                        )
                    host.local(param.parameter).copy_(_part(state, param, whole))
                    grad = param.shown().grad
                    if param in self.grads and grad is not None and param.parameter.grad is not None:
                        host.local(param.parameter.grad).copy_(_part(state, param, host.local(grad)))
        state.hide()
        if state.unit is not None and writeback:
            state.unit.shard_changed()


def _part(state, param, whole):
    """This rank's part of a whole tensor."""
    dim = param.placement.dim
    start, length = shard_extent(param.shape[dim], state.ranks.shard_rank, state.ranks.shard_size)
    return whole.narrow(dim, start, length)


def _gradient_dtype(param):
    gradient = param._gradient if param._gradient is not None else param.host.adopt(param.library.grad)
    return gradient.dtype
