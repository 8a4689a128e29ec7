"""Checkpoints: complete or absent, written by any number of ranks, read by any other number, and by any host.

    from libfsdp import checkpoint

    checkpoint.save("run/last", model, optimizer, extra={"step": step})          # collective; each rank writes its part
    extra = checkpoint.load("run/last", model, optimizer).extra                  # on any number of ranks, or without any

    saving = checkpoint.save("run/last", model, optimizer, background=True)      # values of now; training goes on
    saving.wait()

    checkpoint.save("model.safetensors", model, full=True)                       # whole tensors in one file
    checkpoint.load("bert/", model)                                              # Hugging Face weights into shards

A model is one of torch's or TensorPlay's modules or a layer of `libfsdp.numpy`, sharded or not; what one host has saved
another loads. `Checkpoint(path)` opens one to look at, and reads any part of a tensor; `write` saves a StateDict.
`python -m libfsdp.checkpoint` lists, verifies, compares and converts them.
"""

from .files import Checkpoint, CheckpointInfo, Part, Save, write
from .training import Loaded, load, save

__all__ = ["Checkpoint", "CheckpointInfo", "Loaded", "Part", "Save", "load", "save", "write"]
