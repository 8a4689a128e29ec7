"""Programs of test_threads.py, in either host: thread_programs.py HOST, with a line of JSON on standard input for each
job: a program's name, its arguments, how many ranks, and a folder for what they write and meet by.

HOST is torch or tensorplay, whose modules and distributed packages have the same names for all that is needed here. It
is imported once: ranks are forks, which run their program as `__main__` does and end as an interpreter does. Answers
are lines of JSON: the ranks' pids, then each rank's [pid, exit code] as it ends.

A line "waiting" of a rank says that it is about to wait for a peer that is late; "interrupted T" when, on the system's
monotonic clock, KeyboardInterrupt was raised.
"""

import contextlib
import ctypes
import datetime
import gc
import importlib
import json
import os
import sys
import threading
import time
import weakref

import memory
import numpy as np

LATE = 1.5  # seconds


class Host:
    def __init__(self, name):
        self.name = name
        self.lib = importlib.import_module(name)
        self.dist = importlib.import_module(f"{name}.distributed")
        self.ours = importlib.import_module(f"libfsdp.{name}")
        self.nn, self.optim = self.lib.nn, self.lib.optim
        self.ours.fully_shard  # imports what belongs to it

    def start(self, store, **options):
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        timeout = datetime.timedelta(seconds=30)
        self.dist.init_process_group("fsdp", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
        if not options:
            return self.dist.group.WORLD
        options = self.ours.Options(**options)
        return self.dist.new_group(list(range(size)), backend="fsdp", pg_options=options)

    def model(self, layers=3):
        self.lib.manual_seed(3)
        model = self.nn.Sequential(*(self.nn.Linear(6, 6) for _ in range(layers)))
        for layer in model:
            self.ours.fully_shard(layer)
        return self.ours.fully_shard(model)

    def step(self, model, x):
        (model(x) ** 2).mean().backward()


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def wait_sync(host, group, late):
    t = host.lib.ones(4)
    late()
    host.dist.all_reduce(t, group=group)


def wait_work(host, group, late):
    late()
    host.dist.all_reduce(host.lib.ones(4), group=group, async_op=True).wait()


def wait_future(host, group, late):
    late()
    host.dist.all_reduce(host.lib.ones(4), group=group, async_op=True).get_future().wait()


def wait_then(host, group, late):
    late()
    future = host.dist.all_reduce(host.lib.ones(4), group=group, async_op=True).get_future()
    future.then(lambda done: done).wait()


def wait_forward(host, group, late):
    model = host.model()
    x = host.lib.ones(2, 6)
    host.step(model, x)
    late()
    model(x)


def wait_backward(host, group, late):
    model = host.model()
    x = host.lib.ones(2, 6)
    host.step(model, x)
    loss = (model(x) ** 2).mean()
    late()
    loss.backward()


def wait_replicas(host, group, late):
    """Two dimensions: what is waited for is an operation of a part of the group's ranks."""
    mesh = importlib.import_module(f"{host.name}.distributed.device_mesh")
    mesh = mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = host.ours.fully_shard(host.nn.Linear(6, 6), mesh=mesh)
    x = host.lib.ones(2, 6)
    host.step(model, x)
    loss = (model(x) ** 2).mean()
    late()
    loss.backward()


def interrupt(host, store, where, late_ranks, options):
    """All ranks but the late ones wait for these. Who is interrupted says so; who isn't, says what it was told."""
    import libfsdp

    group = host.start(store, **options)
    host.dist.all_reduce(host.lib.ones(1), group=group)
    is_late = host.dist.get_rank() in late_ranks

    def late():
        print("waiting", flush=True)
        if is_late:
            time.sleep(LATE)

    begin = time.monotonic()
    try:
        globals()[f"wait_{where}"](host, group, late)
    except KeyboardInterrupt:
        print("interrupted", time.monotonic(), flush=True)
        raise
    except RuntimeError as error:
        while error is not None and not isinstance(error, libfsdp.FsdpError):
            error = error.__cause__
        print("told", type(error).__name__, *error.ranks, f"{time.monotonic() - begin:.2f}", flush=True)
        sys.exit(7)
    print("done", flush=True)


def goes_on(host, store):
    """interruptible=True: the program may go on after Ctrl-C, and so does the operation."""
    group = host.start(store, interruptible=True)
    t = host.lib.full((4,), host.dist.get_rank() + 1.0)
    host.dist.all_reduce(host.lib.ones(1), group=group)
    if host.dist.get_rank() == 0:
        print("waiting", flush=True)
        try:
            host.dist.all_reduce(t, group=group)
        except KeyboardInterrupt:
            print("interrupted", time.monotonic(), flush=True)
    else:
        time.sleep(LATE)
        host.dist.all_reduce(t, group=group)
    host.dist.barrier(group=group)
    assert t.tolist() == [3.0] * 4
    host.dist.destroy_process_group()


def own_handler(host, store):
    """A program with a handler of its own is not interrupted: the handler runs when the call returns."""
    import signal

    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(time.monotonic()))
    host.start(store)
    t = host.lib.ones(4)
    host.dist.all_reduce(t)
    if host.dist.get_rank() == 0:
        print("waiting", flush=True)
    else:
        time.sleep(LATE)
    host.dist.all_reduce(t)
    assert t.tolist() == [4.0] * 4
    assert len(seen) == (host.dist.get_rank() == 0)
    host.dist.destroy_process_group()


# ---- The end of the interpreter --------------------------------------------------------------------------------------


def end(host, store, how):
    """Ends without leaving its group."""
    group = host.start(store)
    rank = host.dist.get_rank()
    t = host.lib.ones(4)
    host.dist.all_reduce(t)
    keep = globals()["_kept"] = [group, t]
    if how == "pending":  # the other rank never joins
        if rank == 0:
            keep.append(host.dist.all_reduce(host.lib.ones(1 << 16), async_op=True))
            keep.append(host.dist.broadcast(host.lib.ones(3), 0, async_op=True))
    elif how == "models":
        model = host.model()
        optimizer = host.optim.SGD(model.parameters(), lr=0.1)
        host.step(model, host.lib.ones(2, 6))
        keep += [model, optimizer, model(host.lib.ones(2, 6)), host.model()]
    elif how == "daemon":
        if rank == 0:
            thread = threading.Thread(target=lambda: host.dist.all_reduce(host.lib.ones(4)), daemon=True)
            thread.start()
            time.sleep(0.3)
    elif how == "daemons":  # that never stop calling
        def call():
            with contextlib.suppress(Exception):
                while True:
                    host.dist.all_reduce(t)

        threading.Thread(target=call, daemon=True).start()
        time.sleep(0.3)
    print("done", flush=True)


# ---- Other threads and the interpreter lock --------------------------------------------------------------------------


@contextlib.contextmanager
def busy():
    """Another Python thread that wants the interpreter all the time."""
    stop = threading.Event()

    def spin():
        while not stop.is_set():
            sum(range(200))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def deleters(host, store):
    """Tensors and works of which the library has the last: freed once, on its threads, while others want the
    interpreter."""
    host.start(store)
    rank, lib, dist = host.dist.get_rank(), host.lib, host.dist
    freed, made = [], 0

    def tensor(value):
        nonlocal made
        array = np.full(4096, value, dtype="float32")
        weakref.finalize(array, freed.append, made)
        made += 1
        return lib.from_numpy(array)

    with busy():
        for _ in range(40):  # nobody keeps tensor or work
            dist.all_reduce(tensor(rank + 1.0), async_op=True)
        dist.barrier()
        works = []
        for index in range(40):  # the work is dropped in another thread, complete or not
            kept = tensor(rank + 1.0)
            works.append((dist.all_reduce(kept, async_op=True), kept))
            if index % 4 == 3:
                thread = threading.Thread(target=works.clear)
                thread.start()
                thread.join()
        del kept
        # Waited for in another thread than the one it was started in.
        results = []
        for _ in range(10):
            kept = tensor(rank + 1.0)
            work = dist.all_reduce(kept, async_op=True)
            thread = threading.Thread(target=lambda: (work.wait(), results.append(kept.sum().item())))
            thread.start()
            thread.join(20)
            assert not thread.is_alive()
        assert results == [3.0 * 4096] * 10, results
        del kept, work
        dist.all_reduce(lib.ones(1), async_op=True).wait()  # starting one lets go of those that are complete
        dist.barrier()
        for _ in range(200):
            dist.all_reduce(lib.ones(1), async_op=True).wait()
            gc.collect()
            if len(freed) == made:
                break
            time.sleep(0.01)
    assert sorted(freed) == list(range(made)), (len(freed), made)
    # Memory of the library that hosts hold, dropped in another thread.
    for _ in range(3):
        model = host.model()
        host.step(model, lib.ones(2, 6))
        held = [model]
        del model
        thread = threading.Thread(target=lambda: (held.clear(), gc.collect()))
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    dist.destroy_process_group()


def callbacks(host, store):
    """Python functions that the library calls while a call of it blocks, while another thread wants the interpreter."""
    import libfsdp

    lines = []

    @libfsdp.abi.fsdp_log_fn
    def log(level, line, user):
        lines.append(line)

    libfsdp.errors.check(libfsdp.abi.lib.fsdp_set_log(log, None, 3))
    dist, lib = host.dist, host.lib
    with busy():
        host.start(store)  # meets through Python functions of the store
        rank, size = dist.get_rank(), dist.get_world_size()
        for _ in range(5):
            group = dist.new_group(list(range(size)), backend="fsdp")
            t = lib.ones(3)
            dist.all_reduce(t, group=group)
            assert t.tolist() == [float(size)] * 3
        done = []
        for index in range(50):
            work = dist.all_reduce(lib.ones(8), async_op=True)
            inner = _library_work(work)
            inner.on_done(lambda finished, index=index: done.append(index))
            if rank == index % 2:
                time.sleep(0.001)
            work.wait()
        model = host.model()
        hooked = []
        model.set_all_reduce_hook(lambda output: hooked.append(output.shape[0]))
        for layer in model:
            layer.set_all_reduce_hook(lambda output: hooked.append(output.shape[0]))
        for _ in range(5):
            host.step(model, lib.ones(2, 6))
    assert sorted(done) == list(range(50))
    assert len(hooked) == 15, hooked
    assert lines and all(isinstance(line, bytes) for line in lines)
    libfsdp.errors.check(libfsdp.abi.lib.fsdp_set_log(libfsdp.abi.fsdp_log_fn(), None, 0))
    dist.destroy_process_group()


def _library_work(work):
    """The libfsdp.Work in a host's."""
    for name in ("_work", "_ending", "work"):
        inner = getattr(work, name, None)
        if inner is not None:
            return inner if hasattr(inner, "on_done") else _library_work(inner)
    raise AssertionError(work)


# ---- Forked workers --------------------------------------------------------------------------------------------------


class Rows:
    """A data set. inside: called in the worker for each row."""

    def __init__(self, inside=lambda: None):
        self.inside = inside

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.inside()
        return np.full(6, index / 8, dtype="float32")


def losses(host, model, batches):
    optimizer = host.optim.SGD(model.parameters(), lr=0.1)
    values = []
    for x in batches:
        loss = ((model(x) - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values


def forked(host, store):
    host.start(store)
    lib, dist = host.lib, host.dist
    DataLoader = importlib.import_module(f"{host.name}.utils.data").DataLoader
    model = host.model()

    def loader(inside=lambda: None, workers=2, rows=Rows):
        context = "fork" if workers else None
        return DataLoader(rows(inside), batch_size=2, num_workers=workers, multiprocessing_context=context)

    plain = losses(host, model, loader(workers=0))
    again = host.model()
    assert losses(host, again, loader()) == plain  # before its first forward, and between its steps
    # A worker that calls into the library is told so.
    t, x = lib.ones(2), lib.ones(2, 6)
    for inside in (lambda: dist.all_reduce(t), lambda: again(x)):
        try:
            list(loader(inside))
        except Exception as error:
            assert "fork" in str(error).lower() and "Forked" in str(error), error
        else:
            raise AssertionError("not refused")
    third = host.model()
    assert losses(host, third, loader()) == plain
    dist.destroy_process_group()


# ---- Memory ----------------------------------------------------------------------------------------------------------


def lasts(host, store):
    host.start(store)
    lib = host.lib
    model = host.nn.Sequential(*(host.nn.Linear(96, 96) for _ in range(2)))
    for layer in model:
        host.ours.fully_shard(layer)
    host.ours.fully_shard(model)
    optimizer = host.optim.SGD(model.parameters(), lr=1e-3)
    used = []
    for step in range(751):
        (model(lib.ones(4, 96)) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (250, 750):  # until then caches of Python and torch grow
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            used.append(memory.used())
    assert used[1] - used[0] < 4096, used  # 8 KiB a step; a step's gradients are 73
    host.dist.destroy_process_group()


def answer(*values):
    print(json.dumps(values), flush=True)


def lead():
    """Do jobs, one at a time. In a rank it returns what the rank is to run."""
    for line in sys.stdin:
        program, arguments, n, folder = json.loads(line)
        pids = []
        for rank in range(n):
            pids.append(os.fork())
            if not pids[-1]:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n)}
                for target, name in enumerate((os.devnull, f"{folder}/out{rank}", f"{folder}/err{rank}")):
                    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), target)
                return globals()[program], (f"{folder}/store", *arguments)
        answer(*pids)
        for _ in pids:
            pid, status = os.wait()
            answer(pid, os.waitstatus_to_exitcode(status))
    sys.exit()


if __name__ == "__main__":
    host = Host(sys.argv[1])
    run, arguments = lead()
    host.lib.set_num_threads(1)
    run(host, *arguments)
