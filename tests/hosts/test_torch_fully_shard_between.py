"""What programs do between passes of modules under libfsdp.torch.fully_shard: gradients they keep, write and drop,
shards they write, state dicts, other dtypes; and what memory that takes."""

import gc
import inspect
import sys
import weakref

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch_fully_shard_models import batches, close, close_gradients, network, refused, sharded, train

import libfsdp.torch as ours
from libfsdp.errors import Mismatch


def between(job):
    n, mine = job.size, slice(job.rank, None, job.size)
    x = [batch[0] for batch in batches(4)]
    # Frozen and thawed between steps; nothing is reduced for what is frozen (A05).
    model, plain = sharded(), network()
    for i in range(4):
        if i in (0, 2):
            for m in (model, plain):
                m[0].up.requires_grad_(i == 2)
                m[1].requires_grad_(i == 2)
        for m, rows in ((model, mine), (plain, slice(None))):
            m(x[i][rows]).square().sum().backward()
        close_gradients(model, plain, n)
        if i == 0:
            unit = model[1]._get_fsdp_state().unit
            assert unit.info().reduced_bytes == 0 and all(param.grad is None for param in unit)
    # A gradient that somebody keeps is not written again; one that somebody put there is added to.
    model = sharded()
    model(x[0][mine]).sum().backward()
    kept = model[0].up.weight.grad
    values = kept.to_local().clone()
    model.zero_grad()
    model(x[1][mine]).square().sum().backward()
    assert torch.equal(kept.to_local(), values) and not torch.equal(model[0].up.weight.grad.to_local(), values)
    del kept
    model.zero_grad(set_to_none=False)
    model(x[0][mine]).sum().backward()
    torch.testing.assert_close(model[0].up.weight.grad.to_local(), values)
    for p in model.parameters():
        p.grad = p.grad * 2
    model(x[0][mine]).sum().backward()
    torch.testing.assert_close(model[0].up.weight.grad.to_local(), 3 * values)
    model[0].up.weight.grad = None  # one of many
    model(x[0][mine]).sum().backward()
    torch.testing.assert_close(model[0].up.weight.grad.to_local(), values)
    # Hooks on sharded parameters see sharded gradients.
    seen = []
    model[0].up.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
    model.zero_grad()
    model(x[0][mine]).sum().backward()
    torch.testing.assert_close(seen, [values])
    # State dicts: after an evaluation too, loaded by copy and by assignment, whole and into other ranks' shards.
    reference = network()
    train(model := sharded(), job)
    train(reference, job, alone=True)
    with torch.no_grad():
        wanted = model(x[0])
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(isinstance(value, DTensor) for value in saved.values())
    for assign in (False, True):
        other = sharded()
        other(x[0][mine])
        other.load_state_dict(saved, assign=assign)
        with torch.no_grad():
            assert torch.equal(other(x[0]), wanted)
        train(other, job, 1)
    full = StateDictOptions(full_state_dict=True)
    values = get_model_state_dict(model, options=full)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=1e-6)
    other = sharded()
    set_model_state_dict(other, values, options=full)
    with torch.no_grad():
        assert torch.equal(other(x[0]), wanted)
    # From the meta device, and to another dtype.
    with torch.device("meta"):
        empty = network()
    sharded(empty)
    refused(lambda: empty(x[0]), RuntimeError, "0.norm.weight")
    empty.to_empty(device="cpu")
    empty.load_state_dict(saved)
    with torch.no_grad():
        assert torch.equal(empty(x[0]), wanted)
    other = sharded()
    other(x[0])
    other.to(torch.float64)
    other(x[0].double()).sum().backward()
    assert other[0].up.weight.grad.dtype == torch.float64
    other, plain = ours.fully_shard(network()), network()  # which is full after a forward
    other(x[0])
    with torch.no_grad():
        torch.testing.assert_close(other.to(torch.float64)(x[0].double()), plain.double()(x[0].double()))
    assert all(isinstance(p, DTensor) for p in other.to(torch.float32).parameters())
    # Values that a program writes to the shards, in whatever way, are what the next forward uses.
    other = sharded()
    for write in (
        lambda p: p.to_local().copy_(p.to_local() + 1),
        lambda p: p.data.add_(1),
        lambda p: setattr(p, "_local_tensor", p._local_tensor + 1),
    ):
        with torch.no_grad():
            before = other(x[0])
            for p in other[2].parameters():
                write(p)
            assert not torch.equal(other(x[0]), before), inspect.getsource(write)
    # An exception in a forward, on every rank: the next iteration is as if it had not been.
    model = sharded()
    model(x[0][mine]).sum().backward()
    values = model[0].up.weight.grad.to_local().clone()
    model.zero_grad()
    handle = model[1].register_forward_pre_hook(lambda *_: refused_now())
    refused(lambda: model(x[0][mine]), ArithmeticError)
    handle.remove()
    model(x[0][mine]).sum().backward()
    torch.testing.assert_close(model[0].up.weight.grad.to_local(), values)
    model.reset_iter_state()
    model(x[0][mine]).sum().backward()
    torch.testing.assert_close(model[0].up.weight.grad.to_local(), values)


def refused_now():
    raise ArithmeticError("on purpose")


def test_between_passes(hosted):
    hosted(2, between)


def fails_alone(job, layer):
    """A backward that fails on one rank fails on all; programs that go on with the next batch then go on together."""
    model, plain = sharded(), network()
    (x, y), mine = batches(1)[0], slice(job.rank, None, job.size)
    step = lambda: torch.nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
    step()
    fail = model[layer].register_forward_hook(lambda module, args, out: out.register_hook(lambda _: refused_now()) and None)
    if job.rank != 1:
        fail.remove()
    refused(step, ArithmeticError if job.rank == 1 else Mismatch)
    fail.remove()
    for _ in range(3):
        try:
            step()
            break
        except Mismatch:
            pass
    else:
        raise AssertionError("no step succeeds after one that failed")
    model.zero_grad()
    train(model, job), train(plain, job, alone=True)
    close(model, plain)


@pytest.mark.parametrize("layer", [2, 1, 0])
def test_a_backward_that_fails_on_one_rank_fails_on_all(hosted, layer):
    hosted(2, fails_alone, layer, limit=5)


def kib():
    with open("/proc/self/smaps_rollup") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith(("Anonymous:", "Pss_Shmem:")))


def memory(job):
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12)))
    model[4].requires_grad_(False)
    model[5].requires_grad_(False)
    sharded(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(120):
        model(torch.randn(2, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 20:
            before = kib()
    assert kib() < before + 12288, (before, kib())  # a leak of one full parameter each step would be 25 MiB
    (library,) = model._get_fsdp_state().iteration.models.values()
    info = library.memory()
    assert info.host_unsharded_peak <= 2 * info.largest_unit  # frozen layers are sharded again as well
    gone = weakref.ref(model), weakref.ref(model._get_fsdp_state())
    del model, optimizer, library
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_memory_does_not_grow_and_goes(hosted):
    hosted(2, memory)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
