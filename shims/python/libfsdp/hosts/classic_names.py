"""The classes of a framework's `distributed.fsdp` that are arguments or results of the classic wrapper, and that ours takes and
gives as they are: `libfsdp.torch` and `libfsdp.tensorplay` have them under the same names.

Nothing is imported here: `import torch` comes through libfsdp.torch.
"""

NAMES = (
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
)
