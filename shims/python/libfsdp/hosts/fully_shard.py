"""What fully_shard does in every framework: checks, cutting the parameters, changing the modules' classes, hooks.

An adapter's fully_shard turns its meshes, policies and placements into what `shard` takes.
"""

from . import api, discover
from .iteration import ATTRIBUTE, state_of
from .parameter import ShardedParameter
from .state import State

_OWNER = "_libfsdp_owner"  # of a parameter that is sharded: whose it is, for messages
REPLACED = "_libfsdp_replaced"  # of one in whose place modules have another since: what it was, for messages


def shard(host, mixin, module, ranks, *, reshard, dim_of, policy, ignored):
    """Shard `module`, or a list of modules that run together, and return it.

    mixin        the adapter's class of methods, a subclass of api.ShardedModule
    ranks        over which ranks: see Iteration
    reshard      None, True, False or a number of ranks (see check_reshard)
    dim_of       parameter -> the dimension to cut
    policy       the framework's MixedPrecisionPolicy
    ignored      parameters that stay whole
    """
    modules = [module] if isinstance(module, host.Module) else list(module)
    check_modules(host, modules)
    ignored = tuple(ignored or ())
    roots = discover.outermost(modules)
    params = cut(host, roots, ranks, ignored, dim_of, "fully_shard")
    state = State(host, roots, params, ranks, reshard, policy)
    for root in roots:
        root.__class__ = api.sharded_class(host, type(root), mixin)
        root.__dict__[ATTRIBUTE] = state
        host.hook(root, state)
    return module


def cut(host, roots, ranks, ignored, dim_of, caller):
    """Shard the parameters of modules and those below that no other call has taken: ShardedParameters, which the modules
    then show. caller: the function that the program called, for messages."""
    managed = discover.managed_modules(roots, lambda other: state_of(other) is not None)
    places = list(discover.places_of(managed, ignored).values())
    placements = [_checked(host, parameter, where, dim_of, caller) for parameter, where in places]
    params = []
    for (parameter, where), dim in zip(places, placements):
        shape, dtype = host.whole(parameter)
        placement = host.placement(parameter, dim, ranks)
        sharded = host.shard_of(parameter, placement, ranks)
        params.append(ShardedParameter(host, sharded, where, placement, shape, dtype))
        for held in (parameter, sharded):  # another module may hold the first, and would train it by itself
            setattr(held, _OWNER, type(roots[0]).__name__)
        if sharded is not parameter:
            module, attribute = where[0]
            setattr(parameter, REPLACED, f"{attribute!r} of {type(module).__name__}")
    for param in params:
        param.hide()
    return params


def check_modules(host, modules):
    if not modules:
        raise ValueError("fully_shard expects at least one module")
    for module in modules:
        if not isinstance(module, host.Module):
            raise TypeError(f"fully_shard expects a module or a list of modules, got a {type(module).__name__}")
        if isinstance(module, host.Containers) and type(module).forward is host.Module.forward:
            raise ValueError(f"fully_shard does not support containers that do not implement forward: {module}")
        if state_of(module) is not None:
            raise RuntimeError("fully_shard has already been applied to this module")
    if len({id(module) for module in modules}) != len(modules):
        raise ValueError("fully_shard cannot receive the same module twice")


def _checked(host, parameter, where, dim_of, caller):
    """The dimension that a parameter is cut along."""
    name = where[0][1]
    owner = getattr(parameter, _OWNER, None)
    if owner is not None:
        raise ValueError(
            f"parameter {name!r} of {type(where[0][0]).__name__} is managed by an earlier {caller} already, that of "
            f"{owner}: modules that share a parameter go into one call, as a list or by the module around them"
        )
    host.check_parameter(parameter, name)
    shape, _ = host.whole(parameter)
    if not shape:
        raise ValueError(
            f"{caller} doesn't support scalar parameters. Change {name} to a 1D tensor with numel equal to 1."
        )
    dim = dim_of(parameter)
    if not -len(shape) <= dim < len(shape):
        raise AssertionError(f"Shard dim {dim} is invalid for {len(shape)}D tensor: {shape}")
    return dim % len(shape)


def check_reshard(reshard, ranks):
    """reshard_after_forward as the library takes it: None, True, False, or a number of ranks between one and all."""
    if reshard is None or isinstance(reshard, bool):
        return reshard
    if not isinstance(reshard, int):
        raise ValueError(
            f"reshard_after_forward should be a bool or an int representing the group size to reshard to, not {reshard}"
        )
    if reshard < 1 or ranks.shard_size % reshard:
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {ranks.shard_size}, not {reshard}"
        )
    return {1: False, ranks.shard_size: True}.get(reshard, reshard)
