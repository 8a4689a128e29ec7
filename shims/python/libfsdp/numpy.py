"""A host in NumPy: a few layers without autograd, optimizers, and `fully_shard` over libfsdp's units.

It trains real models, on one process or several, and it is the example of how a host adapts. All there is to it:

  1. One unit for each layer that has parameters of its own, made from their whole values. The layer's parameters then become views
     of the unit's full parameters (`ShardedLayer.__init__`). They keep their addresses, so that happens once.
  2. The four hooks around the layer's forward and backward (`ShardedLayer.forward`, `.backward`).
  3. `model.finish_backward()` when backward is over (`FullySharded.backward`).
  4. Its optimizer is given the shards and their gradients in place of the parameters (`ShardedLayer.parameters`).

    net = Sequential(Linear(64, 128, rng=rng), Tanh(), Linear(128, 10, rng=rng))
    net = fully_shard(net, group)                       # leave this line out to train without libfsdp
    optimizer = SGD(net.parameters(), lr=0.1)

    loss, slope = softmax_cross_entropy(net.forward(x), labels)
    net.backward(slope)
    optimizer.step()
    net.zero_grad()

Each rank takes its own part of the batch, of equal size, with the loss averaged over it: gradients are averaged over the
ranks, so that together they are the whole batch's.
"""

import contextlib
from dataclasses import dataclass
from typing import Callable

import numpy as np

from .errors import InvalidArgument
from .group import Group
from .model import Model
from .unit import each_of, frozen_names

# ---- Layers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """What an optimizer works on: `value`, an array to update in place, and `grad()`, an array or None."""

    name: str
    value: np.ndarray
    grad: Callable


class Layer:
    """A function with parameters. `forward(x)` gives y and remembers what `backward` needs; `backward(dy)` gives the
    loss's gradient by x, from that by y, and adds those by the parameters to `grads`.

    params  {name: array}     grads  {name: array}, for those that have one

    Layers that are attributes of it, or stand in a list or dict that is one, belong to it: `parameters` and `zero_grad`
    go through them, and `fully_shard` shards them.
    """

    in_unit = False  # whether fully_shard has taken it

    def __init__(self):
        self.params = {}
        self.grads = {}

    def forward(self, x):
        raise NotImplementedError(f"{type(self).__name__}.forward")

    def backward(self, dy):
        raise NotImplementedError(f"{type(self).__name__}.backward")

    def parameters(self, prefix=""):
        """A list of Parameter, with dotted names."""
        own = [
            Parameter(prefix + name, value, lambda name=name: self.grads.get(name))
            for name, value in self.params.items()
        ]
        inner = [parameter for name, home, key in _inner(self) for parameter in home[key].parameters(f"{prefix}{name}.")]
        return own + inner

    def zero_grad(self):
        self.grads.clear()
        for _, home, key in _inner(self):
            home[key].zero_grad()

    def _add_grad(self, name, gradient):
        held = self.grads.get(name)
        if held is None:
            self.grads[name] = gradient
        else:
            held += gradient


def _inner(layer):
    """Where a layer holds others: (name, home, key) for each, with home[key] the layer. A Sequential's are named 0, 1, ..."""
    for name, value in list(vars(layer).items()):
        if isinstance(value, Layer):
            yield name, vars(layer), name
        elif isinstance(value, (list, dict)):
            prefix = "" if isinstance(layer, Sequential) and name == "layers" else name + "."
            for key, item in enumerate(value) if isinstance(value, list) else list(value.items()):
                if isinstance(item, Layer):
                    yield f"{prefix}{key}", value, key


class Linear(Layer):
    """y = x @ weight.T + bias. x (batch, inputs), y (batch, outputs), weight (outputs, inputs), bias (outputs).

    rng: a numpy.random.Generator; weights are uniform in +-1/sqrt(inputs). None: one of seed 0, so that all ranks have
    the same.
    """

    def __init__(self, inputs, outputs, *, rng=None, bias=True, dtype="float32"):
        super().__init__()
        rng = np.random.default_rng(0) if rng is None else rng
        bound = 1 / np.sqrt(inputs)
        self.params["weight"] = rng.uniform(-bound, bound, (outputs, inputs)).astype(dtype)
        if bias:
            self.params["bias"] = rng.uniform(-bound, bound, outputs).astype(dtype)

    def forward(self, x):
        self._x = x
        y = x @ self.params["weight"].T
        if "bias" in self.params:
            y += self.params["bias"]
        return y

    def backward(self, dy):
        self._add_grad("weight", dy.T @ self._x)
        if "bias" in self.params:
            self._add_grad("bias", dy.sum(axis=0))
        return dy @ self.params["weight"]


class ReLU(Layer):
    """max(x, 0)."""

    def forward(self, x):
        self._positive = x > 0
        return x * self._positive

    def backward(self, dy):
        return dy * self._positive


class Tanh(Layer):
    def forward(self, x):
        self._y = np.tanh(x)
        return self._y

    def backward(self, dy):
        return dy * (1 - self._y * self._y)


class Sequential(Layer):
    """Layers one after the other."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = list(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer.forward(x)
        return x

    def backward(self, dy):
        for layer in reversed(self.layers):
            dy = layer.backward(dy)
        return dy


def softmax_cross_entropy(logits, labels):
    """(mean loss, its gradient by the logits). logits (batch, classes), labels (batch) of class numbers."""
    rows = np.arange(len(labels))
    shifted = logits - logits.max(axis=1, keepdims=True)
    exps = np.exp(shifted)
    sums = exps.sum(axis=1, keepdims=True)
    loss = float(np.mean(np.log(sums[:, 0]) - shifted[rows, labels]))
    slope = exps / sums
    slope[rows, labels] -= 1
    slope /= len(labels)
    return loss, slope


# ---- Optimizers ------------------------------------------------------------------------------------------------------


class _Optimizer:
    """Parameters, named options, and what is remembered of each parameter: {} until it has had a gradient.

    State has the names that torch's optimizers use, so that checkpoints of either fit the other.
    """

    def __init__(self, parameters, **options):
        self.parameters = list(parameters)
        self._options = options
        self._states = {}  # name: {key: array or number}

    def step(self):
        """Update every parameter that has a gradient."""
        for parameter in self.parameters:
            gradient = parameter.grad()
            if gradient is not None:
                self._update(parameter.value, gradient, self._states.setdefault(parameter.name, {}), **self._options)

    def options(self):
        """{name: value}, a copy."""
        return dict(self._options)

    def set_options(self, options):
        """Change some: a learning rate, say. Raises InvalidArgument for names that it does not have."""
        unknown = options.keys() - self._options.keys()
        if unknown:
            raise InvalidArgument(f"options: {type(self).__name__} has no {sorted(unknown)[0]!r}")
        self._options.update(options)

    def state(self, name):
        """{key: array or number} of a parameter; the arrays themselves."""
        return self._states.get(name, {})

    def set_state(self, name, values):
        self._states[name] = dict(values)


class SGD(_Optimizer):
    """value -= lr * v, where v = momentum * v + grad."""

    def __init__(self, parameters, lr, momentum=0.0):
        super().__init__(parameters, lr=lr, momentum=momentum)

    def _update(self, value, gradient, state, lr, momentum):
        if momentum:
            velocity = state.get("momentum_buffer")
            if velocity is None:
                velocity = state["momentum_buffer"] = np.zeros_like(value)
            velocity *= momentum
            velocity += gradient
            gradient = velocity
        value[...] -= lr * gradient


class Adam(_Optimizer):
    """Adam, with the usual corrections for its first steps."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(parameters, lr=lr, betas=betas, eps=eps)

    def _update(self, value, gradient, state, lr, betas, eps):
        if not state:
            state.update(step=0, exp_avg=np.zeros_like(value), exp_avg_sq=np.zeros_like(value))
        state["step"] += 1
        beta1, beta2 = betas
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean += (1 - beta1) * (gradient - mean)
        square += (1 - beta2) * (gradient * gradient - square)
        rate = lr / (1 - beta1 ** state["step"])
        value[...] -= rate * mean / (np.sqrt(square) / np.sqrt(1 - beta2 ** state["step"]) + eps)


# ---- Sharding --------------------------------------------------------------------------------------------------------


class ShardedLayer(Layer):
    """A layer whose own parameters are a unit of libfsdp.

    names: {key in layer.params: full name}. With a `Precision`, x is cast to its `param` and y to its `output`; what
    backward takes and gives has the dtypes that y and x had, as if the casts were layers.
    """

    def __init__(self, layer, model, name, names, frozen, dims):
        super().__init__()
        self.layer = layer
        whole = {full_name: layer.params[key] for key, full_name in names.items()}
        self.unit = model.unit(
            name or "root",
            whole,
            frozen=[full_name for full_name in whole if full_name in frozen],
            dim={full_name: dims[full_name] for full_name in whole},
        )
        self._keys = {full_name: key for key, full_name in names.items()}
        self._dtypes = {}  # with a precision: what the last forward cast from
        for param in self.unit:
            layer.params[self._keys[param.name]] = param.full.numpy()  # this memory, from here on
        layer.in_unit = True

    def __reduce__(self):
        raise _copied(self)

    def forward(self, x):
        self.unit.pre_forward()
        y = self.layer.forward(self._cast(x, "input"))
        self.unit.post_forward()
        return self._cast(y, "output")

    def backward(self, dy):
        self.unit.pre_backward()
        dx = self.layer.backward(self._cast_back(dy, "output"))
        grads, self.layer.grads = self.layer.grads, {}
        self.unit.post_backward([self._gradient(param, grads) for param in self.unit])
        return self._cast_back(dx, "input")

    def _gradient(self, param, grads):
        key = self._keys[param.name]
        gradient = None if param.frozen else grads.get(key)
        if gradient is None or self.unit.model.precision is None:
            return gradient
        return gradient.astype(self.layer.params[key].dtype, copy=False)  # a wider one, where inputs are kept so

    def _cast(self, array, kind):
        if self.unit.model.precision is None:
            return array
        self._dtypes[kind] = array.dtype
        cast = self.unit.cast(array, kind)
        return array if cast is array else cast.numpy()

    def _cast_back(self, slope, kind):
        """Backward of _cast."""
        dtype = self._dtypes.get(kind)
        return slope if dtype is None or slope is None else slope.astype(dtype, copy=False)

    def parameters(self, prefix=""):
        own = [
            Parameter(prefix + self._keys[param.name], param.shard.numpy(), _sharded_gradient(param))
            for param in self.unit
            if not param.frozen
        ]
        inner = [
            parameter
            for name, home, key in _inner(self.layer)
            for parameter in home[key].parameters(f"{prefix}{name}.")
        ]
        return own + inner

    def zero_grad(self):
        raise InvalidArgument("zero_grad: call that of the whole FullySharded layer")


def _sharded_gradient(param):
    """`Parameter.grad` of a shard: None while it is frozen."""
    gradient = param.grad.numpy()
    return lambda: None if param.frozen else gradient


class FullySharded(Layer):
    """A layer, or layers, sharded over a group: made by `fully_shard`, used like the layer that it was made from.

    The shards are this rank's to write at any time outside forward and backward: by an optimizer's step, from a
    checkpoint, swapped for averages and back (`parameter.value[...] = ...`). Each forward, `unsharded` and
    `full_parameters` see what the shards hold then, on all ranks; backward uses what its forward used. Writing to the
    whole parameters, a layer's `params`, changes no shard and is dropped, but for `summon_full_params`.

    It can't be copied or pickled: copy the layers before `fully_shard`, or store `full_parameters()`.
    """

    def __init__(self, layer, model, sharded, names):
        super().__init__()
        self.layer, self.model = layer, model
        self._sharded, self._names = sharded, names
        self._whole = False  # inside `unsharded`
        self._forward_only = False  # a forward that no backward has followed yet

    def __reduce__(self):
        raise _copied(self)

    def forward(self, x):
        if self._forward_only and not self._whole:
            for unit in self.units():  # full still, where the strategy keeps them so; the shards may have changed
                unit.reshard()
        self._forward_only = True
        return self.layer.forward(x)

    def backward(self, dy):
        dx = self.layer.backward(dy)
        self.model.finish_backward()
        self._forward_only = False
        return dx

    def parameters(self, prefix=""):
        """This rank's shards, for its optimizer. Parameters that are frozen now are not among them; of those that
        `set_frozen` freezes later, `grad()` is None while they are."""
        params = {param.name: param for unit in self.units() for param in unit}
        return [
            Parameter(prefix + name, params[name].shard.numpy(), _sharded_gradient(params[name]))
            for name in self._names
            if not params[name].frozen
        ]

    def zero_grad(self):
        self.model.zero_grad()

    def no_sync(self):
        """A block whose backward passes accumulate gradients on this rank and send nothing; the next one outside it
        sends the sum."""
        return self.model.no_sync()

    def no_all_reduce(self):
        """A block whose backward passes, on a mesh with replicas, reduce within the shard dimension only; the next one
        outside it sends the sum to the replicas."""
        return self.model.no_all_reduce()

    def full_parameters(self):
        """{name: whole array}, copies in the shards' dtype, the same on all ranks. Collective."""
        values = {param.name: unit.gather_param(param.name).numpy() for unit in self.units() for param in unit}
        return {name: values[name] for name in self._names}

    def set_frozen(self, names, frozen=True):
        """Freeze parameters (a name, or names as `parameters()` gives them), or train them again. Alike on all ranks."""
        chosen = frozen_names([names] if isinstance(names, str) else names, self._names)
        for unit in self.units():
            for param in unit:
                if param.name in chosen:
                    unit.set_frozen(param.name, frozen)

    def units(self):
        """The units, in the order in which the layers stand in the model."""
        return [sharded.unit for sharded in self._sharded]

    def unsharded(self):
        """A block in which every layer has its whole parameters, for use outside forward and backward. Collective."""
        return self.summon_full_params(writeback=False)

    @contextlib.contextmanager
    def summon_full_params(self, writeback=True):
        """The same, and what this rank changes in them is in its shards afterwards, unless the block ends with an
        exception. Ranks that change them alike stay alike."""
        self._whole = True
        try:
            with self.model.summon_full_params(writeback):
                yield self
        finally:
            self._whole = False


def _copied(layer):
    return TypeError(
        f"a {type(layer).__name__} layer can't be copied or pickled: its memory is shared between ranks; copy the layers "
        "before fully_shard, or store full_parameters()"
    )


def fully_shard(layer, group=None, *, frozen=(), dim=0, **options):
    """Shard `layer` over `group`, a Group or a Mesh, and return a FullySharded layer in its place; None: a group of this
    process alone.

    Every layer with parameters of its own becomes one unit, also inside others, however deep (see Layer). Collective:
    all ranks give equal layers. `frozen` names parameters that are not trained, as `parameters()` names them
    ("0.weight"); True: all. `dim`: the dimension that is cut over the ranks, one for all, or {name: dimension}. Other options as for
    `libfsdp.Model`: strategy, reshard_after_forward, precision, sync_module_states, ...

    Raises InvalidArgument for a layer that is sharded already, one that stands in two places, and for parameters that
    are listed by `parameters()` but not found in a layer's `params`, or the other way round.
    """
    if not isinstance(layer, Layer):
        raise TypeError(f"layer: {type(layer).__name__} is not a libfsdp.numpy.Layer")
    outermost = {"": layer}
    found = _find(outermost)
    listed = layer.parameters()
    names = _names(found, listed)
    order = [parameter.name for parameter in listed]
    frozen = frozen_names(frozen, order)
    dims = dict(zip(order, each_of(dim, order, "dim", 0)))
    model = Model(Group.single() if group is None else group, **options)
    sharded = []
    for place, home, key, inner in found:
        if inner.params:
            home[key] = ShardedLayer(inner, model, place, names[place], frozen, dims)
            sharded.append(home[key])
    return FullySharded(outermost[""], model, sharded, order)


def _find(outermost):
    """All layers, as (place, home, key, layer): home[key] is the layer, place its dotted name, "" the outermost one's."""
    found, places = [], {}

    def look(place, home, key, layer):
        if isinstance(layer, (FullySharded, ShardedLayer)):
            raise InvalidArgument(f"layer: {_at(place)} is sharded already")
        if layer.in_unit:
            raise InvalidArgument(f"layer: {_at(place)} is sharded already, as part of another FullySharded layer")
        if id(layer) in places:
            raise InvalidArgument(
                f"layer: the same {type(layer).__name__} is at {_at(places[id(layer)])} and at {_at(place)}; a layer "
                "can be sharded in one place only"
            )
        places[id(layer)] = place
        found.append((place, home, key, layer))
        for name, value in vars(layer).items():
            if isinstance(value, (tuple, set, frozenset)) and any(isinstance(item, Layer) for item in value):
                raise InvalidArgument(
                    f"layer: {_at(place)} holds layers in a {type(value).__name__}, {name!r}; put them in a list"
                )
        for name, inner_home, inner_key in _inner(layer):
            look(f"{place}.{name}" if place else name, inner_home, inner_key, inner_home[inner_key])

    look("", outermost, "", outermost[""])
    return found


def _at(place):
    return repr(place) if place else "the outermost layer"


def _names(found, listed):
    """{place: {key of the layer's params: name by parameters()}}: all that is listed must be found, and once."""
    by_array, by_name = {}, {}
    for parameter in listed:
        if parameter.name in by_name:
            raise InvalidArgument(f"layer: parameters() lists two of the name {parameter.name!r}; use its prefix")
        if id(parameter.value) in by_array:
            other = by_array[id(parameter.value)]
            raise InvalidArgument(f"layer: {other!r} and {parameter.name!r} are one array, which can't be sharded twice")
        by_array[id(parameter.value)] = by_name[parameter.name] = parameter.name
    names = {}
    for place, _, _, layer in found:
        names[place] = {}
        for key, value in layer.params.items():
            name = by_array.pop(id(value), None)
            if name is None:
                raise InvalidArgument(
                    f"layer: parameters() does not list {key!r} of {_at(place)}; list it, and name it in `frozen` if it "
                    "is not to be trained"
                )
            names[place][key] = name
    if by_array:
        raise InvalidArgument(
            f"layer: {', '.join(map(repr, by_array.values()))} would stay whole on every rank: parameters() lists it, but "
            "it is in no layer's `params`, or in a layer that is neither an attribute of another nor in a list or dict "
            "that is one"
        )
    return names
