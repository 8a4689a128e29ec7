"""One rank of a test: torch_rank.py MODULE WORKER STORE SETTINGS. See conftest.py."""

import torch
import torch.distributed as dist
from job import main

import libfsdp.torch  # noqa: F401

if __name__ == "__main__":
    torch.set_num_threads(1)
    main(dist)
