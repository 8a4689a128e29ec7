"""Groups through Python: every operation against NumPy, with the arrays that have gone wrong elsewhere, and failures."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import ml_dtypes
import numpy as np
import pytest
from conftest import environment, launch

import libfsdp
from libfsdp import Group, ReduceOp
from libfsdp.group import call_timeout


def rank_data(rank, shape, dtype="float32"):
    """Distinct values, different on every rank; any rank can make any other's."""
    count = int(np.prod(shape))
    return (np.arange(count).reshape(shape) * 3 + 1 + 100 * rank).astype(dtype)


def everyone(group, shape, dtype="float32"):
    return np.stack([rank_data(rank, shape, dtype) for rank in range(group.size)])


def mine(group, shape, dtype="float32"):
    return rank_data(group.rank, shape, dtype)


# ---- Every operation -------------------------------------------------------------------------------------------------


def every_operation(group):
    n, rank = group.size, group.rank
    same = np.testing.assert_array_equal
    for dtype in ("float32", "float64", "int32", "uint8", "float16", "complex64", ml_dtypes.bfloat16):
        x, all_x = mine(group, (3, 2), dtype), everyone(group, (3, 2), dtype)
        # all_gather, stacked and concatenated, and in place
        out = np.zeros((n, 3, 2), dtype)
        assert group.all_gather(x, out) is out
        same(out, all_x)
        out = np.zeros((3 * n, 2), dtype)
        out[3 * rank : 3 * rank + 3] = x
        group.all_gather(out[3 * rank : 3 * rank + 3], out)
        same(out, all_x.reshape(3 * n, 2))
        # reduce_scatter
        wide = mine(group, (n * 2, 3), "float32").astype(dtype)
        total = everyone(group, (n * 2, 3), "float32").astype(dtype).astype("complex128").sum(axis=0)
        out = np.zeros((2, 3), dtype)
        group.reduce_scatter(wide, out)
        same(out, rounded(total[2 * rank : 2 * rank + 2], dtype))
        # all_reduce in place and not
        y = x.copy()
        assert group.all_reduce(y) is y
        out = np.zeros_like(x)
        group.all_reduce(x, out, ReduceOp.SUM)
        same(out, y)
        same(x, mine(group, (3, 2), dtype))
        # broadcast
        for root in range(n):
            y = x.copy()
            group.broadcast(y, root)
            same(y, all_x[root])
        # gather, scatter
        root = n - 1
        out = np.zeros((n, 3, 2), dtype) if rank == root else None
        assert group.gather(x, out, root=root) is out
        if rank == root:
            same(out, all_x)
        part = np.zeros((3, 2), dtype)
        group.scatter(all_x if rank == root else None, part, root=root)
        same(part, x)
        # reduce
        out = np.zeros_like(x) if rank == root else None
        group.reduce(x, out, root=root)
        if rank == root:
            same(out, rounded(all_x.astype("complex128").sum(axis=0), dtype))
        # all_to_all
        x = mine(group, (n, 2), dtype)
        out = np.zeros_like(x)
        group.all_to_all(x, out)
        same(out, everyone(group, (n, 2), dtype)[:, rank])
    group.barrier()


def rounded(values, dtype):
    """Complex values as one rounding gives them in dtype; integers wrap."""
    if np.dtype(dtype).kind == "c":
        return values.astype(dtype)
    return values.real.astype("int64").astype(dtype) if np.dtype(dtype).kind in "iu" else values.real.astype(dtype)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_operation_against_numpy(ranks, n):
    ranks(n, every_operation)


def uneven(group):
    n, rank = group.size, group.rank
    rows = [3, 0, 2, 1][:n]
    start = sum(rows[:rank])
    whole = np.arange(sum(rows) * 2, dtype="int32").reshape(-1, 2) + 7
    out = np.zeros_like(whole)
    group.all_gather(whole[start : start + rows[rank]].copy(), out, rows=rows)
    np.testing.assert_array_equal(out, whole)
    out = np.zeros((rows[rank], 2), "int32")
    group.reduce_scatter_v(whole * (rank + 1), out, rows)
    np.testing.assert_array_equal(out, whole[start : start + rows[rank]] * (n * (n + 1) // 2))
    # rank r sends (r + 2 * to) % 3 rows to each rank
    counts = [[(r + 2 * to) % 3 for to in range(n)] for r in range(n)]
    given = np.arange(sum(counts[rank]), dtype="float64") + 1000 * rank
    taken = np.zeros(sum(counts[r][rank] for r in range(n)))
    group.all_to_all_v(given, taken, counts[rank], [counts[r][rank] for r in range(n)])
    expected = [
        1000 * r + sum(counts[r][:rank]) + i for r in range(n) for i in range(counts[r][rank])
    ]
    assert taken.tolist() == expected
    for call, name in (
        (lambda: group.all_gather(whole, whole, rows=[1] * (n + 1)), f"rows: {n + 1} entries"),
        (lambda: group.all_gather(whole, whole, rows=[1] * (n - 1)), f"rows: {n - 1} entries"),
        (lambda: group.all_to_all(given, taken, input_rows=counts[0]), "output_rows"),
        (lambda: group.all_gather(whole, whole, rows=[0.5] * n), "rows"),
    ):
        try:
            call()
        except (ValueError, TypeError) as error:
            assert str(error).startswith(name), error
        else:
            raise AssertionError(name)


def test_uneven_operations(ranks):
    ranks(4, uneven)


def reductions(group):
    n = group.size
    for op, oracle in (
        ("sum", lambda a: a.sum(0)),
        ("prod", lambda a: a.prod(0)),
        ("min", lambda a: a.min(0)),
        ("max", lambda a: a.max(0)),
        ("avg", lambda a: a.sum(0) / n),
    ):
        for dtype in ("float64", "float32") + (("int32",) if op != "avg" else ()):
            x = mine(group, (5,), dtype)
            group.all_reduce(x, op=op)
            np.testing.assert_allclose(x, oracle(everyone(group, (5,), dtype)).astype(dtype), rtol=1e-6)
    for op, oracle in ((ReduceOp.BAND, np.bitwise_and), (ReduceOp.BOR, np.bitwise_or), ("bxor", np.bitwise_xor)):
        x = mine(group, (5,), "uint16")
        group.all_reduce(x, op=op)
        np.testing.assert_array_equal(x, oracle.reduce(everyone(group, (5,), "uint16")))
    flags = np.array([True, group.rank == 0, False])
    assert group.all_reduce(flags.copy(), op="sum").tolist() == [True, True, False]
    assert group.all_reduce(flags.copy(), op="prod").tolist() == [True, n == 1, False]
    # A12: low precision accumulates in float32 and rounds once; an average does not overflow on the way
    for who in range(n):
        x = np.array([256 if group.rank == who else 1], ml_dtypes.bfloat16)
        assert float(group.all_reduce(x)[0]) == float(np.float32(255 + n).astype(ml_dtypes.bfloat16))
    x = np.full(3, 40000, "float16")
    assert group.all_reduce(x, op="avg").tolist() == [40000] * 3
    # A18: AVG is a mean in reduce_scatter too
    for dtype in ("float32", "float64", ml_dtypes.bfloat16):
        x = (np.arange(n * 2) + 8 * group.rank).astype(dtype)
        out = np.zeros(2, dtype)
        group.reduce_scatter(x, out, "avg")
        mean = np.stack([np.arange(n * 2) + 8 * r for r in range(n)]).mean(0)[2 * group.rank :][:2]
        np.testing.assert_array_equal(out, mean.astype(dtype))
    # A19: integer averages are refused, and nothing is touched
    x = np.full((3, 3), -5 - group.rank, "int32")
    for call in (
        lambda: group.all_reduce(x, op="avg"),
        lambda: group.reduce(x, x, "avg", root=0),
        lambda: group.reduce_scatter(np.zeros((n, 2), "int64"), np.zeros(2, "int64"), "avg"),
        lambda: group.all_reduce(np.zeros(2, "float32"), op="bor"),
    ):
        try:
            call()
        except (libfsdp.Unsupported, libfsdp.InvalidArgument):
            pass
        else:
            raise AssertionError("was not refused")
    assert (x == -5 - group.rank).all()
    try:
        group.all_reduce(x, op="median")
    except ValueError as error:
        assert str(error).startswith("op: 'median'")
    assert group.all_reduce(np.array([float(group.rank), np.nan]), op="max").tolist()[0] == n - 1


@pytest.mark.parametrize("n", [2, 4])
def test_reductions(ranks, n):
    ranks(n, reductions)


def odd_arrays(group):
    """A20, A21, A25: strides, expanded and empty arrays, offsets; in and out, with guards around what is written."""
    n, rank = group.size, group.rank
    same = np.testing.assert_array_equal
    base = mine(group, (4, 6))
    for view in (lambda a: a[:, 0], lambda a: a.T, lambda a: a[::2, 1::2], lambda a: a[::-1], lambda a: a[1:3, 2:5]):
        x = view(base)
        expected = np.stack([view(rank_data(r, (4, 6))) for r in range(n)])
        out = np.full((n, *x.shape), -1, "float32")
        group.all_gather(x, out)
        same(out, expected)
        y = base.copy()
        group.all_reduce(view(y)) if view(base).strides[0] > 0 else group.all_reduce(x, view(y).copy())
        if view(base).strides[0] > 0:
            same(view(y), expected.sum(0))
            untouched = np.ones((4, 6), bool)
            view(untouched)[...] = False
            same(y[untouched], base[untouched])
        else:
            try:
                group.all_reduce(view(y))
            except libfsdp.FsdpError:
                same(y, base)
            else:
                same(view(y), expected.sum(0))
    expanded = np.broadcast_to(base[:, :1], (4, 3))
    out = np.zeros((n, 4, 3), "float32")
    group.all_gather(expanded, out)
    same(out, np.stack([np.broadcast_to(rank_data(r, (4, 6))[:, :1], (4, 3)) for r in range(n)]))
    writable = np.lib.stride_tricks.as_strided(base.copy(), (4, 3), (24, 0))
    try:
        group.all_reduce(expanded, writable)
    except ValueError as error:
        assert "out" in str(error)
    else:
        raise AssertionError("an expanded output was written")
    # a slice: nothing outside it changes, for capsules of both ages too
    guarded = np.full(24, 7, "float32")
    guarded[8:16] = np.arange(8) + rank
    group.all_reduce(guarded[8:16])
    same(guarded, [7] * 8 + [n * i + n * (n - 1) / 2 for i in range(8)] + [7] * 8)
    # no elements: a call like any other
    for shape in ((0,), (1, 0, 2)):
        empty = np.zeros(shape, "float32")
        assert group.all_gather(empty, np.zeros((n, *shape), "float32")).shape == (n, *shape)
        group.all_reduce(empty)
        group.reduce_scatter(np.zeros((n * 2, 0), "float32"), np.zeros((2, 0), "float32"))
        group.broadcast(empty)
    scalar = np.array(rank + 0.5)
    assert float(group.all_reduce(scalar)) == n * (n - 1) / 2 + n * 0.5
    # memory of the library, and bytes
    tensor = libfsdp.zeros((2, 2), "int64")
    tensor.numpy()[:] = [[rank, 1], [2, 3]]
    group.all_reduce(tensor)
    same(tensor.numpy(), [[n * (n - 1) // 2, n], [2 * n, 3 * n]])
    text = bytearray(5 * n)
    group.all_gather(b"rank%d" % rank, text)
    assert text == b"".join(b"rank%d" % r for r in range(n))


@pytest.mark.parametrize("n", [1, 2])
def test_odd_arrays(ranks, n):
    ranks(n, odd_arrays)


def messages(group):
    n, rank = group.size, group.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    got = np.zeros(3, "int32")
    work = group.send(np.array([rank, 2, 3], "int32"), right, async_op=True)
    assert group.recv(got, left) is got
    work.wait()
    assert got.tolist() == [left, 2, 3]
    # tags don't wait for each other
    sends = [group.send(np.array([rank, tag], "int64"), right, tag, async_op=True) for tag in (5, 6)]
    for tag in (6, 5):
        got = np.zeros(2, "int64")
        group.recv(got, left, tag)
        assert got.tolist() == [left, tag]
    for work in sends:
        work.wait()
    if rank == 0:
        total = np.zeros(1)
        for _ in range(n - 1):
            total += group.recv(np.zeros(1))  # from any rank
        assert total[0] == n * (n - 1) / 2
    else:
        group.send(np.array([float(rank)]), 0)
    with group.coalesced() as both:
        both.send(np.array([rank]), right, 9)
        got = both.recv(np.array([-1]), left, 9)
    assert got[0] == left


def test_messages(ranks):
    ranks(3, messages)


def coalesced(group):
    n, rank = group.size, group.rank
    a, b, c = mine(group, (3,)), mine(group, (2, 2), "float64"), mine(group, (4,), "int32")
    gathered = np.zeros((n, 3), "float32")
    part = np.zeros(1, "int32")
    wide = np.arange(n, dtype="int32") + rank
    before = group.info().operations
    with group.coalesced() as several:
        several.all_reduce(b, op="max")
        several.broadcast(c, n - 1)
        assert several.all_gather(a, gathered) is gathered
        several.reduce_scatter(wide, part, "sum")
        assert b[0, 0] == 1 + 100 * rank  # nothing runs before the end
    assert b[0, 0] == 1 + 100 * (n - 1)
    np.testing.assert_array_equal(c, rank_data(n - 1, (4,), "int32"))
    np.testing.assert_array_equal(gathered, everyone(group, (3,)))
    assert part[0] == n * rank + n * (n - 1) // 2
    assert group.info().operations > before
    # rows, and a Work
    rows = list(range(1, n + 1))
    out = np.zeros(sum(rows))
    with group.coalesced(async_op=True) as several:
        several.all_gather(np.full(rows[rank], rank + 0.0), out, rows=rows)
        several.all_reduce(a)
    several.work.wait(10)
    assert out.tolist() == [float(r) for r in range(n) for _ in range(rows[r])]
    np.testing.assert_array_equal(a, everyone(group, (3,)).sum(0))
    with group.coalesced():
        pass
    keep = a.copy()
    try:
        with group.coalesced() as several:
            several.all_reduce(a)
            raise KeyError("changed my mind")
    except KeyError:
        np.testing.assert_array_equal(a, keep)


def test_coalesced(ranks):
    ranks(2, coalesced)


def splits(group):
    n, rank = group.size, group.rank
    part = group.split(rank % 2, key=-rank)
    members = [r for r in range(n) if r % 2 == rank % 2][::-1]
    assert (part.size, part.rank) == (len(members), members.index(rank))
    x = np.array([float(rank)])
    part.all_reduce(x)
    assert x[0] == sum(members)
    none = group.split(0 if rank else None, name="others", timeout=5)
    assert (none is None) == (rank == 0)
    if none is not None:
        assert none.size == n - 1 and none.name == "others"
        none.close()
    part.close()
    group.barrier()


def test_split(ranks):
    ranks(4, splits)


# ---- Work ------------------------------------------------------------------------------------------------------------


def asynchronous(group):
    n, rank = group.size, group.rank
    work = group.all_reduce(np.array([float(rank)]), async_op=True)
    assert work.wait(10)[0] == n * (n - 1) / 2
    assert work.test() and work.error is None and "complete" in repr(work)
    assert work.wait()[0] == n * (n - 1) / 2
    # the order is that of the calls, however they are waited for
    x = np.array([1.0])
    works = [group.all_reduce(x, async_op=True) for _ in range(10)]
    works[-1].wait()
    assert x[0] == float(n) ** 10
    # arrays that nobody else keeps live until the work is done, whether or not the Work is kept
    for kept in (True, False):
        given, out = np.full(1000, float(rank)), np.zeros(1000)
        alive = weakref.ref(given)
        if rank == 0:
            time.sleep(0.3)
        work = group.all_reduce(given, out, async_op=True)
        del given
        if not kept:
            del work
        gc.collect()
        if rank:
            assert out[0] == 0 and alive() is not None
        group.barrier()  # behind it in the order
        assert out[0] == out[-1] == n * (n - 1) / 2
        if kept:
            work.wait()
        else:
            group.barrier(async_op=True).wait()  # the next start lets go of what is complete
        assert alive() is None
    # PENDING
    if rank == 0:
        time.sleep(0.5)
        group.barrier()
    else:
        work = group.barrier(async_op=True)
        assert not work.test() and work.error is None and "pending" in repr(work)
        begin = time.monotonic()
        try:
            work.wait(0.05)
            raise AssertionError("was not pending")
        except TimeoutError as error:
            assert isinstance(error, libfsdp.Pending)
        assert time.monotonic() - begin < 0.4
        work.wait()


@pytest.mark.parametrize("n", [1, 2])
def test_work(ranks, n):
    if n == 1:
        group = Group.single()
        work = group.all_reduce(np.array([3.0]), async_op=True)
        assert work.wait()[0] == 3 and work.test()
    else:
        ranks(n, asynchronous)


def callbacks(group):
    called = []
    ready = threading.Event()

    def note(work):
        called.append((work.error, work.test(), float(work.result[0])))
        ready.set()

    work = group.all_reduce(np.array([1.0]), async_op=True)
    work.on_done(note)
    work.on_done(note)
    work.wait()
    assert ready.wait(5)
    end = time.monotonic() + 5
    while len(called) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert called == [(None, True, float(group.size))] * 2
    work.on_done(note)  # late: at once
    assert len(called) == 3
    # kept until called, though nobody holds them
    ready.clear()
    if group.rank == 0:
        time.sleep(0.2)
    group.all_reduce(np.array([1.0]), async_op=True).on_done(lambda work: (note(work), None))
    gc.collect()
    assert ready.wait(5) and len(called) == 4
    # one that raises is not lost, and the others are called
    seen = []
    sys.unraisablehook = seen.append
    ready.clear()
    work = group.all_reduce(np.array([1.0]), async_op=True)
    work.on_done(lambda work: 1 / 0)
    work.on_done(note)
    work.wait()
    assert ready.wait(5)
    assert [type(args.exc_value) for args in seen] == [ZeroDivisionError]
    try:
        work.on_done(5)
    except TypeError as error:
        assert str(error).startswith("callback")


def test_callbacks(ranks):
    ranks(2, callbacks)


# ---- Failures --------------------------------------------------------------------------------------------------------


def mismatches(group):
    """A22: every rank is told, both calls are named, and the group stays usable."""
    rank = group.rank
    calls = [
        (lambda: group.all_gather(np.zeros((3, 4) if rank == 0 else ()), np.zeros(24 if rank == 0 else 2)), None),
        (lambda: group.all_reduce(np.ones(3), op="sum" if rank == 0 else "max"), "all_reduce"),
        (lambda: group.all_reduce(np.ones(4, "float32" if rank == 0 else "int32")), "all_reduce"),
        (
            lambda: group.all_reduce(np.ones(4))
            if rank == 0
            else group.reduce_scatter(np.ones(4 * group.size), np.ones(4)),
            None,
        ),
        (lambda: group.broadcast(np.ones(4), root=rank), "broadcast"),
    ]
    for call, operation in calls:
        try:
            call()
        except libfsdp.Mismatch as error:
            assert error.status == 9 and len(error.ranks) == 2 and 0 in error.ranks, error
            assert operation is None or error.operation == operation, (error.operation, error)
            assert error.sequence > 0
        else:
            raise AssertionError("no mismatch")
        x = np.array([1.0])
        group.all_reduce(x)
        assert x[0] == group.size
    work = group.all_reduce(np.ones(3 + rank), async_op=True)
    try:
        work.wait()
    except libfsdp.Mismatch as error:
        assert work.error is error
        assert "failed" in repr(work)
    else:
        raise AssertionError("no mismatch")


def test_mismatches_are_found(ranks):
    ranks(2, mismatches)


def times_out_in_a_short_group(group):
    with Group(group.store, timeout=1) as short:
        times_out(short)


def times_out(group):
    if group.rank == 0:
        begin = time.monotonic()
        for call in (lambda: group.all_reduce(np.ones(3)), lambda: group.barrier(async_op=True).wait()):
            try:
                call()
            except libfsdp.Timeout as error:
                assert 1 in error.ranks, error
            else:
                raise AssertionError("no timeout")
        assert time.monotonic() - begin < 3
        assert group.info().failed is libfsdp.Timeout
    else:
        time.sleep(2)


def test_a_silent_peer_is_a_timeout(ranks):
    ranks(2, times_out_in_a_short_group)


def ended(call, after, *says):
    """`call` raises Timeout with these words, after about so many seconds."""
    begin = time.monotonic()
    with pytest.raises(libfsdp.Timeout) as caught:
        call()
    assert after - 0.02 < time.monotonic() - begin < after + 3, caught.value
    assert all(text in str(caught.value) for text in says), caught.value
    return caught.value


def changes_the_timeout(group):
    with Group(group.store, timeout=50) as own:
        assert own.timeout == own.info().timeout == 50
        part = own.split(0)
        own.timeout = 0.25 if group.rank == 0 else np.float32(40)
        assert own.timeout == (40 if group.rank else 0.25) and part.timeout == 50
        assert own.split(0).timeout == own.timeout
        with pytest.raises(ValueError, match="^timeout: -1"):
            own.timeout = -1
        with pytest.raises(TypeError, match="^timeout: '5'"):
            own.timeout = "5"
        if group.rank == 0:
            error = ended(lambda: own.all_reduce(np.ones(3)), 0.25, "250 ms", "rank 1")
            assert error.ranks == (1,)
        group.barrier()  # rank 1 has waited here
        ended(own.barrier, 0, "250 ms")
        with pytest.raises(libfsdp.Timeout):
            own.timeout = 5
        part.barrier()
        part.timeout = None
        assert part.timeout == 600


def test_a_groups_timeout_can_change(ranks):
    ranks(2, changes_the_timeout)


def calls_with_their_own(group):
    def silent(call, after, *says):
        """The call of rank 0 in a group of its own, which rank 1 joins too late."""
        with Group(group.store, timeout=50) as own:
            if group.rank == 0:
                ended(lambda: call(own), after, *says)
            group.barrier()
            ended(own.barrier, 0, *says)

    def at_once(own):
        with call_timeout(0.3):
            own.barrier()

    def with_a_work(own):
        with call_timeout(0.3):
            work = own.all_reduce(np.ones(3), async_op=True)
        work.wait()

    def behind(own):
        work = own.barrier(async_op=True)
        with call_timeout(0.3):
            own.all_reduce(np.ones(3))
        work.wait()

    def inner(own):
        with call_timeout(40):
            with call_timeout(0.3):
                own.recv(np.ones(3), src=1)

    def outer(own):
        with call_timeout(0.3):
            with call_timeout(40):
                pass
            own.barrier()

    silent(at_once, 0.3, "300 ms", "barrier", "rank 1")
    silent(with_a_work, 0.3, "300 ms", "all_reduce", "rank 1")
    silent(behind, 0.3, "300 ms", "all_reduce", "earlier barrier")
    silent(inner, 0.3, "300 ms", "recv", "rank 1")
    silent(outer, 0.3, "300 ms", "barrier", "rank 1")
    # outside a block the group's counts again, also after an exception; and another thread's always did
    if group.rank == 0:
        with contextlib.suppress(ZeroDivisionError), call_timeout(0.1):
            1 / 0
        with call_timeout(0.1):
            thread = threading.Thread(target=group.barrier)
            thread.start()
            thread.join()
    else:
        time.sleep(0.5)
        group.barrier()
    if group.rank == 1:
        time.sleep(0.5)
    group.barrier()
    with pytest.raises(ValueError, match="^timeout: 0"):
        call_timeout(0)


def test_calls_with_a_timeout_of_their_own(ranks):
    ranks(2, calls_with_their_own)


def peer_dies(group):
    """A23: one rank is killed while the others wait for it in a synchronous call, or with calls queued."""
    victim = group.size - 1
    pids = np.zeros(group.size, "int64")
    group.all_gather(np.array([os.getpid()]), pids)
    if group.rank == victim:
        time.sleep(300)
    if group.rank == 0:
        time.sleep(0.3)
        os.kill(int(pids[victim]), signal.SIGKILL)
    begin = time.monotonic()
    works = [group.all_reduce(np.ones(3), async_op=True) for _ in range(3)]
    for call in [work.wait for work in works] + [group.barrier]:
        try:
            call()
        except libfsdp.PeerLost as error:
            assert error.ranks[:1] == (victim,), error
        else:
            raise AssertionError("nobody noticed")
    assert time.monotonic() - begin < 2.5
    print("survived", flush=True)
    time.sleep(300)  # the launcher ends this rank


def test_a_dead_peer_is_named_to_all(ranks):
    done = ranks(3, peer_dies, check=False)
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 2" in done.stderr


def aborts(group):
    part = group.split(0)
    if group.rank == 0:
        time.sleep(0.2)
        threading.Timer(0.1, lambda: part.abort("enough of this")).start()
    try:
        part.barrier() if group.rank else part.recv(np.zeros(1), 1)
    except libfsdp.Aborted as error:
        assert "enough of this" in str(error), error
    else:
        raise AssertionError("not aborted")
    part.abort()
    try:
        part.barrier()
    except libfsdp.Aborted:
        pass
    assert part.info().failed is libfsdp.Aborted
    group.barrier()  # the other group goes on


def test_abort(ranks):
    ranks(2, aborts)


def raises(group):
    if group.rank == 1:
        time.sleep(0.2)
        raise RuntimeError("something of my own")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends this rank, but not before it has spoken
    try:
        group.barrier()
    except libfsdp.Aborted as error:
        print("told:", error, flush=True)


def test_an_exception_on_one_rank_reaches_the_others(ranks):
    done = ranks(2, raises, check=False, timeout=20)
    assert done.returncode == 1
    assert "something of my own" in done.stderr and "something of my own" in done.stdout


UNCAUGHT = """
import signal, sys
import libfsdp
group = libfsdp.init(timeout=20)
if group.rank == 1:
    raise RuntimeError("a bug of mine")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
try:
    group.barrier()
except libfsdp.Aborted as error:
    assert "a bug of mine" in str(error)
    print("told", flush=True)
    sys.exit(5)
"""


def test_an_uncaught_exception_is_told_to_the_others(tmp_path):
    from conftest import launch

    path = tmp_path / "script.py"
    path.write_text(UNCAUGHT)
    begin = time.monotonic()
    done = launch(2, path, options=["--grace", "5"])
    assert done.returncode in (1, 5)
    assert "[0] told" in done.stdout, done.stderr
    assert time.monotonic() - begin < 8


CTRL_C = """
import libfsdp, numpy as np, os, sys
group = libfsdp.init(timeout=60)
if group.rank == 0:
    group.interruptible = True
    print("ready", flush=True)
    try:
        group.all_reduce(np.ones(3))
    except KeyboardInterrupt:
        group.abort("interrupted")
        print("interrupted", flush=True)
        sys.exit(4)
else:
    import signal, time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(60)
"""


def test_ctrl_c_is_answered_while_waiting(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(CTRL_C)
    command = [sys.executable, "-m", "libfsdp.run", "-n", "2", "--grace", "1", str(path)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout.readline() == "[0] ready\n"
            time.sleep(0.3)
            begin = time.monotonic()
            job.send_signal(signal.SIGINT)
            out, err = job.communicate(timeout=10)
        finally:
            job.kill()
    assert "[0] interrupted" in out, err
    assert time.monotonic() - begin < 3


def test_a_job_that_waits_inside_the_library_ends_at_ctrl_c_too(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(CTRL_C.replace("    group.interruptible = True\n", ""))
    command = [sys.executable, "-m", "libfsdp.run", "-n", "2", "--grace", "0.5", str(path)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout.readline() == "[0] ready\n"
            time.sleep(0.3)
            begin = time.monotonic()
            job.send_signal(signal.SIGINT)
            job.communicate(timeout=10)
        finally:
            job.kill()
    assert time.monotonic() - begin < 3 and job.returncode != 0


PENDING = """
import libfsdp, numpy as np, sys
group = libfsdp.init(timeout=60)
work = group.recv(np.zeros(3), src=1 - group.rank, async_op=True)
if sys.argv[1] == "dropped":
    del work
if sys.argv[1] == "raise" and group.rank == 1:
    raise RuntimeError("a bug of mine")
if sys.argv[1] == "late" and group.rank == 0:
    import time
    time.sleep(1)
    group.send(np.ones(3), 1)
    group.abort()
print("last line")
"""


@pytest.mark.parametrize("how", ["held", "dropped", "raise", "late"])
def test_a_program_ends_soon_whatever_is_pending(tmp_path, how):
    path = tmp_path / "script.py"
    path.write_text(PENDING)
    begin = time.monotonic()
    done = launch(2, path, how)
    assert time.monotonic() - begin < 12  # 3 s and two interpreters, not 60
    assert done.returncode == (1 if how == "raise" else 0), done.stderr
    if how != "raise":
        said = [line for line in done.stderr.splitlines() if "waiting at most 3 s" in line]
        assert sorted(line[:3] for line in said) == (["[1]"] if how == "late" else ["[0]", "[1]"])


def leaves_as_planned(group):
    if group.rank == 0:
        with contextlib.suppress(SystemExit), group.split(0) as other:
            sys.exit(0)
        group.barrier()
        return
    other = group.split(0)
    group.barrier()
    with pytest.raises(libfsdp.PeerLost):  # and not Aborted: nothing went wrong
        other.barrier()


def test_sys_exit_0_in_a_groups_block_is_no_failure(ranks):
    ranks(2, leaves_as_planned)


def waits_in_numbers(group):
    x = np.zeros(1)
    work = group.recv(x, 1 - group.rank, async_op=True)
    for seconds in (0, -1, np.float32(0.01), 0.01):
        with pytest.raises(libfsdp.Pending):
            work.wait(seconds)
    group.barrier()
    group.send(np.ones(1), 1 - group.rank)
    assert work.wait(float("inf")) is x and x[0] == 1
    done = []
    thread = threading.Thread(target=lambda: done.append(group.barrier(async_op=True).wait(1e300)))
    thread.start()
    thread.join(10)
    assert done == [None]


def test_times_to_wait(ranks):
    ranks(2, waits_in_numbers)


FORKED = """
import libfsdp, numpy as np, os
group = libfsdp.Group.single()
pid = os.fork()
if pid == 0:
    try:
        group.all_reduce(np.ones(2))
    except libfsdp.Forked:
        group.close()
        os._exit(0)
    os._exit(1)
_, status = os.waitpid(pid, 0)
assert status == 0, status
assert group.all_reduce(np.ones(2)).tolist() == [1, 1]
"""


def test_fork_is_noticed():
    done = subprocess.run([sys.executable, "-c", FORKED], env=environment(), capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr


# ---- One process -----------------------------------------------------------------------------------------------------


def test_a_group_of_one():
    with Group.single(name="alone") as group:
        assert (group.rank, group.size, group.name) == (0, 1, "alone")
        info = group.info()
        assert info.transport == "self" and info.failed is None
        assert repr(group) == "<libfsdp.Group 'alone' rank 0 of 1>"
    assert "closed" in repr(group)
    group.close()
    with pytest.raises(ValueError, match="closed"):
        group.barrier()


def bad_calls(group):
    x = np.ones(3, "float32")
    frozen = np.ones(3, "float32")
    frozen.flags.writeable = False
    return [
        (lambda: group.all_reduce(None), TypeError, "^input"),
        (lambda: group.all_reduce([1.0]), TypeError, "^input"),
        (lambda: group.all_reduce(frozen), ValueError, "^input is read-only"),
        (lambda: group.all_reduce(x, frozen), ValueError, "^out is read-only"),
        (lambda: group.all_reduce(x, np.ones(4, "float32")), ValueError, "out"),
        (lambda: group.all_reduce(x, np.ones(3, "float64")), ValueError, "out|dtype"),
        (lambda: group.all_reduce(np.ones(4, "float32")[:3], np.ones(4, "float32")), ValueError, "out"),
        (lambda: group.all_gather(x, frozen), ValueError, "^out is read-only"),
        (lambda: group.all_gather(x, np.ones(2, "float32")), ValueError, "out"),
        (lambda: group.all_gather(x, None), TypeError, "^out"),
        (lambda: group.broadcast(x, 1), ValueError, "^root"),
        (lambda: group.broadcast(x, -1), ValueError, "^root"),
        (lambda: group.broadcast(x, "0"), TypeError, "^root"),
        (lambda: group.reduce(x), ValueError, "^out"),
        (lambda: group.gather(x), ValueError, "^out"),
        (lambda: group.scatter(None, x), ValueError, "^input"),
        (lambda: group.send(x, 5), ValueError, "^dst"),
        (lambda: group.recv(x, 5), ValueError, "^src"),
        (lambda: group.recv(frozen, 0), ValueError, "^tensor is read-only"),
        (lambda: group.send(x, 0, -1), ValueError, "tag"),
        (lambda: group.all_reduce(x, op=99), ValueError, "^op"),
        (lambda: group.all_reduce(x, op=[]), ValueError, "^op"),
        (lambda: group.all_reduce(x, op=True), ValueError, "^op: True"),
        (lambda: group.all_reduce(x, op=1.0), ValueError, "^op: 1.0"),
        (lambda: group.all_reduce(x, "max"), TypeError, "^out: 'max' is not an array.*op='max'"),
        (lambda: group.reduce(x, ReduceOp.MAX), TypeError, "^out.*op='max'"),
        (lambda: group.coalesced().barrier(), ValueError, "^barrier"),
        (lambda: group.barrier(async_op=True).wait(float("nan")), ValueError, "^timeout"),
        (lambda: group.barrier(async_op=True).wait(True), TypeError, "^timeout"),
        (lambda: group.split(-3), ValueError, "^color"),
        (lambda: group.split("a"), TypeError, "^color"),
        (lambda: group.split(0, colour=1), TypeError, "colour"),
        (lambda: group.abort(5), TypeError, "^reason"),
        (lambda: group.barrier(async_op=True).wait("a"), TypeError, "^timeout"),
    ]


@pytest.mark.parametrize("index", range(34))
def test_bad_arguments_are_named(index):
    group = Group.single()
    calls = bad_calls(group)
    assert len(calls) == 34
    call, kind, says = calls[index]
    with pytest.raises(kind, match=says):
        call()
    assert group.all_reduce(np.ones(2)).tolist() == [1, 1]  # still usable


@pytest.mark.parametrize(
    "options, kind, says",
    [
        ({"timeout": -1}, ValueError, "^timeout"),
        ({"timeout": "5"}, TypeError, "^timeout"),
        ({"name": 5}, TypeError, "^name"),
        ({"name": "n" * 64}, ValueError, "name"),
        ({"transport": "carrier pigeon"}, (ValueError, NotImplementedError), "transport|pigeon"),
        ({"staging_bytes": 10}, ValueError, "staging_bytes"),
        ({"direct_read": 2}, TypeError, "^direct_read"),
        ({"spin_us": "a"}, TypeError, "^spin_us"),
        ({"colour": 1}, TypeError, "colour"),
    ],
)
def test_bad_options_are_named(options, kind, says):
    with pytest.raises(kind, match=says):
        Group.single(**options)
    with pytest.raises(TypeError, match="^store"):
        Group("tcp://")


def interruptible(group):
    group.interruptible = True
    x = np.array([1.0, group.rank])
    assert group.all_reduce(x) is x
    assert x.tolist() == [group.size, group.size * (group.size - 1) / 2]
    with group.coalesced() as several:
        several.all_reduce(x)
    assert several.work is None and x[0] == group.size**2


def test_interruptible_calls(ranks):
    ranks(2, interruptible)


def other_threads(group):
    """Calls from a thread that is not the main one; two groups from two threads at once."""
    other = group.split(0)
    sums = {}

    def work(which, value):
        for _ in range(50):
            x = np.array([value])
            sums[value] = which.all_reduce(x)[0]

    threads = [threading.Thread(target=work, args=pair) for pair in ((group, 2.0), (other, 3.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sums == {2.0: 2.0 * group.size, 3.0: 3.0 * group.size}
    other.close()


def test_other_threads(ranks):
    ranks(2, other_threads)


def staged(group):
    assert not group.info().direct_read
    odd_arrays(group)
    x = np.arange(300_000, dtype="float32") + group.rank
    out = np.zeros((group.size, 300_000), "float32")
    group.all_gather(x, out)
    for rank in range(group.size):
        np.testing.assert_array_equal(out[rank], np.arange(300_000, dtype="float32") + rank)
    expected = sum(np.arange(300_000, dtype="float32") + rank for rank in range(group.size))
    np.testing.assert_array_equal(group.all_reduce(x), expected)
    moved = group.info()
    assert moved.bytes_moved > 0 and moved.segment_bytes > 0 and moved.transport == "shm"


def test_without_reading_peers_memory(ranks):
    ranks(2, staged, direct_read=False, staging_bytes=65536)
