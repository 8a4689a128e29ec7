"""Checkpoints of TensorPlay's modules, for libfsdp.checkpoint: plain ones, and those that our fully_shard or classic wrapper
has sharded. Modules that TensorPlay's own fully_shard has sharded don't say how their shards lie: those are refused."""

import tensorplay

from ..errors import Unsupported
from ..hosts.checkpoint import ModuleAdapter
from ..hosts.iteration import state_of
from .host import HOST
from .ranks import group_over


class TensorPlayAdapter(ModuleAdapter):
    group_over = staticmethod(group_over)

    def ranks(self, model):
        for module in model.modules():
            own = any(kind.__name__ in ("FSDPModule", "FullyShardedDataParallel") for kind in type(module).__mro__)
            if own and state_of(module) is None:
                raise Unsupported(
                    f"model: {type(module).__name__} was sharded by TensorPlay's own FSDP, which does not say how its shards "
                    "lie; shard it with libfsdp.tensorplay"
                )
        return super().ranks(model)

    def ranks_of(self, module):
        group = getattr(module, "process_group", None)  # DataParallel, in one process, has none
        return () if group is None else group.ranks

    def written(self, arrays):
        """Backward of a forward before it is refused, as after other writes; TensorPlay does not see what is lent."""
        for array in arrays:
            array._bump_version()

    def fresh(self, like, shape, dtype):
        return tensorplay.zeros(list(shape), dtype=getattr(tensorplay, dtype))

    def scalar(self, key, value, dtype):
        if dtype is None and key != "step":  # a step counter is a tensor in TensorPlay, whatever it was elsewhere
            return value
        return tensorplay.tensor(value, dtype=getattr(tensorplay, dtype or "float32"))


ADAPTER = TensorPlayAdapter(HOST)
