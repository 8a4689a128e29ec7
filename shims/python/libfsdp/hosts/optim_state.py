"""Optimizer state of sharded models: saved whole, as shards or as this rank's tensors, under the parameters' names; and
turned back into what the optimizer of another wrapping or another number of ranks loads.

An optimizer's own state dict numbers its parameters and holds what this rank has of them. `saved` gives one that is
keyed by the names that the model has without wrappers, the same keys on every rank; `loadable` takes such a one and
gives what `optimizer.load_state_dict` wants: this rank's part of each tensor, keys and groups in this optimizer's
order, found by name. Nothing here looks at how modules were wrapped.

What a state tensor is shows in its shape: one that is like the parameter's shard is a piece of a whole one; all others
(counters, numbers, factors of other shapes) stand for themselves, and so does everything named "step". For a full or a
sharded dict the ranks that hold a parameter's shards compare what they have, once, so that they decide alike: a rank
with an empty shard may lack a state that the others have. A state that no rank has stays absent.

Whole tensors are gathered, received and cut one at a time: beside the result, memory holds one of them.

Collective over the ranks that hold a parameter's shards, for FULL and SHARDED.
"""

import math

from ..tensor import shard_extent
from .index import Index, UnknownName
from .state_dict import FULL, LOCAL, Broadcast, clean_name, copied, is_first, mismatch


# ---- Saving ----------------------------------------------------------------------------------------------------------


def saved(host, model, optim, entries, kind, rank0_only=False, optim_input=None, group=None):
    """The optimizer's state dict `entries`, keyed by names.

    kind         FULL, SHARDED or LOCAL, as state_dict.py says
    rank0_only   with FULL: only the first rank gets it, others take part and get {}
    optim_input  what the optimizer was built from, where it is not `optim` that says so

    Raises ValueError on all ranks for a state that can't be put together: one that some ranks lack, or have in another
    shape.
    """
    index = Index(model)
    _check(entries)
    groups = index.groups(model, optim, optim_input)
    order = [name for names in groups for name in names]
    key_names = _key_names(model, index, entries, order)
    own = {}  # name: {path of keys: value}
    others = {}  # state that is no parameter's
    for key, state in entries["state"].items():
        name = key_names.get(key)
        if name is None:
            others[key] = state
        else:
            own[name] = _flat(state)
    absent = kind == FULL and rank0_only and not is_first(host, index.ranks, group)
    if kind == LOCAL:
        states = {
            name: {path: host.local(value) if _is_tensor(host, value) else value for path, value in state.items()}
            for name, state in own.items()
        }
    else:
        states = _joined(host, index, own, order, kind == FULL, absent)
    if absent:
        return {}
    result = {"state": {name: _nested(states[name]) for name in order if name in states}}
    result["state"].update(copied(host, others) if kind == FULL else others)
    if "param_groups" in entries:
        result["param_groups"] = []
        for each in entries["param_groups"]:
            names = [key_names[key] for key in each["params"]]
            named = {"param_names": list(names)} if "param_names" in each else {}
            result["param_groups"].append({**_settings(host, each), **named, "params": names})
    return result


def _check(entries):
    if not isinstance(entries, dict) or "state" not in entries:
        raise ValueError(
            '`optim_state_dict` must have the keys "state" to be a valid optimizer state dict; this is '
            + (f"a dict with {list(entries)[:5]}" if isinstance(entries, dict) else f"a {type(entries).__name__}")
        )


def _key_names(model, index, entries, order):
    """{key that an optimizer's state dict has for a parameter: name}: numbers, or names (of a named optimizer)."""
    keys = dict(enumerate(order))
    listed = [key for group in entries.get("param_groups", ()) for key in group["params"]]
    for key in (*entries["state"], *listed):
        if isinstance(key, str):
            name = clean_name(model, key)
            if name in index.params:
                keys[key] = index.names[id(index.params[name])]
            elif key in listed:
                raise UnknownName(f"the optimizer's state dict has a parameter {key!r}, which the model has not")
        elif key in listed and key not in keys:
            raise UnknownName(
                f"the optimizer's state dict has parameter number {key}, and its groups {len(order)} parameters"
            )
    return keys


def _joined(host, index, own, order, full, absent):
    """{name: {path: value}} of all ranks together."""
    found = {}

    def keep(name, state):
        if full and not absent:
            state = {path: _whole(host, value) for path, value in state.items()}
        found[name] = state

    for ranks in index.ranks:
        names = [name for name in order if getattr(index.unit(name)[1], "key", None) == ranks.key]
        if ranks.shard_size > 1:
            for name, states in _over(host, index, own, names, ranks, full, absent):
                found[name] = states
        else:
            for name in names:
                if name in own:
                    keep(name, own[name])
    for name in order:
        if index.unit(name)[0] is None and name in own:
            keep(name, own[name])
    return found


def _whole(host, value):
    return copied(host, host.whole_of(value) if _is_tensor(host, value) else value)


class _View:
    """What a rank has as one state of a parameter. piece: it is like the shard. shape, dtype: of a tensor."""

    def __init__(self, piece=False, shape=None, dtype=None):
        self.piece, self.shape, self.dtype = piece, shape, dtype


def _view(host, param, path, value):
    if not _is_tensor(host, value):
        return _View()
    local = host.local(value)
    shape = tuple(local.shape)
    piece = bool(shape) and path[-1] != "step" and shape == tuple(host.local(param.parameter).shape)
    return _View(piece, shape, local.dtype)


def _over(host, index, own, names, ranks, full, absent):
    """(name, {path: value}) of the parameters that are sharded over these ranks, one after the other."""
    mine = {
        name: {path: _view(host, index.unit(name)[0], path, value) for path, value in own[name].items()}
        for name in names
        if name in own
    }
    views = host.all_gather_object(mine, ranks.shard_group)
    names = [name for name in names if any(name in view for view in views)]
    having = {}  # (name, path): {rank: _View}
    for name in names:
        for path in dict.fromkeys(path for view in views for path in view.get(name, ())):
            found = {rank: view[name][path] for rank, view in enumerate(views) if path in view.get(name, ())}
            _check_views(name, path, found, index.unit(name)[0], ranks, full)
            having[name, path] = found
    lent = _lent(host, having, own, ranks)
    for name in names:
        param, states = index.unit(name)[0], {}
        for path in [path for known, path in having if known == name]:
            value = own.get(name, {}).get(path)
            view = next(iter(having[name, path].values()))
            if not _all_pieces(having[name, path]):
                value = lent[name, path] if value is None and (name, path) in lent else value
                states[path] = value if absent or not full else _whole(host, value)
                continue
            if value is None:  # an empty one
                like = host.local(param.parameter)
                value = host.Buffers.allocate(tuple(like.shape), dtype=view.dtype, device=like.device)
            if full:
                value = host.gathered(host.local(value), param, ranks)
                states[path] = None if absent else value
            else:
                states[path] = host.shard_of_value(value, param, ranks, True)
        yield name, states


def _all_pieces(views):
    return all(view.piece for view in views.values())


def _check_views(name, path, views, param, ranks, full):
    """Whether what the ranks have can be put together. views: {rank: _View}, of those that have it."""
    label = _label(name, path)
    for rank in range(ranks.shard_size):
        if rank not in views and _numel(param, rank, ranks):
            raise ValueError(f"{label} is there on ranks {list(views)} but not on {rank}, which holds a part of it")
    shapes = {view.shape for view in views.values()}
    if full and not _all_pieces(views) and len(shapes) > 1:
        raise ValueError(
            f"{label} has shapes {sorted(shapes, key=str)} on the ranks, and is no part of a tensor of the parameter's "
            "shape: it can't be put together; save it with LOCAL_STATE_DICT"
        )


def _numel(param, rank, ranks):
    """How many elements of a parameter a rank holds."""
    shape = list(param.shape)
    shape[param.placement.dim] = shard_extent(shape[param.placement.dim], rank, ranks.shard_size)[1]
    return math.prod(shape)


def _lent(host, having, own, ranks):
    """Values that are no pieces, from the first rank that has them, for those that lack them: {(name, path): value}. A
    second exchange, but only where one lacks any, which all know."""
    givers = {
        key: next(iter(views))
        for key, views in having.items()
        if len(views) < ranks.shard_size and not _all_pieces(views)
    }
    if not givers:
        return {}
    mine = {(name, path): own[name][path] for (name, path), rank in givers.items() if rank == ranks.shard_rank}
    given = host.all_gather_object(mine, ranks.shard_group)
    return {key: given[rank][key] for key, rank in givers.items()}


def _label(name, path):
    return f"state {'.'.join(map(str, path))!r} of parameter {name!r}"


# ---- Loading ---------------------------------------------------------------------------------------------------------


def loadable(host, model, optim, entries, *, rank0_only=False, named=False, strict=True, optim_input=None, group=None):
    """What `optimizer.load_state_dict` takes, of a dict that `saved` gave, on any number of ranks and any wrapping.

    entries      on all ranks; or, with rank0_only, on the first rank, and None or anything on others. Its tensors are
                 whole, or as the model's shards are
    named        the optimizer keys its state by names, not numbers
    strict       False: parameters of the optimizer that the dict does not know keep their groups' settings

    State of parameters that this optimizer does not have is left out. Raises UnknownName for names that the model does
    not have and for parameters that the dict lacks; ValueError for shapes and for settings that contradict each other.
    """
    index = Index(model)
    sent = Broadcast(host, entries, index.ranks, group, rank0_only)
    entries = sent.entries
    _check(entries)
    states, others = _by_name(model, index, entries)
    groups = index.groups(model, optim, optim_input)
    order = [name for names in groups for name in names]
    keys = _raw_names(model, index) if named else dict(zip(order, range(len(order))))
    result = {"state": {}}
    with host.no_grad():
        for name in order:
            if name in states:
                param, ranks = index.unit(name)
                state = {
                    path: _part(host, param, ranks, name, path, sent.take(value))
                    for path, value in _flat(states[name]).items()
                }
                result["state"][keys[name]] = _nested(state)
        for key, value in others.items():
            result["state"][key] = copied(host, sent.take(value))
    if "param_groups" in entries:
        settings = _settings_of(model, index, entries["param_groups"])
        result["param_groups"] = [
            {
                **_agreed(host, names, settings, optim, position, strict),
                "params": [keys[name] for name in names],
            }
            for position, names in enumerate(groups)
        ]
    return result


def _raw_names(model, index):
    """{name: the name with wrappers}"""
    raw = {}
    for path, parameter in model.named_parameters():
        raw.setdefault(index.name_of(parameter), path)
    return raw


def _first_name(model, index, key):
    """The first name of the parameter that `key` names; None where the model has none."""
    name = clean_name(model, key) if isinstance(key, str) else None
    return index.names[id(index.params[name])] if name in index.params else None


def _by_name(model, index, entries):
    """({name: state}, state that is no parameter's)"""
    listed = [key for group in entries.get("param_groups", ()) for key in group["params"]]
    if any(isinstance(key, int) for key in (*entries["state"], *listed)):
        raise ValueError(
            "the optimizer's state dict has numbers for its parameters, and which ones they are says only the "
            "optimizer that it is from: give what optim_state_dict returned, or rekey_optim_state_dict to PARAM_NAME"
        )
    states, others = {}, {}
    for key, state in entries["state"].items():
        name = _first_name(model, index, key)
        if name is not None:
            states[name] = state
        elif isinstance(state, dict):
            raise UnknownName(f"the optimizer's state dict has a state of parameter {key!r}, which the model has not")
        else:
            others[key] = state
    return states, others


def _settings_of(model, index, saved_groups):
    """{name: the group of the dict that it is in}"""
    found = {}
    for group in saved_groups:
        for key in group["params"]:
            name = _first_name(model, index, key)
            if name is None:
                raise UnknownName(f"the optimizer's state dict has a parameter {key!r}, which the model has not")
            found[name] = group
    return found


def _agreed(host, names, settings, optim, position, strict):
    """What a group of the optimizer is to have, which its parameters' groups in the dict agree on."""
    current = {} if optim is None else optim.param_groups[position]
    missing = [name for name in names if name not in settings]
    if missing and strict:
        raise UnknownName(
            f"the optimizer's state dict lacks parameter {missing[0]!r}, of the optimizer's group {position}"
        )
    groups = list({id(settings[name]): settings[name] for name in names if name in settings}.values())
    chosen = _settings(host, groups[0] if groups else current)
    for other in groups[1:]:
        for key in dict.fromkeys((*chosen, *other)):
            if key not in ("params", "param_names") and not _same(host, chosen.get(key), other.get(key)):
                raise ValueError(
                    f"group {position} of the optimizer ({', '.join(names[:5])}, ...) has parameters of groups that "
                    f"differ in {key!r} in the dict: {chosen.get(key)} and {other.get(key)}"
                )
    chosen.pop("param_names", None)
    if "param_names" in current:
        chosen["param_names"] = list(current["param_names"])
    return chosen


def _same(host, one, other):
    if _is_tensor(host, one) and _is_tensor(host, other):
        return tuple(one.shape) == tuple(other.shape) and bool((one == other).all())
    return not _is_tensor(host, one) and not _is_tensor(host, other) and one == other


def _part(host, param, ranks, name, path, value):
    """This rank's part of a loaded state, in memory of its own."""
    if param is None or not _is_tensor(host, value) or not tuple(value.shape) or path[-1] == "step":
        return copied(host, value)
    part = host.shard_of_value(value, param, ranks, False)
    if part is value:
        part = host.shard_of_value(value, param, ranks, True)
    whole, here = host.whole_shape(param), tuple(host.local(param.parameter).shape)
    if tuple(host.local(part).shape) == here and tuple(part.shape) in (whole, here):
        return part.detach().clone()
    if len(value.shape) == len(whole) and value.numel() != 1:
        raise ValueError(mismatch(_label(name, path), value, whole, here))
    return copied(host, value)  # not of the parameter's kind


# ---- Keys ------------------------------------------------------------------------------------------------------------


def rekeyed(host, entries, to_names, model, optim=None, optim_input=None):
    """A state dict that is keyed by names, keyed by the numbers of an optimizer's parameters, or the other way round;
    `entries` itself where it is so already. `model` may be sharded or not. Tensors are shared with `entries`."""
    kinds = {type(key) for key in entries["state"]}
    if len(kinds) > 1 or not kinds <= {str, int}:
        raise ValueError(f"Invalid parameter keys: {entries['state'].keys()}")
    if not kinds or kinds == {str if to_names else int}:
        return entries
    index = Index(model)
    groups = index.groups(model, optim, optim_input)
    order = [name for names in groups for name in names]
    if to_names:
        names = dict(enumerate(order))
        new = {"state": {_known(names, key): state for key, state in entries["state"].items()}}
        new["param_groups"] = [
            {**_settings(host, group), "params": sorted(_known(names, key) for key in group["params"])}
            for group in entries["param_groups"]
        ]
        return new
    numbers = {name: number for number, name in enumerate(order)}
    for name, parameter in index.params.items():  # tied ones under each name
        if index.names[id(parameter)] in numbers:
            numbers.setdefault(name, numbers[index.names[id(parameter)]])
    new = {"state": {_known(numbers, key): state for key, state in entries["state"].items()}}
    new["param_groups"] = [
        {**_settings(host, group), "params": sorted(_known(numbers, key) for key in group["params"])}
        for group in entries["param_groups"]
    ]
    if optim is not None:  # load_state_dict takes groups by their places
        new["param_groups"].sort(key=lambda group: group["params"][:1])
    return new


def _settings(host, group):
    return {key: copied(host, value) for key, value in group.items() if key != "params"}


def _known(keys, key):
    try:
        return keys[key]
    except KeyError:
        raise UnknownName(f"the optimizer's state dict has a parameter {key!r}, which the optimizer has not") from None


# ---- Values ----------------------------------------------------------------------------------------------------------


def _is_tensor(host, value):
    return isinstance(value, host.Tensor)


def _flat(state):
    """{(key, key inside, ...): value} of nested dicts."""
    if not isinstance(state, dict):
        raise ValueError(f"the optimizer's state of a parameter is a {type(state).__name__} and not a dict")
    flat = {}
    for key, value in state.items():
        if isinstance(value, dict) and value:
            flat.update({(key, *path): inner for path, inner in _flat(value).items()})
        else:
            flat[key,] = value
    return flat


def _nested(flat):
    state = {}
    for path, value in flat.items():
        inner = state
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return state
