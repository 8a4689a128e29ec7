"""One rank of gloo, through torch, in `ci/bench collectives`:  gloo_worker.py RANK RANKS FOLDER LARGEST"""

import os
import sys
from datetime import timedelta

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import worker  # noqa: E402

rank, size, folder, largest = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/gloo-store", rank=rank, world_size=size, timeout=timedelta(seconds=60)
)
source, target = torch.zeros(largest // 4), torch.zeros(largest // 4)


def bind(task, bytes):
    """The task as a function without arguments, and its output. Gloo reduces in place: there is no other form."""
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


def pattern(count):
    return torch.arange(count).remainder_(13).add_(1).float()


def check(task, bytes):
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
