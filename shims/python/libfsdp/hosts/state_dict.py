"""State dicts: of a wrapper, saved and loaded whole, as shards, or as this rank's tensors; and what those of all
sharded modules share. Always under the names that the model has without wrappers.

A wrapper takes the place of its module's name in the modules' own recursion, so it changes what the recursion below it
left in the dict (`saved`), and the dict before the recursion below reads it (`loadable`).
"""

import copy

from . import discover
from .iteration import state_of

FULL, SHARDED, LOCAL = "FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"


# ---- Names -----------------------------------------------------------------------------------------------------------


def replicates(kind):
    """Whether a class of modules is the framework's data-parallel wrapper, whose `module` is what it was given. By
    name, as a program that has such a module has imported where it is from, and others need not."""
    return any(base.__name__ in ("DistributedDataParallel", "DataParallel") for base in kind.__mro__)


def clean_name(module, name, hidden=(*discover.HIDDEN, "_orig_mod")):
    """The name that something below `module` has without wrappers, ours and those for data parallelism; and without
    `hidden`: what activation checkpointing and compilers put around modules."""
    parts = []
    for part in name.split("."):
        kind = type(module)
        ours = hasattr(kind, "_fsdp_wrapper") and part == module._wrapped_name
        if part not in hidden and not ours and not (part == "module" and replicates(kind)):
            parts.append(part)
        module = None if module is None else module._modules.get(part)
    return ".".join(parts)


def names_of(module, params):
    """[(name, param), ...] of the ShardedParameters of a unit, from a module on; tied ones under each name."""
    places = {(id(owner), attribute): param for param in params for owner, attribute in param.places}
    found = []
    for path, below in module.named_modules(remove_duplicate=False):
        for attribute in below._parameters:
            param = places.get((id(below), attribute))
            if param is not None:
                found.append((discover.clean(f"{path}.{attribute}" if path else attribute), param))
    return found


# ---- Wrappers --------------------------------------------------------------------------------------------------------


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
        for name, param in names_of(wrapper.module_below, state.params):
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


def loadable(wrapper, entries, prefix, hidden, errors):
    """Turn a dict that a program loads into what the recursion below a wrapper wants: hidden names, and for each
    parameter what the module shows.

    Takes whole tensors and shards, whatever the wrapper's type; with LOCAL, tensors are this rank's. errors: a list for
    messages about wrong ones, which load_state_dict raises together.
    """
    state, host = state_of(wrapper), wrapper.host
    for key in [key for key in entries if key.startswith(prefix) and not key.startswith(f"{prefix}{hidden}.")]:
        entries[f"{prefix}{hidden}.{key[len(prefix) :]}"] = entries.pop(key)
    if not wrapper._summoned:
        state.reshard_now()
    local = wrapper._state_dict_type.name == LOCAL
    names = names_of(wrapper.module_below, state.params)
    cut_entries(host, entries, prefix, f"{prefix}{hidden}.", names, state.ranks, local, errors)


def cut_entries(host, entries, prefix, hidden, names, ranks, local, errors):
    """Put what a unit's parameters are to be loaded with into a dict, for the tensors that a program gave.

    prefix, hidden   what keys of the dict begin with: as the program knows them, and as they are
    names            as names_of gives them
    local            tensors are this rank's
    """
    with host.no_grad():
        for name, param in names:
            key = hidden + name
            value = entries.get(key)
            if not isinstance(value, host.Tensor):
                continue  # which the module says
            if param.shown() is not param.parameter:
                entries[key] = host.whole_of(value)
                continue
            part = host.shard_of_value(value, param, ranks, local)
            here, whole = tuple(host.local(param.parameter).shape), host.whole_shape(param)
            if tuple(host.local(part).shape) == here and tuple(part.shape) in (here, whole):
                entries[key] = part
            else:
                errors.append(f"size mismatch for {mismatch(prefix + name, value, whole, here)}")
                entries[key] = param.parameter.detach()  # so that nothing else is said about it


def mismatch(label, value, whole, here):
    """What is wrong with a value of neither shape."""
    return (
        f"{label}: a tensor of shape {tuple(value.shape)}, but the whole parameter has shape {whole} and this rank's "
        f"shard {here}"
    )


# ---- From the first rank ---------------------------------------------------------------------------------------------


def is_first(host, ranks, group=None):
    """Whether this is the rank that alone gives and gets whole dicts: the first of a group, or of a model's Ranks."""
    if group is not None or not ranks:
        return host.rank(group) == 0
    return host.rank(None) == ranks[0].key[0][0]


class _Sent:
    """In place of a tensor."""

    def __init__(self, index, shape, dtype):
        self.index, self.shape, self.dtype = index, shape, dtype


class Broadcast:
    """A dict of the first rank's, on all ranks: `entries` at once, but for its tensors, which come one at a time when
    they are taken. Collective; all ranks take the same ones in the same order.

    ranks    the model's Ranks: the dict goes to all of the first's
    group    or to this group of the framework
    active   False: each rank has the dict, and nothing is sent
    """

    def __init__(self, host, entries, ranks, group, active):
        self.host, self.entries, self._tensors = host, entries, []
        self._active, self._first = active, not active or is_first(host, ranks, group)
        if not active:
            return
        if group is not None:
            self._groups = [group]
        else:  # along the shards first: then each row's first rank has it for its column
            both = (ranks[0].shard_group, ranks[0].replicate_group) if ranks else ()
            self._groups = [each for each in both if each is not None]
        try:
            structure = self._without_tensors(entries) if self._first else None
        except ValueError as error:
            structure = error
        for each in self._groups:
            structure = host.broadcast_object(structure, each)
        if isinstance(structure, ValueError):
            raise structure
        self.entries = structure

    def _without_tensors(self, value):
        if isinstance(value, self.host.Tensor):
            if self.host.local(value) is not value:
                raise ValueError(
                    "a dict that only the first rank has must hold whole, plain tensors, and one is a "
                    f"{type(value).__name__}"
                )
            if value.numel() <= 1:
                return value.detach()
            self._tensors.append(value)
            return _Sent(len(self._tensors) - 1, tuple(value.shape), value.dtype)
        if isinstance(value, dict):
            return {key: self._without_tensors(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return type(value)(self._without_tensors(inner) for inner in value)
        return value

    def take(self, value):
        """A value of `entries`, with its tensors: whole ones, in memory of their own where they have come."""
        if isinstance(value, _Sent):
            return self._tensor(value)
        if self._active and isinstance(value, dict):
            return {key: self.take(inner) for key, inner in value.items()}
        if self._active and isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return type(value)(self.take(inner) for inner in value)
        return value

    def _tensor(self, sent):
        host = self.host
        with host.no_grad():
            if self._first:
                tensor = self._tensors[sent.index].detach().contiguous()
            else:
                tensor = host.Buffers.allocate(sent.shape, dtype=sent.dtype, device="cpu")
            for each in self._groups:
                host.broadcast(tensor, each)
        return tensor


def copied(host, value):
    """A value of a state dict in memory of its own."""
    if isinstance(value, host.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(host, inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(copied(host, inner) for inner in value)
    return copy.deepcopy(value)
