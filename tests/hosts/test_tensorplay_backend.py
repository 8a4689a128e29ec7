"""tensorplay.distributed on the backend "fsdp", beside gloo in the same processes. What values must be comes from
NumPy, as gloo is not always right (its AVG of integers cuts)."""

import datetime
import os
import signal
import sys
import threading
import time

import pytest

tp = pytest.importorskip(
    "tensorplay", reason="TensorPlay is not installed here; ci/test tensorplay makes a venv that has it"
)
import numpy as np
import tensorplay.distributed as dist

import libfsdp

RANK = "tensorplay_rank.py"
SIZES = [1, 2, 3, 4]
NUMBERS = "float64 float32 float16 bfloat16 int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
OPS = {"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}
NARROW = ("int8", "uint8", "float16", "bfloat16")  # whose products here would be too large


# ---- Inputs and how results are compared -----------------------------------------------------------------------------


def numbers(rank, shape, seed=0):
    """What a rank puts in: integers that no other rank has at the same place, small enough for exact sums of any
    dtype."""
    count = int(np.prod(shape))
    return ((np.arange(count) * 7 + rank * 3 + seed) % 5 + 1 + (rank if count else 0)).reshape(shape)


def tensor(array, dtype="float32"):
    return tp.from_numpy(np.ascontiguousarray(array)).to(getattr(tp, dtype))


def mine(job, shape, dtype="float32", seed=0):
    return tensor(numbers(job.rank, shape, seed), dtype)


def zeros(*shape, dtype="float32"):
    return tp.zeros(*shape, dtype=getattr(tp, dtype))


def bits(t):
    return t.detach().contiguous().view(tp.uint8).numpy()


def alike(result, expected):
    """The same shape and values, by NumPy."""
    np.testing.assert_array_equal(result.detach().to(tp.float64).numpy(), np.asarray(expected, dtype=np.float64))


def both(job, operation, expected, dtype):
    """The results of operation(group) on fsdp are what NumPy says; those on gloo are the same bits."""
    ours = operation(job.fsdp)
    for our, value in zip(ours, expected, strict=True):
        assert our.dtype == getattr(tp, dtype)
        np.testing.assert_array_equal(bits(our), bits(tensor(value, dtype)), dtype)
    for our, their in zip(ours, operation(job.gloo), strict=True):
        assert our.dtype == their.dtype and tuple(our.shape) == tuple(their.shape)
        np.testing.assert_array_equal(bits(our), bits(their), dtype)


def refused(call, *kinds):
    try:
        call()
    except kinds or RuntimeError as error:
        return error
    raise AssertionError(f"not refused with {kinds or RuntimeError}")


# ---- Every collective ------------------------------------------------------------------------------------------------


def reductions(job):
    n, rank = job.size, job.rank
    shape = (2 * n, 3)
    every = np.stack([numbers(r, shape) for r in range(n)])
    for dtype in NUMBERS:
        for name, function in OPS.items():
            if name == "PRODUCT" and dtype in NARROW:
                continue
            op, total = getattr(dist.ReduceOp, name), function.reduce(every)
            own = slice(2 * rank, 2 * rank + 2)

            def whole(group):
                t, u = mine(job, shape, dtype), mine(job, shape, dtype)
                assert dist.all_reduce(t, op, group=group) is None
                dist.reduce(u, n - 1, op, group=group)
                several = [mine(job, shape, dtype), mine(job, shape, dtype)[:2]]
                dist.all_reduce_coalesced(several, op, group=group)
                return [t, *several, u] if rank == n - 1 else [t, *several]

            both(job, whole, [total, total, total[:2]] + ([total] if rank == n - 1 else []), dtype)

            def scattered(group):
                out = [zeros(2, 3, dtype=dtype) for _ in range(6)]
                dist.reduce_scatter_tensor(out[0], mine(job, shape, dtype), op, group=group)
                dist.reduce_scatter(out[1], list(mine(job, shape, dtype).chunk(n)), op, group=group)
                apart = [part.clone() for part in mine(job, shape, dtype).chunk(n)]
                dist.reduce_scatter(out[2], apart, op, group=group)
                dist.reduce_scatter_single_coalesced(out[3:5], [mine(job, shape, dtype)] * 2, op, group=group)
                dist.reduce_scatter_coalesced([out[5]], [apart], op, group=group)
                return out

            both(job, scattered, [total[own]] * 6, dtype)
    # AVG, against NumPy alone.
    for dtype in NUMBERS[:4]:
        t = mine(job, shape, dtype)
        dist.all_reduce(t, dist.ReduceOp.AVG)
        alike(t, tensor(np.mean(every, axis=0), dtype).to(tp.float64).numpy())
    # Bits, which gloo of TensorPlay hangs in.
    for op, function in (("BAND", np.bitwise_and), ("BOR", np.bitwise_or), ("BXOR", np.bitwise_xor)):
        t = mine(job, shape, "int32")
        dist.all_reduce(t, getattr(dist.ReduceOp, op))
        alike(t, function.reduce(every))
    flag = tp.tensor([rank == n - 1, False])
    dist.all_reduce(flag)
    assert flag.tolist() == [True, False]
    z = tp.full((2,), complex(rank, 1), dtype=tp.complex64)
    dist.all_reduce(z)
    assert z.tolist() == [complex(sum(range(n)), n)] * 2


def movement(job):
    """What only moves elements."""
    n, rank = job.size, job.rank
    shape = (2, 3)
    for dtype in NUMBERS + ["bool", "complex64", "complex128"]:
        values = [numbers(r, shape) % 2 if dtype == "bool" else numbers(r, shape) for r in range(n)]
        own, together = tensor(values[rank], dtype), np.concatenate(values)

        def gathered(group):
            whole, stacked = zeros(n * 2, 3, dtype=dtype), zeros(n, 2, 3, dtype=dtype)
            dist.all_gather_into_tensor(whole, own, group=group)
            dist.all_gather_single(stacked, own, group=group)
            apart = [zeros(2, 3, dtype=dtype) for _ in range(n)]
            dist.all_gather(apart, own, group=group)
            chunks = zeros(n * 2, 3, dtype=dtype)
            dist.all_gather(list(chunks.chunk(n)), own, group=group)
            several = [zeros(n * 2, 3, dtype=dtype), zeros(n, 3, dtype=dtype)]
            dist.all_gather_single_coalesced(several, [own, own[:1]], group=group)
            lists = [[zeros(2, 3, dtype=dtype) for _ in range(n)] for _ in range(2)]
            dist.all_gather_coalesced(lists, [own, own], group=group)
            return [whole, stacked, *apart, chunks, *several, *lists[1]]

        firsts = np.stack([value[0] for value in values])
        expected = [together, np.stack(values), *values, together, together, firsts, *values]
        both(job, gathered, expected, dtype)

        for root in {0, n - 1}:
            here = rank == root

            def from_and_to(group):
                t = own.clone()
                dist.broadcast(t, root, group=group)
                parts = [zeros(2, 3, dtype=dtype) for _ in range(n)] if here else None
                dist.gather(own, parts, root, group=group)
                whole = zeros(n * 2, 3, dtype=dtype) if here else None
                dist.gather_into_tensor(own, whole, root, group=group)
                part = zeros(2, 3, dtype=dtype)
                given = [tensor(numbers(root, shape, r) % 2, dtype) for r in range(n)] if here else None
                dist.scatter(part, given, root, group=group)
                return [t, part, *(parts or []), *([whole] if here else [])]

            expected = [values[root], numbers(root, shape, rank) % 2, *(values + [together] if here else [])]
            both(job, from_and_to, expected, dtype)

        # Part r of rank s's input is what rank r has as part s.
        parts = [[numbers(s, (1 + (s + 2 * r) % 3, 2), r) % 2 for r in range(n)] for s in range(n)]
        sent = [1 + (rank + 2 * r) % 3 for r in range(n)]
        received = [1 + (s + 2 * rank) % 3 for s in range(n)]

        def all_to_all(group):
            target = zeros(sum(received), 2, dtype=dtype)
            dist.all_to_all_single(target, tensor(np.concatenate(parts[rank]), dtype), received, sent, group=group)
            out = [zeros(count, 2, dtype=dtype) for count in received]
            if group is job.fsdp:
                dist.all_to_all(out, [tensor(part, dtype) for part in parts[rank]], group=group)
            else:
                out = list(target.split(received))  # gloo's lists are of equal tensors
            even = zeros(n, 3, dtype=dtype)
            dist.all_to_all_single(even, tensor(numbers(rank, (n, 3)) % 2, dtype), group=group)
            return [*out, target, even]

        got = [parts[s][rank] for s in range(n)]
        expected = [*got, np.concatenate(got), np.stack([(numbers(s, (n, 3)) % 2)[rank] for s in range(n)])]
        both(job, all_to_all, expected, dtype)


def collectives(job):
    reductions(job)
    movement(job)


@pytest.mark.parametrize("n", SIZES)
def test_every_collective_gives_what_numpy_says_and_gloo_does(hosted, n):
    hosted(n, collectives)


# ---- Tensors of all shapes -------------------------------------------------------------------------------------------


def shapes(job):
    n, rank = job.size, job.rank
    total = sum(numbers(r, (4, 6)) for r in range(n))
    engine = job.fsdp.gloo_pg
    for view in (lambda t: t.T, lambda t: t[:, ::2], lambda t: t[1:3, 2:5]):
        for reduce in (dist.all_reduce, lambda t: engine.allreduce([t]).wait()):  # through a copy, and as it is
            base = mine(job, (4, 6))
            assert not view(base).is_contiguous()
            reduce(view(base))
            expected = numbers(rank, (4, 6))
            view(expected)[...] = view(total)  # the rest is as it was
            alike(base, expected)
    # Strided in lists, and as the only output.
    wide = zeros(n, 3, 4)
    for gather in (dist.all_gather, lambda outs, t: engine.allgather([outs], [t]).wait()):
        gather([wide[r, :, ::2] for r in range(n)], mine(job, (3, 2)))
        for r in range(n):
            alike(wide[r, :, ::2], numbers(r, (3, 2)))
        alike(wide[:, :, 1::2], np.zeros((n, 3, 2)))
        wide.zero_()
    across = zeros(3, n).t()
    engine.all_to_all_single(across, mine(job, (3, n)).t()).wait()
    alike(across, np.stack([numbers(s, (3, n)).T[rank] for s in range(n)]))
    uneven = [tp.full((r + 1,), float(rank)) for r in range(n)]
    part = zeros(rank + 1)
    dist.reduce_scatter(part, uneven)  # gloo refuses parts of different lengths
    assert part.tolist() == [sum(range(n))] * (rank + 1)
    # Nothing at all, and no dimensions at all.
    empty = zeros(0, 3)
    dist.all_reduce(empty)
    dist.all_gather_into_tensor(zeros(0, 3), empty)
    dist.all_gather([zeros(0, 3) for _ in range(n)], empty)
    dist.reduce_scatter_tensor(empty, zeros(0, 3))
    dist.all_to_all_single(zeros(0), zeros(0))
    dist.broadcast(empty, 0)
    point = tp.tensor(float(rank))
    dist.all_reduce(point)
    assert point.item() == sum(range(n))
    points = [tp.tensor(0.0) for _ in range(n)]
    dist.all_gather(points, tp.tensor(float(rank)))
    assert [p.item() for p in points] == list(range(n))
    # In place: the input is this rank's part of the output.
    whole = zeros(n * 1000)
    part = whole.narrow(0, rank * 1000, 1000)
    part.fill_(rank + 1)
    dist.all_gather_into_tensor(whole, part)
    alike(whole, np.repeat(np.arange(1, n + 1), 1000))
    # Large.
    big = tp.full((3_000_001,), float(rank))
    dist.all_reduce(big)
    assert (big == sum(range(n))).all().item()
    # Parameters are written like any tensor; memory that a tensor gives up meanwhile stays until the operation is over.
    parameter = tp.nn.Parameter(tp.ones(3))
    dist.all_reduce(parameter)
    alike(parameter, [n] * 3)
    t = tp.full((300_000,), 1.0)
    works = []
    for _ in range(10):
        works.append(dist.all_reduce(t, async_op=True))
    t.data = zeros(2)
    del t
    for work in works:
        work.wait()


@pytest.mark.parametrize("n", [2, 3])
def test_strided_empty_large_and_in_place_tensors(hosted, n):
    hosted(n, shapes)


# ---- Asynchronous ----------------------------------------------------------------------------------------------------


def asynchronous(job):
    n, rank = job.size, job.rank
    total = sum(range(n))
    tensors = [tp.full((100,), float(rank + i)) for i in range(20)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for i in np.random.default_rng(rank).permutation(20):  # any order of waiting
        assert works[i].wait() is True and works[i].is_completed()
        assert tensors[i][0].item() == total + n * i
    t = tp.full((5,), float(rank))
    future = dist.all_reduce(t, async_op=True).get_future()
    assert future.wait()[0].tolist() == [total] * 5
    # A list that needs a copy at the end, and a work that is dropped at once.
    parts = [zeros(3) for _ in range(n)]
    job.fsdp.gloo_pg.allgather([parts], [tp.full((3,), float(rank))])
    dist.barrier()
    deadline = time.monotonic() + 10
    while [p[0].item() for p in parts] != list(range(n)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    work = dist.all_gather(parts, tp.full((3,), float(rank + 5)), async_op=True)
    while not work.is_completed():
        assert time.monotonic() < deadline
    assert [p[0].item() for p in parts] == [r + 5 for r in range(n)]
    for i in range(100):  # what is copied at the end is there when wait returns, whoever copies it
        parts = [zeros(300) for _ in range(n)]
        dist.all_gather(parts, tp.full((300,), float(rank + i)), async_op=True).wait()
        assert all((p == r + i).all().item() for r, p in enumerate(parts))
    out = zeros(3)
    works = [
        dist.reduce_scatter(out, [tp.full((3,), float(r)) for r in range(n)], async_op=True),
        dist.barrier(async_op=True),
        dist.all_reduce_coalesced([tp.ones(2), tp.ones(3)], async_op=True),
    ]
    for work in reversed(works):
        work.wait()
    assert out.tolist() == [n * rank] * 3
    # A wait that runs out says so, and the operation goes on.
    if rank == 0:
        work = dist.all_reduce(t, async_op=True)
        assert work.wait(datetime.timedelta(milliseconds=50)) is False and not work.is_completed()
    dist.barrier(job.gloo)
    if rank:
        work = dist.all_reduce(t, async_op=True)
    assert work.wait() is True and t.tolist() == [n * total] * 5
    if tp.__version__ >= "1.1":  # TensorPlay 1.0's fail on gloo as well
        from tensorplay.distributed import _functional_collectives as functional

        lazy = functional.all_reduce(tp.full((2,), float(rank)), "sum", job.fsdp)
        assert functional.wait_tensor(lazy).tolist() == [total] * 2


@pytest.mark.parametrize("n", [2, 4])
def test_asynchronous_work_is_waited_for_in_any_order(hosted, n):
    hosted(n, asynchronous)


# ---- Point to point, objects, barriers -------------------------------------------------------------------------------


def messages(job):
    n, rank = job.size, job.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    got = zeros(4)
    sending, receiving = dist.isend(tp.full((4,), float(rank)), right), dist.irecv(got, left)
    receiving.wait()
    sending.wait()
    assert got.tolist() == [left] * 4
    if rank == 0:
        sources = set()
        for _ in range(n - 1):
            t = zeros(2)
            source = dist.recv(t)  # from anybody
            assert t.tolist() == [source] * 2
            sources.add(source)
        assert sources == set(range(1, n))
        dist.send(tp.tensor([1, 2]), n - 1, tag=7)
    else:
        dist.send(tp.full((2,), float(rank)), 0)
    if rank == n - 1:
        first = tp.zeros(2, dtype=tp.int64)
        assert dist.recv(first, 0, tag=7) == 0 and first.tolist() == [1, 2]
    # Objects of any kind.
    things = [None] * n
    dist.all_gather_object(things, {"rank": rank, "text": "x" * (rank * 100)})
    assert [t["rank"] for t in things] == list(range(n)) and len(things[-1]["text"]) == 100 * (n - 1)
    shared = [rank, "from", rank] if rank == n - 1 else [None] * 3
    dist.broadcast_object_list(shared, n - 1)
    assert shared == [n - 1, "from", n - 1]
    collected = [None] * n if rank == 0 else None
    dist.gather_object(("rank", rank), collected)
    assert rank or collected == [("rank", r) for r in range(n)]
    own = [None]
    dist.scatter_object_list(own, [f"for {r}" for r in range(n)] if rank == 0 else None)
    assert own == [f"for {rank}"]
    if rank == 0:
        dist.send_object_list(["a", 2], 1)
    elif rank == 1:
        received = [None, None]
        dist.recv_object_list(received, 0)
        assert received == ["a", 2]
    dist.barrier()
    dist.monitored_barrier()
    dist.monitored_barrier(job.gloo)


@pytest.mark.parametrize("n", [2, 3])
def test_messages_objects_and_barriers(hosted, n):
    hosted(n, messages)


# ---- Groups ----------------------------------------------------------------------------------------------------------


def uses(group, ranks, rank):
    """The group is ours, and of these ranks."""
    assert dist.get_backend(group) == "fsdp" and dist.get_rank(group) == ranks.index(rank)
    t = tp.tensor([float(rank)])
    dist.all_reduce(t, group=group)
    assert t.item() == sum(ranks)


def groups(job):
    n, rank = job.size, job.rank
    assert dist.get_backend_config() == "cpu:fsdp" and dist.get_backend(job.gloo) == "gloo"
    assert dist.is_backend_available("fsdp") and dist.Backend.FSDP == "fsdp"
    for first in range(n - 1):  # overlapping ones
        pair = dist.new_group([first, first + 1], group_desc=f"pair {first}", backend=["fsdp", "cpu:fsdp", None][first])
        if rank in (first, first + 1):
            uses(pair, [first, first + 1], rank)
            t = tp.tensor([float(rank)])
            dist.broadcast(t, src=first + 1, group=pair)  # a global rank
            assert t.item() == first + 1
    halves = [[r for r in range(n) if r % 2 == part] for part in (0, 1)]
    uses(dist.split_group(split_ranks=halves), halves[rank % 2], rank)
    own, _ = dist.new_subgroups(2)
    uses(own, [rank - rank % 2, rank - rank % 2 + 1], rank)
    from tensorplay.distributed.device_mesh import DeviceMesh, init_device_mesh

    mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("replicate", "shard"))
    uses(mesh.get_group("shard"), [rank - rank % 2, rank - rank % 2 + 1], rank)
    uses(mesh["replicate"].get_group(), halves[rank % 2], rank)  # two groups of one name, on which gloo fails
    # Beside a default group of any backend, made by its own ranks alone, in an order of its own.
    options = libfsdp.tensorplay.Options(staging_bytes=1 << 20, spin_us=0)
    if rank in (0, n - 1):
        for _ in range(2):
            ends = libfsdp.tensorplay.ProcessGroup([n - 1, 0], pg_options=options)
            whole = zeros(2)
            dist.all_gather_into_tensor(whole, tp.tensor([float(rank)]), group=ends)
            assert whole.tolist() == [n - 1, 0] and dist.get_rank(ends) == (rank == 0)
            dist.destroy_process_group(ends)
    every = libfsdp.tensorplay.ProcessGroup()
    t = tp.tensor([float(rank)])
    dist.all_reduce(t, group=DeviceMesh.from_group(every, "cpu").get_group())
    dist.monitored_barrier(every)
    assert t.item() == sum(range(n))
    smaller = dist.new_group(pg_options=options)
    if rank < n - 1:
        uses(dist.shrink_group([n - 1], smaller), list(range(n - 1)), rank)
    else:
        core = dist.distributed_core
        core._group_count += 1  # the rank that is left out makes no group, and TensorPlay numbers them
    # Threads, each with a group of its own.
    threads, wrong = [], []
    for group in [dist.new_group() for _ in range(3)]:

        def work(group=group):
            for i in range(30):
                t = tp.full((10,), float(rank + i))
                dist.all_reduce(t, group=group)
                if t[0].item() != sum(range(n)) + n * i:
                    wrong.append(t)

        threads.append(threading.Thread(target=work))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_groups_meshes_splits_and_threads(hosted):
    hosted(4, groups)


def again(job):
    job.start()
    dist.destroy_process_group()
    store = dist.FileStore(job.store + "-kept", job.size)
    for i in range(100):
        dist.init_process_group("cpu:fsdp" if i % 2 else "fsdp", store=store, rank=job.rank, world_size=job.size)
        t = tp.tensor([float(job.rank + i)])
        dist.all_reduce(t)
        assert t.item() == sum(range(job.size)) + job.size * i
        old, engine = dist.group.WORLD, dist.group.WORLD.gloo_pg
        if i < 99:
            del engine
        dist.destroy_process_group()
    assert "destroyed" in str(refused(lambda: dist.all_reduce(t, group=old)))
    engine.__del__()
    assert "closed" in str(refused(lambda: engine.allreduce([t]).wait()))
    refused(lambda: dist.all_reduce(t))
    assert [t.name for t in threading.enumerate()] == ["MainThread", "libfsdp interrupt"]  # which is one a process
    # A message that never comes does not keep a rank that leaves.
    job.start(store="-last")
    dist.irecv(t, (job.rank + 1) % job.size)
    begin = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - begin < 10


def test_destroy_and_init_again_with_one_store(hosted):
    hosted(2, again, before=False)


# ---- Misuse ----------------------------------------------------------------------------------------------------------


def misuse(job):
    n = job.size
    t = tp.ones(4)
    for group in (job.fsdp, job.gloo):  # both refuse, with the same class, and go on
        refused(lambda: dist.all_gather([zeros(4)] * (n - 1) + [zeros(3)], t, group=group), ValueError)
        refused(lambda: dist.all_gather([zeros(4, dtype="int32")] * n, t, group=group), ValueError)
        refused(lambda: dist.all_gather([zeros(4)] * (n + 1), t, group=group))
        refused(lambda: dist.all_to_all_single(zeros(4), t, [1] * n, [5] * n, group=group))
        refused(lambda: dist.broadcast(tp.eye(2).to_sparse(), 0, group=group))
        refused(lambda: dist.broadcast(t, group_src=n, group=group), ValueError)
        refused(lambda: dist.all_reduce(tp.ones(2), dist.ReduceOp.PREMUL_SUM, group=group), TypeError, ValueError)
    for bad, words in (
        (tp.eye(2).to_sparse(), "to_dense"),
        (tp.ones(2, dtype=tp.int32), "avg"),
    ):
        error = refused(lambda: dist.all_reduce(bad, dist.ReduceOp.AVG))
        assert words in str(error), error
    refused(lambda: dist.all_reduce(t, dist.ReduceOp.BAND))
    assert "overlap" in str(refused(lambda: job.fsdp.gloo_pg.allreduce([tp.ones(1).expand(4)]).wait()))
    assert "is not a tensorplay.Tensor" in str(refused(lambda: job.fsdp.gloo_pg.allreduce([3]), TypeError))
    assert "pg_options" in str(refused(lambda: dist.new_group(backend="fsdp", pg_options=object()), TypeError))
    assert "unknown" in str(refused(lambda: dist.new_group(backend="nothing"), ValueError)).lower()
    refused(lambda: dist.init_process_group("fsdp"))  # twice
    refused(lambda: libfsdp.tensorplay.ProcessGroup([0, n]), ValueError)
    refused(lambda: libfsdp.tensorplay.ProcessGroup([1 - job.rank]), ValueError)
    # Ranks that differ are told which ones, and the group goes on.
    error = refused(lambda: dist.all_reduce(tp.ones(4 + job.rank)), libfsdp.Mismatch)
    assert len(error.ranks) == 2
    dist.all_reduce(t)
    assert t.tolist() == [n] * 4


def test_misuse_is_refused_in_words(hosted):
    hosted(2, misuse)


def late(job):
    """Rank 1 does not come."""
    second = datetime.timedelta(seconds=1)
    made, set_later, watched = dist.new_group(timeout=second), dist.new_group(), dist.new_group()
    dist.set_timeout(second, set_later)
    t = tp.ones(2)
    if job.rank == 0:
        for group in (made, set_later):
            begin = time.monotonic()
            error = refused(lambda: dist.all_reduce(t, group=group), TimeoutError)
            assert isinstance(error, libfsdp.Timeout) and error.ranks == (1,) and "1" in str(error)
            assert 0.9 < time.monotonic() - begin < 5
        error = refused(lambda: dist.monitored_barrier(watched, datetime.timedelta(milliseconds=200), True))
        assert "Rank 1 failed to pass monitoredBarrier in 200 ms" in str(error) and error.ranks == (1,)
    dist.barrier(group=job.gloo)
    if job.rank == 1:
        for other in (made, set_later):
            refused(lambda: dist.all_reduce(t, group=other))
        assert "monitoredBarrier" in str(refused(lambda: dist.monitored_barrier(watched, second)))
    dist.all_reduce(t)  # other groups go on


def test_a_rank_that_does_not_come_is_named_in_time(hosted):
    hosted(2, late)


def death(job):
    for number in (signal.SIGINT, signal.SIGTERM):  # the launcher's, which ends the others when one rank dies
        signal.signal(number, signal.SIG_IGN)
    t = tp.ones(2)
    dist.all_reduce(t)
    if job.rank == 1:
        os._exit(3)
    refused(dist.all_reduce(t, async_op=True).wait)
    error = refused(lambda: dist.all_reduce(t), ConnectionError)
    assert isinstance(error, libfsdp.PeerLost) and error.ranks == (1,)
    print("told:", error, flush=True)
    time.sleep(1)  # a rank that leaves now would be the one that the other names
    dist.destroy_process_group()
    os._exit(0)  # gloo's barrier at the end of a rank would wait for the dead one


def test_a_rank_that_dies_is_named_to_the_others(hosted):
    done = hosted(3, death, check=False, grace=15)
    assert done.stdout.count("told:") == 2 and "rank 1" in done.stdout, done.stdout + done.stderr


def aborted(job):
    t = tp.ones(2)
    begin = time.monotonic()
    if job.rank == 0:
        dist.barrier(group=job.gloo)
        time.sleep(0.3)
        job.fsdp.gloo_pg.abort()
    else:
        work = dist.all_reduce(t, async_op=True)
        dist.barrier(group=job.gloo)
        error = refused(work.wait, libfsdp.Aborted)
        assert "rank 0" in str(error)
    assert time.monotonic() - begin < 10


def test_an_abort_ends_the_operations_of_all(hosted):
    hosted(2, aborted)


# ---- Processes -------------------------------------------------------------------------------------------------------


def launched(job):
    assert threading.active_count() == 1  # importing starts none
    dist.init_process_group("fsdp", timeout=job.limit)  # the launcher's own store
    t = tp.tensor([float(dist.get_rank())])
    dist.all_reduce(t)
    assert t.item() == 1


@pytest.mark.parametrize("module", ["libfsdp.run", "tensorplay.distributed.run"])
def test_launchers_start_it(hosted, module):
    more = ("--nproc-per-node=2",) if module.startswith("tensorplay") else ()
    hosted(2, launched, before=False, launcher=("-m", module, *more))


class Rows(tp.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return np.full(3, index, dtype="float32")


def loaded(job):
    t = tp.ones(2)
    work = dist.all_reduce(t, async_op=True)
    loader = tp.utils.data.DataLoader(Rows(), batch_size=4, num_workers=2)  # forks
    for _ in range(2):
        assert sorted(float(row[0]) for batch in loader for row in batch) == list(range(12))
        dist.all_reduce(t)
    work.wait()
    assert t.tolist() == [job.size**3] * 2


def test_a_forked_data_loader_disturbs_nothing(hosted):
    hosted(2, loaded, fresh=True)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
