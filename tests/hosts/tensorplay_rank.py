"""One rank of a test: tensorplay_rank.py MODULE WORKER STORE SETTINGS. See conftest.py."""

import faulthandler
import signal

import tensorplay
import tensorplay.distributed as dist
from job import main

import libfsdp.tensorplay  # noqa: F401

PRELOAD = (  # what programs of tests import as well, for zygote.py
    "numpy",
    "pytest",
    "libfsdp.tensorplay.classic",
    "libfsdp.tensorplay.composable",
    "libfsdp.tensorplay.process_group",
)

if __name__ == "__main__":
    tensorplay.set_num_threads(1)
    faulthandler.register(signal.SIGTERM, chain=True)  # a rank that the launcher ends says where it was
    main(dist)
