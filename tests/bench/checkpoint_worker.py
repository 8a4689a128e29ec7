"""One rank of `ci/bench checkpoint`: checkpoint_worker.py RANK RANKS BYTES FOLDER FILES

A task is WHAT/WHOSE. WHAT: `save` and `load` this rank's shards; `load` of what 3 ranks have saved (`reshard`); `full`,
whole tensors by rank 0; `background`, until a save in the background has copied what it saves. WHOSE: `libfsdp`; `plain`,
a write or read of as many bytes by each rank (`full`: by rank 0) into a file; `safetensors`, the package's torch functions
on each rank's shards; `dcp`, torch.distributed.checkpoint of DTensors. All ranks meet after each.

The tensors are those of a transformer: layers of 12 width^2 in four matrices, and small vectors.
"""

import json
import os
import pathlib
import sys

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import safetensors.torch  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402

import libfsdp  # noqa: E402
import worker  # noqa: E402
from libfsdp import checkpoint  # noqa: E402

rank, size, bytes, folder, files = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
files = pathlib.Path(files)
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
group = libfsdp.init(f"file://{folder}/libfsdp-store?rank={rank}&world_size={size}")
mesh = init_device_mesh("cpu", (size,))


def shapes():
    """Names and shapes of `bytes` of float32, nearly."""
    width = 1024 if bytes >= 64 << 20 else 256
    layer = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    found, total, number = {}, 0, 0
    while total < bytes:
        for name, shape in [*layer.items(), ("norm", (width,)), ("bias", (4 * width,))]:
            found[f"layers.{number}.{name}"] = shape
            total += 4 * torch.Size(shape).numel()
        number += 1
    return found


SHAPES = shapes()


def parts(ranks, of):
    """{name: this rank's part} with values by their place in the whole."""
    found = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        start, length = libfsdp.shard_extent(shape[0], of, ranks)
        row = torch.Size(shape[1:]).numel()
        values = torch.arange(start * row, (start + length) * row, dtype=torch.float32).remainder_(8191).add_(index)
        found[name] = values.view(length, *shape[1:])
    return found


shards = parts(size, rank)
TOTAL = sum(shard.nbytes for shard in shards.values())
flat = torch.zeros(TOTAL, dtype=torch.uint8).numpy()
whole = torch.zeros(2 * TOTAL if rank == 0 else 1, dtype=torch.uint8).numpy()


def state(tensors, ranks, of):
    made = libfsdp.StateDict()
    for name, shape in SHAPES.items():
        start, _ = libfsdp.shard_extent(shape[0], of, ranks)
        made.add(name, tensors[name], shape=shape, offset=(start, *[0] * (len(shape) - 1)))
    return made


SAVED = state(shards, size, rank)
loaded = {name: torch.zeros_like(shard) for name, shard in shards.items()}
LOADED = state(loaded, size, rank)


def distributed(tensors):
    strides = {name: torch.empty(shape, device="meta").stride() for name, shape in SHAPES.items()}
    return {
        name: DTensor.from_local(tensors[name], mesh, [Shard(0)], shape=shape, stride=strides[name])
        for name, shape in SHAPES.items()
    }


def write(path, data):
    with open(path, "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view[: 64 << 20]) :]
        os.fsync(file.fileno())


def read(path, data):
    with open(path, "rb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.readinto(view) :]


def save_safetensors():
    path = files / f"safetensors-{rank}"
    safetensors.torch.save_file(shards, path)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def load_safetensors():
    for name, tensor in safetensors.torch.load_file(files / f"safetensors-{rank}").items():
        loaded[name].copy_(tensor)


def make_resharded():
    """What 3 ranks would have saved: each process plays some of them, in threads."""
    if rank == 0:
        import threading

        def play(of):
            store = libfsdp.Store(f"file://{folder}/three?rank={of}&world_size=3")
            with libfsdp.Group(store) as three:
                checkpoint.write(files / "three", state(parts(3, of), 3, of), three)

        threads = [threading.Thread(target=play, args=(of,)) for of in range(3)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    dist.barrier()


def background():
    global saving
    saving = checkpoint.write(files / "background", SAVED, group, background=True)


saving = None
TASKS = {
    "save/plain": lambda: write(files / f"plain-{rank}", flat),
    "save/libfsdp": lambda: checkpoint.write(files / "libfsdp", SAVED, group),
    "save/safetensors": save_safetensors,
    "save/dcp": lambda: dcp.save(distributed(shards), checkpoint_id=files / "dcp"),
    "load/plain": lambda: read(files / f"plain-{rank}", flat),
    "load/libfsdp": lambda: checkpoint.Checkpoint(files / "libfsdp").load(LOADED),
    "load/safetensors": load_safetensors,
    "load/dcp": lambda: dcp.load(distributed(loaded), checkpoint_id=files / "dcp"),
    "reshard/plain": lambda: read(files / f"plain-{rank}", flat),
    "reshard/libfsdp": lambda: checkpoint.Checkpoint(files / "three").load(LOADED),
    "reshard/dcp": lambda: dcp.load(distributed(loaded), checkpoint_id=files / "dcp"),
    "full/plain": lambda: write(files / "plain-full", whole) if rank == 0 else None,
    "full/libfsdp": lambda: checkpoint.write(files / "full.safetensors", SAVED, group, full=True),
    "background/plain": lambda: write(files / f"plain-{rank}", flat),
    "background/libfsdp": background,
}


def check(task, count):
    what, whose = task.split("/")
    if what == "reshard" and whose == "libfsdp":
        make_resharded()
    for tensor in loaded.values():
        tensor.fill_(-1)
    dist.barrier()
    TASKS[task]()
    finish()
    dist.barrier()
    if what in ("load", "reshard") and whose != "plain":
        for name, tensor in loaded.items():
            if not torch.equal(tensor, shards[name]):
                raise AssertionError(f"{task}: {name} is not what was saved")


def finish():
    """Wait for a save in the background, if there is one."""
    global saving
    if saving is not None:
        saving.wait()
        saving = None


def turn(task, count, repetitions):
    took = 0
    for _ in range(repetitions):
        dist.barrier()
        begin = worker.now()
        TASKS[task]()
        dist.barrier()
        took += worker.now() - begin
        finish()
    return took


worker.serve(rank, check, turn)
