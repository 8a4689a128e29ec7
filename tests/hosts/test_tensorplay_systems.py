"""TensorPlay's own DDP and fully_shard on the backend "fsdp": the same training as on gloo, and as one process with the
whole batch. What TensorPlay itself gets wrong on gloo is left out: fully_shard of 1.0, DDP's gradient_as_bucket_view
with more than one bucket."""

import sys

import pytest

tp = pytest.importorskip(
    "tensorplay", reason="TensorPlay is not installed here; ci/test tensorplay makes a venv that has it"
)
import numpy as np
import tensorplay.distributed as dist
from tensorplay import nn
from tensorplay.nn.parallel.distributed import DistributedDataParallel  # nn.parallel has None in builds without NCCL

RANK = "tensorplay_rank.py"
ROWS = 4  # of the batch, for each rank


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.last(self.middle(self.first(x).tanh()).tanh())


def net():
    tp.manual_seed(0)
    return Net()


def batch(n, step):
    random = np.random.default_rng(step)
    return [tp.from_numpy(random.normal(size=(ROWS * n, width)).astype("float32")) for width in (7, 3)]


def train(model, n, rank=None, accumulate=None):
    """The losses of four steps with this rank's part of each batch, or with all of it."""
    parameters = [p for name, p in model.named_parameters() if "unused" not in name]
    optimizer, losses = tp.optim.AdamW(parameters, lr=0.05), []
    for step in range(4):
        x, y = batch(n, step)
        if rank is not None:
            x, y = x[ROWS * rank : ROWS * (rank + 1)], y[ROWS * rank : ROWS * (rank + 1)]
        if accumulate is not None:
            accumulate(model, x, y)
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values(model):
    return [p.detach().to(tp.float32).numpy().copy() for p in model.parameters()]


def same(first, second, tolerance):
    for one, other in zip(first, second, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def alone(n, **options):
    model = net()
    train(model, n, **options)
    return values(model)


# ---- DDP -------------------------------------------------------------------------------------------------------------


def ddp(job):
    import libfsdp.tensorplay

    n, rank = job.size, job.rank
    own = libfsdp.tensorplay.ProcessGroup()

    def no_sync(model, x, y):  # the same part again, whose gradients are not sent
        with model.no_sync():
            ((model(x) - y) ** 2).mean().backward()

    def again(model, x, y):
        ((model(x) - y) ** 2).mean().backward()

    def half(state, bucket):
        buffer = bucket.buffer()
        dist.all_reduce(buffer, dist.ReduceOp.AVG, group=state)
        return buffer

    for options, accumulate in (
        ({"find_unused_parameters": True}, None),
        ({"find_unused_parameters": True, "bucket_cap_mb": 0.0001}, None),
        ({"find_unused_parameters": True}, no_sync),
        ({"find_unused_parameters": True, "hook": half}, None),
    ):
        hook = options.pop("hook", None)
        results, losses = [], []
        for group in (job.fsdp, job.gloo, own):
            model = net()
            wrapped = DistributedDataParallel(model, process_group=group, **options)
            if hook is not None:
                wrapped.register_comm_hook(group, hook)
            losses.append(train(wrapped, n, rank, accumulate))
            results.append(values(model))
        exact = 0 if n == 2 else 1e-6  # gloo adds in another order
        same(results[0], results[1], exact)
        same(results[0], results[2], 0)
        same(results[0], alone(n, accumulate=accumulate and again), 2e-6)
        assert np.isfinite(losses).all()
    # Weights, and in each forward pass the buffers, of rank 0 are everybody's.
    tp.manual_seed(rank)
    model = nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4))
    wrapped = DistributedDataParallel(model, process_group=job.fsdp)
    for _ in range(2):
        wrapped(batch(n, rank)[0]).sum().backward()
    with tp.no_grad():
        wrapped.eval()(batch(n, 0)[0])
    everything = [None] * n
    dist.all_gather_object(everything, values(model))
    same(everything[0], everything[-1], 0)


@pytest.mark.parametrize("n", [2, 3])
def test_ddp_trains_as_on_gloo_and_as_one_process(hosted, n):
    hosted(n, ddp)


# ---- fully_shard -----------------------------------------------------------------------------------------------------


def sharded(group_or_mesh, **options):
    from tensorplay.distributed.device_mesh import DeviceMesh
    from tensorplay.distributed.fsdp import fully_shard

    mesh = group_or_mesh
    if isinstance(mesh, dist.ProcessGroup):
        mesh = DeviceMesh.from_group(mesh, "cpu")
    model = net()
    del model.unused
    for layer in (model.first, model.middle, model.last):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def whole(model, group):
    """The full parameters, of the shards on a group's ranks."""
    parts = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, values(model), group=group)
    return [np.concatenate(shards) for shards in zip(*parts)]


def fsdp(job):
    from tensorplay.distributed.fsdp import MixedPrecisionPolicy

    import libfsdp.tensorplay

    n, rank = job.size, job.rank
    own = libfsdp.tensorplay.ProcessGroup()
    expected = alone(n)[:6]

    def unsynced(model, x, y):
        model.set_requires_gradient_sync(False)
        ((model(x) - y) ** 2).mean().backward()
        model.set_requires_gradient_sync(True)

    def again(model, x, y):
        ((model(x) - y) ** 2).mean().backward()

    bf16 = MixedPrecisionPolicy(param_dtype=tp.bfloat16, reduce_dtype=tp.float32)
    for options, accumulate, wanted, tolerance in (
        ({}, None, expected, 2e-6),
        ({"reshard_after_forward": False}, None, expected, 2e-6),
        ({"mp_policy": bf16}, None, expected, 0.1),
        ({}, unsynced, alone(n, accumulate=again)[:6], 2e-6),
    ):
        results = []
        for group in (job.fsdp, job.gloo, own):
            model = sharded(group, **options)
            train(model, n, rank, accumulate)
            results.append(whole(model, group))
        same(results[0], results[1], 0 if n == 2 else 1e-6)
        same(results[0], results[2], 0)
        same(results[0], wanted, tolerance)


def hybrid(job):
    from tensorplay.distributed.device_mesh import init_device_mesh

    n, rank = job.size, job.rank
    mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("replicate", "shard"))
    assert dist.get_backend(mesh.get_group("shard")) == "fsdp"
    model = sharded(mesh)
    train(model, n, rank)
    same(whole(model, mesh.get_group("shard")), alone(n)[:6], 2e-6)


needs_1_1 = pytest.mark.skipif(
    tp.__version__ < "1.1", reason="fully_shard of TensorPlay 1.0 does not train, on gloo either"
)


@needs_1_1
@pytest.mark.parametrize("n", [2, 3])
def test_fully_shard_trains_as_on_gloo_and_as_one_process(hosted, n):
    hosted(n, fsdp)


@needs_1_1
def test_fully_shard_on_a_mesh_of_two_dimensions(hosted):
    hosted(4, hybrid)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
