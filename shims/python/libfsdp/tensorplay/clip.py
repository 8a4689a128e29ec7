"""clip_grad_norm_ for parameters that hold shards: the norm over all ranks.

A parameter of TensorPlay that holds a shard is a plain Parameter, so TensorPlay's own function would take this rank's
shards for all there is, and each rank would scale by another number. `clip_grad_norm_` here knows which parameters are
fully_shard's (what `mark` left on them), sums their norms over the ranks that share them, and counts all others once,
as they are.

`replace` puts it in the place of TensorPlay's, wherever a module has that by name. For parameters that are all plain it
hands on to the original.
"""

import array
import functools
import math
import sys

import tensorplay as tp
from tensorplay.nn.utils import clip_grad

from ..hosts.norm import joined

_RANKS = "_libfsdp_ranks"  # of a parameter: over which Ranks it is sharded
_original = clip_grad.clip_grad_norm_


def mark(parameter, ranks):
    setattr(parameter, _RANKS, ranks)


@functools.wraps(_original)
def clip_grad_norm_(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
    """As tensorplay.nn.utils.clip_grad_norm_, with the norm over all ranks; `parameters` may be a module.

    Collective where any parameter is sharded: all ranks give the same parameters in the same order. The norm that it
    returns is the same on every rank. Raises RuntimeError on all ranks for a norm that is not finite, if asked to.
    """
    if isinstance(parameters, tp.nn.Module):
        parameters = parameters.parameters()
    listed = [parameters] if isinstance(parameters, tp.Tensor) else list(parameters)
    if not any(hasattr(parameter, _RANKS) for parameter in listed):
        return _original(listed or parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type: {norm_type}; give a number above 0, or inf, for parameters that are sharded")
    with tp.no_grad():
        total = _total(listed, norm_type)
        if error_if_nonfinite and not math.isfinite(total):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        total = tp.tensor(total, dtype=tp.float32)
    clip_grad.clip_grads_with_norm_(listed, max_norm, total, foreach)
    return total


def _total(parameters, p):
    """The p-norm of all gradients as one vector."""
    norms = {}  # key of the ranks, None for plain parameters: (Ranks, norms of this rank's gradients)
    for parameter in parameters:
        ranks = getattr(parameter, _RANKS, None)
        if ranks is not None and ranks.shard_size == 1:
            ranks = None
        _, own = norms.setdefault(ranks and ranks.key, (ranks, []))
        if parameter.grad is not None and parameter.grad.numel():
            own.append(_norm(parameter.grad, p))
    return joined([_over(ranks, joined(own, p), p) for ranks, own in norms.values()], p)


def _norm(gradient, p):
    if gradient.dtype != tp.float64:
        gradient = gradient.float()
    return tp.linalg.vector_norm(gradient, p).item()


def _over(ranks, norm, p):
    """The p-norm of what the ranks have of their shards, which is `norm` on this one. Collective."""
    if ranks is None:
        return norm
    group = ranks.over_shards()
    values = array.array("d", [0.0] * group.size)
    group.all_gather(array.array("d", [norm]), values)
    return joined(list(values), p)


def replace():
    """Let programs find clip_grad_norm_ where they look for TensorPlay's."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("clip_grad_norm_") is _original:
            module.clip_grad_norm_ = clip_grad_norm_
