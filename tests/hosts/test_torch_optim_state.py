"""Optimizer state of libfsdp.torch.FullyShardedDataParallel beside torch's own and beside one process: the forms that
the classic API and torch's checkpoint functions have, loaded with another wrapping or another number of ranks."""

import contextlib
import copy
import ctypes
import gc
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dsd
import torch.distributed.fsdp as theirs
from classic_programs import (
    FULL,
    GRAD_OP,
    HYBRID,
    NO,
    WIDTH,
    Block,
    Net,
    batches,
    loss_of,
    original,
    ours,
    raises,
    same_error,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from libfsdp.torch import FullyShardedDataParallel as FSDP

Their = theirs.FullyShardedDataParallel
WHOLE = dsd.StateDictOptions(full_state_dict=True)
SPREAD = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def adam(model, reverse=True, lr=0.01):
    """Two groups, of parameters in an order of their own; without a state for what has no gradient."""
    named = list(model.named_parameters())
    biases = [p for n, p in named if n.endswith("bias")]
    others = [p for n, p in named if not n.endswith("bias")]
    groups = [{"params": others[::-1], "lr": 2 * lr}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups if reverse else [{**groups[1]}, {"params": others, "lr": 2 * lr}], lr=lr)


def go(model, optimizer, rank, size, first, last):
    """Train on the ranks' parts of batches; the losses over all ranks."""
    losses = []
    for x, y in batches(last)[first:]:
        loss = loss_of(model, x[rank::size], y[rank::size])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if size > 1:
            dist.all_reduce(total)
        losses.append(total.item() / size)
    return losses


def alone(steps, build=adam):
    model = Net()
    optimizer = build(model)
    go(model, optimizer, 0, 1, 0, steps)
    return model, optimizer


def named_state(model, optimizer):
    names = {p: n for n, p in model.named_parameters()}
    return {names[p]: state for p, state in optimizer.state.items()}


def same(one, other, within=0.0):
    """Of two states by name: names, keys, types, dtypes, shapes, values."""
    assert set(one) == set(other), set(one) ^ set(other)
    for name in one:
        assert set(one[name]) == set(other[name]), (name, list(one[name]), list(other[name]))
        for key, a in one[name].items():
            b = other[name][key]
            assert type(a) is type(b), (name, key, type(a), type(b))
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(a, b, rtol=0, atol=within, msg=lambda m: f"{name} {key}: {m}")  # noqa: B023
            else:
                assert a == b, (name, key)


def whole(states):
    return {
        name: {key: v.full_tensor() if isinstance(v, DTensor) else v for key, v in state.items()}
        for name, state in states.items()
    }


def cloned(entries):
    """A dict whose tensors are live, as it is now."""
    states = {name: {k: v.clone() for k, v in state.items()} for name, state in entries["state"].items()}
    return entries | {"state": states}


def on_all(job, value):
    every = [None] * job.size
    dist.all_gather_object(every, value, group=job.gloo)
    return every


def full_type(cls, model, **config):
    return cls.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig(**config)
    )


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


@contextlib.contextmanager
def measured():
    """Gives a function for by how much memory has grown at most inside, in MiB."""

    def status(name):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name))

    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before, most = status("VmRSS"), []
    yield lambda: most[0]
    most.append(status("VmHWM") - before)


def test_peak_of_memory(hosted):
    hosted(2, peak, fresh=True)


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


def alone_and_two(job):
    legacy(job)
    misuse(job)
    nothing(job)
    if job.size == 2:
        checkpoint_functions(job)
        named_optimizers(job)
        buffers(job)


def four(job):
    tensor_parallel(job)
    nothing(job)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_forms(hosted, n):
    hosted(n, forms)


@pytest.mark.parametrize("n, worker", [(1, alone_and_two), (2, alone_and_two), (4, four)])
def test_programs(hosted, n, worker):
    hosted(n, worker, timeout=120)


@pytest.mark.parametrize("saved_by", [1, 2, 4])
def test_break(hosted, tmp_path, saved_by):
    path = str(tmp_path / "state.pt")
    hosted(saved_by, save, path)
    for n in (1, 2, 4):
        hosted(n, resume, path)


def test_chunks_of_nothing(hosted, tmp_path):
    path = str(tmp_path / "chunks")
    hosted(4, chunks, path)
    for n in (1, 2, 3, 4, 5):
        hosted(n, chunks_again, path)
