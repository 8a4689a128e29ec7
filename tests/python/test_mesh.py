"""Meshes: where each rank stands in the grid, who its fellows are, and models over them."""

import numpy as np
import pytest
from conftest import launch

import libfsdp
from libfsdp import Group, Mesh, Model

GRIDS = {
    1: [{"only": 1}, {"a": 1, "b": 1, "c": 1}],
    2: [{"shard": 2}, {"replicate": 2, "shard": 1}, {"replicate": 1, "shard": 2}],
    4: [{"shard": 4}, {"replicate": 2, "shard": 2}, {"a": 2, "b": 1, "c": 2}],
}


def fellows(group):
    """The ranks of `group` by their numbers in the world, which every member gives."""
    numbers = np.zeros(group.size, "int64")
    group.all_gather(np.array([World.rank]), numbers)
    return numbers.tolist()


class World:
    rank = 0


def places(group):
    World.rank = group.rank
    for dims in GRIDS[group.size]:
        with Mesh(group, dims) as mesh:
            sizes = tuple(dims.values())
            grid = np.arange(group.size).reshape(sizes)
            here = tuple(int(index) for index in np.argwhere(grid == group.rank)[0])
            assert (mesh.names, mesh.sizes, mesh.coordinates) == (tuple(dims), sizes, here)
            assert (mesh.rank, mesh.size) == (group.rank, group.size)
            for axis, name in enumerate(dims):
                along = grid[tuple(slice(None) if dim == axis else at for dim, at in enumerate(here))]
                part = mesh.group(name)
                assert (part.rank, part.size) == (here[axis], sizes[axis])
                assert fellows(part) == along.tolist()
            whole = mesh.group()
            assert (whole.rank, whole.size) == (group.rank, group.size)
            part = mesh.group(list(dims)[-1])
        assert fellows(part) == along.tolist()  # the mesh is closed, its groups are not
    # ranks that disagree are told so, and go on
    if group.size == 4:
        for one, other in (({"a": 2, "b": 2}, {"a": 4}), ({"a": 2, "b": 2}, {"a": 2, "c": 2})):
            with pytest.raises(libfsdp.Mismatch, match="mesh"):
                Mesh(group, one if group.rank else other)
        assert Mesh(group, {"a": 4}).coordinates == (group.rank,)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_places_and_fellows(ranks, n):
    ranks(n, places)


@pytest.mark.parametrize(
    "call, kind, says",
    [
        (lambda g: Mesh("group", {"a": 1}), TypeError, "^group: str"),
        (lambda g: Mesh(g, [1]), TypeError, "^dims: "),
        (lambda g: Mesh(g, {}), ValueError, "^dims: "),
        (lambda g: Mesh(g, {5: 1}), TypeError, "^dims: 5"),
        (lambda g: Mesh(g, {"a": "1"}), TypeError, r"^dims\['a'\]"),
        (lambda g: Mesh(g, {"a": 0}), ValueError, "sizes"),
        (lambda g: Mesh(g, {"a": 2}), ValueError, "2"),
        (lambda g: Mesh(g, {"": 1}), ValueError, "name"),
        (lambda g: Mesh(g, {"a" * 32: 1}), ValueError, "name"),
        (lambda g: Mesh(g, dict.fromkeys("abcdefghi", 1)), ValueError, "ndim|dimensions"),
        (lambda g: Mesh(g, {"a": 1, "b": 1}).group("c"), ValueError, "a.*b"),
        (lambda g: Mesh(g, {"a": 1}).group(1), TypeError, "^name"),
        (lambda g: Model(Mesh(g, {"a": 1}), shard_dim="b"), ValueError, "a"),
        (lambda g: Model(Mesh(g, {"a": 1}), strategy="hybrid_shard"), ValueError, "(?i)hybrid"),
        (lambda g: Model(g, strategy="hybrid_shard"), ValueError, "mesh"),
        (lambda g: Model(g, shard_dim="a"), ValueError, "shard_dim"),
        (lambda g: Model(Mesh(g, {"a": 1, "b": 1}), replicate_dim="a"), ValueError, "replicate_dim"),
        (
            lambda g: Model(Mesh(g, {"a": 1, "b": 1}), strategy="hybrid_shard", shard_dim="a", replicate_dim="a"),
            ValueError,
            "a",
        ),
    ],
)
def test_bad_arguments_are_named(call, kind, says):
    with Group.single() as group:
        with pytest.raises(kind, match=says):
            call(group)


def test_a_mesh_as_an_object():
    group = Group.single()
    mesh = Mesh(group, {"replicate": 1, "shard": 1})
    assert repr(mesh) == "<libfsdp.Mesh replicate=1, shard=1, here (0, 0)>"
    with pytest.raises(TypeError, match="can't be copied"):
        mesh.__reduce__()
    group.close()
    model = Model(mesh, strategy="hybrid_shard")
    mesh.close()
    mesh.close()
    with pytest.raises(ValueError, match="the mesh is closed"):
        mesh.group()
    unit = model.unit("u", {"w": np.arange(3.0)})
    unit.unshard()
    assert unit["w"].full.numpy().tolist() == [0, 1, 2]


def dimensions(group):
    """A model over a part of the mesh, and over dimensions that are not in the usual places."""
    mesh = Mesh(group, {"shard": 2, "replicate": 2})
    whole = np.arange(12, dtype="float32").reshape(6, 2)
    hybrid = Model(mesh, strategy="hybrid_shard", shard_dim="shard", replicate_dim="replicate")
    unit = hybrid.unit("u", {"w": whole})
    info = unit.info()
    assert (info.shard_rank, info.shard_size) == (mesh.coordinates[0], 2)
    assert (info.replicate_rank, info.replicate_size) == (mesh.coordinates[1], 2)
    start = 3 * mesh.coordinates[0]
    np.testing.assert_array_equal(unit["w"].shard.numpy(), whole[start : start + 3])
    unit.pre_backward()
    unit.post_backward([np.full((6, 2), 2.0**group.rank, "float32")])
    hybrid.finish_backward()
    assert (unit["w"].grad.numpy() == 15 / 4).all()
    # the ranks of one column only, which train by themselves
    part = Model(mesh, "part", shard_dim="shard")
    unit = part.unit("u", {"w": whole})
    assert (unit.info().shard_size, unit.info().replicate_size) == (2, 1)
    unit.pre_backward()
    unit.post_backward([np.full((6, 2), 2.0**group.rank, "float32")])
    part.finish_backward()
    column = mesh.coordinates[1]
    assert (unit["w"].grad.numpy() == (2.0**column + 2.0 ** (2 + column)) / 2).all()
    # all of it
    everybody = Model(mesh).unit("u", {"w": whole})
    assert everybody.info().shard_size == 4
    np.testing.assert_array_equal(everybody["w"].shard.numpy(), whole[2 * group.rank : 2 * group.rank + 2])


def test_dimensions_by_name(ranks):
    ranks(4, dimensions)


def aborts(group):
    mesh = Mesh(group, {"replicate": 2, "shard": 2})
    unit = Model(mesh, strategy="hybrid_shard").unit("u", {"w": np.zeros(4)})
    column = mesh.group("replicate")
    unit.unshard()
    unit.reshard()
    if group.rank == 0:
        work = unit.unshard(async_op=True)  # which waits for rank 1, on a group that only the model has
        with pytest.raises(libfsdp.Pending):
            work.wait(0.05)
        group.abort("enough")
        with pytest.raises(libfsdp.Aborted, match="enough"):
            work.wait(5)
        with pytest.raises(libfsdp.Aborted, match="enough"):
            column.barrier()
    else:
        with pytest.raises(libfsdp.Aborted, match="enough"):
            group.barrier()


def test_an_abort_reaches_the_groups_of_models(ranks):
    ranks(4, aborts)


ENDS = """
import os, sys, time
import numpy, libfsdp
group = libfsdp.init(timeout=60)
mesh = libfsdp.Mesh(group, {"replicate": 1, "shard": 2})
unit = libfsdp.Model(mesh, strategy="hybrid_shard").unit("u", {"w": numpy.zeros(4)})
unit.unshard()  # the first one makes a slot, for which it waits
unit.reshard()
pids = numpy.zeros(2, "int64")
group.all_gather(numpy.array([os.getpid()]), pids)
if group.rank == 0:
    HERE
def gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
deadline = time.monotonic() + 10
while WAITS and not gone(pids[0]):  # for which it must not need us
    assert time.monotonic() < deadline, "rank 0 is still there"
    time.sleep(0.1)
try:
    unit.unshard()
except libfsdp.FsdpError as error:
    print(type(error).__name__, flush=True)
"""


@pytest.mark.parametrize(
    "here, code",
    [
        pytest.param("raise SystemExit", 0, id="ends"),
        pytest.param("raise ValueError('here')", 1, id="fails"),
        pytest.param("work = unit.unshard(async_op=True); sys.exit()", 0, id="ends_with_work_pending"),
    ],
)
def test_a_rank_that_ends_leaves_nobody_waiting(tmp_path, here, code):
    """Although the model's operations are on groups of its own."""
    path = tmp_path / "ends.py"
    path.write_text(ENDS.replace("HERE", here).replace("WAITS", str("async" in here)))
    done = launch(2, path, timeout=25, options=("--grace", "15"))
    assert done.returncode == code, done.stdout + done.stderr
    assert code or "PeerLost" in done.stdout or "Aborted" in done.stdout, done.stdout + done.stderr
