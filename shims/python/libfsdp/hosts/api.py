"""The methods of a sharded module, with the names, arguments and meanings that both frameworks give them."""

import functools

from .iteration import state_of


class UnshardHandle:
    """What `unshard(async_op=True)` gives: wait() until the parameters are full and the module shows them."""

    def __init__(self, state, work):
        self._state, self._work = state, work

    def wait(self):
        if self._state is None:
            return
        if self._work is not None:
            self._work.wait()
        self._state.unsharded()
        self._state = self._work = None


class ShardedModule:
    """Mixed into the class of every module that fully_shard is called on. An adapter's class adds `_original_class` and
    whatever else its framework's modules have."""

    def __new__(cls, *args, **kwargs):
        """Where code makes another of a module's class (a slice of a Sequential), it gets one that is not sharded."""
        original = cls._original_class
        return original(*args, **kwargs)

    def _get_fsdp_state(self):
        state = state_of(self)
        if state is None:
            raise AssertionError(f"No FSDP state found on {self}: it is a copy, or fully_shard was not called on it")
        return state

    def _states(self, recurse):
        if not recurse:
            return [self._get_fsdp_state()]
        states = []
        for module in self.modules():
            state = state_of(module)
            if state is not None and state not in states:
                states.append(state)
        return states

    # ---- Full and sharded ----

    def unshard(self, async_op=False):
        """Make the parameters of this module's unit (not of those below) full, in the policy's param_dtype, and show
        them. Collective. async_op=True gives an UnshardHandle; forward waits for it by itself."""
        state = self._get_fsdp_state()
        work = state.unshard(async_op)
        return UnshardHandle(state, work) if async_op else None

    def reshard(self):
        """Shard the parameters of this module's unit (not of those below) again."""
        self._get_fsdp_state().reshard_now()

    def reset_iter_state(self):
        """After an exception in forward or backward that the program goes on from: parameters sharded, gradients
        dropped. On the outermost module, and on all ranks."""
        state = self._get_fsdp_state()
        if state.iteration is not None:
            if not state.is_root:
                raise RuntimeError("reset_iter_state must be called on the root FSDP module")
            state.iteration.reset()

    # ---- Gradients ----

    def set_is_last_backward(self, is_last_backward):
        """False: more backward passes follow before the optimizer's step, so parameters that were told to stay full
        (set_reshard_after_backward) stay so."""
        self._get_fsdp_state().set_is_last_backward(bool(is_last_backward))

    def set_requires_gradient_sync(self, requires_gradient_sync, *, recurse=True):
        """False: backward only accumulates on this rank, in full size; True: it reduces, what was accumulated
        included."""
        for state in self._states(recurse):
            state.reduce_grads = state.all_reduce_grads = bool(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce, *, recurse=True):
        """False: on a mesh with replicas, backward reduces within the shard dimension only."""
        for state in self._states(recurse):
            state.all_reduce_grads = bool(requires_all_reduce)

    def set_gradient_divide_factor(self, factor):
        """What this unit's sums of gradients are divided by, in place of the number of ranks."""
        self._get_fsdp_state().divisor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor):
        """The older name of set_gradient_divide_factor."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable):
        """Without effect: the library sums, and divides once in the accumulator."""

    def set_all_reduce_hook(self, hook, *, stream=None):
        """Call hook(reduce_output) with this rank's part of the reduced gradients of the unit, flat, before they are
        added to `.grad`."""
        state = self._get_fsdp_state()
        if stream is not None and state.ranks.replicate_size > 1:
            raise ValueError("stream cannot be set when using native HSDP")
        state.comm.all_reduce_hook = hook

    def set_custom_all_gather(self, comm):
        """Let comm(output, input, group, async_op) gather this unit's parameters, in memory that comm.allocate gives."""
        self._get_fsdp_state().comm.all_gather = comm

    def set_custom_reduce_scatter(self, comm):
        """Let comm(output, input, group, op, async_op) reduce this unit's gradients, in memory that comm.allocate
        gives."""
        self._get_fsdp_state().comm.reduce_scatter = comm

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params, *, recurse=True):
        """Without effect: parameters that one rank has not used are reduced with zeros for it, always, so that ranks
        may differ."""
        self._states(recurse)

    # ---- When parameters are full ----

    def set_reshard_after_forward(self, reshard_after_forward, recurse=True):
        """Whether forward leaves the parameters sharded (True) or full (False) for backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for state in self._states(recurse):
            state.reshard = reshard_after_forward
            if state.unit is not None:
                state.unit.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward, *, recurse=True):
        """False: backward leaves the parameters full, until the last backward (set_is_last_backward) is over."""
        for state in self._states(recurse):
            state.reshard_after_backward = bool(reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward):
        """False: backward does not need this unit's parameters (an embedding's, say)."""
        self._get_fsdp_state().unshard_in_backward = bool(unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules):
        """Sharded modules to unshard ahead when this one's forward begins, in order."""
        self._set_prefetch("forward", modules)

    def set_modules_to_backward_prefetch(self, modules):
        """Sharded modules to unshard ahead when this one's backward begins, in order."""
        self._set_prefetch("backward", modules)

    def _set_prefetch(self, phase, modules):
        state = self._get_fsdp_state()
        modules = list(modules)
        for module in modules:
            if not isinstance(module, ShardedModule):
                raise state.host.NotSharded(f"Expects FSDPModule but got {type(module)}: {module}")
        state.prefetch[phase] = [module._get_fsdp_state() for module in modules]

    # ---- For devices with streams, which host memory does not have ----

    def set_post_optim_event(self, event):
        """Without effect: the optimizer's step on host memory is over when it returns."""

    def set_allocate_memory_from_process_group_for_comm(self, enable):
        """Without effect: the library's memory is its groups' already."""

    def set_symm_mem_for_comm(self, backend="NCCL"):
        """Without effect: ranks share memory already."""

    def set_separate_reduce_scatter_group(self, enable=True, *, recurse=True):
        """Without effect: reductions are not queued behind gathers."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers, *, recurse=True):
        """Without effect but for the check: gradients are read where they are, in no buffer."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")

    def _set_unshard_async_op(self, async_op):
        """Without effect: nothing is gained by handing a gather to another thread and waiting for it."""

    # ---- The framework's module methods ----

    def _apply(self, *args, **kwargs):
        """`to`, `half` and the like work on the shards."""
        self.reshard()
        return self._original_class._apply(self, *args, **kwargs)


def sharded_class(host, original, mixin):
    """The class that a module of class `original` gets."""
    cls = _classes.get((original, mixin))
    if cls is None:
        content = {"_original_class": original, "__deepcopy__": _no_copy, "__module__": original.__module__}
        if original.forward is not host.Module.forward:
            content["forward"] = _inside_a_call(host, original.forward)
        cls = _classes[original, mixin] = type(host.class_name(original), (mixin, original), content)
    return cls


_classes = {}


def _inside_a_call(host, forward):
    """`forward` of a class, which refuses to compute with shards: hooks around the module's call make parameters full,
    and who calls forward by itself gets none. It looks at what the module shows; compiled code doesn't look."""
    compiling = host.compiling

    def checked(self, *args, **kwargs):
        if not compiling():
            _refuse_shards(self)
        return forward(self, *args, **kwargs)

    # Compilers keep what they compiled by code object, and give up on one that serves many classes.
    checked.__code__ = checked.__code__.replace(co_name="forward")
    return functools.wraps(forward)(checked)


def _refuse_shards(module):
    state = state_of(module)
    if state is not None and state.params:
        refuse_shards(state.params[0], f"forward of {type(module)._original_class.__name__}")


def refuse_shards(param, what):
    """Raise if modules show the shard of a ShardedParameter, and not the full parameter."""
    if param.shown() is param.parameter:
        raise RuntimeError(
            f"{what} was called while its parameters are sharded: call the module that fully_shard was called on, "
            "module(...), whose hooks make them full, and not module.forward(...) or a module inside it; for its other "
            "methods there is register_fsdp_forward_method, and for code between them unshard() and reshard()"
        )


def _no_copy(self, memo):
    raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")


def register_forward_method(module, method_name):
    """Let a method of a sharded module besides forward find full parameters: gather before it, shard after it. Does
    nothing for a module that is not sharded."""
    if not isinstance(module, ShardedModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    method = getattr(module, method_name)

    @functools.wraps(method)
    def wrapped(self, *args, **kwargs):
        state = self._get_fsdp_state()
        args, kwargs = state.pre_forward(self, args, kwargs)
        return state.post_forward(self, method(*args, **kwargs))

    setattr(module, method_name, wrapped.__get__(module, type(module)))


def share_comm_ctx(modules):
    """For roots that are used together, pipeline stages say. In host memory they have nothing to share; checks that all
    are sharded."""
    for module in modules:
        if not isinstance(module, ShardedModule):
            raise ValueError(f"Expects list of FSDPModules but got {module}")
