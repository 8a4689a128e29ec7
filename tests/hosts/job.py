"""What a rank of a test does, whatever its host: torch_rank.py and tensorplay_rank.py call it. See conftest.py."""

import datetime
import importlib.util
import json
import os
import pathlib
import sys


class Job:
    """This rank of a test. fsdp: the default group; gloo: the same ranks; `again` makes such groups anew."""

    def __init__(self, dist, store, limit):
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.limit = datetime.timedelta(seconds=limit)
        self.store, self.dist = store, dist
        self.fsdp = self.gloo = None

    def start(self, backend="fsdp", store=None):
        path = f"file://{self.store}{store or ''}"
        dist = self.dist
        dist.init_process_group(backend, init_method=path, rank=self.rank, world_size=self.size, timeout=self.limit)
        self.fsdp = dist.group.WORLD
        self.gloo = dist.new_group(backend="gloo", timeout=self.limit)


def main(dist):
    """dist: the host's package of distributed operations."""
    module, worker, store, settings = sys.argv[1:]
    arguments, limit, before = json.loads(settings)
    spec = importlib.util.spec_from_file_location(pathlib.Path(module).stem, module)
    loaded = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(pathlib.Path(module).parent))
    spec.loader.exec_module(loaded)
    job = Job(dist, store, limit)
    if before:
        job.start()
    getattr(loaded, worker)(job, *arguments)
    if dist.is_initialized():
        if before:
            dist.barrier(group=job.gloo)
        dist.destroy_process_group()
