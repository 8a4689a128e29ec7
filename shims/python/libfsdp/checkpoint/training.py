"""Saving and loading a training run: a model, its optimizer, a grad scaler, the host's own numbers, and each rank's own
bytes. What a framework's modules and optimizers look like is its adapter's: see adapter.py.

Names in the checkpoint: a model's tensors have the names that the model without wrappers gives them, so that weights of
others load, and others can load ours. "optimizer/exp_avg/layer.weight" is the optimizer's "exp_avg" of "layer.weight";
"rank/rng" is the "rng" of each rank. JSON values: "optimizer" (groups and numbers), "scaler", "extra", "modules" (their
extra states, where they have such).
"""

import contextlib
import copy
import math
from dataclasses import dataclass, field, replace

from ..borrow import borrow
from ..dtypes import name_in, name_of
from ..errors import InvalidArgument, NotFound
from ..state import Entry, StateDict
from .adapter import adapter_of
from .alike import Copies, agreed, same_values
from .files import Checkpoint, write

OPTIMIZER, OF_RANK = "optimizer/", "rank/"


@dataclass
class Loaded:
    """What `load` gives.

    extra       the value that was saved as `extra`, or None
    of_rank     {name: uint8 Tensor} of this rank's own bytes; None where the checkpoint has none, and where as many
                ranks as saved it are not there now: what belonged to a rank then belongs to nobody
    missing     names of the model's that the checkpoint lacks (strict=False)
    unexpected  names of the checkpoint that the model lacks; of several that are one tensor in the model and have
                values of their own, all but the first, which was taken (strict=False)
    missing_state     parameters of the optimizer that the saved one lacks: their state is as before (strict=False)
    unexpected_state  parameters of the saved optimizer that this one lacks (strict=False)
    unused      options of the saved optimizer's groups that this optimizer does not have
    checkpoint  the Checkpoint itself, still open
    """

    extra: object = None
    of_rank: dict = None
    missing: list = field(default_factory=list)
    unexpected: list = field(default_factory=list)
    missing_state: list = field(default_factory=list)
    unexpected_state: list = field(default_factory=list)
    unused: list = field(default_factory=list)
    checkpoint: Checkpoint = None


def save(path, model, optimizer=None, *, scaler=None, extra=None, of_rank=None, group=None, **options):
    """Save a training run. Collective over the model's ranks.

    model      a module of torch's or TensorPlay's, or a layer of libfsdp.numpy; sharded or not
    optimizer  one of the same framework, over the model's parameters
    scaler     a grad scaler: anything with state_dict()
    extra      what JSON can hold, and infinities: step counters, a scheduler's state_dict(). Rank 0's is kept
    of_rank    {name: bytes} of this rank's own: the state of its random generator, say. bytes, or arrays
    group      a libfsdp.Group of all ranks that hold the model; None: the model's own, or its framework's default group
    options    of `write`: full, background, sync, max_file_bytes

    Parameters that are whole on every rank (of a plain model, of DDP, ignored by fully_shard) and their states are
    compared between the ranks first; of buffers rank 0's are kept.

    Returns a Save with background=True, else None. Raises as `write` does, and Mismatch for such that differ; what is
    wrong on one rank is raised on all.
    """
    adapter = adapter_of(model)
    group = adapter.group(model) if group is None else group
    state, copies, error = StateDict(), Copies(), None
    try:
        adapter.settle(model)
        _collect(state, copies, adapter, model, optimizer, scaler, extra, of_rank, group, options)
    except Exception as failure:
        error = failure
    agreed(path, group, error)
    copies.check(state, group)
    return write(path, state, group, **options)


def _collect(state, copies, adapter, model, optimizer, scaler, extra, of_rank, group, options):
    """What `save` is given, into a StateDict."""
    pieces = _add_model(state, adapter, model, group, copies)
    if optimizer is not None:
        _add_optimizer(state, adapter, model, optimizer, pieces, group, copies)
    modules = adapter.extra_states(model)
    if modules:
        values = {name: plain(module.get_extra_state(), name) for name, module in modules.items()}
        state.set_json("modules", values)
    if scaler is not None:
        state.set_json("scaler", encode(scaler.state_dict(), "scaler"))
    if extra is not None:
        state.set_json("extra", encode(extra, "extra", arrays=False))
    if of_rank and options.get("full"):
        raise InvalidArgument("of_rank: whole tensors belong to no rank; save without full=True")
    for name, value in (of_rank or {}).items():
        if isinstance(value, str):
            raise InvalidArgument(f"of_rank: {name!r} is a text; give its bytes, text.encode()")
        value = bytearray(value) if isinstance(value, bytes) else value
        state.add(OF_RANK + name, value, of_rank=True, read_only=True)


def load(path, model=None, optimizer=None, *, scaler=None, strict=True, group=None, progress=None):
    """Load what `save` saved, on any number of ranks and whatever framework saved it; also weights of others.

    model, optimizer, scaler  as for `save`; None: not loaded. Each rank reads its own parts; shards are written in
              place
    strict    False: what the checkpoint lacks keeps its values, what the model lacks is passed over
    progress  progress(bytes done, bytes in all), now and then

    An optimizer's state is given to it by the parameters' names, so their order and grouping may differ; parameters
    that had no state have none afterwards. It has the dtype that it was saved with, or where the parameter's is another
    now, the parameter's. Groups without parameters have the options of such ones, in their order.

    Returns a Loaded. Raises NotFound, Corrupt, InvalidArgument (names, shapes or dtypes that don't fit, names with
    values of their own that are one tensor in the model); model, optimizer and scaler are as they were then, but the
    model after damage that shows while values are read.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    loaded = Loaded(extra=decode(checkpoint.json.get("extra")), checkpoint=checkpoint)
    state, restore, pieces, at_once = StateDict(), [], {}, []
    rank, size = 0, 1
    if model is not None:
        adapter = adapter_of(model)
        adapter.settle(model)
        group = adapter.group(model) if group is None else group
        pieces = _add_model(state, adapter, model, group, there=checkpoint)
        at_once = _plan_model(adapter, model, pieces, checkpoint, loaded, strict)
    if group is not None:
        rank, size = group.rank, group.size
    if optimizer is not None:
        if model is None:
            raise InvalidArgument("optimizer: its parameters have names by the model; give that too")
        saved = checkpoint.json.get("optimizer")
        if saved is None:
            raise NotFound(f"{checkpoint.path}: has no optimizer's state; leave `optimizer` out")
        restore = _plan_optimizer(state, adapter, model, optimizer, pieces, checkpoint, saved, loaded, strict)
    if scaler is not None:
        if "scaler" not in checkpoint.json:
            raise NotFound(f"{checkpoint.path}: has no grad scaler's state; leave `scaler` out")
        at_once.append((scaler.state_dict, scaler.load_state_dict, decode(checkpoint.json["scaler"])))
    if checkpoint.of_ranks and checkpoint.info.ranks == size:
        own = [entry for entry in checkpoint.of_ranks if entry.rank == rank]
        loaded.of_rank = {entry.name[len(OF_RANK) :]: checkpoint.read(entry.name, rank=rank) for entry in own}
    _set_and_load(at_once, lambda: checkpoint.load(state, partial=True, progress=progress))
    for step in restore:
        step()
    if model is not None:
        adapter.written([piece.array for name, piece in pieces.items() if name in checkpoint])
    return loaded


def _set_and_load(at_once, load):
    """Set values that others keep ([(get, set, value), ...]), who may refuse them, and load the tensors; when any of it
    fails, those that were set are what they were."""
    undo = []
    try:
        for get, put, value in at_once:
            before = copy.deepcopy(get())
            undo.append(lambda put=put, before=before: put(before))
            put(value)
        load()
    except BaseException:
        for step in reversed(undo):
            with contextlib.suppress(Exception):  # what went wrong first is to be told
                step()
        raise


def _plan_model(adapter, model, pieces, checkpoint, loaded, strict):
    """Compare names, and give the modules' extra states: [(get, set, value), ...]."""
    modules, values = adapter.extra_states(model), checkpoint.json.get("modules", {})
    there = [name for name in checkpoint if not name.startswith((OPTIMIZER, OF_RANK))]
    found = {}  # {name of a tensor: its names that are there}
    for name, piece in pieces.items():
        if name in checkpoint:
            found.setdefault(piece.tied_to or name, []).append(name)
    loaded.missing = [name for name, piece in pieces.items() if (piece.tied_to or name) not in found]
    loaded.missing += [name for name in modules if name not in values]
    loaded.unexpected = [name for name in there if name not in pieces]
    loaded.unexpected += [name for name in values if name not in modules]
    if strict and (loaded.missing or loaded.unexpected):
        raise InvalidArgument(
            f"{checkpoint.path}: {_names('lacks', loaded.missing)}{_names('has also', loaded.unexpected)}"
            "the model's names must be the checkpoint's, unless strict=False"
        )
    for first, *others in found.values():
        untied = [name for name in others if not _one_tensor(checkpoint, first, name)]
        if untied and strict:
            raise InvalidArgument(
                f"{checkpoint.path}: {first!r} and {untied[0]!r} have values of their own, and are one tensor in the "
                f"model: untie them there, or give strict=False to take those of {first!r}"
            )
        loaded.unexpected += untied
    return [
        (module.get_extra_state, module.set_extra_state, decode(values[name]))
        for name, module in modules.items()
        if name in values
    ]


def _one_tensor(checkpoint, one, other):
    """Whether two names of a checkpoint mean the same: tied there, or by their values."""
    tied = [checkpoint[name].tied_to or name for name in (one, other)]
    return tied[0] == tied[1] or same_values(checkpoint, *tied)


def _names(what, names):
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what} {', '.join(map(repr, names[:3]))}{more}; "


def _add_model(state, adapter, model, group, copies=None, there=()):
    """Add a model's tensors; {name: Piece} of them.

    copies  when saving: where one copy is kept, others add an empty part
    there   when loading: the names that will be read. What else there is stays read-only: frameworks notice what may be
            written, and a backward that needs its values would be refused
    """
    pieces, memory = {}, {}
    for piece in adapter.pieces(model, group):
        if piece.tied_to is None:
            first = memory.setdefault(_memory(piece), piece.name)
            piece = piece if first == piece.name else replace(piece, tied_to=first)
        pieces[piece.name] = piece
    written = {piece.tied_to or name for name, piece in pieces.items() if name in there}
    for piece in pieces.values():
        if piece.tied_to is not None:
            state.tie(piece.name, piece.tied_to)
        elif copies is not None and piece.from_copy0 and piece.copies > 1 and piece.shape:
            part = piece.array[:0] if piece.copy else piece.array
            state.add(piece.name, part, shape=piece.shape, offset=piece.offset, dtype=piece.dtype, read_only=True)
        else:
            what = f"model: the parameter {piece.name!r}, which is not sharded,"
            _add_piece(state, piece.name, piece, piece.array, piece.dtype, piece.name not in written, copies, what)
    return pieces


def _memory(piece):
    """What tells whether two pieces are the same memory, as two modules' parameters on one storage are; another for
    each piece that is a part, or empty: those are told apart by their names, as other ranks do."""
    tensor = borrow(piece.array, piece.name)
    shape = tuple(tensor.shape[: tensor.ndim])
    if shape != tuple(piece.shape) or not math.prod(shape):
        return piece.name
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
    return tensor.data + tensor.byte_offset, shape, strides, name_in(tensor), piece.dtype


def _add_piece(state, name, piece, array, dtype=None, read_only=False, copies=None, what=None):
    """copies, what: when saving, and for messages."""
    where = dict(shape=piece.shape, offset=piece.offset, copies=piece.copies, copy=piece.copy)
    state.add(name, array, dtype=dtype, read_only=read_only, **where)
    if copies is not None and piece.copies > 1 and not (piece.kept_alike or piece.from_copy0):
        copies.add(
            name,
            piece.offset,
            what,
            "a checkpoint keeps one. Give all ranks the same (broadcast it), let fully_shard have it, or, where each "
            "rank's is its own (an expert, say), add it to a libfsdp.StateDict with of_rank=True for "
            "libfsdp.checkpoint.write",
        )


def _add_optimizer(state, adapter, model, optimizer, pieces, group, copies):
    """Add an optimizer's state: tensors shaped like their parameter's part lie as that does; others are whole, the same
    on all ranks; numbers are JSON."""
    groups, numbers = [], {}
    ranks, rank = (1, 0) if group is None else (group.size, group.rank)
    for options, parameters in adapter.groups(model, optimizer):
        groups.append({"params": list(parameters), **encode(options, "optimizer")})
        for name, parameter in parameters.items():
            piece = _first(pieces, name)
            for key, value in adapter.state(optimizer, parameter).items():
                what = f"optimizer: the state {key!r} of {name!r}"
                if not isinstance(key, str) or "/" in key:
                    raise InvalidArgument(f"{what}: its name is to be a text without '/'")
                number, dtype = adapter.number(value)
                if number is not None:
                    number = encode(number, key)
                    numbers.setdefault(name, {})[key] = {"value": number, "dtype": dtype} if dtype else number
                elif value is None or isinstance(value, (str, list)):
                    numbers.setdefault(name, {})[key] = plain(value, what)
                elif not hasattr(value, "shape"):
                    raise InvalidArgument(
                        f"{what} is a {type(value).__name__}: tensors, numbers, texts and lists of numbers and texts "
                        "can be kept in a checkpoint"
                    )
                elif adapter.shape(value) == adapter.shape(piece.array):
                    whose = f"{what}, which is not sharded,"
                    _add_piece(state, f"{OPTIMIZER}{key}/{name}", piece, value, None, True, copies, whose)
                else:
                    state.add(f"{OPTIMIZER}{key}/{name}", value, copies=ranks, copy=rank, read_only=True)
                    copies.add(
                        f"{OPTIMIZER}{key}/{name}",
                        (),
                        f"{what}, which is shaped unlike the parameter's shard,",
                        "it can't be told how its parts make up a whole; save without `optimizer`, or keep it in "
                        "`of_rank`",
                    )
    kind = type(optimizer).__name__
    state.set_json("optimizer", {"type": kind, "groups": groups, "numbers": numbers})


def _first(pieces, name):
    """The Piece that has the values of a name."""
    return pieces[pieces[name].tied_to or name]


def _plan_optimizer(state, adapter, model, optimizer, pieces, checkpoint, saved, loaded, strict):
    """Add arrays for an optimizer's state to `state`, and give what is to be called once they have been read."""
    options_of, states, of_nobody = {}, {}, []
    for entry in saved["groups"]:
        options = {key: value for key, value in entry.items() if key not in ("params", "param_names")}
        if not entry["params"]:
            of_nobody.append(options)
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
            f"{checkpoint.path}: has the state of a {saved['type']}, and optimizer is a {kinds[0]}: give one of the "
            "same kind, or strict=False if it can use what the other has kept"
        )
    groups = adapter.groups(model, optimizer)
    saved_as = _saved_names(pieces, [name for _, parameters in groups for name in parameters], states)
    loaded.unexpected_state = [name for name in states if name not in saved_as.values()]
    loaded.missing_state = [name for _, parameters in groups for name in parameters if name not in saved_as]
    if strict and (loaded.missing_state or loaded.unexpected_state):
        raise InvalidArgument(
            f"{checkpoint.path}: the saved optimizer has not the parameters that this one has: it "
            f"{_names('lacks', loaded.missing_state)}{_names('has also', loaded.unexpected_state)}give strict=False to "
            "go on without their state"
        )
    steps = []
    for index, (present, parameters) in enumerate(groups):
        found = [options_of[saved_as[name]] for name in parameters if saved_as.get(name) in options_of]
        if not parameters and of_nobody:  # the first such group has the first such one's, and so on
            found = [of_nobody.pop(0)]
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
            if name in saved_as:
                kept = checkpoint.get(saved_as[name])
                values = _arrays_for(state, adapter, _first(pieces, name), kept, states[saved_as[name]])
                steps.append(lambda p=parameter, values=values: adapter.set_state(optimizer, p, values))
    return steps


def _saved_names(pieces, names, saved):
    """{name of an optimizer's parameter: the name that it was saved under}: the same, or another that is tied to it."""
    found = {name: name for name in names if name in saved}
    for name in saved:
        if name in pieces and name not in found:
            for own in names:
                if own not in found and _first(pieces, own) is _first(pieces, name):
                    found[own] = name
                    break
    return found


def _alike(saved, kinds):
    """Whether an optimizer whose class and bases have the names `kinds` has the states of one that was a `saved`."""
    return saved in kinds or {saved, kinds[0]} <= {"Adam", "AdamW"}


def _arrays_for(state, adapter, piece, kept, values):
    """{key: array or number} of a parameter's state, the arrays added to `state` to be read into. kept: the Entry of
    the parameter itself, or None."""
    now, found = name_of(piece.array.dtype), {}
    for key, value in values.items():
        if not isinstance(value, Entry):
            found[key] = value
            continue
        # As saved, be it of another dtype than the parameter: the optimizer has seen to that. With a parameter that has
        # another dtype than then a state goes along, as in the frameworks' own load_state_dict.
        moved = kept is not None and kept.dtype != now and key != "step"
        dtype = now if moved and _is_float(now) and _is_float(value.dtype) else value.dtype
        if tuple(value.shape) == tuple(piece.shape):
            found[key] = adapter.fresh(piece.array, adapter.shape(piece.array), dtype)
            _add_piece(state, value.name, piece, found[key])
        else:
            found[key] = adapter.fresh(piece.array, tuple(value.shape), dtype)
            state.add(value.name, found[key])
    return found


def _is_float(dtype):
    return "float" in dtype


# ---- Values that are no tensors, as JSON can hold them: it has no tuples, whose difference from lists matters in some
# places only, and no infinities, which travel under a name.

_BEYOND = ("inf", "-inf", "nan")


def encode(value, name, arrays=True, tuples=True):
    """A value as JSON can hold it. arrays: those of one element (a learning rate) may become numbers; tuples: they may
    become lists. Raises InvalidArgument for what it can't hold, with its place."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, list) or tuples and isinstance(value, tuple):
        return [encode(item, f"{name}[{index}]", arrays, tuples) for index, item in enumerate(value)]
    if isinstance(value, dict) and not _is_beyond(value):
        for key in value:
            if not isinstance(key, str):
                raise InvalidArgument(
                    f"{name}: can't be kept in a checkpoint: the key {key!r} would come back as a text; make it one, "
                    "or give a list of [key, value] pairs"
                )
        return {key: encode(item, f"{name}.{key}", arrays, tuples) for key, item in value.items()}
    if arrays and hasattr(value, "item") and getattr(value, "size", None) != 0:
        try:
            return encode(value.item(), name)
        except (ValueError, RuntimeError):
            pass
    lists = "lists, tuples" if tuples else "lists"
    raise InvalidArgument(
        f"{name}: a {type(value).__name__} can't be kept in a checkpoint; numbers, texts, {lists} and dicts of such can"
    )


def plain(value, name):
    """encode, of what is the same when it comes back: no tuples, and no tensors of one element."""
    return encode(value, name, arrays=False, tuples=False)


def decode(value):
    """The reverse of encode."""
    if isinstance(value, dict):
        return float(value["float"]) if _is_beyond(value) else {key: decode(item) for key, item in value.items()}
    return [decode(item) for item in value] if isinstance(value, list) else value


def _is_beyond(value):
    return value.keys() == {"float"} and isinstance(value["float"], str) and value["float"] in _BEYOND
