"""Units: parameters that become full and sharded together. What they are for is in model.py."""

import contextlib
import ctypes
import weakref
from collections.abc import Iterable, Mapping
from ctypes import POINTER, byref, c_int32, c_void_p
from dataclasses import dataclass

from . import abi
from .borrow import _describe, borrow
from .callbacks import call, collect, set_callbacks
from .dtypes import NAMES, TABLE, name_of
from .errors import InvalidArgument, check
from .handle import Handle, integer, text
from .model import Model, Pointers, divisor_code
from .options import CASTS, PHASES, Strategy, choice, precision_pointer, reshard_code, reshard_value, strategy_code
from .tensor import Tensor
from .work import start

lib = abi.lib
_STATES = {
    abi.FSDP_UNIT_SHARDED: "sharded",
    abi.FSDP_UNIT_UNSHARDING: "unsharding",
    abi.FSDP_UNIT_UNSHARDED: "unsharded",
}


@dataclass(frozen=True)
class Meta:
    """Shape and dtype in place of a parameter's values, for a unit whose shards are filled afterwards.

    shape: an integer or a sequence of them. dtype: a name, or a NumPy, ml_dtypes or torch dtype.
    """

    shape: tuple
    dtype: str = "float32"

    def __post_init__(self):
        shape = self.shape if isinstance(self.shape, Iterable) else (self.shape,)
        object.__setattr__(self, "shape", tuple(integer(length, "shape", bits=64) for length in shape))
        object.__setattr__(self, "dtype", name_of(self.dtype))

    def _tensor(self):
        strides, step = [], 1
        for length in reversed(self.shape):
            strides.insert(0, step)
            step *= max(1, length)
        return _describe(self, 0, *TABLE[self.dtype][:2], self.shape, strides)


@dataclass(frozen=True)
class ParamInfo:
    """How a parameter lies on the ranks, from `Param.info()`."""

    name: str
    shape: tuple  # of the whole parameter
    shard_dim: int  # the dimension that is cut over the ranks
    shard_start: int  # this rank's part along it
    shard_length: int
    dtype: str  # of the shard
    full_dtype: str  # of the full view, and so of the gradients given to `post_backward`
    grad_dtype: str  # of the sharded gradient
    frozen: bool
    tied_to: str  # the name of the earlier parameter of the unit that this one is, or None
    used: bool  # as `Unit.used` says


@dataclass(frozen=True)
class UnitInfo:
    """How a unit is and what it has done, from `Unit.info()`. Counters are of this rank, since the unit was made."""

    name: str
    state: str
    n_params: int
    strategy: Strategy
    reshard_after_forward: object  # as it is in force: True, False, or a number of ranks
    shard_rank: int  # this rank among those that the parameters are sharded over
    shard_size: int
    replicate_rank: int  # and among the replicas
    replicate_size: int
    full_bytes: int  # of the full parameters
    shard_bytes: int
    publications: int  # unshards that moved data
    published_bytes: int  # of this rank's shards, in the full parameters' dtype, that they wrote or sent
    reduced_bytes: int  # gradient bytes given to reductions over the shard dimension
    replicated_bytes: int  # and over the replicas
    gradient_sync: bool  # as the unit's setter, or the model's, set it last
    all_reduce: bool
    gradient_divisor: float


class Param:
    """One parameter of a unit. Its tensors keep their addresses for the unit's life.

    shard  this rank's part, in the parameter's dtype, contiguous, private memory; the host's to update between
           iterations
    full   the whole parameter, in the unit's `Precision.param`; its content is defined while the unit is unsharded;
           private to this rank
    grad   this rank's part of the gradient; None while the parameter is frozen. Read it here after the
           `zero_grad` of a Model or Unit: a Tensor or array that was taken before has the old values until the next
           reduction
    frozen whether it takes no part in reductions, see `Unit.set_frozen`
    """

    def __init__(self, unit, index, name, frozen):
        self.index, self.name, self.frozen = index, name, frozen
        self._unit = weakref.ref(unit)
        self._grad = self._zeroed = None
        self.shard = unit._tensor(lib.fsdp_unit_param_shard, index)
        self.full = unit._tensor(lib.fsdp_unit_param_full, index)
        self._take_grad(unit)

    def _take_grad(self, unit):
        """Once for each zero_grad: the library clears the memory when it is asked for, and not before."""
        zeroed = unit.model._zeroed + unit._zeroed
        if not self.frozen and self._zeroed != zeroed:
            self._grad = unit._tensor(lib.fsdp_unit_param_grad, self.index)
            self._zeroed = zeroed

    def __reduce__(self):
        raise TypeError(
            "a libfsdp.Param can't be copied or pickled: it belongs to its unit; take .shard.numpy() or .full.numpy()"
        )

    @property
    def grad(self):
        if self.frozen:
            return None
        unit = self._unit()
        if unit is not None and unit._owned is not None:
            self._take_grad(unit)
        return self._grad

    @property
    def shape(self):
        """Of the whole parameter."""
        return self.full.shape

    @property
    def dtype(self):
        """The parameter's own: the shard's."""
        return self.shard.dtype

    def info(self):
        """A ParamInfo: which part of the parameter is here, and in which dtypes."""
        unit = self._unit()
        if unit is None:
            raise InvalidArgument("the unit is closed")
        info = abi.fsdp_param_info()
        handle = unit._handle
        check(lib.fsdp_unit_param_query(handle, self.index, byref(info)))
        return ParamInfo(
            name=info.name.decode(),
            shape=tuple(info.shape[: info.ndim]),
            shard_dim=info.shard_dim,
            shard_start=info.shard_start,
            shard_length=info.shard_length,
            dtype=_dtype_name(info.dtype),
            full_dtype=_dtype_name(info.full_dtype),
            grad_dtype=_dtype_name(info.grad_dtype),
            frozen=bool(info.frozen),
            tied_to=None if info.tied_to < 0 else unit.params[info.tied_to].name,
            used=bool(info.used),
        )

    def __repr__(self):
        frozen = ", frozen" if self.frozen else ""
        return f"<libfsdp.Param {self.name!r} {self.dtype}{self.shape}, here {self.shard.shape}{frozen}>"


def _dtype_name(dtype):
    return NAMES.get((dtype.code, dtype.bits))


def frozen_names(frozen, names):
    """Which of `names` an argument `frozen` means: a set."""
    if isinstance(frozen, bool) or frozen is None:
        return set(names if frozen else ())
    if isinstance(frozen, str):
        frozen = [frozen]
    try:
        chosen = set(frozen)
    except TypeError:
        raise TypeError(f"frozen: {frozen!r} is neither a name, nor names, nor True") from None
    for unknown in sorted(chosen.difference(names), key=str):
        raise InvalidArgument(f"frozen: {unknown!r} is not one of the parameters: {', '.join(map(str, names))}")
    return chosen


def each_of(value, names, argument, default):
    """What an argument that is one value for all, or a dict of them by name, means: a list."""
    if not isinstance(value, Mapping):
        return [value] * len(names)
    for unknown in sorted(set(value).difference(names), key=str):
        raise InvalidArgument(f"{argument}: {unknown!r} is not one of the parameters: {', '.join(map(str, names))}")
    return [value.get(name, default) for name in names]


class Unit:
    """Parameters that become full and sharded together, of one module or several.

    model      a Model
    name       for messages
    params     {name: array}, whole values, equal on all ranks (or see sync_module_states): each rank copies its own
               part. Names are unique in the model; floats, at least one dimension. The arrays are not needed
               afterwards. The same array (or memory) under two names is one parameter, tied: one shard, one full view,
               and a gradient that is the sum of both. A Meta in place of an array: shards begin as zeros, and
               the host fills them (see `Param.info`), or `sync_module_states` does
    frozen     the names (or one name) of those that get no gradient (no memory and no traffic for it); True: all
    dim        the dimension that is cut over the ranks: one for all, or {name: dimension}, 0 for the others
    ids        {name: number above 0}: a number for each parameter object of the host. A parameter with the number of
               one that another unit of the model holds is refused: modules that share one go into one unit
    strategy, reshard_after_forward, precision   as for Model; None: the model's

    Collective: all ranks give the same names, shapes, dtypes and options (Mismatch otherwise, which names the
    parameter). It begins sharded. Raises InvalidArgument (names or ids repeated, no dimension), Unsupported (dtype),
    OutOfMemory.

    `unit[name]` or `unit.params[index]` is a Param. The hooks and `unshard` wait for the other ranks inside the
    library: Ctrl-C is answered when they return, at the latest after the group's timeout.
    """

    def __init__(
        self,
        model,
        name,
        params,
        *,
        frozen=(),
        dim=0,
        ids=None,
        strategy=None,
        reshard_after_forward=None,
        precision=None,
    ):
        if not isinstance(model, Model):
            raise TypeError(f"model: {type(model).__name__} is not a libfsdp.Model")
        if not isinstance(name, str):
            raise TypeError(f"name: {name!r} is not a string")
        names = list(params)
        frozen = frozen_names(frozen, names)
        array = (abi.fsdp_param * len(names))()
        dims = each_of(dim, names, "dim", 0)
        numbers = each_of({} if ids is None else ids, names, "ids", 0)
        tensors = [_tensor_of(params[key], f"params[{key!r}]") for key in names]
        for entry, key, tensor, cut, number in zip(array, names, tensors, dims, numbers):
            entry.struct_size = ctypes.sizeof(abi.fsdp_param)
            entry.name = text(key, "params")
            entry.full = ctypes.pointer(tensor)
            entry.frozen = key in frozen
            entry.shard_dim = integer(cut, "dim")
            entry.meta = isinstance(params[key], Meta)
            entry.id = _identity(number)
        options = abi.fsdp_unit_options()
        options.strategy = strategy_code(strategy)
        options.reshard_after_forward = reshard_code(reshard_after_forward)
        options.precision = precision_pointer(precision)
        pointer = c_void_p()
        check(lib.fsdp_unit_create(model._handle, text(name, "name"), array, len(names), options, byref(pointer)))
        self._owned = Handle(pointer, lib.fsdp_unit_release)
        self._number = self._valid = self._invalid = None  # for callbacks.py
        self.model, self.name = model, name
        self._zeroed = 0  # how often gradients of this unit alone were
        self.params = [Param(self, index, key, key in frozen) for index, key in enumerate(names)]
        self._by_name = {param.name: param for param in self.params}
        self._used = (c_int32 * len(names))()
        model._add(self)

    @property
    def _handle(self):
        handle = self._owned
        if handle is None:
            raise InvalidArgument("the unit is closed")
        return handle

    def __reduce__(self):
        raise TypeError("a libfsdp.Unit can't be copied or pickled: make another one of the same values")

    def _tensor(self, function, index):
        handle = self._handle

        def once_more():
            managed = POINTER(abi.DLManagedTensorVersioned)()
            check(function(handle, index, byref(managed)))
            return managed

        return Tensor(once_more(), once_more)

    def _index(self, name):
        try:
            return self._by_name[name].index
        except (KeyError, TypeError):
            raise InvalidArgument(f"name: {name!r} is not a parameter of unit {self.name!r}") from None

    def __getitem__(self, name):
        return self._by_name[name]

    def __iter__(self):
        return iter(self.params)

    def __len__(self):
        return len(self.params)

    # ---- The hooks ----

    def pre_forward(self):
        """Before the unit's forward: its parameters become full."""
        call(lib.fsdp_unit_pre_forward, self._handle)

    def post_forward(self):
        """After it: sharded again, unless the unit is to stay full after forward, or its backward has begun."""
        call(lib.fsdp_unit_post_forward, self._handle)

    def pre_backward(self):
        """Before its backward: full again, with the values that forward used."""
        call(lib.fsdp_unit_pre_backward, self._handle)

    def post_backward(self, grads, *, async_op=False, lend=borrow):
        """After its backward: reduce the gradients to the shards' `grad`, and reshard.

        grads: {parameter's name: array}, or an iterable with one entry for each parameter; this rank's gradient of the
        full parameter, in its shape and dtype. What is missing or None (frozen, or unused on this rank) counts as
        zeros. Summed over the ranks, divided, and added to what `grad` holds. With gradient sync off, only accumulated
        here. async_op=True returns a Work; `Model.finish_backward` waits for it. lend: how a gradient becomes a DLTensor,
        for adapters that know a shorter way.
        """
        if isinstance(grads, Mapping):
            for unknown in set(grads) - self._by_name.keys():
                raise InvalidArgument(f"grads: {unknown!r} is not a parameter of unit {self.name!r}")
            grads = [grads.get(param.name) for param in self.params]
        elif not isinstance(grads, Iterable) or hasattr(grads, "__array__") or hasattr(grads, "__dlpack__"):
            raise TypeError(
                f"grads: {'None' if grads is None else 'a ' + type(grads).__name__} is neither a dict of arrays nor a list "
                "of them; give {} when there are none"
            )
        else:
            grads = list(grads)
        if len(grads) != len(self.params):
            raise InvalidArgument(f"grads: {len(grads)} entries for {len(self.params)} parameters")
        keep = Pointers(
            None if grad is None else lend(grad, f"grads[{param.name!r}]") for grad, param in zip(grads, self.params)
        )
        return self._do(lib.fsdp_unit_post_backward, (keep, len(keep)), async_op)

    def _do(self, function, args, async_op):
        if async_op:
            return collect(start, function, self._handle, args, None, self.model.group)
        call(function, self._handle, *args, None)
        return None

    # ---- Gradients ----

    def zero_grad(self, name=None):
        """The sharded gradient of one parameter, None: of all, counts as zeros from now on, and as not used.

        What was accumulated without sync, or kept with all-reduce off, stays and is in the next reduction
        (`Model.zero_grad` drops it). Ranks may zero differently, but replicas, which hold the same part, do alike; and
        while a reduction of the unit by `post_backward(async_op=True)` goes on, all call it or none. An array that was
        taken of a `Param.grad` before shows the old values until the next reduction or `Model.finish_backward`, and
        what is written there until then is lost: read `Param.grad` again to write."""
        index = -1 if name is None else self._index(name)
        self._zeroed += 1
        check(lib.fsdp_unit_zero_grad(self._handle, index))

    def used(self):
        """For each parameter, in the unit's order, whether some rank (replicas included) gave a gradient of it to the
        reductions since its sharded gradient last became zeros: a list of bools.

        False: the gradient is zeros that nobody computed, so that an optimizer may skip the parameter; also for frozen
        ones. The same on all ranks that zeroed alike. Defined after `Model.finish_backward`."""
        used = self._used
        check(lib.fsdp_unit_used(self._handle, used, len(used)))
        return list(map(bool, used))

    def set_gradient_sync(self, sync):
        """As `Model.set_gradient_sync`, for this unit only, until the model's is called. Alike on all ranks."""
        check(lib.fsdp_unit_set_gradient_sync(self._handle, bool(sync)))

    def set_all_reduce(self, all_reduce):
        """As `Model.set_all_reduce`, for this unit only, until the model's is called. Alike on all ranks."""
        check(lib.fsdp_unit_set_all_reduce(self._handle, bool(all_reduce)))

    def set_gradient_divisor(self, divisor):
        """As `Model.set_gradient_divisor`, for this unit only, until the model's is called. Alike on all ranks."""
        check(lib.fsdp_unit_set_gradient_divisor(self._handle, divisor_code(divisor)))

    # ---- By hand ----

    def unshard(self, *, async_op=False):
        """Make the parameters full, outside the hooks. Collective. Does nothing when they are. async_op=True returns a
        Work; a call that has to make a slot first waits for the other ranks all the same."""
        return self._do(lib.fsdp_unit_unshard, (), async_op)

    def reshard(self):
        """Sharded again. Edits of the full parameters are dropped, unless `write_back` took them first."""
        call(lib.fsdp_unit_reshard, self._handle)

    def write_back(self):
        """Write what this rank changed in the full parameters to its shards. What still is what the shard rounds to
        keeps the shard's full precision. Every rank calls it; it does not communicate: where ranks edited differently,
        each part is its owner's. Raises InvalidState when the unit is not unsharded."""
        check(lib.fsdp_unit_write_back(self._handle))

    @contextlib.contextmanager
    def summon_full_params(self, writeback=True):
        """A block in which the parameters are full, for use outside forward and backward. Collective.

        Afterwards the unit is as before, with this rank's edits in the shards; writeback=False, or an exception in the
        block: dropped.
        """
        was_sharded = self.state == "sharded"
        self.unshard()
        try:
            yield self
            if writeback:
                self.write_back()
        finally:
            if was_sharded:
                self.reshard()

    def gather_param(self, name):
        """One whole parameter, a Tensor of its own memory in the shard's dtype. Whether the unit is full does not
        matter. Collective over the ranks that the unit is sharded over."""
        managed = POINTER(abi.DLManagedTensorVersioned)()
        check(lib.fsdp_unit_gather_param(self._handle, self._index(name), byref(managed)))
        return Tensor(managed)

    def load_param(self, name, full):
        """Take this rank's part of a whole parameter, an array of its shape and any float dtype, into the shard. Every
        rank calls it; it does not communicate. Raises InvalidState while the unit is unsharded."""
        check(lib.fsdp_unit_load_param(self._handle, self._index(name), borrow(full, "full")))

    def shard_changed(self):
        """Say that a shard's values changed between forward and backward, or while the unit is unsharded, and are to be
        seen: the next call that unshards publishes anew. Every rank calls it."""
        check(lib.fsdp_unit_shard_changed(self._handle))

    def cast(self, array, kind="input"):
        """A float array as the unit's precision wants it: a new Tensor; the array itself when it is so already, or not
        of a float dtype.

        kind: "input" (forward's inputs, to Precision.param), "output" (its outputs), "buffer".
        """
        code = choice(kind, CASTS, "kind")
        managed = POINTER(abi.DLManagedTensorVersioned)()
        check(lib.fsdp_unit_cast(self._handle, code, borrow(array, "array"), byref(managed)))
        return Tensor(managed) if managed else array

    def param_entry(self, name):
        """The state.Entry of a parameter's shard: how a tensor of its shape (an optimizer's state) lies in the whole."""
        from .state import read_entry  # here, not above: only who saves needs it

        raw = abi.fsdp_entry()
        check(lib.fsdp_unit_param_entry(self._handle, self._index(name), byref(raw)))
        return read_entry(raw)

    # ---- Settings that may change between iterations, alike on all ranks ----

    def set_frozen(self, name, frozen=True):
        """True: the parameter takes no part in reductions from now on, and its gradient's memory is given back; False:
        it does again, from zeros. Raises InvalidState while backward of this unit is under way, or gradients without
        sync are waiting."""
        param = self.params[self._index(name)]
        check(lib.fsdp_unit_set_frozen(self._handle, param.index, bool(frozen)))
        for other in self.params:  # tied ones are one parameter
            other.frozen = other.info().frozen

    def set_reshard_after_forward(self, reshard):
        """True, False, or a number of ranks, as `reshard_after_forward` of Model; None: as the strategy says."""
        check(lib.fsdp_unit_set_reshard_after_forward(self._handle, reshard_code(reshard)))

    def set_reshard_after_backward(self, reshard):
        """False: `post_backward` leaves the unit full, for the next micro-batch; `Model.finish_backward` reshards
        it."""
        check(lib.fsdp_unit_set_reshard_after_backward(self._handle, bool(reshard)))

    def set_callbacks(self, valid=None, invalid=None):
        """Call valid(unit) when the full parameters have become valid, and invalid(unit) when they are about to be so
        no longer, on the thread of the call by which it happens; None: no call. They may read and write the unit's
        tensors; calls that may change a unit raise InvalidState there.

        What a callback raises is raised by the call in which it ran, once that is done with everything it does.
        """
        for name, function in (("valid", valid), ("invalid", invalid)):
            if function is not None and not callable(function):
                raise TypeError(f"{name}: {function!r} is not callable")
        handle = self._handle
        self._valid, self._invalid = valid, invalid
        set_callbacks(self, handle, valid, invalid)

    def set_prefetch(self, phase, units):
        """Units to unshard ahead when this unit's pre-hook of `phase` ("forward" or "backward") has made it full, in
        this order, in place of the model's prefetch there; none: as the model does."""
        code = choice(phase, PHASES, "phase")
        units = list(units)
        for unit in units:
            if not isinstance(unit, Unit):
                raise TypeError(f"units: {type(unit).__name__} is not a libfsdp.Unit")
        handles = (c_void_p * max(1, len(units)))(*(unit._handle._as_parameter_ for unit in units))
        check(lib.fsdp_unit_set_prefetch(self._handle, code, handles, len(units)))

    # ---- How it is ----

    @property
    def state(self):
        """ "sharded", "unsharding" or "unsharded"."""
        state = c_int32()
        check(lib.fsdp_unit_query_state(self._handle, byref(state)))
        return _state_name(state.value)

    def info(self):
        """A UnitInfo."""
        info = abi.fsdp_unit_info()
        check(lib.fsdp_unit_query(self._handle, byref(info)))
        values = {name: getattr(info, name) for name, _ in abi.fsdp_unit_info._fields_[1:]}
        values["name"] = info.name.decode()
        values["state"] = _state_name(info.state)
        values["strategy"] = Strategy(info.strategy)
        values["reshard_after_forward"] = reshard_value(info.reshard_after_forward)
        values["gradient_sync"], values["all_reduce"] = bool(info.gradient_sync), bool(info.all_reduce)
        return UnitInfo(**values)

    def close(self):
        """Give the unit back; a second close does nothing. Its tensors stay valid for as long as something holds
        them."""
        self._owned = None
        self.params, self._by_name = [], {}
        self._valid = self._invalid = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __repr__(self):
        return f"<libfsdp.Unit {self.name!r} of {len(self.params)} parameters>"


def _state_name(state):
    return _STATES.get(state, f"state {state}")


def _tensor_of(value, name):
    return value._tensor() if isinstance(value, Meta) else borrow(value, name)


def _identity(number):
    number = integer(number, "ids", bits=65)
    if number < 0:
        raise InvalidArgument(f"ids: {number}; give numbers above 0")
    return number
