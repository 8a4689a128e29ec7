"""What one rank of the demo does:  rank.py HOST WHOSE TASK FOLDER TITLE

HOST: whose modules and optimizer (HOSTS). WHOSE: `alone`, one process without sharding; `libfsdp`; `own`, the host's
own FSDP on gloo. TASK: the file that compare.py wrote, the same for all runs. The rank leaves its results in FOLDER, in
a file that its number names; TITLE is for the progress bar of rank 0.

A host is a class that makes the network from its first values and takes steps. `train` is the same for all.
"""

import importlib
import os
import pathlib
import sys
import time

TIMEOUT = 120  # seconds that ranks wait for each other
RATE, MOMENTUM = 0.1, 0.9


def main():
    host, whose, task, folder, title = sys.argv[1:]
    import numpy as np

    with np.load(task) as file:
        facts = dict(file)
    names = ("train_images", "train_labels", "test_images", "test_labels", "batches")
    images, labels, test_images, test_labels, batches = (facts.pop(name) for name in names)
    model = HOSTS[host](whose, facts)
    results = train(model, images, labels, batches, Bar(title, len(batches), visible=model.rank == 0))
    kept = model.kept()
    accuracy = np.mean(model.outputs(test_images).argmax(axis=1) == test_labels)  # as sharded as in training
    np.savez(pathlib.Path(folder) / f"{model.rank}.npz", accuracy=accuracy, kept=kept, **results, **model.values())
    model.close()


def train(model, images, labels, batches, bar):
    """Take a step on each batch. Returns the seconds and this rank's losses; their mean over the ranks is all's."""
    import numpy as np

    losses = np.zeros(len(batches))
    begin = time.perf_counter()
    for epoch, steps in enumerate(batches):
        for batch in steps:
            mine = batch[model.rank :: model.size]
            # Parts may differ by one image: weighted, their mean over the ranks is the mean over the batch.
            weight = len(mine) * model.size / len(batch)
            losses[epoch] += model.step(images[mine], labels[mine], weight) / len(steps)
        bar.show(epoch + 1, time.perf_counter() - begin)
    return {"losses": losses, "seconds": time.perf_counter() - begin}


class Bar:
    """A progress bar on one line; where the output is no terminal, only how it ends."""

    WIDTH = 24

    def __init__(self, title, total, visible):
        self.title, self.total, self.visible = title, total, visible
        self.terminal = sys.stdout.isatty()

    def show(self, done, seconds):
        last = done == self.total
        if not self.visible or not (self.terminal or last):
            return
        filled = self.WIDTH * done // self.total
        bar = "#" * filled + "." * (self.WIDTH - filled)
        line = f"  {self.title:20} [{bar}] {done:3}/{self.total} epochs  {seconds:.1f} s"
        print(("\r" if self.terminal else "") + line, end="\n" if last else "", flush=True)


# ---- Hosts -----------------------------------------------------------------------------------------------------------


class NumPy:
    """libfsdp.numpy's layers, which have no FSDP of their own."""

    def __init__(self, whose, values):
        import libfsdp
        from libfsdp import numpy as host

        self.host = host
        self.group = libfsdp.init(timeout=TIMEOUT)
        self.rank, self.size = self.group.rank, self.group.size
        sizes = [values[f"{index}.weight"].shape for index in (0, 2, 4)]
        first, second, third = (host.Linear(inputs, outputs) for outputs, inputs in sizes)
        self.net = host.Sequential(first, host.Tanh(), second, host.Tanh(), third)
        for parameter in self.net.parameters():
            parameter.value[...] = values[parameter.name]
        if whose == "libfsdp":
            self.net = host.fully_shard(self.net, self.group)
        self.optimizer = host.SGD(self.net.parameters(), lr=RATE, momentum=MOMENTUM)

    def step(self, images, labels, weight):
        loss, slope = self.host.softmax_cross_entropy(self.net.forward(images), labels)
        self.net.backward(slope * slope.dtype.type(weight))
        self.optimizer.step()
        self.net.zero_grad()
        return loss * weight

    def outputs(self, images):
        return self.net.forward(images)

    def kept(self):
        return sum(parameter.value.nbytes for parameter in self.net.parameters())

    def values(self):
        if hasattr(self.net, "full_parameters"):
            return self.net.full_parameters()
        return {parameter.name: parameter.value for parameter in self.net.parameters()}

    def close(self):
        self.group.barrier()
        self.group.close()


class Modules:
    """A framework with nn, optim, autograd and a distributed package: what torch and TensorPlay have alike."""

    name = None  # of the framework's module

    def __init__(self, whose, values):
        import datetime

        self.host = importlib.import_module(self.name)
        self.dist = importlib.import_module(f"{self.name}.distributed")
        self.host.set_num_threads(1)
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.net = self.network(values)
        if whose != "alone":
            self.shard(whose, datetime.timedelta(seconds=TIMEOUT))
        self.optimizer = self.host.optim.SGD(self.net.parameters(), lr=RATE, momentum=MOMENTUM)

    def network(self, values):
        nn = self.host.nn
        sizes = [values[f"{index}.weight"].shape for index in (0, 2, 4)]
        first, second, third = (nn.Linear(inputs, outputs) for outputs, inputs in sizes)
        net = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third)
        with self.host.no_grad():
            for name, parameter in net.named_parameters():
                parameter.copy_(self.host.from_numpy(values[name]))
        return net

    def shard(self, whose, timeout):
        """Each layer is a unit, gathered and reduced by itself."""
        if whose == "libfsdp":  # importing it makes "fsdp" a backend
            backend, module = "fsdp", importlib.import_module(f"libfsdp.{self.name}")
        else:
            backend, module = "gloo", importlib.import_module(f"{self.name}.distributed.fsdp")
        self.dist.init_process_group(backend, rank=self.rank, world_size=self.size, timeout=timeout)
        for layer in self.net:
            if any(True for _ in layer.parameters()):
                module.fully_shard(layer)
        module.fully_shard(self.net)

    def step(self, images, labels, weight):
        outputs = self.net(self.host.from_numpy(images))
        loss = self.host.nn.functional.cross_entropy(outputs, self.host.from_numpy(labels)) * weight
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())

    def outputs(self, images):
        with self.host.no_grad():
            return self.net(self.host.from_numpy(images)).numpy()

    def kept(self):
        return sum(self.local(parameter).nbytes for parameter in self.net.parameters())

    def local(self, parameter):
        """This rank's part of a parameter, as an array."""
        return parameter.detach().numpy()

    def values(self):
        for module in self.net.modules():
            if hasattr(module, "unshard"):
                module.unshard()
        return {name: parameter.detach().numpy().copy() for name, parameter in self.net.named_parameters()}

    def close(self):
        if self.dist.is_initialized():
            self.dist.barrier()
            self.dist.destroy_process_group()


class Torch(Modules):
    name = "torch"

    def local(self, parameter):
        parameter = parameter.detach()
        return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).numpy()


class TensorPlay(Modules):
    name = "tensorplay"


HOSTS = {"numpy": NumPy, "torch": Torch, "tensorplay": TensorPlay}


if __name__ == "__main__":
    main()
