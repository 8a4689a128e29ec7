"""One rank of `ci/bench hosts`: hosts_worker.py HOST RANK RANKS FOLDER

The host's default group is on gloo. A task is WHAT/WHOSE. WHAT: `step`, forward and backward of the host's model, or
`gpt`, forward, backward and AdamW of a small GPT (torch). WHOSE: `libfsdp`, fully_shard of libfsdp; `own`, the host's own;
`compute`, the same model whole on each rank, without communication. All ranks have the same weights and batches of their
own; check compares the first loss and the sum of a gradient's squares with those of `compute`.
"""

import importlib
import os
import sys

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import worker  # noqa: E402

host, rank, size, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
models = {}


class Torch:
    def __init__(self):
        import torch
        import torch.distributed as dist

        self.torch, self.nn = torch, torch.nn
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
        self.barrier = dist.barrier

    def seed(self, number):
        self.torch.manual_seed(number)

    def own(self):
        return importlib.import_module("torch.distributed.fsdp").fully_shard

    def model(self):
        """Six transformer layers of 512, and a batch of 96 words: about 0.4 s of computation."""
        layer = self.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
        model = self.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        return model, model.layers, self.torch.randn(2, 48, 512)


class TensorPlay:
    def __init__(self):
        import tensorplay as tp
        import tensorplay.distributed as dist

        self.torch, self.nn = tp, tp.nn
        if hasattr(tp, "set_num_threads"):
            tp.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
        self.barrier = dist.barrier

    def seed(self, number):
        self.torch.manual_seed(number)

    def own(self):
        return importlib.import_module("tensorplay.distributed.fsdp").fully_shard

    def model(self):
        """Six times (512, 2048, 512), and a batch of 64: about 60 ms of computation."""
        nn = self.nn
        blocks = [nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)) for _ in range(6)]
        return nn.Sequential(*blocks), blocks, self.torch.randn(64, 512)


def gpt(nn, torch):
    """A small GPT with tied embeddings: (model, layers, tokens)."""
    width, heads, words, length = 256, 4, 2048, 128

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            batch, count, _ = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(batch, count, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, count, width))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
            self.layers = nn.ModuleList(Block() for _ in range(4))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
            nn.init.normal_(self.words.weight, std=0.02)
            self.head.weight = self.words.weight

        def forward(self, tokens):
            x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x))

    model = GPT()
    return model, model.layers, torch.randint(0, words, (4, length))


def sharded(model, layers, whose):
    if whose == "compute":
        return model
    fully_shard = importlib.import_module(f"libfsdp.{host}").fully_shard if whose == "libfsdp" else framework.own()
    for layer in layers:
        fully_shard(layer)
    return fully_shard(model)


def made(what, whose):
    """(function that takes a step and returns the loss, the parameters) of a task."""
    if (what, whose) not in models:
        framework.seed(1)
        torch, nn = framework.torch, framework.nn
        model, layers, batch = gpt(nn, torch) if what == "gpt" else framework.model()
        framework.seed(2 + rank)
        batch = torch.randint(0, 2048, tuple(batch.shape)) if what == "gpt" else torch.randn(*batch.shape)
        model = sharded(model, layers, whose)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=1e-4) if what == "gpt" else None

        def step():
            for parameter in parameters:
                parameter.grad = None
            out = model(batch)
            if what == "gpt":
                loss = nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
            else:
                loss = (out * out).mean()
            loss.backward()
            if optimizer is not None:
                optimizer.step()
            return loss

        models[what, whose] = step
    return models[what, whose]


def check(task, count):
    what, whose = task.split("/")
    loss = float(made(what, whose)().item())
    if not loss > 0 or loss != loss:
        raise AssertionError(f"{task}: the loss is {loss}")
    if whose == "compute":
        models[what, "loss"] = loss
    elif abs(loss - models.get((what, "loss"), loss)) > 1e-3 * abs(loss):
        raise AssertionError(f"{task}: the loss is {loss}, and that of compute {models[what, 'loss']}")


def turn(task, count, repetitions):
    step = made(*task.split("/"))
    framework.barrier()
    begin = worker.now()
    for _ in range(repetitions):
        step()
    return begin, worker.now()


framework = {"torch": Torch, "tensorplay": TensorPlay}[host]()
worker.serve(rank, check, turn)
