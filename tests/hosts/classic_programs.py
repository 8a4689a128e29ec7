"""What the tests of FullyShardedDataParallel share: a model, its training in one process, libfsdp's wrapper and
torch's."""

import contextlib
import functools
import warnings

import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

WIDTH, WORDS, BATCH, STEPS = 8, 11, 12, 20  # neither divides evenly where it is cut
FULL, GRAD_OP, NO = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
HYBRID, HYBRID_GRAD_OP = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
warnings.filterwarnings("ignore")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 3)
        self.down = nn.Linear(2 * WIDTH + 3, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between tied embeddings, with a parameter of no elements and one of a single element."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.gain + self.nothing.sum()


def batches(steps=STEPS):
    generator = torch.Generator().manual_seed(9)
    return [
        (torch.randint(WORDS, (BATCH, 3), generator=generator), torch.randint(WORDS, (BATCH, 3), generator=generator))
        for _ in range(steps)
    ]


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x).float().flatten(0, 1), y.flatten())


def train(model, rank, size, steps=STEPS, clip=None):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    norms = []
    for x, y in batches(steps):
        loss_of(model, x[rank::size], y[rank::size]).backward()
        if clip is not None:
            norms.append(float(clip(model)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def clip_plain(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def clip_wrapped(model):
    return model.clip_grad_norm_(0.5)


@functools.cache
def alone():
    """What one process with the whole batches comes to: (norms, state dict)."""
    model = Net()
    return train(model, 0, 1, clip=clip_plain), model.state_dict()


def ours(net=Net, policy=ModuleWrapPolicy({Block}), **options):
    from libfsdp.torch import FullyShardedDataParallel

    return FullyShardedDataParallel(net() if isinstance(net, type) else net, auto_wrap_policy=policy, **options)


def original(job, net=Net, policy=ModuleWrapPolicy({Block}), **options):
    options = {"process_group": job.gloo, "device_id": torch.device("cpu"), "use_orig_params": True} | options
    return theirs.FullyShardedDataParallel(net() if isinstance(net, type) else net, auto_wrap_policy=policy, **options)


def far(state, wanted):
    """The largest difference between two state dicts of whole tensors; they have the same keys in the same order."""
    assert list(state) == list(wanted), (list(state), list(wanted))
    assert all(not isinstance(value, DTensor) for value in state.values())
    return max((state[k].double() - wanted[k].double()).abs().max().item() for k in wanted if wanted[k].numel())


def grads(model):
    """{clean name: whole gradient}"""
    return {
        name.replace("_fsdp_wrapped_module.", ""): p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }


@contextlib.contextmanager
def raises(kind, text=""):
    try:
        yield
    except kind as error:
        assert text in str(error), error
        return
    raise AssertionError(f"nothing was raised; expected {kind} with {text!r}")


def same_error(ours_call, theirs_call):
    """Both raise, and of the same class."""
    kinds = []
    for call in (ours_call, theirs_call):
        try:
            call()
        except Exception as error:
            kinds.append(type(error))
        else:
            kinds.append(None)
    assert kinds[0] is not None and issubclass(kinds[0], kinds[1]), kinds


def together(job, names, workers):
    """Several workers in one start of the ranks, which takes longer than most of them."""
    for name in names:
        workers[name](job)
