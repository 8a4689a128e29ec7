"""Checkpoints of torch's modules, for libfsdp.checkpoint: plain ones, those that fully_shard (ours or torch's own) or our
classic wrapper has sharded, tensor parallelism, and any other DTensors whose parts are one box on each rank."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..errors import InvalidArgument, Unsupported
from ..hosts.checkpoint import ModuleAdapter
from .classic import _of_dtype
from .host import HOST
from .ranks import group_over


class TorchAdapter(ModuleAdapter):
    group_over = staticmethod(group_over)

    def ranks(self, model):
        found = super().ranks(model)
        for tensor in (*model.parameters(), *model.buffers()):
            if isinstance(tensor, DTensor):
                found.update(tensor.device_mesh.mesh.flatten().tolist())
        return found

    def ranks_of(self, module):
        group = getattr(module, "process_group", None)  # DataParallel, in one process, has none
        return () if group is None else dist.get_process_group_ranks(group)

    def lie(self, tensor, group):
        if not isinstance(tensor, DTensor):
            return super().lie(tensor, group)
        mesh, placements = tensor.device_mesh, tensor.placements
        if any(isinstance(placement, Partial) for placement in placements):
            raise Unsupported(f"a DTensor of placements {placements} has no values yet: redistribute it first")
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        copies, copy = 1, 0
        for dim, placement in enumerate(placements):
            if placement.is_replicate():
                copies, copy = copies * mesh.size(dim), copy * mesh.size(dim) + mesh.get_local_rank(dim)
        local = tensor._local_tensor
        if tuple(shape) != tuple(local.shape):
            raise Unsupported(
                f"a DTensor of shape {tuple(tensor.shape)} and placements {placements} is not one box on each rank: here {tuple(shape)} "
                f"is expected, and its local tensor has {tuple(local.shape)}"
            )
        return local, tuple(tensor.shape), tuple(offset), copies, copy

    def cut(self, parameter, param, ranks):
        if isinstance(parameter, DTensor):
            return self.lie(parameter, None)
        return super().cut(parameter, param, ranks)

    def set_options(self, optimizer, index, options):
        if isinstance(optimizer, torch.optim.AdamW):  # an Adam whose weight decay is decoupled, whoever has saved
            options = {key: value for key, value in options.items() if key != "decoupled_weight_decay"}
        super().set_options(optimizer, index, options)

    def state(self, optimizer, parameter):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, DTensor) and not all(placement.is_replicate() for placement in value.placements):
                alike = [(tuple(each.shape), getattr(each, "placements", None)) for each in (value, parameter)]
                if alike[0] != alike[1]:
                    raise InvalidArgument(
                        f"optimizer: the state {key!r} of a parameter of shape {tuple(parameter.shape)} is a DTensor of "
                        f"shape {tuple(value.shape)} and placements {value.placements}, unlike the parameter: what is to be "
                        "kept of it can't be told; save without `optimizer`"
                    )
        return super().state(optimizer, parameter)

    def like(self, parameter, tensor):
        if not isinstance(parameter, DTensor):
            return tensor
        return DTensor(tensor, _of_dtype(parameter._spec, tensor.dtype), requires_grad=False)

    def fresh(self, like, shape, dtype):
        return torch.zeros(shape, dtype=getattr(torch, dtype))

    def scalar(self, key, value, dtype):
        if dtype is None and key != "step":  # a step counter is a tensor in torch, whatever it was elsewhere
            return value
        return torch.tensor(value, dtype=getattr(torch, dtype or "float32"))


ADAPTER = TorchAdapter(HOST)
