"""One rank of a test: torch_rank.py MODULE WORKER STORE SETTINGS. See conftest.py."""

import torch
import torch.distributed as dist
from job import main

import libfsdp.torch  # noqa: F401

PRELOAD = (  # what programs of tests import as well, for zygote.py
    "numpy",
    "pytest",
    "libfsdp.torch.classic",
    "libfsdp.torch.composable",
    "libfsdp.torch.process_group",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.utils.checkpoint",
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    main(dist)
