"""The norm of all gradients under a root, and clipping by it."""

import array
import math


def clip(iteration, plain, max_norm, p):
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)). Gives (norm before, gradients). Collective.

    plain: parameters that no unit has. Their gradients belong to each rank and count once; where ranks have different
    ones the largest norm counts, so that all ranks come to the same number.

    The norm is the same on every rank: infinite or NaN on all of them where a gradient is on one.
    """
    host = iteration.host
    max_norm, p = float(max_norm), float(p)
    if not p > 0:
        raise ValueError(f"norm_type: {p}; give a number above 0, or inf")
    iteration.settle_gradients()
    norms = [model.grad_norm(p) for model in iteration.models.values()]
    gradients = [param.parameter.grad for state in iteration.states for param in state.params if not param.frozen]
    if plain:
        own = [parameter.grad for parameter in plain if parameter.grad is not None]
        norms.append(_agreed(iteration, joined([host.norm(host.local(grad), p) for grad in own], p)))
        gradients += own
    gradients = [grad for grad in gradients if grad is not None]
    total = joined(norms, p)
    coefficient = max_norm / (total + 1e-6)
    if not coefficient >= 1:
        with host.no_grad():
            for grad in gradients:
                host.local(grad).mul_(coefficient)
    return total, gradients


def joined(norms, p):
    """The p-norm of vectors, one after the other, with these norms."""
    if any(math.isnan(norm) for norm in norms):
        return math.nan
    largest = max(norms, default=0.0)
    if p == math.inf or largest in (0.0, math.inf):
        return largest
    return largest * sum((norm / largest) ** p for norm in norms) ** (1 / p)


def _agreed(iteration, norm):
    """The largest of the ranks' numbers, NaN where one is."""
    number = array.array("d", [norm])
    for model in iteration.models.values():
        model.group.all_reduce(number, op="max")
    return number[0]
