"""What the tests of libfsdp.torch.fully_shard share: models, their data, training, and how two of them are compared."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import libfsdp.torch as ours

WIDTH, BATCH = 16, 12


# ---- A network, and how models are compared --------------------------------------------------------------------------


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


# ---- Models that go unusual ways -------------------------------------------------------------------------------------


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


class Hidden:
    """A container that fully_shard can't look into."""

    def __init__(self, value):
        self.value = value
