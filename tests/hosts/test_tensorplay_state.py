"""Whole and sharded state of models and optimizers in TensorPlay: fully_shard and the classic wrapper. The oracle is
one process with the whole batch, as TensorPlay's own versions give shards for whole dicts and lose optimizer state."""

import ctypes
import pickle

import pytest
from memory import measured

tp = pytest.importorskip(
    "tensorplay", reason="TensorPlay is not installed here; ci/test tensorplay makes venvs that have it"
)
import tensorplay.distributed as dist
from tensorplay import nn
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from tensorplay.distributed.fsdp.wrap import ModuleWrapPolicy
from tensorplay.distributed.tensor import Shard

from libfsdp.tensorplay import (
    FullyShardedDataParallel,
    StateDictOptions,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

RANK = "tensorplay_rank.py"
WIDTH, WORDS, BATCH = 6, 5, 12
FULL = StateDictOptions(full_state_dict=True)
STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
    ShardingStrategy.HYBRID_SHARD,
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)  # does not divide evenly
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)
        self.unused = nn.Parameter(tp.arange(7.0))  # gets no gradient, so no state
        self.register_buffer("mean", tp.tensor([0.1, 0.2, 0.3]))
        self.register_buffer("count", tp.tensor([3, 2**40 + 1], dtype=tp.int64))
        self.register_buffer("mask", tp.tensor([True, False, True]))
        self.register_buffer("scratch", tp.zeros(2), persistent=False)

    def forward(self, x):
        return x + self.down(tp.tanh(self.up(x)))


class Net(nn.Module):
    """Tied weights, a parameter of one element, of which most ranks have nothing, and a frozen one."""

    def __init__(self):
        super().__init__()
        tp.manual_seed(5)
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.leave.weight = self.enter.weight
        self.gain = nn.Parameter(tp.tensor([1.5]))
        self.frozen = nn.Parameter(tp.arange(5.0) / 10, requires_grad=False)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x) * self.gain + self.frozen.sum()


def cut_second(parameter):
    return Shard(1) if len(parameter.shape) == 2 else None


def composed(net=None, inner=True, placement=cut_second, **options):
    net = net or Net()
    if inner:
        for block in net.blocks:
            fully_shard(block, shard_placement_fn=placement, **options)
    return fully_shard(net, shard_placement_fn=placement, **options)


def wrapped(policy=ModuleWrapPolicy({Block}), **options):
    return FullyShardedDataParallel(Net(), auto_wrap_policy=policy, **options)


def batches(first, last):
    tp.manual_seed(9)
    return [(tp.randn(BATCH, WIDTH), tp.randn(BATCH, WIDTH)) for _ in range(last)][first:]


def adam(model):
    """Two groups, of parameters in an order of their own."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    biases = [p for n, p in named if n.endswith("bias")]
    others = [p for n, p in named if not n.endswith("bias")]
    return tp.optim.AdamW([{"params": others[::-1], "lr": 0.02}, {"params": biases, "weight_decay": 0.0}], lr=0.01)


def train(model, optimizer, rank, size, first, last):
    """The losses, over all ranks."""
    losses = []
    for x, y in batches(first, last):
        loss = ((model(x[rank::size]) - y[rank::size]) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if size > 1:
            dist.all_reduce(total)
        losses.append(total.item() / size)
    return losses


def alone(steps):
    model = Net()
    optimizer = adam(model)
    train(model, optimizer, 0, 1, 0, steps)
    return model, optimizer


def named_state(model, optimizer):
    """{name: state} of an optimizer in one process."""
    names = {id(p): n for n, p in model.named_parameters()}
    return {names[id(p)]: s for p, s in optimizer.state.items()}


def same(one, other, within=0.0):
    assert list(one) == list(other), (list(one), list(other))
    for name in one:
        a, b = one[name], other[name]
        assert tuple(a.shape) == tuple(b.shape) and a.dtype == b.dtype, (name, a.shape, b.shape, a.dtype, b.dtype)
        if a.numel():
            assert (a.double() - b.double()).abs().max().item() <= within, name


def same_states(one, other, within=0.0):
    assert set(one) == set(other), (sorted(one), sorted(other))
    for name in one:
        same(one[name], other[name], within)


def on_all(job, value):
    every = [None] * job.size
    dist.all_gather_object(every, value, group=job.gloo)
    return every


def raises(kind, text, call, *more):
    try:
        call()
    except kind as error:
        assert all(each in str(error) for each in (text, *more)), error
        return
    raise AssertionError(f"nothing was raised; expected {kind} with {text!r}")


# ---- Models of fully_shard -------------------------------------------------------------------------------------------


def whole_models(job):
    """Whole dicts are what one process has, the same on all ranks; each rank loads its part of them."""
    import tensorplay.distributed.checkpoint as checkpoint

    assert checkpoint.get_model_state_dict is get_model_state_dict
    rank, size = job.rank, job.size
    plain, _ = alone(3)
    model = composed()
    same(get_model_state_dict(model, options=FULL), Net().state_dict())  # before any forward
    optimizer = adam(model)
    train(model, optimizer, rank, size, 0, 3)
    local = model.state_dict()
    full = get_model_state_dict(model, options=FULL)
    same(full, plain.state_dict(), 1e-6)
    assert full["leave.weight"] is full["enter.weight"]
    assert len(set(on_all(job, pickle.dumps({name: value.tolist() for name, value in full.items()})))) == 1
    assert list(local) == list(full) and "blocks.0.scratch" not in full
    same(get_model_state_dict(model), local)
    start = -(-WIDTH // size) * rank
    column = full["enter.weight"][:, start : start + -(-WIDTH // size)]
    same({"columns": local["enter.weight"]}, {"columns": column})

    first = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    same(first, full) if rank == 0 else same(first, {})
    trainable = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, ignore_frozen_params=True))
    assert set(full) - set(trainable) == {"frozen"}
    some = get_model_state_dict(model, submodules={model.blocks[1]}, options=FULL)
    same(some, {name: value for name, value in full.items() if name.startswith("blocks.1.")})
    inner = get_model_state_dict(model.blocks[1], options=FULL)
    same(inner, {name[9:]: value for name, value in some.items()})

    def loads(load, inner=True, placement=cut_second, before=False):
        other = composed(inner=inner, placement=placement)
        if before:
            train(other, adam(other), rank, size, 0, 1)
        result = load(other)
        assert not result.missing_keys and not result.unexpected_keys
        same(get_model_state_dict(other, options=FULL), full)
        x = batches(0, 1)[0][0]
        assert (other(x) - model(x)).abs().max().item() == 0

    loads(lambda other: other.load_state_dict(full))
    loads(lambda other: other.load_state_dict(full), inner=False, placement=None, before=True)
    loads(lambda other: set_model_state_dict(other, full, options=FULL), placement=None)
    loads(lambda other: other.load_state_dict(local), before=True)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    loads(lambda other: set_model_state_dict(other, full if rank == 0 else {}, options=spread), before=True)
    model.blocks[0].load_state_dict(inner)
    same(get_model_state_dict(model.blocks[0], options=FULL), inner)

    # what is wrong is said by name, and all of it
    width = tuple(local["blocks.0.up.weight"].shape)
    wrong = dict(full) | {"blocks.0.up.weight": tp.zeros(9, 9), "gain": tp.zeros(4)}
    raises(
        RuntimeError,
        "size mismatch for blocks.0.up.weight: a tensor of shape (9, 9), but the whole parameter has shape (13, 6) "
        f"and this rank's shard {width}",
        lambda: model.load_state_dict(wrong),
        "size mismatch for gain: a tensor of shape (4,)",
    )
    odd = dict(full)
    odd["stranger"] = odd.pop("frozen")
    raises(RuntimeError, 'Missing key(s) in state_dict: "frozen"', lambda: model.load_state_dict(odd), '"stranger"')
    result = set_model_state_dict(model, {"odd": tp.ones(1)}, options=StateDictOptions(strict=False))
    assert result.unexpected_keys == ["odd"] and "blocks.1.up.bias" in result.missing_keys
    raises(RuntimeError, "empty", lambda: set_model_state_dict(model, {}))
    spread = StateDictOptions(broadcast_from_rank0=True)
    raises(ValueError, "broadcast_from_rank0", lambda: get_model_state_dict(model, options=spread))
    scalar = nn.Linear(2, 2)
    scalar.scale = nn.Parameter(tp.tensor(1.0))
    text = "fully_shard does not support scalar parameters; use a one-dimensional parameter"
    raises(ValueError, text, lambda: fully_shard(scalar), "'scale'")
    raises(ValueError, text, lambda: dist.fsdp.fully_shard(scalar))


def whole_optimizers(job):
    """Optimizer state of fully_shard, whole and as shards, and into optimizers of another order and wrapping."""
    rank, size = job.rank, job.size
    plain, plain_optimizer = alone(3)
    wanted = named_state(plain, plain_optimizer)
    model = composed()
    optimizer = adam(model)
    assert get_optimizer_state_dict(model, optimizer, options=FULL)["state"] == {}
    train(model, optimizer, rank, size, 0, 3)
    state, full = get_state_dict(model, optimizer, options=FULL)
    same_states(full["state"], wanted, 1e-6)
    assert not any("unused" in name or "frozen" in name for name in full["state"])
    assert [group["lr"] for group in full["param_groups"]] == [0.02, 0.01]
    assert full["param_groups"][1]["weight_decay"] == 0.0
    assert all(type(name) is str for group in full["param_groups"] for name in group["params"])
    sharded = get_optimizer_state_dict(model, optimizer)
    assert set(sharded["state"]) == set(full["state"])
    for name, values in sharded["state"].items():
        assert tuple(values["exp_avg"].shape) == tuple(dict(model.named_parameters())[name].shape)
    first = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    same_states(first["state"], full["state"]) if rank == 0 else same_states(first, {})
    flat = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    )
    assert "state.blocks.0.up.weight.exp_avg" in flat and flat["param_groups.gain.lr"] == 0.02
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    def reversed_adam(model):
        parameters = [p for p in model.parameters() if p.requires_grad]
        biases = {id(p) for n, p in model.named_parameters() if n.endswith("bias")}
        first = [p for p in parameters if id(p) in biases]
        return tp.optim.AdamW([{"params": first}, {"params": [p for p in parameters if id(p) not in biases]}], lr=7.0)

    mine = (state, full) if rank == 0 else ({}, {})
    further = train(model, optimizer, rank, size, 3, 6)
    for load in (
        lambda m, o: set_state_dict(m, o, model_state_dict=state, optim_state_dict=full, options=FULL),
        lambda m, o: set_state_dict(m, o, model_state_dict=mine[0], optim_state_dict=mine[1], options=spread),
        lambda m, o: (set_model_state_dict(m, state), set_optimizer_state_dict(m, [o], flat)),
        lambda m, o: (set_model_state_dict(m, state), set_optimizer_state_dict(m, o, sharded)),
    ):
        other = composed(inner=False)
        again = reversed_adam(other)
        load(other, again)
        assert [group["lr"] for group in again.param_groups] == [0.01, 0.02]
        got = train(other, again, rank, size, 3, 6)
        assert got == further, (got, further)
        same(get_model_state_dict(other, options=FULL), get_model_state_dict(model, options=FULL))

    raises(KeyError, "stranger", lambda: set_optimizer_state_dict(model, optimizer, _renamed(full, "gain", "stranger")))
    short = {"state": full["state"], "param_groups": [full["param_groups"][0]]}
    raises(KeyError, "lacks parameter", lambda: set_optimizer_state_dict(model, optimizer, short), ".bias")
    wrong = _with(full, "blocks.1.down.bias", "exp_avg", tp.zeros(4))
    raises(ValueError, "blocks.1.down.bias", lambda: set_optimizer_state_dict(model, optimizer, wrong), "(4,)", "(6,)")
    raises(RuntimeError, "empty", lambda: set_optimizer_state_dict(model, optimizer, {}))

    # SGD without momentum has no state, with momentum one tensor
    for momentum, keys in ((0.0, set()), (0.9, {"momentum_buffer"})):
        other = composed()
        optimizer = tp.optim.SGD([p for p in other.parameters() if p.requires_grad], lr=0.1, momentum=momentum)
        train(other, optimizer, rank, size, 0, 2)
        full = get_optimizer_state_dict(other, optimizer, options=FULL)
        states = [state for state in full["state"].values()]
        tensors = {key for state in states for key, value in state.items() if isinstance(value, tp.Tensor)}
        assert tensors == keys, tensors
        set_optimizer_state_dict(other, optimizer, full, options=FULL)


def _renamed(full, old, new):
    return {
        "state": {new if name == old else name: state for name, state in full["state"].items()},
        "param_groups": [
            group | {"params": [new if name == old else name for name in group["params"]]}
            for group in full["param_groups"]
        ],
    }


def _with(full, name, key, value):
    return full | {"state": full["state"] | {name: full["state"][name] | {key: value}}}


def hybrid(job):
    """Two replicas of two shards each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain, plain_optimizer = alone(3)
    model = composed(mesh=mesh)
    optimizer = adam(model)
    train(model, optimizer, job.rank, job.size, 0, 3)
    state, full = get_state_dict(model, optimizer, options=FULL)
    same(state, plain.state_dict(), 1e-6)
    same_states(full["state"], named_state(plain, plain_optimizer), 1e-6)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    further = train(model, optimizer, job.rank, job.size, 3, 6)
    for kind in ({"mesh": mesh}, {}):
        other = composed(**kind)
        again = adam(other)
        mine = {"model_state_dict": state, "optim_state_dict": full}
        mine = mine if job.rank == 0 else {"model_state_dict": {}, "optim_state_dict": {}}
        set_state_dict(other, again, **mine, options=spread)
        got = train(other, again, job.rank, job.size, 3, 6)
        assert max(abs(a - b) for a, b in zip(got, further)) < 1e-6 and (not kind or got == further)


def models(job):
    whole_models(job)
    whole_optimizers(job)
    if job.size == 4:
        hybrid(job)


def single(job):
    """Without a process group."""
    model = composed()
    optimizer = adam(model)
    train(model, optimizer, 0, 1, 0, 3)
    plain, plain_optimizer = alone(3)
    state, full = get_state_dict(model, optimizer, options=FULL)
    same(state, plain.state_dict(), 1e-6)
    same_states(full["state"], named_state(plain, plain_optimizer), 1e-6)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=full, options=spread)
    same_states(get_optimizer_state_dict(model, optimizer, options=FULL)["state"], full["state"])


# ---- The classic wrapper ---------------------------------------------------------------------------------------------


def full_type(model, **config):
    return FullyShardedDataParallel.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig(**config)
    )


def classic(job):
    """Optimizer state of each strategy in each form, and back."""
    FSDP = FullyShardedDataParallel
    rank, size = job.rank, job.size
    plain, plain_optimizer = alone(3)
    wanted = named_state(plain, plain_optimizer)
    for strategy in STRATEGIES if size == 2 else STRATEGIES[::2]:
        model = wrapped(sharding_strategy=strategy)
        optimizer = adam(model)
        train(model, optimizer, rank, size, 0, 3)
        full = FSDP.optim_state_dict(model, optimizer)
        same_states(full["state"], wanted, 1e-6)
        assert not any("module" in name for group in full["param_groups"] for name in group["params"])
        with full_type(model, rank0_only=True):
            first = FSDP.optim_state_dict(model, optimizer)
        same_states(first["state"], full["state"]) if rank == 0 else same_states(first, {})
        first = model.full_optim_state_dict(optimizer)
        same_states(first["state"], full["state"]) if rank == 0 else same_states(first, {})
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            sharded = FSDP.optim_state_dict(model, optimizer)
            shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        assert all(tuple(values["exp_avg"].shape) == shapes[name] for name, values in sharded["state"].items())
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            same_states(FSDP.optim_state_dict(model, optimizer)["state"], sharded["state"])
        same_states(FSDP.sharded_optim_state_dict(model, optimizer)["state"], sharded["state"])
        keys = on_all(job, [list(each["state"]) for each in (full, sharded)])
        assert all(one == keys[0] for one in keys)
        state = get_model_state_dict(model, options=FULL)
        same(state, plain.state_dict(), 1e-6)
        both = get_state_dict(model, optimizer, options=FULL)
        same(both[0], state)
        same_states(both[1]["state"], full["state"])

        loads = [
            lambda m, o, entries=full: FSDP.optim_state_dict_to_load(m, o, entries),
            lambda m, o, entries=full: FSDP.shard_full_optim_state_dict(entries, m, optim=o),
            lambda m, o, entries=full: FSDP.scatter_full_optim_state_dict(entries if rank == 0 else None, m, optim=o),
            lambda m, o, entries=copies(sharded): FSDP.flatten_sharded_optim_state_dict(entries, m, o),
        ]
        further = train(model, optimizer, rank, size, 3, 6)
        for load in loads if strategy is STRATEGIES[0] else loads[:1]:
            other = wrapped(policy=None, sharding_strategy=strategy)
            again = adam(other)
            other.load_state_dict(state)
            again.load_state_dict(load(other, again))
            got = train(other, again, rank, size, 3, 6)
            assert got == further, (strategy, got, further)
    wrong = _renamed(full, "gain", "stranger")
    raises(KeyError, "stranger", lambda: FSDP.optim_state_dict_to_load(other, again, wrong))
    short = _with(full, "blocks.1.down.bias", "exp_avg", tp.zeros(4))
    raises(ValueError, "blocks.1.down.bias", lambda: FSDP.optim_state_dict_to_load(other, again, short), "(4,)", "(6,)")
    raises(ValueError, "wrapper", lambda: FSDP.optim_state_dict(Net(), optimizer))

    by_number = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, plain, optim=plain_optimizer)
    plain_optimizer.load_state_dict(by_number)
    same_states(named_state(plain, plain_optimizer), full["state"])
    again = FSDP.rekey_optim_state_dict(by_number, OptimStateKeyType.PARAM_NAME, plain, optim=plain_optimizer)
    assert set(again["state"]) == set(full["state"])
    raises(ValueError, "PARAM_NAME", lambda: FSDP.rekey_optim_state_dict(full, 3, plain))
    with full_type(model, rank0_only=True):
        entries = full if rank == 0 else None
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, entries))
    same_states(FSDP.optim_state_dict(model, optimizer)["state"], full["state"])


def copies(entries):
    states = {name: {key: value.clone() for key, value in state.items()} for name, state in entries["state"].items()}
    return entries | {"state": states}


def cases(job):
    """A14 and A15: ranks without data and without state; buffers keep their dtypes."""
    FSDP = FullyShardedDataParallel
    model = wrapped(mixed_precision=MixedPrecision(buffer_dtype=tp.bfloat16))
    optimizer = adam(model)
    train(model, optimizer, job.rank, job.size, 0, 1)
    full = FSDP.optim_state_dict(model, optimizer)
    empty = [p for p in model.parameters() if p.numel() == 0]
    assert (len(empty) > 0) == (job.rank > 0)
    for parameter in empty:
        optimizer.state.pop(parameter, None)
    again = FSDP.optim_state_dict(model, optimizer)
    same_states(again["state"], full["state"])
    keys = on_all(job, {name: list(state) for name, state in again["state"].items()})
    assert all(one == keys[0] for one in keys) and keys[0]["gain"] == ["step", "exp_avg", "exp_avg_sq"]
    assert again["param_groups"] == full["param_groups"]
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        assert tuple(model.state_dict()["gain"].shape) == ((1,) if job.rank == 0 else (0,))
    dtypes = {"mean": tp.float32, "count": tp.int64, "mask": tp.bool}
    for kind in StateDictType:
        with FSDP.state_dict_type(model, kind):
            state = model.state_dict()
        assert {name: state[f"blocks.0.{name}"].dtype for name in dtypes} == dtypes
        assert state["blocks.0.count"].tolist() == [3, 2**40 + 1] and "blocks.0.scratch" not in state
        assert model.blocks[0].mean.dtype == tp.bfloat16 and model.blocks[0].count.dtype == tp.int64


def wrappers(job):
    classic(job)
    if job.size > 1:
        cases(job)


# ---- Memory ----------------------------------------------------------------------------------------------------------


def peak(job):
    """Whole dicts are put together one tensor at a time: a rank that gets none needs memory for one."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back, so that it can be seen
    width, layers = 512, 12
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = tp.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(tp.ones(1, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    one = width * width * 4 / 2**20
    with measured() as grown:
        state, entries = get_state_dict(model, optimizer, options=options)
    if job.rank:
        assert state == {} and entries == {} and grown() < 4 * one, (grown(), one)
    with measured() as grown:
        set_model_state_dict(model, state, options=spread)
    if job.rank:
        assert grown() < (layers / job.size + 3) * one, (grown(), one)


def test_peak_of_memory(hosted):
    hosted(2, peak, fresh=True)


# ---- A break between -------------------------------------------------------------------------------------------------


def save(job, path):
    results = {"size": job.size}
    for name, model in (("composed", composed()), ("wrapped", wrapped())):
        optimizer = adam(model)
        train(model, optimizer, job.rank, job.size, 0, 3)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state, entries = get_state_dict(model, optimizer, options=options)
        further = train(model, optimizer, job.rank, job.size, 3, 6)
        results[name] = {"state": state, "optimizer": entries, "further": further}
    if job.rank == 0:
        with open(path, "wb") as file:
            pickle.dump(results, file)


def resume(job, path):
    with open(path, "rb") as file:
        results = pickle.load(file)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for name, inner, policy in (("composed", False, ModuleWrapPolicy({Block})), ("wrapped", True, None)):
        saved = results[name]
        for model in composed(inner=inner), wrapped(policy=policy):
            optimizer = adam(model)
            mine = (saved["state"], saved["optimizer"]) if job.rank == 0 else ({}, {})
            set_state_dict(model, optimizer, model_state_dict=mine[0], optim_state_dict=mine[1], options=spread)
            got = train(model, optimizer, job.rank, job.size, 3, 6)
            assert max(abs(a - b) for a, b in zip(got, saved["further"])) < 1e-6, (got, saved["further"])
            assert job.size != results["size"] or got == saved["further"]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_classic(hosted, n):
    hosted(n, wrappers)


@pytest.mark.parametrize("saved_by", [1, 2, 4])
def test_break(hosted, tmp_path, saved_by):
    path = str(tmp_path / "state.pickle")
    hosted(saved_by, save, path)
    for n in (1, 2, 4):
        hosted(n, resume, path)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_fully_shard(hosted, n):
    hosted(n, models)


def test_without_a_process_group(hosted):
    hosted(1, single, before=False)
