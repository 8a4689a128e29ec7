"""libfsdp.torch.fully_shard, beside torch's own on gloo in the same processes, and beside one process with the whole
batch."""

import inspect
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import libfsdp.torch as ours

WIDTH, BATCH = 16, 12


# ---- Models and how they are compared --------------------------------------------------------------------------------


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


def batches(count):
    generator = torch.Generator().manual_seed(9)
    return [
        (torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, 1, generator=generator))
        for _ in range(count)
    ]


def mean_square(model, x, y):
    return nn.functional.mse_loss(model(x).float(), y)


def train(model, job, steps=5, alone=False, loss=mean_square, data=batches, after=None):
    """The losses of this rank's part of each batch; alone: of the whole batches."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
    mine = slice(None) if alone else slice(job.rank, None, job.size)
    losses = []
    for x, y in data(steps):
        value = loss(model, x[mine], y[mine])
        value.backward()
        if after is not None:
            after()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def close(model, reference, tolerance=1e-6):
    """All parameters of one model are those of the other."""
    got, wanted = dict(model.named_parameters()), dict(reference.named_parameters())
    assert list(got) == list(wanted)
    for name in wanted:
        difference = (whole(got[name]).float() - whole(wanted[name]).float()).abs().max().item()
        assert difference <= tolerance, (name, difference)


def close_gradients(model, reference, factor=1.0, tolerance=2e-5):
    """Gradients times factor, where the other has one; none, where it has none."""
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(whole(p.grad) * factor, whole(q.grad), rtol=tolerance, atol=tolerance, msg=name)


def sharded(model=None, fully_shard=None, layers=None, **options):
    model = network() if model is None else model
    fully_shard = fully_shard or ours.fully_shard
    for layer in model if layers is None else layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def refused(call, kind, words=""):
    try:
        call()
    except kind as error:
        assert words in str(error), error
        return error
    raise AssertionError(f"not refused with {kind}")


# ---- Training --------------------------------------------------------------------------------------------------------


def parity(job):
    alone = network()
    train(alone, job, alone=True)
    on_gloo = DeviceMesh.from_group(job.gloo, "cpu")
    for options in ({}, {"reshard_after_forward": True}, {"reshard_after_forward": False}, {"mesh": on_gloo}):
        model = sharded(**options)
        losses = train(model, job)
        close(model, alone)
        other = sharded(fully_shard=theirs.fully_shard, **(options | {"mesh": on_gloo}))
        torch.testing.assert_close(losses, train(other, job), rtol=1e-5, atol=1e-6)
        close(model, other)
        for p, q in zip(model.parameters(), other.parameters()):  # and they lie alike
            assert p.placements == q.placements and p.shape == q.shape and p.stride() == q.stride()
            assert torch.Size(p.to_local().shape) == q.to_local().shape and p.dtype == q.dtype
        assert list(model.state_dict()) == list(other.state_dict())
    # With clipping by torch's own function.
    clipped, plain = sharded(), network()
    train(clipped, job, after=lambda: nn.utils.clip_grad_norm_(clipped.parameters(), 0.3))
    train(plain, job, alone=True, after=lambda: nn.utils.clip_grad_norm_(plain.parameters(), 0.3))
    close(clipped, plain)
    if job.size == 4:
        model = sharded(reshard_after_forward=2)
        train(model, job)
        close(model, alone)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = sharded(mesh=mesh)
        train(model, job)
        close(model, alone)
        assert model[0].up.weight.placements == (Replicate(), Shard(0))
    # Low precision: as torch's own, to its rounding.
    for policy in (theirs.MixedPrecisionPolicy(torch.bfloat16), theirs.MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        model, other = sharded(mp_policy=policy), sharded(fully_shard=theirs.fully_shard, mp_policy=policy)
        train(model, job)
        train(other, job)
        close(model, alone, 0.06)
        close(model, other, 0.01)
    policy = theirs.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64, cast_forward_inputs=False)
    layer = ours.fully_shard(nn.Linear(WIDTH, 2), mp_policy=policy)
    refused(lambda: layer(torch.ones(1, WIDTH)), RuntimeError)  # float32 inputs meet bfloat16 weights
    assert layer(torch.ones(1, WIDTH, dtype=torch.bfloat16)).dtype == torch.float64


@pytest.mark.parametrize("n", [1, 2, 4])
def test_training_is_that_of_one_process_and_of_torch(hosted, n):
    hosted(n, parity, fresh=n == 2)


# ---- Models that people have -----------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, count, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, count, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, count, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """With the embedding as the last layer's weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.words = nn.Embedding(19, WIDTH)
        self.layers = nn.ModuleList(Attention(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 19, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sentences(count):
    generator = torch.Generator().manual_seed(3)
    return [(t, t) for t in (torch.randint(0, 19, (BATCH, 7), generator=generator) for _ in range(count))]


def next_word(model, x, y):
    return nn.functional.cross_entropy(model(x)[:, :-1].flatten(0, 1), y[:, 1:].flatten())


class LowRank(nn.Module):
    """A frozen layer with trainable low-rank additions, between trainable ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.before = nn.Linear(WIDTH, WIDTH)
        self.base, self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH)
        self.frozen, self.after = Block(), nn.Linear(WIDTH, 1)
        self.base.requires_grad_(False)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = torch.tanh(self.before(x))
        x = self.base(x) + self.b(self.a(x))
        return self.after(self.frozen(torch.tanh(x)))


class Experts(nn.Module):
    """Each row goes to one of four experts, so ranks use different ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.gate, self.experts = nn.Linear(WIDTH, 4, bias=False), nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        best = scores.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (best == index).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * scores[rows, index : index + 1])
        return out


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = Experts(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(self.body(x))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.norm = nn.Conv1d(1, 6, 3, padding=1), nn.BatchNorm1d(6)
        self.second, self.head = nn.Conv1d(6, 5, 3), nn.Linear(5, 1)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x[:, None])))
        return self.head(torch.relu(self.second(x)).mean(-1))


def models(job):
    for make, layers, loss, data in (
        (GPT, lambda m: m.layers, next_word, sentences),
        (LowRank, lambda m: [m.before, m.frozen, m.after], mean_square, batches),
        (Mixture, lambda m: [m.body], mean_square, batches),
    ):
        alone, model = make(), make()
        sharded(model, layers=layers(model))
        train(alone, job, 20, alone=True, loss=loss, data=data)
        train(model, job, 20, loss=loss, data=data)
        close(model, alone)
    # BatchNorm's statistics are of a rank's part of the batch, with every data parallelism: beside DDP.
    model, other = Convolutions(), Convolutions()
    sharded(model, layers=[model.first, model.second])
    ddp = nn.parallel.DistributedDataParallel(other, process_group=job.gloo, broadcast_buffers=False)
    train(model, job, 20)
    train(ddp, job, 20)
    close(model, other)
    torch.testing.assert_close(model.norm.running_mean, other.norm.running_mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [2, 4])
def test_models_that_people_have_come_to_the_same_after_20_steps(hosted, n):
    hosted(n, models)


# ---- Passes of all kinds ---------------------------------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self, kind=None):
        super().__init__()
        torch.manual_seed(3)
        self.block, self.head, self.kind = Block(), nn.Linear(WIDTH, 1), kind

    def forward(self, x):
        for _ in range(2):
            if self.kind is None:
                x = self.block(x)
            else:
                x = checkpoint(self.block, x, use_reentrant=self.kind == "reentrant")
        return self.head(x)


class Segments(nn.Module):
    """Two parts of one unit that are computed again."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.reentrant = Block(), Block(), reentrant

    def forward(self, x):
        x = checkpoint(self.a, x, use_reentrant=self.reentrant)
        return checkpoint(self.b, x, use_reentrant=self.reentrant)


class Outputs(nn.Module):
    """Gives its results in containers, and has a layer that only some losses use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.block, self.one, self.other = Block(), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = self.block(x)
        return {"one": [self.one(x)], "rest": (self.other(x), None, 3)}


def passes(job):
    n, mine = job.size, slice(job.rank, None, job.size)
    x = [batch[0] for batch in batches(4)]
    # Two forwards, then two backwards (A04).
    model, plain = sharded(), network()
    for m, rows in ((model, mine), (plain, slice(None))):
        first, second = m(x[0][rows]).sum(), m(x[1][rows]).square().sum()
        first.backward()
        second.backward()
    close_gradients(model, plain, n)
    # The same module twice in one forward, without and with activation checkpointing around it.
    for kind in (None, "reentrant", "saved"):
        model, plain = Twice(kind), Twice(kind)
        sharded(model, layers=[model.block])
        for m, rows in ((model, mine), (plain, slice(None))):
            m(x[0].clone().requires_grad_()[rows]).square().sum().backward()
        close_gradients(model, plain, n)
    for reentrant in (False, True):
        model, plain = ours.fully_shard(Segments(reentrant)), Segments(reentrant)
        for m, rows in ((model, mine), (plain, slice(None))):
            m(x[0].clone().requires_grad_()[rows]).square().sum().backward()
        close_gradients(model, plain, n)
    # Micro-batches with and without sync in any order (A06).
    for plan in ("SNNS", "NSNS", "NNS"):
        model, plain = sharded(), network()
        for i, sync in enumerate(plan):
            model.set_requires_gradient_sync(sync == "S")
            model.set_is_last_backward(i == len(plan) - 1)
            model(x[i][mine]).square().sum().backward()
            plain(x[i]).square().sum().backward()
        close_gradients(model, plain, n)
    if n == 4:  # reduced every time over the shards, over the replicas at the end
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model, plain = sharded(mesh=mesh), network()
        for i in range(3):
            model.set_requires_all_reduce(i == 2)
            model(x[i][mine]).square().sum().backward()
            plain(x[i]).square().sum().backward()
        close_gradients(model, plain, n)
    # Parameters stay full between micro-batches when they are told to.
    model, plain = sharded(), network()
    model.set_reshard_after_backward(False)
    for i in range(2):
        model.set_is_last_backward(i == 1)
        model(x[i][mine]).square().sum().backward()
        assert model[0]._get_fsdp_state().is_full == (i == 0)
        plain(x[i]).square().sum().backward()
    close_gradients(model, plain, n)
    # What is not used by the loss is sharded again, and it has no gradient (A03).
    model, plain = Outputs(), Outputs()
    sharded(model, layers=[model.block, model.one, model.other])
    for use in ("one", "both"):
        for m, rows in ((model, mine), (plain, slice(None))):
            out = m(x[0][rows])
            loss = out["one"][0].sum()
            (loss if use == "one" else loss + out["rest"][0].square().sum()).backward()
        assert all(isinstance(p, DTensor) for p in model.parameters())
        close_gradients(model, plain, n)
    # Evaluation, inference mode, and training afterwards.
    model, plain = sharded(), network()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(model(x[0]), plain(x[0]), rtol=1e-5, atol=1e-6)
    train(model, job)
    train(plain, job, alone=True)
    with torch.no_grad():
        torch.testing.assert_close(model(x[0]), plain(x[0]), rtol=1e-5, atol=1e-5)
        for p in model.parameters():
            p.add_(1.0)
        for p in plain.parameters():
            p.add_(1.0)
        torch.testing.assert_close(model(x[0]), plain(x[0]), rtol=1e-5, atol=1e-4)  # not the values of before


@pytest.mark.parametrize("n", [2, 4])
def test_passes_of_all_kinds(hosted, n):
    hosted(n, passes)


# ---- Gradients and parameters between passes -------------------------------------------------------------------------


def between(job):
    n, mine = job.size, slice(job.rank, None, job.size)
    x = [batch[0] for batch in batches(4)]
    # Frozen and thawed between steps; nothing is reduced for what is frozen (A05).
    model, plain = sharded(), network()
    for i in range(4):
        if i in (0, 2):
            for m in (model, plain):
                m[0].up.requires_grad_(i == 2)
                m[1].requires_grad_(i == 2)
        for m, rows in ((model, mine), (plain, slice(None))):
            m(x[i][rows]).square().sum().backward()
        close_gradients(model, plain, n)
        if i == 0:
            unit = model[1]._get_fsdp_state().unit
            assert unit.info().reduced_bytes == 0 and all(param.grad is None for param in unit)
    # A gradient that somebody keeps is not written again; one that somebody put there is added to.
    model = sharded()
    model(x[0][mine]).sum().backward()
    kept = model[0].up.weight.grad
    values = kept.to_local().clone()
    model.zero_grad()
    model(x[1][mine]).square().sum().backward()
    assert torch.equal(kept.to_local(), values) and not torch.equal(model[0].up.weight.grad.to_local(), values)
    del kept
    model.zero_grad(set_to_none=False)
    model(x[0][mine]).sum().backward()
    torch.testing.assert_close(model[0].up.weight.grad.to_local(), values)
    for p in model.parameters():
        p.grad = p.grad * 2
    model(x[0][mine]).sum().backward()
    torch.testing.assert_close(model[0].up.weight.grad.to_local(), 3 * values)
    model[0].up.weight.grad = None  # one of many
    model(x[0][mine]).sum().backward()
    torch.testing.assert_close(model[0].up.weight.grad.to_local(), values)
    # Hooks on sharded parameters see sharded gradients.
    seen = []
    model[0].up.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
    model.zero_grad()
    model(x[0][mine]).sum().backward()
    torch.testing.assert_close(seen, [values])
    # State dicts: after an evaluation too, loaded by copy and by assignment, whole and into other ranks' shards.
    reference = network()
    train(model := sharded(), job)
    train(reference, job, alone=True)
    with torch.no_grad():
        wanted = model(x[0])
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(isinstance(value, DTensor) for value in saved.values())
    for assign in (False, True):
        other = sharded()
        other(x[0][mine])
        other.load_state_dict(saved, assign=assign)
        with torch.no_grad():
            assert torch.equal(other(x[0]), wanted)
        train(other, job, 1)
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    full = StateDictOptions(full_state_dict=True)
    values = get_model_state_dict(model, options=full)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=1e-6)
    other = sharded()
    set_model_state_dict(other, values, options=full)
    with torch.no_grad():
        assert torch.equal(other(x[0]), wanted)
    # From the meta device, and to another dtype.
    with torch.device("meta"):
        empty = network()
    sharded(empty)
    refused(lambda: empty(x[0]), RuntimeError, "0.norm.weight")
    empty.to_empty(device="cpu")
    empty.load_state_dict(saved)
    with torch.no_grad():
        assert torch.equal(empty(x[0]), wanted)
    other = sharded()
    other(x[0])
    other.to(torch.float64)
    other(x[0].double()).sum().backward()
    assert other[0].up.weight.grad.dtype == torch.float64
    other, plain = ours.fully_shard(network()), network()  # which is full after a forward
    other(x[0])
    with torch.no_grad():
        torch.testing.assert_close(other.to(torch.float64)(x[0].double()), plain.double()(x[0].double()))
    assert all(isinstance(p, DTensor) for p in other.to(torch.float32).parameters())
    # Values that a program writes to the shards, in whatever way, are what the next forward uses.
    other = sharded()
    for write in (
        lambda p: p.to_local().copy_(p.to_local() + 1),
        lambda p: p.data.add_(1),
        lambda p: setattr(p, "_local_tensor", p._local_tensor + 1),
    ):
        with torch.no_grad():
            before = other(x[0])
            for p in other[2].parameters():
                write(p)
            assert not torch.equal(other(x[0]), before), inspect.getsource(write)
    # An exception in a forward, on every rank: the next iteration is as if it had not been.
    model = sharded()
    model(x[0][mine]).sum().backward()
    values = model[0].up.weight.grad.to_local().clone()
    model.zero_grad()
    handle = model[1].register_forward_pre_hook(lambda *_: refused_now())
    refused(lambda: model(x[0][mine]), ArithmeticError)
    handle.remove()
    model(x[0][mine]).sum().backward()
    torch.testing.assert_close(model[0].up.weight.grad.to_local(), values)
    model.reset_iter_state()
    model(x[0][mine]).sum().backward()
    torch.testing.assert_close(model[0].up.weight.grad.to_local(), values)


def refused_now():
    raise ArithmeticError("on purpose")


def test_between_passes(hosted):
    hosted(2, between)


# ---- What fully_shard and its modules offer --------------------------------------------------------------------------


def offers(job):
    n, rank, mine = job.size, job.rank, slice(job.rank, None, job.size)
    x = [batch[0] for batch in batches(4)]
    model = network()
    assert ours.fully_shard(model[0]) is model[0] and ours.fully_shard(model) is model
    assert type(model).__name__ == "FSDPSequential" and isinstance(model, nn.Sequential)
    assert isinstance(model, ours.FSDPModule) and isinstance(model, theirs.FSDPModule)
    assert type(model[:2]) is nn.Sequential  # what is made of it is not sharded
    # Every method of torch's, with its parameters.
    for name, method in inspect.getmembers(theirs.FSDPModule, inspect.isfunction):
        if not name.startswith("_"):
            assert getattr(ours.FSDPModule, name) is not method, name
            wanted, got = inspect.signature(method).parameters, inspect.signature(getattr(ours.FSDPModule, name)).parameters
            assert [(p.name, p.default, p.kind) for p in wanted.values()] == [
                (p.name, p.default, p.kind) for p in got.values()
            ], name
    wanted = inspect.signature(theirs.fully_shard).parameters
    assert list(wanted) == list(inspect.signature(ours.fully_shard).parameters)
    # Any dimension, even or not; parameters that stay whole; modules that run together as one unit.
    plain, model = network(), network()
    kept = model[0].norm.weight
    sharded(
        model,
        shard_placement_fn=lambda p: Shard(p.dim() - 1) if p.dim() > 1 else None,
        ignored_params={kept},
    )
    assert model[0].norm.weight is kept and model[0].down.weight.placements == (Shard(1),)
    for m, rows in ((model, mine), (plain, slice(None))):
        m(x[0][rows]).square().sum().backward()
    kept.grad = None
    plain[0].norm.weight.grad = None
    close_gradients(model, plain, n)
    plain, model = network(), network()
    ours.fully_shard([model[0], model[1]])
    ours.fully_shard(model)
    assert model[0]._get_fsdp_state() is model[1]._get_fsdp_state()
    nested = network()
    ours.fully_shard([nested[0], nested[0].up])  # what is inside another of them is that one's
    assert not isinstance(nested[0].up, ours.FSDPModule) and isinstance(nested[0].up.weight, DTensor)
    train(plain, job, alone=True)
    train(model, job)
    close(model, plain)
    assert model[0]._get_fsdp_state().unit.info().publications <= 10  # in forward and in backward, not for each module
    # Divided by what one says, alike on a mesh of replicas (A08).
    for mesh in [None] + ([init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))] if n == 4 else []):
        plain, model = network(), sharded(mesh=mesh)
        for module in (*model, model):
            module.set_gradient_divide_factor(300.0)
        for m, rows in ((model, mine), (plain, slice(None))):
            m(x[0][rows]).square().sum().backward()
        close_gradients(model, plain, 300.0)
    # Unshard by hand: the module shows whole parameters; edits are this rank's and are dropped.
    model = sharded()
    handle = model[0].unshard(async_op=True)
    assert isinstance(handle, ours.UnshardHandle)
    handle.wait()
    assert not isinstance(model[0].up.weight, DTensor) and torch.equal(model[0].up.weight, network()[0].up.weight)
    with torch.no_grad():
        model[0].up.weight.add_(rank + 1.0)
    model[0].reshard()
    assert isinstance(model[0].up.weight, DTensor)
    assert torch.equal(whole(model[0].up.weight), network()[0].up.weight)
    # Another method than forward.
    class Speaker(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return self.speak(x)

        def speak(self, x):
            return self.block.up(x).sum()

    model, plain = ours.fully_shard(Speaker()), Speaker()
    with torch.no_grad():
        for p, q in zip(plain.parameters(), model.parameters()):
            p.copy_(whole(q))
    refused(lambda: model.speak(x[0]), RuntimeError)
    ours.register_fsdp_forward_method(model, "speak")
    ours.register_fsdp_forward_method(nn.Linear(1, 1), "nothing")
    refused(lambda: ours.register_fsdp_forward_method(model, "nothing"), ValueError, "nothing")
    for call in (model, model.speak):
        model.zero_grad(), plain.zero_grad()
        call(x[0][mine]).backward()
        plain(x[0]).backward()
        close_gradients(model, plain, n)
    # Prefetch as one says; settings that change nothing here are there.
    model, plain = sharded(), network()
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[2].set_modules_to_backward_prefetch([model[1], model[0]])
    model.set_force_sum_reduction_for_comms(True)
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_unshard_in_backward(True)
    ours.share_comm_ctx([model, model[0]])
    train(model, job)
    train(plain, job, alone=True)
    close(model, plain)
    # Communication of one's own, as torch's own fully_shard calls it.
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

    calls = []

    class Gather(AllGather):
        def allocate(self, size, *, dtype, device):
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            calls.append(("gather", output_tensor.numel()))
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

    class Reduce(ReduceScatter):
        allocate = Gather.allocate

        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            calls.append(("reduce", input_tensor.numel()))
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group=group, async_op=async_op)

    counts = []
    for fully_shard in (ours.fully_shard, theirs.fully_shard):
        calls.clear()
        model, hooked = sharded(fully_shard=fully_shard), []
        model[1].set_custom_all_gather(Gather())
        model[1].set_custom_reduce_scatter(Reduce())
        model[2].set_all_reduce_hook(lambda t: hooked.append(t.numel()))
        train(model, job)
        close(model, plain)
        counts.append((list(calls), hooked))
    assert counts[0] == counts[1] and counts[0][0]
    # And the hook's changes count.
    model, plain = sharded(), network()
    for module in (*model, model):
        module.set_all_reduce_hook(lambda t: t.mul_(2))
    for m, rows in ((model, mine), (plain, slice(None))):
        m(x[0][rows]).square().sum().backward()
    close_gradients(model, plain, n / 2)
    # On top of tensor parallelism.
    if n == 4:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(1)
        plain = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, 1))
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, 1))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        ours.fully_shard(model, mesh=mesh["dp"])
        part = slice(mesh["dp"].get_local_rank(), None, 2)
        for m, rows in ((model, part), (plain, slice(None))):
            m(x[0][rows]).square().sum().backward()
        close_gradients(model, plain, 2)


@pytest.mark.parametrize("n", [2, 4])
def test_what_it_offers(hosted, n):
    hosted(n, offers)


# ---- Misuse ----------------------------------------------------------------------------------------------------------


class Hidden:
    """A container that fully_shard can't look into."""

    def __init__(self, value):
        self.value = value


def misuse(job):
    import copy

    x = batches(1)[0][0]
    for fully_shard in (ours.fully_shard, theirs.fully_shard):
        refused(lambda: fully_shard(nn.ModuleList([nn.Linear(1, 1)])), ValueError, "containers")
        scalar = nn.Linear(2, 2)
        scalar.scale = nn.Parameter(torch.tensor(1.0))
        refused(lambda: fully_shard(scalar), ValueError, "scalar parameters. Change scale")
        refused(lambda: fully_shard(nn.Linear(2, 2), reshard_after_forward=3), ValueError, "factor of 2, not 3")
        refused(lambda: fully_shard(nn.Linear(2, 2), reshard_after_forward="no"), ValueError, "bool or an int")
        square = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
        refused(lambda: fully_shard(nn.Linear(2, 2), mesh=square), ValueError, "1D or 2D")
        refused(lambda: fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda p: Shard(2)), (AssertionError, IndexError))
        model = sharded(fully_shard=fully_shard)
        refused(lambda: copy.deepcopy(model), AssertionError, "deepcopy")
        refused(lambda: model.set_modules_to_forward_prefetch([nn.Linear(1, 1)]), ValueError, "FSDPModule")
        inner = network()
        fully_shard(inner[0])
        inner[0](x)
        fully_shard(inner)
        refused(lambda: inner(x), RuntimeError, "lazily initialized")
    model = sharded()
    refused(lambda: ours.fully_shard(model), RuntimeError, "already been applied")
    refused(lambda: ours.fully_shard([]), ValueError, "at least one")
    refused(lambda: ours.fully_shard("no module"), TypeError)
    # A parameter that two calls would own (A01).
    tied = network()
    tied[1].extra = tied[2].weight
    ours.fully_shard(tied[2])
    refused(lambda: ours.fully_shard(tied[1]), ValueError, "'extra' of Block")
    del tied  # memory of it may be used again: no false alarm
    for _ in range(3):
        sharded()
    # Outputs that can't be seen: no silent wrong numbers.
    class Hides(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, 1)

        def forward(self, x):
            return Hidden(self.layer(x))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Hides()

        def forward(self, x):
            return self.inner(x).value

    outer = Outer()
    sharded(outer, layers=[outer.inner])
    out = outer(x)
    refused(lambda: out.sum().backward(), RuntimeError, "none of its outputs")
    # Ranks that differ are told so, and not left waiting.
    model = ours.fully_shard(nn.Linear(4 + job.rank, 2))
    error = refused(lambda: model(torch.ones(1, 4 + job.rank)), RuntimeError)
    assert isinstance(error, libfsdp_mismatch()), error


def libfsdp_mismatch():
    import libfsdp

    return libfsdp.Mismatch


def test_misuse_is_refused_in_words(hosted):
    hosted(2, misuse)


# ---- Memory ----------------------------------------------------------------------------------------------------------


def kib():
    with open("/proc/self/smaps_rollup") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith(("Anonymous:", "Pss_Shmem:")))


def memory(job):
    import gc
    import weakref

    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12)))
    model[4].requires_grad_(False)
    model[5].requires_grad_(False)
    sharded(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(120):
        model(torch.randn(2, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 20:
            before = kib()
    assert kib() < before + 12288, (before, kib())  # a leak of one full parameter each step would be 25 MiB
    (library,) = model._get_fsdp_state().iteration.models.values()
    info = library.memory()
    assert info.host_unsharded_peak <= 2 * info.largest_unit  # frozen layers are sharded again as well
    gone = weakref.ref(model), weakref.ref(model._get_fsdp_state())
    del model, optimizer, library
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_memory_does_not_grow_and_goes(hosted):
    hosted(2, memory)


def test_without_a_process_group_it_is_a_group_of_one():
    from conftest import run_python

    program = (
        "import torch; from libfsdp.torch import fully_shard\n"
        "m = fully_shard(torch.nn.Linear(3, 2)); o = torch.optim.SGD(m.parameters(), lr=1.0)\n"
        "m(torch.ones(1, 3)).sum().backward(); w = m.weight.full_tensor().clone(); o.step()\n"
        "print(torch.equal(m.weight.full_tensor(), w - 1))\n"
    )
    done = run_python("-c", program)
    assert done.stdout.split() == ["True"], done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
