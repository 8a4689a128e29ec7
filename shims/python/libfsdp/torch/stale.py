"""Optimizers that were built before fully_shard: they hold parameters that modules don't have any more, so their steps
would leave the model as it is, without a word. Before an optimizer's first step it is looked through, and again when it
or the number of sharded parameters has grown.
"""

import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..hosts.fully_shard import REPLACED

_handle = None
_calls = 0  # of watch: so many parameters were replaced
_checked = weakref.WeakKeyDictionary()  # optimizer: _calls and its number of parameters when it was found right


def watch():
    """A parameter is about to be replaced."""
    global _handle, _calls
    _calls += 1
    if _handle is None:
        _handle = register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer, args, kwargs):
    if torch.compiler.is_compiling():
        return
    now = _calls, sum([len(group["params"]) for group in optimizer.param_groups])
    if _checked.get(optimizer) != now:
        _check(optimizer)
        _checked[optimizer] = now


def _check(optimizer):
    """One that was replaced gets no gradient any more, unless another module that is not sharded has it too."""
    stale = [
        getattr(parameter, REPLACED)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if hasattr(parameter, REPLACED) and parameter.requires_grad and parameter.grad is None
    ]
    if stale:
        more = f" and {len(stale) - 3} more" if len(stale) > 3 else ""
        raise RuntimeError(
            f"this {type(optimizer).__name__} was built before the model was sharded: it holds {', '.join(stale[:3])}"
            f"{more}, in whose place the model has sharded parameters now, and its steps would change nothing. Build the "
            "optimizer after sharding, from model.parameters()"
        )
