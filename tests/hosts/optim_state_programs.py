"""What the tests of optimizer state in torch share: optimizers, training, states by name and how they are compared."""

import torch
import torch.distributed as dist
from classic_programs import Net, batches, loss_of
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.tensor import DTensor


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
