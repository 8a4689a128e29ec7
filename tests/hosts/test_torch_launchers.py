"""How programs that use the backend "fsdp" of torch.distributed start, fail and end: under torchrun and under
libfsdp.run, with no import of libfsdp. A rank that fails is named by the others, in time, and no process stays."""

import glob
import os
import signal
import subprocess
import sys
import time
import uuid

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
import torch.distributed as dist
from conftest import run_python

FRESH = True  # ranks are processes that start by themselves: how they start and end is what is tested

# A whole program, as a user has it. Its first argument says what rank 1 does after the first operation; TIMEOUT is the
# group's. The survivors don't listen to the launcher, which ends them as soon as a rank fails: what they say is tested.
PROGRAM = """
import datetime, os, signal, sys, time, torch, torch.distributed as dist

mode, rank = sys.argv[1], int(os.environ["RANK"])
dist.init_process_group("fsdp", timeout=datetime.timedelta(seconds=float(os.environ["TIMEOUT"])))
t = torch.tensor([float(rank + 1)])
dist.all_reduce(t)
assert t.item() == sum(range(1, dist.get_world_size() + 1))
print("met", flush=True)
if mode == "restart" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    mode = "raise"
if rank != 1 and mode in ("raise", "kill", "hang"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
dist.barrier()
if rank == 1 and mode == "raise":
    raise ValueError("a mistake in the program")
if rank == 1 and mode == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1 and mode in ("hang", "interrupt"):
    print("away", flush=True)
    time.sleep(300)
if mode == "pending" and rank == 1:
    dist.irecv(torch.zeros(1), 0)
if mode in ("raise", "kill", "hang", "interrupt"):
    dist.all_reduce(t)
print("done", mode, flush=True)
"""
LAUNCHERS = {
    "libfsdp.run": ("-m", "libfsdp.run", "--grace", "20", "-n"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node"),
}
both = pytest.mark.parametrize("launcher", LAUNCHERS)


@pytest.fixture
def job(installed, tmp_path):
    """The command line and environment of PROGRAM in some mode on n ranks, with a timeout of the group in seconds;
    afterwards no process of it is there."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    marker = f"LAUNCHED_BY={uuid.uuid4()}"

    def command(launcher, n, mode, *options, timeout=600):
        first, *rest, count = LAUNCHERS[launcher]
        environment = installed | {"TIMEOUT": str(timeout)} | dict([marker.split("=")])
        return [first, *rest, *options, count, str(n), str(path), mode], environment

    yield command
    end = time.monotonic() + 3
    while left := having(marker):
        assert time.monotonic() < end, f"left running: {left}"
        time.sleep(0.05)


def having(marker):
    """The processes with this in their environment."""
    found = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(path, "rb") as file:
                if marker.encode() in file.read().split(b"\0"):
                    found.append(int(path.split("/")[2]))
        except OSError:
            pass  # it has ended
    return found


def run(job, *arguments, **options):
    command, environment = job(*arguments, **options)
    return run_python(*command, timeout=110, env=environment)  # far less than a group's timeout, where it is not given


# ---- How programs find it --------------------------------------------------------------------------------------------


def test_a_program_that_does_not_import_libfsdp_finds_the_backend(installed):
    program = (
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('fsdp', store=dist.HashStore(), rank=0, world_size=1)\n"
        "t = torch.ones(2); dist.all_reduce(t)\n"
        "print(dist.get_backend(), t.tolist())\n"
    )
    done = run_python("-c", program, env=installed)
    assert done.stdout.split("\n")[0] == "fsdp [1.0, 1.0]", done.stdout + done.stderr
    light = "import torch, sys, threading as t; print(t.active_count(), 'libfsdp.torch.process_group' in sys.modules)"
    assert run_python("-c", light, env=installed).stdout.split() == ["1", "False"]
    first = "import libfsdp.torch, torch.distributed as dist; print(dist.Backend.FSDP)"
    done = run_python("-c", first, env=installed)
    assert done.stdout.strip() == "fsdp", done.stderr


# ---- Start -----------------------------------------------------------------------------------------------------------


@both
def test_a_program_without_import_of_libfsdp_runs_and_may_end_without_destroy(job, launcher):
    done = run(job, launcher, 2, "plain")
    assert done.returncode == 0, done.stdout + done.stderr
    words = done.stdout  # of two ranks, in each other's lines where torchrun does not part them
    assert words.count("done") == words.count("plain") == 2, words
    assert "Traceback" not in done.stderr


def test_torchrun_restarts_the_ranks(job):
    done = run(job, "torchrun", 2, "restart", "--max-restarts=1")
    assert done.returncode == 0, done.stdout + done.stderr
    words = done.stdout
    assert words.count("done") == words.count("restart") == 2 and words.count("met") == 4, words


def addresses(job, folder):
    """Every way to say where ranks meet; one group after the other."""
    import socket

    def use(**options):
        dist.init_process_group("fsdp", timeout=job.limit, **options)
        t = torch.tensor([float(job.rank + 1)])
        dist.all_reduce(t)
        assert t.item() == sum(range(1, job.size + 1))
        dist.destroy_process_group()

    me = {"rank": job.rank, "world_size": job.size}
    use()  # env://, from the launcher
    use(init_method="env://")
    use(init_method=f"file://{folder}/meet", **me)
    path = os.path.join(folder, "port")
    if job.rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with open(path + ".new", "w") as file:
            file.write(str(port))
        os.rename(path + ".new", path)
    while not os.path.exists(path):
        time.sleep(0.01)
    with open(path) as file:
        port = file.read()
    use(init_method=f"tcp://127.0.0.1:{port}", **me)
    use(store=dist.FileStore(os.path.join(folder, "store"), job.size), **me)


def test_ranks_meet_by_any_address_that_torch_knows(hosted, tmp_path):
    hosted(3, addresses, str(tmp_path), before=False)


# ---- A rank that fails -----------------------------------------------------------------------------------------------


@both
def test_a_rank_that_raises_is_named_with_its_reason(job, launcher):
    done = run(job, launcher, 2, "raise")
    assert done.returncode == 1
    assert "Aborted: " in done.stderr
    assert "rank 1 ended with ValueError: a mistake in the program" in done.stderr, done.stderr
    if launcher == "libfsdp.run":
        assert "libfsdp.run: rank 1 " in done.stderr and "libfsdp.run: rank 0 " not in done.stderr, done.stderr


@both
def test_a_rank_that_is_killed_is_named(job, launcher):
    done = run(job, launcher, 2, "kill")
    assert done.returncode != 0
    assert "PeerLost: " in done.stderr and "rank 1 (process" in done.stderr, done.stderr


@both
def test_a_rank_that_hangs_is_named_after_the_timeout(job, launcher):
    done = run(job, launcher, 2, "hang", timeout=3)
    assert done.returncode != 0
    assert "Timeout: " in done.stderr and "not called by rank 1" in done.stderr, done.stderr


# ---- Interrupted, and the end ----------------------------------------------------------------------------------------


@both
def test_ctrl_c_ends_a_job_that_waits(job, launcher):
    command, environment = job(launcher, 2, "interrupt", *(["--grace=2"] if launcher == "libfsdp.run" else []))
    process = subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        while "away" not in (line := process.stdout.readline()):
            assert line, "it ended"
        time.sleep(0.5)  # rank 0 waits for rank 1 by then
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode != 0 and time.monotonic() - begin < 50
    finally:
        process.kill()
        process.communicate()


def interrupted(job):
    """Ctrl-C on one rank, in a wait for work; the other is told why that one left."""
    import threading

    t = torch.ones(2)
    if job.rank == 0:
        work = dist.all_reduce(t, async_op=True)
        begin = time.monotonic()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            work.wait()
        except KeyboardInterrupt:
            assert time.monotonic() - begin < 3
            dist.group.WORLD.abort()
            dist.barrier(group=job.gloo)
            return
        raise AssertionError("not interrupted")
    dist.barrier(group=job.gloo)
    try:
        dist.all_reduce(t)
    except dist.DistBackendError as error:
        assert "rank 0" in str(error)
    else:
        raise AssertionError("not told")


def test_a_wait_for_work_answers_ctrl_c_at_once(hosted):
    hosted(2, interrupted)


def test_a_rank_may_end_while_a_message_of_it_is_pending(job):
    done = run(job, "libfsdp.run", 2, "pending")
    assert done.returncode == 0 and done.stdout.count("done pending") == 2, done.stdout + done.stderr


# ---- Processes of a rank ---------------------------------------------------------------------------------------------


def loader(job):
    from torch.utils.data import DataLoader, TensorDataset

    values = torch.arange(24.0).reshape(12, 2) + job.rank
    pending = dist.all_reduce(torch.ones(3), async_op=True)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    for context, workers in (("fork", 2), ("spawn", 1)):
        seen = []
        batches = DataLoader(TensorDataset(values), batch_size=3, num_workers=workers, multiprocessing_context=context)
        for (x,) in batches:
            model(x).sum().backward()
            total = x.clone()
            dist.all_reduce(total)
            seen.append(total)
        torch.testing.assert_close(torch.cat(seen), job.size * torch.arange(24.0).reshape(12, 2) + sum(range(job.size)))
        grad = model.module.weight.grad.clone()
        dist.all_reduce(grad, dist.ReduceOp.AVG)
        torch.testing.assert_close(grad, model.module.weight.grad)
    pending.wait()
    # A forked process has no part in the group: it is told so, and its end is not the rank's.
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            os._exit(10 if "fork" in str(error) else 11)
        os._exit(12)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
    dist.barrier()


def test_data_loaders_with_processes_in_a_training_loop(hosted):
    hosted(2, loader)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
