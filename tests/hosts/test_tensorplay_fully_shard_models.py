"""Models that people have under libfsdp.tensorplay.fully_shard: what they train to in 20 steps, beside one process with
the whole batch."""

import pytest

tp = pytest.importorskip(
    "tensorplay", reason="TensorPlay is not installed here; ci/test tensorplay makes a venv that has it"
)
import numpy as np
from tensorplay import nn
from tensorplay_fully_shard_models import BATCH, WIDTH, Block, F, network, part, same

from libfsdp.tensorplay import fully_shard

RANK = "tensorplay_rank.py"
SIZES = [1, 2, 4]


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
