"""One rank of a test: tensorplay_rank.py MODULE WORKER STORE SETTINGS. See conftest.py."""

import datetime
import faulthandler
import importlib.util
import json
import os
import pathlib
import signal
import sys

import tensorplay
import tensorplay.distributed as dist

import libfsdp.tensorplay  # noqa: F401


class Job:
    """This rank of a test. fsdp: the default group; gloo: the same ranks."""

    def __init__(self, store, limit):
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.limit = datetime.timedelta(seconds=limit)
        self.store = store
        self.fsdp = self.gloo = None

    def start(self, backend="fsdp", store=None):
        path = f"file://{self.store}{store or ''}"
        dist.init_process_group(backend, init_method=path, rank=self.rank, world_size=self.size, timeout=self.limit)
        self.fsdp = dist.group.WORLD
        self.gloo = dist.new_group(backend="gloo", timeout=self.limit)


def main():
    module, worker, store, settings = sys.argv[1:]
    arguments, limit, before = json.loads(settings)
    spec = importlib.util.spec_from_file_location(pathlib.Path(module).stem, module)
    loaded = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(pathlib.Path(module).parent))
    spec.loader.exec_module(loaded)
    tensorplay.set_num_threads(1)
    faulthandler.register(signal.SIGTERM, chain=True)  # a rank that the launcher ends says where it was
    job = Job(store, limit)
    if before:
        job.start()
    getattr(loaded, worker)(job, *arguments)
    if dist.is_initialized():
        if before:
            dist.barrier(group=job.gloo)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
