"""Groups of the backend "fsdp": parts of the ranks, overlapping, nested and many; meshes; roots by global and by group
rank; threads; and groups that end and are made again. Each beside a group of the same ranks on gloo."""

import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
import torch.distributed as dist
from test_torch_backend import refused

# ---- What a group is, threads, the end -------------------------------------------------------------------------------


def groups(job):
    n, rank = job.size, job.rank
    assert dist.get_backend() == "fsdp" and dist.get_backend(job.gloo) == "gloo"
    assert dist.group.WORLD.name() == "fsdp" and "cpu:fsdp" in dist.get_backend_config()
    pairs = [dist.new_group([a, a + 1], group_desc=f"pair {a}") for a in range(n - 1)]  # overlapping ones
    for first, pair in enumerate(pairs):
        if rank in (first, first + 1):
            assert dist.get_rank(pair) == rank - first and pair.group_desc == f"pair {first}"
            t = torch.tensor([float(rank)])
            dist.all_reduce(t, group=pair)
            assert t.item() == 2 * first + 1
            dist.broadcast(t, src=first + 1, group=pair)  # a global rank
    part = dist.group.WORLD.split_group([r for r in range(n) if r % 2 == rank % 2])
    t = torch.tensor([float(rank)])
    part.allreduce(t).wait()  # the short form
    assert t.item() == sum(r for r in range(n) if r % 2 == rank % 2)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("replicate", "shard"))
    t = torch.tensor([float(rank)])
    dist.all_reduce(t, group=mesh["shard"].get_group())
    own = mesh["shard"].mesh.tolist()
    assert t.item() == sum(own) and rank in own
    # The short forms of the binding, with tensors in place of lists and a root or a reduction in place of options.
    world = dist.group.WORLD
    t = torch.tensor([float(rank)])
    world.allreduce(t, dist.ReduceOp.MAX).wait()
    world.allreduce([t], op=dist.ReduceOp.SUM).wait()
    assert t.item() == n * (n - 1)
    world.broadcast(t.fill_(rank), 1).wait()
    assert t.item() == 1
    world.allgather([torch.zeros(1) for _ in range(n)], t).wait()
    world.reduce(t, 0, dist.ReduceOp.SUM).wait()
    world.reduce_scatter(t, [torch.ones(1)] * n).wait()
    assert t.item() == n
    parts = [torch.zeros(1) for _ in range(n)] if rank == 0 else []
    world.gather(parts, torch.tensor([float(rank)]), 0).wait()
    world.scatter(t, [torch.full((1,), r + 10.0) for r in range(n)] if rank == 0 else [], 0).wait()
    assert t.item() == rank + 10 and (rank or [p.item() for p in parts] == list(range(n)))
    world.barrier().wait()
    # Threads, each with a group of its own.
    threads, wrong = [], []
    for group in [dist.new_group() for _ in range(3)]:

        def work(group=group):
            for i in range(30):
                t = torch.full((10,), float(rank + i))
                dist.all_reduce(t, group=group)
                if t[0].item() != sum(range(n)) + n * i:
                    wrong.append(t)

        threads.append(threading.Thread(target=work))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    # A group that only its ranks make, in an order of its own. After the others: torch 2.15 counts it, on its ranks only.
    if rank in (0, n - 1):
        ends = dist.new_group([n - 1, 0], use_local_synchronization=True, backend="cpu:fsdp")
        whole = torch.zeros(2)
        dist.all_gather_into_tensor(whole, torch.tensor([float(rank)]), group=ends)
        assert sorted(whole.tolist()) == [0, n - 1]


def test_groups_meshes_splits_and_threads(hosted):
    hosted(4, groups)


def again(job):
    job.start()
    dist.destroy_process_group()
    store = dist.FileStore(job.store + "-kept", job.size)
    for i in range(100):
        dist.init_process_group("cpu:fsdp" if i % 2 else "fsdp", store=store, rank=job.rank, world_size=job.size)
        t = torch.tensor([float(job.rank + i)])
        dist.all_reduce(t)
        assert t.item() == sum(range(job.size)) + job.size * i
        old = dist.group.WORLD
        dist.destroy_process_group()
    error = refused(lambda: old.allreduce([t]).wait())
    assert "closed" in str(error)
    refused(lambda: dist.all_reduce(t), ValueError)
    assert [t.name for t in threading.enumerate()] == ["MainThread", "libfsdp interrupt"]  # which is one a process
    # A message that never comes does not keep a rank that leaves.
    job.start(store="-last")
    dist.irecv(t, (job.rank + 1) % job.size)
    begin = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - begin < 10


def test_destroy_and_init_again_with_one_store(hosted):
    hosted(2, again, before=False)


# ---- Parts of the ranks ----------------------------------------------------------------------------------------------


def value(rank, *shape):
    """What a global rank puts in; no two ranks have the same anywhere."""
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) * 10 + rank + 1).float()


def every_operation(group, ranks, me, gloo=False):
    """Every operation in a group of the global ranks `ranks`, in that order. Gives what this rank got, beside what it
    must be."""
    n, place = len(ranks), ranks.index(me)
    assert dist.get_group_rank(group, me) == place and dist.get_process_group_ranks(group) == ranks
    total = sum(value(r, 2, n) for r in ranks)
    results = []

    def check(got, wanted):
        assert torch.equal(got, wanted), (got, wanted)
        results.append(got)

    t = value(me, 2, n)
    dist.all_reduce(t, group=group)
    check(t, total)
    for root in range(n):  # by the rank in the group, and by the rank in the world
        for named in ({"group_src": root}, {"src": ranks[root]}):
            t = value(me, 3)
            dist.broadcast(t, group=group, **named)
            check(t, value(ranks[root], 3))
            part = torch.zeros(2)
            parts = [value(ranks[root] + 100 * r, 2) for r in range(n)] if place == root else None
            dist.scatter(part, parts, group=group, **named)
            check(part, value(ranks[root] + 100 * place, 2))
        for named in ({"group_dst": root}, {"dst": ranks[root]}):
            t = value(me, 2, n)
            dist.reduce(t, group=group, **named)
            if place == root:
                check(t, total)
            parts = [torch.zeros(2) for _ in ranks] if place == root else None
            dist.gather(value(me, 2), parts, group=group, **named)
            for r, part in zip(ranks, parts or ()):
                check(part, value(r, 2))
        things = [ranks[root] if place == root else None]
        dist.broadcast_object_list(things, group=group, group_src=root)
        assert things == [ranks[root]]
    whole = torch.zeros(n, 3)
    dist.all_gather_into_tensor(whole, value(me, 1, 3), group=group)
    check(whole, torch.cat([value(r, 1, 3) for r in ranks]))
    parts = [torch.zeros(3) for _ in ranks]
    dist.all_gather(parts, value(me, 3), group=group)
    check(torch.stack(parts), torch.stack([value(r, 3) for r in ranks]))
    out = torch.zeros(2)
    dist.reduce_scatter_tensor(out, value(me, 2 * n), group=group)
    check(out, sum(value(r, 2 * n) for r in ranks)[2 * place : 2 * place + 2])
    out = torch.zeros(n)
    dist.all_to_all_single(out, value(me, n), group=group)
    check(out, torch.stack([value(r, n)[place] for r in ranks]))
    if n > 1:
        right, left = (place + 1) % n, (place - 1) % n
        got = torch.zeros(2)
        for sent, received in (
            ({"peer": ranks[right]}, {"peer": ranks[left]}),
            ({"group_peer": right}, {"group_peer": left}),
        ):
            ops = [
                dist.P2POp(dist.isend, value(me, 2), group=group, **sent),
                dist.P2POp(dist.irecv, got, group=group, **received),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            check(got.clone(), value(ranks[left], 2))
        if place == 0:
            dist.send(value(me, 2), group=group, group_dst=n - 1, tag=5)
        elif place == n - 1:
            source = dist.recv(got, group=group, tag=5) if not gloo else dist.recv(got, ranks[0], group, tag=5)
            assert source == ranks[0]  # a global rank, whoever sent
            check(got.clone(), value(ranks[0], 2))
    seen = [None] * n
    dist.all_gather_object(seen, ("rank", me), group=group)
    assert seen == [("rank", r) for r in ranks]
    dist.barrier(group=group)
    dist.monitored_barrier(group)
    return results


def parts(job):
    me = job.rank
    # Made by its ranks only, twice with the same ranks. First, and as many on all ranks, as torch takes names from how
    # many groups a rank has made.
    for _ in range(2):
        own = [2] if me == 2 else [0, 1, 3]
        every_operation(dist.new_group(own, use_local_synchronization=True), own, me)
    made = {}
    for ranks in ((0, 1, 2), (1, 2, 3), (0, 2, 3), (0, 3), (2,), (0, 1, 2, 3)):
        for backend in ("fsdp", "gloo"):
            group = dist.new_group(ranks, backend=backend, timeout=job.limit)
            if me in ranks:
                made[backend, ranks] = group
    for (backend, ranks), group in made.items():
        if backend == "fsdp":
            ours = every_operation(group, list(ranks), me)
            theirs = every_operation(made["gloo", ranks], list(ranks), me, gloo=True)
            assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
    # In turn between overlapping groups, with work under way in all of them.
    pending = []
    for turn in range(10):
        for (backend, ranks), group in made.items():
            if backend == "fsdp":
                t = value(me + turn, 5)
                wanted = sum(value(r + turn, 5) for r in ranks)
                pending.append((dist.all_reduce(t, group=group, async_op=True), t, wanted))
    for work, t, wanted in reversed(pending):
        work.wait()
        assert torch.equal(t, wanted)


def test_every_operation_in_parts_of_the_ranks_as_on_gloo(hosted):
    hosted(4, parts)


def many(job):
    """Fifty groups at once, and groups of groups."""
    me, n = job.rank, job.size
    groups = [dist.new_group() for _ in range(50)]
    tensors = [value(me + i, 3) for i in range(50)]
    works = [dist.all_reduce(t, group=group, async_op=True) for t, group in zip(tensors, groups)]
    for i in reversed(range(50)):
        works[i].wait()
        assert torch.equal(tensors[i], sum(value(r + i, 3) for r in range(n)))
    for group in groups[:25]:  # every second one ends; the others go on
        dist.destroy_process_group(group)
    for i, group in enumerate(groups[25:]):
        t = value(me + i, 2)
        dist.all_reduce(t, group=group)
        assert torch.equal(t, sum(value(r + i, 2) for r in range(n)))
    error = refused(lambda: dist.all_reduce(torch.ones(1), group=groups[0]), ValueError, RuntimeError)
    assert error
    # A part of a part of the ranks.
    world = dist.group.WORLD
    evens = world.split_group([0, 2] if me % 2 == 0 else [1, 3])
    t = value(me, 2)
    evens.allreduce([t]).wait()
    assert torch.equal(t, sum(value(r, 2) for r in range(n) if r % 2 == me % 2))
    single = evens.split_group([evens.rank()])
    assert single.size() == 1
    t = value(me, 2)
    single.allreduce([t]).wait()
    assert torch.equal(t, value(me, 2))
    swapped = world.split_group([3, 1, 0, 2])  # rank 3 is the first
    whole = torch.zeros(4)
    swapped._allgather_base(whole, torch.tensor([float(me)])).wait()
    assert whole.tolist() == [3, 1, 0, 2] and swapped.rank() == [3, 1, 0, 2].index(me)
    t = torch.tensor([float(me)])
    swapped.broadcast(t, 1).wait()
    assert t.item() == 1
    some = world.split_group([0, 1, 3] if me != 2 else [0, 1, 3])
    assert (some is None) == (me == 2)
    if some is not None:
        t = torch.tensor([float(me)])
        some.allreduce([t]).wait()
        assert t.item() == 4


def test_many_groups_and_splits_of_splits(hosted):
    hosted(4, many)


def meshes(job):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    me = job.rank
    full = torch.arange(12 * 6.0).reshape(12, 6)  # torch mixes up uneven shards of shards, whatever the backend
    for backend in ("fsdp", "gloo"):
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override={name: backend for name in names})
        flat = mesh._flatten("all")
        for part, ranks in (
            (mesh["replicate"], [me % 2, me % 2 + 2]),
            (mesh["shard"], [me // 2 * 2, me // 2 * 2 + 1]),
            (flat, [0, 1, 2, 3]),
        ):
            assert part.mesh.tolist() == ranks
            group = part.get_group()
            if part is not flat:
                assert dist.get_backend(group) == backend
            every_operation(group, ranks, me, gloo=dist.get_backend(group) == "gloo")
        for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(0), Shard(0)], [Replicate(), Shard(0)]):
            there = distribute_tensor(full, mesh, placements)
            got = there.full_tensor()
            assert torch.equal(got, full), (backend, placements, got)
            assert torch.equal(there.redistribute(mesh, [Shard(1), Replicate()]).full_tensor(), full)


def test_meshes_sliced_and_flattened(hosted):
    hosted(4, meshes)


def large(job):
    """More bytes than an int can count."""
    count = 2**31 + 4096
    t = torch.zeros(count, dtype=torch.int8)
    places = torch.tensor([0, 1 << 20, 2**31 - 1, 2**31, count - 1])
    t[places] = torch.arange(5, dtype=torch.int8) + 10 * job.rank + 1
    dist.all_reduce(t)
    assert t[places].tolist() == [2 * i + 12 for i in range(5)]
    assert t.count_nonzero().item() == 5
    dist.broadcast(t.fill_(job.rank + 3), 1)
    assert t[places].tolist() == [4] * 5


def test_tensors_of_more_than_two_gigabytes(hosted):
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable")) >> 20
    if free < 12:
        pytest.skip(f"{free} GiB of memory free, 12 are needed")
    hosted(2, large, timeout=110, limit=90)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
