"""Checkpoints of modules and optimizers as torch and TensorPlay have them: the Adapter of libfsdp.checkpoint that both
share. What a parameter that fully_shard did not cut looks like, an adapter's `lie` says.

Optimizers are those with `param_groups` and `state`; their entries belong to parameters by the parameters' names in the model.
"""

from ..checkpoint.adapter import Adapter, Piece
from ..dtypes import name_of
from ..errors import InvalidArgument
from ..tensor import shard_extent
from .discover import clean
from .iteration import state_of


class ModuleAdapter(Adapter):
    """host: the framework's Host. An adapter of a framework says how plain tensors and others of its own lie."""

    def __init__(self, host):
        self.host = host

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
        cut = {}  # (id of a module, attribute): (ShardedParameter, its State)
        for module in model.modules():
            state = state_of(module)
            for param in state.params if state is not None else ():
                for holder, attribute in param.places:
                    cut[id(holder), attribute] = param, state
        found, seen = [], {}

        def visit(module, path, kept):
            kept = kept | {f"{path}{name}": dtype for name, dtype in getattr(module, "_buffer_dtypes", {}).items()}
            for attribute, parameter in module._parameters.items():
                if parameter is None:
                    continue
                param, state = cut.get((id(module), attribute), (None, None))
                if param is not None:
                    lie = self.cut(parameter, param, state.ranks)
                else:
                    lie = self.lie(parameter.detach(), group)
                add(path + attribute, parameter, lie, None)
            transient = getattr(module, "_non_persistent_buffers_set", ())
            for attribute, buffer in module._buffers.items():
                if buffer is not None and attribute not in transient:
                    dtype = kept.get(path + attribute)
                    lie = self.lie(buffer.detach(), group)
                    add(path + attribute, buffer, lie, None if dtype is None else name_of(dtype))
            for attribute, child in module._modules.items():
                if child is not None:
                    inner = clean(path + attribute)
                    visit(child, f"{inner}." if inner else "", kept)

        def add(name, tensor, lie, dtype):
            name = clean(name)
            first = seen.setdefault(id(tensor), name)
            local, shape, offset, copies, copy = lie
            tied_to = None if first == name else first
            found.append(Piece(name, local.detach(), shape, offset, copies, copy, dtype, tied_to))

        with self.host.no_grad():
            visit(model, "", {})
        return found

    def settle(self, model):
        for module in model.modules():
            state = state_of(module)
            if state is not None:
                state.reshard_now()

    # ---- Optimizers ----

    def _named(self, model):
        """{id of a parameter: its name}; of tied ones, the first."""
        names = {}
        for path, module in model.named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    name = clean(f"{path}.{attribute}" if path else attribute)
                    names.setdefault(id(parameter), name)
        return names

    def groups(self, model, optimizer):
        named, groups = self._named(model), []
        for index, group in enumerate(optimizer.param_groups):
            names = [named.get(id(parameter)) for parameter in group["params"]]
            if None in names:
                raise InvalidArgument(
                    f"optimizer: parameter {names.index(None)} of group {index} is none of the model's; was the optimizer built "
                    "before the model was sharded?"
                )
            groups.append(({key: value for key, value in group.items() if key != "params"}, names))
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

    def _parameter(self, optimizer, model, name):
        named = self._named(model)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if named.get(id(parameter)) == name:
                    return parameter
        raise KeyError(name)

    def state(self, optimizer, model, name):
        parameter = self._parameter(optimizer, model, name)
        state = optimizer.state.get(parameter, {})
        return {key: self.host.local(value) if self.is_tensor(value) else value for key, value in state.items()}

    def like(self, parameter, tensor):
        """What a state of a parameter's shape is, of this rank's part of it."""
        return tensor

    def is_tensor(self, value):
        return isinstance(value, self.host.Tensor)

    def set_state(self, optimizer, model, name, values):
        parameter = self._parameter(optimizer, model, name)
        optimizer.state.pop(parameter, None)
        if values:
            shape = tuple(self.host.local(parameter).shape)
            optimizer.state[parameter] = {
                key: self.like(parameter, value)
                if self.is_tensor(value) and value.ndim and tuple(value.shape) == shape
                else value
                for key, value in values.items()
            }
