"""libfsdp.tensorplay.fully_shard: what it trains to, beside one process with the whole batch; what its names, classes,
shapes and errors are, beside TensorPlay's own. Ranks train on parts of one batch; each compares its shards with its
part of the parameters that plain TensorPlay came to."""

import contextlib
import copy
import gc
import inspect

import pytest

tp = pytest.importorskip(
    "tensorplay", reason="TensorPlay is not installed here; ci/test tensorplay makes a venv that has it"
)
import numpy as np
import tensorplay.distributed as dist
from tensorplay import nn
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.tensor import Shard
from tensorplay.utils.checkpoint import checkpoint

import libfsdp.tensorplay.composable as ours
from libfsdp.tensorplay import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

RANK = "tensorplay_rank.py"
SIZES = [1, 2, 4]
F = nn.functional
OLD = tp.__version__.startswith("1.0")  # whose own FSDP does not train
WIDTH, BATCH, STEPS = 12, 8, 4


# ---- A network, its data, and the oracle -----------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, hidden=2 * WIDTH + 3):  # which no number of ranks divides
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x, scale=1.0):
        return x + scale * self.down(F.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)  # whose bias has one element, so ranks without one

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x)


def network(kind=Net, seed=5):
    tp.manual_seed(seed)
    return kind()


def batches(steps=STEPS, shape=(BATCH, WIDTH), seed=9):
    tp.manual_seed(seed)
    return [(tp.randn(*shape), tp.randn(shape[0], 1)) for _ in range(steps)]


def part(tensor, rank, size):
    """This rank's part of a batch."""
    rows = tensor.shape[0] // size
    return tensor.narrow(0, rank * rows, rows).clone()


def train(model, job=None, steps=STEPS, lr=0.01, optimizer=tp.optim.AdamW, before_step=None, data=None):
    """Steps on this rank's part of the batches, or on the whole of them."""
    rank, size = (job.rank, job.size) if job else (0, 1)
    stepper = optimizer(model.parameters(), lr=lr)
    for x, y in data or batches(steps):
        loss = F.mse_loss(model(part(x, rank, size)).float(), part(y, rank, size))
        loss.backward()
        if before_step:
            before_step(model)
        stepper.step()
        stepper.zero_grad()
    return model


def values(model):
    return {name: parameter.detach().float().numpy().copy() for name, parameter in model.named_parameters()}


def cut(whole, rank, size, dim=0):
    """A rank's part of a whole array: chunks of the rounded-up length, the last ones shorter or empty."""
    step = -(-whole.shape[dim] // size)
    return np.take(whole, range(min(rank * step, whole.shape[dim]), min((rank + 1) * step, whole.shape[dim])), dim)


def same(model, reference, job, dims=None, whole=(), size=None, rank=None, tolerance=1e-6):
    """Each shard of `model` is its part of the reference's parameter. dims: {name: dimension that is cut}."""
    size, rank = size or job.size, job.rank if rank is None else rank
    expected, shards = values(reference), values(model)
    assert list(shards) == list(expected)
    for name, array in expected.items():
        piece = array if name in whole else cut(array, rank, size, (dims or {}).get(name, 0))
        assert shards[name].shape == piece.shape, (name, shards[name].shape, piece.shape)
        np.testing.assert_allclose(shards[name], piece, rtol=0, atol=tolerance, err_msg=name)


def sharded(model, **options):
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def modules(model):
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


# ---- Features, each trained at 1, 2 and 4 ranks ----------------------------------------------------------------------


def reshard_always_never_and_for_the_root(job, reference):
    for reshard in (None, True, False):
        same(train(sharded(network(), reshard_after_forward=reshard), job), reference, job)


def reshard_to_two_ranks(job, reference):
    if job.size == 4:
        same(train(sharded(network(), reshard_after_forward=2), job), reference, job)


def one_unit(job, reference):
    same(train(fully_shard(network()), job), reference, job)


def a_list_of_modules(job, reference):
    model = network()
    assert fully_shard([model.layers[0], model.layers[1]]) == [model.layers[0], model.layers[1]]
    fully_shard([model.layers[2], model.head])
    same(train(fully_shard(model), job), reference, job)


def sgd_with_momentum(job, reference):
    def sgd(parameters, lr):
        return tp.optim.SGD(parameters, lr=lr, momentum=0.9)

    expected = train(network(), optimizer=sgd)
    same(train(sharded(network()), job, optimizer=sgd), expected, job)


def an_optimizer_from_before(job, reference):
    model = network()
    stepper = tp.optim.AdamW(model.parameters(), lr=0.01)
    sharded(model)
    same(train(model, job, optimizer=lambda parameters, lr: stepper), reference, job)


def cut_along_another_dimension(job, reference):
    for dim in (1, -1):
        model = network()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        dims = {names[id(p)]: len(p.shape) - 1 for p in model.parameters()}
        sharded(model, shard_placement_fn=lambda p, dim=dim: Shard(dim) if len(p.shape) == 2 else None)
        same(train(model, job), reference, job, dims)


def hybrid(job, reference):
    if job.size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        same(train(sharded(network(), mesh=mesh), job), reference, job, size=2, rank=job.rank % 2)
        model = accumulated(sharded(network(), mesh=mesh), job, "set_requires_all_reduce")
        same(model, reference_accumulated(), job, size=2, rank=job.rank % 2)


def dimensions_by_name(job, reference):
    if job.size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        both = DataParallelMeshDims(shard=("a", "b"))
        same(train(sharded(network(), mesh=mesh, dp_mesh_dims=both), job), reference, job)
        swapped = DataParallelMeshDims(shard="a", replicate="b")
        model = sharded(network(), mesh=mesh, dp_mesh_dims=swapped)
        same(train(model, job), reference, job, size=2, rank=job.rank // 2)


def replicas_only(job, reference):
    mesh = init_device_mesh("cpu", (job.size,), mesh_dim_names=("replicate",))
    model = sharded(network(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="replicate"))
    same(train(model, job), reference, job, size=1, rank=0)


def parameters_that_stay_whole(job, reference):
    model = network()
    head = list(model.head.parameters())
    sharded(model, ignored_params=set(head))

    def average(model):
        for parameter in head:
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)

    same(train(model, job, before_step=average), reference, job, whole=("head.weight", "head.bias"))


def frozen_and_thawed(job, reference):
    def run(model, job=None):
        for frozen in (True, False, True):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not (frozen and ("norm" in name or "layers.1." in name)))
            train(model, job, steps=2, lr=0.003)
        return model

    same(run(sharded(network()), job), run(network()), job)


def accumulated(model, job=None, method=None):
    """Two micro-batches a step, the first of them without the reduction that `method` names."""
    rank, size = (job.rank, job.size) if job else (0, 1)
    stepper = tp.optim.AdamW(model.parameters(), lr=0.01)
    data = batches()
    for first, second in zip(data[::2], data[1::2]):
        for last, (x, y) in enumerate((first, second)):
            if method:
                getattr(model, method)(bool(last))
            F.mse_loss(model(part(x, rank, size)), part(y, rank, size)).backward()
        stepper.step()
        stepper.zero_grad()
    return model


def reference_accumulated():
    return accumulated(network())


def accumulation(job, reference):
    for method in (None, "set_requires_gradient_sync"):
        for reshard in (None, False):
            model = sharded(network(), reshard_after_forward=reshard)
            same(accumulated(model, job, method), reference_accumulated(), job)


def a_divisor_of_their_own(job, reference):
    def tripled(model):
        for parameter in model.parameters():
            parameter.grad.mul_(1 / 3)

    expected = train(network(), before_step=tripled, optimizer=tp.optim.SGD)
    for method in ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor"):
        model = sharded(network())
        for module in modules(model):
            getattr(module, method)(3.0 * job.size)
        same(train(model, job, optimizer=tp.optim.SGD), expected, job)


def prefetch_lists(job, reference):
    model = sharded(network())
    for one, two in zip(model.layers, list(model.layers)[1:]):
        one.set_modules_to_forward_prefetch([two])
        two.set_modules_to_backward_prefetch([one])
    same(train(model, job), reference, job)


def settings_without_effect_on_values(job, reference):
    model = sharded(network())
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    model.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_unused_params(False)
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_separate_reduce_scatter_group()
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_symm_mem_for_comm()
    model.set_unshard_in_backward(True)
    model.set_post_optim_event(None)
    same(train(model, job), reference, job)


def policies(job, reference):
    with pytest.warns(UserWarning, match="pinned") if not ours._said else contextlib.nullcontext():
        model = sharded(network(), offload_policy=CPUOffloadPolicy())
    same(train(model, job), reference, job)
    for dtype in (tp.bfloat16, tp.float16):
        model = network()
        for layer in model.layers:
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(dtype, tp.float32))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(dtype, tp.float32, output_dtype=tp.float32))
        same(train(model, job, optimizer=tp.optim.SGD), train(network(), optimizer=tp.optim.SGD), job, tolerance=2e-3)
        assert all(parameter.dtype == tp.float32 for parameter in model.parameters())
        assert model(part(batches()[0][0], job.rank, job.size)).dtype == tp.float32


def methods_besides_forward(job, reference):
    class Twice(Net):
        def double(self, x):
            return 2 * self.head(x)

    model = sharded(network(Twice))
    register_fsdp_forward_method(model, "double")
    same(train(model, job), reference, job)
    x = part(batches()[0][0], job.rank, job.size)
    expected = x.numpy() @ reference.head.weight.detach().numpy().T + reference.head.bias.detach().numpy()
    np.testing.assert_allclose(model.double(x).detach().numpy(), 2 * expected, atol=1e-6)


def recomputed(job, reference):
    """Activation checkpointing, of modules inside a unit and of whole units."""

    class Checkpointed(Net):
        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, 0.5, use_reentrant=False)
            return self.head(x)

    for each in (True, False):
        model = network(Checkpointed)
        same(train(sharded(model) if each else fully_shard(model), job), reference, job)


def called_twice(job, reference):
    class Again(Net):
        def forward(self, x):
            for layer in [*self.layers, self.layers[0], self.layers[1]]:
                x = layer(x)
            return self.head(x)

    same(train(sharded(network(Again)), job), train(network(Again)), job)


def evaluation_between_steps(job, reference):
    model = sharded(network())
    x = part(batches()[0][0], job.rank, job.size)

    def evaluate(model):
        with tp.no_grad():
            model(x)

    train(model, job, before_step=evaluate)
    model.reshard()  # the outermost unit is full after a forward
    same(model, reference, job)


def unused_parameters(job, reference):
    class Unused(Net):
        def __init__(self):
            super().__init__()
            self.extra = nn.Linear(3, 2)

    model = sharded(network(Unused))
    same(train(model, job, optimizer=tp.optim.SGD), train(network(Unused), optimizer=tp.optim.SGD), job)


FEATURES = [
    reshard_always_never_and_for_the_root,
    reshard_to_two_ranks,
    one_unit,
    a_list_of_modules,
    sgd_with_momentum,
    an_optimizer_from_before,
    cut_along_another_dimension,
    hybrid,
    dimensions_by_name,
    replicas_only,
    parameters_that_stay_whole,
    frozen_and_thawed,
    accumulation,
    a_divisor_of_their_own,
    prefetch_lists,
    settings_without_effect_on_values,
    policies,
    methods_besides_forward,
    recomputed,
    called_twice,
    evaluation_between_steps,
    unused_parameters,
]


def train_features(job, *names):
    reference = train(network())
    for feature in FEATURES:
        if not names or feature.__name__ in names:
            try:
                feature(job, reference)
            except BaseException as error:
                raise AssertionError(f"{feature.__name__}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("n", SIZES)
def test_every_feature_trains_to_what_one_process_does(hosted, n):
    hosted(n, train_features, timeout=110, fresh=n == 2)


# ---- Models ----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x, mask):
        batch, length, width = x.shape

        def split(t):
            return t.reshape(batch, length, self.heads, width // self.heads).transpose(1, 2).contiguous()

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = tp.matmul(q, k.transpose(2, 3).contiguous()) * (width // self.heads) ** -0.5 + mask
        mixed = tp.matmul(F.softmax(scores, dim=-1), v).transpose(1, 2).contiguous()
        return self.out(mixed.reshape(batch, length, width))


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """With the weights of the token embedding in the output layer as well."""

    WORDS, LENGTH, WIDTH = 13, 6, 8

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(self.WORDS, self.WIDTH), nn.Embedding(self.LENGTH, self.WIDTH)
        self.layers = nn.ModuleList([Layer(self.WIDTH) for _ in range(2)])
        self.norm = nn.LayerNorm(self.WIDTH)
        self.head = nn.Linear(self.WIDTH, self.WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, words):
        later = np.triu(np.full((self.LENGTH, self.LENGTH), -1e9, dtype="float32"), 1)
        x = self.tokens(words) + self.places(tp.arange(self.LENGTH))
        for layer in self.layers:
            x = layer(x, tp.from_numpy(later))
        return self.head(self.norm(x))

    def loss(self, words, rank=0, size=1):
        words = part(words, rank, size)
        inputs, targets = words.narrow(1, 0, self.LENGTH).contiguous(), words.narrow(1, 1, self.LENGTH).contiguous()
        return F.cross_entropy(self(inputs).reshape(-1, self.WORDS), targets.reshape(-1))

    @classmethod
    def batch(cls):
        return tp.randint(0, cls.WORDS, (BATCH, cls.LENGTH + 1))

    def units(self):
        return self.layers


class LoRA(nn.Module):
    """Frozen layers with trainable differences of low rank."""

    class Adapted(nn.Module):
        def __init__(self, width, rank=2):
            super().__init__()
            self.base = nn.Linear(width, width)
            self.base.requires_grad_(False)
            self.a, self.b = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

        def forward(self, x):
            return F.relu(self.base(x) + self.b(self.a(x)))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Adapted(WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)
        self.head.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def loss(self, batch, rank=0, size=1):
        x, y = batch
        return F.mse_loss(self(part(x, rank, size)), part(y, rank, size))

    @classmethod
    def batch(cls):
        return tp.randn(BATCH, WIDTH), tp.randn(BATCH, 1)

    def units(self):
        return self.layers


class Experts(nn.Module):
    """Each part of the batch takes another expert, so on each rank other parameters are without a gradient."""

    class Choice(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([Block(hidden=5) for _ in range(4)])

        def forward(self, x, which):
            return self.experts[which](x)

    def __init__(self):
        super().__init__()
        self.mixtures = nn.ModuleList([self.Choice(), self.Choice()])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, which):
        for shift, mixture in enumerate(self.mixtures):
            x = mixture(x, (which + shift) % 4)
        return self.head(x)

    def loss(self, batch, rank=0, size=1):
        x, y = batch
        parts = range(4 * rank // size, 4 * (rank + 1) // size)
        losses = [F.mse_loss(self(part(x, which, 4), which), part(y, which, 4)) for which in parts]
        return sum(losses[1:], losses[0]) / len(losses)

    @classmethod
    def batch(cls):
        return LoRA.batch()

    def units(self):
        return self.mixtures


class Conv(nn.Module):
    """With BatchNorm, whose statistics are each rank's: every rank gets the same images."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(1, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU()),
                nn.Sequential(nn.Conv2d(5, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU()),
            ]
        )
        self.head = nn.Linear(3 * 36, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.reshape(x.shape[0], -1))

    def loss(self, batch, rank=0, size=1):
        return F.mse_loss(self(batch[0]), batch[1])

    @classmethod
    def batch(cls):
        return tp.randn(BATCH, 1, 6, 6), tp.randn(BATCH, 1)

    def units(self):
        return self.blocks


def run(model, rank=0, size=1, steps=20):
    tp.manual_seed(77)
    data = [model.batch() for _ in range(steps)]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stepper = tp.optim.AdamW(trainable, lr=0.002, eps=1e-5)
    for batch in data:
        model.loss(batch, rank, size).backward()
        stepper.step()
        stepper.zero_grad()
    return model


def train_models(job):
    for kind in (GPT, LoRA, Experts, Conv):
        expected = run(network(kind))
        model = network(kind)
        for unit in model.units():
            fully_shard(unit)
        fully_shard(model)
        try:
            same(run(model, job.rank, job.size), expected, job)
            buffers = dict(expected.named_buffers())
            for name, buffer in model.named_buffers():
                np.testing.assert_allclose(buffer.numpy(), buffers[name].numpy(), atol=1e-6, err_msg=name)
        except BaseException as error:
            raise AssertionError(f"{kind.__name__}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("n", SIZES)
def test_models_of_many_kinds_train_to_what_one_process_does(hosted, n):
    hosted(n, train_models, timeout=110)


# ---- Groups, and none ------------------------------------------------------------------------------------------------


def train_on_gloo(job):
    job.start("gloo")
    same(train(sharded(network()), job), train(network()), job)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    same(train(sharded(network(), mesh=mesh), job), train(network()), job)
    half = fully_shard(network(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))["shard"])
    same(train(half), train(network()), job, size=1, rank=0)  # by itself: one rank


def test_a_default_group_of_gloo_will_do(hosted):
    hosted(2, train_on_gloo, before=False)


class Alone:
    rank, size = 0, 1


def test_without_a_process_group_it_trains_this_process_alone():
    assert not dist.is_initialized()
    same(train(sharded(network()), Alone), train(network()), Alone)


# ---- What a program sees, beside TensorPlay's own --------------------------------------------------------------------


def test_names_arguments_and_defaults_are_those_of_tensorplay():
    theirs = dist.fsdp
    for name in ours.__all__:
        if name == "clip_grad_norm_":
            continue
        assert hasattr(theirs, name)
        if inspect.isfunction(getattr(theirs, name)):
            mine, other = (inspect.signature(getattr(side, name)).parameters for side in (ours, theirs))
            assert list(mine) == list(other), name
            assert [p.default for p in mine.values()] == [p.default for p in other.values()], name
            assert [p.kind for p in mine.values()] == [p.kind for p in other.values()], name
    for name, method in inspect.getmembers(theirs.FSDPModule, inspect.isfunction):
        mine, other = (inspect.signature(getattr(side, name)).parameters for side in (FSDPModule, theirs.FSDPModule))
        assert list(mine) == list(other) or name in ("_apply", "__new__"), name
        assert [p.default for p in mine.values()] == [p.default for p in other.values()], name


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 7), nn.Linear(7, 1)

    def forward(self, x):
        return self.b(F.relu(self.a(x)))


def look_alike(job):
    """Classes, shapes, identities and values, of both in the same processes."""
    x = tp.arange(12).float().reshape(4, 3) / 7 + job.rank
    seen = {}
    for shard in (fully_shard, dist.fsdp.fully_shard):
        model = network(Odd)
        before = dict(model.named_parameters())
        kinds = {name: type(parameter) for name, parameter in before.items()}
        assert shard(model.a) is model.a
        assert shard(model) is model
        after = dict(model.named_parameters())
        if shard is fully_shard or not OLD:
            step_of = tp.optim.SGD(model.parameters(), lr=0.1)
            F.mse_loss(model(x), x.sum(dim=1, keepdim=True)).backward()
            step_of.step()
        seen[shard] = {
            "names": list(after),
            "shapes": [tuple(parameter.shape) for parameter in after.values()],
            "kinds": [type(parameter) is kinds[name] for name, parameter in after.items()],
            "class": (type(model).__name__, type(model.a).__name__),
            "bases": isinstance(model, dist.fsdp.FSDPModule) and isinstance(model, Odd),
            "grads": [] if OLD else [p.grad.numpy().copy() for p in model.parameters()],
            "values": [] if OLD else [p.detach().numpy().copy() for p in model.parameters()],
            "states": {} if OLD else {name: value.numpy().copy() for name, value in model.state_dict().items()},
        }
        if shard is fully_shard:
            for _ in range(2):
                assert all(after[name] is before[name] is p for name, p in model.named_parameters())
                F.mse_loss(model(x), x.sum(dim=1, keepdim=True)).backward()
    mine, other = seen.values()
    for key in ("names", "shapes", "kinds", "class", "bases"):
        assert mine[key] == other[key], (key, mine[key], other[key])
    assert mine["class"] == ("OddFSDPModule", "LinearFSDPModule")
    assert mine["shapes"] == ([(4, 3), (4,), (1, 7), (1,)], [(3, 3), (3,), (0, 7), (0,)])[job.rank]
    assert list(mine["states"]) == list(other["states"])
    for key in ("grads", "values"):
        for a, b in zip(mine[key], other[key]):
            np.testing.assert_allclose(a, b, atol=1e-6, err_msg=key)
    for name in mine["states"]:
        np.testing.assert_allclose(mine["states"][name], other["states"][name], atol=1e-6)


def test_classes_shapes_and_values_are_those_of_tensorplays_own(hosted):
    hosted(2, look_alike)


def raised(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        return type(error), str(error)
    return None, None


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(tp.tensor(2.0))

    def forward(self, x):
        return x * self.gain


MISTAKES = {
    "an empty list": lambda shard: shard([]),
    "twice in a list": lambda shard: shard([network(Odd)] * 2),
    "a second call": lambda shard: shard(shard(network(Odd))),
    "no module": lambda shard: shard(3),
    "a container": lambda shard: shard(nn.ModuleList([nn.Linear(2, 2)])),
    "a scalar": lambda shard: shard(Scalar()),
    "three dimensions": lambda shard: shard(network(Odd), mesh=_mesh((1, 1, 1), ("a", "b", "c"))),
    "two dimensions without names": lambda shard: shard(network(Odd), mesh=_mesh((1, 1))),
    "a dimension that is not there": lambda shard: shard(
        network(Odd), mesh=_mesh((1,), ("a",)), dp_mesh_dims=DataParallelMeshDims(shard="b")
    ),
    "one dimension for both": lambda shard: shard(
        network(Odd), mesh=_mesh((1,), ("a",)), dp_mesh_dims=DataParallelMeshDims(shard="a", replicate="a")
    ),
    "reshard of a wrong type": lambda shard: shard(network(Odd), reshard_after_forward="yes"),
    "reshard to too many": lambda shard: shard(network(Odd), reshard_after_forward=3),
    "no placement": lambda shard: shard(network(Odd), shard_placement_fn=lambda parameter: 1),
    "a placement outside": lambda shard: shard(network(Odd), shard_placement_fn=lambda parameter: Shard(4)),
    "prefetch of a plain module": lambda shard: shard(network(Odd)).set_modules_to_forward_prefetch([nn.Linear(2, 2)]),
    "reshard told by a number": lambda shard: shard(network(Odd)).set_reshard_after_forward(2),
    "no buffers": lambda shard: shard(network(Odd)).set_reduce_scatter_max_input_buffers(0),
    "half a buffer": lambda shard: shard(network(Odd)).set_reduce_scatter_max_input_buffers(0.5),
    "a copy": lambda shard: copy.deepcopy(shard(network(Odd))),
    "a missing method": lambda shard: _registered(shard, "nothing"),
}


def _mesh(shape, names=None):
    from tensorplay.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", np.zeros(shape, int).tolist(), mesh_dim_names=names)


def _registered(shard, name):
    side = ours if shard is fully_shard else dist.fsdp
    side.register_fsdp_forward_method(shard(network(Odd)), name)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_what_tensorplays_own_raises(mistake):
    mine, text = raised(MISTAKES[mistake], fully_shard)
    other, other_text = raised(MISTAKES[mistake], dist.fsdp.fully_shard)
    assert mine is not None and issubclass(mine, other), (mine, text, other, other_text)
    assert len(text) > 20


def test_messages_of_tensorplays_own():
    assert raised(MISTAKES["a second call"], fully_shard) == (
        RuntimeError,
        "fully_shard has already been applied to this module",
    )
    assert "scalar parameters" in raised(MISTAKES["a scalar"], fully_shard)[1]
    theirs = dist.fsdp.fully_shard(network(Odd))
    assert "TensorPlay's own" in raised(fully_shard, theirs)[1]
    assert raised(dist.fsdp.fully_shard, fully_shard(network(Odd)))[0] is RuntimeError


@pytest.mark.skipif(OLD, reason="TensorPlay 1.0 has no meta device")
def test_parameters_without_values_are_filled_after_sharding():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(tp.empty(5, 4, device="meta"))

        def forward(self, x):
            return F.linear(x, self.weight)

    model = fully_shard(Late())
    kind, text = raised(model, tp.ones(2, 4))
    assert kind is RuntimeError and "weight" in text and "to_empty" in text
    model.to_empty(device="cpu")
    with tp.no_grad():
        model.weight.copy_(tp.arange(20).reshape(5, 4).float())
    model(tp.ones(2, 4)).sum().backward()
    np.testing.assert_array_equal(model.weight.grad.numpy(), np.full((5, 4), 2))


def edits(job):
    model = sharded(network())
    reference = network()
    with tp.no_grad():
        for module in modules(model):
            handle = module.unshard(async_op=True)
            handle.wait()
        for (name, parameter), plain in zip(model.named_parameters(), reference.parameters()):
            assert tuple(parameter.shape) == tuple(plain.shape), name
            np.testing.assert_array_equal(parameter.detach().numpy(), plain.detach().numpy(), err_msg=name)
            parameter.mul_(3)
            plain.mul_(3)
        for module in modules(model):
            module.reshard()
    same(model, reference, job, tolerance=0)
    same(train(model, job), train(reference), job)


def test_edits_of_full_parameters_stay(hosted):
    hosted(2, edits)


# ---- Gradients: their norm, and who has them -------------------------------------------------------------------------


def clips(job):
    from tensorplay.nn.utils import clip_grad

    for norm_type in (2.0, 1.0, 3, float("inf")):
        norms = []

        def clip(model):
            norms.append(tp.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type).item())

        expected = train(network(), before_step=clip, optimizer=tp.optim.SGD)
        first, norms = norms, []
        same(train(sharded(network()), job, before_step=clip, optimizer=tp.optim.SGD), expected, job)
        np.testing.assert_allclose(norms, first, rtol=1e-5)
    if job.size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        norm_type, norms = 2.0, []
        train(network(), before_step=clip)
        first, norms = norms, []
        train(sharded(network(), mesh=mesh), job, before_step=clip)
        np.testing.assert_allclose(norms, first, rtol=1e-5)
    plain = network()
    F.mse_loss(plain(batches()[0][0]), batches()[0][1]).backward()
    own = clip_grad.get_total_norm([parameter.grad for parameter in plain.parameters()])
    assert ours.clip_grad_norm_(plain, 1e9).item() == own.item()
    model = sharded(network())
    x, y = batches()[0]
    F.mse_loss(model(part(x, job.rank, job.size)), part(y, job.rank, job.size)).backward()
    if job.rank == job.size - 1:
        next(p for p in model.parameters() if p.numel()).grad.fill_(float("nan"))
    for norm_type in (2.0, float("inf")):
        kind, text = raised(ours.clip_grad_norm_, model, 1.0, norm_type, error_if_nonfinite=True)
        assert kind is RuntimeError and "non-finite" in text
    assert raised(ours.clip_grad_norm_, model, 1.0, 0)[0] is ValueError


@pytest.mark.parametrize("n", [2, 4])
def test_the_norm_of_gradients_is_that_of_all_ranks(hosted, n):
    hosted(n, clips)


def keeps(job):
    """A gradient that a program keeps has its values when the next is there."""
    model = sharded(network())
    kept = []
    for x, y in batches(3):
        F.mse_loss(model(part(x, job.rank, job.size)), part(y, job.rank, job.size)).backward()
        kept.append([(p.grad, p.grad.numpy().copy()) for p in model.parameters()])
        model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    for grads in kept:
        for grad, then in grads:
            np.testing.assert_array_equal(grad.numpy(), then)


def test_gradients_that_are_kept_keep_their_values(hosted):
    hosted(2, keeps)


class Recorder:
    """A custom communication that counts, and calls TensorPlay's."""

    def __init__(self):
        self.calls = 0

    def allocate(self, size, *, dtype, device):
        return tp.empty(tuple(size), dtype=dtype, device=device)


class Gather(Recorder):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor.clone(), group=group, async_op=async_op)


class Scatter(Recorder):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.calls += 1
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group=group, async_op=async_op)


def communicate(job):
    gather, scatter, hooked = Gather(), Scatter(), []
    model = sharded(network())
    model.layers[0].set_custom_all_gather(gather)
    model.layers[1].set_custom_reduce_scatter(scatter)
    model.layers[2].set_all_reduce_hook(lambda output: hooked.append(tuple(output.shape)))
    same(train(model, job), train(network()), job)
    assert gather.calls >= STEPS and scatter.calls == STEPS and len(hooked) == STEPS
    assert all(len(shape) == 1 for shape in hooked)


def test_communication_of_a_programs_own(hosted):
    hosted(2, communicate)


# ---- State dicts, exceptions, memory ---------------------------------------------------------------------------------


def states(job):
    model, reference = train(sharded(network()), job), train(network())
    state = model.state_dict()
    assert list(state) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        np.testing.assert_allclose(state[name].numpy(), cut(value.numpy(), job.rank, job.size), atol=1e-6)
    copied = {name: value.clone() for name, value in state.items()}
    other = sharded(network(seed=6))
    identities = [id(parameter) for parameter in other.parameters()]
    other.load_state_dict(copied)
    assert identities == [id(parameter) for parameter in other.parameters()]
    same(other, reference, job)
    train(model, job, steps=2), train(other, job, steps=2)
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), other.state_dict()[name].numpy(), err_msg=name)


def test_state_dicts_hold_this_ranks_shards(hosted):
    hosted(2, states)


def fails(job):
    """After an exception in forward or backward the next step is right."""

    class Failing(Net):
        where = None

        def forward(self, x):
            for layer in self.layers:
                x = layer(x, scale=0.5)
                if self.where == "forward":
                    raise KeyError("on the way")
            if self.where == "backward":
                x.register_hook(self.fail)
            return self.head(x)

        def fail(self, grad):
            raise KeyError("on the way back")

    model = sharded(network(Failing))
    x, y = batches()[0]
    for where in ("forward", "backward"):
        model.where = where
        kind, _ = raised(lambda: F.mse_loss(model(part(x, job.rank, job.size)), part(y, job.rank, job.size)).backward())
        assert kind is not None
        model.reset_iter_state()
    model.where = None
    same(train(model, job), train(network()), job)


def test_training_goes_on_after_an_exception(hosted):
    hosted(2, fails)


def memory():
    """KiB of this process, and its part of what ranks share; not of files, which others may map or not."""
    with open("/proc/self/smaps_rollup") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def lasts(job):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)]
            )

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    model = sharded(network(Wide))
    stepper = tp.optim.SGD(model.parameters(), lr=1e-3)
    x = tp.randn(8, 64)
    used = []
    for step in range(500):
        F.mse_loss(model(x), x).backward()
        stepper.step()
        stepper.zero_grad()
        if step in (199, 499):
            gc.collect()
            used.append(memory())
    assert used[1] - used[0] < 400, used  # a step's gradients are 528
    full = sum(unit.unit.info().full_bytes for unit in (layer._get_fsdp_state() for layer in model.layers))
    model_memory = model._get_fsdp_state().iteration.models
    slots = sum(each.memory().unsharded for each in model_memory.values())
    assert slots <= 0.3 * full, (slots, full)  # one unit of the four


def test_five_hundred_steps_take_no_more_memory(hosted):
    hosted(2, lasts)
