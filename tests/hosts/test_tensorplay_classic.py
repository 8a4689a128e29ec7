"""libfsdp.tensorplay's FullyShardedDataParallel and ShardedGradScaler: what TensorPlay's own gets wrong is right here
(the rows about the classic wrapper in hosts.md), against one process with the whole batch."""

import math

import pytest

tp = pytest.importorskip(
    "tensorplay", reason="TensorPlay is not installed here; ci/test tensorplay makes venvs that have it"
)
import tensorplay.distributed as dist
from tensorplay import nn
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.fsdp import (
    FullStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from tensorplay.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy

RANK = "tensorplay_rank.py"
WIDTH, BATCH, STEPS = 8, 12, 20
FULL, GRAD_OP, NO = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
HYBRID, HYBRID_GRAD_OP = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 3)  # does not divide evenly
        self.down = nn.Linear(2 * WIDTH + 3, WIDTH)

    def forward(self, x):
        return x + self.down(tp.tanh(self.up(x)))


def network():
    tp.manual_seed(5)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))


def ours(module=None, policy=None, **options):
    from libfsdp.tensorplay import FullyShardedDataParallel

    policy = policy or ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(module or network(), auto_wrap_policy=policy, **options)


def batches():
    tp.manual_seed(9)
    return [(tp.randn(BATCH, WIDTH), tp.randn(BATCH, 3)) for _ in range(STEPS)]


def loss_of(model, x, y):
    return ((model(x).float() - y) ** 2).mean()


def train(model, rank, size, clip=None, steps=STEPS):
    optimizer = tp.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for x, y in batches()[:steps]:
        loss_of(model, x[rank::size], y[rank::size]).backward()
        if clip is not None:
            norms.append(float(clip(model)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def clip_plain(model):
    return tp.nn.utils.clip_grad_norm_(list(model.parameters()), 0.5)


def clip_wrapped(model):
    return model.clip_grad_norm_(0.5)


def alone():
    model = network()
    return train(model, 0, 1, clip_plain), model.state_dict()


def far(state, wanted):
    assert list(state) == list(wanted), (list(state), list(wanted))
    for name in wanted:
        assert tuple(state[name].shape) == tuple(wanted[name].shape), name
    return max((state[name].float() - wanted[name].float()).abs().max().item() for name in wanted)


def raises(kind, text, call):
    try:
        call()
    except kind as error:
        assert text in str(error), error
        return
    raise AssertionError(f"nothing was raised; expected {kind} with {text!r}")


def training(job):
    """Every strategy comes to what one process comes to; NO_SHARD and the hybrid ones too; norms are of all ranks."""
    rank, size = job.rank, job.size
    norms, wanted = alone()
    options = [{"sharding_strategy": strategy} for strategy in (None, GRAD_OP, NO, HYBRID)]
    options[0] |= {"forward_prefetch": True, "backward_prefetch": None, "device_id": "cpu"}
    options.append({"process_group": job.gloo})
    if size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
        options += [
            {"sharding_strategy": HYBRID, "device_mesh": mesh},
            {"sharding_strategy": HYBRID_GRAD_OP, "process_group": groups},
        ]
    for each in options:
        model = ours(**each)
        got = train(model, rank, size, clip_wrapped)
        assert all(abs(a - b) < 1e-5 * b for a, b in zip(got, norms)), (each, got, norms)
        distance = far(model.state_dict(), wanted)
        assert distance < 1e-6, (each, distance)


def programs(job):
    """Mixed strategies and ignored modules, no_sync, communication hooks, precision, a penalty, misuse."""
    from libfsdp.tensorplay import FullyShardedDataParallel as FSDP

    rank, size = job.rank, job.size
    norms, wanted = alone()
    net = network()
    policy = CustomPolicy(lambda m: {"sharding_strategy": NO} if m is net[0] else m is net[1])
    model = ours(net, policy)
    got = train(model, rank, size, clip_wrapped)
    assert all(abs(a - b) < 1e-5 * b for a, b in zip(got, norms)), (got, norms)
    assert far(model.state_dict(), wanted) < 1e-6
    from functools import partial

    sized = ours(policy=partial(size_based_auto_wrap_policy, min_num_params=200))
    assert len(FSDP.fsdp_modules(sized)) == 3 and FSDP.fsdp_modules(sized, root_only=True) == [sized]

    net = network()
    model = ours(net, ignored_modules=[net[2]])
    plain = network()
    data = batches()
    for each, mine in ((model, slice(rank, None, size)), (plain, slice(None))):
        loss_of(each, data[0][0][mine], data[0][1][mine]).backward()
    assert tuple(net[2].weight.shape) == (3, WIDTH)
    # ignored gradients are each rank's own: the largest counts
    norm = float(model.clip_grad_norm_(1e9))
    every = [None] * size
    dist.all_gather_object(every, norm, group=job.gloo)
    assert len(set(every)) == 1 and norm > 0
    net[2].weight.grad[0, 0] = math.nan if rank == size - 1 else 1.0
    assert math.isnan(float(model.clip_grad_norm_(1.0)))

    model, plain = ours(), network()
    with model.no_sync():
        loss_of(model, data[0][0][rank::size], data[0][1][rank::size]).backward()
    loss_of(model, data[1][0][rank::size], data[1][1][rank::size]).backward()
    for x, y in data[:2]:
        loss_of(plain, x, y).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        for (name, p), (other, q) in zip(model.named_parameters(), plain.named_parameters()):
            assert name == other and (p.grad - q.grad).abs().max().item() < 1e-6, name

    calls = []

    def hook(state, gradients, output):
        calls.append(state)
        dist.reduce_scatter_tensor(output, gradients, dist.ReduceOp.AVG)

    model = ours()
    model.register_comm_hook("state", hook)
    train(model, rank, size, clip_wrapped)
    assert far(model.state_dict(), wanted) < 1e-6 and calls == ["state"] * (3 * STEPS)

    model = ours(mixed_precision=MixedPrecision(tp.bfloat16, tp.float32))
    output = model(data[0][0])
    assert output.dtype == tp.bfloat16  # the root's inputs are cast
    train(model, rank, size, clip_wrapped)
    assert 0 < far(model.state_dict(), wanted) < 0.2

    raises(TypeError, "module must be an instance of Module", lambda: FSDP(3))
    raises(ValueError, "host memory", lambda: ours(device_id="cuda"))
    raises(ValueError, "mutually exclusive", lambda: ours(process_group=job.gloo, device_mesh=3))
    raises(ValueError, "rank0_only", lambda: FSDP.summon_full_params(model, rank0_only=True).__enter__())
    raises(ValueError, "fully sharded wrapper", lambda: FSDP.get_state_dict_type(network()))
    raises(RuntimeError, "root", lambda: model[0].clip_grad_norm_(1.0))
    raises(
        RuntimeError,
        "state_dict_config",
        lambda: FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, ShardedStateDictConfig()),
    )


def dicts(job):
    """Full, sharded and local state dicts of nested wrappers, saved, loaded and trained on; summon_full_params, apply.
    """
    from libfsdp.tensorplay import FullyShardedDataParallel as FSDP

    rank, size = job.rank, job.size
    for strategy in (FULL, GRAD_OP, NO):
        model = ours(sharding_strategy=strategy)
        assert far(model.state_dict(), network().state_dict()) == 0
        train(model, rank, size, steps=3)
        full = model.state_dict()
        for kind in StateDictType:
            with FSDP.state_dict_type(model, kind):
                state = {name: value.clone() for name, value in model.state_dict().items()}
            if kind is not StateDictType.FULL_STATE_DICT and strategy is not NO and rank == 0:
                assert tuple(state["0.up.weight"].shape) == (-(-19 // size), WIDTH)
            again = ours(sharding_strategy=strategy)
            with FSDP.state_dict_type(again, kind):
                again.load_state_dict(state)
            assert far(again.state_dict(), full) == 0
            x = batches()[0][0]
            assert (again(x) - model(x)).abs().max().item() == 0
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
            assert len(model.state_dict()) == (len(full) if rank == 0 else 0)
        plain = network()
        plain.load_state_dict(full)
        with FSDP.summon_full_params(model), tp.no_grad():
            assert [name for name, _ in model.named_parameters()] == list(full)
            for (_, p), (_, q) in zip(model.named_parameters(), plain.named_parameters()):
                assert (p - q).abs().max().item() == 0
            model[0].up.bias.fill_(2.0)
        assert (model.state_dict()["0.up.bias"] == 2).all().item()
        with FSDP.summon_full_params(model, writeback=False), tp.no_grad():
            model[0].up.bias.fill_(3.0)

        def fill(module):
            if isinstance(module, nn.Linear):
                module.bias.data.fill_(module.out_features)

        assert (model.state_dict()["0.up.bias"] == 2).all().item()
        model.apply(fill)
        assert (model.state_dict()["1.down.bias"] == WIDTH).all().item()
        raises(RuntimeError, "Missing key", lambda: model.load_state_dict({}))  # noqa: B023


def scaling(job):
    """Infinity in one rank's shard: all ranks skip the step and halve the scale."""
    from libfsdp.tensorplay import ShardedGradScaler

    model = ours()
    scaler = ShardedGradScaler(init_scale=8.0, growth_interval=2)
    optimizer = tp.optim.SGD(model.parameters(), lr=0.01)
    x, y = batches()[0]
    scales = []
    for step in range(5):
        before = model.state_dict()
        scaler.scale(loss_of(model, x, y)).backward()
        if step == 2 and job.rank == 0:
            model[0].up.weight.grad[0, 0] = math.inf
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert (far(model.state_dict(), before) == 0) == (step == 2), step
        scales.append(scaler.get_scale())
    assert scales == [8.0, 16.0, 8.0, 8.0, 16.0], scales


def everything(job):
    programs(job)
    dicts(job)
    scaling(job)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_training(hosted, n):
    hosted(n, training)


def test_everything_else(hosted):
    hosted(2, everything)


def test_state_dicts_on_three_ranks(hosted):
    hosted(3, dicts)


def single(job):
    """Without a process group it trains alone."""
    model = ours()
    train(model, 0, 1, clip_wrapped)
    assert far(model.state_dict(), alone()[1]) < 1e-6


def test_without_a_process_group(hosted):
    hosted(1, single, before=False)
