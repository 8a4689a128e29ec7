"""State dicts in Python: names, parts, JSON, loading, and models of several ranks."""

import gc
import weakref

import numpy as np
import pytest
from test_numpy import net

import libfsdp
from libfsdp import Mesh, StateDict
from libfsdp.numpy import fully_shard


def test_a_dict_shows_the_arrays_that_it_was_given():
    state = StateDict()
    whole = np.arange(12, dtype="float32").reshape(3, 4)
    state.add("whole", whole)
    state.add("part", whole[1:], shape=(5, 4), offset=(3, 0), dtype="float16", copies=2, copy=1)
    state.tie("also", "whole")
    state.set_json("numbers", {"b": [1, 2.5, None, "é", 2**62], "a": 0.1})
    assert list(state) == ["whole", "part", "also"] and len(state) == 3
    assert "part" in state and "other" not in state
    assert np.shares_memory(state["also"].numpy(), whole)
    entry = state.entry("part")
    assert (entry.shape, entry.offset, entry.length) == ((5, 4), (3, 0), (2, 4))
    assert (entry.dtype, entry.copies, entry.copy, entry.nbytes) == ("float16", 2, 1, 16)
    assert state.entry("also").tied_to == "whole" and state.entry("whole").tied_to is None
    assert state.json == {"numbers": {"b": [1, 2.5, None, "é", 2**62], "a": 0.1}}
    assert list(state.json["numbers"]) == ["b", "a"]
    assert (state.nbytes, state.whole_nbytes) == (48 + 16, 48 + 40)
    with pytest.raises(KeyError):
        state["other"]


def test_arrays_live_as_long_as_the_dict():
    class Array(np.ndarray):
        pass

    state, array = StateDict(), np.zeros(3).view(Array)
    gone = weakref.ref(array)
    state.add("a", array)
    del array
    gc.collect()
    assert gone() is not None
    handle = state["a"]
    del state
    gc.collect()
    handle.numpy()[:] = 1
    del handle
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "give, message",
    [
        (lambda state: state.add("a", np.zeros(2)), "'a' is in the dict already"),
        (lambda state: state.add("", np.zeros(2)), "name"),
        (lambda state: state.add("b", np.zeros(2), shape=(3,), offset=(2,)), "b"),
        (lambda state: state.add("b", np.zeros(2), shape=(3, 1)), "b.*dimensions"),
        (lambda state: state.add("b", np.zeros(2), offset=(0, 0)), "b.*offset"),
        (lambda state: state.add("b", np.zeros(2), offset=(-1,), shape=(2,)), "b"),
        (lambda state: state.add("b", np.zeros(2), copies=2, copy=2), "copy"),
        (lambda state: state.add("b", np.zeros(2), dtype="int32"), "b"),
        (lambda state: state.tie("b", "nobody"), "nobody"),
        (lambda state: state.set_json("j", float("nan")), "JSON"),
        (lambda state: state.set_json("j", object()), "JSON"),
    ],
)
def test_what_does_not_fit_is_named_and_not_added(give, message):
    state, held = StateDict(), np.zeros(2)
    state.add("a", held)
    with pytest.raises(libfsdp.InvalidArgument, match=message):
        give(state)
    assert list(state) == ["a"] and state.json == {}


def test_loading_casts_floats_and_takes_parts():
    source, state = StateDict(), StateDict()
    source.add("whole", np.arange(10, dtype="float64").reshape(5, 2))
    source.add("more", np.ones(1))
    source.set_json("step", 4)
    part = np.zeros((2, 2), "float32")
    state.add("whole", part, shape=(5, 2), offset=(3, 0))
    with pytest.raises(libfsdp.InvalidArgument, match="'more'"):
        state.load(source)
    assert not part.any()
    result = state.load(source, partial=True)
    assert (result.missing, result.unexpected) == ([], ["more"])
    assert part.tolist() == [[6, 7], [8, 9]] and state.json == {"step": 4}

    prefixed = StateDict()
    prefixed.add("model.whole", np.full((5, 2), 3.0))
    prefixed.add("other", np.ones(1))
    assert state.load(prefixed, prefix="model.").unexpected == [] and (part == 3).all()


def test_loading_checks_everything_before_it_writes():
    source, state = StateDict(), StateDict()
    source.add("a", np.ones(3))
    source.add("b", np.ones(3))
    a, b = np.zeros(3), np.zeros(4)
    state.add("a", a)
    state.add("b", b)
    with pytest.raises(libfsdp.InvalidArgument, match="'b'"):
        state.load(source)
    source = StateDict()
    source.add("a", np.ones(3))
    source.add("b", np.ones(4, "int32"))
    with pytest.raises(libfsdp.InvalidArgument, match="'b'.*int32|int32.*'b'"):
        state.load(source)
    fixed = StateDict()
    fixed.add("a", a)
    fixed.add("b", b, read_only=True)
    source = StateDict()
    source.add("a", np.ones(3))
    source.add("b", np.ones(4))
    with pytest.raises(libfsdp.InvalidArgument, match="'b'.*read-only"):
        fixed.load(source)
    assert not a.any() and not b.any()


def shards_and_wholes(group, mesh, options):
    ranks = Mesh(group, mesh) if mesh else group
    model = fully_shard(net(), ranks, dim={"0.weight": 1, "0.bias": 0, "2.0.weight": 0, "2.0.bias": 0, "3.weight": 1}, **options)
    expected = {parameter.name: parameter.value for parameter in net().parameters()}
    state = model.model.state_dict()
    assert list(state) == list(expected)
    for name, entry in ((entry.name, entry) for entry in state.entries()):
        box = tuple(slice(at, at + extent) for at, extent in zip(entry.offset, entry.length))
        assert entry.shape == expected[name].shape and np.array_equal(state[name].numpy(), expected[name][box])
    for full in (model.model.state_dict("full"), state.gather(group)):
        assert all(np.array_equal(full[name].numpy(), value) for name, value in expected.items())
    alone = model.model.state_dict("full", rank0_only=True, prefix="model.")
    assert list(alone) == ([f"model.{name}" for name in expected] if group.rank == 0 else [])
    copies = model.model.state_dict("local", copy=True)
    assert copies.entries()[0].shape == state.entries()[0].length
    for name in expected:
        state[name].numpy()[...] = 0  # which are the shards
    assert all(not value.any() for value in model.full_parameters().values())
    model.model.load_state_dict(alone if group.rank == 0 else None, from_rank0=True, prefix="model.")
    assert all(np.array_equal(value, expected[name]) for name, value in model.full_parameters().items())
    for name in expected:
        state[name].numpy()[...] = 0
    model.model.load_state_dict(full)
    assert all(np.array_equal(value, expected[name]) for name, value in model.full_parameters().items())
    if options.get("strategy") == "no_shard":
        return  # the full parameters are the shards
    with model.unsharded():
        try:
            model.model.load_state_dict(full)
        except libfsdp.InvalidState as error:
            assert "unsharded" in str(error)
        else:
            raise AssertionError("loaded into a unit that is full")


@pytest.mark.parametrize(
    "n, mesh, options",
    [
        (1, None, {}),
        (2, None, {"strategy": "no_shard"}),
        (3, None, {}),
        (4, None, {"strategy": "shard_grad_op"}),
        (4, {"replicate": 2, "shard": 2}, {"strategy": "hybrid_shard"}),
    ],
)
def test_a_models_parameters_as_shards_and_whole(ranks, n, mesh, options):
    ranks(n, shards_and_wholes, mesh, options)


def differing_dicts(group):
    state = StateDict()
    state.add("same", np.zeros(2))
    state.add("a" if group.rank == 0 else "b", np.zeros(2))
    try:
        state.gather(group)
    except libfsdp.Mismatch as error:
        assert "'a'" in str(error) and "'b'" in str(error), error
    else:
        raise AssertionError("gathered")
    part = StateDict()
    part.add("x", np.zeros(2), shape=(5,), offset=(2 * group.rank,))
    try:
        part.gather(group)
    except libfsdp.InvalidArgument as error:
        assert "'x'" in str(error), error
    else:
        raise AssertionError("gathered")
    group.barrier()


def test_what_ranks_have_differently_is_named_on_all_of_them(ranks):
    ranks(2, differing_dicts)
