"""What saving and loading must know of a framework: an Adapter. torch's and TensorPlay's are in their packages, NumPy's
is here."""

import sys
from dataclasses import dataclass

from ..dtypes import TABLE, name_of
from ..errors import InvalidArgument


@dataclass(frozen=True)
class Piece:
    """A parameter or buffer of a model, as it lies on this rank."""

    name: str  # without wrappers
    array: object  # this rank's part: its own memory, writable, out of autograd's sight
    shape: tuple  # of the whole
    offset: tuple  # where the part begins
    copies: int = 1  # how many ranks hold this very part
    copy: int = 0  # which of them this rank is
    dtype: str = None  # in which it is kept; None: the array's
    tied_to: str = None  # the name of an earlier Piece that is the same tensor
    from_copy0: bool = False  # copies may differ, and that of copy 0 is kept: buffers, which nothing keeps alike
    kept_alike: bool = False  # libfsdp keeps the copies alike; what nothing does so for is compared when it is saved


class Adapter:
    """A framework, for `save` and `load`. All methods are called on every rank alike."""

    def group(self, model):
        """The libfsdp.Group of all ranks that hold the model; None: this process alone."""
        raise NotImplementedError

    def pieces(self, model, group):
        """The model's parameters and persistent buffers, in the order of its state dict. What is whole on every rank of
        `group` has that many copies."""
        raise NotImplementedError

    def extra_states(self, model):
        """{name: module} of those that have values of their own, beside tensors: get_extra_state and set_extra_state."""
        return {}

    def settle(self, model):
        """Before its pieces are written: no parameter is to be full."""

    def written(self, arrays):
        """These arrays of its pieces have been, which the framework may not have noticed."""

    def groups(self, model, optimizer):
        """[(options, {name: parameter}), ...] of an optimizer's groups, in their order; options without the parameters. A
        parameter is what `state` and `set_state` take."""
        raise NotImplementedError

    def set_options(self, optimizer, index, options):
        """Give group `index` these of its options, as JSON has kept them."""
        raise NotImplementedError

    def state(self, optimizer, parameter):
        """{key: tensor or number} of a parameter, {} where it has none yet."""
        raise NotImplementedError

    def set_state(self, optimizer, parameter, values):
        """Let a parameter have this state: arrays of `fresh`, and numbers. {}: none."""
        raise NotImplementedError

    def fresh(self, like, shape, dtype):
        """A new array of the framework's, of a dtype that has libfsdp's name."""
        raise NotImplementedError

    def number(self, value):
        """(number, dtype) of a state that is one: of a number itself, dtype None, or of an array without dimensions.
        (None, None): it is no number."""
        if isinstance(value, (bool, int, float)):
            return value, None
        if hasattr(value, "shape") and tuple(value.shape) == ():
            return value.item(), name_of(value.dtype)
        return None, None

    def scalar(self, key, value, dtype):
        """The state that a number stands for; dtype as `number` gave it, in whatever framework."""
        return value

    def shape(self, array):
        return tuple(array.shape)


class NumPy(Adapter):
    """Layers and optimizers of libfsdp.numpy."""

    def __init__(self):
        from .. import numpy

        self.host = numpy

    def _sharded(self, model):
        return isinstance(model, self.host.FullySharded)

    def group(self, model):
        return model.model.group if self._sharded(model) else None

    def pieces(self, model, group):
        if not self._sharded(model):
            copies, copy = (1, 0) if group is None else (group.size, group.rank)
            return [
                Piece(name, value, value.shape, (0,) * value.ndim, copies, copy)
                for name, value in ((parameter.name, parameter.value) for parameter in model.parameters())
            ]
        found = {}
        for unit in model.units():
            for param in unit:
                entry = unit.param_entry(param.name)
                array = param.shard.numpy()
                found[param.name] = Piece(
                    param.name,
                    array,
                    entry.shape,
                    entry.offset,
                    entry.copies,
                    entry.copy,
                    entry.dtype,
                    kept_alike=True,
                )
        return [found[name] for name in model._names]

    def settle(self, model):
        if self._sharded(model):
            for unit in model.units():
                unit.reshard()

    def groups(self, model, optimizer):
        return [(optimizer.options(), {parameter.name: parameter.name for parameter in optimizer.parameters})]

    def set_options(self, optimizer, index, options):
        optimizer.set_options(options)

    def state(self, optimizer, parameter):
        return optimizer.state(parameter)

    def set_state(self, optimizer, parameter, values):
        optimizer.set_state(parameter, values)

    def scalar(self, key, value, dtype):
        return int(value) if key == "step" else value

    def fresh(self, like, shape, dtype):
        import numpy

        if TABLE[dtype][2].startswith("u") and not dtype.startswith("u"):
            import ml_dtypes

            return numpy.zeros(shape, getattr(ml_dtypes, dtype))
        return numpy.zeros(shape, dtype)


def adapter_of(model):
    """The Adapter for a model."""
    torch, tensorplay = sys.modules.get("torch"), sys.modules.get("tensorplay")
    if torch is not None and isinstance(model, torch.nn.Module):
        from ..torch.checkpoint import ADAPTER

        return ADAPTER
    if tensorplay is not None and isinstance(model, tensorplay.nn.Module):
        from ..tensorplay.checkpoint import ADAPTER

        return ADAPTER
    numpy = sys.modules.get("libfsdp.numpy")
    if numpy is not None and isinstance(model, numpy.Layer):
        return NumPy()
    raise InvalidArgument(
        f"model: a {type(model).__name__} is neither a module of torch's or TensorPlay's nor a layer of libfsdp.numpy; "
        "build a libfsdp.StateDict of it, and use libfsdp.checkpoint.write"
    )
