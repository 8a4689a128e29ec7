"""torch.distributed on the backend "fsdp", beside gloo in the same processes. What values must be comes from NumPy, as
gloo has not always been right."""

import datetime
import os
import signal
import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
import numpy as np
import torch.distributed as dist

import libfsdp

SIZES = [1, 2, 3, 4]
NUMBERS = ["float64", "float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64"]
OPS = {
    "SUM": np.add.reduce,
    "PRODUCT": np.multiply.reduce,
    "MIN": np.minimum.reduce,
    "MAX": np.maximum.reduce,
}


# ---- Inputs and how results are compared -----------------------------------------------------------------------------


def numbers(rank, shape, seed=0):
    """What a rank puts in: integers that no other rank has at the same place, small enough for exact sums of any
    dtype."""
    count = int(np.prod(shape))
    return ((np.arange(count) * 7 + rank * 3 + seed) % 5 + 1 + (rank if count else 0)).reshape(shape)


def tensor(array, dtype="float32"):
    return torch.from_numpy(np.ascontiguousarray(array)).to(getattr(torch, dtype))


def mine(job, shape, dtype="float32", seed=0):
    return tensor(numbers(job.rank, shape, seed), dtype)


def alike(result, expected):
    """The same shape and values, by NumPy."""
    got = result.detach().resolve_conj().to(torch.float64).numpy()
    np.testing.assert_array_equal(got, np.asarray(expected, dtype=np.float64))


def both(job, operation, expected=None):
    """The results of operation(group) on fsdp and on gloo are the same bits, and what NumPy says."""
    ours, theirs = operation(job.fsdp), operation(job.gloo)
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == their.dtype and our.shape == their.shape
        assert torch.equal(our, their), (our, their)
    if expected is not None:
        for our, value in zip(ours, expected, strict=True):
            alike(our, value)


def refused(call, *kinds):
    try:
        call()
    except kinds or RuntimeError as error:
        return error
    raise AssertionError(f"not refused with {kinds or RuntimeError}")


# ---- Every collective ------------------------------------------------------------------------------------------------


def collectives(job):
    n, rank = job.size, job.rank
    shape = (2 * n, 3)
    for dtype in NUMBERS:
        every = np.stack([numbers(r, shape) for r in range(n)])
        for name, reduce in OPS.items():
            if name == "PRODUCT" and dtype in ("int8", "uint8", "float16", "bfloat16"):
                continue  # too large
            op = getattr(dist.ReduceOp, name)

            def all_reduce(group):
                t = mine(job, shape, dtype)
                assert dist.all_reduce(t, op, group=group) is None
                return [t]

            both(job, all_reduce, [reduce(every)])

            def reduced(group):
                t = mine(job, shape, dtype)
                dist.reduce(t, n - 1, op, group=group)
                return [t] if rank == n - 1 else []

            both(job, reduced, [reduce(every)] if rank == n - 1 else [])

            def scattered(group):
                out = torch.zeros(2, 3, dtype=getattr(torch, dtype))
                dist.reduce_scatter_tensor(out, mine(job, shape, dtype), op, group=group)
                out2 = torch.zeros(2, 3, dtype=getattr(torch, dtype))
                dist.reduce_scatter(out2, list(mine(job, shape, dtype).chunk(n)), op, group=group)
                apart = [part.clone() for part in mine(job, shape, dtype).chunk(n)]
                out3 = torch.zeros(2, 3, dtype=getattr(torch, dtype))
                dist.reduce_scatter(out3, apart, op, group=group)
                return [out, out2, out3]

            both(job, scattered, [reduce(every)[2 * rank : 2 * rank + 2]] * 3)
    for dtype in NUMBERS + ["bool", "complex64", "float8_e4m3fn", "uint16"]:
        movement(job, dtype)
    # AVG, against NumPy alone: gloo has been wrong here.
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        t = mine(job, shape, dtype)
        dist.all_reduce(t, dist.ReduceOp.AVG)
        alike(t, tensor(np.mean([numbers(r, shape) for r in range(n)], axis=0), dtype).double())
    for op, function in (("BAND", np.bitwise_and), ("BOR", np.bitwise_or), ("BXOR", np.bitwise_xor)):

        def bits(group):
            t = mine(job, shape, "int32")
            dist.all_reduce(t, getattr(dist.ReduceOp, op), group=group)
            return [t]

        both(job, bits, [function.reduce([numbers(r, shape) for r in range(n)])])
    flag = torch.tensor([rank == n - 1, False])
    dist.all_reduce(flag)
    assert flag.tolist() == [True, False]
    z = torch.full((2,), complex(rank, 1))
    dist.all_reduce(z)
    assert z.tolist() == [complex(sum(range(n)), n)] * 2
    # A factor that inputs are multiplied with, which FSDP2 asks for.
    half = dist._make_nccl_premul_sum(0.5)
    total = 0.5 * np.sum([numbers(r, shape) for r in range(n)], axis=0)
    t = mine(job, shape)
    dist.all_reduce(t, half)
    alike(t, total)
    t, out = mine(job, shape), torch.zeros(2, 3)
    dist.reduce_scatter_tensor(out, t, half)
    alike(out, total[2 * rank : 2 * rank + 2])
    alike(t, numbers(rank, shape))


def movement(job, dtype):
    """What only moves elements."""
    n, rank = job.size, job.rank
    kind = getattr(torch, dtype)
    shape = (2, 3)
    beside = dtype not in ("float8_e4m3fn", "uint16", "bool")  # gloo has no such thing
    values = [numbers(r, shape) % 2 if dtype == "bool" else numbers(r, shape) for r in range(n)]
    own = tensor(values[rank], dtype)

    def check(operation, expected):
        if beside:
            both(job, operation)
        for result, value in zip(operation(job.fsdp), expected, strict=True):
            assert result.dtype == kind
            wanted = tensor(value, dtype)
            assert torch.equal(result.contiguous().view(torch.uint8), wanted.view(torch.uint8)), (dtype, result, wanted)

    def gathered(group):
        whole = torch.zeros(n * 2, 3, dtype=kind)
        dist.all_gather_into_tensor(whole, own, group=group)
        stacked = torch.zeros(n, 2, 3, dtype=kind)  # gloo can't
        dist.all_gather_into_tensor(stacked if group is job.fsdp else stacked.view(2 * n, 3), own, group=group)
        apart = [torch.zeros(2, 3, dtype=kind) for _ in range(n)]
        dist.all_gather(apart, own, group=group)
        chunks = torch.zeros(n * 2, 3, dtype=kind)
        dist.all_gather(list(chunks.chunk(n)), own, group=group)
        return [whole, stacked, *apart, chunks]

    together = np.concatenate(values)
    check(gathered, [together, np.stack(values), *values, together])

    for root in {0, n - 1}:

        def broadcast(group):
            t = own.clone()
            dist.broadcast(t, root, group=group)
            return [t]

        check(broadcast, [values[root]])

        def to_root(group):
            parts = [torch.zeros(2, 3, dtype=kind) for _ in range(n)] if rank == root else None
            dist.gather(own, parts, root, group=group)
            return parts or []

        if dtype != "complex64":  # torch's gather has no complex numbers
            check(to_root, values if rank == root else [])

        def from_root(group):
            part = torch.zeros(2, 3, dtype=kind)
            parts = [tensor((numbers(root, shape, r)) % 2, dtype) for r in range(n)] if rank == root else None
            dist.scatter(part, parts, root, group=group)
            return [part]

        check(from_root, [numbers(root, shape, rank) % 2])

    # Part r of rank s's input is what rank r has as part s.
    parts = [[numbers(s, (1 + (s + 2 * r) % 3, 2), r) % 2 for r in range(n)] for s in range(n)]

    def all_to_all(group):
        whole = torch.cat([tensor(part, "float32") for part in parts[rank]]).to(kind)
        received = [1 + (s + 2 * rank) % 3 for s in range(n)]
        target = torch.zeros(sum(received), 2, dtype=kind)
        sent = [1 + (rank + 2 * r) % 3 for r in range(n)]
        dist.all_to_all_single(target, whole, received, sent, group=group)
        out = [torch.zeros(count, 2, dtype=kind) for count in received]
        if group is job.fsdp:
            dist.all_to_all(out, [tensor(part, dtype) for part in parts[rank]], group=group)
        else:
            out = list(target.split(received))  # gloo has none for lists
        even = torch.zeros(n, 3, dtype=kind)
        dist.all_to_all_single(even, tensor(numbers(rank, (n, 3)) % 2, dtype), group=group)
        return [*out, target, even]

    got = [parts[s][rank] for s in range(n)]
    check(all_to_all, [*got, np.concatenate(got), np.stack([(numbers(s, (n, 3)) % 2)[rank] for s in range(n)])])


@pytest.mark.parametrize("n", SIZES)
def test_every_collective_gives_what_numpy_says_and_gloo_does(hosted, n):
    hosted(n, collectives)


# ---- Tensors of all shapes -------------------------------------------------------------------------------------------


def shapes(job):
    n, rank = job.size, job.rank
    total = sum(numbers(r, (4, 6)) for r in range(n))
    for view in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:3, 2:5]):
        base = mine(job, (4, 6))
        t = view(base)
        assert not t.is_contiguous()
        dist.all_reduce(t)
        alike(t, view(torch.from_numpy(total)))
        untouched = torch.ones(4, 6)
        view(untouched).zero_()
        assert torch.equal(base * untouched, mine(job, (4, 6)) * untouched)  # the rest of it is as it was
    # Strided in lists, and as the only output.
    wide = torch.zeros(n, 3, 4)
    dist.all_gather([wide[r, :, ::2] for r in range(n)], mine(job, (3, 2)))
    for r in range(n):
        alike(wide[r, :, ::2], numbers(r, (3, 2)))
    assert not wide[:, :, 1::2].any()
    across = torch.zeros(3, n).t()
    dist.all_to_all_single(across, mine(job, (3, n)).t())
    alike(across, np.stack([numbers(s, (3, n)).T[rank] for s in range(n)]))
    # Nothing at all, and no dimensions at all.
    empty = torch.zeros(0, 3)
    dist.all_reduce(empty)
    dist.all_gather_into_tensor(torch.zeros(0, 3), empty)
    dist.all_gather([torch.zeros(0, 3) for _ in range(n)], empty)
    dist.reduce_scatter_tensor(empty, torch.zeros(0, 3))
    dist.all_to_all_single(torch.zeros(0), torch.zeros(0))
    point = torch.tensor(float(rank))
    dist.all_reduce(point)
    assert point.item() == sum(range(n))
    points = [torch.tensor(0.0) for _ in range(n)]
    dist.all_gather(points, torch.tensor(float(rank)))
    assert [p.item() for p in points] == list(range(n))
    # A list whose parts differ: rank r's has r + 1 rows.
    for parts in (
        [mine(job, (r + 1, 2), seed=r) for r in range(n)],
        list(torch.cat([mine(job, (r + 1, 2), seed=r) for r in range(n)]).split([r + 1 for r in range(n)])),
    ):
        for out in (torch.zeros(rank + 1, 2), torch.zeros(2, rank + 1).t()):
            dist.reduce_scatter(out, parts)
            alike(out, sum(numbers(r, (rank + 1, 2), rank) for r in range(n)))
    # In place, as FSDP2 does it: the input is this rank's part of the output.
    whole = torch.zeros(n * 1000)
    part = whole.narrow(0, rank * 1000, 1000)
    part.fill_(rank + 1)
    dist.all_gather_into_tensor(whole, part)
    alike(whole, np.repeat(np.arange(1, n + 1), 1000))
    # Large.
    big = torch.full((3_000_001,), float(rank))
    dist.all_reduce(big)
    assert (big == sum(range(n))).all()
    # Leaves and values of autograd are written like any tensor.
    leaf = torch.ones(3, requires_grad=True)
    dist.all_reduce(leaf)
    alike(leaf, [n] * 3)
    parts = [torch.nn.Parameter(torch.zeros(2)) for _ in range(n)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    assert [p[0].item() for p in parts] == list(range(n))
    with torch.inference_mode():
        t = torch.ones(2)
        dist.all_reduce(t)
        assert t.tolist() == [n, n]


@pytest.mark.parametrize("n", [2, 3])
def test_strided_empty_large_and_in_place_tensors(hosted, n):
    hosted(n, shapes)


# ---- Asynchronous ----------------------------------------------------------------------------------------------------


def asynchronous(job):
    n, rank = job.size, job.rank
    total = sum(range(n))
    tensors = [torch.full((100,), float(rank + i)) for i in range(20)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for i in np.random.default_rng(rank).permutation(20):  # any order of waiting
        assert works[i].wait() is True and works[i].is_completed() and works[i].is_success()
        assert tensors[i][0].item() == total + n * i
        assert works[i].result()[0] is tensors[i]
    # Futures, and what is chained to them, without anybody waiting for the work.
    t = torch.full((5,), float(rank))
    future = dist.all_reduce(t, async_op=True).get_future()
    doubled = future.then(lambda f: f.value()[0] * 2)
    assert doubled.wait().tolist() == [2 * total] * 5
    assert future.wait()[0] is t
    late = dist.all_reduce(torch.ones(2), async_op=True)
    late.wait()
    assert late.get_future().wait()[0].tolist() == [n, n]
    # A list that needs a copy at the end, and a work that is dropped at once.
    parts = [torch.zeros(3) for _ in range(n)]
    dist.all_gather(parts, torch.full((3,), float(rank)), async_op=True)
    dist.barrier()
    deadline = time.monotonic() + 10
    while [p[0].item() for p in parts] != list(range(n)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    work = dist.all_gather(parts, torch.full((3,), float(rank + 5)), async_op=True)
    deadline = time.monotonic() + 10
    while not work.is_completed():
        assert time.monotonic() < deadline
    assert [p[0].item() for p in parts] == [r + 5 for r in range(n)]
    for i in range(300):  # what is copied at the end is there when wait returns, whoever copies it
        parts = [torch.zeros(300) for _ in range(n)]
        dist.all_gather(parts, torch.full((300,), float(rank + i)), async_op=True).wait()
        assert all((p == r + i).all() for r, p in enumerate(parts))
    out = torch.zeros(3)
    works = [
        dist.reduce_scatter(out, [torch.full((3,), float(r)) for r in range(n)], async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in reversed(works):
        work.wait()
    assert out.tolist() == [n * rank] * 3
    # Coalesced.
    with dist._coalescing_manager(async_ops=True) as several:
        more = [torch.full((2,), float(rank + i)) for i in range(3)]
        for t in more:
            dist.all_reduce(t)
    several.wait()
    assert [t[0].item() for t in more] == [total + n * i for i in range(3)]
    wholes = [torch.zeros(2 * n), torch.zeros(n)]
    with dist._coalescing_manager(device=torch.device("cpu")):
        dist.all_gather_into_tensor(wholes[0], torch.full((2,), float(rank)))
        dist.all_gather_into_tensor(wholes[1], torch.full((1,), float(rank)))
    assert wholes[1].tolist() == list(range(n)) and wholes[0].sum().item() == 2 * total
    halves = [torch.zeros(2), torch.zeros(1)]
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(halves[0], torch.ones(2 * n))
        dist.reduce_scatter_tensor(halves[1], torch.full((n,), 2.0))
    assert halves[0].tolist() == [n, n] and halves[1].tolist() == [2 * n]
    # With an operation, and a factor, of their own; sums would be other numbers.
    most = [torch.full((2,), float(rank + i)) for i in range(3)]
    dist.all_reduce_coalesced(most, dist.ReduceOp.MAX)
    assert [t.tolist() for t in most] == [[n - 1.0 + i] * 2 for i in range(3)]
    with dist._coalescing_manager():
        for t in most:
            dist.all_reduce(t.add_(rank), dist.ReduceOp.MIN)
    assert [t.tolist() for t in most] == [[n - 1.0 + i] * 2 for i in range(3)]
    with dist._coalescing_manager():
        for half in halves:
            source = torch.arange(half.numel() * n) + float(rank)
            dist.reduce_scatter_tensor(half, source, dist._make_nccl_premul_sum(0.5))
    for half in halves:
        source = np.arange(half.numel() * n) * n + total
        alike(half, 0.5 * source.reshape(n, -1)[rank])
    lists = [[torch.zeros(2) for _ in range(n)], [torch.zeros(1) for _ in range(n)]]
    dist.all_gather_coalesced(lists, [torch.full((2,), float(rank)), torch.full((1,), rank + 0.5)])
    assert [t[0].item() for t in lists[1]] == [r + 0.5 for r in range(n)]


@pytest.mark.parametrize("n", [2, 4])
def test_asynchronous_work_is_waited_for_in_any_order(hosted, n):
    hosted(n, asynchronous)


# ---- Point to point, objects, barriers -------------------------------------------------------------------------------


def messages(job):
    n, rank = job.size, job.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    got = torch.zeros(4)
    ops = [dist.P2POp(dist.isend, torch.full((4,), float(rank)), right), dist.P2POp(dist.irecv, got, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert got.tolist() == [left] * 4
    if rank == 0:
        sources = set()
        for _ in range(n - 1):
            t = torch.zeros(2)
            source = dist.recv(t)  # from anybody
            assert t.tolist() == [source] * 2
            sources.add(source)
        assert sources == set(range(1, n))
        dist.send(torch.tensor([1, 2]), n - 1, tag=7)
    else:
        dist.send(torch.full((2,), float(rank)), 0)
    if rank == n - 1:
        first, second = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.complex64)
        assert dist.recv(first, 0, tag=7) == 0 and first.tolist() == [1, 2]
        dist.send(torch.tensor([1 + 2j]), 0, tag=3)
    if rank == 0:
        second = torch.zeros(1, dtype=torch.complex64)
        dist.recv(second, n - 1, tag=3)
        assert second.item() == 1 + 2j
    # Tags say which message is which, whatever the order.
    if rank == 0:
        for work in [dist.isend(torch.tensor([tag * 10]), 1, tag=tag) for tag in (1, 2, 3)]:
            work.wait()
    elif rank == 1:
        for tag in (3, 1, 2):
            number = torch.zeros(1, dtype=torch.int64)
            dist.recv(number, 0, tag=tag)
            assert number.item() == tag * 10
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
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(n)] if rank == 0 else None)
    assert mine == [f"for {rank}"]
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


# ---- Misuse ----------------------------------------------------------------------------------------------------------


def misuse(job):
    n, rank = job.size, job.rank
    t = torch.ones(4)
    for group in (job.fsdp, job.gloo):  # both refuse, with a RuntimeError, and go on
        refused(lambda: dist.all_gather([torch.zeros(4)] * (n - 1) + [torch.zeros(3)], t, group=group))
        refused(lambda: dist.all_gather([torch.zeros(4)] * (n - 1) + [torch.zeros(2, 2)], t, group=group))
        refused(lambda: dist.all_gather([torch.zeros(4)] * (n + 1), t, group=group))
        refused(lambda: dist.all_to_all_single(torch.zeros(4), t, [1] * n, [5] * n, group=group))
        refused(lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND, group=group))
        refused(lambda: dist.broadcast(torch.ones(2, 2).to_sparse(), 0, group=group))
        refused(lambda: dist.broadcast(t, group_src=n, group=group))
        refused(lambda: dist.all_gather([torch.zeros(4, dtype=torch.int32)] * n, t, group=group), ValueError)
        refused(lambda: dist.all_reduce([t], group=group), TypeError)
    for bad, words in (
        (torch.ones(2, device="meta"), "meta"),
        (torch.ones(2, 2).to_sparse(), "to_dense"),
        (torch.imag(torch.ones(2, dtype=torch.complex64).conj()), "resolve_neg"),
        (torch.ones(2, dtype=torch.int32), "avg"),
        (torch.ones(1).expand(4), "overlap"),
    ):
        error = refused(lambda: dist.all_reduce(bad, dist.ReduceOp.AVG))
        assert words in str(error), error
    assert "input" in str(refused(lambda: dist.all_gather_into_tensor(torch.zeros(7), t)))
    refused(lambda: dist.new_group(backend="fsdp", pg_options=object()), TypeError)
    # Ranks that differ are told which ones, and the group goes on.
    error = refused(lambda: dist.all_reduce(torch.ones(4 + rank)), dist.DistBackendError)
    assert isinstance(error, libfsdp.Mismatch) and len(error.ranks) == 2
    dist.all_reduce(t)
    assert t.tolist() == [n] * 4


def test_misuse_is_refused_in_words(hosted):
    hosted(2, misuse)


def late(job):
    """Rank 1 does not come."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    waited = dist.new_group()
    watched = dist.new_group()
    t = torch.ones(2)
    if job.rank == 0:
        begin = time.monotonic()
        error = refused(lambda: dist.all_reduce(t, group=group), dist.DistBackendError)
        assert isinstance(error, libfsdp.Timeout) and isinstance(error, TimeoutError) and error.ranks == (1,)
        assert 0.9 < time.monotonic() - begin < 5
        work = dist.all_reduce(t, group=waited, async_op=True)
        refused(lambda: work.wait(datetime.timedelta(milliseconds=200)), dist.DistBackendError)
        error = refused(lambda: dist.monitored_barrier(watched, datetime.timedelta(milliseconds=200), True))
        assert "Rank 1 failed to pass monitoredBarrier in 200 ms" in str(error) and error.ranks == (1,)
    dist.barrier(group=job.gloo)
    if job.rank == 1:
        for other in (group, waited):
            refused(lambda: dist.all_reduce(t, group=other), dist.DistBackendError)
        error = refused(lambda: dist.monitored_barrier(watched, datetime.timedelta(seconds=5)))
        assert "monitoredBarrier" in str(error)
    dist.all_reduce(t)  # other groups go on


def test_a_rank_that_does_not_come_is_named_in_time(hosted):
    hosted(2, late)


def death(job):
    for number in (signal.SIGINT, signal.SIGTERM):  # the launcher's, which ends the others when one rank dies
        signal.signal(number, signal.SIG_IGN)
    t = torch.ones(2)
    dist.all_reduce(t)
    if job.rank == 1:
        os._exit(3)
    failed = dist.all_reduce(t, async_op=True).get_future()
    refused(failed.wait)
    error = refused(lambda: dist.all_reduce(t), dist.DistNetworkError)
    assert isinstance(error, libfsdp.PeerLost) and isinstance(error, ConnectionError) and error.ranks == (1,)
    print("told:", error, flush=True)
    time.sleep(1)  # a rank that leaves now would be the one that the other names
    dist.destroy_process_group()


def test_a_rank_that_dies_is_named_to_the_others(hosted):
    done = hosted(3, death, check=False, grace=15)
    assert done.stdout.count("told:") == 2 and "rank 1" in done.stdout, done.stdout + done.stderr


def aborted(job):
    t = torch.ones(2)
    begin = time.monotonic()
    if job.rank == 0:
        dist.barrier(group=job.gloo)
        time.sleep(0.3)
        dist.group.WORLD.abort()
    else:
        work = dist.all_reduce(t, async_op=True)
        dist.barrier(group=job.gloo)
        error = refused(work.wait, dist.DistBackendError)
        assert "rank 0" in str(error) and isinstance(error, libfsdp.Aborted)
    assert time.monotonic() - begin < 10


def test_an_abort_ends_the_operations_of_all(hosted):
    hosted(2, aborted)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
