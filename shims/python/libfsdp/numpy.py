"""A host in NumPy: a few layers without autograd, optimizers, and `fully_shard` over libfsdp's units.

It trains real models, on one process or several, and it is the example of how a host adapts. All there is to it:

  1. One unit for each layer that has parameters, made from their whole values. The layer's parameters then become views
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
    """

    def __init__(self):
        self.params = {}
        self.grads = {}

    def forward(self, x):
        raise NotImplementedError(f"{type(self).__name__}.forward")

    def backward(self, dy):
        raise NotImplementedError(f"{type(self).__name__}.backward")

    def parameters(self, prefix=""):
        """A list of Parameter, with dotted names."""
        return [
            Parameter(prefix + name, value, lambda name=name: self.grads.get(name))
            for name, value in self.params.items()
        ]

    def zero_grad(self):
        self.grads.clear()

    def _add_grad(self, name, gradient):
        held = self.grads.get(name)
        if held is None:
            self.grads[name] = gradient
        else:
            held += gradient


class Linear(Layer):
    """y = x @ weight.T + bias. x (batch, inputs), y (batch, outputs), weight (outputs, inputs), bias (outputs).

    rng: a numpy.random.Generator; weights are uniform in +-1/sqrt(inputs).
    """

    def __init__(self, inputs, outputs, *, rng, bias=True, dtype="float32"):
        super().__init__()
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

    def parameters(self, prefix=""):
        return [
            parameter
            for index, layer in enumerate(self.layers)
            for parameter in layer.parameters(f"{prefix}{index}.")
        ]

    def zero_grad(self):
        for layer in self.layers:
            layer.zero_grad()


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


class SGD:
    """value -= lr * v, where v = momentum * v + grad."""

    def __init__(self, parameters, lr, momentum=0.0):
        self.parameters, self.lr, self.momentum = list(parameters), lr, momentum
        self._velocity = [np.zeros_like(parameter.value) if momentum else None for parameter in self.parameters]

    def step(self):
        for parameter, velocity in zip(self.parameters, self._velocity):
            gradient = parameter.grad()
            if gradient is None:
                continue
            if velocity is not None:
                velocity *= self.momentum
                velocity += gradient
                gradient = velocity
            parameter.value[...] -= self.lr * gradient


class Adam:
    """Adam, with the usual corrections for its first steps."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.parameters, self.lr, self.betas, self.eps = list(parameters), lr, betas, eps
        self._moments = [(np.zeros_like(p.value), np.zeros_like(p.value)) for p in self.parameters]
        self._steps = 0

    def step(self):
        self._steps += 1
        beta1, beta2 = self.betas
        rate = self.lr / (1 - beta1**self._steps)
        correction = np.sqrt(1 - beta2**self._steps)
        for parameter, (mean, square) in zip(self.parameters, self._moments):
            gradient = parameter.grad()
            if gradient is None:
                continue
            mean += (1 - beta1) * (gradient - mean)
            square += (1 - beta2) * (gradient * gradient - square)
            parameter.value[...] -= rate * mean / (np.sqrt(square) / correction + self.eps)


# ---- Sharding --------------------------------------------------------------------------------------------------------


class ShardedLayer(Layer):
    """A layer whose parameters are a unit of libfsdp."""

    def __init__(self, layer, model, name, frozen):
        super().__init__()
        self.layer = layer
        names = {f"{name}.{key}" if name else key: key for key in layer.params}
        whole = {full_name: layer.params[key] for full_name, key in names.items()}
        self.unit = model.unit(name or "root", whole, frozen=[full_name for full_name in names if full_name in frozen])
        for param in self.unit:
            layer.params[names[param.name]] = param.full.numpy()  # this memory, from here on
        self._keys = names

    def forward(self, x):
        self.unit.pre_forward()
        y = self.layer.forward(x)
        self.unit.post_forward()
        return y

    def backward(self, dy):
        self.unit.pre_backward()
        dx = self.layer.backward(dy)
        grads, self.layer.grads = self.layer.grads, {}
        self.unit.post_backward([None if param.frozen else grads.get(self._keys[param.name]) for param in self.unit])
        return dx

    def parameters(self, prefix=""):
        return [
            Parameter(prefix + self._keys[param.name], param.shard.numpy(), lambda grad=param.grad.numpy(): grad)
            for param in self.unit
            if not param.frozen
        ]

    def zero_grad(self):
        raise InvalidArgument("zero_grad: call that of the whole FullySharded layer")


class FullySharded(Layer):
    """A layer, or layers, sharded over a group: made by `fully_shard`, used like the layer that it was made from."""

    def __init__(self, layer, model):
        super().__init__()
        self.layer, self.model = layer, model

    def forward(self, x):
        return self.layer.forward(x)

    def backward(self, dy):
        dx = self.layer.backward(dy)
        self.model.finish_backward()
        return dx

    def parameters(self, prefix=""):
        """This rank's shards, for its optimizer. Frozen parameters are not among them."""
        return self.layer.parameters(prefix)

    def zero_grad(self):
        self.model.zero_grad()

    def no_sync(self):
        """A block whose backward passes accumulate gradients on this rank and send nothing; the next one outside it
        sends the sum."""
        return self.model.no_sync()

    def full_parameters(self):
        """{name: whole array}, copies, the same on all ranks. Collective."""
        values = {}
        for unit in self.units():
            unit.unshard()
            values |= {param.name: param.full.numpy().copy() for param in unit}
            unit.reshard()
        return values

    def units(self):
        """The units, in the order of forward."""
        return list(_units(self.layer))

    @contextlib.contextmanager
    def unsharded(self):
        """A block in which every layer has its whole parameters, for use outside forward and backward. Collective."""
        units = self.units()
        for unit in units:
            unit.unshard()
        try:
            yield self
        finally:
            for unit in units:
                unit.reshard()


def _units(layer):
    if isinstance(layer, ShardedLayer):
        yield layer.unit
    elif isinstance(layer, Sequential):
        for child in layer.layers:
            yield from _units(child)


def fully_shard(layer, group=None, *, frozen=(), **options):
    """Shard `layer` over `group` and return a FullySharded layer in its place; None: a group of this process alone.

    Every layer with parameters, inside Sequential ones too, becomes one unit. Collective: all ranks give equal layers.
    `frozen` names parameters that are not trained, as `parameters()` names them ("0.weight"). Other options as for
    `libfsdp.Model`: reshard_after_forward, private_unshard, gradient_divisor.
    """
    if isinstance(layer, (FullySharded, ShardedLayer)):
        raise InvalidArgument("layer: it is sharded already")
    if not isinstance(layer, Layer):
        raise TypeError(f"layer: {type(layer).__name__} is not a libfsdp.numpy.Layer")
    known = {parameter.name for parameter in layer.parameters()}
    for name in frozen:
        if name not in known:
            raise InvalidArgument(f"frozen: {name!r} is none of {', '.join(sorted(known))}")
    model = Model(Group.single() if group is None else group, **options)
    return FullySharded(_shard(layer, model, "", frozenset(frozen)), model)


def _shard(layer, model, name, frozen):
    if isinstance(layer, Sequential):
        layer.layers = [
            _shard(child, model, f"{name}.{index}" if name else str(index), frozen)
            for index, child in enumerate(layer.layers)
        ]
        return layer
    return ShardedLayer(layer, model, name, frozen) if layer.params else layer
