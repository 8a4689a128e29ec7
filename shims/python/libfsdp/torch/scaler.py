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

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(_Torch):
    """The arguments are torch's, with two defaults that fit here.

    device         "cpu", where libfsdp's parameters are; "cuda" is disabled without such a device
    process_group  the ranks that skip steps together; None: the default group at the time of the call
    """

    def __init__(
        self,
        device="cpu",
        init_scale=2.0**16,
        backoff_factor=0.5,
        growth_factor=2.0,
        growth_interval=2000,
        enabled=True,
        process_group=None,
    ):
        super().__init__(device, init_scale, backoff_factor, growth_factor, growth_interval, enabled, process_group)

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16=True):
        """On local tensors: a DTensor's kernel would reduce over its own mesh as well, once for each dtype."""
        groups = [{"params": [_local(parameter) for parameter in group["params"]]} for group in optimizer.param_groups]
        return super()._unscale_grads_(SimpleNamespace(param_groups=groups), inv_scale, found_inf, allow_fp16)


def _local(parameter):
    grad = parameter.grad
    return SimpleNamespace(grad=grad.to_local()) if isinstance(grad, DTensor) else parameter
