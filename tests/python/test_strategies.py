"""Training with every strategy, mesh, schedule and precision, against plain NumPy in one process."""

import contextlib

import numpy as np
import pytest
from test_numpy import batch, net

import libfsdp
from libfsdp import Mesh, Precision, Strategy
from libfsdp.numpy import SGD, Adam, Linear, Sequential, Tanh, fully_shard, softmax_cross_entropy

TURNS, SAMPLES = 4, 24  # which divides by all numbers of ranks and micro-batches


def optimizer_of(model, kind):
    return Adam(model.parameters(), 0.05) if kind == "adam" else SGD(model.parameters(), 0.2, momentum=0.9)


def step(model, x, labels, weight=1.0):
    loss, slope = softmax_cross_entropy(model.forward(x), labels)
    model.backward(slope * weight)
    return loss


def alone(kind):
    """Whole batches in one process."""
    model = net()
    optimizer = optimizer_of(model, kind)
    x, labels = batch(SAMPLES)
    for _ in range(TURNS):
        step(model, x, labels)
        optimizer.step()
        model.zero_grad()
    return {parameter.name: parameter.value for parameter in model.parameters()}


def together(group, model, kind, accumulate):
    """The same batches, cut for ranks and for micro-batches; "local" ones are not sent, "within" not to replicas."""
    optimizer = optimizer_of(model, kind)
    x, labels = batch(SAMPLES)
    for _ in range(TURNS):
        for how, part in zip(accumulate, np.split(np.arange(SAMPLES), len(accumulate))):
            mine = part[group.rank :: group.size]
            block = {"local": model.no_sync, "within": model.no_all_reduce, "sent": contextlib.nullcontext}[how]
            with block():
                step(model, x[mine], labels[mine], 1 / len(accumulate))
        optimizer.step()
        model.zero_grad()
    return model.full_parameters()


ONCE = ["sent"]
CASES = {
    1: [
        (None, {}, ONCE),
        (None, {"strategy": "shard_grad_op"}, ["local", "sent"]),
        (None, {"strategy": "no_shard"}, ["local", "sent"]),
        ({"replicate": 1, "shard": 1}, {"strategy": "hybrid_shard"}, ["within", "sent"]),
        (None, {"forward_prefetch": 2, "backward_prefetch": "pre", "offload_dir": "here"}, ONCE),
    ],
    2: [
        (None, {"strategy": "full_shard"}, ["local", "sent"]),
        (None, {"strategy": "shard_grad_op"}, ["sent", "local", "sent"]),
        (None, {"strategy": "no_shard"}, ["local", "sent"]),
        (None, {"strategy": "no_shard"}, ["within", "sent"]),
        (None, {"strategy": "no_shard", "precision": {}}, ONCE),
        ({"replicate": 2, "shard": 1}, {"strategy": "hybrid_shard"}, ["within", "local", "sent"]),
        ({"replicate": 1, "shard": 2}, {"strategy": "hybrid_shard_grad_op"}, ["within", "sent"]),
        (None, {"private_unshard": True, "forward_prefetch": 1, "backward_prefetch": "post"}, ONCE),
        (None, {"forward_prefetch": 2, "backward_prefetch": "pre", "prefetch_limit": 2}, ONCE),
        (None, {"reshard_after_forward": False, "offload_dir": "here"}, ["local", "sent"]),
        (None, {"reshard_after_forward": 2}, ONCE),
        (None, {"reshard_after_forward": 2, "private_unshard": True}, ONCE),
    ],
    4: [
        ({"replicate": 2, "shard": 2}, {"strategy": "hybrid_shard"}, ["within", "sent"]),
        ({"replicate": 2, "shard": 2}, {"strategy": "hybrid_shard"}, ["local", "within", "sent"]),
        (
            {"replicate": 2, "shard": 2},
            {"strategy": "hybrid_shard_grad_op", "forward_prefetch": 1, "backward_prefetch": "pre"},
            ["within", "sent"],
        ),
        ({"replicate": 2, "shard": 2}, {"strategy": "hybrid_shard", "private_unshard": True}, ["within", "sent"]),
        ({"a": 2, "b": 2}, {"strategy": "hybrid_shard", "shard_dim": "a", "replicate_dim": "b"}, ONCE),
        ({"a": 2, "b": 2}, {"reshard_after_forward": 2}, ["local", "sent"]),
        ({"a": 2, "b": 2}, {"reshard_after_forward": 2, "private_unshard": True, "backward_prefetch": "post"}, ONCE),
        (None, {"strategy": "no_shard"}, ["within", "sent"]),
    ],
}


def trains(group, folder):
    expected = {kind: alone(kind) for kind in ("sgd", "adam")}
    for number, (dims, options, accumulate) in enumerate(CASES[group.size]):
        kind = ("sgd", "adam")[number % 2]
        options = dict(options)
        if "offload_dir" in options:
            options["offload_dir"] = folder
        if "precision" in options:
            options["precision"] = Precision(**options["precision"])
        with Mesh(group, dims) if dims else contextlib.nullcontext() as mesh:
            model = fully_shard(net(), mesh or group, **options)
            got = together(group, model, kind, accumulate)
            for name, value in expected[kind].items():
                why = f"{dims} {options} {accumulate}: {name}"
                np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-12, err_msg=why)
            infos = [unit.info() for unit in model.units()]
            if "strategy" in options:
                assert {info.strategy for info in infos} == {Strategy[options["strategy"].upper()]}
            assert all(info.state == "sharded" for info in infos)
            assert model.model.memory().total_parameters == sum(value.nbytes for value in got.values())
        group.barrier()


@pytest.mark.parametrize("n", CASES)
def test_training_equals_one_process(ranks, tmp_path, n):
    ranks(n, trains, str(tmp_path), timeout=55)
    assert not list(tmp_path.iterdir())  # what was offloaded has no name


def along_other_dimensions(group):
    expected = alone("adam")
    for dim in ({"0.weight": 1, "2.0.weight": 1, "3.weight": 1}, {"3.weight": 1}):
        model = fully_shard(net(), group, dim=dim)
        got = together(group, model, "adam", ["local", "sent"])
        for name, value in expected.items():
            np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-12, err_msg=name)
        for unit in model.units():
            for param in unit:
                assert param.info().shard_dim == (dim.get(param.name, 0) if group.size > 1 else param.info().shard_dim)
    group.barrier()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_training_along_other_dimensions(ranks, n):
    ranks(n, along_other_dimensions)


# ---- Precision -------------------------------------------------------------------------------------------------------


def small(dtype="float32"):
    rng = np.random.default_rng(4)
    return Sequential(Linear(5, 7, rng=rng, dtype=dtype), Tanh(), Linear(7, 3, rng=rng, dtype=dtype))


def low_alone(parts, param, reduce, lr):
    """Masters in float32, everything else in float16; ranks one after the other."""
    masters = {parameter.name: parameter.value.copy() for parameter in small().parameters()}
    x, labels = batch(SAMPLES, "float32")
    for _ in range(TURNS):
        gradients = []
        for mine in parts:
            model = small()
            for index in (0, 2):
                for key in model.layers[index].params:
                    model.layers[index].params[key] = masters[f"{index}.{key}"].astype(param)
            _, slope = softmax_cross_entropy(model.forward(x[mine].astype(param)), labels[mine])
            assert slope.dtype == param
            model.backward(slope)
            gradients.append({parameter.name: parameter.grad() for parameter in model.parameters()})
        for name, master in masters.items():
            total = np.zeros_like(master)
            for gradient in gradients:
                total += gradient[name].astype(reduce).astype("float32")
            master -= np.float32(lr) * (total / np.float32(len(parts)))
    return masters


LOW = [
    (None, {}),
    ("float32", {"strategy": "hybrid_shard"}),
    (None, {"strategy": "no_shard"}),
]


def low_precision(group):
    for reduce, options in LOW:
        low_precision_with(group, reduce, options)
    group.barrier()


def low_precision_with(group, reduce, options):
    lr = 2.0**-9  # small enough that float16 weights would stand still
    parts = [np.arange(SAMPLES)[rank :: group.size] for rank in range(group.size)]
    expected = low_alone(parts, "float16", reduce or "float16", lr)
    mesh = Mesh(group, {"replicate": group.size // 2 or 1, "shard": min(2, group.size)})
    model = fully_shard(small(), mesh, precision=Precision("float16", reduce=reduce), **options)
    optimizer = SGD(model.parameters(), np.float32(lr))
    x, labels = batch(SAMPLES, "float32")
    for _ in range(TURNS):
        out = model.forward(x[parts[group.rank]])
        assert out.dtype == np.float16
        _, slope = softmax_cross_entropy(out, labels[parts[group.rank]])
        dx = model.backward(slope)
        assert dx.dtype == np.float32
        assert all(parameter.grad().dtype == np.float32 for parameter in model.parameters())
        optimizer.step()
        model.zero_grad()
    got = model.full_parameters()
    moved = 0
    for name, value in expected.items():
        assert got[name].dtype == np.float32
        np.testing.assert_allclose(got[name], value, rtol=0, atol=2e-7, err_msg=name)
        moved += np.sum(value.astype("float16") != value)
    assert moved > 50  # masters hold what float16 can't


@pytest.mark.parametrize("n", [1, 2, 4])
def test_masters_keep_their_precision(ranks, n):
    ranks(n, low_precision)


def test_outputs_and_inputs_of_a_precision():
    x, labels = batch(SAMPLES, "float32")
    for precision, inside, outside in (
        (Precision("float16", output="float32"), "float16", "float32"),
        (Precision("float16", keep_inputs=True), "float32", "float32"),
        (Precision(output="float64"), "float64", "float64"),  # the layers before it have outputs too
    ):
        seen = []
        model = small()
        forward = model.layers[2].forward
        model.layers[2].forward = lambda x: seen.append(x.dtype) or forward(x)  # noqa: B023
        model = fully_shard(model, precision=precision)
        out = model.forward(x)
        _, slope = softmax_cross_entropy(out, labels)
        assert model.backward(slope).dtype == np.float32
        assert (seen[0], out.dtype) == (np.dtype(inside), np.dtype(outside))
        assert all(np.abs(parameter.grad()).max() > 0 for parameter in model.parameters())


# ---- What a whole model can do --------------------------------------------------------------------------------------


def from_rank_0(group, dims):
    expected = {parameter.name: parameter.value for parameter in net(seed=3).parameters()}
    with Mesh(group, dims) if dims else contextlib.nullcontext() as mesh:
        strategy = "hybrid_shard" if dims and len(dims) > 1 else "full_shard"
        model = fully_shard(net(seed=3 + group.rank), mesh or group, strategy=strategy, sync_module_states=True)
        for name, value in model.full_parameters().items():
            np.testing.assert_array_equal(value, expected[name])
        buffers = {"mean": np.full((2, 3), group.rank + 5.0), "count": np.array([group.rank + 7])}
        model.model.broadcast(buffers)
        model.model.broadcast([])
        assert (buffers["mean"] == 5).all() and buffers["count"] == [7]
        # each rank its own again, but for a deed of write_back on all
        with model.summon_full_params():
            for unit in model.units():
                for param in unit:
                    param.full.numpy()[...] = expected[param.name] * 2
        for name, value in model.full_parameters().items():
            np.testing.assert_array_equal(value, expected[name] * 2)
        with model.unsharded():
            model.units()[0]["0.weight"].full.numpy()[...] = 9
        with contextlib.suppress(KeyError), model.summon_full_params():
            model.units()[0]["0.weight"].full.numpy()[...] = 9
            raise KeyError
        np.testing.assert_array_equal(model.full_parameters()["0.weight"], expected["0.weight"] * 2)
    group.barrier()


@pytest.mark.parametrize(
    "n, dims", [(1, None), (2, None), (4, {"replicate": 2, "shard": 2}), (2, {"replicate": 2, "shard": 1})]
)
def test_all_begin_with_the_values_of_rank_0(ranks, n, dims):
    ranks(n, from_rank_0, dims)


def thaws(group):
    """Freeze and train again between steps: as leaving the parameters out of plain NumPy's optimizer in those steps."""
    names = ["0.weight", "2.0.bias"]
    plain, model = net(), fully_shard(net(), group)
    ours, theirs = optimizer_of(model, "sgd"), optimizer_of(plain, "sgd")
    x, labels = batch(SAMPLES)
    mine = np.arange(SAMPLES)[group.rank :: group.size]
    reduced = []
    for turn in range(6):
        frozen = turn in (2, 3)
        if turn == 2:
            model.set_frozen(names)
        if turn == 4:
            model.set_frozen(names, False)
        before = model.model.memory().reduced_bytes
        step(plain, x, labels)
        step(model, x[mine], labels[mine])
        reduced.append(model.model.memory().reduced_bytes - before)
        if frozen:
            for parameter in plain.parameters():
                if parameter.name in names:
                    layer = plain.layers[0] if parameter.name[0] == "0" else plain.layers[2].layers[0]
                    layer.grads.pop(parameter.name.rpartition(".")[2])
        held = [parameter.name for parameter in model.parameters()]
        assert held == [name for name in [p.name for p in plain.parameters()] if not frozen or name not in names]
        ours.step()
        theirs.step()
        model.zero_grad()
        plain.zero_grad()
    got = model.full_parameters()
    for parameter in plain.parameters():
        np.testing.assert_allclose(got[parameter.name], parameter.value, rtol=0, atol=1e-12)
    if group.size > 1:
        saved = sum(got[name].nbytes for name in names)
        assert [reduced[0] - count for count in reduced] == [0, 0, saved, saved, 0, 0]
    with pytest.raises(libfsdp.InvalidArgument, match="^frozen: 'nope'"):
        model.set_frozen("nope")
    group.barrier()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_freezing_and_training_again(ranks, n):
    ranks(n, thaws)
