"""Optimizer state of libfsdp.torch.FullyShardedDataParallel beside torch's own and beside one process: the forms and
functions of the classic API, loaded with another wrapping or another number of ranks."""

import ctypes
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dsd
import torch.distributed.fsdp as theirs
from classic_programs import FULL, GRAD_OP, HYBRID, NO, WIDTH, Block, Net, original, ours, raises, same_error
from memory import measured
from optim_state_programs import adam, alone, cloned, full_type, go, named_state, on_all, same, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, OptimStateKeyType, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from libfsdp.torch import FullyShardedDataParallel as FSDP

Their = theirs.FullyShardedDataParallel


# ---- Beside torch's own ----------------------------------------------------------------------------------------------


def forms(job):
    """Full, sharded and local, of each strategy; what torch's own gives, and one process."""
    rank, size = job.rank, job.size
    plain, plain_optimizer = alone(3)
    wanted = named_state(plain, plain_optimizer)
    for strategy in {1: (FULL, NO), 2: (FULL, GRAD_OP, NO, HYBRID), 4: (FULL, HYBRID)}[size]:
        options = {"sharding_strategy": strategy}
        if strategy is HYBRID and size == 4:
            options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = ours(**options)
        optimizer = adam(model)
        assert FSDP.optim_state_dict(model, optimizer)["state"] == {}
        go(model, optimizer, rank, size, 0, 3)
        full = FSDP.optim_state_dict(model, optimizer)
        same(full["state"], wanted, 1e-6)
        if strategy is not HYBRID:
            beside = original(job, sharding_strategy=strategy)
            its_optimizer = adam(beside)
            go(beside, its_optimizer, rank, size, 0, 3)
            with full_type(Their, beside, offload_to_cpu=False):  # with True its tensors overwrite each other on a CPU
                its = Their.optim_state_dict(beside, its_optimizer)
            if size > 1:  # it drops the step of a parameter without elements
                its["state"]["nothing"].setdefault("step", torch.tensor(3.0))
            same(full["state"], its["state"], 1e-6)
            assert full["param_groups"] == its["param_groups"]
        with full_type(FSDP, model, rank0_only=True):
            some = FSDP.optim_state_dict(model, optimizer)
            assert (same(some["state"], full["state"]) is None) if rank == 0 else some == {}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            legacy = FSDP.full_optim_state_dict(model, optimizer)
            sharded = FSDP.sharded_optim_state_dict(model, optimizer)
        assert [(w.category, w.filename) for w in said] == [(FutureWarning, __file__)] * 2, [str(w) for w in said]
        assert (same(legacy["state"], full["state"]) is None) if rank == 0 else legacy == {}
        assert all(isinstance(state["exp_avg"], DTensor) for state in sharded["state"].values())
        same(whole(sharded["state"]), full["state"])
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            local = FSDP.optim_state_dict(model, optimizer)
            shapes = {name: value.shape for name, value in model.state_dict().items()}
        for name, state in local["state"].items():
            assert type(state["exp_avg"]) is torch.Tensor and state["exp_avg"].shape == shapes[name]
        if strategy is FULL and rank == size - 1 > 0:
            assert shapes["gain"] == (0,) and local["state"]["gain"]["exp_avg_sq"].shape == (0,)
        keys = on_all(job, [{n: list(s) for n, s in each["state"].items()} for each in (full, sharded, local)])
        assert all(one == keys[0] for one in keys)

        # each form loads, into groups of another order, and training goes on
        at = {name: value.clone() for name, value in model.state_dict().items()}
        kept, local = cloned(sharded), cloned(local)
        further = go(model, optimizer, rank, size, 3, 6)
        for entries, kind, config in (
            (full, StateDictType.FULL_STATE_DICT, FullOptimStateDictConfig()),
            (full if rank == 0 else {}, StateDictType.FULL_STATE_DICT, FullOptimStateDictConfig(rank0_only=True)),
            (kept, StateDictType.SHARDED_STATE_DICT, None),
            (local, StateDictType.LOCAL_STATE_DICT, None),
        ):
            again = ours(policy=None, **options)
            other = adam(again, reverse=False, lr=5.0)
            again.load_state_dict(at)
            with FSDP.state_dict_type(again, kind, optim_state_dict_config=config):
                loaded = FSDP.optim_state_dict_to_load(again, other, entries, load_directly=True)
            assert [group["lr"] for group in other.param_groups] == [0.01, 0.02]
            assert sorted(loaded["state"]) == list(range(len(full["state"])))
            got = go(again, other, rank, size, 3, 6)
            assert got == further, (strategy, kind, got, further)
        same(FSDP.optim_state_dict(again, other)["state"], FSDP.optim_state_dict(model, optimizer)["state"])


def legacy(job):
    """shard_, scatter_, flatten_ and rekey_, with optimizers or what they were built from."""
    warnings.simplefilter("ignore")
    rank, size = job.rank, job.size
    plain, plain_optimizer = alone(3, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01))
    model, beside = ours(), original(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    go(model, optimizer, rank, size, 0, 3)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    sharded = FSDP.sharded_optim_state_dict(model, optimizer)
    own = optimizer.state_dict()
    for loaded in (
        FSDP.shard_full_optim_state_dict(full, model, optim=optimizer),
        FSDP.shard_full_optim_state_dict(full, model),
        FSDP.shard_full_optim_state_dict(full, model, optim_input=list(model.parameters())),
        FSDP.shard_full_optim_state_dict(full, model, optim_input=[{"params": list(model.parameters())}]),
        FSDP.scatter_full_optim_state_dict(full if rank == 0 else None, model, optim=optimizer),
        FSDP.scatter_full_optim_state_dict(full if rank == 0 else None, model, optim=optimizer, group=job.gloo),
        FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer),
    ):
        assert loaded["param_groups"] == own["param_groups"]
        same(whole(loaded["state"]), whole(own["state"]))
        for number, state in loaded["state"].items():
            assert state["exp_avg"].placements == own["state"][number]["exp_avg"].placements
    for state in loaded["state"].values():
        state["exp_avg"].add_(1)  # what is loaded is memory of its own
    same(FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"], full["state"])
    # a list that the optimizer was built from, in another order
    parameters = list(model.parameters())[::-1]
    loaded = FSDP.shard_full_optim_state_dict(full, model, optim_input=parameters)
    torch.optim.AdamW(parameters).load_state_dict(loaded)
    assert loaded["state"][len(parameters) - 1]["exp_avg"].shape == parameters[-1].shape

    # keys by number are those of an optimizer of the plain model, and of torch's own
    for kind in (OptimStateKeyType.PARAM_ID, OptimStateKeyType.PARAM_NAME):
        for entries in (full, plain_optimizer.state_dict()):
            for options in ({"optim": plain_optimizer}, {}):
                one = FSDP.rekey_optim_state_dict(entries, kind, plain, **options)
                other = Their.rekey_optim_state_dict(entries, kind, plain, **options)
                same(one["state"], other["state"])
                assert one["param_groups"] == other["param_groups"]
    by_number = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, plain, optim=plain_optimizer)
    plain_optimizer.load_state_dict(by_number)
    same(named_state(plain, plain_optimizer), full["state"])
    by_name = FSDP.rekey_optim_state_dict(plain_optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, plain)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, by_name))
    assert FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_NAME, plain) is full
    net, first = alone(2)  # groups in another order
    by_name = FSDP.rekey_optim_state_dict(first.state_dict(), OptimStateKeyType.PARAM_NAME, net, optim=first)
    second = adam(net, reverse=False, lr=4.0)
    second.load_state_dict(FSDP.rekey_optim_state_dict(by_name, OptimStateKeyType.PARAM_ID, net, optim=second))
    same(named_state(net, second), named_state(net, first))
    assert [group["lr"] for group in second.param_groups] == [0.01, 0.02]

    its = torch.optim.AdamW(beside.parameters(), lr=0.01)
    for ours_call, theirs_call in (
        (
            lambda: FSDP.rekey_optim_state_dict(full, 3, plain),
            lambda: Their.rekey_optim_state_dict(full, 3, plain),
        ),
        (
            lambda: FSDP.rekey_optim_state_dict({"state": {0: {}, "gain": {}}}, OptimStateKeyType.PARAM_ID, plain),
            lambda: Their.rekey_optim_state_dict({"state": {0: {}, "gain": {}}}, OptimStateKeyType.PARAM_ID, plain),
        ),
        (
            lambda: FSDP.optim_state_dict_to_load(model, optimizer, {"oh": 1}),
            lambda: Their.optim_state_dict_to_load(beside, its, {"oh": 1}),
        ),
        (
            lambda: FSDP.optim_state_dict_to_load(model, optimizer, renamed(full, "gain", "stranger")),
            lambda: Their.optim_state_dict_to_load(beside, its, renamed(full, "gain", "stranger")),
        ),
        (
            lambda: FSDP.shard_full_optim_state_dict(full, model, optim_input=3),
            lambda: Their.shard_full_optim_state_dict(full, beside, optim_input=3),
        ),
        (
            lambda: FSDP.shard_full_optim_state_dict(full, model, optim_input=[]),
            lambda: Their.shard_full_optim_state_dict(full, beside, optim_input=[]),
        ),
    ):
        same_error(ours_call, theirs_call)


def renamed(full, old, new):
    return {
        "state": {new if name == old else name: state for name, state in full["state"].items()},
        "param_groups": [
            group | {"params": [new if name == old else name for name in group["params"]]}
            for group in full["param_groups"]
        ],
    }


def load_into(model, optimizer, full):
    return FSDP.optim_state_dict_to_load(model, optimizer, full)["state"][0]


def changed(full, name, key, value):
    return full | {"state": full["state"] | {name: full["state"][name] | {key: value}}}


def misuse(job):
    """What is wrong is named."""
    rank, size = job.rank, job.size
    model = ours()
    optimizer = adam(model)
    go(model, optimizer, rank, size, 0, 1)
    full = FSDP.optim_state_dict(model, optimizer)
    load = lambda entries: FSDP.optim_state_dict_to_load(model, optimizer, entries)  # noqa: E731
    with raises(KeyError, "parameter 'stranger', which the model has not"):
        load(renamed(full, "blocks.1.up.bias", "stranger"))
    with raises(KeyError, "a state of parameter 'stranger', which the model has not"):
        load(full | {"state": full["state"] | {"stranger": full["state"]["gain"]}})
    with raises(KeyError, "lacks parameter 'blocks.0.norm.bias', of the optimizer's group 1"):
        load(full | {"param_groups": full["param_groups"][:1]})
    rows = -(-19 // size) if rank < size - 1 else 19 - (size - 1) * -(-19 // size)
    text = f"a tensor of shape (18, 8), but the whole parameter has shape (19, 8) and this rank's shard ({rows}, 8)"
    with raises(ValueError, text):
        load(changed(full, "blocks.0.up.weight", "exp_avg", torch.zeros(18, WIDTH)))
    with raises(ValueError, "state 'exp_avg_sq' of parameter 'blocks.2.norm.weight'"):
        load(changed(full, "blocks.2.norm.weight", "exp_avg_sq", torch.zeros(WIDTH - 1)))
    with raises(ValueError, "rekey_optim_state_dict"):
        load(optimizer.state_dict())
    with raises(ValueError, "differ in 'lr'"):
        FSDP.optim_state_dict_to_load(model, torch.optim.AdamW(model.parameters()), full)
    with raises(ValueError, "no FullyShardedDataParallel inside"):
        FSDP.optim_state_dict(Net(), optimizer)
    stale = torch.optim.AdamW(Net().parameters())
    with raises(KeyError, "none of the model's"):
        FSDP.optim_state_dict(model, stale)
    with raises(KeyError, "which the optimizer has not"):
        FSDP.rekey_optim_state_dict({"state": {99: {}}, "param_groups": []}, OptimStateKeyType.PARAM_NAME, model)
    if size > 1:
        with full_type(FSDP, model, rank0_only=True), raises(ValueError, "only the first rank"):
            load(changed(full, "gain", "exp_avg", model.gain.detach()))
        with full_type(FSDP, model, rank0_only=True), raises(ValueError, '"state"'):
            load(None)
        # a state that one rank lacks although it holds a part of the parameter: all ranks say so
        if rank == 1:
            del optimizer.state[model.blocks[0].up.weight]
        with raises(ValueError, "is there on ranks [0] but not on 1, which holds a part of it"):
            FSDP.optim_state_dict(model, optimizer)
    # optimizers that know names have them with wrappers, dicts without
    model = ours()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    go(model, optimizer, rank, size, 0, 1)
    full = FSDP.optim_state_dict(model, optimizer)
    assert full["param_groups"][0]["param_names"] == full["param_groups"][0]["params"] == list(full["state"])
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, full))
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
    # states of other kinds: what is alike on all ranks stands for itself
    model = ours()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    like = torch.ones_like(model.blocks[0].up.weight)
    state = {"rows": torch.arange(19.0), "nested": {"sum": 3.5, "like": like}, "n": 4}
    optimizer.state[model.blocks[0].up.weight] = state
    full = FSDP.optim_state_dict(model, optimizer)["state"]["blocks.0.up.weight"]
    assert torch.equal(full["rows"], state["rows"]) and full["n"] == 4 and full["nested"]["sum"] == 3.5
    assert torch.equal(full["nested"]["like"], torch.ones(19, WIDTH))
    state["rows"] = torch.arange(3.0 + rank)
    if size > 1:
        with raises(ValueError, "state 'rows' of parameter 'blocks.0.up.weight' has shapes [(3,), (4,)"):
            FSDP.optim_state_dict(model, optimizer)
    # a counter is one also where it looks like a shard
    model = FSDP(nn.ParameterList([torch.arange(float(size))]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.module[0]] = {"step": torch.tensor([4.0])}
    full = FSDP.optim_state_dict(model, optimizer)
    assert full["state"]["0"]["step"].tolist() == [4.0]
    assert type(load_into(model, optimizer, full)["step"]) is torch.Tensor


# ---- A break between -------------------------------------------------------------------------------------------------


def save(job, path):
    """Train, save whole and sharded, train on; what that came to is in the file."""
    model = ours()
    optimizer = adam(model)
    go(model, optimizer, job.rank, job.size, 0, 3)
    with FSDP.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, True), FullOptimStateDictConfig(True, True)
    ):
        state, entries = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    shards = dict(zip(("model", "optimizer"), dsd.get_state_dict(model, optimizer)))
    dcp.save(shards, checkpoint_id=f"{path}.shards")
    further = go(model, optimizer, job.rank, job.size, 3, 6)
    if job.rank == 0:
        torch.save({"model": state, "optimizer": entries, "further": further, "size": job.size}, path)


def resume(job, path):
    """Other wrappers, another order of the optimizer's parameters: the same losses, the same bits for the same size."""
    rank, size = job.rank, job.size
    saved = torch.load(path, weights_only=True) if rank == 0 else None
    every = [saved]
    dist.broadcast_object_list(every, group=job.gloo, group_src=0)
    saved = every[0]
    finer = ModuleWrapPolicy({Block, nn.LayerNorm})
    for strategy, policy, first in ((FULL, finer, True), (NO, None, False)):
        model = ours(sharding_strategy=strategy, policy=policy)
        optimizer = adam(model, reverse=False, lr=3.0)
        with full_type(FSDP, model, rank0_only=first):
            model.load_state_dict(saved["model"])
            entries = saved["optimizer"] if rank == 0 or not first else None
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, entries))
        compare(saved, go(model, optimizer, rank, size, 3, 6), size)
    # the shards, by torch's distributed checkpoint
    model = ours(policy=finer)
    optimizer = adam(model)
    state, entries = dsd.get_state_dict(model, optimizer)
    shards = {"model": state, "optimizer": entries}
    dcp.load(shards, checkpoint_id=f"{path}.shards")
    dsd.set_state_dict(model, optimizer, model_state_dict=shards["model"], optim_state_dict=shards["optimizer"])
    compare(saved, go(model, optimizer, rank, size, 3, 6), size)
    # and torch's own wrapper goes on with it
    beside = original(job)
    its = adam(beside)
    with full_type(Their, beside):
        beside.load_state_dict(saved["model"])
        its.load_state_dict(Their.optim_state_dict_to_load(beside, its, saved["optimizer"]))
    got = go(beside, its, rank, size, 3, 6)
    assert max(abs(a - b) for a, b in zip(got, saved["further"])) < 1e-6


def compare(saved, got, size):
    assert max(abs(a - b) for a, b in zip(got, saved["further"])) < 1e-6, (got, saved["further"])
    assert size != saved["size"] or got == saved["further"], (got, saved["further"])


# ---- Memory ----------------------------------------------------------------------------------------------------------


def peak(job):
    """Whole dicts are put together one tensor at a time: a rank that gets none needs memory for one."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back, so that it can be seen
    width, layers = 512, 12
    net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    one = width * width * 4 / 2**20
    with full_type(FSDP, model, rank0_only=True):
        with measured() as grown:
            entries = FSDP.optim_state_dict(model, optimizer)
        if job.rank:
            assert entries == {} and grown() < 4 * one, (grown(), one)
        with measured() as grown:
            FSDP.optim_state_dict_to_load(model, optimizer, entries)
        if job.rank:
            assert grown() < (layers / job.size + 3) * one, (grown(), one)


def test_peak_of_memory(hosted):
    hosted(2, peak, fresh=True)


def calls(job):
    legacy(job)
    misuse(job)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_forms(hosted, n):
    hosted(n, forms)


@pytest.mark.parametrize("n", [1, 2])
def test_calls(hosted, n):
    hosted(n, calls)


@pytest.mark.parametrize("saved_by", [1, 2, 4])
def test_break(hosted, tmp_path, saved_by):
    path = str(tmp_path / "state.pt")
    hosted(saved_by, save, path)
    for n in (1, 2, 4):
        hosted(n, resume, path)
