"""What a unit can do besides the hooks: layouts, values in and out of shards, settings, and what it tells of itself."""

import math

import ml_dtypes
import numpy as np
import pytest

import libfsdp
from libfsdp import Group, Mesh, Meta, Model, Precision, Strategy, Unit

same = np.testing.assert_array_equal
SHAPES = {"tall": (7, 3), "wide": (2, 5), "cube": (3, 4, 5), "none": (4, 0), "one": (1,)}
DIMS = {"tall": 0, "wide": 1, "cube": 1, "none": 1, "one": 0}


def value(name, dtype="float32"):
    count = math.prod(SHAPES[name])
    return (np.arange(count).reshape(SHAPES[name]) * 3 % 101 + len(name)).astype(dtype)


def part(array, dim, rank, size):
    """NumPy's own way to this rank's part: chunks of ceil(rows / size)."""
    chunk = -(-array.shape[dim] // size)
    return np.take(array, np.arange(array.shape[dim])[rank * chunk : (rank + 1) * chunk], dim)


def backward(unit, grads):
    unit.pre_backward()
    unit.post_backward(grads)
    unit.model.finish_backward()


# ---- Layouts ---------------------------------------------------------------------------------------------------------


def layouts(group):
    n, rank = group.size, group.rank
    model = Model(group)
    unit = model.unit(
        "u", {name: np.asfortranarray(value(name)) for name in SHAPES}, dim=DIMS, frozen="one"
    )
    for param in unit:
        dim, whole = DIMS[param.name], value(param.name)
        mine = part(whole, dim, rank, n)
        same(param.shard.numpy(), mine)
        assert param.shard.numpy().flags.c_contiguous
        info = param.info()
        start = min(rank * -(-whole.shape[dim] // n), whole.shape[dim])
        assert info == libfsdp.ParamInfo(
            param.name,
            whole.shape,
            info.shard_dim if n == 1 else dim,
            start,
            mine.shape[dim],
            "float32",
            "float32",
            "float32",
            param.name == "one",
            None,
            False,
        )
    unit.unshard()
    for param in unit:
        same(param.full.numpy(), value(param.name))
    unit.reshard()
    backward(unit, {name: np.asfortranarray(value(name) * (rank + 1)) for name in SHAPES if name != "one"})
    for param in unit:
        if not param.frozen:
            expected = value(param.name) * (sum(range(1, n + 1)) / n)
            np.testing.assert_allclose(param.grad.numpy(), part(expected, DIMS[param.name], rank, n), rtol=1e-6)
    trained = [value(name) for name in SHAPES if name != "one"]
    assert model.grad_norm() == pytest.approx(
        math.sqrt(sum((array.astype("float64") ** 2).sum() for array in trained)) * sum(range(1, n + 1)) / n, rel=1e-6
    )
    group.barrier()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_parameters_cut_along_any_dimension(ranks, n):
    ranks(n, layouts)


def fills(group):
    """Parameters that exist as shapes only, filled shard by shard: nobody ever holds the whole."""
    model = Model(group)
    unit = model.unit(
        "u",
        {name: Meta(SHAPES[name], "float64") for name in SHAPES} | {"given": np.arange(6.0)},
        dim=DIMS,
    )
    assert unit["given"].shard.numpy().sum() == part(np.arange(6.0), 0, group.rank, group.size).sum()
    for name in SHAPES:
        param = unit[name]
        assert not param.shard.numpy().any() and param.dtype == "float64"
        info = param.info()
        here = [slice(None)] * len(info.shape)
        here[info.shard_dim] = slice(info.shard_start, info.shard_start + info.shard_length)
        param.shard.numpy()[...] = value(name, "float64")[tuple(here)]
    unit.pre_forward()
    for name in SHAPES:
        same(unit[name].full.numpy(), value(name))
    unit.post_forward()
    # rank 0 has values, the others have none
    whole = {"w": value("tall"), "b": value("cube")}
    synced = Model(group, sync_module_states=True)
    if group.rank:
        whole = {name: Meta(array.shape) for name, array in whole.items()}
    unit = synced.unit("u", whole, dim={"b": 2})
    same(unit.gather_param("w").numpy(), value("tall"))
    same(unit["b"].shard.numpy(), part(value("cube"), 2, group.rank, group.size))
    group.barrier()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_meta_parameters_are_filled_shard_by_shard(ranks, n):
    ranks(n, fills)


def ties(group):
    model = Model(group)
    shared, other = np.arange(8, dtype="float32").reshape(4, 2), np.ones(3, "float32")
    unit = model.unit("u", {"embed": shared, "mid": other, "out": shared}, ids={"embed": 5, "out": 5})
    assert [param.info().tied_to for param in unit] == [None, None, "embed"]
    assert unit["embed"].full.data_ptr == unit["out"].full.data_ptr
    assert unit["embed"].shard.data_ptr == unit["out"].shard.data_ptr
    assert model.memory().total_parameters == shared.nbytes + other.nbytes
    backward(unit, {"embed": shared + group.rank, "out": shared * 10, "mid": None})
    mean = shared * 11 + (group.size - 1) / 2
    np.testing.assert_allclose(unit["out"].grad.numpy(), part(mean, 0, group.rank, group.size), rtol=1e-6)
    same(unit["embed"].grad.numpy(), unit["out"].grad.numpy())
    model.zero_grad()
    unit.set_frozen("embed")
    assert unit["out"].frozen and unit["out"].grad is None and not unit["mid"].frozen
    unit.set_frozen("out", False)
    assert not unit["embed"].frozen
    with pytest.raises(libfsdp.InvalidArgument, match="(?s)embed.*head|head.*embed"):
        model.unit("v", {"head": shared}, ids={"head": 5})
    model.unit("v", {"head": shared}, ids={"head": 6})
    group.barrier()


@pytest.mark.parametrize("n", [1, 2])
def test_tied_parameters_are_one(ranks, n):
    ranks(n, ties)


# ---- Values in and out of shards -------------------------------------------------------------------------------------


def writes_back(group, cases):
    for options in cases:
        if options == {"strategy": "no_shard"}:
            writes_back_unsharded(group)
        else:
            writes_back_with(group, dict(options))
    group.barrier()


def writes_back_with(group, options):
    n, rank = group.size, group.rank
    if options.pop("precision", None):
        options["precision"] = Precision("float16")
    model = Model(group, **options)
    whole = (value("tall") + np.float32(1e-4)).astype("float32")  # more digits than float16 has
    unit = model.unit("u", {"w": whole, "x": value("wide")}, dim={"x": 1})
    with pytest.raises(libfsdp.InvalidState):
        unit.write_back()
    low = unit["w"].full.dtype == "float16"
    # all edit alike: one element, and the rest keeps its digits
    with unit.summon_full_params():
        assert unit.state == "unsharded"
        unit["w"].full.numpy()[5, 1] = 0.1
        unit["x"].full.numpy()[1, 4] = -3
    assert unit.state == "sharded"
    expected = whole.copy()
    expected[5, 1] = np.float16(0.1) if low else np.float32(0.1)
    same(unit.gather_param("w").numpy(), expected)
    assert unit.gather_param("x").numpy()[1, 4] == -3
    # each edits in its own way: of each part, its owner's counts
    unit.unshard()
    unit["w"].full.numpy()[...] = 200 + rank  # no value that it had: such elements keep their digits
    unit.write_back()
    unit.reshard()
    got = unit.gather_param("w").numpy()
    owners = [rank] if options.get("strategy") == "no_shard" else range(n)
    same(got, np.concatenate([part(np.full((7, 3), 200.0 + who), 0, at, len(owners)) for at, who in enumerate(owners)]))
    # forward sees them
    unit.pre_forward()
    same(unit["w"].full.numpy(), got)
    unit.post_forward()
    # dropped: told so, or an exception
    for kind in (None, KeyError):
        try:
            with unit.summon_full_params(writeback=kind is not None):
                unit["x"].full.numpy()[...] = 77
                if kind:
                    raise kind
        except KeyError:
            pass
        assert unit.gather_param("x").numpy()[1, 4] == -3
    # a block inside of another leaves the unit as it was
    unit.unshard()
    with unit.summon_full_params():
        pass
    assert unit.state == "unsharded"
    unit.reshard()


def writes_back_unsharded(group):
    """NO_SHARD without a dtype of its own: the full parameter is the shard."""
    unit = Model(group, strategy="no_shard").unit("u", {"w": value("tall")})
    assert unit["w"].full.data_ptr == unit["w"].shard.data_ptr
    with unit.summon_full_params():
        unit["w"].full.numpy()[2, 2] = group.rank
    assert unit["w"].shard.numpy()[2, 2] == group.rank


EDITS = [
    {},
    {"private_unshard": True},
    {"precision": True},
    {"strategy": "no_shard"},
    {"strategy": "no_shard", "precision": True},
]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_edits_of_full_parameters(ranks, n):
    ranks(n, writes_back, EDITS)


def gathers_and_loads(group):
    model = Model(group, precision=Precision(ml_dtypes.bfloat16))
    unit = model.unit("u", {name: value(name, "float64") for name in SHAPES}, dim=DIMS)
    for name in SHAPES:
        unit[name].shard.numpy()[...] += 1 / 3
        got = unit.gather_param(name)
        same(got.numpy(), value(name, "float64") + 1 / 3)
        assert got.dtype == "float64" and got.data_ptr not in (unit[name].full.data_ptr, unit[name].shard.data_ptr)
    assert unit.state == "sharded"
    unit.load_param("cube", np.asfortranarray(value("cube", "float16") * 2))
    same(unit.gather_param("cube").numpy(), value("cube", "float64") * 2)
    unit.pre_forward()
    same(unit["cube"].full.numpy(), (value("cube", "float64") * 2).astype(ml_dtypes.bfloat16))
    same(unit.gather_param("tall").numpy(), value("tall", "float64") + 1 / 3)  # whether it is full does not matter
    with pytest.raises(libfsdp.InvalidState):
        unit.load_param("cube", value("cube"))
    unit.post_forward()
    for call, says in (
        (lambda: unit.gather_param("nope"), "^name: 'nope'"),
        (lambda: unit.load_param(["cube"], value("cube")), r"^name: \['cube'\]"),
        (lambda: unit.load_param("cube", value("tall")), "cube"),
        (lambda: unit.load_param("cube", value("cube", "int32")), "cube|full"),
    ):
        with pytest.raises((libfsdp.InvalidArgument, libfsdp.Unsupported), match=says):
            call()
    group.barrier()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_one_parameter_at_a_time(ranks, n):
    ranks(n, gathers_and_loads)


def test_casts():
    model = Model(Group.single())
    plain = model.unit("plain", {"a": np.zeros(2)})
    unit = model.unit(
        "u", {"w": np.zeros(2)}, precision=Precision("float16", output="float32", buffer=ml_dtypes.bfloat16)
    )
    x = np.array([1.00049, -2, 65519, math.inf, math.nan], "float64")[::-1]
    same(unit.cast(x).numpy(), x.astype("float16"))
    same(unit.cast(x, "output").numpy(), x.astype("float32"))
    same(unit.cast(x, "buffer").numpy().astype("float32"), x.astype(ml_dtypes.bfloat16).astype("float32"))
    assert unit.cast(x).dtype == "float16"
    labels, half = np.arange(3), np.zeros(3, "float16")
    for array, kind in ((labels, "input"), (half, "input"), (np.zeros(1, "float32"), "output")):
        assert unit.cast(array, kind) is array
    assert plain.cast(x) is x and plain.cast(x, "buffer") is x
    with pytest.raises(ValueError, match="^kind: 'param' is not one of 'input', 'output', 'buffer'"):
        unit.cast(x, "param")
    with pytest.raises(TypeError, match="^array"):
        unit.cast([1.0])


def test_dtypes_of_a_precision():
    group = Group.single()
    whole = np.array([1 + 2**-12, -3.0], "float32")

    def grad_after(precision, gradient):
        unit = Model(group).unit("u", {"w": whole}, precision=precision)
        info = unit["w"].info()
        assert (info.dtype, unit["w"].dtype) == ("float32", "float32")
        unit.pre_forward()
        full = unit["w"].full.numpy()
        same(full, whole.astype(full.dtype))
        assert info.full_dtype == unit["w"].full.dtype
        backward(unit, [gradient.astype(full.dtype)])
        assert info.grad_dtype == unit["w"].grad.dtype
        same(unit["w"].shard.numpy(), whole)
        return unit["w"].grad.numpy()

    gradient = np.array([1 + 2**-9, 2**-20 + 2**-31], "float32")
    bfloat16 = ml_dtypes.bfloat16
    same(grad_after(Precision(), gradient), gradient)
    same(grad_after(Precision("float16"), gradient), gradient.astype("float16").astype("float32"))
    same(grad_after(Precision(reduce="bfloat16"), gradient), gradient.astype(bfloat16).astype("float32"))
    kept = grad_after(Precision("float16", keep_low_precision_grads=True), gradient)
    assert kept.dtype == np.float16
    kept = grad_after(Precision("float16", reduce=bfloat16, keep_low_precision_grads=True), gradient)
    same(kept, gradient.astype("float16").astype(bfloat16))


# ---- Gradients -------------------------------------------------------------------------------------------------------


def divisors(group):
    n = group.size
    model = Model(group, gradient_divisor=4)
    unit = model.unit("u", {"w": value("tall")})
    for divisor, by in (("as made", 4), (2.5, 2.5), (None, n), (np.float32(8), 8)):
        if divisor != "as made":
            model.set_gradient_divisor(divisor)
        backward(unit, [value("tall")])
        np.testing.assert_allclose(unit["w"].grad.numpy(), part(value("tall") * (n / by), 0, group.rank, n), rtol=1e-6)
        model.zero_grad()
    for wrong, kind in ((0, ValueError), (-1, ValueError), (math.nan, ValueError), ("2", TypeError)):
        with pytest.raises(kind, match="^gradient_divisor"):
            model.set_gradient_divisor(wrong)
    group.barrier()


@pytest.mark.parametrize("n", [1, 2])
def test_divisors_that_change(ranks, n):
    ranks(n, divisors)


def traffic(group):
    """Hybrid: reduce-scatter every micro-batch, all-reduce only on the last; the bytes say so."""
    mesh = Mesh(group, {"replicate": 2, "shard": 2})
    model = Model(mesh, strategy="hybrid_shard")
    unit = model.unit("u", {"w": np.zeros((6, 4), "float32")})
    seen, total = [], 0
    for how in ("within", "local", "within", "sent"):
        if how == "within":
            with model.no_all_reduce():
                backward(unit, [np.full((6, 4), group.rank + 1, "float32")])
        elif how == "local":
            with model.no_sync():
                backward(unit, [np.full((6, 4), 10, "float32")])
        else:
            backward(unit, [np.full((6, 4), 100 * group.rank, "float32")])
        info = unit.info()
        seen.append((info.reduced_bytes, info.replicated_bytes))
    steps = np.diff([(0, 0), *seen], axis=0).tolist()
    assert [bool(reduced) for reduced, _ in steps] == [True, False, True, True]
    assert [bool(replicated) for _, replicated in steps] == [False, False, False, True]
    assert steps[0][0] == 96 and steps[3][1] == 48
    total = 2 * (1 + 2 + 3 + 4) + 4 * 10 + 100 * (0 + 1 + 2 + 3)
    assert (unit["w"].grad.numpy() == total / 4).all()
    memory = model.memory()
    assert (memory.reduced_bytes, memory.replicated_bytes) == seen[-1]
    group.barrier()


def test_all_reduce_on_the_last_micro_batch_only(ranks):
    ranks(4, traffic)


def zeroing(group):
    """Between micro-batches some gradients begin anew, as when a program sets `.grad` of one parameter to None."""
    n, rank = group.size, group.rank
    model = Model(group)
    whole = {"a": value("tall"), "b": value("wide"), "c": value("one")}
    unit = model.unit("u", whole | {"d": whole["a"]}, dim={"b": 1})  # d is tied to a
    other = model.unit("v", {"e": value("cube")})

    def expect(**times):
        for name, factor in times.items():
            param = other[name] if name == "e" else unit[name]
            expected = part(value("cube") if name == "e" else whole[name], param.info().shard_dim, rank, n) * factor
            np.testing.assert_allclose(param.grad.numpy(), expected, rtol=1e-6)

    assert unit.used() == [False] * 4 and other.used() == [False]
    backward(unit, {"a": whole["a"], "b": whole["b"]} if rank == 0 else {"b": whole["b"]})
    backward(other, [value("cube")])
    assert unit.used() == [True, True, False, True] and unit["d"].info().used and not unit["c"].info().used
    before, tied = unit["b"].grad, unit["a"].grad
    unit.zero_grad("d")
    assert unit.used() == [False, True, False, False] and other.used() == [True]
    with pytest.raises(ValueError, match="^name: 'x'"):
        unit.zero_grad("x")
    assert unit["a"].grad.data_ptr == tied.data_ptr and unit["b"].grad.data_ptr == before.data_ptr
    expect(a=0, b=1, c=0, e=1)
    unit.zero_grad("b")
    backward(unit, {"a": whole["a"], "b": whole["b"]})
    expect(a=1, b=1, c=0, e=1)
    with model.no_sync():
        backward(unit, {"a": whole["a"]})
    unit.zero_grad()  # what waits to be sent stays
    expect(a=0, b=0, e=1)
    assert unit.used() == [False] * 4
    backward(unit, {"c": whole["c"]})
    expect(a=1, b=0, c=1, e=1)
    assert unit.used() == [True, False, True, True]
    model.zero_grad()
    assert not any(unit.used() + other.used())
    expect(a=0, b=0, c=0, e=0)
    group.barrier()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_zeroing_gradients_of_a_unit(ranks, n):
    ranks(n, zeroing)


def own_settings(group):
    """Sync and divisor of one unit, beside another with the model's."""
    n = group.size
    model = Model(group, gradient_divisor=1)
    first, second = (model.unit(name, {name: np.zeros((4, 2), "float32")}) for name in "ab")
    ones = [np.ones((4, 2), "float32")]

    def told(unit):
        info = unit.info()
        return info.gradient_sync, info.all_reduce, info.gradient_divisor

    def grads():
        for unit in (first, second):
            unit.pre_backward()
            unit.post_backward(ones)
        model.finish_backward()
        return first["a"].grad.numpy().max(initial=0) * 1.0, second["b"].grad.numpy().max(initial=0) * 1.0

    mine = len(first["a"].grad.numpy()) > 0  # of 4 ranks each has a row
    assert mine and told(first) == (True, True, 1)
    first.set_gradient_sync(False)
    first.set_gradient_divisor(4)
    assert told(first) == (False, True, 4) and told(second) == (True, True, 1)
    assert grads() == (0, n)
    with model.no_sync():
        assert told(second)[0] is False
        assert grads() == (0, n)
    assert told(first)[0] is False and told(second)[0] is True  # as before, each
    first.set_all_reduce(False)
    with model.no_all_reduce():
        assert told(second)[1] is False
    assert told(first)[1] is False and told(second)[1] is True
    first.set_gradient_sync(True)
    assert grads() == (3 * n / 4, 3 * n)
    first.set_gradient_divisor(None)
    assert told(first)[2] == n
    model.set_gradient_divisor(2)
    assert told(first)[2] == told(second)[2] == 2
    for wrong, kind in ((0, ValueError), (math.inf, ValueError), ("2", TypeError)):
        with pytest.raises(kind, match="divisor"):
            first.set_gradient_divisor(wrong)
    group.barrier()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_gradient_settings_of_one_unit(ranks, n):
    ranks(n, own_settings)


# ---- Settings --------------------------------------------------------------------------------------------------------


def settings(group):
    n = group.size
    model = Model(group)
    first, second, third = (
        model.unit(name, {name: np.full((4, 2), number, "float32")}) for number, name in enumerate(["a", "b", "c"])
    )
    assert first.info().reshard_after_forward is True
    first.set_reshard_after_forward(False)
    assert first.info().reshard_after_forward is False
    first.pre_forward()
    first.post_forward()
    assert first.state == "unsharded"
    first.set_reshard_after_backward(False)
    first.pre_backward()
    first.post_backward([np.ones((4, 2), "float32")])
    assert first.state == "unsharded"  # for the next micro-batch
    first.pre_forward()
    first.set_reshard_after_backward(True)
    first.pre_backward()
    first.post_backward([None])
    assert first.state == "sharded"
    first.set_reshard_after_backward(False)
    backward(first, [None])
    assert first.state == "sharded"
    first.set_reshard_after_forward(None)
    # prefetch of the host's choice
    first.set_prefetch("forward", [third, second])
    second.set_prefetch("backward", [first])
    first.pre_forward()
    assert third.state != "sharded" and second.state != "sharded"
    first.post_forward()
    for unit in (second, third):
        unit.pre_forward()
        assert (unit.params[0].full.numpy() == {"b": 1, "c": 2}[unit.name]).all()
        unit.post_forward()
        assert unit.state == "sharded"
    third.pre_backward()
    third.post_backward([None])
    assert first.state == "sharded"
    second.pre_backward()
    assert first.state != "sharded"
    second.post_backward([None])
    first.pre_backward()
    first.post_backward([None])
    model.finish_backward()
    assert [unit.state for unit in (first, second, third)] == ["sharded"] * 3
    first.set_prefetch("forward", [])
    first.pre_forward()
    assert third.state == "sharded"
    first.post_forward()
    # strategies of a unit of its own
    kept = model.unit("d", {"d": np.zeros((4, 2), "float32")}, strategy=Strategy.SHARD_GRAD_OP)
    info = kept.info()
    assert (info.strategy, info.reshard_after_forward) == (Strategy.SHARD_GRAD_OP, False)
    assert (info.n_params, info.full_bytes, info.shard_size, info.replicate_size) == (1, 32, n, 1)
    assert info.shard_bytes == kept["d"].shard.nbytes and info.publications == info.published_bytes == 0
    whole = model.unit("e", {"e": np.zeros((4, 2), "float32")}, strategy="no_shard", reshard_after_forward=None)
    assert whole.info().strategy is Strategy.NO_SHARD and whole["e"].shard.shape == (4, 2)
    assert model.units() == [first, second, third, kept, whole]
    third.close()
    del second
    assert [unit.name for unit in model.units()] == ["a", "d", "e"]
    first.set_prefetch("backward", [])
    group.barrier()


@pytest.mark.parametrize("n", [1, 2])
def test_settings_between_iterations(ranks, n):
    ranks(n, settings)


def frozen_parameters(group):
    model = Model(group)
    unit = model.unit("u", {"w": value("tall"), "x": value("wide")})
    grads = {"w": value("tall"), "x": value("wide")}
    backward(unit, grads)
    with_both, gradient = model.memory().gradients, unit["w"].grad
    unit.set_frozen("w")
    assert unit["w"].grad is None and unit["w"].frozen and unit["w"].info().frozen and "frozen" in repr(unit["w"])
    assert model.memory().gradients == with_both - unit["w"].shard.nbytes
    assert not gradient.numpy().any()  # its memory was given back
    before = model.memory().reduced_bytes
    backward(unit, {"x": grads["x"]})
    if group.size > 1:
        assert model.memory().reduced_bytes - before == grads["x"].nbytes
    unit.set_frozen("w", False)
    assert not unit["w"].grad.numpy().any() and unit["w"].grad.data_ptr == gradient.data_ptr
    backward(unit, grads)
    np.testing.assert_allclose(unit["w"].grad.numpy(), part(grads["w"], 0, group.rank, group.size), rtol=1e-6)
    np.testing.assert_allclose(unit["x"].grad.numpy(), 3 * part(grads["x"], 0, group.rank, group.size), rtol=1e-6)
    # not in the middle of backward, nor while gradients wait to be sent
    unit.pre_forward()
    unit.post_forward()
    unit.pre_backward()
    with pytest.raises(libfsdp.InvalidState):
        unit.set_frozen("x")
    with model.no_sync():
        unit.post_backward(grads)
    model.finish_backward()
    with pytest.raises(libfsdp.InvalidState):
        unit.set_frozen("x")
    assert not unit["x"].frozen
    model.zero_grad()
    unit.set_frozen("x")
    # one that was frozen from the start
    late = model.unit("v", {"y": value("cube")}, frozen=True)
    assert late["y"].grad is None
    late.set_frozen("y", False)
    backward(late, [value("cube")])
    np.testing.assert_allclose(late["y"].grad.numpy(), part(value("cube"), 0, group.rank, group.size), rtol=1e-6)
    group.barrier()


@pytest.mark.parametrize("n", [1, 2])
def test_freezing_parameters_of_a_unit(ranks, n):
    ranks(n, frozen_parameters)


# ---- Memory ----------------------------------------------------------------------------------------------------------


def memory_is(group, folder):
    for private in (False, True):
        for place in (None, folder):
            memory_of(group, place, private)
    group.barrier()


def memory_of(group, folder, private):
    model = Model(group, offload_dir=folder, private_unshard=private, precision=Precision("float16"))
    large = np.arange(3000, dtype="float32").reshape(100, 30) % 1000
    first = model.unit("first", {"a": large})
    second = model.unit("second", {"b": large[:50]})
    mine = first["a"].shard.nbytes + second["b"].shard.nbytes
    memory = model.memory()
    assert memory.shards == memory.gradients == memory.shards_peak == mine
    assert memory.host_shards == memory.total_parameters == large.nbytes * 3 // 2
    assert memory.largest_unit == large.nbytes // 2 and memory.slots == memory.unsharded == 0
    for _ in range(2):
        for unit in (first, second):
            unit.pre_forward()
            same(unit.params[0].full.numpy(), large[: len(unit.params[0].full)])
            unit.post_forward()
        for unit in (second, first):
            unit.pre_backward()
            unit.post_backward([large[: len(unit.params[0].full)].astype("float16")])
        model.finish_backward()
    memory = model.memory()
    if group.size > 1:
        assert memory.slots == 1
        assert large.nbytes // 2 <= memory.unsharded <= large.nbytes // 2 + 8192
        assert memory.host_unsharded == memory.unsharded * (group.size if private else 1)
        assert memory.unsharded_peak == memory.unsharded and memory.host_unsharded_peak == memory.host_unsharded
        assert memory.host_parameters == memory.host_shards + memory.host_unsharded
    first["a"].shard.numpy()[...] += 1
    np.testing.assert_allclose(first["a"].grad.numpy(), 2 * part(large, 0, group.rank, group.size))
    first.close()
    group.barrier()
    assert model.memory().shards == second["b"].shard.nbytes


@pytest.mark.parametrize("n", [1, 2, 4])
def test_memory_is_counted(ranks, tmp_path, n):
    ranks(n, memory_is, str(tmp_path))
    assert not list(tmp_path.iterdir())


# ---- Bad arguments ---------------------------------------------------------------------------------------------------


def unit_of(model, **options):
    return model.unit("u", {"w": np.zeros((2, 3), "float32"), "b": np.zeros(2, "float32")}, **options)


@pytest.mark.parametrize(
    "call, kind, says",
    [
        (lambda m: Model(m.group, strategy="full"), ValueError, "^strategy: 'full' is not one of 'full_shard', "),
        (lambda m: Model(m.group, strategy=True), ValueError, "^strategy"),
        (lambda m: Model(m.group, strategy=6), ValueError, "^strategy"),
        (lambda m: Model(m.group, reshard_after_forward=1), ValueError, "^reshard_after_forward: 1"),
        (lambda m: Model(m.group, reshard_after_forward="yes"), TypeError, "^reshard_after_forward: 'yes'"),
        (lambda m: unit_of(Model(m.group, reshard_after_forward=3)), ValueError, "reshard_after_forward"),
        (lambda m: Model(m.group, precision="float16"), TypeError, "^precision"),
        (lambda m: Model(m.group, forward_prefetch=-1), ValueError, "^forward_prefetch"),
        (lambda m: Model(m.group, backward_prefetch="during"), ValueError, "^backward_prefetch.*'pre', 'post'"),
        (lambda m: Model(m.group, prefetch_limit=0), ValueError, "^prefetch_limit"),
        (lambda m: Model(m.group, offload_dir=5), TypeError, "int"),
        (lambda m: unit_of(Model(m.group, offload_dir="/nowhere/folder")), libfsdp.FsdpError, "/nowhere/folder"),
        (lambda m: Model(m.group, strategy="no_shard", reshard_after_forward=2), ValueError, "reshard_after_forward"),
        (lambda m: Precision("floaty"), NotImplementedError, "^param"),
        (lambda m: Precision(reduce=5), TypeError, "^reduce"),
        (lambda m: Model(m.group, precision=Precision("int32")), ValueError, "precision.param_dtype is int32"),
        (lambda m: Meta((2, -1)) and m.unit("v", {"x": Meta((2, -1))}), ValueError, "dimension 1 is -1"),
        (lambda m: Meta((2, "1")), TypeError, "^shape"),
        (lambda m: m.unit("v", {"x": Meta(())}), ValueError, "x"),
        (lambda m: unit_of(m, dim=2), ValueError, "dim"),
        (lambda m: unit_of(m, dim={"w": -1}), ValueError, "'w': dim is -1"),
        (lambda m: unit_of(m, dim={"y": 1}), ValueError, "^dim: 'y'"),
        (lambda m: unit_of(m, dim="1"), TypeError, "^dim"),
        (lambda m: unit_of(m, ids={"w": -1}), ValueError, "^ids"),
        (lambda m: unit_of(m, ids={"y": 1}), ValueError, "^ids: 'y'"),
        (lambda m: unit_of(m, ids={"w": 1, "b": 1}), ValueError, "w|b"),
        (lambda m: unit_of(m, strategy="hybrid_shard"), ValueError, "(?i)mesh|hybrid"),
        (lambda m: unit_of(m).set_frozen("x"), ValueError, "^name: 'x'"),
        (lambda m: unit_of(m).set_reshard_after_forward(0), ValueError, "^reshard_after_forward: 0"),
        (lambda m: unit_of(m).set_prefetch("sideways", []), ValueError, "^phase"),
        (lambda m: unit_of(m).set_prefetch("forward", [m]), TypeError, "^units: Model"),
        (lambda m: unit_of(m).set_prefetch("forward", [unit_of(Model(m.group))]), ValueError, "units"),
        (lambda m: unit_of(m).set_callbacks(5), TypeError, "^valid: 5"),
        (lambda m: unit_of(m).set_callbacks(None, "f"), TypeError, "^invalid: 'f'"),
        (lambda m: m.broadcast(np.zeros(2)), TypeError, "^tensors"),
        (lambda m: m.broadcast([5]), TypeError, r"^tensors\[0\]"),
        (lambda m: m.broadcast([np.broadcast_to(1.0, 3)]), ValueError, r"^tensors\[0\]"),
    ],
)
def test_bad_arguments_are_named(call, kind, says):
    with Group.single() as group:
        with pytest.raises(kind, match=says):
            call(Model(group))


def test_a_closed_unit_says_so():
    model = Model(Group.single())
    unit = Unit(model, "u", {"w": np.zeros(2)})
    param = unit["w"]
    unit.close()
    for call in (unit.info, unit.write_back, unit.zero_grad, unit.used, param.info, lambda: unit.cast(np.zeros(2))):
        with pytest.raises(ValueError, match="the unit is closed"):
            call()
    del unit
    with pytest.raises(ValueError, match="the unit is closed"):
        param.info()
    model.close()
    for call in (lambda: model.set_all_reduce(True), lambda: model.broadcast([]), lambda: model.no_sync().__enter__()):
        with pytest.raises(ValueError, match="the model is closed"):
            call()
