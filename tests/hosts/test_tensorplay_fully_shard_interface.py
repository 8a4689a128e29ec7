"""What programs see of libfsdp.tensorplay.fully_shard: names, signatures, classes, shapes, values and errors, beside
TensorPlay's own."""

import copy
import inspect

import pytest

tp = pytest.importorskip(
    "tensorplay", reason="TensorPlay is not installed here; ci/test tensorplay makes a venv that has it"
)
import numpy as np
import tensorplay.distributed as dist
from tensorplay import nn
from tensorplay.distributed.tensor import Shard
from tensorplay_fully_shard_models import OLD, F, Odd, network, raised

import libfsdp.tensorplay.composable as ours
from libfsdp.tensorplay import DataParallelMeshDims, FSDPModule, fully_shard

RANK = "tensorplay_rank.py"


def test_names_arguments_and_defaults_are_those_of_tensorplay():
    theirs = dist.fsdp
    for name in ours.__all__:
        if name == "clip_grad_norm_":
            continue
        assert hasattr(theirs, name)
        if inspect.isfunction(getattr(theirs, name)):
            mine, other = (inspect.signature(getattr(side, name)).parameters for side in (ours, theirs))
            assert list(mine) == list(other), name
            assert [p.default for p in mine.values()] == [p.default for p in other.values()], name
            assert [p.kind for p in mine.values()] == [p.kind for p in other.values()], name
    for name, method in inspect.getmembers(theirs.FSDPModule, inspect.isfunction):
        mine, other = (inspect.signature(getattr(side, name)).parameters for side in (FSDPModule, theirs.FSDPModule))
        assert list(mine) == list(other) or name in ("_apply", "__new__"), name
        assert [p.default for p in mine.values()] == [p.default for p in other.values()], name


def look_alike(job):
    """Classes, shapes, identities and values, of both in the same processes."""
    x = tp.arange(12).float().reshape(4, 3) / 7 + job.rank
    seen = {}
    for shard in (fully_shard, dist.fsdp.fully_shard):
        model = network(Odd)
        before = dict(model.named_parameters())
        kinds = {name: type(parameter) for name, parameter in before.items()}
        assert shard(model.a) is model.a
        assert shard(model) is model
        after = dict(model.named_parameters())
        if shard is fully_shard or not OLD:
            step_of = tp.optim.SGD(model.parameters(), lr=0.1)
            F.mse_loss(model(x), x.sum(dim=1, keepdim=True)).backward()
            step_of.step()
        seen[shard] = {
            "names": list(after),
            "shapes": [tuple(parameter.shape) for parameter in after.values()],
            "kinds": [type(parameter) is kinds[name] for name, parameter in after.items()],
            "class": (type(model).__name__, type(model.a).__name__),
            "bases": isinstance(model, dist.fsdp.FSDPModule) and isinstance(model, Odd),
            "grads": [] if OLD else [p.grad.numpy().copy() for p in model.parameters()],
            "values": [] if OLD else [p.detach().numpy().copy() for p in model.parameters()],
            "states": {} if OLD else {name: value.numpy().copy() for name, value in model.state_dict().items()},
        }
        if shard is fully_shard:
            for _ in range(2):
                assert all(after[name] is before[name] is p for name, p in model.named_parameters())
                F.mse_loss(model(x), x.sum(dim=1, keepdim=True)).backward()
    mine, other = seen.values()
    for key in ("names", "shapes", "kinds", "class", "bases"):
        assert mine[key] == other[key], (key, mine[key], other[key])
    assert mine["class"] == ("OddFSDPModule", "LinearFSDPModule")
    assert mine["shapes"] == ([(4, 3), (4,), (1, 7), (1,)], [(3, 3), (3,), (0, 7), (0,)])[job.rank]
    assert list(mine["states"]) == list(other["states"])
    for key in ("grads", "values"):
        for a, b in zip(mine[key], other[key]):
            np.testing.assert_allclose(a, b, atol=1e-6, err_msg=key)
    for name in mine["states"]:
        np.testing.assert_allclose(mine["states"][name], other["states"][name], atol=1e-6)


def test_classes_shapes_and_values_are_those_of_tensorplays_own(hosted):
    hosted(2, look_alike)


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(tp.tensor(2.0))

    def forward(self, x):
        return x * self.gain


MISTAKES = {
    "an empty list": lambda shard: shard([]),
    "twice in a list": lambda shard: shard([network(Odd)] * 2),
    "a second call": lambda shard: shard(shard(network(Odd))),
    "no module": lambda shard: shard(3),
    "a container": lambda shard: shard(nn.ModuleList([nn.Linear(2, 2)])),
    "a scalar": lambda shard: shard(Scalar()),
    "three dimensions": lambda shard: shard(network(Odd), mesh=_mesh((1, 1, 1), ("a", "b", "c"))),
    "two dimensions without names": lambda shard: shard(network(Odd), mesh=_mesh((1, 1))),
    "a dimension that is not there": lambda shard: shard(
        network(Odd), mesh=_mesh((1,), ("a",)), dp_mesh_dims=DataParallelMeshDims(shard="b")
    ),
    "one dimension for both": lambda shard: shard(
        network(Odd), mesh=_mesh((1,), ("a",)), dp_mesh_dims=DataParallelMeshDims(shard="a", replicate="a")
    ),
    "reshard of a wrong type": lambda shard: shard(network(Odd), reshard_after_forward="yes"),
    "reshard to too many": lambda shard: shard(network(Odd), reshard_after_forward=3),
    "no placement": lambda shard: shard(network(Odd), shard_placement_fn=lambda parameter: 1),
    "a placement outside": lambda shard: shard(network(Odd), shard_placement_fn=lambda parameter: Shard(4)),
    "prefetch of a plain module": lambda shard: shard(network(Odd)).set_modules_to_forward_prefetch([nn.Linear(2, 2)]),
    "reshard told by a number": lambda shard: shard(network(Odd)).set_reshard_after_forward(2),
    "no buffers": lambda shard: shard(network(Odd)).set_reduce_scatter_max_input_buffers(0),
    "half a buffer": lambda shard: shard(network(Odd)).set_reduce_scatter_max_input_buffers(0.5),
    "a copy": lambda shard: copy.deepcopy(shard(network(Odd))),
    "a missing method": lambda shard: _registered(shard, "nothing"),
}


def _mesh(shape, names=None):
    from tensorplay.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", np.zeros(shape, int).tolist(), mesh_dim_names=names)


def _registered(shard, name):
    side = ours if shard is fully_shard else dist.fsdp
    side.register_fsdp_forward_method(shard(network(Odd)), name)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_what_tensorplays_own_raises(mistake):
    mine, text = raised(MISTAKES[mistake], fully_shard)
    other, other_text = raised(MISTAKES[mistake], dist.fsdp.fully_shard)
    assert mine is not None and issubclass(mine, other), (mine, text, other, other_text)
    assert len(text) > 20


def test_messages_of_tensorplays_own():
    assert raised(MISTAKES["a second call"], fully_shard) == (
        RuntimeError,
        "fully_shard has already been applied to this module",
    )
    assert "scalar parameters" in raised(MISTAKES["a scalar"], fully_shard)[1]
    theirs = dist.fsdp.fully_shard(network(Odd))
    assert "TensorPlay's own" in raised(fully_shard, theirs)[1]
    assert raised(dist.fsdp.fully_shard, fully_shard(network(Odd)))[0] is RuntimeError
