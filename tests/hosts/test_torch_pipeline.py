"""Models that torch splits over ranks by layer (torch.distributed.pipelining), by width (tensor and sequence
parallelism), and by both width and shard (a mesh of two dimensions), on the backend "fsdp": beside the same program on
gloo, and one process with the whole model and batch."""

import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
import torch.distributed as dist
from torch import nn

WIDTH, BATCH, STEPS = 8, 16, 3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def network(layers):
    torch.manual_seed(3)
    return nn.Sequential(*[Layer() for _ in range(layers)])


def batches(*shape):
    generator = torch.Generator().manual_seed(4)
    shape = (BATCH, *shape, WIDTH)
    return [(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in range(STEPS)]


def alone(layers, data):
    """What one process comes to: the losses, the last gradients and the parameters."""
    model = network(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, grads = [], {}
    for x, y in data:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, grads, {name: p.detach() for name, p in model.named_parameters()}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def close(got, wanted):
    for name in got:
        torch.testing.assert_close(got[name].detach(), wanted[name], rtol=2e-5, atol=2e-5)


# ---- By layer --------------------------------------------------------------------------------------------------------


def pipeline(job):
    from torch.distributed import pipelining

    n = job.size
    data = batches()

    def run(group, kind, stages_per_rank):
        """The losses, where the last stage is, and this rank's parameters after training."""
        model = network(n * stages_per_rank)
        numbers = [job.rank + n * i for i in range(stages_per_rank)]
        parts = [model[number] for number in numbers]
        stages = [
            pipelining.PipelineStage(part, number, n * stages_per_rank, torch.device("cpu"), group=group)
            for part, number in zip(parts, numbers)
        ]
        schedule = kind(stages[0] if stages_per_rank == 1 else stages, 2 * n, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=0.01)
        means = []
        for x, y in data:
            losses = []
            inputs = (x,) if job.rank == 0 else ()
            if job.rank == n - 1:
                schedule.step(*inputs, target=y, losses=losses)
                means.append(torch.stack(losses).mean().item())
            else:
                schedule.step(*inputs)
            optimizer.step()
            optimizer.zero_grad()
        own = {f"{i}.{name}": p for i, part in zip(numbers, parts) for name, p in part.named_parameters()}
        return means, own

    for kind, count in (
        (pipelining.ScheduleGPipe, 1),
        (pipelining.Schedule1F1B, 1),
        (pipelining.ScheduleInterleaved1F1B, 2),
    ):
        wanted_losses, _, wanted = alone(n * count, data)
        losses, parameters = run(job.fsdp, kind, count)
        assert len(parameters) == 6 * count
        close(parameters, wanted)
        if job.rank == n - 1:
            torch.testing.assert_close(losses, wanted_losses, rtol=1e-5, atol=1e-6)
        their_losses, their_parameters = run(job.gloo, kind, count)
        assert losses == their_losses
        for name in parameters:
            assert torch.equal(parameters[name], their_parameters[name])


@pytest.mark.parametrize("n", [2, 4])
def test_pipelines_train_as_one_process_and_as_on_gloo(hosted, n):
    hosted(n, pipeline)


# ---- By width, and by shard ------------------------------------------------------------------------------------------


def split_by_width(model, mesh, sequence):
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    for layer in model:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:  # between the two, activations are shards of the sequence
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }
            parallelize_module(
                layer,
                mesh,
                PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=False),
            )
        parallelize_module(layer, mesh, plan)
    return model


def width(job):
    """Tensor and sequence parallelism, over one group."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    data = batches(4)
    losses, grads, _ = alone(2, data[:1])
    x, y = data[0]
    for group in (job.fsdp, job.gloo):
        mesh = DeviceMesh.from_group(group, "cpu")
        model = split_by_width(network(2), mesh, False)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        torch.testing.assert_close(loss.item(), losses[0], rtol=1e-5, atol=1e-6)
        close({name: whole(p.grad) for name, p in model.named_parameters()}, grads)

        model = split_by_width(network(2), mesh, True)
        parts = distribute_tensor(x, mesh, [Shard(1)])
        loss = nn.functional.mse_loss(model(parts).full_tensor(), y)
        loss.backward()
        torch.testing.assert_close(loss.item(), losses[0], rtol=1e-5, atol=1e-6)
        close({name: whole(p.grad) for name, p in model.named_parameters()}, grads)


@pytest.mark.parametrize("n", [2, 4])
def test_tensor_and_sequence_parallelism_as_one_process(hosted, n):
    hosted(n, width)


def grid(job):
    """Tensor parallelism within rows of a mesh, FSDP2 across them; a row has one part of the batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    data = batches(4)
    losses, _, wanted = alone(2, data)

    def run(mesh):
        model = split_by_width(network(2), mesh["tensor"], False)
        for layer in model:
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        got = []
        mine = slice(mesh["shard"].get_local_rank(), None, 2)
        for x, y in data:
            loss = nn.functional.mse_loss(model(x[mine]), y[mine])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = loss.detach().clone()
            dist.all_reduce(loss, group=mesh["shard"].get_group())
            got.append(loss.item() / 2)
        return got, {name: whole(p) for name, p in model.named_parameters()}

    names = ("shard", "tensor")
    ours = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override={name: "gloo" for name in names})
    assert dist.get_backend(ours["shard"].get_group()) == "fsdp"
    assert dist.get_backend(theirs["shard"].get_group()) == "gloo"
    got, parameters = run(ours)
    close(parameters, wanted)
    torch.testing.assert_close(got, losses, rtol=1e-5, atol=1e-6)
    their_got, their_parameters = run(theirs)
    close(parameters, their_parameters)


def test_tensor_parallelism_with_fsdp2_on_a_2_by_2_mesh(hosted):
    hosted(4, grid)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
