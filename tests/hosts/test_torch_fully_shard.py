"""What libfsdp.torch.fully_shard trains to, beside torch's own on gloo in the same processes, and beside one process
with the whole batch."""

import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from conftest import run_python
from torch_fully_shard_models import (
    GPT,
    WIDTH,
    Convolutions,
    LowRank,
    Mixture,
    batches,
    close,
    mean_square,
    network,
    next_word,
    refused,
    sentences,
    sharded,
    train,
)

import libfsdp.torch as ours


def parity(job):
    alone = network()
    train(alone, job, alone=True)
    on_gloo = DeviceMesh.from_group(job.gloo, "cpu")
    for options in ({}, {"reshard_after_forward": True}, {"reshard_after_forward": False}, {"mesh": on_gloo}):
        model = sharded(**options)
        losses = train(model, job)
        close(model, alone)
        other = sharded(fully_shard=theirs.fully_shard, **(options | {"mesh": on_gloo}))
        torch.testing.assert_close(losses, train(other, job), rtol=1e-5, atol=1e-6)
        close(model, other)
        for p, q in zip(model.parameters(), other.parameters()):  # and they lie alike
            assert p.placements == q.placements and p.shape == q.shape and p.stride() == q.stride()
            assert torch.Size(p.to_local().shape) == q.to_local().shape and p.dtype == q.dtype
        assert list(model.state_dict()) == list(other.state_dict())
    # With clipping by torch's own function.
    clipped, plain = sharded(), network()
    train(clipped, job, after=lambda: nn.utils.clip_grad_norm_(clipped.parameters(), 0.3))
    train(plain, job, alone=True, after=lambda: nn.utils.clip_grad_norm_(plain.parameters(), 0.3))
    close(clipped, plain)
    if job.size == 4:
        model = sharded(reshard_after_forward=2)
        train(model, job)
        close(model, alone)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = sharded(mesh=mesh)
        train(model, job)
        close(model, alone)
        assert model[0].up.weight.placements == (Replicate(), Shard(0))
    # Low precision: as torch's own, to its rounding.
    for reduce_dtype in (None, torch.float32):
        policy = theirs.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
        model, other = sharded(mp_policy=policy), sharded(fully_shard=theirs.fully_shard, mp_policy=policy)
        train(model, job)
        train(other, job)
        close(model, alone, 0.06)
        close(model, other, 0.01)
    policy = theirs.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64, cast_forward_inputs=False)
    layer = ours.fully_shard(nn.Linear(WIDTH, 2), mp_policy=policy)
    refused(lambda: layer(torch.ones(1, WIDTH)), RuntimeError)  # float32 inputs meet bfloat16 weights
    assert layer(torch.ones(1, WIDTH, dtype=torch.bfloat16)).dtype == torch.float64


@pytest.mark.parametrize("n", [1, 2, 4])
def test_training_is_that_of_one_process_and_of_torch(hosted, n):
    hosted(n, parity, fresh=n == 2)


def models(job):
    for make, layers, loss, data in (
        (GPT, lambda m: m.layers, next_word, sentences),
        (LowRank, lambda m: [m.before, m.frozen, m.after], mean_square, batches),
        (Mixture, lambda m: [m.body], mean_square, batches),
    ):
        alone, model = make(), make()
        sharded(model, layers=layers(model))
        train(alone, job, 20, alone=True, loss=loss, data=data)
        train(model, job, 20, loss=loss, data=data)
        close(model, alone)
    # BatchNorm's statistics are of a rank's part of the batch, with every data parallelism: beside DDP.
    model, other = Convolutions(), Convolutions()
    sharded(model, layers=[model.first, model.second])
    ddp = nn.parallel.DistributedDataParallel(other, process_group=job.gloo, broadcast_buffers=False)
    train(model, job, 20)
    train(ddp, job, 20)
    close(model, other)
    torch.testing.assert_close(model.norm.running_mean, other.norm.running_mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [2, 4])
def test_models_that_people_have_come_to_the_same_after_20_steps(hosted, n):
    hosted(n, models)


def test_without_a_process_group_it_is_a_group_of_one():
    program = (
        "import torch; from libfsdp.torch import fully_shard\n"
        "m = fully_shard(torch.nn.Linear(3, 2)); o = torch.optim.SGD(m.parameters(), lr=1.0)\n"
        "m(torch.ones(1, 3)).sum().backward(); w = m.weight.full_tensor().clone(); o.step()\n"
        "print(torch.equal(m.weight.full_tensor(), w - 1))\n"
    )
    done = run_python("-c", program)
    assert done.stdout.split() == ["True"], done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
