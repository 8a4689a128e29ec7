"""python -m libfsdp.info: what there is on this machine for libfsdp to work with, and what to do about what is missing.

It loads the library, starts a second process and lets the two make groups, so that what it says has been tried. Exit
code 0 when two processes could work together, else 1.
"""

import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile

from . import __version__, abi
from .errors import FsdpError
from .group import Group
from .store import Store

_HOSTS = {
    "numpy": "training with libfsdp.numpy, and arrays in and out",
    "ml_dtypes": "bfloat16 and float8 in NumPy",
    "torch": "the backend 'fsdp' of torch.distributed",
    "tensorplay": "the backend 'fsdp' of tensorplay.distributed",
}


def main():
    print(f"libfsdp      {__version__}")
    try:
        number = abi.lib.fsdp_version()
    except abi.LibraryNotFound as error:
        print(f"library      not found: {error}")
        return 1
    print(f"library      {number // 10000}.{number // 100 % 100}.{number % 100}, {abi.lib.path}")
    cores = len(os.sched_getaffinity(0))
    print(f"python       {platform.python_version()} on {platform.system()} {platform.release()}, {cores} cores")
    works = _transports()
    for name, use in _HOSTS.items():
        print(f"{name:<12} {_host(name, use)}")
    return 0 if works else 1


def _transports():
    with Group() as alone:
        print(f"transports   {alone.info().transport}: a group of one, works")
    shared = _try_two(None)
    print(f"             shm: ranks on this host, {shared or 'works (tried with two processes)'}")
    if shared:
        return False
    direct = _try_two(True)
    if not direct:
        print("direct reads: allowed, ranks read each other's memory, one copy instead of two")
    else:
        print(f"direct reads: refused, {direct}")
        print("             It works without, through shared memory, large operations more slowly. To allow them: in a")
        print("             container add the capability SYS_PTRACE; on a host set kernel.yama.ptrace_scope to 0.")
    return True


def _try_two(direct_read):
    """Let this process and another one make a group and use it; what went wrong, or None."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/store"
        code = f"from libfsdp.info import _join; _join({url!r}, 1, {direct_read})"
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        other = subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": paths},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return _join(url, 0, direct_read)
        finally:
            try:
                other.wait(5)
            except subprocess.TimeoutExpired:
                other.kill()
                other.wait()


def _join(url, rank, direct_read):
    try:
        store = Store(url, rank=rank, world_size=2, timeout=15)
        with store, Group(store, timeout=15, direct_read=direct_read) as group:
            data = bytearray(range(64)) if rank == 0 else bytearray(64)
            group.broadcast(data)
            group.barrier()
            return None if data == bytearray(range(64)) else "wrong data"
    except FsdpError as error:
        return str(error)


def _host(name, use):
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        extra = "numpy" if name == "ml_dtypes" else name
        return f"not installed; for {use}: pip install 'libfsdp[{extra}]'"
    if name == "tensorplay":
        return f"{version}: {use}, after `import libfsdp.tensorplay`"
    if name != "torch":
        return f"{version}: {use}"
    found = importlib.metadata.entry_points(group="torch.backends", name="fsdp")
    if found and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        return f"{version}: {use}, found by torch itself"
    return f"{version}: {use}, after `import libfsdp.torch` (where pip has installed libfsdp, torch finds it by itself)"


if __name__ == "__main__":
    sys.exit(main())
