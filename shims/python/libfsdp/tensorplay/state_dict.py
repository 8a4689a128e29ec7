"""State dicts of models and optimizers by the names that TensorPlay's checkpoint package has: get_model_state_dict,
set_model_state_dict, get_optimizer_state_dict, set_optimizer_state_dict, get_state_dict, set_state_dict.

    from libfsdp.tensorplay import StateDictOptions, get_model_state_dict

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

Parameters that hold shards are plain Parameters, so TensorPlay's own functions would take a shard for all there is.
These know them: full_state_dict=True gathers, one tensor at a time, and cuts on loading; otherwise a dict holds this
rank's shards, plain tensors, which only the same ranks can load. Models without anything of ours go to TensorPlay's.

StateDictOptions mean what they mean there. With full_state_dict and cpu_offload only the first rank gets the dict, and
others {}; with full_state_dict and broadcast_from_rank0 only the first rank has to have it. An optimizer that has not
stepped has no state, and its dict none either: nothing is made up to fill it.

`replace` puts them in the place of TensorPlay's, wherever a module has those by name.
"""

import contextlib
import functools
import sys

from tensorplay.distributed.checkpoint import state_dict as theirs
from tensorplay.distributed.checkpoint.state_dict import StateDictOptions
from tensorplay.optim.optimizer import Optimizer

from ..hosts import optim_state
from ..hosts.iteration import state_of
from ..hosts.state_dict import FULL, SHARDED, Broadcast, clean_name, copied, is_first
from .classic import HOST, FullyShardedDataParallel, StateDictType

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

_originals = {}  # name: TensorPlay's function


def _instead(function):
    """`function`, for models with sharded modules of ours; TensorPlay's own for others."""
    original = _originals[function.__name__] = getattr(theirs, function.__name__)

    @functools.wraps(original)
    def chosen(model, *args, **kwargs):
        if any(state_of(module) is not None for module in model.modules()):
            return function(model, *args, **kwargs)
        return original(model, *args, **kwargs)

    chosen.__doc__ = function.__doc__
    return chosen


def replace():
    """Let programs find these functions where they look for TensorPlay's."""
    for module in list(sys.modules.values()):
        for name, original in _originals.items():
            if getattr(module, "__dict__", {}).get(name) is original:
                setattr(module, name, globals()[name])


def _checked(options):
    options = StateDictOptions() if options is None else options
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise ValueError("full_state_dict must be enabled for broadcast_from_rank0")
    return options


# ---- The model -------------------------------------------------------------------------------------------------------


@_instead
def get_model_state_dict(model, *, submodules=None, options=None):
    """The model's parameters and buffers by name: whole with full_state_dict, else this rank's shards; copies.

    Collective with full_state_dict.
    """
    options = _checked(options)
    index = optim_state.Index(model)
    absent = options.full_state_dict and options.cpu_offload and not is_first(HOST, index.ranks)
    prefixes = _prefixes(model, submodules)
    wrapped = FullyShardedDataParallel.fsdp_modules(model)
    local = contextlib.nullcontext()
    if wrapped:
        local = FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    with local:
        entries = model.state_dict()
    result, whole = {}, {}  # whole: {id of a parameter: its value}, one for all of its names
    for key, value in entries.items():
        name = clean_name(model, key)
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        parameter = index.params.get(name)
        if prefix is None or (parameter is not None and options.ignore_frozen_params and not parameter.requires_grad):
            continue
        if parameter is not None and options.full_state_dict and index.unit(name)[0] is not None:
            if id(parameter) not in whole:
                value = HOST.gathered(HOST.local(parameter), *index.unit(name))
                whole[id(parameter)] = None if absent else value
            value = whole[id(parameter)]
        elif not absent:
            value = copied(HOST, value)
        result[name if options.keep_submodule_prefixes else name[len(prefix) :]] = value
    return {} if absent else result


def _prefixes(model, submodules):
    """What names begin with that are wanted."""
    if not submodules:
        return [""]
    return [f"{clean_name(model, path)}." for path, module in model.named_modules() if module in submodules]


@_instead
def set_model_state_dict(model, model_state_dict, *, options=None):
    """Load what get_model_state_dict gave, whole tensors or shards: each rank takes its part.

    Raises RuntimeError with all names that are missing, unexpected (options.strict) or of a wrong shape. Gives those
    that were missing and unexpected. Collective with broadcast_from_rank0.
    """
    options = _checked(options)
    entries = _of_model(model, model_state_dict, options)
    if not entries and options.strict:
        raise RuntimeError("model state dictionary is empty")
    return model.load_state_dict(entries, strict=options.strict)


def _of_model(model, entries, options):
    entries = theirs._unflatten_model_state_dict(model, entries)
    if not options.broadcast_from_rank0:
        return entries
    index = optim_state.Index(model)
    sent = Broadcast(HOST, entries, index.ranks, None, True)
    result = {}
    for key, value in (sent.entries or {}).items():
        value = sent.take(value)
        name = clean_name(model, key)
        param, ranks = index.unit(name) if name in index.params else (None, None)
        if param is not None and isinstance(value, HOST.Tensor):
            part = HOST.shard_of_value(value, param, ranks, False)
            value = value if part is value else part.clone()  # a view would keep the whole one
        result[key] = value
    return result


# ---- Its optimizers --------------------------------------------------------------------------------------------------


def _listed(optimizers):
    return (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)


@_instead
def get_optimizer_state_dict(model, optimizers, *, submodules=None, options=None):
    """The state of one optimizer or several, keyed by the parameters' names: whole with full_state_dict, else this
    rank's shards; copies. Collective.

    flatten_optimizer_state_dict: {"state.<name>.<key>": value, ..., "param_groups.<name>.<key>": value, ...}
    """
    options, optimizers = _checked(options), _listed(optimizers)
    if not optimizers:
        raise RuntimeError("optimizers are required when optim_only is enabled")
    kind = FULL if options.full_state_dict else SHARDED
    prefixes = _prefixes(model, submodules)
    joined = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        entries = optim_state.saved(HOST, model, optimizer, optimizer.state_dict(), kind, options.cpu_offload)
        joined["state"].update(entries.get("state", {}) if kind == FULL else copied(HOST, entries["state"]))
        joined["param_groups"] += entries.get("param_groups", [])
    if kind == FULL and options.cpu_offload and not is_first(HOST, optim_state.Index(model).ranks):
        return {}
    if submodules:
        wanted = lambda name: any(str(name).startswith(prefix) for prefix in prefixes)  # noqa: E731
        joined["state"] = {name: state for name, state in joined["state"].items() if wanted(name)}
        for group in joined["param_groups"]:
            group["params"] = [name for name in group["params"] if wanted(name)]
    return theirs._flatten_optim_state_dict(joined) if options.flatten_optimizer_state_dict else joined


@_instead
def set_optimizer_state_dict(model, optimizers, optim_state_dict, *, options=None):
    """Load what get_optimizer_state_dict gave into one optimizer or several; parameters are found by name.

    Raises KeyError for names that only one side has (options.strict), ValueError for wrong shapes. Collective with
    broadcast_from_rank0.
    """
    options, optimizers = _checked(options), _listed(optimizers)
    index = optim_state.Index(model)
    if options.broadcast_from_rank0 and not is_first(HOST, index.ranks):
        optim_state_dict = None
    elif not optim_state_dict:
        if options.strict:
            raise RuntimeError("optimizer state dictionary is empty")
        return
    elif "state" not in optim_state_dict:
        optim_state_dict = _unflattened(index, optim_state_dict)
    for optimizer in optimizers:
        optimizer.load_state_dict(
            optim_state.loadable(
                HOST,
                model,
                optimizer,
                optim_state_dict,
                rank0_only=options.broadcast_from_rank0,
                strict=options.strict,
            )
        )


def _unflattened(index, flat):
    """The reverse of flatten_optimizer_state_dict: a group for each parameter, which loading puts together."""
    state, groups = {}, {}
    names = sorted(index.params, key=len, reverse=True)
    for key, value in flat.items():
        head, _, rest = key.partition(".")
        name = next((name for name in names if rest.startswith(f"{name}.")), None)
        if head not in ("state", "param_groups") or name is None:
            raise optim_state.UnknownName(f"{key!r} is not the state or a setting of a parameter of the model")
        path = rest[len(name) + 1 :]
        if head == "param_groups":
            groups.setdefault(name, {"params": [name]})[path] = value
            continue
        inner = state.setdefault(name, {})
        *outer, last = path.split(".")
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return {"state": state, "param_groups": list(groups.values())}


# ---- Both ------------------------------------------------------------------------------------------------------------


@_instead
def get_state_dict(model, optimizers, *, submodules=None, options=None):
    """(get_model_state_dict, get_optimizer_state_dict)"""
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options),
    )


@_instead
def set_state_dict(model, optimizers, *, model_state_dict, optim_state_dict, options=None):
    """set_optimizer_state_dict, then set_model_state_dict, whose result it gives."""
    if _listed(optimizers):
        set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return set_model_state_dict(model, model_state_dict, options=options)
