"""What the classic wrapper has for state: which form state_dict() gives, and optimizer state in the same forms.

    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        state, optimizer_state = model.state_dict(), FSDP.optim_state_dict(model, optimizer)

The work is done in state_dict.py and optim_state.py.
"""

import contextlib

from . import optim_state, state_dict


class StateMethods:
    """Mixed into Wrapper, which says what is named here without being defined."""

    # ---- State dicts ----

    def state_dict(self, *args, **kwargs):
        """What the type says that was set (set_state_dict_type), under the names of the model without wrappers.

        FULL_STATE_DICT, the default: whole tensors, on all ranks or on the first; gathered one at a time. Collective.
        SHARDED_STATE_DICT: the parameters as they are. LOCAL_STATE_DICT: this rank's part of each, a plain tensor.
        Buffers have the dtype that they were made with.
        """
        prefix = args[1] if len(args) > 1 else kwargs.get("prefix", "")
        return state_dict.saved(self, super().state_dict(*args, **kwargs), prefix, self._wrapped_name)

    def _load_from_state_dict(self, entries, prefix, metadata, strict, missing, unexpected, errors):
        state_dict.loadable(self, entries, prefix, self._wrapped_name, errors)
        super()._load_from_state_dict(entries, prefix, metadata, strict, missing, unexpected, errors)

    @classmethod
    def set_state_dict_type(cls, module, state_dict_type, state_dict_config=None, optim_state_dict_config=None):
        """Say what state_dict() of the wrappers at and below a module gives. Returns the settings before."""
        api = cls.host.api
        kind = {"FULL_STATE_DICT": "Full", "LOCAL_STATE_DICT": "Local", "SHARDED_STATE_DICT": "Sharded"}[
            state_dict_type.name
        ]
        configs = []
        for what, given, wanted in (
            ("state_dict_config", state_dict_config, getattr(api, f"{kind}StateDictConfig")),
            ("optim_state_dict_config", optim_state_dict_config, getattr(api, f"{kind}OptimStateDictConfig")),
        ):
            if given is not None and type(given) is not wanted:
                raise RuntimeError(f"Expected {what} of type {wanted} but got {type(given)}")
            configs.append(wanted() if given is None else given)
        before = cls.get_state_dict_type(module)
        for wrapper in cls.fsdp_modules(module):
            wrapper._state_dict_type = state_dict_type
            wrapper._state_dict_config, wrapper._optim_state_dict_config = configs
        return api.StateDictSettings(None, None, None) if before is None else before

    @classmethod
    def get_state_dict_type(cls, module):
        """The StateDictSettings of the wrappers at and below a module, which have to agree; None without any."""
        settings = [
            cls.host.api.StateDictSettings(
                wrapper._state_dict_type, wrapper._state_dict_config, wrapper._optim_state_dict_config
            )
            for wrapper in cls.fsdp_modules(module)
        ]
        for other in settings:
            if other != settings[0]:
                raise AssertionError(
                    f"All FSDP modules must have the same state dict settings. Got {other} and {settings[0]}."
                )
        return settings[0] if settings else None

    @classmethod
    @contextlib.contextmanager
    def state_dict_type(cls, module, state_dict_type, state_dict_config=None, optim_state_dict_config=None):
        """A block in which set_state_dict_type is in force."""
        before = cls.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            if before.state_dict_type is not None:
                cls.set_state_dict_type(
                    module, before.state_dict_type, before.state_dict_config, before.optim_state_dict_config
                )

    # ---- Optimizer state ----

    @classmethod
    def optim_state_dict(cls, model, optim, optim_state_dict=None, group=None):
        """An optimizer's state dict, by default its own as it is now, keyed by the names of the model without wrappers,
        in the form that set_state_dict_type says. Collective, but for LOCAL_STATE_DICT.

        FULL_STATE_DICT: whole tensors, copies; with rank0_only on the first rank (of `group`), and {} on others.
        SHARDED_STATE_DICT: as the model's parameters are. LOCAL_STATE_DICT: this rank's part of each, a plain tensor.
        """
        settings = cls._settings_of(model)
        return optim_state.saved(
            cls.host,
            model,
            optim,
            optim.state_dict() if optim_state_dict is None else optim_state_dict,
            settings.state_dict_type.name,
            getattr(settings.optim_state_dict_config, "rank0_only", False),
            group=group,
        )

    @classmethod
    def optim_state_dict_to_load(
        cls, model, optim, optim_state_dict, is_named_optimizer=False, load_directly=False, group=None
    ):
        """What `optim.load_state_dict` takes, of a dict that optim_state_dict gave, whichever form and number of ranks;
        parameters are found by name. load_directly: load it too.

        With rank0_only in the settings only the first rank's dict counts, and its tensors are sent. Raises KeyError for
        parameters that only one side has, ValueError for wrong shapes, on each rank that sees them.
        """
        settings = cls._settings_of(model)
        result = optim_state.loadable(
            cls.host,
            model,
            optim,
            optim_state_dict,
            rank0_only=getattr(settings.optim_state_dict_config, "rank0_only", False),
            named=is_named_optimizer,
            group=group,
        )
        if load_directly:
            optim.load_state_dict(result)
        return result

    @classmethod
    def _settings_of(cls, model):
        settings = cls.get_state_dict_type(model)
        if settings is None:
            raise ValueError(
                f"this {type(model).__name__} has no FullyShardedDataParallel inside: give the model that has"
            )
        return settings

    @classmethod
    def _full_optim_state_dict(cls, model, optim, optim_input=None, rank0_only=True, group=None):
        cls._warn_optim_input(optim_input, 4)
        entries = optim.state_dict()
        return optim_state.saved(
            cls.host, model, optim, entries, state_dict.FULL, rank0_only, optim_input=optim_input, group=group
        )

    @classmethod
    def _sharded_optim_state_dict(cls, model, optim, group=None):
        return optim_state.saved(cls.host, model, optim, optim.state_dict(), state_dict.SHARDED, group=group)

    @classmethod
    def shard_full_optim_state_dict(cls, full_optim_state_dict, model, optim_input=None, optim=None):
        """What the optimizer of a model loads, of a full dict that each rank has."""
        cls.host.legacy("shard_full_optim_state_dict", "optim_state_dict_to_load")
        cls._warn_optim_input(optim_input)
        return optim_state.loadable(cls.host, model, optim, full_optim_state_dict, optim_input=optim_input)

    @classmethod
    def flatten_sharded_optim_state_dict(cls, sharded_optim_state_dict, model, optim):
        """What the optimizer of a model loads, of what sharded_optim_state_dict gave."""
        cls.host.legacy("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
        return optim_state.loadable(cls.host, model, optim, sharded_optim_state_dict)

    @classmethod
    def scatter_full_optim_state_dict(cls, full_optim_state_dict, model, optim_input=None, optim=None, group=None):
        """What the optimizer of a model loads, of a full dict that the first rank (of `group`) has, and others need
        not. Collective."""
        cls.host.legacy("scatter_full_optim_state_dict", "optim_state_dict_to_load")
        cls._warn_optim_input(optim_input)
        return optim_state.loadable(
            cls.host, model, optim, full_optim_state_dict, rank0_only=True, optim_input=optim_input, group=group
        )

    @classmethod
    def rekey_optim_state_dict(cls, optim_state_dict, optim_state_key_type, model, optim_input=None, optim=None):
        """A state dict keyed by names (PARAM_NAME) or by the numbers of an optimizer's parameters (PARAM_ID), of one
        that is keyed the other way. The model may have wrappers or none; so full dicts go to and from plain models."""
        cls._warn_optim_input(optim_input)
        kinds = cls.host.api.OptimStateKeyType
        if optim_state_key_type not in (kinds.PARAM_NAME, kinds.PARAM_ID):
            raise cls.host.KeyMisuse(
                f"Expected optim_state_key_type to be PARAM_NAME or PARAM_ID, got {optim_state_key_type}"
            )
        to_names = optim_state_key_type == kinds.PARAM_NAME
        return optim_state.rekeyed(cls.host, optim_state_dict, to_names, model, optim, optim_input)

    @classmethod
    def _warn_optim_input(cls, optim_input, depth=3):
        """The framework's own warning, at the program's line."""
        cls.host.api.FullyShardedDataParallel._warn_optim_input(optim_input, stacklevel=depth)
