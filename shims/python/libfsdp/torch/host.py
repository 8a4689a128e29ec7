"""torch, as the adapter core (libfsdp.hosts) wants a framework to be described.

Parameters are DTensors over the mesh that fully_shard was given, as those of torch's own fully_shard: optimizers, gradient
clipping, state dicts and distributed checkpoints know how they lie. The local tensor in each is the library's shard.
"""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from ..borrow import _describe
from ..hosts.backward import gather_function
from ..hosts.host import Host
from ..tensor import shard_extent
from . import stale
from .tensors import lend

_set_versions = torch._C._autograd._unsafe_set_version_counter
_NO_VALUES = 1 << 24  # added to the version of a tensor that has none
_HELD = 2  # references to an object that nothing but its holder and a call's argument has


class Placement:
    """How a parameter lies: `dim` is the dimension that is cut, `spec` the DTensor's that it becomes.

    inner: for a parameter that was a DTensor before (tensor or expert parallelism), the spec it had: what is cut is then
    its local tensor. spmd: the Spmd, if it lay on the whole mesh (dp_mesh_dims).
    """

    def __init__(self, dim, spec, inner=None, spmd=None):
        self.dim, self.spec, self.inner, self.spmd = dim, spec, inner, spmd


class TorchHost(Host):
    name = "torch"
    Tensor, Parameter, Module = torch.Tensor, torch.nn.Parameter, torch.nn.Module
    Containers = (torch.nn.ModuleList, torch.nn.ModuleDict)
    no_grad = staticmethod(torch.no_grad)
    grad_enabled = staticmethod(torch.is_grad_enabled)
    compiling = staticmethod(torch.compiler.is_compiling)

    def __init__(self):
        self._gather = gather_function(torch.autograd.Function)

    # ---- Memory ----

    def lend(self, tensor, name):
        if type(tensor) is DTensor:
            tensor = tensor._local_tensor
        head = lend(tensor, name).dtype
        return _describe(tensor, tensor.data_ptr(), head.code, head.bits, tensor.shape, tensor.stride())

    def adopt(self, tensor):
        with torch.inference_mode(False):  # they outlive what is running now
            return torch.from_dlpack(tensor)

    def twin(self, tensor):
        return tensor.detach()

    def unreadable(self, fulls):
        """By the version, which twins share and autograd compares: backward then raises that they were modified."""
        fulls = [full for full in fulls if full._version < _NO_VALUES]
        _set_versions(tuple(fulls), tuple(full._version + _NO_VALUES for full in fulls))

    def readable(self, fulls):
        fulls = [full for full in fulls if full._version >= _NO_VALUES]
        _set_versions(tuple(fulls), tuple(full._version - _NO_VALUES for full in fulls))

    def address(self, tensor):
        return tensor.data_ptr()

    def is_meta(self, parameter):
        return self.local(parameter).is_meta

    def cast(self, tensor, dtype):
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    # ---- Communication of torch's own ----

    SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG

    class Buffers:
        @staticmethod
        def allocate(size, *, dtype, device):
            return torch.empty(*size, dtype=dtype, device=device)

    def reduce_scatter(self, output, input, group, average):
        dist.reduce_scatter_tensor(output, input, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM, group)

    def all_reduce(self, tensor, group):
        dist.all_reduce(tensor, group=group)

    # ---- Autograd ----

    def anchor(self, iteration):
        return torch.empty(0, requires_grad=True)

    def gather(self, anchor, use):
        return self._gather.apply(anchor, use)

    def on_gradient(self, tensor, function):
        if tensor.grad_fn is not None:
            tensor.register_hook(function)
            return

        def once(grad):  # a leaf outlives the graph, and would gather hooks
            handle.remove()
            return function(grad)

        handle = tensor.register_hook(once)

    def at_end_of_backward(self, function):
        Variable._execution_engine.queue_callback(function)

    def records_backward(self):
        return torch.is_grad_enabled()

    def backward_id(self):
        return torch._C._current_graph_task_id()

    def outside_graph(self, function):
        return torch._dynamo.disable(function)

    # ---- Modules ----

    def class_name(self, original):
        return f"FSDP{original.__name__}"

    def hook(self, module, state):
        def after(module, args, output):
            return state.after_forward(module, output)

        module.register_forward_pre_hook(self.outside_graph(state.pre_forward), prepend=True, with_kwargs=True)
        module.register_forward_hook(self.outside_graph(after), always_call=True)
        module.register_state_dict_pre_hook(lambda module, prefix, keep_vars: state.reshard_now())
        module.register_load_state_dict_pre_hook(lambda *arguments: state.reshard_now())

    # ---- Parameters ----

    def whole(self, parameter):
        local = self.local(parameter)
        return tuple(local.shape), local.dtype

    def check_parameter(self, parameter, name):
        local = self.local(parameter)
        if not (local.is_cpu or local.is_meta):
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}; libfsdp shards host memory: move the module to cpu first"
            )

    def placement(self, parameter, dim, ranks):
        replicas = (Replicate(),) if ranks.mesh.ndim == 2 else ()
        if not isinstance(parameter, DTensor):
            meta = TensorMeta(parameter.size(), parameter.stride(), parameter.dtype)
            return Placement(dim, DTensorSpec(ranks.mesh, (*replicas, Shard(dim)), tensor_meta=meta))
        inner = parameter._spec
        if ranks.spmd is not None:
            return Placement(dim, ranks.spmd.spec(inner, dim), inner, ranks.spmd)
        pieces = inner.num_shards_map[dim]  # over how many ranks the same dimension is cut already
        cut = _StridedShard(dim, split_factor=pieces) if pieces > 1 else Shard(dim)
        mesh = DeviceMesh._concatenate([ranks.mesh, inner.mesh])
        spec = DTensorSpec(mesh, (*replicas, cut, *inner.placements), tensor_meta=inner.tensor_meta)
        return Placement(dim, spec, inner)

    def shard_of(self, parameter, placement, ranks):
        """A DTensor parameter on a copy of this rank's part."""
        stale.watch()
        whole = self.local(parameter.detach())
        start, length = shard_extent(whole.shape[placement.dim], ranks.shard_rank, ranks.shard_size)
        part = whole.narrow(placement.dim, start, length).clone(memory_format=torch.contiguous_format)
        return torch.nn.Parameter(
            DTensor(part, placement.spec, requires_grad=False), requires_grad=parameter.requires_grad
        )

    def present(self, tensor, placement):
        inner = placement.inner
        if placement.spmd is not None:
            tensor = placement.spmd.present(tensor, inner)
        elif inner is not None:
            tensor = DTensor.from_local(
                tensor, inner.mesh, inner.placements, run_check=False, shape=inner.shape, stride=inner.stride
            )
        tensor._is_param = True  # by which torch tells parameters from tensors
        return tensor

    def local(self, parameter):
        return parameter._local_tensor if isinstance(parameter, DTensor) else parameter

    def set_local(self, parameter, tensor):
        parameter._local_tensor = tensor

    def gradient(self, parameter, tensor):
        return DTensor(tensor, parameter._spec, requires_grad=False)

    def accumulated(self, parameter):
        hooks = parameter._post_accumulate_grad_hooks
        if hooks:
            for hook in list(hooks.values()):
                hook(parameter)

    def holds(self, gradient):
        return sys.getrefcount(gradient) > _HELD + 1 or sys.getrefcount(gradient._local_tensor) > _HELD

    @contextlib.contextmanager
    def named(self, label):
        with torch.profiler.record_function(label):
            yield


HOST = TorchHost()
