"""fully_shard with DataParallelMeshDims, beside torch's own and one process: parameters that lie on a mesh of all
dimensions already. For a torch that has it; 2.11 does not."""

import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import libfsdp.torch as ours

WIDTH, BATCH, STEPS = 8, 8, 3
HAS = hasattr(theirs, "DataParallelMeshDims")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def network():
    torch.manual_seed(2)
    return nn.Sequential(Block(), nn.Linear(WIDTH, 1))


def on_mesh(model, mesh):
    """Every parameter a DTensor on the mesh, cut along its dimension "tp" where it has one."""
    tp = mesh.mesh_dim_names.index("tp") if "tp" in mesh.mesh_dim_names else None
    for name, module in model.named_modules():
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            placements = [Replicate()] * mesh.ndim
            if tp is not None and ("up" in name or "down" in name):
                placements[tp] = Shard(0 if "up" in name else 1)
            setattr(module, attribute, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))
    return model


def train(model, mesh=None, data_parallel=()):
    generator = torch.Generator().manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=generator)
        if mesh is not None:
            cut = [Shard(0) if name in data_parallel else Replicate() for name in mesh.mesh_dim_names]
            x = distribute_tensor(x, mesh, cut)
        loss = (model(x) - 0.5).square().mean()
        if isinstance(loss, DTensor):
            parts = 1
            for name in data_parallel:
                parts *= mesh.size(mesh.mesh_dim_names.index(name))
            loss.backward(torch.ones_like(loss) * parts)  # of the whole batch; fully_shard averages over the parts
            loss = loss.full_tensor()
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def dims(job, several):
    wanted = train(network())
    Dims = ours.DataParallelMeshDims
    assert Dims is theirs.DataParallelMeshDims
    meshes = {}
    one = (
        ((2, 2), ("dp", "tp"), Dims(shard="dp")),
        ((2, 2), ("dp", "tp"), Dims(replicate="dp")),
        ((2, 2), ("tp", "dp"), Dims(shard="dp")),
    )
    more = (
        ((2, 2), ("a", "b"), Dims(shard=("a", "b"))),
        ((2, 2), ("a", "b"), Dims(shard="b", replicate="a")),
        ((2, 2, 1), ("a", "b", "tp"), Dims(shard=("a", "b"))),
        ((1, 2, 2), ("r", "s", "tp"), Dims(shard="s", replicate="r")),
    )
    for shape, names, which in more if several else one:
        if names not in meshes:  # torch's own wants the very mesh that parameters have
            meshes[names] = init_device_mesh("cpu", shape, mesh_dim_names=names)
        mesh, results = meshes[names], []
        for fully_shard in (ours.fully_shard, theirs.fully_shard):
            model = on_mesh(network(), mesh)
            for layer in model:
                fully_shard(layer, mesh=mesh, dp_mesh_dims=which)
            fully_shard(model, mesh=mesh, dp_mesh_dims=which)
            specs = [(p.placements, p.device_mesh, p.shape, p.to_local().shape) for p in model.parameters()]
            results.append((specs, *train(model, mesh, (*which.shard_names, *which.replicate_names))))
        (specs, losses, parameters), (their_specs, their_losses, their_parameters) = results
        assert specs == their_specs, (which, specs, their_specs)
        torch.testing.assert_close(losses, their_losses)
        torch.testing.assert_close(parameters, their_parameters, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(losses, wanted[0])
        torch.testing.assert_close(parameters, wanted[1], rtol=1e-5, atol=1e-5)


def wrong(job):
    Dims = ours.DataParallelMeshDims
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    plain = init_device_mesh("cpu", (2, 2))

    def cut():
        layer = nn.Linear(2, 2, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(1), Replicate()]))
        return layer

    for make, on, which, words in (
        (network, mesh, Dims(shard="dp"), "parameters must be DTensors on the full SPMD mesh"),
        (lambda: on_mesh(network(), other), mesh, Dims(shard="dp"), "the same mesh passed"),
        (cut, mesh, Dims(shard="dp"), "DP shard dim 'dp' (index 0)"),
        (cut, mesh, Dims(replicate="dp"), "DP replicate dim 'dp' (index 0)"),
        (lambda: on_mesh(network(), mesh), mesh, Dims(shard="pp"), "'pp' not found"),
        (lambda: on_mesh(network(), mesh), plain, Dims(shard="dp"), "mesh_dim_names"),
    ):
        for fully_shard in (ours.fully_shard, theirs.fully_shard):
            with pytest.raises(ValueError) as caught:
                fully_shard(make(), mesh=on, dp_mesh_dims=which)
            assert words in str(caught.value), caught.value


@pytest.mark.skipif(not HAS, reason="this torch has no DataParallelMeshDims")
@pytest.mark.parametrize("several", [False, True])
def test_training_is_that_of_one_process_and_of_torchs_own(hosted, several):
    hosted(4, dims, several)


@pytest.mark.skipif(not HAS, reason="this torch has no DataParallelMeshDims")
def test_wrong_meshes_and_parameters_are_refused_as_by_torchs_own(hosted):
    hosted(4, wrong)


@pytest.mark.skipif(HAS, reason="this torch has DataParallelMeshDims")
def test_a_torch_without_it_says_so(hosted):
    hosted(1, without)


def without(job):
    with pytest.raises(TypeError, match="has no DataParallelMeshDims"):
        ours.fully_shard(nn.Linear(2, 2), dp_mesh_dims=object())
    assert not hasattr(ours, "DataParallelMeshDims")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
