"""The classic wrapper, FullyShardedDataParallel: a module around a module, whose parameters are one unit.

    model = FullyShardedDataParallel(Net(), auto_wrap_policy=policy)     # and wrappers inside, where the policy says so

`Wrapper` is what frameworks share; an adapter mixes it into a subclass of its Module, which has the constructor with
the framework's names, and describes the rest as a `ClassicHost`. Around forward a wrapper does itself what the hooks of
fully_shard do, with the same State; parameters are cut as fully_shard cuts them. There is no flat parameter: modules
keep their parameters under their names, use_orig_params or not.

Which wrapper is the root shows when wrappers are put around wrappers, so any of them may run forward first.
"""

import contextlib
import weakref
from dataclasses import dataclass

from . import discover, norm, state_dict, tree, wrap
from .classic_state import StateMethods
from .comm import Comm
from .fully_shard import cut
from .host import Host
from .iteration import ATTRIBUTE, Iteration, state_of
from .state import State
from .summon import summoned
from ..options import Precision

WRAPPED = "_fsdp_wrapped_module"


class ClassicHost(Host):
    """What the wrapper asks of a framework, beyond Host.

    api               where its names are: StateDictType, FullStateDictConfig, ..., StateDictSettings
    hooks             {communication hook of the framework's: what is called in its place}
    SummonMisuse      the exception for arguments of summon_full_params that exclude each other
    KeyMisuse         and for a wrong key type of rekey_optim_state_dict
    """

    api = None
    hooks = {}
    SummonMisuse = NotImplementedError
    KeyMisuse = ValueError

    def broadcast(self, tensor, group):
        """Give all ranks of a group its first rank's values, in place."""
        raise NotImplementedError

    def norm(self, tensor, p):
        """The p-norm of a tensor: a number."""
        raise NotImplementedError

    def norm_tensor(self, norm, gradients):
        """What clip_grad_norm_ returns."""
        raise NotImplementedError

    def whole_parameter(self, tensor, placement, requires_grad):
        """A parameter for a module to show, on a whole tensor."""
        raise NotImplementedError

    def whole_gradient(self, tensor, placement):
        """The same for its gradient."""
        return tensor

    def whole_value(self, tensor, placement):
        """What a state dict holds of a whole parameter."""
        return tensor

    def whole_of(self, value):
        """The whole tensor that a loaded value stands for."""
        return value

    def whole_shape(self, param):
        """Of a ShardedParameter."""
        return param.shape

    def shard_of_value(self, value, param, ranks, local):
        """What a module's parameter, or a state of it, is to be loaded with, of a whole tensor or a shard; `value`
        itself where its shape is wrong. local: it is this rank's part."""
        raise NotImplementedError

    def gathered(self, local, param, ranks):
        """The whole tensor that the ranks have cut as they have cut a parameter. local: this rank's part, plain."""
        raise NotImplementedError

    def legacy(self, name, replacement):
        """A function of the class was called that the framework warns about."""

    # ---- Objects ----

    def rank(self, group):
        """This rank's number in a process group; None: in all."""
        raise NotImplementedError

    def all_gather_object(self, value, group):
        """Each rank's value, a list."""
        raise NotImplementedError

    def broadcast_object(self, value, group):
        """The first rank's value."""
        raise NotImplementedError


@dataclass(frozen=True)
class Policy:
    """A framework's MixedPrecision, as State wants a policy.

    cast_root_forward_inputs  the same as cast_forward_inputs, for the root
    full_precision            forward computes in the parameters' own dtype, and gives back the dtype that it was given
    """

    param_dtype: object = None
    reduce_dtype: object = None
    buffer_dtype: object = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    full_precision: bool = False
    output_dtype: object = None

    @classmethod
    def of(cls, mixed_precision, full_precision):
        if mixed_precision is None:
            return cls(full_precision=full_precision)
        names = [name for name in cls.__dataclass_fields__ if hasattr(mixed_precision, name)]
        return cls(**{name: getattr(mixed_precision, name) for name in names}, full_precision=full_precision)


class ClassicState(State):
    """Of one wrapper, which is its only module."""

    def __init__(self, host, wrapper, params, ranks, reshard, policy, model_options):
        super().__init__(host, [wrapper], params, ranks, reshard, policy)
        self.model_options = model_options
        self.outer = None  # a weak reference to the State around this one
        self._given = None  # the dtype of forward's inputs, where outputs get it back

    def outermost(self):
        outer = self.outer and self.outer()
        return self if outer is None else outer.outermost()

    def begin(self):
        if self.iteration is None:
            Iteration(self.outermost())

    def precision(self):
        policy = self.policy
        if policy.param_dtype is None and policy.reduce_dtype is None:
            return None
        return Precision(
            param=policy.param_dtype,
            reduce=policy.reduce_dtype,
            keep_low_precision_grads=policy.keep_low_precision_grads,
        )

    def _cast(self, value):
        policy = self.policy
        if policy.full_precision:
            return self._in_own_dtype(value)
        casts = policy.cast_forward_inputs or (self.is_root and policy.cast_root_forward_inputs)
        return self._in_dtype(value, policy.param_dtype if casts else None)

    def _in_own_dtype(self, value):
        floats = [t for t in tree.tensors_in(value, self.host.Tensor) if t.is_floating_point()]
        own = self.params[0].dtype if self.params else None
        if own is None or not floats or floats[0].dtype == own:
            return value
        self._given = floats[0].dtype
        return self._in_dtype(value, own)

    def _cast_output(self, value):
        given, self._given = self._given, None
        return self._in_dtype(value, given)


class HookComm(Comm):
    """Gradients reduced by a communication hook: hook(state, gradients, output) for units that are sharded, of flat
    tensors as comm.py describes them; hook(state, gradients), in place, for those that are not."""

    def __init__(self, unit_state, hook_state, hook):
        super().__init__(unit_state)
        self._hook_state, self.hook = hook_state, hook

    reduces = True

    def _reduced(self, grads):
        host = self._state.host
        whole, output = self._packed(grads, host.Buffers)
        hook = host.hooks.get(self.hook, self.hook)
        if not self._state.ranks.shards:
            hook(self._hook_state, whole)
            return whole
        hook(self._hook_state, whole, output)
        return output


class Wrapper(StateMethods):
    """Mixed into the adapter's FullyShardedDataParallel, before its Module."""

    host = None  # a ClassicHost
    _fsdp_wrapper = True
    _wrapped_name = WRAPPED  # the wrapped module's, among this one's

    def _set_up(
        self,
        module,
        ranks,
        *,
        ignored,
        reshard,
        policy,
        param_init_fn,
        sync_module_states,
        model_options,
    ):
        """The constructor's work, after the framework's Module is there and inner modules are wrapped."""
        host = self.host
        self._ignored, self._ranks = ignored, ranks
        self._summoned = False
        wrap.materialize(host, module, ignored, param_init_fn)
        buffers = wrap.own_buffers(wrap.own_modules(module, ignored))
        if sync_module_states:
            ids = {id(parameter) for parameter in ignored.params}
            modules = wrap.own_modules(module, ignored)
            tensors = [p for below in modules for p in below._parameters.values() if p is not None and id(p) not in ids]
            unique = {id(tensor): tensor for tensor in [*(buffer for *_, buffer in buffers), *tensors]}
            wrap.synchronize(host, ranks, [tensor.detach() for tensor in unique.values()])
        inner = [state_of(below) for below in module.modules() if state_of(below) is not None]
        params = cut(host, [module], ranks, ignored.params, lambda parameter: 0, "FSDP")
        setattr(self, self._wrapped_name, module)
        state = ClassicState(host, self, params, ranks, reshard, policy, model_options)
        self.__dict__[ATTRIBUTE] = state
        for other in inner:
            if isinstance(other, ClassicState) and other.outer is None:
                other.outer = weakref.ref(state)
        self._before, self._after = host.outside_graph(state.pre_forward), host.outside_graph(state.post_forward)
        self._buffers_of = buffers if policy.buffer_dtype is not None else []
        self._buffer_dtypes = {}  # of buffers in another dtype than they were made with: {name: its own}
        api = host.api
        self._state_dict_type = api.StateDictType.FULL_STATE_DICT
        self._state_dict_config = api.FullStateDictConfig()
        self._optim_state_dict_config = api.FullOptimStateDictConfig()
        self.register_load_state_dict_post_hook(_clean_keys)

    # ---- The wrapped module ----

    @property
    def module_below(self):
        return self._modules[self._wrapped_name]

    @property
    def module(self):
        """The wrapped module; inside a wrapper for activation checkpointing, the one inside that."""
        below = self.module_below
        return below._modules.get("_checkpoint_wrapped_module", below)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            below = self.__dict__.get("_modules", {}).get(self._wrapped_name)
            if below is None:
                raise
            return getattr(below, name)

    def __getitem__(self, key):
        return self.module_below[key]

    def __deepcopy__(self, memo):
        raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")

    def _fqn_modifiers(self):
        """For the framework's checkpoints: which name below is no part of a parameter's."""
        return {name: self._wrapped_name for name in (*self.module_below._modules, *self.module_below._parameters)}

    # ---- Forward ----

    def forward(self, *args, **kwargs):
        """The wrapped module's, with full parameters."""
        if self._summoned:
            raise AssertionError("forward inside summon_full_params: leave the block first")
        state = state_of(self)
        self._cast_buffers()
        try:
            args, kwargs = self._before(self, args, kwargs)
            output = self._after(self, self.module_below(*args, **kwargs))
        except BaseException:
            state.forward_failed()
            raise
        self._show_shards(state.iteration)
        return output

    @staticmethod
    def _show_shards(iteration):
        """After the outermost forward: units that stay full have no part in what programs see of the model."""
        if iteration.forward_root is None and not iteration.in_backward:
            for state in iteration.states:
                if not state.by_hand:
                    state.hide()

    def _cast_buffers(self):
        """Once: floating-point buffers in the policy's dtype."""
        dtype = state_of(self).policy.buffer_dtype
        for module, name, buffer in self._buffers_of:
            if module._buffers.get(name) is buffer and buffer.is_floating_point() and buffer.dtype != dtype:
                path = next(path for path, below in self.module_below.named_modules() if below is module)
                path = discover.clean(path)
                self._buffer_dtypes[f"{path}.{name}" if path else name] = buffer.dtype
                with self.host.no_grad():
                    buffer.data = buffer.to(dtype)
        self._buffers_of = []

    # ---- The wrappers of a model ----

    def check_is_root(self):
        """Whether no other wrapper is around this one."""
        state = state_of(self)
        return state.outermost() is state

    @staticmethod
    def fsdp_modules(module, root_only=False):
        """The wrappers at and below a module; root_only: those that no other wrapper is around."""
        found = [below for below in module.modules() if hasattr(type(below), "_fsdp_wrapper")]
        return [wrapper for wrapper in found if wrapper.check_is_root()] if root_only else found

    def _require_root(self, message):
        if not self.check_is_root():
            raise RuntimeError(message)
        state = state_of(self)
        state.begin()
        return state.iteration

    def _apply(self, *args, **kwargs):
        """`to`, `half` and the like work on the shards."""
        for wrapper in self.fsdp_modules(self):
            state_of(wrapper).reshard_now()
        return super()._apply(*args, **kwargs)

    # ---- Gradients ----

    @contextlib.contextmanager
    def no_sync(self):
        """A block whose backward passes accumulate gradients on this rank, in full size; the next one after it reduces
        them. On the root."""
        self._require_root(
            "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on root FSDP module."
        )
        states = [state_of(wrapper) for wrapper in self.fsdp_modules(self)]
        before = [(state.reduce_grads, state.all_reduce_grads) for state in states]
        for state in states:
            state.reduce_grads = state.all_reduce_grads = False
        try:
            yield
        finally:
            for state, (reduce_grads, all_reduce_grads) in zip(states, before):
                state.reduce_grads, state.all_reduce_grads = reduce_grads, all_reduce_grads

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale all gradients, so that their norm as one vector over all ranks is at most `max_norm`; the norm before,
        the same on every rank. On the root. Collective.

        Gradients of ignored parameters count once; a program that wants them to be alike on all ranks reduces them
        itself.
        """
        iteration = self._require_root("`clip_grad_norm_()` should only be called on the root FSDP instance")
        units = {id(param.parameter) for state in iteration.states for param in state.params}
        plain = [parameter for parameter in self.parameters() if id(parameter) not in units]
        total, gradients = norm.clip(iteration, plain, max_norm, norm_type)
        return self.host.norm_tensor(total, gradients)

    def register_comm_hook(self, state, hook):
        """Let hook(state, gradients, output) reduce the gradients of each unit, flat, into this rank's part; or, where
        the strategy is NO_SHARD, hook(state, gradients) in place. On the root, before the first forward, once."""
        if not self.check_is_root():
            raise AssertionError("register_comm_hook can only be called on a root instance.")
        wrappers = self.fsdp_modules(self)
        for wrapper in wrappers:
            unit = state_of(wrapper)
            if unit.ranks.shards and unit.ranks.replicate_group is not None:
                raise AssertionError(
                    f"Communication hook is not supported for hybrid strategies: {wrapper.sharding_strategy}"
                )
            if isinstance(unit.comm, HookComm):
                raise AssertionError("A communication hook is already registered")
            if not callable(hook):
                raise ValueError(f"The communication hook must be callable but got {hook}")
        for wrapper in wrappers:
            unit = state_of(wrapper)
            unit.comm = HookComm(unit, state, hook)

    # ---- Whole parameters ----

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module, recurse=True, writeback=True, rank0_only=False, offload_to_cpu=False, with_grads=False
    ):
        """A block in which the wrappers at and below a module (recurse=False: at it) show whole parameters. Collective.

        writeback       what was changed goes to the shards afterwards, each rank's part of it
        rank0_only      only the first rank gets them; with writeback=False
        offload_to_cpu  they are copies in host memory anyway
        with_grads      `.grad` is whole too

        Inside, names of parameters and buffers are those of the model without wrappers. Not inside forward or backward.
        """
        cls = next((type(m) for m in module.modules() if hasattr(type(m), "_fsdp_wrapper")), None)
        if cls is None:
            yield
            return
        if with_grads and offload_to_cpu:
            raise cls.host.SummonMisuse(
                "with_grads=True and offload_to_cpu=True is not supported: leave offload_to_cpu out"
            )
        if writeback and rank0_only:
            raise cls.host.SummonMisuse(
                "writeback=True and rank0_only=True is not supported: only one rank would have something to write"
            )
        wrappers = cls.fsdp_modules(module)
        if not recurse:
            wrappers = [wrapper for wrapper in wrappers if wrapper is module]
        states = [state_of(wrapper) for wrapper in wrappers]
        with summoned(wrappers, states, writeback, rank0_only, with_grads):
            yield

    def apply(self, fn):
        """Module.apply, with the whole parameters of each module; what fn writes goes to the shards."""
        with self.summon_full_params(self, recurse=False):
            return super().apply(fn)

    def named_parameters(self, *args, **kwargs):
        """Module.named_parameters; inside summon_full_params under the names of the model without wrappers."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield (state_dict.clean_name(self, name, ()) if self._summoned else name), parameter

    def named_buffers(self, *args, **kwargs):
        """Module.named_buffers, with names as named_parameters gives them."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield (state_dict.clean_name(self, name, ()) if self._summoned else name), buffer


def _clean_keys(module, incompatible):
    """What load_state_dict reports, under the names that its caller knows."""
    for keys in incompatible:
        keys[:] = [".".join(part for part in key.split(".") if part != module._wrapped_name) for key in keys]
