"""Makes "fsdp" a backend of tensorplay.distributed.

TensorPlay keeps a register of backends, which `register_backend` fills, but does not make groups with what is in it:
`init_process_group` and `new_group` know nccl, gloo and mpi. So four functions of its module distributed_core are
replaced, and only for groups of this backend do they differ:

  init_process_group, new_group   have TensorPlay make a group of gloo, up to the point where its engine is asked for
  _cpu_pg                         gives a group's engine; at that point it turns the group into one of "fsdp"
  monitored_barrier               asks gloo's engine by the name of its backend: ours is asked the same

A TensorPlay whose own functions look into the register needs none of that and is left as it is.
"""

import contextlib
import functools
import inspect
import sys
import threading

BACKEND = "fsdp"
NEEDS = (1, 0)  # the oldest TensorPlay that this was tried with; the newest is 1.1

_making = threading.local()  # .wanted: (backend config, pg_options) of the group that this thread is making, else None
_REPLACED = ("init_process_group", "new_group", "_cpu_pg", "monitored_barrier")


def register():
    """Make "fsdp" a backend of tensorplay.distributed. Does nothing where it is one already."""
    import tensorplay

    version = tuple(int(part) for part in tensorplay.__version__.split("+")[0].split(".")[:2])
    if version < NEEDS:
        raise ImportError(
            f"libfsdp.tensorplay needs tensorplay {NEEDS[0]}.{NEEDS[1]} or newer, and this is "
            f"{tensorplay.__version__}: pip install --upgrade tensorplay"
        )
    import tensorplay.distributed as dist

    if not dist.is_available() and not hasattr(dist, "init_process_group"):
        raise ImportError("this build of tensorplay has no distributed package: install the wheel of PyPI")
    core = dist.distributed_core
    if BACKEND in core.Backend.backend_list:
        return
    missing = [name for name in _REPLACED if not callable(getattr(core, name, None))]
    if missing and not _uses_register(core):
        raise ImportError(
            f"tensorplay {tensorplay.__version__} makes groups in a way that libfsdp.tensorplay does not know yet "
            f"(distributed_core has no {', '.join(missing)}): use tensorplay 1.1, or the backend gloo"
        )
    core.Backend.register_backend(BACKEND, create, devices=["cpu"])
    if not _uses_register(core):
        _replace(core)


def _uses_register(core):
    """Whether TensorPlay makes groups with the creators that register_backend was given."""
    for name in ("init_process_group", "_ensure_comm", "_cpu_pg"):
        code = getattr(inspect.unwrap(getattr(core, name, None) or create), "__code__", None)
        if code is not None and {"_plugins", "BACKEND_TO_MAP"} & set(code.co_names):
            return True
    return False


def create(store, rank, ranks, timeout, *, group_name="0", pg_options=None):
    """The engine of a group of `ranks` that share a store, of which this process is the one numbered `rank`. timeout: a
    timedelta. Groups of the same name and other ranks, such as slices of a mesh are, don't meet each other."""
    from ..hosts.options import group_options
    from .engine import Engine

    options = group_options(pg_options, __package__)
    return Engine(store, rank, ranks, group_name, timeout.total_seconds(), options)


# ---- What is replaced ------------------------------------------------------------------------------------------------


def _replace(core):
    originals = {name: getattr(core, name) for name in _REPLACED}

    @functools.wraps(originals["init_process_group"])
    def init_process_group(backend=None, *arguments, **options):
        config = _config(core, backend)
        if config is None or core.is_initialized():
            return originals["init_process_group"](backend, *arguments, **options)
        with _wanting(config, None):
            try:
                originals["init_process_group"]("gloo", *arguments, **options)
            except BaseException:
                core.destroy_process_group()  # a group that has no engine
                raise
        core._backend = BACKEND

    signature = inspect.signature(originals["new_group"])

    @functools.wraps(originals["new_group"])
    def new_group(*arguments, **options):
        given = signature.bind(*arguments, **options).arguments
        backend = given.get("backend")
        if backend is None and core.is_initialized():
            backend = core.get_backend_config()
        config = _config(core, backend)
        if config is None:
            return originals["new_group"](*arguments, **options)
        from ..hosts.options import group_options

        group_options(given.get("pg_options"), __package__)
        with _wanting(config, given.get("pg_options")):
            return originals["new_group"](**(given | {"backend": "gloo"}))

    @functools.wraps(originals["_cpu_pg"])
    def _cpu_pg(pg):
        wanted = getattr(_making, "wanted", None)
        if wanted is not None:
            _making.wanted = None
            _become(core, pg, *wanted)
        if pg.backend != BACKEND:
            return originals["_cpu_pg"](pg)
        if pg.gloo_pg is None:
            raise RuntimeError(f"the process group {pg.group_name!r} was destroyed; make a new one")
        return pg.gloo_pg

    @functools.wraps(originals["monitored_barrier"])
    def monitored_barrier(group=None, timeout=None, wait_all_ranks=False):
        pg = core._resolve_group(group)
        if pg.backend != BACKEND:
            return originals["monitored_barrier"](group, timeout, wait_all_ranks)
        seconds = timeout.total_seconds() if hasattr(timeout, "total_seconds") else timeout
        _cpu_pg(pg).monitored_barrier(-1 if seconds is None else int(seconds * 1000), wait_all_ranks)

    replacements = locals()
    for module in [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "tensorplay"]:
        for name in _REPLACED:
            if vars(module).get(name) is originals[name]:
                setattr(module, name, replacements[name])


def _config(core, backend):
    """TensorPlay's BackendConfig when groups with this name are ours, else None, also for names that are wrong."""
    if backend is None:
        return None
    try:
        config = core.BackendConfig(str(backend).lower())
    except (TypeError, ValueError, RuntimeError):
        return None
    backends = config.get_device_backend_map()
    if len(backends) > 1:
        backends = {"active": backends.get("cuda" if core.tp.cuda.is_available() else "cpu")}
    return config if BACKEND in backends.values() else None


@contextlib.contextmanager
def _wanting(config, pg_options):
    _making.wanted = config, pg_options
    try:
        yield
    finally:
        _making.wanted = None


def _become(core, pg, config, pg_options):
    """Turn a group that has no engine yet into one of ours."""
    import datetime

    pg.backend = BACKEND
    pg._backend_config = repr(config)
    pg.gloo_pg = create(
        core._current_store(),
        pg.rank(),
        pg.ranks,
        datetime.timedelta(seconds=pg._timeout_s),
        group_name=pg.group_name,
        pg_options=pg_options,
    )
