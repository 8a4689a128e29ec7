"""Callbacks of units: when they run, what becomes of what they raise, and how long they live."""

import gc
import sys
import weakref

import numpy as np
import pytest
from conftest import run_python

import libfsdp
from libfsdp import Group, Model

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


def made(group, **options):
    model = Model(group, **options)
    return model, model.unit("u", {"w": np.arange(12, dtype="float32").reshape(6, 2)})


def runs(group):
    for options in ({}, {"reshard_after_forward": False}, {"private_unshard": True}):
        runs_with(group, options)
    group.barrier()


def runs_with(group, options):
    model, unit = made(group, **options)
    log = []

    def valid(who):
        assert who is unit and (who["w"].full.numpy() == np.arange(12).reshape(6, 2)).all()
        log.append("valid")

    def invalid(who):
        assert who is unit
        log.append("invalid")
        assert (who["w"].full.numpy() == np.arange(12).reshape(6, 2)).all()  # still

    unit.set_callbacks(valid, invalid)

    def since(*expected):
        assert tuple(log) == expected, (options, log)
        log.clear()

    keeps = options.get("reshard_after_forward") is False
    for _ in range(2):
        unit.pre_forward()
        since("valid")
        unit.unshard()
        since()
        unit.post_forward()
        since(*([] if keeps else ["invalid"]))
        unit.pre_backward()
        since(*([] if keeps else ["valid"]))
        unit.post_backward([np.ones((6, 2), "float32")])
        since("invalid")
        model.finish_backward()
        since()
        model.zero_grad()
    unit.unshard(async_op=True).wait()
    unit.pre_forward()
    since("valid")
    model.finish_backward()
    since("invalid")
    unit.unshard()
    model.reset()
    since("valid", "invalid")
    # one of them, others, none
    unit.set_callbacks(invalid=invalid)
    unit.unshard()
    unit.reshard()
    since("invalid")
    unit.set_callbacks()
    unit.unshard()
    unit.reshard()
    since()


@pytest.mark.parametrize("n", [1, 2])
def test_when_they_run(ranks, n):
    ranks(n, runs)


def fail(unit):
    raise KeyError("of the callback")


def test_what_they_raise_is_raised_by_the_call_and_the_call_is_done():
    model, unit = made(Group.single())
    unit.set_callbacks(fail)
    with pytest.raises(KeyError, match="of the callback"):
        unit.pre_forward()
    assert unit.state == "unsharded"
    unit.post_forward()
    unit.set_callbacks(invalid=fail)
    unit.pre_backward()
    with pytest.raises(KeyError):
        unit.post_backward([np.ones((6, 2), "float32")])
    assert unit.state == "sharded" and (unit["w"].grad.numpy() == 1).all()
    unit.unshard()
    with pytest.raises(KeyError):
        model.finish_backward()
    unit.unshard()
    with pytest.raises(KeyError):
        unit.reshard()
    unit.reshard()  # nothing to do, nothing raised


def test_a_second_exception_of_one_call_goes_to_the_hook(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: seen.append(told.exc_type))
    model = Model(Group.single())
    units = [model.unit(name, {name: np.zeros(2)}) for name in "abc"]
    for unit in units:
        unit.unshard()
        unit.set_callbacks(invalid=fail)
    with pytest.raises(KeyError):
        model.finish_backward()
    assert seen == [KeyError, KeyError]
    assert [unit.state for unit in units] == ["sharded"] * 3


def test_callbacks_may_look_but_change_no_unit():
    model, unit = made(Group.single())
    other = model.unit("other", {"x": np.zeros(2)})
    seen = []

    def valid(who):
        for call in (who.reshard, who.pre_forward, other.unshard, model.finish_backward, model.reset):
            with pytest.raises(libfsdp.InvalidState):
                call()
        seen.append((who.state, who.info().n_params, who["w"].info().shape, model.memory().shards))

    unit.set_callbacks(valid)
    unit.unshard()
    assert seen == [("unsharded", 1, (6, 2), 64)]
    unit.reshard()
    assert unit.state == other.state == "sharded"


def test_a_unit_that_its_callbacks_refer_to_is_ordinary_garbage():
    model, unit = made(Group.single())
    unit.set_callbacks(lambda _: unit.state, lambda _: unit.state)
    full, gone = unit["w"].full, weakref.ref(unit)
    unit.unshard()
    del unit
    gc.collect()
    assert gone() is None
    model.finish_backward()  # the library's unit is alive in `full`; nobody is called
    assert full.shape == (6, 2)


def test_a_closed_unit_calls_nobody():
    model, unit = made(Group.single())
    log = []
    unit.unshard()
    unit.set_callbacks(log.append, log.append)
    full = unit["w"].full
    unit.close()
    model.finish_backward()
    assert log == [] and full.shape == (6, 2)


EXIT = """
import numpy, libfsdp
group = libfsdp.init()
model = libfsdp.Model(group)
unit = model.unit("u", {"w": numpy.zeros(4)})
unit.set_callbacks(lambda u: print("valid", u.name), lambda u: print("invalid", u.name))
unit.unshard()
END
"""


@pytest.mark.parametrize(
    "end",
    ["", "work = unit.unshard(async_op=True)", "full = unit['w'].full; del unit", "import sys; sys.exit()"],
    ids=["full", "with_work", "without_unit", "exits"],
)
def test_a_program_ends_with_callbacks_set(tmp_path, end):
    path = tmp_path / "exit.py"
    path.write_text(EXIT.replace("END", end))
    done = run_python(path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.split("\n")[0] == "valid u"
