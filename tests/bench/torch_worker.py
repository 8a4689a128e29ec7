"""One rank of a backend of torch.distributed, in `ci/bench collectives` and `ci/bench backend`:
torch_worker.py BACKEND RANK RANKS FOLDER LARGEST

Beside the collectives there are `step`, forward and backward of a six-layer transformer under torch's FSDP2, and
`compute`, the same without any communication."""

import os
import sys
from datetime import timedelta

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import worker  # noqa: E402

backend = sys.argv[1]
rank, size, folder, largest = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
if backend == "fsdp":
    import libfsdp.torch  # noqa: E402, F401
torch.set_num_threads(1)
dist.init_process_group(
    backend, init_method=f"file://{folder}/torch-store", rank=rank, world_size=size, timeout=timedelta(seconds=60)
)
source, target = torch.zeros(largest // 4), torch.zeros(largest // 4)


def bind(task, bytes):
    """The task as a function without arguments, and its output. All-reduce is in place: torch has no other form."""
    if task in ("step", "compute"):
        return step(task == "step"), None
    count = bytes // 4
    part = count // size
    if task == "all_gather":
        output, shard = target[: part * size], source[:part]
        return (lambda: dist.all_gather_into_tensor(output, shard)), output
    if task == "reduce_scatter":
        output, whole = target[:part], source[: part * size]
        return (lambda: dist.reduce_scatter_tensor(output, whole)), output
    if task == "all_reduce":
        whole = source[:count]
        return (lambda: dist.all_reduce(whole)), whole
    raise ValueError("no such task")


models = {}


def step(sharded):
    """Forward and backward of one batch."""
    if sharded not in models:
        torch.manual_seed(1)
        layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        if sharded:
            from torch.distributed.fsdp import fully_shard

            for each in model.layers:
                fully_shard(each)
            fully_shard(model)
        models[sharded] = model, torch.randn(4, 64, 256)
    model, x = models[sharded]

    def run():
        model.zero_grad()
        model(x).square().mean().backward()

    return run


def pattern(count):
    return torch.arange(count).remainder_(13).add_(1).float()


def check(task, bytes):
    if task in ("step", "compute"):
        step(task == "step")()
        return
    count = bytes // 4
    part = count // size
    source[:count] = pattern(count) * (rank + 1)
    target[:count] = 0
    run, output = bind(task, bytes)
    run()
    total = size * (size + 1) // 2
    if task == "all_gather":
        wanted = torch.cat([pattern(part) * (r + 1) for r in range(size)])
    elif task == "reduce_scatter":
        wanted = pattern(part * size)[part * rank : part * (rank + 1)] * total
    else:
        wanted = pattern(count) * total
    if not torch.equal(output, wanted):
        raise AssertionError(f"{task}: the output is wrong")
    source[:count] = 0  # so that sums in place stay finite


def turn(task, bytes, repetitions):
    run, _ = bind(task, bytes)
    dist.barrier()
    begin = worker.now()
    for _ in range(repetitions):
        run()
    return begin, worker.now()


worker.serve(rank, check, turn)
