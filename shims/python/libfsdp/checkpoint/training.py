"""Saving and loading a training run: a model, its optimizer, a grad scaler, the host's own numbers, and each rank's own
bytes. What a framework's modules and optimizers look like is its adapter's: see adapter.py.

Names in the checkpoint: a model's tensors have the names that the model without wrappers gives them, so that weights of
others load, and others can load ours. "optimizer/exp_avg/layer.weight" is the optimizer's "exp_avg" of "layer.weight";
"rank/rng" is the "rng" of each rank. JSON values: "optimizer" (groups and numbers), "scaler", "extra", "modules" (their
extra states, where they have such).
"""

import math
from ctypes import c_uint64, string_at
from dataclasses import dataclass, field
from hashlib import blake2b

from ..errors import InvalidArgument, Mismatch, NotFound
from ..state import Entry, StateDict
from ..tensor import copy, zeros
from .adapter import adapter_of
from .files import Checkpoint, write

OPTIMIZER, OF_RANK = "optimizer/", "rank/"


@dataclass
class Loaded:
    """What `load` gives.

    extra       the value that was saved as `extra`, or None
    of_rank     {name: uint8 Tensor} of this rank's own bytes; None where the checkpoint has none, and where as many ranks as
                saved it are not there now: what belonged to a rank then belongs to nobody
    missing     names of the model's that the checkpoint lacks (strict=False)
    unexpected  names of the checkpoint that the model lacks (strict=False)
    unused      options of the saved optimizer's groups that this optimizer does not have
    checkpoint  the Checkpoint itself, still open
    """

    extra: object = None
    of_rank: dict = None
    missing: list = field(default_factory=list)
    unexpected: list = field(default_factory=list)
    unused: list = field(default_factory=list)
    checkpoint: Checkpoint = None


def save(path, model, optimizer=None, *, scaler=None, extra=None, of_rank=None, group=None, **options):
    """Save a training run. Collective over the model's ranks.

    model      a module of torch's or TensorPlay's, or a layer of libfsdp.numpy; sharded or not
    optimizer  one of the same framework, over the model's parameters
    scaler     a grad scaler: anything with state_dict()
    extra      what JSON can hold: step counters, say. Rank 0's is kept
    of_rank    {name: bytes} of this rank's own: the state of its random generator, say. bytes, or arrays
    group      a libfsdp.Group of all ranks that hold the model; None: the model's own, or its framework's default group
    options    of `write`: full, background, sync, max_file_bytes

    Returns a Save with background=True, else None. Raises as `write` does.
    """
    adapter = adapter_of(model)
    adapter.settle(model)
    group = adapter.group(model) if group is None else group
    state = StateDict()
    pieces = _add_model(state, adapter, model, group, saving=True)
    if optimizer is not None:
        _add_optimizer(state, adapter, model, optimizer, pieces, group)
    modules = adapter.extra_states(model)
    if modules:
        values = {name: plain(module.get_extra_state(), name) for name, module in modules.items()}
        state.set_json("modules", values)
    if scaler is not None:
        state.set_json("scaler", encode(scaler.state_dict(), "scaler"))
    if extra is not None:
        state.set_json("extra", extra)
    if of_rank and options.get("full"):
        raise InvalidArgument("of_rank: whole tensors belong to no rank; save without full=True")
    for name, value in (of_rank or {}).items():
        if isinstance(value, str):
            raise InvalidArgument(f"of_rank: {name!r} is a text; give its bytes, text.encode()")
        value = bytearray(value) if isinstance(value, bytes) else value
        state.add(OF_RANK + name, value, of_rank=True, read_only=True)
    return write(path, state, group, **options)


def load(path, model=None, optimizer=None, *, scaler=None, strict=True, group=None, progress=None):
    """Load what `save` saved, on any number of ranks and whatever framework saved it; also weights of others.

    model, optimizer, scaler  as for `save`; None: not loaded. Each rank reads its own parts; shards are written in place
    strict    False: what the checkpoint lacks keeps its values, what the model lacks is passed over
    progress  progress(bytes done, bytes in all), now and then

    An optimizer's state is given to it by the parameters' names, so their order and grouping may differ; parameters that had no
    state have none afterwards. Returns a Loaded. Raises NotFound, Corrupt, InvalidArgument (names, shapes or dtypes that
    don't fit: nothing is written then).
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    loaded = Loaded(extra=checkpoint.json.get("extra"), checkpoint=checkpoint)
    state, restore = StateDict(), []
    rank, size = 0, 1
    if model is not None:
        adapter = adapter_of(model)
        adapter.settle(model)
        group = adapter.group(model) if group is None else group
        pieces = _add_model(state, adapter, model, group)
        there = [name for name in checkpoint if not name.startswith((OPTIMIZER, OF_RANK))]
        modules, values = adapter.extra_states(model), checkpoint.json.get("modules", {})
        found = {piece.tied_to or name for name, piece in pieces.items() if name in checkpoint}  # by any of its names
        loaded.missing = [name for name, piece in pieces.items() if (piece.tied_to or name) not in found]
        loaded.missing += [name for name in modules if name not in values]
        loaded.unexpected = [name for name in there if name not in pieces]
        loaded.unexpected += [name for name in values if name not in modules]
        extra = [(module, decode(values[name])) for name, module in modules.items() if name in values]
        if strict and (loaded.missing or loaded.unexpected):
            raise InvalidArgument(
                f"{checkpoint.path}: {_names('lacks', loaded.missing)}{_names('has also', loaded.unexpected)}"
                "the model's names must be the checkpoint's, unless strict=False"
            )
    if group is not None:
        rank, size = group.rank, group.size
    if optimizer is not None:
        if model is None:
            raise InvalidArgument("optimizer: its parameters have names by the model; give that too")
        saved = checkpoint.json.get("optimizer")
        if saved is None:
            raise NotFound(f"{checkpoint.path}: has no optimizer's state; leave `optimizer` out")
        restore = _plan_optimizer(state, adapter, model, optimizer, pieces, checkpoint, saved, loaded, strict)
    if scaler is not None and "scaler" not in checkpoint.json:
        raise NotFound(f"{checkpoint.path}: has no grad scaler's state; leave `scaler` out")
    checkpoint.load(state, partial=True, progress=progress)
    if model is not None:
        adapter.loaded(model)
        for module, value in extra:
            module.set_extra_state(value)
    for step in restore:
        step()
    if scaler is not None:
        scaler.load_state_dict(decode(checkpoint.json["scaler"]))
    if checkpoint.of_ranks and checkpoint.info.ranks == size:
        own = [entry for entry in checkpoint.of_ranks if entry.rank == rank]
        loaded.of_rank = {entry.name[len(OF_RANK) :]: checkpoint.read(entry.name, rank=rank) for entry in own}
    return loaded


def _names(what, names):
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what} {', '.join(map(repr, names[:3]))}{more}; "


def _add_model(state, adapter, model, group, saving=False):
    """Add a model's tensors; {name: Piece} of them. saving: where one copy is kept, others add an empty part."""
    pieces = {}
    for piece in adapter.pieces(model, group):
        pieces[piece.name] = piece
        if piece.tied_to is not None:
            state.tie(piece.name, piece.tied_to)
        elif saving and piece.from_copy0 and piece.copies > 1 and piece.shape:
            part = piece.array[:0] if piece.copy else piece.array
            state.add(piece.name, part, shape=piece.shape, offset=piece.offset, dtype=piece.dtype)
        else:
            _add_piece(state, piece.name, piece, piece.array, piece.dtype)
    return pieces


def _add_piece(state, name, piece, array, dtype=None):
    state.add(
        name, array, shape=piece.shape, offset=piece.offset, dtype=dtype, copies=piece.copies, copy=piece.copy
    )


def _add_optimizer(state, adapter, model, optimizer, pieces, group):
    """Add an optimizer's state: tensors shaped like their parameter's part lie as that does; others are whole, the same on all
    ranks; numbers are JSON."""
    groups, numbers, whole = [], {}, []
    ranks, rank = (1, 0) if group is None else (group.size, group.rank)
    for options, parameters in adapter.groups(model, optimizer):
        groups.append({"params": list(parameters), **encode(options, "optimizer")})
        for name, parameter in parameters.items():
            piece = pieces[name] if pieces[name].tied_to is None else pieces[pieces[name].tied_to]
            for key, value in adapter.state(optimizer, parameter).items():
                if not isinstance(key, str) or "/" in key:
                    raise InvalidArgument(f"optimizer: the state {key!r} of {name!r}: its name is to be a text without '/'")
                number, dtype = adapter.number(value)
                if number is not None:
                    number = encode(number, key)
                    numbers.setdefault(name, {})[key] = {"value": number, "dtype": dtype} if dtype else number
                elif value is None or isinstance(value, (str, list)):
                    numbers.setdefault(name, {})[key] = plain(value, f"optimizer: the state {key!r} of {name!r}")
                elif not hasattr(value, "shape"):
                    raise InvalidArgument(
                        f"optimizer: the state {key!r} of {name!r} is a {type(value).__name__}: tensors, numbers, texts and "
                        "lists of numbers and texts can be kept in a checkpoint"
                    )
                elif adapter.shape(value) == adapter.shape(piece.array):
                    _add_piece(state, f"{OPTIMIZER}{key}/{name}", piece, value)
                else:
                    whole.append(f"{OPTIMIZER}{key}/{name}")
                    state.add(whole[-1], value, copies=ranks, copy=rank)
    if whole and ranks > 1:
        _check_alike(state, whole, group)
    kind = type(optimizer).__name__
    state.set_json("optimizer", {"type": kind, "groups": groups, "numbers": numbers})


def _check_alike(state, names, group):
    """What a checkpoint has once, of several ranks, must be the same on all: a state that is neither like its parameter's
    part nor so may be a part of something, and nothing tells of what. Collective. Raises Mismatch."""
    mine, all_of_them = zeros((len(names),), "uint64"), zeros((group.size, len(names)), "uint64")
    sums = (c_uint64 * len(names)).from_address(mine.data_ptr)
    for index, name in enumerate(names):
        part = state[name]
        flat = zeros(part.shape, part.dtype)
        copy(part, flat)
        text = string_at(flat.data_ptr, flat.nbytes) if flat.nbytes else b""
        sums[index] = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
    group.all_gather(mine, all_of_them)
    found = (c_uint64 * (group.size * len(names))).from_address(all_of_them.data_ptr)
    for index, name in enumerate(names):
        if any(found[rank * len(names) + index] != found[index] for rank in range(group.size)):
            key, _, param = name[len(OPTIMIZER) :].partition("/")
            raise Mismatch(
                f"optimizer: the state {key!r} of {param!r} is shaped unlike the parameter's shard, and another on each rank: "
                "it can't be told how its parts make up a whole; save without `optimizer`, or keep it in `of_rank`"
            )


def _plan_optimizer(state, adapter, model, optimizer, pieces, checkpoint, saved, loaded, strict):
    """Add arrays for an optimizer's state to `state`, and give what is to be called once they have been read."""
    options_of, states = {}, {}
    for entry in saved["groups"]:
        options = {key: value for key, value in entry.items() if key not in ("params", "param_names")}
        for name in entry["params"]:
            options_of[name], states[name] = options, {}
    for name, values in saved["numbers"].items():
        for key, value in values.items():
            tensor = isinstance(value, dict) and "dtype" in value
            value, dtype = (value["value"], value["dtype"]) if tensor else (value, None)
            states.setdefault(name, {})[key] = adapter.scalar(key, decode(value), dtype)
    for name, entry in checkpoint.items():
        if name.startswith(OPTIMIZER):
            key, _, param = name[len(OPTIMIZER) :].partition("/")
            states.setdefault(param, {})[key] = entry
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    if strict and any(states.values()) and saved.get("type") and not _alike(saved["type"], kinds):
        raise InvalidArgument(
            f"{checkpoint.path}: has the state of a {saved['type']}, and optimizer is a {kinds[0]}: give one of the same kind, or "
            "strict=False if it can use what the other has kept"
        )
    steps, known = [], set()
    for index, (present, parameters) in enumerate(adapter.groups(model, optimizer)):
        names = list(parameters)
        known.update(names)
        lost = [name for name in names if name not in options_of]
        if lost and strict:
            raise InvalidArgument(
                f"{checkpoint.path}: the saved optimizer has not the parameters that this one has: "
                f"{_names('it lacks', lost)}give strict=False to go on without their state"
            )
        found = [options_of[name] for name in names if name in options_of]
        if any(options != found[0] for options in found[1:]):
            raise InvalidArgument(
                f"{checkpoint.path}: parameters of the optimizer's group {index} were in groups of different options "
                "when it was saved; group them as then"
            )
        if found:
            options = decode(found[0])
            loaded.unused += [key for key in options if key not in present and key not in loaded.unused]
            taken = {key: value for key, value in options.items() if key in present}
            steps.append(lambda index=index, taken=taken: adapter.set_options(optimizer, index, taken))
        for name, parameter in parameters.items():
            if name in states:
                values = _arrays_for(state, adapter, pieces, name, states[name])
                steps.append(lambda p=parameter, values=values: adapter.set_state(optimizer, p, values))
    surplus = [name for name in states if name not in known]
    if surplus and strict:
        raise InvalidArgument(
            f"{checkpoint.path}: {_names('the saved optimizer has also', surplus)}give strict=False to leave it out"
        )
    return steps


def _alike(saved, kinds):
    """Whether an optimizer whose class and bases have the names `kinds` has the states of one that was a `saved`."""
    return saved in kinds or {saved, kinds[0]} <= {"Adam", "AdamW"}


def _arrays_for(state, adapter, pieces, name, values):
    """{key: array or number} of a parameter's state, the arrays added to `state` to be read into."""
    piece = pieces[name] if pieces[name].tied_to is None else pieces[pieces[name].tied_to]
    found = {}
    for key, value in values.items():
        if not isinstance(value, Entry):
            found[key] = value
            continue
        if tuple(value.shape) == tuple(piece.shape):
            found[key] = adapter.fresh(piece.array, adapter.shape(piece.array), value.dtype)
            _add_piece(state, f"{OPTIMIZER}{key}/{name}", piece, found[key], value.dtype)
        else:
            found[key] = adapter.fresh(piece.array, tuple(value.shape), value.dtype)
            state.add(f"{OPTIMIZER}{key}/{name}", found[key])
    return found


# JSON has no tuples' difference from lists that matters here, and no infinities: those travel under a name.


def encode(value, name):
    """A value of options or states as JSON can hold it. Raises InvalidArgument for what it can't."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, (list, tuple)):
        return [encode(item, name) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value) and value.keys() != {"float"}:
        return {key: encode(item, f"{name}.{key}") for key, item in value.items()}
    if hasattr(value, "item") and getattr(value, "size", None) != 0:  # a tensor or array of one element: a learning rate
        try:
            return encode(value.item(), name)
        except (ValueError, RuntimeError):
            pass
    raise InvalidArgument(f"{name}: a {type(value).__name__} can't be kept in a checkpoint; numbers, texts and lists can")


def plain(value, name):
    """encode, of what is the same when it comes back: no tuples, and no tensors of one element."""

    def check(item):
        if isinstance(item, list):
            return all(map(check, item))
        if isinstance(item, dict):
            return all(map(check, item.values()))
        return item is None or isinstance(item, (bool, int, float, str))

    if not check(value):
        raise InvalidArgument(f"{name}: can't be kept in a checkpoint; numbers, texts, lists and dicts of such can")
    return encode(value, name)


def decode(value):
    """The reverse of encode."""
    if isinstance(value, dict):
        if value.keys() == {"float"}:
            return float(value["float"])
        return {key: decode(item) for key, item in value.items()}
    return [decode(item) for item in value] if isinstance(value, list) else value
