"""Fully sharded parameters: a Model over a group or a mesh. Its Units are in unit.py.

A unit is one all-gather group of parameters. Between uses each rank holds only its part of each parameter ("shard"),
which its optimizer updates. Around forward and backward the whole parameters ("full") are there, and afterwards the
gradients' parts, reduced over the ranks ("grad"). A host calls, for every unit and in the same order on every rank:

    unit.pre_forward()     full parameters          unit.post_forward()        sharded again
    unit.pre_backward()    full again               unit.post_backward(grads)  gradients to the shards

then `model.finish_backward()`, then its optimizer, then `model.zero_grad()`. Each call does nothing when there is
nothing to do. All calls for one model come from one thread at a time. `libfsdp.numpy` is a whole host to read.
"""

import contextlib
import ctypes
import os
import weakref
from collections.abc import Iterable, Mapping
from ctypes import POINTER, byref, c_double, c_void_p
from dataclasses import dataclass

from . import abi
from .borrow import borrow
from .callbacks import call
from .errors import InvalidArgument, check
from .group import Group
from .handle import Handle, integer, real, text
from .mesh import Mesh
from .options import backward_prefetch_code, precision_pointer, reshard_code, strategy_code

lib = abi.lib


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes, from `Model.memory()`: of this rank, and (host_...) of all ranks of the model together, what they share
    counted once. Of shards and gradients without alignment; of full parameters, the slots."""

    shards: int
    gradients: int  # sharded gradients and accumulation buffers
    unsharded: int  # slots; shared ones count on every rank that uses them
    staging: int  # shared memory of the model's groups, but for slots
    shards_peak: int
    gradients_peak: int
    unsharded_peak: int
    host_shards: int
    host_gradients: int  # as if all ranks were as this one
    host_unsharded: int
    host_unsharded_peak: int
    total_parameters: int  # the model's parameters in their own dtype, once, were they all there
    largest_unit: int  # full bytes of the largest unit
    slots: int  # how many, now
    published_bytes: int  # sums over units of what `Unit.info()` counts
    reduced_bytes: int
    replicated_bytes: int

    @property
    def host_parameters(self):
        """All ranks' shards and full parameters, as held by the whole host."""
        return self.host_shards + self.host_unsharded


class Model:
    """The root of a sharded model: the ranks that parameters are sharded over, and the state of an iteration.

    group                  a Group (not collective), or a Mesh (collective, with the same options)
    name                   for messages
    strategy               a Strategy, or its name: "full_shard" (None), "shard_grad_op", "no_shard", "hybrid_shard",
                           "hybrid_shard_grad_op"; the last two need a Mesh of two dimensions or more
    reshard_after_forward  None: as the strategy says. False: parameters stay full from forward to backward, for more
                           memory and less traffic; where no backward follows, call `Unit.reshard`, else the next
                           forward uses the same values. An integer n of 2 or more, which divides the ranks: resharded
                           over groups of n neighbouring ranks
    precision              a Precision: dtypes of computation, reduction, outputs and buffers
    private_unshard        True: full parameters in each rank's own memory, filled by all-gather. False: one copy a
                           host, in shared memory, where the transport can
    sync_module_states     True: units begin with the values of the model's rank 0; the others' are not read
    gradient_divisor       gradients are summed over the ranks and divided by this; None: the number of ranks
    shard_dim              on a Mesh, the dimension that parameters are sharded over. None: all; hybrid: the last
    replicate_dim          hybrid, on a Mesh: the dimension of replicas. None: the one before the last
    forward_prefetch       so many units are unsharded ahead in forward
    backward_prefetch      "pre": the unit that backward needs next is unsharded before this one's gradients are
                           computed; "post": after; None: not ahead
    prefetch_limit         no prefetch begins while so many units are full or becoming so; None: 4
    offload_dir            a folder on a local disk: shards and sharded gradients live in an unnamed file there, of
                           which memory holds what is in use; None: in memory

    Raises InvalidArgument for options that contradict each other, and for dimensions that the mesh does not have.
    """

    def __init__(
        self,
        group,
        name=None,
        *,
        strategy=None,
        reshard_after_forward=None,
        precision=None,
        private_unshard=False,
        sync_module_states=False,
        gradient_divisor=None,
        shard_dim=None,
        replicate_dim=None,
        forward_prefetch=0,
        backward_prefetch=None,
        prefetch_limit=None,
        offload_dir=None,
    ):
        if not isinstance(group, (Group, Mesh)):
            raise TypeError(
                f"group: {type(group).__name__} is neither a libfsdp.Group nor a Mesh; "
                "Group.single() is a group of one rank"
            )
        options = abi.fsdp_model_options()
        options.name = text(name, "name")
        options.strategy = strategy_code(strategy)
        options.reshard_after_forward = reshard_code(reshard_after_forward)
        options.precision = precision_pointer(precision)
        options.private_unshard = bool(private_unshard)
        options.sync_module_states = bool(sync_module_states)
        options.gradient_divisor = divisor_code(gradient_divisor)
        options.shard_dim = text(shard_dim, "shard_dim")
        options.replicate_dim = text(replicate_dim, "replicate_dim")
        options.forward_prefetch = _count(forward_prefetch, "forward_prefetch", 0)
        options.backward_prefetch = backward_prefetch_code(backward_prefetch)
        if prefetch_limit is not None:
            options.prefetch_limit = _count(prefetch_limit, "prefetch_limit", 1)
        if offload_dir is not None:
            options.offload_dir = text(os.fsdecode(offload_dir), "offload_dir")
        pointer = c_void_p()
        create = lib.fsdp_model_create if isinstance(group, Group) else lib.fsdp_model_create_on_mesh
        check(create(group._handle, options, byref(pointer)))
        self._owned = Handle(pointer, lib.fsdp_model_release)
        self.group = group if isinstance(group, Group) else group.group()  # of a mesh, the whole
        self.name = name or "model"
        self.precision = precision
        self._sync = self._all_reduce = True
        self._zeroed = 0  # how often gradients were
        self._units = []  # weak references, in the order of their making

    @property
    def _handle(self):
        handle = self._owned
        if handle is None:
            raise InvalidArgument("the model is closed")
        return handle

    def __reduce__(self):
        raise TypeError("a libfsdp.Model can't be copied or pickled: make another one of the same group")

    def unit(self, name, params, **options):
        """Make a Unit of this model: `Unit(self, name, params, **options)`. Collective."""
        from .unit import Unit  # here, not above: unit.py needs this module

        return Unit(self, name, params, **options)

    def units(self):
        """The Units that somebody holds and that are not closed, in the order of their making."""
        alive = [unit for unit in (reference() for reference in self._units) if unit is not None]
        return [unit for unit in alive if unit._owned is not None]

    def _add(self, unit):
        self._units = [reference for reference in self._units if reference() is not None]
        self._units.append(weakref.ref(unit))

    def finish_backward(self):
        """Backward is over: wait for reductions under way, reshard every unit. The optimizer's turn comes next."""
        call(lib.fsdp_model_finish_backward, self._handle)

    def zero_grad(self):
        """Sharded gradients, and what was accumulated without sync, to zero. An array that was taken of a `Param.grad`
        before shows the old values until the next reduction overwrites them, or `finish_backward`, norms, clipping or
        a read of `Param.grad` clears them."""
        self._zeroed += 1
        check(lib.fsdp_model_zero_grad(self._handle))

    def reset(self):
        """After an exception in the middle of forward or backward: every unit sharded, gradients dropped, the order of
        units forgotten. Collective; ranks that are still in the broken iteration get a Mismatch, and call it too."""
        self._zeroed += 1
        call(lib.fsdp_model_reset, self._handle)

    def set_gradient_sync(self, sync):
        """False: following `post_backward` calls only accumulate on this rank; True: they reduce, what was accumulated
        included. For all units, those made later too; alike on all ranks."""
        check(lib.fsdp_model_set_gradient_sync(self._handle, bool(sync)))
        self._sync = bool(sync)

    def set_all_reduce(self, all_reduce):
        """False: with replicas, following `post_backward` calls reduce within the shard dimension only (NO_SHARD: they
        only accumulate); True: over the replicas too, what was kept included. Alike on all ranks."""
        check(lib.fsdp_model_set_all_reduce(self._handle, bool(all_reduce)))
        self._all_reduce = bool(all_reduce)

    def set_gradient_divisor(self, divisor):
        """What sums of gradients are divided by; None: the number of ranks."""
        check(lib.fsdp_model_set_gradient_divisor(self._handle, divisor_code(divisor)))

    @contextlib.contextmanager
    def no_sync(self):
        """A block whose backward passes accumulate gradients on this rank and send nothing. Afterwards it is as
        before, unit by unit."""
        before, of_units = self._sync, [(unit, unit.info().gradient_sync) for unit in self.units()]
        self.set_gradient_sync(False)
        try:
            yield self
        finally:
            self.set_gradient_sync(before)
            for unit, sync in of_units:
                if sync != before and unit._owned is not None:
                    unit.set_gradient_sync(sync)

    @contextlib.contextmanager
    def no_all_reduce(self):
        """A block whose backward passes reduce within the shard dimension and send nothing to the replicas: for all
        micro-batches but the last. Afterwards it is as before, unit by unit."""
        before, of_units = self._all_reduce, [(unit, unit.info().all_reduce) for unit in self.units()]
        self.set_all_reduce(False)
        try:
            yield self
        finally:
            self.set_all_reduce(before)
            for unit, all_reduce in of_units:
                if all_reduce != before and unit._owned is not None:
                    unit.set_all_reduce(all_reduce)

    @contextlib.contextmanager
    def summon_full_params(self, writeback=True):
        """A block in which every unit has its full parameters, for use outside forward and backward: all of them at the
        same time. As `Unit.summon_full_params`, for all units. Collective."""
        with contextlib.ExitStack() as stack:
            for unit in self.units():
                stack.enter_context(unit.summon_full_params(writeback))
            yield self

    def broadcast(self, tensors):
        """Give all ranks of the model the values of its rank 0, in place: buffers, say. What `sync_module_states` does
        for parameters.

        tensors: writable arrays, or a dict of them; equal shapes and dtypes on all ranks. Collective.
        """
        if isinstance(tensors, Mapping):
            tensors = tensors.values()
        elif not isinstance(tensors, Iterable) or hasattr(tensors, "__array__") or hasattr(tensors, "__dlpack__"):
            raise TypeError(f"tensors: a {type(tensors).__name__} is neither a list of arrays nor a dict of them")
        pointers = Pointers(borrow(tensor, f"tensors[{index}]", True) for index, tensor in enumerate(tensors))
        check(lib.fsdp_model_broadcast(self._handle, pointers, len(pointers)))

    def grad_norm(self, p=2.0):
        """The p-norm of all sharded gradients over all ranks, as one vector: p = 1, 2, any other number above 0, or
        `math.inf`. Summed in float64; the same on every rank, infinite or NaN where any gradient is. Collective."""
        norm = c_double()
        check(lib.fsdp_model_grad_norm(self._handle, real(p, "p"), byref(norm)))
        return norm.value

    def clip_grad_norm(self, max_norm, p=2.0, error_if_nonfinite=False):
        """Scale all sharded gradients by min(1, max_norm / (norm + 1e-6)), so that their p-norm is at most `max_norm`.

        Returns the norm before. error_if_nonfinite=True: a norm that is infinite or NaN raises InvalidState on every
        rank and changes no gradient. Collective; with a ShardedGradScaler, unscale first.
        """
        norm = c_double()
        check(
            lib.fsdp_model_clip_grad_norm(
                self._handle, real(max_norm, "max_norm"), real(p, "p"), bool(error_if_nonfinite), byref(norm)
            )
        )
        return norm.value

    def memory(self):
        """A MemoryInfo of this model."""
        info = abi.fsdp_memory_info()
        check(lib.fsdp_model_memory(self._handle, byref(info)))
        return MemoryInfo(**{name: getattr(info, name) for name, _ in abi.fsdp_memory_info._fields_[1:]})

    def state_dict(self, kind="sharded", *, rank0_only=False, copy=False, prefix=None):
        """A StateDict of the parameters of all units, by name, in their own dtype.

        kind        "sharded": this rank's shards, with where they lie in the whole. "local": the shards as tensors by
                    themselves, for ranks that have the same shards. "full": whole tensors, gathered one after the other; collective
        rank0_only  of full: rank 0's alone has entries
        copy        False: the shards themselves, so that loading into the dict is loading into the model. True: copies
        prefix      put before every name

        Buffers are the host's to add. Units may be full or sharded; values are the shards'.
        """
        from .state import StateDict, dict_options  # here, not above: only who saves needs it

        options = dict_options(kind, rank0_only=rank0_only, copy=copy, prefix=prefix)
        pointer = c_void_p()
        check(lib.fsdp_model_state_dict(self._handle, byref(options), byref(pointer)))
        return StateDict(pointer)

    def load_state_dict(self, state, *, partial=False, from_rank0=False, prefix=None):
        """Take the parameters' values from a StateDict: whole tensors, or parts that contain this rank's.

        partial     False: all names must agree. True: what is missing keeps its values, what is unexpected is passed over
        from_rank0  True: rank 0's whole tensors count, sent one at a time; the others give None. Collective
        prefix      of the names in `state`, of which those without it are not looked at

        Returns a LoadResult. Seen by the next call that unshards. Raises InvalidArgument with nothing written,
        InvalidState while a unit is unsharded.
        """
        from .state import Loading, StateDict

        if state is not None and not isinstance(state, StateDict):
            raise TypeError(f"state: {type(state).__name__} is not a libfsdp.StateDict")
        handle = None if state is None else state._handle
        return Loading(partial, from_rank0, prefix).run(lib.fsdp_model_load_state_dict, self._handle, handle)

    def close(self):
        """Give the model back; a second close does nothing. Its units keep what they need."""
        self._owned = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __repr__(self):
        return f"<libfsdp.Model {self.name!r}>"


def divisor_code(divisor):
    """A gradient divisor for the C side: None is 0, the number of ranks."""
    if divisor is None:
        return 0.0
    divisor = real(divisor, "gradient_divisor")
    if not divisor > 0:
        raise InvalidArgument(f"gradient_divisor: {divisor!r}; give a positive number")
    return divisor


def _count(value, name, least):
    count = integer(value, name)
    if count < least:
        raise InvalidArgument(f"{name}: {count}; give {least} or more")
    return count


class Pointers:
    """Passes as an array of `const DLTensor *`, and keeps what its pointers point to. Entries may be None."""

    def __init__(self, tensors):
        self._tensors = list(tensors)
        self._array = (POINTER(abi.DLTensor) * max(1, len(self._tensors)))()
        for index, tensor in enumerate(self._tensors):
            if tensor is not None:
                self._array[index] = ctypes.pointer(tensor)
        self._as_parameter_ = ctypes.pointer(self._array[0])  # cast would tie array and pointer in a cycle

    def __len__(self):
        return len(self._tensors)
