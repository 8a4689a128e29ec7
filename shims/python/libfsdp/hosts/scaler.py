"""Loss scaling: what a host's own ShardedGradScaler needs for gradients in host memory."""


class HostMemoryScaler:
    """The host's own scaler, before which this is mixed in, with two defaults that fit host memory.

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
