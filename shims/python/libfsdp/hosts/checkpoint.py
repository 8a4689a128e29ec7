"""Checkpoints of modules and optimizers as torch and TensorPlay have them: the Adapter of libfsdp.checkpoint that both
share. What a parameter that fully_shard did not cut looks like, an adapter's `lie` says.

Optimizers are those with `param_groups` and `state`; their entries belong to parameters by the parameters' names in the model.
"""

from ..checkpoint.adapter import Adapter, Piece
from ..dtypes import name_of
from ..errors import InvalidArgument, InvalidState
from ..tensor import shard_extent
from .index import Index
from .iteration import state_of
from .state_dict import clean_name, replicates

EXTRA_STATE = "_extra_state"  # as in the modules' own state dicts
_PARAMETERS = ("params", "param_names")  # of a group: in the checkpoint these are names, in its own order


def _kept_dtypes(module):
    """(name below it, dtype) of buffers that a classic wrapper has cast: what they were."""
    return getattr(module, "_buffer_dtypes", {}).items()


class ModuleAdapter(Adapter):
    """host: the framework's Host. An adapter of a framework says how plain tensors and others of its own lie, gives the
    library's group of some ranks (`group_over`), and says which ranks its data-parallel wrapper runs on."""

    def __init__(self, host):
        self.host = host

    def ranks(self, model):
        """The ranks that a model says it is on, a set; empty where it says nothing."""
        found = set()
        for module in model.modules():
            state = state_of(module)
            if state is not None:
                found.update(state.ranks._ranks)
            elif replicates(type(module)):
                found.update(self.ranks_of(module))
        return found

    def group(self, model):
        ranks = self.ranks(model)
        return self.group_over(sorted(ranks) if ranks else None)

    def lie(self, tensor, group):
        """(local tensor, shape, offset, copies, copy) of a tensor that no fully_shard has cut."""
        copies, copy = (1, 0) if group is None else (group.size, group.rank)
        return tensor, tuple(tensor.shape), (0,) * tensor.ndim, copies, copy

    def cut(self, parameter, param, ranks):
        """The same of one that fully_shard, or a classic wrapper, has cut over `ranks`. param: its ShardedParameter."""
        dim, offset = param.placement.dim, [0] * len(param.shape)
        offset[dim], _ = shard_extent(param.shape[dim], ranks.shard_rank, ranks.shard_size)
        local = self.host.local(parameter)
        return local, param.shape, tuple(offset), ranks.replicate_size, ranks.replicate_rank

    def pieces(self, model, group):
        places, found, seen = Index(model).places, [], {}
        kept = {}  # {name of a buffer that a classic wrapper has cast: the dtype that it was of}

        def add(name, tensor, lie, **more):
            first = seen.setdefault(id(tensor), name)
            local, *where = lie
            found.append(Piece(name, local.detach(), *where, tied_to=None if first == name else first, **more))

        def here(module, path, attribute):
            return clean_name(model, f"{path}.{attribute}" if path else attribute)

        with self.host.no_grad():
            for path, module in model.named_modules(remove_duplicate=False):
                kept.update({here(module, path, name): dtype for name, dtype in _kept_dtypes(module)})
                for attribute, parameter in module._parameters.items():
                    if parameter is not None:
                        unit = places.get((id(module), attribute))
                        lie = self.lie(parameter.detach(), group) if unit is None else self.cut(parameter, *unit)
                        add(here(module, path, attribute), parameter, lie, kept_alike=unit is not None)
                transient = getattr(module, "_non_persistent_buffers_set", ())
                for attribute, buffer in module._buffers.items():
                    if buffer is not None and attribute not in transient:
                        name = here(module, path, attribute)
                        dtype = kept.get(name)
                        lie = self.lie(buffer.detach(), group)
                        add(name, buffer, lie, dtype=dtype and name_of(dtype), from_copy0=True)
        return found

    def extra_states(self, model):
        base = getattr(self.host.Module, "get_extra_state", None)
        return {
            clean_name(model, f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE): module
            for path, module in model.named_modules()
            if getattr(type(module), "get_extra_state", base) is not base
        }

    def settle(self, model):
        for module in model.modules():
            if getattr(module, "_summoned", False):
                raise InvalidState("save and load outside of summon_full_params: what its block shows are copies")
            state = state_of(module)
            if state is not None:
                state.reshard_now()

    # ---- Optimizers ----

    def groups(self, model, optimizer):
        named, groups = Index(model).names, []
        for index, group in enumerate(optimizer.param_groups):
            parameters = {named.get(id(parameter)): parameter for parameter in group["params"]}
            if None in parameters:
                raise InvalidArgument(
                    f"optimizer: a parameter of shape {tuple(parameters[None].shape)} in group {index} is none of the model's: "
                    "build the optimizer from the parameters of the sharded model"
                )
            groups.append(({key: value for key, value in group.items() if key not in _PARAMETERS}, parameters))
        for key, value in optimizer.state.items():
            if isinstance(key, str) and value:
                raise InvalidArgument(
                    f"optimizer: its state {key!r} belongs to no parameter, and has no place in a checkpoint: keep it in a "
                    "group's options, or in `extra`"
                )
        return groups

    def set_options(self, optimizer, index, options):
        group = optimizer.param_groups[index]
        for key, value in options.items():
            present = group[key]
            if isinstance(present, tuple) and isinstance(value, list):
                value = tuple(value)
            if isinstance(present, self.host.Tensor):
                with self.host.no_grad():
                    present.fill_(value)
            else:
                group[key] = value

    def state(self, optimizer, parameter):
        state = optimizer.state.get(parameter, {})
        return {key: self.host.local(value) if self.is_tensor(value) else value for key, value in state.items()}

    def like(self, parameter, tensor):
        """What a state of a parameter's shape is, of this rank's part of it."""
        return tensor

    def is_tensor(self, value):
        return isinstance(value, self.host.Tensor)

    def set_state(self, optimizer, parameter, values):
        optimizer.state.pop(parameter, None)
        if values:
            shape = tuple(self.host.local(parameter).shape)
            optimizer.state[parameter] = {
                key: self.like(parameter, value)
                if self.is_tensor(value) and value.ndim and tuple(value.shape) == shape
                else value
                for key, value in values.items()
            }
