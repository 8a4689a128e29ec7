"""State dicts of a wrapper: saved and loaded whole, as shards, or as this rank's tensors; always under the names that
the model has without wrappers.

A wrapper takes the place of its module's name in the modules' own recursion, so it changes what the recursion below it
left in the dict (`saved`), and the dict before the recursion below reads it (`loadable`).
"""

from . import discover
from .iteration import state_of

FULL, SHARDED, LOCAL = "FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"


def names_of(wrapper):
    """[(name, param), ...] of a wrapper's own unit, from the wrapper on; tied ones under each name."""
    paths = {}
    for path, module in wrapper.module_below.named_modules():
        paths.setdefault(id(module), discover.clean(path))
    found = []
    for param in state_of(wrapper).params:
        for module, attribute in param.places:
            if id(module) in paths:
                path = paths[id(module)]
                found.append((f"{path}.{attribute}" if path else attribute, param))
    return found


def renamed(entries, old, new):
    """Give the keys of a dict that begin with `old` another beginning, in their order."""
    for key in [key for key in entries if key.startswith(old)]:
        entries[new + key[len(old) :]] = entries.pop(key)


def saved(wrapper, entries, prefix, hidden):
    """What the recursion has left of the module below a wrapper, as the program has asked for it. Collective for FULL.

    hidden: the module's name in the wrapper, which is to go
    """
    state, host = state_of(wrapper), wrapper.host
    renamed(entries, f"{prefix}{hidden}.", prefix)
    metadata = getattr(entries, "_metadata", None)
    if metadata is not None:
        renamed(metadata, f"{prefix}{hidden}.", prefix)
        own = metadata.pop(f"{prefix}{hidden}", None)
        if own is not None:
            metadata[prefix[:-1]] = own
    kind, config = wrapper._state_dict_type.name, wrapper._state_dict_config
    absent = kind == FULL and getattr(config, "rank0_only", False) and not state.ranks.is_first
    if kind == FULL and not wrapper._summoned:
        state.begin()
        state.iteration.settle()
    values = {}  # id of a param: its value, one for all of its names
    with host.no_grad():
        for name, param in names_of(wrapper):
            key = prefix + name
            if id(param) not in values:
                values[id(param)] = _value(wrapper, state, param, kind)
                if absent:
                    values[id(param)] = None  # this rank has only taken part in the gather
            if key in entries:
                entries[key] = values[id(param)]
        for name, dtype in wrapper._buffer_dtypes.items():
            key = prefix + name
            if key in entries and entries[key].dtype != dtype:
                entries[key] = entries[key].to(dtype)
    if absent:
        for key in [key for key in entries if key.startswith(prefix)]:
            del entries[key]
    return entries


def _value(wrapper, state, param, kind):
    host = wrapper.host
    if kind == LOCAL:
        return host.local(param.parameter).detach()
    if kind == SHARDED:
        return param.parameter.detach()
    if wrapper._summoned and param.shown() is not param.parameter:
        return param.shown().detach().clone()  # with what the program has written
    return host.whole_value(host.adopt(state.unit.gather_param(param.library.name)), param.placement)


def loadable(wrapper, entries, prefix, hidden):
    """Turn a dict that a program loads into what the recursion below a wrapper wants: hidden names, and for each
    parameter what the module shows.

    Takes whole tensors and shards, whatever the wrapper's type; with LOCAL, tensors are this rank's.
    """
    state, host = state_of(wrapper), wrapper.host
    for key in [key for key in entries if key.startswith(prefix) and not key.startswith(f"{prefix}{hidden}.")]:
        entries[f"{prefix}{hidden}.{key[len(prefix) :]}"] = entries.pop(key)
    if not wrapper._summoned:
        state.reshard_now()
    local = wrapper._state_dict_type.name == LOCAL
    with host.no_grad():
        for name, param in names_of(wrapper):
            key = f"{prefix}{hidden}.{name}"
            value = entries.get(key)
            if not isinstance(value, host.Tensor):
                continue  # which the module says
            if param.shown() is not param.parameter:
                entries[key] = host.whole_of(value)
            else:
                entries[key] = host.shard_of_value(value, param, state.ranks, local)
