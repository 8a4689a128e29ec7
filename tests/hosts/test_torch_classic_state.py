"""libfsdp.torch.FullyShardedDataParallel and ShardedGradScaler beside torch's own: whole parameters, state dicts, loss
scaling."""

import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from classic_programs import (
    FULL,
    GRAD_OP,
    HYBRID,
    NO,
    Net,
    WIDTH,
    WORDS,
    alone,
    batches,
    far,
    loss_of,
    original,
    ours,
    raises,
    together,
    train,
)
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

# ---- Whole parameters and state dicts --------------------------------------------------------------------------------


def summoning(job):
    """summon_full_params as torch's: names, values, what is written; apply."""
    rank, size = job.rank, job.size
    _, wanted = alone()
    for strategy in (FULL, GRAD_OP, NO):
        model, beside = ours(sharding_strategy=strategy), original(job, sharding_strategy=strategy)
        cls, other = type(model), theirs.FullyShardedDataParallel
        for options in (
            {},
            {"recurse": False},
            {"writeback": False, "rank0_only": True},
            {"writeback": False, "with_grads": True},
            {"writeback": False},
        ):
            x, y = batches(1)[0]
            for each in (model, beside):
                each.zero_grad()
                loss_of(each, x[rank::size], y[rank::size]).backward()
            with cls.summon_full_params(model, **options), other.summon_full_params(beside, **options):
                mine, its = dict(model.named_parameters()), dict(beside.named_parameters())
                assert [n for n, _ in model.named_buffers()] == [n for n, _ in beside.named_buffers()]
                assert list(mine) == list(its), options
                whole = strategy is NO or rank == 0 or "rank0_only" not in options
                for name, p in mine.items():
                    if not whole or (options.get("recurse") is False and "blocks" in name):
                        if strategy is not NO or rank > 0:
                            assert isinstance(p, DTensor)
                        continue
                    if not ("rank0_only" in options and rank > 0):
                        assert type(p) is nn.Parameter
                        torch.testing.assert_close(p, its[name])
                    if "with_grads" in options:
                        torch.testing.assert_close(p.grad, its[name].grad)
            assert all(isinstance(p, DTensor) for p in model.parameters())
        with cls.summon_full_params(model), torch.no_grad():
            model.words.weight.copy_(torch.arange(WORDS * WIDTH).view(WORDS, WIDTH) / 100)
            model.blocks[2].up.bias += 1
            inside = model.state_dict()
        after = model.state_dict()
        assert torch.equal(after["head.weight"], torch.arange(WORDS * WIDTH).view(WORDS, WIDTH) / 100)
        assert far(inside, after) == 0
        with cls.summon_full_params(model, writeback=False), torch.no_grad():
            model.words.weight.zero_()
        assert far(model.state_dict(), after) == 0
        # between forward and backward, after an evaluation, and gradients that are written
        with torch.no_grad():
            model(x)
        with cls.summon_full_params(model, with_grads=True), torch.no_grad():
            model.gain.fill_(2)
            model.blocks[0].up.weight.grad.fill_(3)
        assert model.gain.full_tensor() == 2 and torch.equal(
            model.blocks[0].up.weight.grad.full_tensor(), torch.full((2 * WIDTH + 3, WIDTH), 3.0)
        )
        with torch.no_grad():
            torch.testing.assert_close(model(x) / 2, plain_of(model)(x) / 2)

        # between forward and backward: backward computes with what was written, in units that stayed full too
        beside.load_state_dict(model.state_dict())
        for each, kind in ((model, cls), (beside, other)):
            each.zero_grad()
            loss = loss_of(each, x[rank::size], y[rank::size])
            with kind.summon_full_params(each), torch.no_grad():
                each.blocks[1].down.weight.mul_(3)
                each.words.weight.mul_(0.5)
            loss.backward()
        with cls.summon_full_params(model, with_grads=True), other.summon_full_params(beside, with_grads=True):
            its = dict(beside.named_parameters())
            for name, p in model.named_parameters():
                torch.testing.assert_close(p.grad, its[name].grad, rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}")

        def fill(module):
            if isinstance(module, nn.Linear) and module.bias is not None:
                assert module.bias.shape == (module.out_features,)
                module.bias.data.copy_(torch.arange(module.out_features))

        assert model.apply(fill) is model
        assert torch.equal(model.state_dict()["blocks.1.up.bias"], torch.arange(2 * WIDTH + 3.0))


def plain_of(model):
    net = Net()
    net.load_state_dict(model.state_dict())
    return net


def dicts(job):
    """Each type of state dict, saved and loaded between wrappers, plain modules and torch's own."""
    from libfsdp.torch import FullyShardedDataParallel as FSDP

    rank, size = job.rank, job.size
    for strategy in (FULL, GRAD_OP, NO, HYBRID):
        model = ours(sharding_strategy=strategy)
        first = model.state_dict()  # before any forward
        assert far(first, Net().state_dict()) == 0 and first["words.weight"] is first["head.weight"]
        train(model, rank, size, steps=3)
        full = model.state_dict()
        beside = original(job, sharding_strategy=FULL)
        beside.load_state_dict(full)
        assert far(beside.state_dict(), full) == 0
        assert [full._metadata[k] for k in full._metadata] == [v for v in Net().state_dict()._metadata.values()]
        assert list(full._metadata) == list(Net().state_dict()._metadata)
        kept = {name: value.clone() for name, value in full.items()}
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, theirs.FullStateDictConfig(True, True)):
            assert (far(model.state_dict(), full) == 0) if rank == 0 else (model.state_dict() == {})
        for kind, config in (
            (StateDictType.SHARDED_STATE_DICT, theirs.ShardedStateDictConfig()),
            (StateDictType.LOCAL_STATE_DICT, None),
            (StateDictType.FULL_STATE_DICT, None),
        ):
            with FSDP.state_dict_type(model, kind, config):
                assert FSDP.get_state_dict_type(model).state_dict_type is kind
                state = {name: value.clone() for name, value in model.state_dict().items()}
            assert list(state) == list(full)
            if kind is StateDictType.SHARDED_STATE_DICT:
                assert all(isinstance(v, DTensor) for v in state.values())
            if kind is StateDictType.LOCAL_STATE_DICT and strategy is FULL and rank == 0:
                assert state["blocks.0.up.weight"].shape == (-(-19 // size), WIDTH)
            for assign in (False, True):
                again = ours(sharding_strategy=strategy)
                if assign:
                    loss_of(again, *batches(1)[0]).backward()
                with FSDP.state_dict_type(again, kind, config):
                    again.load_state_dict(state, assign=assign)
                x = batches(1)[0][0]
                torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)
                assert far(again.state_dict(), full) == 0
        train(model, rank, size, steps=1)
        assert far(kept, full) == 0  # training went on, and what was saved stayed
        assert far(model.state_dict(), full) > 0
        # a sharded dict of another strategy, a wrapper in a module that is none, a part of a model
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            sharded = model.state_dict()
        other = ours(sharding_strategy=NO)
        other.load_state_dict(sharded, assign=True)
        assert far(other.state_dict(), model.state_dict()) == 0
        around = nn.ModuleDict({"net": model, "extra": nn.Linear(2, 2)})
        state = around.state_dict()
        assert list(state) == [*(f"net.{name}" for name in full), "extra.weight", "extra.bias"]
        around.load_state_dict(state)
        inside = {name[9:]: value for name, value in model.state_dict().items() if "blocks.1" in name}
        assert far(model.blocks[1].state_dict(), inside) == 0
    bad = dict(full)
    bad["stranger"] = bad.pop("gain")
    with raises(RuntimeError, 'Missing key(s) in state_dict: "gain"'):
        model.load_state_dict(bad)
    with raises(RuntimeError, 'Unexpected key(s) in state_dict: "stranger"'):
        model.load_state_dict(bad)
    result = model.load_state_dict({"blocks.1.up.what": full["gain"]}, strict=False)
    assert "blocks.1.up.weight" in result.missing_keys and result.unexpected_keys == ["blocks.1.up.what"]
    with raises(RuntimeError, "size mismatch"):
        model.load_state_dict(full | {"gain": torch.ones(2)})
    before = FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    assert before.state_dict_type is StateDictType.FULL_STATE_DICT
    FSDP.set_state_dict_type(model.blocks[0], StateDictType.LOCAL_STATE_DICT)
    with raises(AssertionError, "same state dict settings"):
        FSDP.get_state_dict_type(model)


def checkpoints(job):
    """torch's distributed checkpoint functions see the model's own names."""
    import torch.distributed.checkpoint.state_dict as dcp

    from libfsdp.torch import FullyShardedDataParallel as FSDP

    model = ours()
    full = dcp.get_model_state_dict(model, options=dcp.StateDictOptions(full_state_dict=True))
    assert far(full, model.state_dict()) == 0
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        sharded = dcp.get_model_state_dict(model)
    assert all(isinstance(value, DTensor) for value in sharded.values()) and list(sharded) == list(full)
    again = ours()
    dcp.set_model_state_dict(again, dict(full), options=dcp.StateDictOptions(full_state_dict=True))
    assert far(again.state_dict(), full) == 0




# ---- The grad scaler -------------------------------------------------------------------------------------------------


def scaling(job, bad_rank):
    """Case A17: what one rank's shard holds decides for all; a rank that owns no elements; several optimizers."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Original

    from libfsdp.torch import ShardedGradScaler

    rank, size = job.rank, job.size
    net = nn.Sequential(nn.Linear(3, size - 1), nn.Linear(size - 1, 2))  # the last rank owns nothing of the first
    model = ours(net, ModuleWrapPolicy({nn.Linear}))
    assert rank < size - 1 or model[0].weight.to_local().numel() == 0
    options = {"init_scale": 8.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}
    scaler, beside = ShardedGradScaler(**options), Original("cpu", **options)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in model.module]
    single = nn.Linear(2, 2)
    other = torch.optim.SGD(single.parameters(), lr=0.01)
    x = torch.arange(6.0).view(2, 3) / 7
    scales = []
    for step in range(7):
        before = model.state_dict()
        scaler.scale(model(x).pow(2).sum()).backward()
        beside.scale(single(x[:, :2]).sum()).backward()
        if step in (2, 3):
            if rank == bad_rank:
                grad = model[0].weight.grad.to_local()
                (grad if grad.numel() else model[1].weight.grad.to_local()).view(-1)[:1] = math.inf
            single.weight.grad.fill_(math.nan)
        scaler.unscale_(optimizers[0])
        if step == 0:
            plain = nn.Sequential(nn.Linear(3, size - 1), nn.Linear(size - 1, 2))
            plain.load_state_dict(before)
            plain(x).pow(2).sum().backward()
            torch.testing.assert_close(model[0].weight.grad.full_tensor(), plain[0].weight.grad)
            with raises(RuntimeError, "already been called"):
                scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        beside.step(other)
        other.zero_grad()
        scaler.update()
        beside.update()
        assert scaler.state_dict() == beside.state_dict(), (step, scaler.state_dict(), beside.state_dict())
        scales.append(scaler.get_scale())
        after = model.state_dict()
        name = "1.weight" if bad_rank == size - 1 else "0.weight"  # each optimizer skips by what its own gradients hold
        assert torch.equal(before[name], after[name]) == (step in (2, 3)), step
    assert scales == [8.0, 32.0, 8.0, 2.0, 2.0, 8.0, 8.0], scales
    every = [None] * size
    dist.all_gather_object(every, (scales, scaler.state_dict()), group=job.gloo)
    assert all(one == every[0] for one in every)
    again = ShardedGradScaler()
    again.load_state_dict(scaler.state_dict())
    assert again.scale(torch.tensor(1.0)) == 8 and again.scale([torch.ones(1), (torch.ones(1),)])[1][0] == 8
    off = ShardedGradScaler(enabled=False)
    assert off.scale(torch.tensor(3.0)) == 3 and off.get_scale() == 1


def two_ranks(job):
    together(job, ("summoning", "dicts", "checkpoints"), globals())
    scaling(job, 1)


def three_ranks(job):
    dicts(job)
    scaling(job, 0)


@pytest.mark.parametrize("n, worker", [(2, two_ranks), (3, three_ranks)])
def test_together(hosted, n, worker):
    hosted(n, worker, timeout=120)
