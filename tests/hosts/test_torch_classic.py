"""libfsdp.torch.FullyShardedDataParallel beside torch's own class on gloo, in the same processes, and beside one
process with the whole batch: training, construction, precision, gradients."""

import contextlib
import functools
import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from classic_programs import (
    Block,
    FULL,
    GRAD_OP,
    HYBRID,
    HYBRID_GRAD_OP,
    NO,
    Net,
    STEPS,
    WIDTH,
    WORDS,
    alone,
    batches,
    clip_plain,
    clip_wrapped,
    far,
    grads,
    loss_of,
    original,
    ours,
    raises,
    same_error,
    together,
    train,
)
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, StateDictType
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.distributed.tensor import DTensor

# ---- Training --------------------------------------------------------------------------------------------------------


def training(job):
    """Every strategy, with and without prefetch, comes to what one process comes to, as torch's does."""
    rank, size = job.rank, job.size
    norms, wanted = alone()
    beside = original(job)
    assert all(abs(a - b) < 1e-5 * b for a, b in zip(train(beside, rank, size, clip=clip_wrapped), norms))
    assert far(beside.state_dict(), wanted) < 1e-5
    options = [
        {"sharding_strategy": None},
        {"sharding_strategy": FULL, "forward_prefetch": True, "backward_prefetch": BackwardPrefetch.BACKWARD_POST},
        {"sharding_strategy": GRAD_OP, "backward_prefetch": None, "limit_all_gathers": False},
        {"sharding_strategy": NO, "use_orig_params": True},
        {"sharding_strategy": HYBRID, "cpu_offload": theirs.CPUOffload(True)},
        {"sharding_strategy": HYBRID_GRAD_OP, "device_id": "cpu"},
        {"process_group": job.gloo, "device_id": torch.device("cpu")},
    ]
    if size == 4:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
        options += [
            {"sharding_strategy": HYBRID, "device_mesh": mesh},
            {"sharding_strategy": HYBRID_GRAD_OP, "process_group": groups},
        ]
    for each in options:
        model = ours(**each)
        got = train(model, rank, size, clip=clip_wrapped)
        assert all(abs(a - b) < 1e-5 * b for a, b in zip(got, norms)), (each, got, norms)
        distance = far(model.state_dict(), wanted)
        assert distance < 1e-6, (each, distance)
        strategy = each.get("sharding_strategy") or FULL
        loss_of(model, *batches(1)[0])
        full = [unit.state == "unsharded" for unit in units(model)]  # the root's first
        assert strategy is NO or full == [True, *[strategy in (GRAD_OP, HYBRID_GRAD_OP)] * 3], (each, full)
        assert model.sharding_strategy is strategy
        assert len({unit.model for unit in units(model)}) == 1  # all units share slots
        if model.rank == 0:
            rows = 19 if strategy is NO else -(-19 // model.world_size)
            assert model.blocks[0].up.weight.to_local().shape == (rows, WIDTH)


def units(model):
    from libfsdp.hosts.iteration import state_of

    return [state_of(wrapper).unit for wrapper in model.fsdp_modules(model)]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_training(hosted, n):
    hosted(n, training, timeout=120)


def mixed(job):
    """Strategies mixed in one model share a libfsdp.Model, frozen and trainable parameters a unit."""
    rank, size = job.rank, job.size

    def strategy(module):
        if isinstance(module, nn.Embedding):
            return False
        return {"sharding_strategy": NO} if isinstance(module, nn.LayerNorm) else isinstance(module, Block)

    def net():
        net = Net()
        net.blocks[1].up.weight.requires_grad_(False)
        net.blocks[2].requires_grad_(False)
        return net

    plain = net()
    norms = train(plain, 0, 1, clip=clip_plain)
    model = ours(net(), CustomPolicy(strategy))
    got = train(model, rank, size, clip=clip_wrapped)
    assert all(abs(a - b) < 1e-5 * b for a, b in zip(got, norms)), (got, norms)
    assert far(model.state_dict(), plain.state_dict()) < 1e-6
    assert len({unit.model for unit in units(model)}) == 1
    assert {str(unit.info().strategy) for unit in units(model)} == {"1", "3"}
    assert model.blocks[1].up.weight.grad is None and model.blocks[2].down.bias.grad is None


def penalty(model):
    """Its value does not matter to the gradients: this rank's part of the sum."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).pow(2).sum() for p in model.parameters())


def passes(job):
    """Two forwards then two backwards, no_sync in any order, a forward that fails, evaluation between."""
    rank, size = job.rank, job.size
    data = batches(4)

    def part(i):
        return data[i][0][rank::size], data[i][1][rank::size]

    def wanted(*indices, net=None):
        net = net or Net()
        for i in indices:
            loss_of(net, *data[i]).backward()
        return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}

    def close(model, want):
        got = grads(model)
        assert got.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}")

    for strategy in (FULL, GRAD_OP, NO):
        model = ours(sharding_strategy=strategy)
        losses = [loss_of(model, *part(0)), loss_of(model, *part(1))]
        for loss in losses:
            loss.backward()
        close(model, wanted(0, 1))
        model.zero_grad()
        for plan in ("SNNS", "NSNS"):
            for i, step in enumerate(plan):
                with model.no_sync() if step == "N" else contextlib.nullcontext():
                    loss_of(model, *part(i)).backward()
            close(model, wanted(0, 1, 2, 3))
            model.zero_grad()
        failing = model.blocks[1].norm.register_forward_pre_hook(lambda *_: 1 / 0)
        with raises(ZeroDivisionError):
            loss_of(model, *part(0))
        failing.remove()
        with torch.no_grad():
            inside = model(part(1)[0])
        torch.testing.assert_close(inside, Net()(part(1)[0]), rtol=1e-5, atol=1e-6)
        loss_of(model, *part(2)).backward()
        close(model, wanted(2))
    # a penalty on the parameters, made before or after forward, beside gradients that are there already
    for before in (False, True):
        model, plain = ours(), Net()
        for each, mine in ((model, slice(rank, None, size)), (plain, slice(None))):
            for i in range(2):
                values = [penalty(each)] if before else []
                loss = loss_of(each, data[i][0][mine], data[i][1][mine])
                (loss + 0.1 * (values or [penalty(each)])[0]).backward()
                for p in each.parameters():
                    p.grad = p.grad * 1.5
        close(model, wanted(net=plain))
    # an inner wrapper by itself, before the root has run
    model = ours()
    x = torch.ones(2, WIDTH)
    torch.testing.assert_close(model.blocks[1](x), Net().blocks[1](x))
    with raises(RuntimeError, "no_sync"), model.blocks[0].no_sync():
        pass
    loss_of(model, *part(0)).backward()
    close(model, wanted(0))


def checkpointed(job):
    """Activation checkpointing around and inside wrappers; state dicts keep the model's names."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    rank, size = job.rank, job.size
    _, wanted = alone()
    for outside in (False, True):
        model = ours()
        kinds = type(model) if outside else Block
        inside = [wrapper for wrapper in model.fsdp_modules(model) if wrapper is not model]
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=checkpoint_wrapper,
            check_fn=lambda module: module in inside if outside else isinstance(module, kinds),
        )
        train(model, rank, size, clip=clip_wrapped)
        state = model.state_dict()
        assert far(state, wanted) < 1e-6
        assert isinstance(model.fsdp_modules(model)[1].module, Block)
        again = ours()
        again.load_state_dict(state)
        model.load_state_dict(again.state_dict())
        assert far(model.state_dict(), state) == 0




# ---- Construction ----------------------------------------------------------------------------------------------------


def wrapped_paths(model, kind):
    return [
        path.replace("_fsdp_wrapped_module.", "").replace("_fsdp_wrapped_module", "")
        for path, module in model.named_modules()
        if isinstance(module, kind)
    ]


def policies(job):
    from libfsdp.torch import FullyShardedDataParallel as FSDP

    every = [
        ModuleWrapPolicy({Block}),
        ModuleWrapPolicy({Block, nn.Linear, Net}),
        CustomPolicy(lambda module: {"sharding_strategy": GRAD_OP} if isinstance(module, Block) else False),
        functools.partial(size_based_auto_wrap_policy, min_num_params=300),
        functools.partial(size_based_auto_wrap_policy, min_num_params=100),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.LayerNorm)),
    ]

    def net():
        net = Net()
        del net.head
        net.head = nn.Linear(WIDTH, WORDS)  # not tied: ModuleWrapPolicy of Linear would part them
        return net

    for policy in every:
        model, beside = ours(net(), policy), original(job, net(), policy)
        assert wrapped_paths(model, FSDP) == wrapped_paths(beside, theirs.FullyShardedDataParallel), policy
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in beside.named_parameters()]
        x, y = batches(1)[0]
        torch.testing.assert_close(loss_of(model, x, y), loss_of(beside, x, y))
    assert model.check_is_root() and not model.blocks[0].norm.check_is_root()
    assert FSDP.fsdp_modules(model, root_only=True) == [model] and len(FSDP.fsdp_modules(nn.ModuleList([model]))) == 4
    shared = nn.ModuleList([Block()])
    shared.append(shared[0])
    model = ours(nn.Sequential(*shared, nn.Linear(WIDTH, 1)))
    assert isinstance(model[0], FSDP) and model[0] is model[1] and model[0].up is model[0].module.up
    with torch.no_grad():  # wrap and enable_wrap make the same
        from torch.distributed.fsdp.wrap import enable_wrap, wrap

        with enable_wrap(wrapper_cls=FSDP, sharding_strategy=GRAD_OP):
            inner = wrap(Block())
        assert isinstance(inner, FSDP) and inner.sharding_strategy is GRAD_OP


def ignoring(job):
    """What is ignored stays whole and is not reduced; inner wrappers' ignored is ignored outside too."""
    rank, size = job.rank, job.size
    x, y = batches(1)[0]
    for name, value in (
        ("ignored_modules", lambda net: [net.blocks[0]]),
        ("ignored_states", lambda net: [net.blocks[0]]),
        ("ignored_states", lambda net: [*net.blocks[0].parameters(), net.gain]),
    ):
        net = Net()
        given = value(net)
        model = ours(net, ModuleWrapPolicy({Block} if name == "ignored_modules" else {nn.LayerNorm}), **{name: given})
        assert not isinstance(model.blocks[0].up.weight, DTensor) and isinstance(model.blocks[1].up.weight, DTensor)
        assert isinstance(model.gain, DTensor) == (len(given) == 1)
        loss_of(model, x[rank::size], y[rank::size]).backward()
        assert model.blocks[0].up.weight.grad.shape == (2 * WIDTH + 3, WIDTH)
        assert "blocks.0.up.weight" in model.state_dict()
    from libfsdp.torch import FullyShardedDataParallel as FSDP

    net = Net()
    net.blocks[1] = FSDP(net.blocks[1], ignored_modules=[net.blocks[1].up])
    model = FSDP(net)
    assert not isinstance(model.blocks[1].up.weight, DTensor) and isinstance(model.blocks[1].down.weight, DTensor)


class Noisy(nn.Module):
    """Differs between ranks as it is made, with buffers of several dtypes."""

    def __init__(self, rank=0):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([rank == 0, rank == 1, True]))
        self.register_buffer("scratch", torch.full((3,), rank + 0.3), persistent=False)
        with torch.no_grad():
            for value in (*self.parameters(), self.norm.running_mean):
                value.add_(rank + 1)

    def forward(self, x):
        y = self.linear(x)
        return (y - self.norm.running_mean.to(y.dtype)) * self.mask + self.scratch.to(y.dtype)


def beginning(job):
    """sync_module_states, meta modules, param_init_fn."""
    rank = job.rank
    torch.manual_seed(3)
    wanted = Noisy(0)
    for strategy in (FULL, NO, HYBRID):
        torch.manual_seed(3)
        model = ours(Noisy(rank), ModuleWrapPolicy({nn.Linear}), sync_module_states=True, sharding_strategy=strategy)
        assert far(model.state_dict(), wanted.state_dict()) == 0
        assert torch.equal(model.scratch, wanted.scratch)
    x = torch.ones(4, 5)
    with torch.device("meta"):
        lazy = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    torch.manual_seed(4)
    model = ours(lazy, ModuleWrapPolicy({nn.BatchNorm1d}))
    assert torch.equal(model[1].running_var, torch.ones(3))
    assert torch.equal(model[1].weight.full_tensor(), torch.ones(3))
    assert model(x).shape == (4, 2) and model.state_dict()["0.weight"].abs().max() > 0
    with torch.device("meta"):
        lazy = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))

    def fill(module):
        if isinstance(module, nn.Linear):
            module.to_empty(device="cpu", recurse=False)
            nn.init.constant_(module.weight, module.in_features)
            nn.init.constant_(module.bias, 0.5)

    model = ours(lazy, ModuleWrapPolicy({nn.Linear}), param_init_fn=fill)
    assert torch.equal(model(x), torch.full((4, 2), (5 * 5 + 0.5) * 3 * 3 + 0.5))
    with torch.device("meta"):
        bare = nn.Sequential(nn.Linear(5, 3))
        bare.extra = nn.Parameter(torch.empty(3))
    same_error(lambda: ours(bare, None), lambda: original(job, bare, None))


def misuse(job):
    """The classes of errors are torch's, and nothing hangs."""
    from libfsdp.torch import FullyShardedDataParallel as FSDP

    def both(ours_options, theirs_options=None, net=Net, policy=None):
        same_error(
            lambda: ours(net, policy, **ours_options),
            lambda: original(job, net, policy, **(ours_options if theirs_options is None else theirs_options)),
        )

    mesh = dist.init_device_mesh("cpu", (job.size,))
    both({"process_group": job.gloo, "device_mesh": mesh})
    both({"ignored_modules": [], "ignored_states": []})
    both({"ignored_states": [nn.Linear(1, 1), nn.Parameter(torch.ones(1))]})
    both({"ignored_modules": [nn.Parameter(torch.ones(1))]})
    both({"ignored_modules": 5})
    hybrid = {"device_mesh": mesh, "sharding_strategy": HYBRID}
    both(hybrid, {"process_group": None} | hybrid)
    both({"process_group": job.gloo, "sharding_strategy": HYBRID})
    scalar = nn.Linear(2, 2)
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    both({}, net=scalar)
    for option, kind, text in (
        ({"device_id": 0}, ValueError, "host memory"),
        ({"device_id": "cuda"}, ValueError, "host memory"),
        ({"sharding_strategy": "FULL_SHARD"}, ValueError, "ShardingStrategy"),
        ({"backward_prefetch": True}, ValueError, "BackwardPrefetch"),
        ({"process_group": (job.fsdp, job.gloo)}, ValueError, "HYBRID_SHARD"),
        ({"process_group": "gloo"}, ValueError, "process_group"),
        ({"policy": 3}, TypeError, "auto_wrap_policy"),
    ):
        with raises(kind, text):
            ours(**option)
    with raises(TypeError, "nn.Module"):
        FSDP(3)
    same_error(
        lambda: ours(nn.Sequential(FSDP(Block()))), lambda: original(job, nn.Sequential(original(job, Block(), None)))
    )
    net = Net()
    net.head = FSDP(net.head)
    with raises(ValueError, "share a parameter"):  # tied with words.weight, which would be in another unit
        FSDP(net)
    model = ours()
    with raises(AssertionError, "deepcopy"):
        __import__("copy").deepcopy(model)
    with raises(AttributeError, "missing"):
        model.missing  # noqa: B018
    inner = model.blocks[0]
    with raises(RuntimeError, "root"):
        inner.clip_grad_norm_(1.0)
    with raises(AssertionError, "root"):
        inner.register_comm_hook(None, print)
    with raises(ValueError, "callable"):
        model.register_comm_hook(None, 3)
    beside = original(job)
    for options in ({"rank0_only": True}, {"with_grads": True, "offload_to_cpu": True}):
        same_error(
            lambda: FSDP.summon_full_params(model, **options).__enter__(),
            lambda: theirs.FullyShardedDataParallel.summon_full_params(beside, **options).__enter__(),
        )
    with FSDP.summon_full_params(model):
        with raises(AssertionError, "already"):
            FSDP.summon_full_params(model).__enter__()
        with raises(AssertionError, "summon_full_params"):
            model(batches(1)[0][0])
    model.blocks[1].module.norm.register_forward_hook(lambda *_: FSDP.summon_full_params(model).__enter__())
    with raises(AssertionError, "forward"):
        model(batches(1)[0][0])
    same_error(
        lambda: FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, theirs.ShardedStateDictConfig()),
        lambda: theirs.FullyShardedDataParallel.set_state_dict_type(
            beside, StateDictType.FULL_STATE_DICT, theirs.ShardedStateDictConfig()
        ),
    )




# ---- Precision -------------------------------------------------------------------------------------------------------


class Seen(nn.Linear):
    """Remembers the dtypes that it computed with."""

    def forward(self, x):
        self.seen = (x.dtype, self.weight.dtype)
        return super().forward(x)


def precision(job):
    rank, size = job.rank, job.size
    low, f32 = torch.bfloat16, torch.float32

    def net():
        torch.manual_seed(6)
        inner = nn.Sequential(Seen(6, 6), nn.Tanh())
        return nn.Sequential(Seen(6, 6), nn.BatchNorm1d(6), Seen(6, 6), inner, Seen(6, 2))

    policy = ModuleWrapPolicy({nn.Sequential})
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(8, 6, generator=generator) for _ in range(4)]
    for options in (
        {"param_dtype": low, "reduce_dtype": f32},
        {"param_dtype": low},
        {"reduce_dtype": low},
        {"param_dtype": low, "buffer_dtype": low, "cast_forward_inputs": True, "cast_root_forward_inputs": False},
        {"param_dtype": low, "_module_classes_to_ignore": (nn.BatchNorm1d, nn.Tanh)},
    ):
        made = [ours(net(), policy, mixed_precision=MixedPrecision(**options))]
        made.append(original(job, net(), policy, mixed_precision=MixedPrecision(**options)))
        results = []
        for model in made:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x in data:
                output = model(x[rank::size])
                output.float().pow(2).sum().backward()
                kept = {p.grad.dtype for p in model.parameters() if p.grad is not None}
                optimizer.step()
                optimizer.zero_grad()
            seen = [module.seen for module in model.modules() if isinstance(module, Seen)]
            results.append((output.dtype, kept, seen, {n: b.dtype for n, b in model.named_buffers()}))
        assert results[0] == results[1], (options, results)
        mine, other = (model.state_dict() for model in made)
        assert {k: v.dtype for k, v in mine.items()} == {k: v.dtype for k, v in other.items()}
        assert far(mine, other) < (0.05 if low in options.values() else 1e-5), options
    model = ours(net(), policy, mixed_precision=MixedPrecision(low, low, keep_low_precision_grads=True))
    model(data[0]).float().sum().backward()
    assert {p.grad.dtype for p in model[0].parameters()} == {low} and model[0].weight.dtype == f32
    with model.summon_full_params(model):
        assert model[0].weight.dtype == f32 and torch.equal(model[0].weight, net()[0].weight)


def buffers(job):
    """Case A15: buffers compute in buffer_dtype and are saved as they were made, each by its own dtype."""
    torch.manual_seed(3)
    policy = ModuleWrapPolicy({nn.Linear})
    wanted = Noisy(0)
    torch.manual_seed(3)
    half = MixedPrecision(buffer_dtype=torch.float16, _module_classes_to_ignore=())
    model = ours(Noisy(0), policy, mixed_precision=half)
    model(torch.ones(4, 5))
    expected = {"norm.running_mean": torch.float16, "norm.running_var": torch.float16, "scratch": torch.float16}
    expected |= {"norm.num_batches_tracked": torch.int64, "mask": torch.bool}
    got = {name.replace("_fsdp_wrapped_module.", ""): buffer.dtype for name, buffer in model.named_buffers()}
    assert got == expected
    for kind in StateDictType:
        with model.state_dict_type(model, kind):
            state = model.state_dict()
        assert {k: v.dtype for k, v in state.items()} == {k: v.dtype for k, v in wanted.state_dict().items()}, kind
        assert "scratch" not in state
    assert {n.replace("_fsdp_wrapped_module.", ""): b.dtype for n, b in model.named_buffers()} == expected
    model.load_state_dict(wanted.state_dict())
    assert model.norm.running_mean.dtype == torch.float16
    torch.testing.assert_close(model.norm.running_mean.float(), wanted.norm.running_mean, rtol=1e-3, atol=1e-3)




# ---- Gradients -------------------------------------------------------------------------------------------------------


class Parts(nn.Module):
    """One part for each strategy, and one that is ignored."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.whole, self.sharded, self.small = nn.Linear(4, 7), nn.Linear(7, 3), nn.Linear(3, 1)
        self.own = nn.Linear(3, 1)

    def forward(self, x):
        y = self.sharded(torch.tanh(self.whole(x)))
        return self.small(y) + self.own(y)


def parts(make, **options):
    net = Parts()
    policy = CustomPolicy(lambda module: {"sharding_strategy": NO} if module is net.whole else module is net.sharded)
    return make(net, policy, ignored_modules=[net.own], **options)


def clipping(job):
    """The norm is that of one vector: units of both strategies, ignored parameters once; replaced and missing
    gradients; NaN and infinity on every rank."""
    rank, size = job.rank, job.size
    x = torch.arange(24.0).view(6, 4) / 10

    def backward(model):
        model(x).pow(2).mean().backward()  # the same on every rank, so that ignored gradients agree

    for p in (1, 2, 2.5, math.inf, "inf"):
        plain, model, beside = Parts(), parts(ours), parts(functools.partial(original, job))
        for each in (plain, model, beside):
            backward(each)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, float(p))
        got, other = model.clip_grad_norm_(0.1, p), beside.clip_grad_norm_(0.1, p)
        assert got.dtype == other.dtype and got.shape == other.shape
        torch.testing.assert_close(got, norm)
        torch.testing.assert_close(other, norm)
        for name, grad in grads(model).items():
            torch.testing.assert_close(grad, plain.get_parameter(name).grad, rtol=1e-5, atol=1e-7)
        before = grads(model)
        model.clip_grad_norm_(1e6, p)
        assert all(torch.equal(grad, before[name]) for name, grad in grads(model).items())
    # what the program put in the place of a gradient counts, and what it took away does not
    plain, model = Parts(), parts(ours)
    for each in (plain, model):
        backward(each)
        each.small.weight.grad = each.small.weight.grad * 3
        each.sharded.weight.grad = None
    want = nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
    torch.testing.assert_close(model.clip_grad_norm_(0.2), want)
    assert model.sharded.weight.grad is None
    torch.testing.assert_close(model.small.weight.grad.full_tensor(), plain.small.weight.grad)
    for bad in (math.inf, math.nan):
        for name in ("sharded", "own"):
            model = parts(ours)
            backward(model)
            if rank == size - 1:
                grad = getattr(model, name).weight.grad
                (grad.to_local() if isinstance(grad, DTensor) else grad).flatten()[:1] = bad
            norm = model.clip_grad_norm_(0.1)
            assert (math.isinf if math.isinf(bad) else math.isnan)(norm), (bad, name, norm)
    with raises(ValueError, "norm_type"):
        model.clip_grad_norm_(1.0, 0)


def hooks(job):
    """torch's communication hooks and a program's own, reductions in place for NO_SHARD."""
    from torch.distributed.algorithms._comm_hooks import default_hooks

    rank, size = job.rank, job.size
    norms, wanted = alone()
    for strategy in (FULL, GRAD_OP, NO):
        plain = default_hooks.allreduce_hook if strategy is NO else default_hooks.reduce_scatter_hook
        for hook, kind, tolerance in (
            (plain, default_hooks.DefaultState, 1e-6),
            (default_hooks.bf16_compress_hook, default_hooks.LowPrecisionState, 0.2),
            (default_hooks.fp16_compress_hook, default_hooks.LowPrecisionState, 0.2),
        ):
            model = ours(sharding_strategy=strategy)
            state = kind(process_group=job.fsdp)
            seen = []

            def spy(state, *tensors, hook=hook, seen=seen):
                seen.append([tensor.shape for tensor in tensors])
                hook(state, *tensors)

            model.register_comm_hook(state, hook if tolerance > 0.1 else spy)
            with raises(AssertionError, "already"):
                model.register_comm_hook(state, hook)
            got = train(model, rank, size, clip=clip_wrapped)
            assert all(abs(a - b) < max(tolerance, 1e-5) * b for a, b in zip(got, norms)), (strategy, hook, got)
            distance = far(model.state_dict(), wanted)
            assert distance < tolerance, (strategy, hook, distance)
            assert tolerance < 0.1 or distance > 1e-6  # it has been compressed
            if tolerance < 0.1:
                assert len(seen) == 4 * STEPS and {len(shapes) for shapes in seen} == {1 if strategy is NO else 2}
    model = ours()
    state = default_hooks.DefaultState(process_group=job.fsdp)
    model.register_comm_hook(state, default_hooks.reduce_scatter_hook)
    x, y = batches(2)[0]
    with model.no_sync():
        loss_of(model, x[rank::size], y[rank::size]).backward()
    x, y = batches(2)[1]
    loss_of(model, x[rank::size], y[rank::size]).backward()
    plain = Net()
    for x, y in batches(2):
        loss_of(plain, x, y).backward()
    for name, grad in grads(model).items():
        torch.testing.assert_close(grad, plain.get_parameter(name).grad, rtol=1e-5, atol=1e-6)


def several(job, *names):
    together(job, names, globals())


@pytest.mark.parametrize(
    "workers",
    [
        ("mixed", "passes", "checkpointed", "policies", "ignoring", "beginning", "misuse"),
        ("precision", "buffers", "clipping", "hooks"),
    ],
    ids=["programs", "values"],
)
def test_together(hosted, workers):
    hosted(2, several, *workers, timeout=120)
