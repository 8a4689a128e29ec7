"""What libfsdp.tensorplay.fully_shard trains to with each of its features, beside one process with the whole batch."""

import contextlib

import pytest

tp = pytest.importorskip(
    "tensorplay", reason="TensorPlay is not installed here; ci/test tensorplay makes a venv that has it"
)
import numpy as np
import tensorplay.distributed as dist
from tensorplay import nn
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.tensor import Shard
from tensorplay.utils.checkpoint import checkpoint
from tensorplay_fully_shard_models import F, Net, batches, modules, network, part, same, sharded, train

import libfsdp.tensorplay.composable as ours
from libfsdp.tensorplay import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

RANK = "tensorplay_rank.py"
SIZES = [1, 2, 4]


def reshard_always_never_and_for_the_root(job, reference):
    for reshard in (None, True, False):
        same(train(sharded(network(), reshard_after_forward=reshard), job), reference, job)


def reshard_to_two_ranks(job, reference):
    if job.size == 4:
        same(train(sharded(network(), reshard_after_forward=2), job), reference, job)


def one_unit(job, reference):
    same(train(fully_shard(network()), job), reference, job)


def a_list_of_modules(job, reference):
    model = network()
    assert fully_shard([model.layers[0], model.layers[1]]) == [model.layers[0], model.layers[1]]
    fully_shard([model.layers[2], model.head])
    same(train(fully_shard(model), job), reference, job)


def sgd_with_momentum(job, reference):
    def sgd(parameters, lr):
        return tp.optim.SGD(parameters, lr=lr, momentum=0.9)

    expected = train(network(), optimizer=sgd)
    same(train(sharded(network()), job, optimizer=sgd), expected, job)


def an_optimizer_from_before(job, reference):
    model = network()
    stepper = tp.optim.AdamW(model.parameters(), lr=0.01)
    sharded(model)
    same(train(model, job, optimizer=lambda parameters, lr: stepper), reference, job)


def cut_along_another_dimension(job, reference):
    for dim in (1, -1):
        model = network()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        dims = {names[id(p)]: len(p.shape) - 1 for p in model.parameters()}
        sharded(model, shard_placement_fn=lambda p, dim=dim: Shard(dim) if len(p.shape) == 2 else None)
        same(train(model, job), reference, job, dims)


def hybrid(job, reference):
    if job.size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        same(train(sharded(network(), mesh=mesh), job), reference, job, size=2, rank=job.rank % 2)
        model = accumulated(sharded(network(), mesh=mesh), job, "set_requires_all_reduce")
        same(model, reference_accumulated(), job, size=2, rank=job.rank % 2)


def dimensions_by_name(job, reference):
    if job.size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        both = DataParallelMeshDims(shard=("a", "b"))
        same(train(sharded(network(), mesh=mesh, dp_mesh_dims=both), job), reference, job)
        swapped = DataParallelMeshDims(shard="a", replicate="b")
        model = sharded(network(), mesh=mesh, dp_mesh_dims=swapped)
        same(train(model, job), reference, job, size=2, rank=job.rank // 2)


def replicas_only(job, reference):
    mesh = init_device_mesh("cpu", (job.size,), mesh_dim_names=("replicate",))
    model = sharded(network(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="replicate"))
    same(train(model, job), reference, job, size=1, rank=0)
    model = network()  # beside units that are sharded over the same ranks
    fully_shard(model.layers[1], mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="replicate"))
    whole = [f"layers.1.{name}" for name, _ in model.layers[1].named_parameters()]
    fully_shard(model.layers[0])
    same(train(fully_shard(model), job), reference, job, whole=whole)
    assert len(model._get_fsdp_state().iteration.models) == 1


def parameters_that_stay_whole(job, reference):
    model = network()
    head = list(model.head.parameters())
    sharded(model, ignored_params=set(head))

    def average(model):
        for parameter in head:
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)

    same(train(model, job, before_step=average), reference, job, whole=("head.weight", "head.bias"))


def frozen_and_thawed(job, reference):
    def run(model, job=None):
        for frozen in (True, False, True):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not (frozen and ("norm" in name or "layers.1." in name)))
            train(model, job, steps=2, lr=0.003)
        return model

    same(run(sharded(network()), job), run(network()), job)


def accumulated(model, job=None, method=None):
    """Two micro-batches a step, the first of them without the reduction that `method` names."""
    rank, size = (job.rank, job.size) if job else (0, 1)
    stepper = tp.optim.AdamW(model.parameters(), lr=0.01)
    data = batches()
    for first, second in zip(data[::2], data[1::2]):
        for last, (x, y) in enumerate((first, second)):
            if method:
                getattr(model, method)(bool(last))
            F.mse_loss(model(part(x, rank, size)), part(y, rank, size)).backward()
        stepper.step()
        stepper.zero_grad()
    return model


def reference_accumulated():
    return accumulated(network())


def accumulation(job, reference):
    for method in (None, "set_requires_gradient_sync"):
        for reshard in (None, False):
            model = sharded(network(), reshard_after_forward=reshard)
            same(accumulated(model, job, method), reference_accumulated(), job)


def a_divisor_of_their_own(job, reference):
    def tripled(model):
        for parameter in model.parameters():
            parameter.grad.mul_(1 / 3)

    expected = train(network(), before_step=tripled, optimizer=tp.optim.SGD)
    for method in ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor"):
        model = sharded(network())
        for module in modules(model):
            getattr(module, method)(3.0 * job.size)
        same(train(model, job, optimizer=tp.optim.SGD), expected, job)


def prefetch_lists(job, reference):
    model = sharded(network())
    for one, two in zip(model.layers, list(model.layers)[1:]):
        one.set_modules_to_forward_prefetch([two])
        two.set_modules_to_backward_prefetch([one])
    same(train(model, job), reference, job)


def settings_without_effect_on_values(job, reference):
    model = sharded(network())
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    model.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_unused_params(False)
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_separate_reduce_scatter_group()
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_symm_mem_for_comm()
    model.set_unshard_in_backward(True)
    model.set_post_optim_event(None)
    same(train(model, job), reference, job)


def policies(job, reference):
    with pytest.warns(UserWarning, match="pinned") if not ours._said else contextlib.nullcontext():
        model = sharded(network(), offload_policy=CPUOffloadPolicy())
    same(train(model, job), reference, job)
    for dtype in (tp.bfloat16, tp.float16):
        model = network()
        for layer in model.layers:
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(dtype, tp.float32))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(dtype, tp.float32, output_dtype=tp.float32))
        same(train(model, job, optimizer=tp.optim.SGD), train(network(), optimizer=tp.optim.SGD), job, tolerance=2e-3)
        assert all(parameter.dtype == tp.float32 for parameter in model.parameters())
        assert model(part(batches()[0][0], job.rank, job.size)).dtype == tp.float32


def methods_besides_forward(job, reference):
    class Twice(Net):
        def double(self, x):
            return 2 * self.head(x)

    model = sharded(network(Twice))
    register_fsdp_forward_method(model, "double")
    same(train(model, job), reference, job)
    x = part(batches()[0][0], job.rank, job.size)
    expected = x.numpy() @ reference.head.weight.detach().numpy().T + reference.head.bias.detach().numpy()
    np.testing.assert_allclose(model.double(x).detach().numpy(), 2 * expected, atol=1e-6)


def recomputed(job, reference):
    """Activation checkpointing, of modules inside a unit and of whole units."""

    class Checkpointed(Net):
        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, 0.5, use_reentrant=False)
            return self.head(x)

    for each in (True, False):
        model = network(Checkpointed)
        same(train(sharded(model) if each else fully_shard(model), job), reference, job)


def called_twice(job, reference):
    class Again(Net):
        def forward(self, x):
            for layer in [*self.layers, self.layers[0], self.layers[1]]:
                x = layer(x)
            return self.head(x)

    same(train(sharded(network(Again)), job), train(network(Again)), job)


def evaluation_between_steps(job, reference):
    model = sharded(network())
    x = part(batches()[0][0], job.rank, job.size)

    def evaluate(model):
        with tp.no_grad():
            model(x)

    train(model, job, before_step=evaluate)
    model.reshard()  # the outermost unit is full after a forward
    same(model, reference, job)


def unused_parameters(job, reference):
    class Unused(Net):
        def __init__(self):
            super().__init__()
            self.extra = nn.Linear(3, 2)

    model = sharded(network(Unused))
    same(train(model, job, optimizer=tp.optim.SGD), train(network(Unused), optimizer=tp.optim.SGD), job)


FEATURES = [
    reshard_always_never_and_for_the_root,
    reshard_to_two_ranks,
    one_unit,
    a_list_of_modules,
    sgd_with_momentum,
    an_optimizer_from_before,
    cut_along_another_dimension,
    hybrid,
    dimensions_by_name,
    replicas_only,
    parameters_that_stay_whole,
    frozen_and_thawed,
    accumulation,
    a_divisor_of_their_own,
    prefetch_lists,
    settings_without_effect_on_values,
    policies,
    methods_besides_forward,
    recomputed,
    called_twice,
    evaluation_between_steps,
    unused_parameters,
]


def train_features(job, *names):
    reference = train(network())
    for feature in FEATURES:
        if not names or feature.__name__ in names:
            try:
                feature(job, reference)
            except BaseException as error:
                raise AssertionError(f"{feature.__name__}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("n", SIZES)
def test_every_feature_trains_to_what_one_process_does(hosted, n):
    hosted(n, train_features, timeout=110, fresh=n == 2)


# ---- Groups, and none ------------------------------------------------------------------------------------------------


def train_on_gloo(job):
    job.start("gloo")
    same(train(sharded(network()), job), train(network()), job)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    same(train(sharded(network(), mesh=mesh), job), train(network()), job)
    half = fully_shard(network(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))["shard"])
    same(train(half), train(network()), job, size=1, rank=0)  # by itself: one rank


def test_a_default_group_of_gloo_will_do(hosted):
    hosted(2, train_on_gloo, before=False)


class Alone:
    rank, size = 0, 1


def test_without_a_process_group_it_trains_this_process_alone():
    assert not dist.is_initialized()
    same(train(sharded(network()), Alone), train(network()), Alone)
