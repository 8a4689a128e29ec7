"""fully_shard's dp_mesh_dims, which newer torch has: parameters that are DTensors on a mesh of all dimensions
of a program's parallelism already, whole along those that stand for data parallelism.

Along those dimensions, flattened into one that shards and one that replicates, the library takes over; a unit's full
parameters are DTensors on the whole mesh again. Their gradients come as sums yet to be done along the data-parallel
dimensions, which is the library's reduction, and are brought to the parameter's placement along the others.
"""

import math

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_init
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from .ranks import Ranks


class Spmd:
    """mesh: of all dimensions. dims: a DataParallelMeshDims. Raises torch's errors for a mesh without them."""

    def __init__(self, mesh, dims):
        _fsdp_init._validate_mesh(mesh, dims)
        info = _fsdp_init._get_mesh_info(mesh, dims)
        self.mesh = mesh
        self.shards, self.replicas = dims.shard_names, dims.replicate_names
        self.ranks = Ranks(info.mesh, isinstance(info, _fsdp_common.FSDPMeshInfo))
        self.ranks.spmd = self
        self.data_parallel = {mesh.mesh_dim_names.index(name) for name in (*self.shards, *self.replicas)}

    def check(self, parameter):
        """Raise for a parameter that does not lie on the mesh as it must."""
        if not isinstance(parameter, DTensor):
            raise ValueError(
                "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh (e.g. via "
                f"distribute_module). Got a plain tensor of shape {tuple(parameter.shape)}"
            )
        if parameter.device_mesh != self.mesh:
            raise ValueError(
                "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got different mesh "
                f"objects: {parameter.device_mesh} and {self.mesh}"
            )
        for index in sorted(self.data_parallel):
            if not isinstance(parameter.placements[index], Replicate):
                name = self.mesh.mesh_dim_names[index]
                kind = "shard" if name in self.shards else "replicate"
                raise ValueError(
                    f"Expected Replicate() on DP {kind} dim '{name}' (index {index}) but got "
                    f"{parameter.placements[index]}"
                )

    def spec(self, inner, dim):
        """How a shard along `dim` lies, of a parameter that lies as the DTensorSpec `inner` says. Several dimensions
        that shard are one in it, with the one that replicates before it."""
        names, placements = self.mesh.mesh_dim_names, list(inner.placements)
        for name in self.shards:
            index = names.index(name)
            after = range(index + 1, self.mesh.ndim)
            pieces = math.prod(self.mesh.size(i) for i in after if inner.placements[i].is_shard(dim))
            placements[index] = _StridedShard(dim, split_factor=pieces) if pieces > 1 else Shard(dim)
        if len(self.shards) <= 1:
            return DTensorSpec(self.mesh, tuple(placements), tensor_meta=inner.tensor_meta)
        meshes, flat = [], []
        for name, placement in zip(names, placements):
            if name == min(self.shards, key=names.index):
                meshes.append(self.ranks.mesh)
                flat += [*[Replicate()] * (self.ranks.mesh.ndim - 1), placement]
            elif name not in self.shards and name not in self.replicas:
                meshes.append(self.mesh[name])
                flat.append(placement)
        return DTensorSpec(DeviceMesh._concatenate(meshes), tuple(flat), tensor_meta=inner.tensor_meta)

    def present(self, tensor, inner):
        """A full parameter's local tensor as the DTensor that it was."""
        return _OnMesh.apply(tensor, inner, self.data_parallel)


class _OnMesh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, spec, data_parallel):
        ctx.spec, ctx.data_parallel = spec, data_parallel
        return DTensor(tensor.view_as(tensor), spec, requires_grad=tensor.requires_grad)

    @staticmethod
    def backward(ctx, grad):
        wanted = [
            given if index in ctx.data_parallel and not given.is_shard() else placement
            for index, (given, placement) in enumerate(zip(grad.placements, ctx.spec.placements))
        ]
        return grad.redistribute(placements=wanted).to_local(), None, None
