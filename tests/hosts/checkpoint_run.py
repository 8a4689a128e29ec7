"""A training run in one of the hosts, saved and gone on with: checkpoint_run.py HOST WRAP WHAT FOLDER

HOST: torch, tensorplay, numpy. WRAP: none, fully_shard, classic, hybrid, ddp (the host's own). WHAT: save, or load. On as many ranks as the
launcher says. All hosts have the same model, batches and optimizer; what `save` has written in FOLDER/expected are the
losses that it came to afterwards, which those of `load` must equal.
"""

import importlib
import json
import os
import pathlib
import sys

import numpy as np

import libfsdp
from libfsdp import checkpoint

BEFORE, AFTER, SAMPLES = 3, 3, 12
SHAPES = {"0.weight": (7, 5), "0.bias": (7,), "2.weight": (3, 7), "2.bias": (3,)}
VALUES = {name: np.random.default_rng(index).normal(size=shape) for index, (name, shape) in enumerate(SHAPES.items())}


def batch(step, rank, size):
    return np.random.default_rng(100 + step).normal(size=(SAMPLES, 5)).astype("float32")[rank::size]


class Modules:
    """torch and TensorPlay."""

    def __init__(self, host, wrap):
        if host == "torch":
            import torch as framework
            import torch.distributed as dist

            import libfsdp.torch as ours
        else:
            import tensorplay as framework

            import libfsdp.tensorplay as ours
            import tensorplay.distributed as dist
        self.framework, self.dist = framework, dist
        if "RANK" in os.environ:
            dist.init_process_group("fsdp")
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        nn = framework.nn
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        for name, parameter in model.named_parameters():
            parameter.data = framework.tensor(VALUES[name].astype("float32").tolist())
        if wrap == "hybrid":
            mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            ours.fully_shard(model[0], mesh=mesh)
            ours.fully_shard(model, mesh=mesh)
        elif wrap == "fully_shard":
            ours.fully_shard(model[0])
            ours.fully_shard(model)
        elif wrap == "classic":
            where = {"device_id": framework.device("cpu")} if host == "torch" else {}
            model = ours.FullyShardedDataParallel(model, **where)
        elif wrap == "ddp":
            from_where = "torch.nn.parallel" if host == "torch" else "tensorplay.nn.parallel.distributed"
            model = importlib.import_module(from_where).DistributedDataParallel(model)
        self.model = model
        self.optimizer = framework.optim.Adam(model.parameters(), lr=0.05)

    def notices(self, folder):
        """Whether a backward is refused whose forward came before a load; after a save it is not."""
        for call, refused in ((checkpoint.save, False), (checkpoint.load, True)):
            y = self.model(self.framework.ones([2, 5]))
            call(f"{folder}/again", self.model)
            try:
                (y * y).mean().backward()
                assert not refused
            except RuntimeError as error:
                assert refused and "modified by an inplace operation" in str(error), error
            self.optimizer.zero_grad()

    def step(self, number):
        x = self.framework.tensor(batch(number, self.rank, self.size).tolist())
        y = self.model(x)
        loss = (y * y).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = self.framework.tensor([float(loss.item())])
        if self.size > 1:
            self.dist.all_reduce(total)
        return float(total[0].item()) / self.size

    def close(self):
        if self.dist.is_initialized():
            self.dist.destroy_process_group()


class NumPy:
    def __init__(self, wrap):
        from libfsdp.numpy import Adam, Linear, Sequential, Tanh, fully_shard

        self.group = libfsdp.init()
        self.rank, self.size = self.group.rank, self.group.size
        model = Sequential(Linear(5, 7), Tanh(), Linear(7, 3))
        for parameter in model.parameters():
            parameter.value[...] = VALUES[parameter.name]
        self.model = model if wrap == "none" else fully_shard(model, self.group)
        self.optimizer = Adam(self.model.parameters(), lr=0.05)

    def step(self, number):
        y = self.model.forward(batch(number, self.rank, self.size))
        self.model.backward(2 * y / y.size)
        self.optimizer.step()
        self.model.zero_grad()
        total = np.array([float((y.astype("float64") ** 2).mean())])
        self.group.all_reduce(total)
        return float(total[0]) / self.size

    def close(self):
        self.group.close()


def main(host, wrap, what, folder):
    run = NumPy(wrap) if host == "numpy" else Modules(host, wrap)
    folder = pathlib.Path(folder)
    steps = range(BEFORE, BEFORE + AFTER)
    if what == "save":
        for number in range(BEFORE):
            run.step(number)
        checkpoint.save(folder, run.model, run.optimizer, extra={"step": BEFORE})
        losses = [run.step(number) for number in steps]
        if run.rank == 0:
            (folder / "expected").write_text(json.dumps(losses))
    else:
        run.step(50)  # somewhere else, with a state that is to go
        if host != "numpy" and wrap == "none":
            run.notices(folder)
        loaded = checkpoint.load(folder, run.model, run.optimizer)
        assert loaded.extra == {"step": BEFORE} and not loaded.missing and not loaded.unexpected
        losses = [run.step(number) for number in steps]
        expected = json.loads((folder / "expected").read_text())
        worst = max(abs(mine - other) for mine, other in zip(losses, expected))
        assert worst < 2e-6, (losses, expected)
        print("worst", worst)
    run.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
