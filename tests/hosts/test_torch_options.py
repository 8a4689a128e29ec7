"""What a program asks of a group beside its operations: timeouts, a backend for each device, messages sent first."""

import datetime
import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
import torch.distributed as dist

import libfsdp


def seconds(count):
    return datetime.timedelta(seconds=count)


def late(job, way):
    """Rank 1 comes after rank 0's time is up; the group's own would be 20 s."""
    t = torch.ones(4)
    dist.barrier()
    if job.rank == 1:
        time.sleep(4)
    begin = time.monotonic()
    try:
        if way == "group":
            job.fsdp.set_timeout(seconds(1))
            dist.all_reduce(t)
        else:
            opts = dist.AllreduceOptions()
            opts.asyncOp = way == "async"
            opts.timeout = seconds(1)
            job.fsdp.allreduce([t], opts).wait()
    except dist.DistBackendError as error:
        assert isinstance(error, libfsdp.Timeout), error
        assert job.rank == 1 or 0.5 < time.monotonic() - begin < 3.5, time.monotonic() - begin
    else:
        raise AssertionError("no timeout")


@pytest.mark.parametrize("way", ["group", "call", "async"])
def test_a_timeout_of_a_group_or_of_one_call_ends_it_in_that_time(hosted, way):
    hosted(2, late, way)


def longer(job):
    job.fsdp.set_timeout(seconds(1))
    job.fsdp.set_timeout(seconds(20))
    dist.barrier()
    if job.rank == 1:
        time.sleep(2)
    t = torch.full((3,), job.rank + 1.0)
    dist.all_reduce(t)
    assert t.tolist() == [3.0] * 3


def test_a_timeout_that_was_short_may_be_made_long_again(hosted):
    hosted(2, longer)


def devices(job):
    store = dist.FileStore(job.store, job.size)
    for number, text in enumerate(("cpu:fsdp,cuda:gloo", "cpu:fsdp,cuda:nccl", "cpu:fsdp")):
        dist.init_process_group(
            text,
            store=dist.PrefixStore(str(number), store),
            rank=job.rank,
            world_size=job.size,
            timeout=job.limit,
        )
        assert dist.group.WORLD.backend == "fsdp"
        t = torch.full((2,), job.rank + 1.0)
        dist.all_reduce(t)
        assert t.tolist() == [3.0, 3.0]
        try:
            dist.all_reduce(torch.ones(2, device="meta"))
        except libfsdp.Unsupported as error:
            assert "host memory" in str(error)
        else:
            raise AssertionError("not refused")
        dist.destroy_process_group()


def test_a_backend_for_each_device_gives_ours_for_host_memory(hosted):
    hosted(2, devices, before=False)
