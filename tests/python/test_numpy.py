"""The NumPy host: its layers against finite differences, and sharded training against one process."""

import re

import numpy as np
import pytest
from conftest import ROOT, launch

import libfsdp
from libfsdp.numpy import SGD, Adam, Layer, Linear, ReLU, Sequential, Tanh, fully_shard, softmax_cross_entropy


def net(dtype="float64", seed=3):
    rng = np.random.default_rng(seed)
    return Sequential(
        Linear(5, 7, rng=rng, dtype=dtype),
        Tanh(),
        Sequential(Linear(7, 6, rng=rng, dtype=dtype), ReLU()),
        Linear(6, 3, rng=rng, dtype=dtype, bias=False),
    )


def batch(count=12, dtype="float64"):
    rng = np.random.default_rng(5)
    return rng.normal(size=(count, 5)).astype(dtype), rng.integers(0, 3, count)


NAMES = ["0.weight", "0.bias", "2.0.weight", "2.0.bias", "3.weight"]


def test_gradients_are_the_slopes():
    model = net()
    x, labels = batch()
    _, slope = softmax_cross_entropy(model.forward(x), labels)
    dx = model.backward(slope)
    rng = np.random.default_rng(0)
    assert [parameter.name for parameter in model.parameters()] == NAMES

    def numeric(array, index):
        step = 1e-6
        array[index] += step
        up, _ = softmax_cross_entropy(model.forward(x), labels)
        array[index] -= 2 * step
        down, _ = softmax_cross_entropy(model.forward(x), labels)
        array[index] += step
        return (up - down) / (2 * step)

    for array, gradient in [(x, dx)] + [(p.value, p.grad()) for p in model.parameters()]:
        assert array.shape == gradient.shape
        for _ in range(5):
            index = tuple(rng.integers(0, length) for length in array.shape)
            assert numeric(array, index) == pytest.approx(gradient[index], abs=1e-8)


def test_gradients_add_up_until_they_are_zeroed():
    model = net()
    x, labels = batch()
    _, slope = softmax_cross_entropy(model.forward(x), labels)
    model.backward(slope)
    once = [parameter.grad().copy() for parameter in model.parameters()]
    model.backward(slope)
    for parameter, gradient in zip(model.parameters(), once):
        np.testing.assert_allclose(parameter.grad(), 2 * gradient)
    model.zero_grad()
    assert all(parameter.grad() is None for parameter in model.parameters())
    SGD(model.parameters(), 1.0).step()  # nothing to do


def test_loss_of_certain_and_of_large_logits():
    loss, slope = softmax_cross_entropy(np.array([[1000.0, 0.0], [0.0, 0.0]]), np.array([0, 1]))
    assert loss == pytest.approx(np.log(2) / 2)
    np.testing.assert_allclose(slope, [[0, 0], [0.25, -0.25]])


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_optimizers_against_their_formulas(optimizer):
    value = np.array([1.0, -2.0])
    gradients = [np.array([0.5, 1.0]), np.array([-1.0, 0.25])]
    current = []
    parameter = libfsdp.numpy.Parameter("p", value, lambda: current[-1])
    made = {
        "sgd": lambda: SGD([parameter], 0.1),
        "momentum": lambda: SGD([parameter], 0.1, momentum=0.9),
        "adam": lambda: Adam([parameter], 0.1),
    }[optimizer]()
    for gradient in gradients:
        current.append(gradient)
        made.step()
    if optimizer == "adam":
        expected, m, v = np.array([1.0, -2.0]), 0, 0
        for t, g in enumerate(gradients, 1):
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            expected = expected - 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    else:
        momentum = 0.9 if optimizer == "momentum" else 0
        expected = [1.0, -2.0] - 0.1 * gradients[0] - 0.1 * (gradients[1] + momentum * gradients[0])
    np.testing.assert_allclose(value, expected, rtol=1e-7)


# ---- Sharded ---------------------------------------------------------------------------------------------------------


def train(model, group, optimizer, accumulate, turns=6):
    """Train, and give the whole parameters. The batch is split over micro-batches and ranks; 12 divides by all."""
    x, labels = batch()
    rank, size = (group.rank, group.size) if group else (0, 1)
    sharded = hasattr(model, "no_sync")
    made = Adam(model.parameters(), 0.05) if optimizer == "adam" else SGD(model.parameters(), 0.2, momentum=0.9)
    for _ in range(turns):
        parts = np.split(np.arange(12), accumulate)
        for number, part in enumerate(parts):
            mine = part[rank::size]
            last = number == accumulate - 1

            def step():
                _, slope = softmax_cross_entropy(model.forward(x[mine]), labels[mine])
                model.backward(slope / accumulate)

            if sharded and not last:
                with model.no_sync():
                    step()
            else:
                step()
        made.step()
        model.zero_grad()
    if sharded:
        return model.full_parameters()
    return {parameter.name: parameter.value for parameter in model.parameters()}


def sharded_training(group, optimizer, accumulate, options):
    expected = train(net(), None, optimizer, 1)
    model = fully_shard(net(), group, **options)
    assert len(model.units()) == 3
    got = train(model, group, optimizer, accumulate)
    assert list(got) == NAMES
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-12, err_msg=name)
    with model.unsharded():
        np.testing.assert_array_equal(model.units()[0]["0.weight"].full.numpy(), got["0.weight"])
    memory = model.model.memory()
    everyone = np.zeros(group.size, "int64")
    group.all_gather(np.array([memory.shards]), everyone)
    assert everyone.sum() == memory.total_parameters
    group.barrier()


@pytest.mark.parametrize(
    "n, optimizer, accumulate, options",
    [
        (1, "adam", 2, {}),
        (2, "adam", 1, {}),
        (2, "sgd", 3, {"reshard_after_forward": False}),
        (3, "sgd", 2, {"private_unshard": True}),
        (4, "adam", 1, {}),
        (6, "sgd", 2, {}),
    ],
)
def test_sharded_training_equals_one_process(ranks, n, optimizer, accumulate, options):
    ranks(n, sharded_training, optimizer, accumulate, options)


def test_sharding_without_a_group():
    expected = train(net(), None, "adam", 1)
    got = train(fully_shard(net()), None, "adam", 2)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-12)


def test_frozen_parameters_stay():
    model = fully_shard(net(), frozen=["0.weight", "3.weight"])
    assert [parameter.name for parameter in model.parameters()] == ["0.bias", "2.0.weight", "2.0.bias"]
    before = net()
    got = train(model, None, "sgd", 1)
    for parameter in before.parameters():
        assert np.array_equal(got[parameter.name], parameter.value) == (parameter.name in ("0.weight", "3.weight"))


def test_a_single_layer():
    model = fully_shard(Linear(3, 2, rng=np.random.default_rng(0)))
    assert sorted(model.full_parameters()) == ["bias", "weight"]
    model.forward(np.ones((4, 3), "float32"))
    model.backward(np.ones((4, 2), "float32"))
    assert {p.name: p.grad().tolist() for p in model.parameters()}["bias"] == [4, 4]


def test_what_can_not_be_sharded_is_named():
    with pytest.raises(TypeError, match="^layer: int"):
        fully_shard(5)
    with pytest.raises(ValueError, match="^frozen: 'nope'"):
        fully_shard(net(), frozen=["nope"])
    model = fully_shard(net())
    inner = model.layer
    for again in (model, inner, Sequential(model), Sequential(Tanh(), inner), inner.layers[0], inner.layers[0].layer):
        with pytest.raises(ValueError, match="sharded already"):
            fully_shard(again)
    with pytest.raises(TypeError):
        fully_shard(net(), reshard=True)


# ---- Shards that are written at other times --------------------------------------------------------------------------


def written_shards(group, options):
    """Losses of a training that looks and writes between its steps, which plain NumPy gives as well."""

    def losses(model):
        x, labels = batch()
        optimizer = SGD(model.parameters(), 0.3)
        seen = []

        def loss():
            return softmax_cross_entropy(model.forward(x), labels)

        averages = [parameter.value.copy() for parameter in model.parameters()]
        for turn in range(4):
            value, slope = loss()
            model.backward(slope)
            seen += [value, loss()[0]]  # forward between backward and step
            optimizer.step()
            model.zero_grad()
            if turn == 1:
                checkpoint = [parameter.value.copy() for parameter in model.parameters()]
            held = [parameter.value.copy() for parameter in model.parameters()]
            for parameter, average in zip(model.parameters(), averages):
                average[...] = 0.7 * average + 0.3 * parameter.value
                parameter.value[...] = average  # averages in place of the weights
            seen.append(loss()[0])
            for parameter, weights in zip(model.parameters(), held):
                parameter.value[...] = weights
        seen.append(loss()[0])
        for parameter, weights in zip(model.parameters(), checkpoint):
            parameter.value[...] = weights  # a checkpoint, after a forward
        seen.append(loss()[0])
        return seen

    expected = losses(net())
    assert len(set(expected)) > 8
    np.testing.assert_allclose(losses(fully_shard(net(), group, **options)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"private_unshard": True}])
def test_forward_sees_what_the_shards_hold(ranks, n, options):
    ranks(n, written_shards, options)


def checkpoint_read_as_whole(group):
    model = fully_shard(net(), group)
    model.forward(batch()[0])
    for parameter in model.parameters():
        parameter.value[...] = 0.25
    assert all((value == 0.25).all() for value in model.full_parameters().values())
    for parameter in model.parameters():
        parameter.value[...] = 0.5
    with model.unsharded():
        assert (model.units()[1]["2.0.weight"].full.numpy() == 0.5).all()
    group.barrier()


def test_whole_parameters_see_what_the_shards_hold(ranks):
    ranks(2, checkpoint_read_as_whole)


# ---- Layers in layers ------------------------------------------------------------------------------------------------


class Residual(Layer):
    """Holds a layer as an attribute; lists it under a name of its own when `named`."""

    def __init__(self, inner, named=False):
        super().__init__()
        self.inner, self.named = inner, named

    def forward(self, x):
        return x + self.inner.forward(x)

    def backward(self, dy):
        return dy + self.inner.backward(dy)

    def parameters(self, prefix=""):
        return self.inner.parameters(prefix + "res.") if self.named else super().parameters(prefix)


class Scaled(Layer):
    """Parameters of its own, and layers in a list and in a dict."""

    def __init__(self, rng):
        super().__init__()
        self.params["scale"] = rng.normal(size=5)
        self.many = [Linear(5, 5, rng=rng, dtype="float64"), Tanh()]
        self.more = {"last": Residual(Linear(5, 5, rng=rng, dtype="float64"))}

    def forward(self, x):
        self._x = x
        y = x * self.params["scale"]
        for layer in self.many:
            y = layer.forward(y)
        return self.more["last"].forward(y)

    def backward(self, dy):
        dy = self.more["last"].backward(dy)
        for layer in reversed(self.many):
            dy = layer.backward(dy)
        self._add_grad("scale", (dy * self._x).sum(axis=0))
        return dy * self.params["scale"]


def nested():
    rng = np.random.default_rng(8)
    return Sequential(
        Residual(Linear(5, 5, rng=rng, dtype="float64"), named=True),
        Scaled(rng),
        Linear(5, 3, rng=rng, dtype="float64"),
    )


NESTED = [
    *("0.res.weight", "0.res.bias", "1.scale", "1.many.0.weight", "1.many.0.bias"),
    *("1.more.last.inner.weight", "1.more.last.inner.bias", "2.weight", "2.bias"),
]


def layers_in_layers(group, reshard):
    plain = nested()
    assert [parameter.name for parameter in plain.parameters()] == NESTED
    expected = train(plain, None, "adam", 1)
    model = fully_shard(nested(), group, reshard_after_forward=reshard)
    assert [parameter.name for parameter in model.parameters()] == NESTED and len(model.units()) == 5
    memory = model.model.memory()
    if group.size > 1:
        assert all(len(p.value) < len(expected[p.name]) for p in model.parameters())
    assert memory.total_parameters == sum(value.nbytes for value in expected.values())
    got = train(model, group, "adam", 2)
    assert list(got) == NESTED
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("n, reshard", [(1, True), (2, True), (2, False), (3, True)])
def test_layers_in_layers_are_sharded_too(ranks, n, reshard):
    ranks(n, layers_in_layers, reshard)


def test_zero_grad_reaches_layers_in_layers():
    model = nested()
    x, labels = batch()
    model.backward(softmax_cross_entropy(model.forward(x), labels)[1])
    assert all(parameter.grad() is not None for parameter in model.parameters())
    model.zero_grad()
    assert all(parameter.grad() is None for parameter in model.parameters())


def test_frozen_by_the_names_that_parameters_gives():
    assert [p.name for p in fully_shard(nested(), frozen="0.res.bias").parameters()] == NESTED[:1] + NESTED[2:]
    assert fully_shard(nested(), frozen=True).parameters() == []
    assert len(fully_shard(nested(), frozen=False).parameters()) == len(NESTED)


class Hidden(Layer):
    """Layers where nobody finds them, listed or not."""

    def __init__(self, inner, box, lists=True):
        super().__init__()
        self.box, self.lists = box(inner), lists
        self.inner = lambda: inner

    def parameters(self, prefix=""):
        return self.inner().parameters(prefix + "inner.") if self.lists else []


def one_array():
    first, second = Linear(4, 4), Linear(4, 4)
    second.params["weight"] = first.params["weight"]
    return Sequential(first, second)


def one_name():
    rng = np.random.default_rng(0)
    model = Sequential(Linear(4, 4, rng=rng), Linear(4, 4, rng=rng))
    model.parameters = lambda prefix="": [p for layer in model.layers for p in layer.parameters()]
    return model


def twice():
    layer = Linear(4, 4)
    return Sequential(layer, Residual(layer))


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: Sequential(Hidden(Linear(2, 2), lambda inner: None)), "'0.inner.weight', '0.inner.bias' would stay whole"),
        (lambda: Sequential(Hidden(Linear(2, 2), lambda inner: [[inner]])), "'0.inner.weight'.* would stay whole"),
        (lambda: Hidden(Linear(2, 2), lambda inner: (1, inner)), "outermost layer holds layers in a tuple, 'box'"),
        (lambda: Hidden(Linear(2, 2), lambda inner: inner, False), "does not list 'weight' of 'box'.*frozen"),
        (twice, "the same Linear is at '0' and at '1.inner'"),
        (one_array, "'0.weight' and '1.weight' are one array"),
        (one_name, "two of the name 'weight'"),
    ],
)
def test_no_parameter_stays_whole_without_a_word(make, says):
    model = make()
    with pytest.raises(libfsdp.InvalidArgument, match=f"^layer: .*{says}"):
        fully_shard(model)


def test_linear_has_the_same_weights_everywhere_unless_told():
    first, second = Linear(4, 3), Linear(4, 3, rng=np.random.default_rng(0))
    np.testing.assert_array_equal(first.params["weight"], second.params["weight"])


@pytest.mark.parametrize("example", sorted((ROOT / "shims" / "python" / "examples").glob("*.py")), ids=lambda p: p.name)
@pytest.mark.parametrize("n", [1, 2])
def test_examples_run(example, n):
    if "import torch" in example.read_text():
        pytest.importorskip("torch")  # tests/hosts runs it
    done = launch(n, example)
    assert done.returncode == 0, done.stderr
    assert done.stdout


README = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("index", range(len(README)))
def test_the_readme_runs_as_printed(tmp_path, index):
    if "import torch" in README[index]:
        pytest.importorskip("torch")
    path = tmp_path / "readme.py"
    path.write_text(README[index])
    done = launch(2, path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def demo(*arguments):
    from conftest import run_python

    return run_python(ROOT / "ci" / "digits" / "compare.py", *arguments, timeout=55)


def test_the_demo_holds(tmp_path):
    pytest.importorskip("sklearn")
    picture = tmp_path / "curves.png"
    done = demo("--epochs", "8", "--ranks", "3", "--plot", picture)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("HOLDS")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--epochs", "0"), "--epochs: give at least 1"),
        (("--ranks", "65"), "--ranks: give 1 to 64"),
        (("--host", "tensorflow"), "'numpy', 'torch', 'tensorplay'"),
        (("--plot", "curves.txt"), ".png"),
        (("--plot", "/nowhere/curves.png"), "there is no folder /nowhere"),
        (("--host", "torch", "--python", "/bin/false"), "/bin/false has no torch"),
    ],
)
def test_the_demo_names_what_is_wrong_with_its_arguments(arguments, said):
    done = demo(*arguments)
    assert done.returncode != 0 and said in done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
