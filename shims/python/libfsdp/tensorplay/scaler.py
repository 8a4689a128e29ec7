"""ShardedGradScaler for TensorPlay: tensorplay.distributed.fsdp's, for gradients in host memory.

    scaler = ShardedGradScaler()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

Every rank makes the same calls; ranks whose shards are empty take part. What one rank's gradients hold decides for all.
"""

from tensorplay.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as _TensorPlay

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(_TensorPlay):
    """The arguments are TensorPlay's, with a default device that fits here.

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
