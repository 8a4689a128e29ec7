"""Checkpoints of TensorPlay's modules, for libfsdp.checkpoint: plain ones, and those that our fully_shard or classic wrapper
has sharded. Modules that TensorPlay's own fully_shard has sharded don't say how their shards lie: those are refused."""

import tensorplay

from ..errors import Unsupported
from ..hosts.checkpoint import ModuleAdapter
from ..hosts.iteration import state_of
from .host import HOST
from .ranks import group_over


class TensorPlayAdapter(ModuleAdapter):
    def group(self, model):
        ranks = set()
        for module in model.modules():
            state = state_of(module)
            if state is not None:
                ranks.update(state.ranks._ranks)
            elif any(kind.__name__ in ("FSDPModule", "FullyShardedDataParallel") for kind in type(module).__mro__):
                raise Unsupported(
                    f"model: {type(module).__name__} was sharded by TensorPlay's own FSDP, which does not say how its shards "
                    "lie; shard it with libfsdp.tensorplay"
                )
        return group_over(sorted(ranks) if ranks else None)

    def fresh(self, like, shape, dtype):
        return tensorplay.zeros(list(shape), dtype=getattr(tensorplay, dtype))

    def scalar(self, key, value, dtype):
        if dtype is None and key != "step":  # a step counter is a tensor in TensorPlay, whatever it was elsewhere
            return value
        return tensorplay.tensor(value, dtype=getattr(tensorplay, dtype or "float32"))


ADAPTER = TensorPlayAdapter(HOST)
