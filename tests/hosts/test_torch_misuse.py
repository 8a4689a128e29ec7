"""What programs do wrong with torch's fully_shard: named in words, where torch's own goes on without a word or says
something about tensors inside it; and what is right although it looks like it."""

import inspect
import sys
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch_fully_shard_models import Block, WIDTH, batches, network, refused, sharded, whole

import libfsdp.torch as ours


# ---- An optimizer that was built first -------------------------------------------------------------------------------


def early(job):
    x = batches(1)[0][0][job.rank :: job.size]
    for fully_shard in (ours.fully_shard, theirs.fully_shard):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        sharded(model, fully_shard=fully_shard)
        before = [whole(parameter).clone() for parameter in model.parameters()]
        for _ in range(2):
            model(x).sum().backward()
            if fully_shard is ours.fully_shard:
                error = refused(optimizer.step, RuntimeError, "AdamW was built before the model was sharded")
                assert "'weight' of LayerNorm" in str(error) and "Build the optimizer after" in str(error)
            else:
                optimizer.step()  # and nothing has moved
        assert all(torch.equal(whole(parameter), old) for parameter, old in zip(model.parameters(), before))
        late = torch.optim.AdamW(model.parameters(), lr=0.1)
        late.step()
        assert not any(torch.equal(whole(parameter), old) for parameter, old in zip(model.parameters(), before))
    # One that gets them later; and one that was right, until a part of its model was sharded.
    model = sharded(network())
    plain = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer.step()
    old = network()
    optimizer.add_param_group({"params": old[0].parameters()})
    sharded(old)
    refused(optimizer.step, RuntimeError, "was built before")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer.step()
    ours.fully_shard(plain)
    refused(optimizer.step, RuntimeError, "'weight' of Linear")
    wrapped = network()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped = ours.FullyShardedDataParallel(wrapped)
    wrapped(x).sum().backward()
    refused(optimizer.step, RuntimeError, "was built before")


def not_early(job):
    """Optimizers that hold the right parameters, whenever they were built."""
    x = batches(1)[0][0][job.rank :: job.size]
    model = network()
    model[2].requires_grad_(False)
    kept = [*model[0].parameters()]
    optimizer = torch.optim.SGD([*kept, *model[2].parameters()], lr=0.1)  # ignored, and frozen, which nobody steps
    ours.fully_shard(model[1])
    ours.fully_shard(model, ignored_params=set(kept))
    before = [parameter.detach().clone() for parameter in kept]
    model(x).sum().backward()
    optimizer.step()
    assert not any(torch.equal(parameter, old) for parameter, old in zip(kept, before))
    # A module outside has the parameter as well, and trains it by itself.
    inside, outside = Block(), Block()
    outside.up.weight = inside.up.weight
    ours.fully_shard(inside)
    optimizer = torch.optim.SGD(outside.parameters(), lr=0.1)
    before = outside.up.weight.detach().clone()
    outside(x).sum().backward()
    optimizer.step()
    assert not torch.equal(outside.up.weight, before)
    # A compiled step.
    optimizer = torch.optim.SGD(sharded(network()).parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(optimizer.step, backend="eager")()


# ---- A forward without the module's call -----------------------------------------------------------------------------


class Speaker(Block):
    def forward(self, x, *, loud: bool = False):
        """Speak."""
        x = super().forward(x)
        return 2 * x if loud else x

    def speak(self, x):
        return self.forward(x, loud=True)


def outside(job):
    x = batches(1)[0][0]
    torch.manual_seed(3)
    plain = Speaker()
    wanted = [plain(x), plain.speak(x)]
    for fully_shard in (ours.fully_shard, theirs.fully_shard):
        torch.manual_seed(3)
        model = fully_shard(Speaker())
        text = "" if fully_shard is theirs.fully_shard else "forward of Speaker was called while its parameters"
        for step in range(2):  # before the first forward, and after
            refused(lambda: model.forward(x), RuntimeError, text)
            refused(lambda: model.speak(x), RuntimeError, text)
            with torch.no_grad():
                refused(lambda: model.forward(x), RuntimeError, text)
            torch.testing.assert_close(model(x), wanted[0])
            model.reshard()
        model.unshard()
        torch.testing.assert_close(model.forward(x, loud=True), wanted[1])
        model.reshard()
        side = ours if fully_shard is ours.fully_shard else theirs
        side.register_fsdp_forward_method(model, "speak")
        torch.testing.assert_close(model.speak(x), wanted[1])
        side.register_fsdp_forward_method(model, "forward")
        torch.testing.assert_close(model.forward(x), wanted[0])
    # What is seen of forward is what was.
    model = ours.fully_shard(Speaker())
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert model.forward.__doc__ == "Speak." and inspect.getsource(model.forward) == inspect.getsource(plain.forward)
    # Compiled, as a whole and layer by layer; each class has compiled code of its own.
    for whole_model in (True, False):
        torch._dynamo.reset()
        model = network()
        if not whole_model:
            for layer in model:
                layer.compile(backend="eager")
        sharded(model)
        run = torch.compile(model, backend="eager") if whole_model else model
        for _ in range(3):
            torch.testing.assert_close(run(x), network()(x))


# ---- Meshes and devices ----------------------------------------------------------------------------------------------


def places(job):
    mesh = DeviceMesh.from_group(job.fsdp, "cpu")
    mesh._device_type = "cuda"
    refused(lambda: ours.fully_shard(nn.Linear(2, 2), mesh=mesh), ValueError, "give a mesh of 'cpu'")
    # A module of which a part is elsewhere stays as it was.
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = network()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.extra = nn.Parameter(torch.empty(3, device="cuda"))
    error = refused(lambda: ours.fully_shard(model), ValueError, "'extra' is on cuda")
    assert "move the module to cpu first" in str(error)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    del model.extra
    sharded(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize("worker", [early, not_early, outside, places])
def test_together(hosted, worker):
    hosted(2, worker)


def test_a_torch_that_is_too_old_is_told(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    for ask in (lambda: ours._create(None, None), lambda: ours.fully_shard):
        refused(ask, RuntimeError, "needs torch 2.11 or newer, and this is 2.5.1")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
