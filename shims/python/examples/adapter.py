"""What an adapter has to do, for a framework with modules and autograd: here torch, in a few lines.

    python -m libfsdp.run -n 2 adapter.py

`Sharded` puts one module on libfsdp. Around its forward it tells the unit, and shows the module full parameters; they
come out of an autograd function, so that its backward is the moment at which all their gradients are there. libfsdp.torch
does the same with everything that programs expect of it; libfsdp.hosts is what it shares with other frameworks.
"""

import torch

import libfsdp


class Full(torch.autograd.Function):
    """Full parameters from a unit; backward reduces their gradients to the shards'."""

    @staticmethod
    def forward(ctx, anchor, sharded):
        ctx.sharded = sharded
        ctx.set_materialize_grads(False)  # None for a parameter that was not used
        return tuple(full.detach() for full in sharded.fulls)

    @staticmethod
    def backward(ctx, *grads):
        ctx.sharded.unit.post_backward(grads)
        return None, None


class Sharded:
    """One module, whose parameters become one unit of `model`. `shards` is what the optimizer steps."""

    def __init__(self, module, model, name):
        self.module, self.model = module, model
        places = [(owner, key) for owner in module.modules() for key in owner._parameters]
        params = {f"{name}.{i}": owner._parameters[key].detach() for i, (owner, key) in enumerate(places)}
        self.unit = model.unit(name, params)
        self.fulls = [torch.from_dlpack(param.full) for param in self.unit]
        self.shards = [torch.nn.Parameter(torch.from_dlpack(param.shard)) for param in self.unit]
        for (owner, key), shard in zip(places, self.shards):
            owner._parameters[key] = shard  # until forward shows the full ones
        self.places = places
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward)

    def show(self, tensors):
        for (owner, key), tensor in zip(self.places, tensors):
            owner._parameters[key] = tensor

    def before_forward(self, module, args):
        self.unit.pre_forward()
        self.show(Full.apply(torch.empty(0, requires_grad=True), self))

    def after_forward(self, module, args, output):
        self.unit.post_forward()  # the graph keeps the full tensors: their addresses stay, their memory goes
        self.show(self.shards)
        output.register_hook(self.before_backward)

    def before_backward(self, grad):
        self.unit.pre_backward()
        torch.autograd.Variable._execution_engine.queue_callback(self.model.finish_backward)

    def take_gradients(self):
        """After backward: the library's sharded gradients become `.grad`."""
        for shard, param in zip(self.shards, self.unit):
            shard.grad = torch.from_dlpack(param.grad)


def train(steps=20):
    group = libfsdp.init()
    torch.manual_seed(0)  # the same weights and data on every rank
    layers = [torch.nn.Linear(16, 33), torch.nn.Linear(33, 33), torch.nn.Linear(33, 1)]
    net = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])
    x, y = torch.randn(24, 16), torch.randn(24, 1)
    model = libfsdp.Model(group)
    sharded = [Sharded(layer, model, f"layer{i}") for i, layer in enumerate(layers)]
    optimizer = torch.optim.AdamW([shard for each in sharded for shard in each.shards], lr=0.01)
    mine = slice(group.rank, None, group.size)  # each rank takes its part of the batch
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(net(x[mine]), y[mine])
        loss.backward()
        for each in sharded:
            each.take_gradients()
        optimizer.step()
        model.zero_grad()
    mean = loss.detach().reshape(1).numpy() / group.size
    group.all_reduce(mean)
    return mean.item()


if __name__ == "__main__":
    print(f"loss {train():.6f}")
