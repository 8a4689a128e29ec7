"""What may be told to libfsdp.torch.fully_shard about a unit: which modules and parameters it has, how they are cut and
over which ranks, how its gradients are divided, what is gathered ahead, and communication of a program's own."""

import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_fully_shard_models import WIDTH, batches, close, close_gradients, network, sharded, train

import libfsdp.torch as ours


def units(job):
    n, mine = job.size, slice(job.rank, None, job.size)
    x = [batch[0] for batch in batches(4)]
    # Any dimension, even or not; parameters that stay whole; modules that run together as one unit.
    plain, model = network(), network()
    kept = model[0].norm.weight
    sharded(
        model,
        shard_placement_fn=lambda p: Shard(p.dim() - 1) if p.dim() > 1 else None,
        ignored_params={kept},
    )
    assert model[0].norm.weight is kept and model[0].down.weight.placements == (Shard(1),)
    for m, rows in ((model, mine), (plain, slice(None))):
        m(x[0][rows]).square().sum().backward()
    kept.grad = None
    plain[0].norm.weight.grad = None
    close_gradients(model, plain, n)
    plain, model = network(), network()
    ours.fully_shard([model[0], model[1]])
    ours.fully_shard(model)
    assert model[0]._get_fsdp_state() is model[1]._get_fsdp_state()
    nested = network()
    ours.fully_shard([nested[0], nested[0].up])  # what is inside another of them is that one's
    assert not isinstance(nested[0].up, ours.FSDPModule) and isinstance(nested[0].up.weight, DTensor)
    train(plain, job, alone=True)
    train(model, job, steps=5)
    close(model, plain)
    info = model[0]._get_fsdp_state().unit.info()  # gathered and reduced once a step, and not for each module
    assert info.publications == 5 and info.reduced_bytes == 5 * info.full_bytes
    # Divided by what one says, alike on a mesh of replicas (A08).
    for mesh in [None] + ([init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))] if n == 4 else []):
        plain, model = network(), sharded(mesh=mesh)
        for module in (*model, model):
            module.set_gradient_divide_factor(300.0)
        for m, rows in ((model, mine), (plain, slice(None))):
            m(x[0][rows]).square().sum().backward()
        close_gradients(model, plain, 300.0)
    # Prefetch as one says; settings that change nothing here are there.
    model, plain = sharded(), network()
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[2].set_modules_to_backward_prefetch([model[1], model[0]])
    model.set_force_sum_reduction_for_comms(True)
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_unshard_in_backward(True)
    ours.share_comm_ctx([model, model[0]])
    train(model, job)
    train(plain, job, alone=True)
    close(model, plain)
    # On top of tensor parallelism.
    if n == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(1)
        plain = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, 1))
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, 1))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        ours.fully_shard(model, mesh=mesh["dp"])
        part = slice(mesh["dp"].get_local_rank(), None, 2)
        for m, rows in ((model, part), (plain, slice(None))):
            m(x[0][rows]).square().sum().backward()
        close_gradients(model, plain, 2)


@pytest.mark.parametrize("n", [2, 4])
def test_units_of_all_kinds(hosted, n):
    hosted(n, units)


def meshes(job):
    """Units over different ranks in one model, as many for each: every unit's gradients are the mean over its own."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = batches(1)[0][0]
    each = []  # the gradients of each rank's part of the batch
    for rank in range(4):
        plain = network()
        plain(x[rank::4]).square().sum().backward()
        each.append([p.grad for p in plain.parameters()])
    wide = init_device_mesh("cpu", (1, 4), mesh_dim_names=("a", "b"))
    for places in ((square["a"], square["b"], square), (square["b"], square, wide)):
        model = network()
        for layer, mesh in zip(model, places):
            ours.fully_shard(layer, mesh=mesh)
        ours.fully_shard(model)
        model(x[job.rank :: 4]).square().sum().backward()
        plain = network()
        own = [mesh for layer, mesh in zip(plain, places) for _ in layer.parameters()]
        for index, (p, mesh) in enumerate(zip(plain.parameters(), own)):
            ranks = mesh.mesh.flatten().tolist()
            p.grad = sum(each[rank][index] for rank in ranks) / len(ranks)
        close_gradients(model, plain)


def test_units_over_different_ranks(hosted):
    hosted(4, meshes)


# ---- Communication of a program's own, as torch's fully_shard calls it -----------------------------------------------


class Gather(AllGather):
    """calls: what it is asked for."""

    def __init__(self, calls):
        self.calls = calls

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls.append(("gather", output_tensor.numel()))
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Reduce(ReduceScatter):
    def __init__(self, calls):
        self.calls = calls

    allocate = Gather.allocate

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.calls.append(("reduce", input_tensor.numel()))
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group=group, async_op=async_op)


def communication(job):
    n, mine = job.size, slice(job.rank, None, job.size)
    x = [batch[0] for batch in batches(4)]
    plain = network()
    train(plain, job, alone=True)
    counts = []
    for fully_shard in (ours.fully_shard, theirs.fully_shard):
        calls, hooked = [], []
        model = sharded(fully_shard=fully_shard)
        model[1].set_custom_all_gather(Gather(calls))
        model[1].set_custom_reduce_scatter(Reduce(calls))
        model[2].set_all_reduce_hook(lambda t: hooked.append(t.numel()))
        train(model, job)
        close(model, plain)
        counts.append((calls, hooked))
    assert counts[0] == counts[1] and counts[0][0]
    # And the hook's changes count.
    model, plain = sharded(), network()
    for module in (*model, model):
        module.set_all_reduce_hook(lambda t: t.mul_(2))
    for m, rows in ((model, mine), (plain, slice(None))):
        m(x[0][rows]).square().sum().backward()
    close_gradients(model, plain, n / 2)
    # Gradients that wait for the last micro-batch: whole ones, and on a mesh of replicas this rank's part of them.
    square = [init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))] if n == 4 else []
    for method, mesh in (("set_requires_gradient_sync", None), *(("set_requires_all_reduce", mesh) for mesh in square)):
        model, plain, calls = sharded(mesh=mesh), network(), []
        model[1].set_custom_reduce_scatter(Reduce(calls))
        for i in range(3):
            getattr(model, method)(i == 2)
            model(x[i][mine]).square().sum().backward()
            plain(x[i]).square().sum().backward()
        close_gradients(model, plain, n)
        assert len(calls) == (1 if mesh is None else 3)


@pytest.mark.parametrize("n", [2, 4])
def test_communication_of_a_programs_own(hosted, n):
    hosted(n, communication)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
