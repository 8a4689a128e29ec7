"""State dicts as frameworks nest them, and a Content's flat names: one to the other, whatever the framework.

    {"model": {name: tensor}, "optim": {"state": {name: {"exp_avg": tensor, ...}}, "param_groups": [...]}, "epoch": 3}

is what torch's and TensorPlay's files hold, with "optimizer" for "optim" at times, parameters' numbers for their names,
and a model's state dict alone where there is nothing else. Leaves that are tensors are Items here. Values beside the
model and the optimizer are JSON values of the Content, under their own keys.

What one form has and the other has no place for is never dropped without a word: it goes into a list of what is left
out, a line "NAME: reason" each.
"""

import math
import re
from dataclasses import replace

from ..errors import FsdpError, InvalidArgument, Unsupported
from .formats import MODULES, OPTIMIZER, Content, Item, Scalar, number, some
from .training import decode, encode, plain

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
OPTIM_KEYS = ("optim", "optimizer", "optim_state_dict", "optimizer_state_dict")
MODEL, OPTIM = MODEL_KEYS[0], OPTIM_KEYS[0]  # those that are written
_EXTRA_STATE = "_extra_state"  # the last part of such a name
_RESERVED = ("optimizer", MODULES)  # JSON values that have a meaning and a form
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


# ---- Nested to flat --------------------------------------------------------------------------------------------------


def content_of(value, path, kind, ties={}):
    """The Content of a nested value. ties: {name: name it is tied to}, where the tensors don't tell. Raises
    InvalidArgument for what has no tensors."""
    content = Content(path, kind)
    if not isinstance(value, dict):
        hint = "; save its state_dict()" if hasattr(value, "state_dict") else ""
        raise InvalidArgument(f"{path}: holds {_kind(value)}, not a state dict{hint}")
    model, optimizer, rest = _parts_of({str(key): item for key, item in value.items()})
    _add_model(content, model, ties)
    if optimizer is not None:
        _add_optimizer(content, _unflat(content, optimizer))
    for key, item in rest.items():
        try:
            if key in _RESERVED:
                raise InvalidArgument(f"{key}: a checkpoint of libfsdp's has something else under this name")
            content.json[key] = encode(_numbers(item), key)
        except FsdpError as error:
            reason = error.message.partition(": ")[2] if key in _RESERVED else f"{_kind(item)}, which JSON can't hold"
            content.left_out.append(f"{key!r}: {reason}")
    if not content.items and not content.json:
        raise InvalidArgument(f"{path}: holds no tensors")
    return content


def _kind(value):
    if isinstance(value, Item):
        return f"a {value.dtype} tensor of shape {list(value.shape)}"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _parts_of(value):
    """(model, optimizer or None, what is beside them) of a top level."""
    if isinstance(value.get("param_groups"), list) and isinstance(value.get("state"), dict):
        return {}, value, {}
    of_many = value.get("optimizer_states")  # Lightning's
    if isinstance(of_many, list) and len(of_many) == 1 and isinstance(of_many[0], dict):
        value = {key: item for key, item in value.items() if key != "optimizer_states"} | {OPTIM: of_many[0]}
    model, optim = _keys_of(value)
    if model is None and optim is None:
        inner = [key for key, item in value.items() if isinstance(item, dict) and None not in _keys_of(item)]
        if len(inner) == 1:  # as torch's tutorial has them: {"app": {"model": ..., "optim": ...}}
            others = {key: item for key, item in value.items() if key not in inner}
            return _parts_of(others | value[inner[0]])
        for key in OPTIM_KEYS:  # flat keys, as for a flat state dict of torch.distributed.checkpoint's
            if any(name.startswith((f"{key}.state.", f"{key}.param_groups.")) for name in value):
                split = _by_prefix(value, (MODEL, key))
                return split[MODEL], split[key], split[""]
        return value, None, {}
    rest = {key: item for key, item in value.items() if key not in (model, optim)}
    if model is not None:
        return value[model], value.get(optim), rest
    tensors = {key: item for key, item in rest.items() if isinstance(item, (Item, dict))}
    return tensors, value[optim], {key: item for key, item in rest.items() if key not in tensors}


def _keys_of(value):
    """Under which keys a dict has a model's and an optimizer's; None: it has none."""
    optim = next((key for key in OPTIM_KEYS if isinstance(value.get(key), dict)), None)
    return next((key for key in MODEL_KEYS if isinstance(value.get(key), dict)), None), optim


def _numbers(value):
    """A value with numbers for its tensors without dimensions."""
    if isinstance(value, Item):
        return number(value) if value.shape == () else value
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return [_numbers(item) for item in value] if isinstance(value, (list, tuple)) else value


def _by_prefix(value, prefixes):
    split = {prefix: {} for prefix in (*prefixes, "")}
    for name, item in value.items():
        prefix, dot, rest = name.partition(".")
        if dot and prefix in prefixes:
            split[prefix][rest] = item
        else:
            split[""][name] = item
    return split


def clean(names):
    """{name: the name that the model without wrappers gives}. "module." goes where all have it (data parallel)."""
    wrapped = bool(names) and all(name.startswith("module.") for name in names)
    return {name: _WRAPPERS.sub("", name[len("module.") :] if wrapped else name) for name in names}


def _add_model(content, model, ties):
    flat, modules = {}, {}

    def walk(prefix, value):
        for key, item in value.items():
            name = f"{prefix}{key}"
            if isinstance(item, Item):
                flat[name] = item if item.tied_to is None else replace(item, tied_to=prefix + item.tied_to)
            elif key == _EXTRA_STATE or name.endswith(f".{_EXTRA_STATE}"):
                try:
                    modules[name] = plain(item, name)
                except InvalidArgument:
                    reason = "numbers, texts, lists and dicts of such can be kept, and tensors by themselves"
                    content.left_out.append(f"{name!r} of the model: {_kind(item)}; of extra states, {reason}")
            elif isinstance(item, dict):
                walk(f"{name}.", item)
            else:
                content.left_out.append(f"{name!r} of the model: no tensor but {_kind(item)}")

    walk("", model)
    names = clean([*flat, *modules])
    local = next((name for name in names.values() if name.rpartition(".")[2] in ("flat_param", "_flat_param")), None)
    if local is not None:
        raise Unsupported(
            f"{content.path}: {local!r} is a flat parameter: a local state dict of FSDP's, of which nothing tells "
            "the tensors; "
            "save a full or a sharded one"
        )
    if len(set(names.values())) < len(names):
        names = {name: name for name in names}
    for name, item in flat.items():
        if item.tied_to is not None:
            item.tied_to = names.get(item.tied_to, item.tied_to)
        elif ties.get(names[name]) in content.items:
            item.tied_to = ties[names[name]]
        content.items[names[name]] = item
    if modules:
        content.json[MODULES] = {names[name]: value for name, value in modules.items()}


def _unflat(content, optimizer):
    """{"state": {name: {key: value}}, "param_groups": [...]} of an optimizer's state dict, flat or not."""
    if "state" in optimizer or "param_groups" in optimizer:
        return optimizer
    states, options = {}, {}
    for key, value in optimizer.items():
        what, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        if what in ("state", "param_groups") and name:
            (states if what == "state" else options).setdefault(name, {})[last] = value
        else:
            content.left_out.append(f"the optimizer's {key!r}: neither a state nor an option of a parameter")
    groups = []
    for name, values in options.items():  # each parameter has its group's options
        for group in groups:
            if {key: value for key, value in group.items() if key != "params"} == values:
                group["params"].append(name)
                break
        else:
            groups.append(values | {"params": [name]})
    return {"state": states, "param_groups": groups}


def _add_optimizer(content, optimizer):
    """The JSON value "optimizer" and the tensors of a state dict, as training.save makes them."""
    lost = {}  # {(what, reason): names of parameters}
    for key, value in optimizer.items():
        if key not in ("state", "param_groups"):
            content.left_out.append(f"the optimizer's {key!r} ({_kind(value)}): neither its state nor its groups")
    groups = [
        group | {"params": list(map(str, group.get("params", ())))} for group in optimizer.get("param_groups") or []
    ]
    states = _states_of(content, optimizer.get("state") or {}, groups)
    names = _names_of(content, states, groups)
    result = {"type": None, "groups": [], "numbers": {}}
    for index, group in enumerate(groups):
        kept = {"params": [names[param] for param in group["params"]]}
        for key, value in group.items():
            if key in ("params", "param_names"):
                continue
            try:
                kept[key] = encode(_number_of(value), key)
            except FsdpError:
                reason = "numbers, texts, lists and dicts of such can be kept"
                name = f"the option {key!r} of the optimizer's group {index}"
                content.left_out.append(f"{name}: {_kind(value)}; {reason}")
        result["groups"].append(kept)
    for param, values in states.items():
        for key, value in values.items():
            try:
                _add_state(content, result["numbers"], names[param], key, value)
            except FsdpError as error:
                lost.setdefault((key, error.message), []).append(names[param])
    for (key, reason), of in lost.items():
        content.left_out.append(f"the optimizer's state {key!r} of {some(of)}: {reason}")
    content.json["optimizer"] = result


def _states_of(content, states, groups):
    """{a parameter's key in the optimizer: its state}, without what is no parameter's."""
    known = {param for group in groups for param in group["params"]}
    found = {}
    for key, value in states.items():
        if not isinstance(value, dict):
            content.left_out.append(f"the optimizer's state {key!r}: {_kind(value)}, which is no parameter's state")
        elif known and str(key) not in known:
            content.left_out.append(f"the optimizer's state {key!r}: of no parameter in its groups")
        else:
            found[str(key)] = value
    return found


def _number_of(value):
    """The number that a tensor of one element is; all else as it is. Raises Unsupported."""
    if isinstance(value, Item) and math.prod(value.shape) == 1:
        return number(value)
    return value


def _add_state(content, numbers, name, key, value):
    """Add one state of a parameter's. Raises FsdpError, whose message says why it can't be kept."""
    if not isinstance(key, str) or "/" in key:
        raise InvalidArgument("its own name is to be a text without '/'")
    if isinstance(value, Item) and value.shape != ():
        content.items[f"{OPTIMIZER}{key}/{name}"] = replace(value, tied_to=None)
        return
    if isinstance(value, Item):
        kept = {"value": encode(_number_of(value), key), "dtype": value.dtype}
    elif isinstance(value, (bool, int, float)):
        kept = encode(value, key)
    else:
        try:
            if isinstance(value, dict):  # would be taken for a number with its dtype
                raise InvalidArgument(key)
            kept = plain(value, key)
        except InvalidArgument:
            reason = f"{_kind(value)}; tensors, numbers, texts and lists of numbers and texts can be kept"
            raise InvalidArgument(reason) from None
    numbers.setdefault(name, {})[key] = kept


def _names_of(content, states, groups):
    """{a parameter's key in the optimizer: its name}. Keys are names already, or numbers in the order of the groups."""
    keys = list(dict.fromkeys([*(param for group in groups for param in group["params"]), *states]))
    if not all(key.isdigit() for key in keys) or any(key in content.items for key in keys):
        return clean(keys)
    given = {}
    for group in groups:
        given.update(zip(group["params"], group.get("param_names") or ()))
    if len(given) == len(keys):
        cleaned = clean(list(given.values()))
        return {key: cleaned[name] for key, name in given.items()}
    model = [name for name, item in content.items.items() if item.tied_to is None and not name.startswith(OPTIMIZER)]
    if not model:
        raise InvalidArgument(
            f"{content.path}: its optimizer knows parameters by their numbers, and there is no model to tell their "
            "names: "
            "save both in one file, or the optimizer with "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
        )
    parameters = model
    if len(parameters) != len(keys):
        parameters = [n for n in model if content.items[n].floats and n.rpartition(".")[2] not in _BUFFERS]
    fits = len(parameters) == len(keys)
    found = dict(zip(sorted(keys, key=int), parameters))
    for key, name in found.items():
        whole = content.items[name].shape
        for item in states.get(key, {}).values():
            if isinstance(item, Item) and item.shape != () and len(item.shape) == len(whole):
                fits = fits and item.shape == whole
    if not fits:
        raise InvalidArgument(
            f"{content.path}: its optimizer knows {len(keys)} parameters by their numbers, which don't tell which of "
            "the "
            f"model's {len(model)} tensors they are: save it with torch.distributed.checkpoint.state_dict."
            "get_optimizer_state_dict, or make the optimizer with model.named_parameters()"
        )
    return found


# ---- Flat to nested --------------------------------------------------------------------------------------------------


def value_of(content, left_out):
    """The nested value of a Content, with Items for tensors and Scalars for numbers that are tensors to optimizers;
    what it has no place for is added to `left_out`, in words. An optimizer's parameters go by their names, which its
    own `load_state_dict` takes as well as numbers: only their order counts there."""
    model = {name: item for name, item in content.items.items() if not name.startswith(OPTIMIZER)}
    json = dict(content.json)
    if isinstance(json.get(MODULES), dict):
        model |= decode(json.pop(MODULES))
    optimizer = json.pop("optimizer", None)
    states = [name for name in content.items if name.startswith(OPTIMIZER)]
    if optimizer is None and states:
        left_out.append(f"{some(states)}: the optimizer's groups are not there, which they go with")
    if optimizer is None and not json:
        return model
    value = {MODEL: model}
    if optimizer is not None:
        value[OPTIM] = _optimizer_of(content, optimizer)
        if optimizer.get("type"):
            left_out.append(f"the optimizer's type ({optimizer['type']}): state dicts have no place for it")
    for key, item in json.items():
        if key in value:
            left_out.append(f"the JSON value {key!r}: its name is where the {key} goes")
        else:
            value[key] = decode(item)
    return value


def _optimizer_of(content, optimizer):
    states = {}
    for name, values in optimizer["numbers"].items():
        states[name] = {key: _scalar(key, value) for key, value in values.items()}
    for name, item in content.items.items():
        if name.startswith(OPTIMIZER):
            key, _, param = name[len(OPTIMIZER) :].partition("/")
            states.setdefault(param, {})[key] = item
    order = dict.fromkeys(name for group in optimizer["groups"] for name in group["params"])
    groups = []
    for group in optimizer["groups"]:
        options = {key: _tuples(decode(value)) for key, value in group.items() if key != "params"}
        groups.append(options | {"params": group["params"]})
    lost = [name for name in states if name not in order]
    if lost:
        raise InvalidArgument(f"{content.path}: the optimizer's state has {lost[0]!r}, which is in none of its groups")
    return {"state": {name: states[name] for name in order if name in states}, "param_groups": groups}


def _scalar(key, value):
    """What a value in an optimizer's JSON stands for; a step counter is a tensor, whatever it was elsewhere."""
    if isinstance(value, dict) and "dtype" in value:
        return Scalar(decode(value["value"]), value["dtype"])
    value = decode(value)
    step = key == "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
    return Scalar(value, "float32") if step else value


def _tuples(value):
    """Options such as betas are tuples in optimizers; JSON made them lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
