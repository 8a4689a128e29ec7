"""Models and units: what each rank holds, when it is full, and what the gradients come to."""

import contextlib

import ml_dtypes
import numpy as np
import pytest

import libfsdp
from libfsdp import Group, Model, Unit


def values(dtype="float32"):
    """Even, uneven, fewer rows than ranks, no rows, more dimensions."""
    shapes = {"even": (12, 3), "uneven": (7, 3), "one": (1,), "none": (0, 3), "cube": (5, 2, 3)}
    made, start = {}, 1
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        made[name] = (np.arange(count).reshape(shape) % 97 + start).astype(dtype)
        start += 5
    return made


def my_rows(group, array):
    start, length = libfsdp.shard_extent(len(array), group.rank, group.size)
    return array[start : start + length]


same = np.testing.assert_array_equal


def shards_and_views(group, private, reshard):
    model = Model(group, "m", private_unshard=private, reshard_after_forward=reshard)
    whole = values()
    unit = model.unit("u", {name: array.copy() for name, array in whole.items()})
    assert [param.name for param in unit] == list(whole) and len(unit) == 5
    addresses = {}
    for param in unit:
        same(param.shard.numpy(), my_rows(group, whole[param.name]))
        assert param.shape == whole[param.name].shape and param.dtype == "float32"
        assert param.grad.shape == param.shard.shape and not param.grad.numpy().any()
        addresses[param.name] = param.full.data_ptr, param.shard.data_ptr
    assert unit.state == "sharded"
    for _ in range(2):
        unit.unshard()
        unit.unshard()
        assert unit.state == "unsharded"
        for param in unit:
            same(param.full.numpy(), whole[param.name])
        unit.reshard()
        unit.reshard()
        assert unit.state == "sharded"
    # an edit of the full view is this rank's own, and is dropped
    unit.unshard()
    unit["even"].full.numpy()[:] = -group.rank
    group.barrier()
    assert (unit["even"].full.numpy() == -group.rank).all()
    group.barrier()
    unit.reshard()
    work = unit.unshard(async_op=True)
    work.wait()
    same(unit["even"].full.numpy(), whole["even"])
    unit.reshard()
    # the host changes a shard outside an iteration
    unit["even"].shard.numpy()[:] += 1000 * (group.rank + 1)
    unit.shard_changed()
    unit.unshard()
    expected = whole["even"].copy()
    for rank in range(group.size):
        start, length = libfsdp.shard_extent(12, rank, group.size)
        expected[start : start + length] += 1000 * (rank + 1)
    same(unit["even"].full.numpy(), expected)
    unit.reshard()
    for param in unit:
        assert addresses[param.name] == (param.full.data_ptr, param.shard.data_ptr)
    memory = model.memory()
    assert memory.shards == sum(my_rows(group, array).nbytes for array in whole.values())
    assert memory.total_parameters == sum(array.nbytes for array in whole.values())
    assert memory.gradients >= memory.shards and memory.published_bytes > 0
    # a tensor outlives its unit
    unit.unshard()
    full, view = unit["cube"].full, unit["cube"].full.numpy()
    taken = np.from_dlpack(unit["cube"].shard)
    unit.close()
    model.close()
    assert full.shape == (5, 2, 3)
    view[0], taken[:] = 5, 6
    assert view[0, 0, 0] == 5
    with contextlib.suppress(ValueError):
        unit.unshard()
        raise AssertionError("closed")


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("private", [False, True])
def test_shards_and_full_views(ranks, n, private):
    ranks(n, shards_and_views, private, True)


def iterations(group, private, reshard, divisor):
    """Three iterations of a made-up optimizer: every hook in its place, and micro-batches that are not sent."""
    n, rank = group.size, group.rank
    model = Model(
        group, private_unshard=private, reshard_after_forward=reshard, gradient_divisor=divisor
    )
    whole = values()
    first = model.unit("first", {name: whole[name] for name in ("even", "uneven", "none")}, frozen=["uneven"])
    second = Unit(model, "second", {name: whole[name] for name in ("one", "cube")})
    assert first["uneven"].grad is None and first["uneven"].frozen
    mine = {name: my_rows(group, array) for name, array in whole.items()}
    assert model.memory().gradients == sum(mine[name].nbytes for name in whole if name != "uneven")
    divide = divisor or n

    def gradient(name, who, turn):
        return (np.arange(whole[name].size).reshape(whole[name].shape) % 13 + who + turn).astype("float32")

    expected = {name: array.copy() for name, array in whole.items()}
    trained = ("even", "none", "one", "cube")
    for turn in range(3):
        sums = {name: np.zeros(whole[name].shape, "float32") for name in trained}
        for micro, sync in ((0, False), (1, True), (2, False), (3, True)):
            with contextlib.nullcontext() if sync else model.no_sync():
                for unit in (first, second):
                    unit.pre_forward()
                    for param in unit:
                        same(param.full.numpy(), expected[param.name])
                    unit.post_forward()
                    assert unit.state == ("sharded" if reshard else "unsharded")
                before = model.memory().reduced_bytes
                for unit in (second, first):
                    unit.pre_backward()
                    for param in unit:
                        same(param.full.numpy(), expected[param.name])
                    # A02: rank 0 does not use "one" in the first micro-batch; whoever has no gradient counts as zeros
                    skip = "one" if rank == 0 and micro == 0 else None
                    grads = {
                        param.name: gradient(param.name, rank, turn + micro)
                        for param in unit
                        if not param.frozen and param.name != skip
                    }
                    work = unit.post_backward(grads, async_op=turn == 1)
                    assert (work is None) == (turn != 1)
                model.finish_backward()
                reduced = model.memory().reduced_bytes - before
                assert reduced == (sum(whole[name].nbytes for name in trained) if sync else 0)
            for name in trained:
                for who in range(n):
                    if not (name == "one" and who == 0 and micro == 0):
                        sums[name] += gradient(name, who, turn + micro)
        for unit in (first, second):
            assert unit.state == "sharded"
            for param in unit:
                if param.frozen:
                    continue
                np.testing.assert_allclose(
                    param.grad.numpy(), my_rows(group, sums[param.name] / divide), rtol=1e-6, atol=1e-6
                )
                param.shard.numpy()[...] -= param.grad.numpy()
                expected[param.name] -= (sums[param.name] / divide).astype("float32")
        model.zero_grad()
        assert not any(param.grad.numpy().any() for unit in (first, second) for param in unit if not param.frozen)
        for unit in (first, second):  # make the comparison above exact: take over the rounding of the shards
            unit.unshard()
            for param in unit:
                np.testing.assert_allclose(param.full.numpy(), expected[param.name], rtol=1e-5, atol=1e-5)
                expected[param.name] = param.full.numpy().copy()
            unit.reshard()
    group.barrier()


@pytest.mark.parametrize(
    "n, private, reshard, divisor",
    [(1, False, True, None), (2, False, True, None), (2, True, False, None), (2, False, False, 5.0), (4, False, True, 3.0)],
)
def test_iterations(ranks, n, private, reshard, divisor):
    ranks(n, iterations, private, reshard, divisor)


def resets(group):
    model = Model(group)
    unit = model.unit("u", {"w": np.arange(6, dtype="float32").reshape(3, 2)})
    unit.pre_forward()
    unit.post_forward()
    unit.pre_backward()
    with model.no_sync():
        unit.post_backward([np.ones((3, 2), "float32")])
    unit.pre_forward()
    model.reset()
    assert unit.state == "sharded"
    unit.pre_forward()
    same(unit["w"].full.numpy(), np.arange(6).reshape(3, 2))
    unit.post_forward()
    unit.pre_backward()
    unit.post_backward({"w": np.full((3, 2), 2.0, "float32")})
    model.finish_backward()
    assert (unit["w"].grad.numpy() == 2).all()
    # ranks that disagree about a unit are told so, and go on
    shape = (3, 2) if group.rank == 0 else (2, 3)
    try:
        model.unit("v", {"x": np.zeros(shape, "float32")})
    except libfsdp.Mismatch as error:
        assert "x" in str(error) or "v" in str(error)
    else:
        assert group.size == 1
    model.unit("v", {"x": np.zeros((3, 2), "float32")}).unshard()


@pytest.mark.parametrize("n", [1, 2])
def test_reset_and_disagreement(ranks, n):
    ranks(n, resets)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", ml_dtypes.bfloat16])
def test_dtypes_of_parameters(dtype):
    with Group.single() as group:
        model = Model(group)
        unit = model.unit("u", {"w": np.arange(6).reshape(2, 3).astype(dtype)})
        unit.pre_forward()
        full = unit["w"].full.numpy()
        assert full.dtype == np.dtype(dtype)
        same(full, np.arange(6).reshape(2, 3))
        unit.pre_backward()
        unit.post_backward([full * 2])
        model.finish_backward()
        same(unit["w"].grad.numpy().astype("float64"), 2.0 * np.arange(6).reshape(2, 3))


def unit_of(model):
    return model.unit("u", {"w": np.zeros((2, 3), "float32"), "b": np.zeros(2, "float32")}, frozen="b")


@pytest.mark.parametrize(
    "call, kind, says",
    [
        (lambda m: Model("group"), TypeError, "^group"),
        (lambda m: Model(m.group, 5), TypeError, "^name"),
        (lambda m: Model(m.group, gradient_divisor=-1), ValueError, "^gradient_divisor"),
        (lambda m: Model(m.group, gradient_divisor=float("nan")), ValueError, "^gradient_divisor"),
        (lambda m: Model(m.group, gradient_divisor="2"), TypeError, "^gradient_divisor"),
        (lambda m: Unit("m", "u", {}), TypeError, "^model"),
        (lambda m: m.unit(5, {}), TypeError, "^name"),
        (lambda m: m.unit("v", {"w": None}), TypeError, r"^params\['w'\]"),
        (lambda m: m.unit("v", {5: np.zeros(2)}), TypeError, "^params"),
        (lambda m: m.unit("v", {"x": np.zeros(())}), ValueError, "x"),
        (lambda m: m.unit("v", {"x": np.zeros(2, "int32")}), (ValueError, NotImplementedError), "x|int32"),
        (lambda m: m.unit("v", {"x": np.zeros(2)}, frozen=["y"]), ValueError, "^frozen: 'y'"),
        (lambda m: [unit_of(m), unit_of(m)], ValueError, "w"),
        (lambda m: Model(m.group, gradient_divisor=True), TypeError, "^gradient_divisor"),
        (lambda m: m.unit("v", {"x": np.zeros(2)}, frozen=5), TypeError, "^frozen: 5"),
        (lambda m: unit_of(m).post_backward([None]), ValueError, "^grads: 1 entries for 2"),
        (lambda m: unit_of(m).post_backward(iter([None])), ValueError, "^grads: 1 entries for 2"),
        (lambda m: unit_of(m).post_backward(None), TypeError, "^grads: None is neither"),
        (lambda m: unit_of(m).post_backward(np.zeros((2, 3))), TypeError, "^grads: a ndarray is neither"),
        (lambda m: unit_of(m).post_backward({"x": None}), ValueError, "^grads: 'x'"),
        (lambda m: unit_of(m).post_backward({"w": [1]}), TypeError, r"^grads\['w'\]"),
        (lambda m: run_to_backward(unit_of(m)).post_backward({"w": np.zeros(3, "float32")}), ValueError, "w|grads"),
        (lambda m: run_to_backward(unit_of(m)).post_backward({"w": np.zeros((2, 3))}), ValueError, "w|grads"),
    ],
)
def test_bad_arguments_are_named(call, kind, says):
    with Group.single() as group:
        model = Model(group)
        with pytest.raises(kind, match=says):
            call(model)


def run_to_backward(unit):
    unit.pre_forward()
    unit.post_forward()
    unit.pre_backward()
    return unit


def test_closed_objects_say_so():
    group = Group.single()
    model = Model(group)
    unit = unit_of(model)
    assert repr(unit) == "<libfsdp.Unit 'u' of 2 parameters>" and "frozen" in repr(unit["b"])
    group.close()
    unit.unshard()  # the unit holds what it needs
    unit.reshard()
    model.close()
    with pytest.raises(ValueError, match="model is closed"):
        model.zero_grad()
    with pytest.raises(ValueError, match="group is closed"):
        Model(group)


def test_frozen_in_all_its_forms():
    def frozen(value, number):
        unit = model.unit("u", {f"w{number}": np.zeros(2), f"b{number}": np.zeros(2)}, frozen=value)
        return [param.frozen for param in unit]

    model = Model(Group.single(), gradient_divisor=np.float32(2))
    assert frozen(False, 1) == frozen(None, 2) == frozen((), 3) == [False, False]
    assert frozen(True, 4) == [True, True]
    assert frozen("b5", 5) == frozen(iter(["b6"]), 6) == [False, True]


def test_gradients_from_an_iterator_and_a_divisor_of_numpy():
    model = Model(Group.single(), gradient_divisor=np.float32(4))
    unit = run_to_backward(unit_of(model))
    unit.post_backward(gradient for gradient in [np.full((2, 3), 2, "float32"), None])
    model.finish_backward()
    same(unit["w"].grad.numpy(), np.full((2, 3), 0.5))


def test_no_sync_inside_no_sync():
    model = Model(Group.single())
    unit = unit_of(model)

    def backward():
        run_to_backward(unit).post_backward([np.ones((2, 3), "float32"), None])
        model.finish_backward()
        return unit["w"].grad.numpy()[0, 0]

    with model.no_sync():
        with model.no_sync():
            assert backward() == 0
        assert backward() == 0  # the outer block goes on
    assert backward() == 3
    model.set_gradient_sync(False)
    with model.no_sync():
        pass
    assert backward() == 3  # as it was before the block
