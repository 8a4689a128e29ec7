"""ShardedGradScaler for torch: torch.distributed.fsdp's, for gradients that are DTensors in host memory.

    scaler = ShardedGradScaler()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

Every rank makes the same calls; ranks whose shards are empty take part. What one rank's gradients hold decides for all.
"""

from types import SimpleNamespace

from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as _Torch
from torch.distributed.tensor import DTensor

from ..hosts.scaler import HostMemoryScaler

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(HostMemoryScaler, _Torch):
    __doc__ = HostMemoryScaler.__doc__

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16=True):
        """On local tensors: a DTensor's kernel would reduce over its own mesh as well, once for each dtype."""
        groups = [{"params": [_local(parameter) for parameter in group["params"]]} for group in optimizer.param_groups]
        return super()._unscale_grads_(SimpleNamespace(param_groups=groups), inv_scale, found_inf, allow_fp16)


def _local(parameter):
    grad = parameter.grad
    return SimpleNamespace(grad=grad.to_local()) if isinstance(grad, DTensor) else parameter
