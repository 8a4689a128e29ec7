"""What programs see of libfsdp.torch.fully_shard: classes, signatures, methods, and errors in words, beside torch's
own."""

import copy
import inspect
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch_fully_shard_models import Block, Hidden, WIDTH, batches, close_gradients, network, refused, sharded, whole

import libfsdp
import libfsdp.torch as ours


def methods(job):
    n, rank, mine = job.size, job.rank, slice(job.rank, None, job.size)
    x = [batch[0] for batch in batches(4)]
    model = network()
    assert ours.fully_shard(model[0]) is model[0] and ours.fully_shard(model) is model
    assert type(model).__name__ == "FSDPSequential" and isinstance(model, nn.Sequential)
    assert isinstance(model, ours.FSDPModule) and isinstance(model, theirs.FSDPModule)
    assert type(model[:2]) is nn.Sequential  # what is made of it is not sharded
    # Every method of torch's, with its parameters.
    for name, method in inspect.getmembers(theirs.FSDPModule, inspect.isfunction):
        if not name.startswith("_"):
            assert getattr(ours.FSDPModule, name) is not method, name
            wanted = inspect.signature(method).parameters
            got = inspect.signature(getattr(ours.FSDPModule, name)).parameters
            assert [(p.name, p.default, p.kind) for p in wanted.values()] == [
                (p.name, p.default, p.kind) for p in got.values()
            ], name
    wanted = inspect.signature(theirs.fully_shard).parameters
    assert list(wanted) == list(inspect.signature(ours.fully_shard).parameters)
    # Unshard by hand: the module shows whole parameters; edits are this rank's and are dropped.
    model = sharded()
    handle = model[0].unshard(async_op=True)
    assert isinstance(handle, ours.UnshardHandle)
    handle.wait()
    assert not isinstance(model[0].up.weight, DTensor) and torch.equal(model[0].up.weight, network()[0].up.weight)
    with torch.no_grad():
        model[0].up.weight.add_(rank + 1.0)
    model[0].reshard()
    assert isinstance(model[0].up.weight, DTensor)
    assert torch.equal(whole(model[0].up.weight), network()[0].up.weight)
    # Another method than forward.
    class Speaker(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return self.speak(x)

        def speak(self, x):
            return self.block.up(x).sum()

    model, plain = ours.fully_shard(Speaker()), Speaker()
    with torch.no_grad():
        for p, q in zip(plain.parameters(), model.parameters()):
            p.copy_(whole(q))
    refused(lambda: model.speak(x[0]), RuntimeError)
    ours.register_fsdp_forward_method(model, "speak")
    ours.register_fsdp_forward_method(nn.Linear(1, 1), "nothing")
    refused(lambda: ours.register_fsdp_forward_method(model, "nothing"), ValueError, "nothing")
    for call in (model, model.speak):
        model.zero_grad(), plain.zero_grad()
        call(x[0][mine]).backward()
        plain(x[0]).backward()
        close_gradients(model, plain, n)


def test_classes_methods_and_signatures_are_those_of_torchs_own(hosted):
    hosted(2, methods)


def misuse(job):
    x = batches(1)[0][0]
    for fully_shard in (ours.fully_shard, theirs.fully_shard):
        refused(lambda: fully_shard(nn.ModuleList([nn.Linear(1, 1)])), ValueError, "containers")
        scalar = nn.Linear(2, 2)
        scalar.scale = nn.Parameter(torch.tensor(1.0))
        refused(lambda: fully_shard(scalar), ValueError, "scalar parameters. Change scale")
        refused(lambda: fully_shard(nn.Linear(2, 2), reshard_after_forward=3), ValueError, "factor of 2, not 3")
        refused(lambda: fully_shard(nn.Linear(2, 2), reshard_after_forward="no"), ValueError, "bool or an int")
        square = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
        refused(lambda: fully_shard(nn.Linear(2, 2), mesh=square), ValueError, "1D or 2D")
        outside = {"shard_placement_fn": lambda p: Shard(2)}
        refused(lambda: fully_shard(nn.Linear(2, 2), **outside), (AssertionError, IndexError))
        model = sharded(fully_shard=fully_shard)
        refused(lambda: copy.deepcopy(model), AssertionError, "deepcopy")
        refused(lambda: model.set_modules_to_forward_prefetch([nn.Linear(1, 1)]), ValueError, "FSDPModule")
        inner = network()
        fully_shard(inner[0])
        inner[0](x)
        fully_shard(inner)
        refused(lambda: inner(x), RuntimeError, "lazily initialized")
    model = sharded()
    refused(lambda: ours.fully_shard(model), RuntimeError, "already been applied")
    refused(lambda: ours.fully_shard([]), ValueError, "at least one")
    refused(lambda: ours.fully_shard("no module"), TypeError)
    # A parameter that two calls would own (A01).
    tied = network()
    tied[1].extra = tied[2].weight
    ours.fully_shard(tied[2])
    refused(lambda: ours.fully_shard(tied[1]), ValueError, "'extra' of Block")
    del tied  # memory of it may be used again: no false alarm
    for _ in range(3):
        sharded()
    # Outputs that can't be seen: no silent wrong numbers.
    class Hides(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, 1)

        def forward(self, x):
            return Hidden(self.layer(x))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Hides()

        def forward(self, x):
            return self.inner(x).value

    outer = Outer()
    sharded(outer, layers=[outer.inner])
    out = outer(x)
    refused(lambda: out.sum().backward(), RuntimeError, "none of its outputs")
    # Ranks that differ are told so, and not left waiting.
    model = ours.fully_shard(nn.Linear(4 + job.rank, 2))
    error = refused(lambda: model(torch.ones(1, 4 + job.rank)), RuntimeError)
    assert isinstance(error, libfsdp.Mismatch), error


def test_misuse_is_refused_in_words(hosted):
    hosted(2, misuse)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
