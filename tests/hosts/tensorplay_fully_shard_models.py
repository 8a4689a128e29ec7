"""What the tests of libfsdp.tensorplay.fully_shard share: networks, their data, and the oracle. Ranks train on parts of
one batch; each compares its shards with its part of the parameters that plain TensorPlay came to."""

import numpy as np
import tensorplay as tp
from tensorplay import nn

from libfsdp.tensorplay import FSDPModule, fully_shard

F = nn.functional
OLD = tp.__version__.startswith("1.0")  # whose own FSDP does not train
WIDTH, BATCH, STEPS = 12, 8, 4


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


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 7), nn.Linear(7, 1)

    def forward(self, x):
        return self.b(F.relu(self.a(x)))


def raised(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        return type(error), str(error)
    return None, None
