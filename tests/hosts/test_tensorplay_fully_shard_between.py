"""What programs do between passes of modules under libfsdp.tensorplay.fully_shard: values they write, gradients they keep
and clip, communication of their own, state dicts, exceptions; and what memory that takes."""

import gc

import pytest

tp = pytest.importorskip(
    "tensorplay", reason="TensorPlay is not installed here; ci/test tensorplay makes a venv that has it"
)
import numpy as np
import tensorplay.distributed as dist
from tensorplay import nn
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay_fully_shard_models import (
    OLD,
    STEPS,
    F,
    Net,
    batches,
    cut,
    modules,
    network,
    part,
    raised,
    same,
    sharded,
    train,
)

import libfsdp.tensorplay.composable as ours
from libfsdp.errors import Mismatch
from libfsdp.tensorplay import fully_shard

RANK = "tensorplay_rank.py"


# ---- Values ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(OLD, reason="TensorPlay 1.0 has no meta device")
def test_parameters_without_values_are_filled_after_sharding():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(tp.empty(5, 4, device="meta"))

        def forward(self, x):
            return F.linear(x, self.weight)

    model = fully_shard(Late())
    kind, text = raised(model, tp.ones(2, 4))
    assert kind is RuntimeError and "weight" in text and "to_empty" in text
    model.to_empty(device="cpu")
    with tp.no_grad():
        model.weight.copy_(tp.arange(20).reshape(5, 4).float())
    model(tp.ones(2, 4)).sum().backward()
    np.testing.assert_array_equal(model.weight.grad.numpy(), np.full((5, 4), 2))


def edits(job):
    model = sharded(network())
    reference = network()
    with tp.no_grad():
        for module in modules(model):
            handle = module.unshard(async_op=True)
            handle.wait()
        for (name, parameter), plain in zip(model.named_parameters(), reference.parameters()):
            assert tuple(parameter.shape) == tuple(plain.shape), name
            np.testing.assert_array_equal(parameter.detach().numpy(), plain.detach().numpy(), err_msg=name)
            parameter.mul_(3)
            plain.mul_(3)
        for module in modules(model):
            module.reshard()
    same(model, reference, job, tolerance=0)
    same(train(model, job), train(reference), job)


def test_edits_of_full_parameters_stay(hosted):
    hosted(2, edits)


# ---- Gradients: their norm, and who has them -------------------------------------------------------------------------


def clips(job):
    from tensorplay.nn.utils import clip_grad

    for norm_type in (2.0, 1.0, 3, float("inf")):
        norms = []

        def clip(model):
            norms.append(tp.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type).item())

        expected = train(network(), before_step=clip, optimizer=tp.optim.SGD)
        first, norms = norms, []
        same(train(sharded(network()), job, before_step=clip, optimizer=tp.optim.SGD), expected, job)
        np.testing.assert_allclose(norms, first, rtol=1e-5)
    if job.size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        norm_type, norms = 2.0, []
        train(network(), before_step=clip)
        first, norms = norms, []
        train(sharded(network(), mesh=mesh), job, before_step=clip)
        np.testing.assert_allclose(norms, first, rtol=1e-5)
    plain = network()
    F.mse_loss(plain(batches()[0][0]), batches()[0][1]).backward()
    own = clip_grad.get_total_norm([parameter.grad for parameter in plain.parameters()])
    assert ours.clip_grad_norm_(plain, 1e9).item() == own.item()
    model = sharded(network())
    x, y = batches()[0]
    F.mse_loss(model(part(x, job.rank, job.size)), part(y, job.rank, job.size)).backward()
    if job.rank == job.size - 1:
        next(p for p in model.parameters() if p.numel()).grad.fill_(float("nan"))
    for norm_type in (2.0, float("inf")):
        kind, text = raised(ours.clip_grad_norm_, model, 1.0, norm_type, error_if_nonfinite=True)
        assert kind is RuntimeError and "non-finite" in text
    assert raised(ours.clip_grad_norm_, model, 1.0, 0)[0] is ValueError


@pytest.mark.parametrize("n", [2, 4])
def test_the_norm_of_gradients_is_that_of_all_ranks(hosted, n):
    hosted(n, clips)


def keeps(job):
    """A gradient that a program keeps has its values when the next is there."""
    model = sharded(network())
    kept = []
    for x, y in batches(3):
        F.mse_loss(model(part(x, job.rank, job.size)), part(y, job.rank, job.size)).backward()
        kept.append([(p.grad, p.grad.numpy().copy()) for p in model.parameters()])
        model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    for grads in kept:
        for grad, then in grads:
            np.testing.assert_array_equal(grad.numpy(), then)


def test_gradients_that_are_kept_keep_their_values(hosted):
    hosted(2, keeps)


class Recorder:
    """A custom communication that counts, and calls TensorPlay's."""

    def __init__(self):
        self.calls = 0

    def allocate(self, size, *, dtype, device):
        return tp.empty(tuple(size), dtype=dtype, device=device)


class Gather(Recorder):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor.clone(), group=group, async_op=async_op)


class Scatter(Recorder):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.calls += 1
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group=group, async_op=async_op)


def communicate(job):
    gather, scatter, hooked = Gather(), Scatter(), []
    model = sharded(network())
    model.layers[0].set_custom_all_gather(gather)
    model.layers[1].set_custom_reduce_scatter(scatter)
    model.layers[2].set_all_reduce_hook(lambda output: hooked.append(tuple(output.shape)))
    same(train(model, job), train(network()), job)
    assert gather.calls >= STEPS and scatter.calls == STEPS and len(hooked) == STEPS
    assert all(len(shape) == 1 for shape in hooked)


def test_communication_of_a_programs_own(hosted):
    hosted(2, communicate)


# ---- State dicts, exceptions, memory ---------------------------------------------------------------------------------


def states(job):
    model, reference = train(sharded(network()), job), train(network())
    state = model.state_dict()
    assert list(state) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        np.testing.assert_allclose(state[name].numpy(), cut(value.numpy(), job.rank, job.size), atol=1e-6)
    copied = {name: value.clone() for name, value in state.items()}
    other = sharded(network(seed=6))
    identities = [id(parameter) for parameter in other.parameters()]
    other.load_state_dict(copied)
    assert identities == [id(parameter) for parameter in other.parameters()]
    same(other, reference, job)
    train(model, job, steps=2), train(other, job, steps=2)
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), other.state_dict()[name].numpy(), err_msg=name)


def test_state_dicts_hold_this_ranks_shards(hosted):
    hosted(2, states)


def fails(job):
    """After an exception in forward or backward the next step is right."""

    class Failing(Net):
        where = None

        def forward(self, x):
            for layer in self.layers:
                x = layer(x, scale=0.5)
                if self.where == "forward":
                    raise KeyError("on the way")
            if self.where == "backward":
                x.register_hook(self.fail)
            return self.head(x)

        def fail(self, grad):
            raise KeyError("on the way back")

    model = sharded(network(Failing))
    x, y = batches()[0]
    for where in ("forward", "backward"):
        model.where = where
        kind, _ = raised(lambda: F.mse_loss(model(part(x, job.rank, job.size)), part(y, job.rank, job.size)).backward())
        assert kind is not None
        model.reset_iter_state()
    model.where = None
    same(train(model, job), train(network()), job)
    # Without a reset, gradients of earlier micro-batches stay, with what a backward that failed had come to: the head.
    data = batches(3)
    for where in ("forward", "backward"):
        model, reference = sharded(network(Failing)), network()
        for index, (x, y) in enumerate(data):
            model.where = where if index == 1 else None
            step = lambda: F.mse_loss(model(part(x, job.rank, job.size)), part(y, job.rank, job.size)).backward()
            assert (raised(step)[0] is None) == (index != 1)
            if where == "backward" or index != 1:
                plain = network()
                F.mse_loss(plain(x), y).backward()
                for (name, p), q in zip(plain.named_parameters(), reference.parameters()):
                    if index != 1 or name.startswith("head"):
                        q.grad = p.grad if q.grad is None else q.grad + p.grad
        for (name, p), q in zip(model.named_parameters(), reference.parameters()):
            expected = cut(q.grad.numpy(), job.rank, job.size)
            np.testing.assert_allclose(p.grad.numpy(), expected, atol=1e-5, err_msg=f"{where} {name}")


def test_training_goes_on_after_an_exception(hosted):
    hosted(2, fails)


def fails_alone(job, place):
    """A backward that fails on one rank does not end on the others as if it had not, wherever it was. Programs that go on
    with the next batch then go on together."""

    class Failing(Net):
        where = None

        def forward(self, x):
            for index, layer in enumerate(self.layers):
                x = self.watched(layer(x, scale=0.5), index)
            return self.watched(self.head(x), "head")

        def watched(self, x, place):
            if self.where == place:
                x.register_hook(self.fail)
            return x

        def fail(self, grad):
            raise KeyError("on the way back")

    model = sharded(network(Failing))
    x, y = batches()[0]
    x, y = part(x, job.rank, job.size), part(y, job.rank, job.size)
    step = lambda: F.mse_loss(model(x), y).backward()
    step()
    model.where = place if job.rank == 1 else None
    failed = [raised(step)[0]]
    assert failed[0] is (KeyError if job.rank == 1 else Mismatch)
    model.where = None
    while failed[-1] is not None and len(failed) < 4:  # a program that goes on with the next batch
        failed.append(raised(step)[0])
    assert failed[-1] is None
    for p in model.parameters():
        p.grad = None
    same(train(model, job), train(network()), job)


@pytest.mark.parametrize("place", ["head", 1, 0])
def test_a_backward_that_fails_on_one_rank_fails_on_all(hosted, place):
    hosted(2, fails_alone, place, limit=5)


def gradients_of_inputs(job):
    """Alone they reduce nothing; the backward after that is whole."""
    model, plain = sharded(network()), network()
    x, y = batches()[0]
    mine = part(x, job.rank, job.size).clone().requires_grad_()
    for net, data in ((model, mine), (plain, x.clone().requires_grad_())):
        loss = F.mse_loss(net(data), part(y, job.rank, job.size) if net is model else y)
        (grad,) = tp.autograd.grad(loss, [data], retain_graph=True)
        assert all(p.grad is None for p in net.parameters())
        loss.backward()
        expected = grad if net is model else part(grad, job.rank, job.size) * job.size
        if net is model:
            found = expected
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-6)
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters()):
        np.testing.assert_allclose(p.grad.numpy(), cut(q[1].grad.numpy(), job.rank, job.size), atol=1e-6, err_msg=name)


def test_gradients_of_inputs_alone(hosted):
    hosted(2, gradients_of_inputs)


def memory():
    """KiB of this process, and its part of what ranks share; not of files, which others may map or not."""
    with open("/proc/self/smaps_rollup") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def lasts(job):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)]
            )

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    model = sharded(network(Wide))
    stepper = tp.optim.SGD(model.parameters(), lr=1e-3)
    x = tp.randn(8, 64)
    used = []
    for step in range(500):
        F.mse_loss(model(x), x).backward()
        stepper.step()
        stepper.zero_grad()
        if step in (199, 499):
            gc.collect()
            used.append(memory())
    assert used[1] - used[0] < 400, used  # a step's gradients are 528
    full = sum(unit.unit.info().full_bytes for unit in (layer._get_fsdp_state() for layer in model.layers))
    model_memory = model._get_fsdp_state().iteration.models
    slots = sum(each.memory().unsharded for each in model_memory.values())
    assert slots <= 0.3 * full, (slots, full)  # one unit of the four


def test_five_hundred_steps_take_no_more_memory(hosted):
    hosted(2, lasts, fresh=True)
