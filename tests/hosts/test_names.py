"""Names, in the host that is installed here: what its package `distributed.fsdp` exports can be imported from ours, and
importing ours costs nothing of it."""

import importlib
import importlib.util
import inspect

import pytest
from conftest import run_python

HOST = next((name for name in ("torch", "tensorplay") if importlib.util.find_spec(name)), None)
if HOST is None:
    pytest.skip("neither torch nor TensorPlay is installed here", allow_module_level=True)
NOT_EVERYWHERE = {"DataParallelMeshDims", "GradientReductionHandle"}  # newer hosts have them
LEFT_OUT = {"FlatParameter": "the classic wrapper keeps each parameter as it is: no object of ours is one"}
OURS = {  # what a program would not want the host's of; all else is the very class
    "FSDPModule",
    "FullyShardedDataParallel",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
}


def test_what_the_hosts_package_exports_is_in_ours():
    theirs = importlib.import_module(f"{HOST}.distributed.fsdp")
    ours = importlib.import_module(f"libfsdp.{HOST}")
    public = {name for name in dir(theirs) if not name.startswith("_") and not inspect.ismodule(getattr(theirs, name))}
    for name in sorted({*public, *theirs.__all__} - LEFT_OUT.keys()):
        assert name in dir(ours) and (name in ours.__all__ or name in NOT_EVERYWHERE), name
        own = getattr(ours, name)
        assert (own is not getattr(theirs, name)) == (name in OURS), name
        assert own.__module__.startswith("libfsdp.") == (name in OURS), name
    for name in LEFT_OUT:
        assert not hasattr(ours, name), f"{name} is there: {LEFT_OUT[name]}"


def test_all_of_ours_can_be_imported():
    names = {}
    exec(f"from libfsdp.{HOST} import *", names)
    ours = importlib.import_module(f"libfsdp.{HOST}")
    assert len(set(ours.__all__)) == len(ours.__all__) and names.keys() >= set(ours.__all__)


def test_importing_ours_imports_nothing_of_the_hosts_package():
    script = f"import sys, {HOST}; had = set(sys.modules); import libfsdp.{HOST}; print(*set(sys.modules) - had)"
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr
    assert not [name for name in done.stdout.split() if name.startswith(f"{HOST}.distributed.fsdp")]
