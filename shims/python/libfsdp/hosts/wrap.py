"""Which modules below a wrapper become wrappers of their own (auto_wrap_policy), which it leaves alone (ignored), and
how those without values get some: what happens before a wrapper cuts its parameters.

Policies are the frameworks' own: objects with `_run_policy`, which names the modules and their arguments, or functions
(module, recurse, nonwrapped_numel) that are asked from the bottom up.
"""

from . import discover
from .iteration import state_of


class Ignored:
    """modules: a set of those to leave alone, with all below them. params: a list of parameters, theirs included.

    What nested wrappers ignore is ignored as well.
    """

    def __init__(self, host, root, modules, states):
        if modules is not None and states is not None:
            raise ValueError(
                "Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states."
            )
        given, params = _checked_modules(host, modules), []
        if states is not None:
            given, params = _split_states(host, states)
        for module in given:
            if state_of(module) is not None:
                raise ValueError("`ignored_modules` should not include FSDP modules")
        self.modules = {below for module in given for below in module.modules() if state_of(below) is None}
        nested = [module._ignored for module in root.modules() if hasattr(type(module), "_fsdp_wrapper")]
        found = [*params, *(parameter for module in self.modules for parameter in module.parameters())]
        found += [parameter for other in nested for parameter in other.params]
        states = [state_of(module) for module in root.modules() if state_of(module) is not None]
        sharded = {id(param.parameter) for state in states for param in state.params}
        self.params = list({id(parameter): parameter for parameter in found if id(parameter) not in sharded}.values())


def _checked_modules(host, modules):
    if modules is None:
        return []
    text = "`ignored_modules` should be an iterable of modules "
    try:
        modules = list(modules)
    except TypeError:
        raise TypeError(text + f"but got {type(modules)}") from None
    for module in modules:
        if not isinstance(module, host.Module):
            raise ValueError(text + f"but got an iterable with {type(module)}")
    return modules


def _split_states(host, states):
    try:
        states = list(states)
    except TypeError:
        raise TypeError(
            f"ignored_states should be an iterable of parameters or modules, but got {type(states)}"
        ) from None
    if all(isinstance(state, host.Parameter) for state in states):
        return [], states
    if all(isinstance(state, host.Module) for state in states):
        return states, []
    kinds = sorted({type(state) for state in states}, key=repr)
    raise ValueError(f"ignored_states expects all nn.Parameter or all nn.Module list elements but got types {kinds}")


# ---- auto_wrap_policy ------------------------------------------------------------------------------------------------


def auto_wrap(host, root, policy, ignored, options, make, full_precision):
    """Put wrappers in the place of the modules below `root` that the policy chooses.

    options         the constructor's arguments, which the policy may change for a module
    make            (module, **arguments) -> wrapper
    full_precision  classes whose modules become wrappers that compute in their parameters' own dtype
    """
    for path, module in root.named_modules():
        if state_of(module) is not None:
            raise ValueError(
                f"FSDP auto wrapping requires modules to not already have FSDP applied but found {path} in\n{root}"
            )
    if hasattr(policy, "_run_policy"):
        chosen = policy._run_policy(root, ignored.modules, dict(options))
    elif callable(policy):
        chosen = _chosen(root, policy, ignored, options)
    else:
        raise TypeError(f"auto_wrap_policy should be a policy or a function, but got {type(policy)}")
    for module in root.modules():
        if full_precision and isinstance(module, full_precision) and module not in ignored.modules:
            chosen[module] = {**chosen.get(module, options), "mixed_precision": None, "_full_precision": True}
    chosen.pop(root, None)
    _replace_below(root, chosen, make, {})


def _chosen(root, policy, ignored, options):
    """What a function chooses: it sees how many elements of a module are in no wrapper yet."""
    ids = {id(parameter) for parameter in ignored.params}
    found = {}

    def visit(module):
        """The number of elements that are in wrappers afterwards."""
        count = sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in ids)
        if not policy(module=module, recurse=True, nonwrapped_numel=count):
            return 0
        wrapped = sum(visit(child) for child in module.children() if child not in ignored.modules)
        if module is root or not policy(module=module, recurse=False, nonwrapped_numel=count - wrapped):
            return wrapped
        found[module] = dict(options)
        return count

    visit(root)
    return found


def _replace_below(parent, chosen, make, done):
    """From the bottom up. done: {id of a module: (it, what stands for it)}, as a module may be in several places."""
    for name, child in list(parent._modules.items()):
        if child is None:
            continue
        if id(child) not in done:
            done[id(child)] = (child, child)
            _replace_below(child, chosen, make, done)
            if child in chosen:
                done[id(child)] = (child, make(child, **chosen[child]))
        stand_in = done[id(child)][1]
        if stand_in is not child:
            setattr(parent, name, stand_in)


# ---- What belongs to a wrapper ---------------------------------------------------------------------------------------


def own_modules(root, ignored):
    """The modules at and below `root` that belong to no nested wrapper and are not ignored."""
    managed = discover.managed_modules([root], lambda other: state_of(other) is not None)
    return [module for module in managed if module not in ignored.modules]


def own_buffers(modules):
    """[(module, name, buffer), ...]"""
    return [
        (module, name, buffer)
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def materialize(host, root, ignored, param_init_fn):
    """Give values to what is on the meta device: by the program's function, or by each module's reset_parameters."""
    ids = {id(parameter) for parameter in ignored.params}
    modules = own_modules(root, ignored)
    tensors = [p for module in modules for p in module._parameters.values() if p is not None and id(p) not in ids]
    tensors += [buffer for _, _, buffer in own_buffers(modules)]
    if not any(tensor.device.type == "meta" for tensor in tensors):
        return
    if param_init_fn is not None and not callable(param_init_fn):
        raise ValueError(f"Expected {param_init_fn} to be callable but got {type(param_init_fn)}")
    for module in reversed(modules):  # the outer ones first
        if param_init_fn is not None:
            param_init_fn(module)
            continue
        if not any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            continue
        if not hasattr(module, "reset_parameters"):
            raise AttributeError(
                f"{type(module).__name__} has parameters or buffers on the meta device and no reset_parameters(), "
                "which gives them values: write one, or pass param_init_fn"
            )
        with host.no_grad():
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()


def synchronize(host, ranks, tensors):
    """Rank 0's values on all ranks."""
    with host.no_grad():
        for tensor in tensors:
            for group in (ranks.shard_group, ranks.replicate_group):
                if group is not None:
                    host.broadcast(tensor, group)
