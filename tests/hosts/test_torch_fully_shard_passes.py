"""Forward and backward of modules under libfsdp.torch.fully_shard, in all orders: the same gradients as one process
with the whole batch."""

import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch_fully_shard_models import Outputs, Segments, Twice, batches, close_gradients, network, sharded, train

import libfsdp.torch as ours


def passes(job):
    n, mine = job.size, slice(job.rank, None, job.size)
    x = [batch[0] for batch in batches(4)]
    # Two forwards, then two backwards (A04).
    model, plain = sharded(), network()
    for m, rows in ((model, mine), (plain, slice(None))):
        first, second = m(x[0][rows]).sum(), m(x[1][rows]).square().sum()
        first.backward()
        second.backward()
    close_gradients(model, plain, n)
    # The same module twice in one forward, without and with activation checkpointing around it.
    for kind in (None, "reentrant", "saved"):
        model, plain = Twice(kind), Twice(kind)
        sharded(model, layers=[model.block])
        for m, rows in ((model, mine), (plain, slice(None))):
            m(x[0].clone().requires_grad_()[rows]).square().sum().backward()
        close_gradients(model, plain, n)
    for reentrant in (False, True):
        model, plain = ours.fully_shard(Segments(reentrant)), Segments(reentrant)
        for m, rows in ((model, mine), (plain, slice(None))):
            m(x[0].clone().requires_grad_()[rows]).square().sum().backward()
        close_gradients(model, plain, n)
    # Micro-batches with and without sync in any order (A06).
    for plan in ("SNNS", "NSNS", "NNS"):
        model, plain = sharded(), network()
        for i, sync in enumerate(plan):
            model.set_requires_gradient_sync(sync == "S")
            model.set_is_last_backward(i == len(plan) - 1)
            model(x[i][mine]).square().sum().backward()
            plain(x[i]).square().sum().backward()
        close_gradients(model, plain, n)
    if n == 4:  # reduced every time over the shards, over the replicas at the end
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model, plain = sharded(mesh=mesh), network()
        for i in range(3):
            model.set_requires_all_reduce(i == 2)
            model(x[i][mine]).square().sum().backward()
            assert (model[0]._get_fsdp_state().unit.info().replicated_bytes > 0) == (i == 2)
            plain(x[i]).square().sum().backward()
        close_gradients(model, plain, n)
    # Reduced when the program says so, after the passes.
    model, plain = sharded(), network()
    for sync in (False, True):
        model.zero_grad(), plain.zero_grad()
        model.set_manual_backward_finalization(True)
        for i in range(2):
            model.set_requires_gradient_sync(sync)
            model(x[i][mine]).square().sum().backward()
            plain(x[i]).square().sum().backward()
        assert sync or all(p.grad is None for p in model.parameters())
        model.set_requires_gradient_sync(True)
        model.finalize_backward()
        model.set_manual_backward_finalization(False)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        close_gradients(model, plain, n)
    # Parameters stay full between micro-batches when they are told to.
    model, plain = sharded(), network()
    model.set_reshard_after_backward(False)
    for i in range(2):
        model.set_is_last_backward(i == 1)
        model(x[i][mine]).square().sum().backward()
        assert model[0]._get_fsdp_state().is_full == (i == 0)
        plain(x[i]).square().sum().backward()
    close_gradients(model, plain, n)
    # What is not used by the loss is sharded again, and it has no gradient (A03).
    model, plain = Outputs(), Outputs()
    sharded(model, layers=[model.block, model.one, model.other])
    for use in ("one", "both"):
        for m, rows in ((model, mine), (plain, slice(None))):
            out = m(x[0][rows])
            loss = out["one"][0].sum()
            (loss if use == "one" else loss + out["rest"][0].square().sum()).backward()
        assert all(isinstance(p, DTensor) for p in model.parameters())
        close_gradients(model, plain, n)
    # What was accumulated without sync is reduced, even if the last micro-batch does not reach its unit.
    model, plain = Outputs(), Outputs()
    sharded(model, layers=[model.block, model.one, model.other])
    for i, use in enumerate(("both", "one")):
        model.set_requires_gradient_sync(use == "one")
        for m, rows in ((model, mine), (plain, slice(None))):
            out = m(x[i][rows])
            loss = out["one"][0].sum()
            (loss if use == "one" else loss + out["rest"][0].square().sum()).backward()
    close_gradients(model, plain, n)
    # Evaluation, inference mode, and training afterwards.
    model, plain = sharded(), network()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(model(x[0]), plain(x[0]), rtol=1e-5, atol=1e-6)
    train(model, job)
    train(plain, job, alone=True)
    with torch.no_grad():
        torch.testing.assert_close(model(x[0]), plain(x[0]), rtol=1e-5, atol=1e-5)
        for p in model.parameters():
            p.add_(1.0)
        for p in plain.parameters():
            p.add_(1.0)
        torch.testing.assert_close(model(x[0]), plain(x[0]), rtol=1e-5, atol=1e-4)  # not the values of before


@pytest.mark.parametrize("n", [2, 4])
def test_passes_of_all_kinds(hosted, n):
    hosted(n, passes)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
