"""ShardedGradScaler for TensorPlay: tensorplay.distributed.fsdp's, for gradients in host memory.

    scaler = ShardedGradScaler()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

Every rank makes the same calls; ranks whose shards are empty take part. What one rank's gradients hold decides for all.
"""

from tensorplay.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as _TensorPlay

from ..hosts.scaler import HostMemoryScaler

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(HostMemoryScaler, _TensorPlay):
    __doc__ = HostMemoryScaler.__doc__
