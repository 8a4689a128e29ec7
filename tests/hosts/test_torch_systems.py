"""torch's own systems on the backend "fsdp", unchanged: FSDP2, DDP, FSDP1, DTensor, tensor parallelism, distributed
checkpoints; each beside the same program on gloo, and beside one process with the whole batch where that says more."""

import os
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
import torch.distributed as dist
from torch import nn

WIDTH, BATCH, STEPS = 16, 12, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 3)  # does not divide evenly
        self.down = nn.Linear(2 * WIDTH + 3, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def network():
    torch.manual_seed(5)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))


def batches():
    generator = torch.Generator().manual_seed(9)
    return [
        (torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, 1, generator=generator))
        for _ in range(STEPS)
    ]


def train(model, rank, size, step=None):
    """The losses of `rank`'s part of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for x, y in batches():
        mine = slice(rank, None, size)
        loss = nn.functional.mse_loss(model(x[mine]).float(), y[mine])
        loss.backward()
        if step is not None:
            step()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def alone():
    """The parameters that one process with the whole batches comes to."""
    model = network()
    train(model, 0, 1)
    return dict(model.named_parameters())


def whole(model):
    return {
        name.replace("module.", ""): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for name, p in model.named_parameters()
    }


def close(got, wanted, tolerance=2e-5):
    assert got.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(got[name].float(), wanted[name].detach().float(), rtol=tolerance, atol=tolerance)


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------


def fsdp2(job):
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def run(mesh, policy=None, **options):
        model = network()
        for layer in model:
            fully_shard(layer, mesh=mesh, **({"mp_policy": policy} if policy else {}), **options)
        fully_shard(model, mesh=mesh, **({"mp_policy": policy} if policy else {}), **options)
        losses = train(model, job.rank, job.size, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e6))
        return losses, whole(model)

    ours = DeviceMesh.from_group(job.fsdp, "cpu")
    theirs = DeviceMesh.from_group(job.gloo, "cpu")
    wanted = alone()
    losses, parameters = run(ours)
    close(parameters, wanted)
    their_losses, their_parameters = run(theirs)
    close(parameters, their_parameters)
    torch.testing.assert_close(losses, their_losses, rtol=1e-5, atol=1e-5)
    close(run(ours, reshard_after_forward=False)[1], wanted)
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    close(run(ours, low)[1], run(theirs, low)[1], 1e-4)
    close(run(ours, MixedPrecisionPolicy(param_dtype=torch.bfloat16))[1], wanted, 0.05)
    if job.size == 4:
        close(run(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))[1], wanted)
    # A factor of one's own: torch then asks for PREMUL_SUM, which gloo does not have.
    model = network()
    fully_shard(model, mesh=ours)
    model.set_gradient_divide_factor(3.0)
    x, y = batches()[0]
    nn.functional.mse_loss(model(x), y).backward()
    plain = network()
    nn.functional.mse_loss(plain(x), y).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad * job.size / 3, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [2, 4])
def test_fsdp2_trains_as_one_process_and_as_on_gloo(hosted, n):
    hosted(n, fsdp2)


def fsdp1(job):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        model = FSDP(
            network(),
            process_group=job.fsdp,
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        train(model, job.rank, job.size)
        with FSDP.summon_full_params(model):
            got = {name.replace("_fsdp_wrapped_module.", ""): p.clone() for name, p in model.named_parameters()}
        close(got, alone())


def test_fsdp1_trains_as_one_process(hosted):
    hosted(2, fsdp1)


# ---- DDP -------------------------------------------------------------------------------------------------------------


class Partly(nn.Module):
    """Uses one of its layers on some ranks only."""

    def __init__(self):
        super().__init__()
        self.always = network()
        self.sometimes = nn.Linear(1, 1)
        self.use = False

    def forward(self, x):
        x = self.always(x)
        return self.sometimes(x) if self.use else x


def ddp(job):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel as DDP

    def run(group, hook=None, **options):
        model = DDP(network(), process_group=group, **options)
        if hook is not None:
            model.register_comm_hook(group, hook)
        losses = train(model, job.rank, job.size)
        return losses, whole(model)

    wanted = alone()
    for options in ({}, {"bucket_cap_mb": 0.001}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        losses, parameters = run(job.fsdp, **options)
        close(parameters, wanted)
        their_losses, their_parameters = run(job.gloo, **options)
        close(parameters, their_parameters)
        torch.testing.assert_close(losses, their_losses, rtol=1e-5, atol=1e-5)
    close(run(job.fsdp, default_hooks.allreduce_hook)[1], wanted)
    close(run(job.fsdp, default_hooks.bf16_compress_hook)[1], run(job.gloo, default_hooks.bf16_compress_hook)[1], 0.05)

    def partly(group):
        torch.manual_seed(1)
        model = DDP(Partly(), process_group=group, find_unused_parameters=True)
        model.module.use = job.rank == 0
        train(model, job.rank, job.size)
        return whole(model)

    close(partly(job.fsdp), partly(job.gloo))

    def uneven(group):
        model = DDP(network(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with model.join():
            for x, y in batches()[: 1 + job.rank % 3]:
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        return whole(model)

    close(uneven(job.fsdp), uneven(job.gloo))
    for group in (job.fsdp, job.gloo):  # accumulation
        model = DDP(network(), process_group=group)
        x, y = batches()[0]
        with model.no_sync():
            nn.functional.mse_loss(model(x), y).backward()
        nn.functional.mse_loss(model(x), y).backward()
        plain = network()
        (2 * nn.functional.mse_loss(plain(x), y)).backward()
        for p, q in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)


def hooks(job):
    """Hooks that change how gradients travel, buffers, and the parameters that rank 0 hands out."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel as DDP

    def run(group, register, model=None, **options):
        model = DDP(network() if model is None else model, process_group=group, **options)
        register(model, group)
        return train(model, job.rank, job.size), whole(model), dict(model.module.named_buffers())

    def same(register, exact=False, **options):
        losses, parameters, _ = run(job.fsdp, register, **options)
        their_losses, their_parameters, _ = run(job.gloo, register, **options)
        close(parameters, their_parameters, 1e-4)
        if exact:
            close(parameters, alone())

    def power(model, group):
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def local(model, group):
        state = post_localSGD_hook.PostLocalSGDState(group, group, start_localSGD_iter=2)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)

    def wrapped(model, group):
        model.register_comm_hook(group, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))

    same(power)
    same(power, static_graph=True)
    same(local, exact=True)
    close(run(job.fsdp, wrapped)[1], alone(), 0.05)

    # Buffers follow rank 0, and so do parameters at the start.
    def normal(group, **options):
        torch.manual_seed(job.rank)  # each rank's own values, until DDP is made
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))
        return run(group, lambda *_: None, model, **options)

    for options in ({}, {"broadcast_buffers": False}):
        losses, parameters, buffers = normal(job.fsdp, **options)
        their_losses, their_parameters, their_buffers = normal(job.gloo, **options)
        close(parameters, their_parameters)
        close(buffers, their_buffers)
    for p in parameters.values():
        total = p.clone()
        dist.all_reduce(total, dist.ReduceOp.MAX)
        assert torch.equal(total, p)
    # torch has BatchNorm over all ranks for accelerators only; it says so, whatever the backend.
    synchronous = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(WIDTH)), job.fsdp)
    try:
        synchronous(torch.randn(4, WIDTH))
    except ValueError as error:
        assert "SyncBatchNorm" in str(error)
    else:
        raise AssertionError("torch has it now: compare with one process")

    # Ranks with different numbers of batches, with buffers and with the error that torch raises on request.
    def uneven(group):
        model = DDP(network(), process_group=group)
        try:
            with model.join(throw_on_early_termination=True):
                for x, y in batches()[: 1 + job.rank]:
                    nn.functional.mse_loss(model(x), y).backward()
        except RuntimeError as error:
            return "exhausted" in str(error)
        return False

    assert uneven(job.fsdp) and uneven(job.gloo)


@pytest.mark.parametrize("n", [2, 4])
def test_ddp_trains_as_one_process_and_as_on_gloo(hosted, n):
    hosted(n, ddp)


def test_ddp_with_hooks_buffers_and_early_ends(hosted):
    hosted(2, hooks)


# ---- DTensor and what is built on it ---------------------------------------------------------------------------------


def dtensor(job):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    full = torch.arange(7 * 6 * 2, dtype=torch.float32).reshape(7, 6, 2)
    for group in (job.fsdp, job.gloo):
        mesh = DeviceMesh.from_group(group, "cpu")
        for source in (Shard(0), Shard(1), Replicate()):
            for target in (Shard(0), Shard(1), Shard(2), Replicate()):
                moved = distribute_tensor(full, mesh, [source]).redistribute(mesh, [target])
                assert torch.equal(moved.full_tensor(), full), (source, target)
                if isinstance(target, Shard):
                    parts = full.chunk(job.size, target.dim)
                    mine = parts[job.rank] if job.rank < len(parts) else full.narrow(target.dim, 0, 0)
                    assert torch.equal(moved.to_local(), mine)
        for target in (Shard(0), Shard(1), Replicate()):
            for op, value in (("sum", sum(range(1, job.size + 1))), ("max", job.size), ("avg", (job.size + 1) / 2)):
                if op == "avg" and group is job.gloo:
                    continue
                partial = DTensor.from_local(torch.full((8, 4), job.rank + 1.0), mesh, [Partial(op)])
                assert (partial.redistribute(mesh, [target]).full_tensor() == value).all(), (op, target)
        norm = nn.utils.get_total_norm([distribute_tensor(full, mesh, [Shard(0)])])
        torch.testing.assert_close(norm.full_tensor() if isinstance(norm, DTensor) else norm, full.norm())


def parallel(job):
    """Tensor parallelism, over the default group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plain, model = network(), network()
    for m in (plain, model):  # widths that divide
        for block in list(m)[:2]:
            torch.manual_seed(8)
            block.up, block.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    mesh = init_device_mesh("cpu", (job.size,))
    for block in list(model)[:2]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x, y = batches()[0]
    for m in (plain, model):
        nn.functional.mse_loss(m(x), y).backward()
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        torch.testing.assert_close(grad, q.grad, rtol=1e-4, atol=1e-5)


def functional(job):
    """Functional collectives, which reach the group from C++."""
    import torch.distributed._functional_collectives as funcol

    n, rank = job.size, job.rank
    t = torch.full((n, 2), rank + 1.0)
    total = float(sum(range(1, n + 1)))
    for group in (job.fsdp, job.gloo):
        assert (funcol.all_reduce(t, "sum", group) == total).all()
        assert torch.equal(funcol.all_gather_tensor(t[:1], 0, group)[:, 0], torch.arange(1.0, n + 1))
        assert (funcol.reduce_scatter_tensor(t, "sum", 0, group) == total).all()
        assert torch.equal(funcol.all_to_all_single(t, None, None, group)[:, 0], torch.arange(1.0, n + 1))
        assert (funcol.broadcast(t, n - 1, group) == n).all()
        for many in funcol.all_reduce_coalesced([t, t * 2], "sum", group):
            assert many[0, 0] in (total, 2 * total)
        one, two = funcol.all_gather_into_tensor_coalesced([t[:1], t[:1] + 10], group)
        assert torch.equal(one[:, 0], torch.arange(1.0, n + 1)) and torch.equal(two, one + 10)
        one, two = funcol.reduce_scatter_tensor_coalesced([t, t * 2], "sum", [0, 0], group)
        assert (one == total).all() and (two == 2 * total).all()
        pending = funcol.all_reduce(t, "sum", group)  # perhaps under way
        again = torch.zeros(n, 2).copy_(pending)
        assert (again == total).all()
    pending = funcol.all_reduce(t, "sum", job.fsdp)
    dist.all_reduce(pending)
    assert (t == rank + 1).all()


def systems(job):
    dtensor(job)
    parallel(job)
    functional(job)


@pytest.mark.parametrize("n", [2, 4])
def test_dtensor_tensor_parallelism_and_functional_collectives(hosted, n):
    hosted(n, systems)


def sharded(group):
    """A model and its optimizer, as FSDP2 shards them over a group."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = network()
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model, optimizer, batch):
    x, y = batches()[batch]
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def save(job, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = sharded(job.fsdp)
    step(model, optimizer, 0)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.save(states, checkpoint_id=os.path.join(folder, "default"))
    dcp.save(states, checkpoint_id=os.path.join(folder, "given"), process_group=job.fsdp)
    dcp.save(states, checkpoint_id=os.path.join(folder, "gloo"), process_group=job.gloo)
    # In the background, on threads of torch and with a group of its own: the training goes on.
    own = dist.new_group()
    pending = dcp.async_save(states, checkpoint_id=os.path.join(folder, "later"), process_group=own)
    t = torch.ones(3)
    for _ in range(50):
        dist.all_reduce(t, dist.ReduceOp.AVG)
    pending.result()
    assert t.tolist() == [1] * 3


def load(job, folder):
    """On any number of ranks: the parameters and the next step are those of one process that goes on."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    plain = network()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    step(plain, optimizer, 0)
    saved = {name: p.detach().clone() for name, p in plain.named_parameters()}
    step(plain, optimizer, 1)
    for name, options in (
        ("default", {}),
        ("given", {"process_group": job.fsdp}),
        ("gloo", {}),
        ("later", {"process_group": dist.new_group()}),
    ):
        model, optimizer = sharded(job.fsdp)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        dcp.load(states, checkpoint_id=os.path.join(folder, name), **options)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        close(whole(model), saved, 1e-6)
        step(model, optimizer, 1)
        close(whole(model), dict(plain.named_parameters()))


def test_a_checkpoint_of_two_ranks_is_loaded_on_four_and_on_one(hosted, tmp_path):
    hosted(2, save, str(tmp_path))
    for n in (4, 1):
        hosted(n, load, str(tmp_path))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
