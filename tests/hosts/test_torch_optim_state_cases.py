"""Optimizer state of libfsdp.torch.FullyShardedDataParallel in torch's checkpoint functions, above tensor parallelism
and in named optimizers; what others got wrong: ranks without data, states that are missing, buffers' dtypes."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dsd
from classic_programs import FULL, NO, WIDTH, Block, Net, batches, loss_of, ours
from optim_state_programs import adam, go, named_state, on_all, same, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, StateDictType
from torch.distributed.tensor import DTensor

from libfsdp.torch import FullyShardedDataParallel as FSDP

WHOLE = dsd.StateDictOptions(full_state_dict=True)
SPREAD = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


# ---- torch's checkpoint functions ------------------------------------------------------------------------------------


def checkpoint_functions(job):
    """get_state_dict and the others give clean names, and load."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    rank, size = job.rank, job.size
    for strategy in (FULL, NO):
        model = ours(sharding_strategy=strategy)
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Linear))
        optimizer = adam(model)
        go(model, optimizer, rank, size, 0, 3)
        wanted = FSDP.optim_state_dict(model, optimizer)
        names = list(Net().state_dict())
        state, entries = dsd.get_state_dict(model, optimizer, options=WHOLE)
        assert list(state) == names and not any("wrapped" in name for name in entries["state"])
        same(entries["state"], wanted["state"])
        sharded = dsd.get_optimizer_state_dict(model, optimizer)
        same(whole(sharded["state"]), wanted["state"])
        for group, other in zip(sharded["param_groups"], wanted["param_groups"]):
            assert group == other
        options = dsd.StateDictOptions(flatten_optimizer_state_dict=True)
        flat = dsd.get_optimizer_state_dict(model, optimizer, options=options)
        assert "state.blocks.1.up.weight.exp_avg" in flat
        state, entries = copy.deepcopy(dsd.get_state_dict(model, optimizer, options=WHOLE))  # its steps are live
        further = go(model, optimizer, rank, size, 3, 6)
        for options in (WHOLE, SPREAD):
            again = ours(sharding_strategy=strategy, policy=None)
            other = adam(again)
            mine = (dict(state), copy.deepcopy(entries)) if options is WHOLE or rank == 0 else ({}, {})
            dsd.set_model_state_dict(again, mine[0], options=options)
            dsd.set_optimizer_state_dict(again, other, mine[1], options=options)
            got = go(again, other, rank, size, 3, 6)
            assert got == further, (strategy, options, got, further)


# ---- Cases of others ------------------------------------------------------------------------------------------------


class Six(nn.Module):
    """Six elements on four ranks: the last has none."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.tensor([3.0]))
        self.weight = nn.Parameter(torch.arange(1.0, 7.0))

    def forward(self, x):
        return (x * self.weight).sum() * self.first


def chunks(job, path):
    """A13: shards of which some ranks own nothing load at every number of ranks."""
    model = FSDP(Six())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.arange(6.0) + step).backward()
        optimizer.step()
        optimizer.zero_grad()
    full = FSDP.optim_state_dict(model, optimizer)
    state, entries = dsd.get_state_dict(model, optimizer)
    if job.size == 4:
        assert [v.to_local().numel() for v in [entries["state"]["weight"]["exp_avg"]]] == [0 if job.rank == 3 else 2]
    sharded = FSDP.sharded_optim_state_dict(model, optimizer)
    optimizer.load_state_dict(FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer))
    same(FSDP.optim_state_dict(model, optimizer)["state"], full["state"])
    dcp.save({"model": state, "optimizer": entries}, checkpoint_id=f"{path}.six")
    if job.rank == 0:
        torch.save(full, f"{path}.six.full")


def chunks_again(job, path):
    full = torch.load(f"{path}.six.full", weights_only=True)
    model = FSDP(Six())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state, entries = dsd.get_state_dict(model, optimizer)
    shards = {"model": state, "optimizer": entries}
    dcp.load(shards, checkpoint_id=f"{path}.six")
    dsd.set_state_dict(model, optimizer, model_state_dict=shards["model"], optim_state_dict=shards["optimizer"])
    same(FSDP.optim_state_dict(model, optimizer)["state"], full["state"])
    other = torch.optim.AdamW(reversed(list(model.parameters())), lr=1.0)
    other.load_state_dict(FSDP.shard_full_optim_state_dict(full, model, optim=other))
    same(FSDP.optim_state_dict(model, other)["state"], full["state"])


def nothing(job):
    """A14: ranks without data, and without a state for it; SGD that has none."""
    rank, size = job.rank, job.size
    model = FSDP(Six())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.arange(6.0)).backward()
    optimizer.step()
    full = FSDP.optim_state_dict(model, optimizer)
    assert full["state"]["weight"]["step"] == 1 and full["state"]["weight"]["exp_avg"].abs().max() > 0
    for parameter in model.parameters():
        if parameter.to_local().numel() == 0:
            del optimizer.state[parameter]
    again = FSDP.optim_state_dict(model, optimizer)
    same(again["state"], full["state"])
    assert again["param_groups"] == full["param_groups"]
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FSDP.state_dict_type(model, kind):
            entries = FSDP.optim_state_dict(model, optimizer)
            keys = on_all(job, {name: list(state) for name, state in entries["state"].items()})
            assert all(one == {n: ["step", "exp_avg", "exp_avg_sq"] for n in ("first", "weight")} for one in keys), keys
            same(whole(entries["state"]), full["state"])
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, entries))
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        local = model.state_dict()
        assert local["first"].shape == ((1,) if rank == 0 else (0,))
        entries = FSDP.optim_state_dict(model, optimizer)
        assert entries["state"]["first"]["exp_avg"].shape == local["first"].shape
    # only one of the parameters has been used
    model = FSDP(Six())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.arange(6.0)).backward()
    model.first.grad = None
    optimizer.step()
    assert list(FSDP.optim_state_dict(model, optimizer)["state"]) == ["weight"]
    for momentum, keys in ((0.0, []), (0.9, ["momentum_buffer"])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        model(torch.arange(6.0)).backward()
        optimizer.step()
        full = FSDP.optim_state_dict(model, optimizer)
        plain = Six()
        beside = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=momentum)
        plain(torch.arange(6.0)).backward()
        beside.step()
        assert {n: list(s) for n, s in full["state"].items()} == {
            n: list(s) for n, s in named_state(plain, beside).items()
        }
        assert all(list(state) == keys for state in full["state"].values())
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, full))
        again = FSDP.optim_state_dict(model, optimizer)
        assert again["param_groups"] == full["param_groups"] and set(again["state"]) == set(full["state"])


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 8.0))
        self.register_buffer("mean", torch.tensor([1.0009765625, 2.5]))  # which bf16 can't hold
        self.register_buffer("exact", torch.tensor([0.1, 0.2], dtype=torch.float64))
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x):
        return (x * self.weight * self.mask.sum()).sum() + (self.mean.sum() + self.scratch.sum()).float()


def buffers(job):
    """A15: buffers are saved in their own dtypes, and the live ones stay as they are."""
    for strategy in (FULL, NO):
        precision = MixedPrecision(buffer_dtype=torch.bfloat16)
        model = FSDP(Buffered(), sharding_strategy=strategy, mixed_precision=precision)
        model(torch.ones(7)).backward()
        live = {name: (value.dtype, value.clone()) for name, value in model.named_buffers()}
        assert live["_fsdp_wrapped_module.mean"][0] == live["_fsdp_wrapped_module.scratch"][0] == torch.bfloat16
        for kind in StateDictType:
            with FSDP.state_dict_type(model, kind):
                state = model.state_dict()
            assert list(state) == ["weight", "mean", "exact", "count", "mask"]
            wanted = {"mean": torch.float32, "exact": torch.float64, "count": torch.int64, "mask": torch.bool}
            assert {name: state[name].dtype for name in wanted} == wanted
            assert state["count"] == 2**40 + 1 and state["mask"].tolist() == [True, False]
            assert torch.equal(state["mean"], torch.tensor([1.0, 2.5]))  # as the live one is
            after = {name: (value.dtype, value) for name, value in model.named_buffers()}
            assert all(after[n][0] == d and torch.equal(after[n][1], v) for n, (d, v) in live.items())


def named_optimizers(job):
    """Optimizers whose state is keyed by names."""
    from torch.distributed.optim import _NamedOptimizer

    model = ours()
    raw = list(model.named_parameters())
    optimizer = _NamedOptimizer(raw, torch.optim.AdamW, module=model, lr=0.01)
    x, y = batches(1)[0]
    loss_of(model, x[job.rank :: job.size], y[job.rank :: job.size]).backward()
    optimizer.step()
    own = optimizer.state_dict()
    full = FSDP.optim_state_dict(model, optimizer)
    assert set(full["state"]) == {name.replace("_fsdp_wrapped_module.", "") for name, _ in raw}
    loaded = FSDP.optim_state_dict_to_load(model, optimizer, full, is_named_optimizer=True)
    assert set(loaded["state"]) == set(own["state"]) == {name for name, _ in raw}
    same(whole(loaded["state"]), whole(own["state"]))


def tensor_parallel(job):
    """Parameters that are DTensors over other ranks below the wrapper, sharded and not."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def block():
        torch.manual_seed(3)
        return Block()

    def optimize(model):
        return torch.optim.AdamW(model.parameters(), lr=0.05)

    def steps(model, optimizer, row, rows, first, last):
        generator = torch.Generator().manual_seed(4)
        data = [torch.randn(8, WIDTH, generator=generator) for _ in range(last)]
        losses = []
        for x in data[first:]:
            loss = model(x[row::rows]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain = block()
    plain.up = nn.Linear(WIDTH, 2 * WIDTH)
    plain.down = nn.Linear(2 * WIDTH, WIDTH)
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    plain_optimizer = optimize(plain)
    steps(plain, plain_optimizer, 0, 1, 0, 3)

    def model_of(strategy):
        net = block()
        net.up, net.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        net.load_state_dict(start)
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return FSDP(net, device_mesh=mesh["dp"], sharding_strategy=strategy)

    for strategy in (FULL, NO):
        model = model_of(strategy)
        optimizer = optimize(model)
        steps(model, optimizer, mesh.get_local_rank("dp"), 2, 0, 3)
        full, state = FSDP.optim_state_dict(model, optimizer), model.state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)
        same(full["state"], named_state(plain, plain_optimizer), 1e-6)
        same(dsd.get_optimizer_state_dict(model, optimizer, options=WHOLE)["state"], full["state"])
        further = steps(model, optimizer, mesh.get_local_rank("dp"), 2, 3, 5)
        again = model_of(strategy)
        other = optimize(again)
        again.load_state_dict(state)
        other.load_state_dict(FSDP.optim_state_dict_to_load(again, other, full))
        assert steps(again, other, mesh.get_local_rank("dp"), 2, 3, 5) == further


def two(job):
    checkpoint_functions(job)
    named_optimizers(job)
    buffers(job)
    nothing(job)


def four(job):
    tensor_parallel(job)
    nothing(job)


@pytest.mark.parametrize("n, worker", [(1, nothing), (2, two), (4, four)])
def test_programs(hosted, n, worker):
    hosted(n, worker)


def test_chunks_of_nothing(hosted, tmp_path):
    path = str(tmp_path / "chunks")
    hosted(4, chunks, path)
    for n in (1, 2, 3, 4, 5):
        hosted(n, chunks_again, path)
