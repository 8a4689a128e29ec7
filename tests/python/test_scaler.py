"""Gradient norms, clipping and loss scaling: the same on all ranks, whichever rank holds what."""

import math

import ml_dtypes
import numpy as np
import pytest

import libfsdp
from libfsdp import Group, Model, ShardedGradScaler

SHAPES = {"w": (5, 3), "b": (2,), "none": (0, 2)}


def whole(name):
    return ((np.arange(np.prod(SHAPES[name])) * 7 % 11 - 5) * 0.75).reshape(SHAPES[name]).astype("float32")


def sharded(group):
    model = Model(group)
    unit = model.unit("u", {name: np.zeros(shape, "float32") for name, shape in SHAPES.items()})
    unit.pre_backward()
    unit.post_backward({name: whole(name) for name in SHAPES})
    return model, unit


def my_rows(group, array):
    start, length = libfsdp.shard_extent(len(array), group.rank, group.size)
    return array[start : start + length]


def clips(group):
    every = np.concatenate([whole(name).ravel() for name in SHAPES]).astype("float64")
    for p in (1, 2, 2.5, math.inf):
        model, unit = sharded(group)
        norm = np.linalg.norm(every, p)
        before = model.grad_norm(p)
        assert before == pytest.approx(norm, rel=1e-12)
        assert model.clip_grad_norm(0.5, p) == before
        assert model.grad_norm(p) == pytest.approx(0.5, rel=1e-5)
        for param in unit:
            expected = my_rows(group, whole(param.name)) * np.float32(0.5 / (norm + 1e-6))
            np.testing.assert_array_equal(param.grad.numpy(), expected)
        assert model.clip_grad_norm(1e9, p) == pytest.approx(0.5, rel=1e-5)
        np.testing.assert_array_equal(unit["w"].grad.numpy(), my_rows(group, whole("w")) * np.float32(0.5 / (norm + 1e-6)))
    if group.rank == 0:
        unit["w"].grad.numpy()[0, 0] = math.inf
    with pytest.raises(libfsdp.InvalidState, match="can't be clipped"):
        model.clip_grad_norm(1.0, error_if_nonfinite=True)
    assert model.grad_norm() == math.inf


@pytest.mark.parametrize("n", [1, 3])
def test_norm_and_clipping(ranks, n):
    ranks(n, clips)


class Optimizer:
    steps = 0

    def step(self, result):
        self.steps += 1
        return result


def scales(group):
    scaler, optimizer = ShardedGradScaler(group, 64.0, growth_interval=2), Optimizer()
    assert scaler.scale(0.5) == 32 and (scaler.scale(np.ones(2, "float32")) == 64).all()
    for turn, expected in enumerate([64, 128, 128, 64, 64]):
        model, unit = sharded(group)
        bad = turn == 3
        if bad and group.rank == 0:
            unit["w"].grad.numpy()[1, 1] = math.nan
        scale = scaler.get_scale()
        scaler.unscale(model)
        assert bad or (unit["w"].grad.numpy() == my_rows(group, whole("w")) / scale).all()
        assert scaler.step(optimizer, turn) == (None if bad else turn)
        scaler.update()
        assert scaler.get_scale() == expected, turn
    assert optimizer.steps == 4
    assert scaler.info() == libfsdp.ScalerInfo(64.0, 1, False, 4, 1)

    state = scaler.state_dict()
    assert state == {
        "scale": 64.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2,
        "growth_tracker": 1,
        "steps": 4,
        "skipped": 1,
    }
    other = ShardedGradScaler(group)
    other.load_state_dict(state)
    assert other.info() == libfsdp.ScalerInfo(64.0, 1, False, 4, 1)
    # gradients of the host's own: some ranks have none
    arrays = [np.full((2, 3), 64, "float32").T, None, np.full(3, 32, ml_dtypes.bfloat16)] if group.rank == 0 else []
    other.unscale(arrays)
    if group.rank == 0:
        assert (arrays[0] == 1).all() and (arrays[2] == 0.5).all()
    assert other.should_step()
    other.update()
    assert other.get_scale() == 128


@pytest.mark.parametrize("n", [1, 2, 4])
def test_scaler(ranks, n):
    ranks(n, scales)


def test_disabled():
    with Group.single() as group, ShardedGradScaler(group, enabled=False) as scaler:
        array = np.full(2, math.inf, "float32")
        assert scaler.scale(3.0) == 3 and not scaler.enabled
        for _ in range(2):
            scaler.unscale([array])
            assert scaler.should_step()
            scaler.update()


def with_field(scaler, **fields):
    scaler.load_state_dict(scaler.state_dict() | fields)


@pytest.mark.parametrize(
    "call, kind, says",
    [
        (lambda s, m: ShardedGradScaler("group"), TypeError, "^group"),
        (lambda s, m: ShardedGradScaler(m.group, "1"), TypeError, "^init_scale"),
        (lambda s, m: ShardedGradScaler(m.group, 0), ValueError, "^init_scale"),
        (lambda s, m: ShardedGradScaler(m.group, math.nan), ValueError, "init_scale"),
        (lambda s, m: ShardedGradScaler(m.group, growth_factor=1), ValueError, "growth_factor"),
        (lambda s, m: ShardedGradScaler(m.group, backoff_factor=1), ValueError, "backoff_factor"),
        (lambda s, m: ShardedGradScaler(m.group, growth_interval=0), ValueError, "^growth_interval"),
        (lambda s, m: ShardedGradScaler(m.group, growth_interval=1.5), TypeError, "^growth_interval"),
        (lambda s, m: s.unscale([np.zeros(2, "int32")]), NotImplementedError, "int32"),
        (lambda s, m: s.unscale([[1.0]]), TypeError, r"^gradients\[0\]"),
        (lambda s, m: s.unscale([np.broadcast_to(np.float32(1), 3)]), ValueError, r"^gradients\[0\]"),
        (lambda s, m: s.should_step(), libfsdp.InvalidState, "unscale"),
        (lambda s, m: s.update(), libfsdp.InvalidState, "no inf checks"),
        (lambda s, m: [s.unscale(m), s.unscale(m)], libfsdp.InvalidState, "already been called"),
        (lambda s, m: [s.unscale(m), s.state_dict()], libfsdp.InvalidState, "saved"),
        (lambda s, m: s.load_state_dict({}), ValueError, "^state: 'scale'"),
        (lambda s, m: with_field(s, scale=0), ValueError, "state.scale"),
        (lambda s, m: with_field(s, growth_tracker=0.5), TypeError, r"^state\['growth_tracker'\]"),
        (lambda s, m: m.grad_norm(0), ValueError, "^p is 0"),
        (lambda s, m: m.grad_norm("2"), TypeError, "^p: "),
        (lambda s, m: m.clip_grad_norm(-1), ValueError, "^max_norm is -1"),
        (lambda s, m: m.clip_grad_norm(None), TypeError, "^max_norm: "),
    ],
)
def test_bad_arguments_are_named(call, kind, says):
    with Group.single() as group:
        with pytest.raises(kind, match=says):
            call(ShardedGradScaler(group), Model(group))


def test_a_closed_scaler_says_so():
    with Group.single() as group:
        scaler = ShardedGradScaler(group)
        scaler.close()
        scaler.close()
        with pytest.raises(ValueError, match="the scaler is closed"):
            scaler.update()
