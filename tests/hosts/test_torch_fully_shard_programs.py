"""libfsdp.torch.fully_shard in programs that do more than forward, backward and step: graphs that are differentiated
again, forwards between others, outputs that hooks can't see, exceptions that are caught, pipelines. Each beside one
process with the whole batch."""

import collections
import dataclasses
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
from torch_fully_shard_models import (
    WIDTH,
    Block,
    Hidden,
    Segments,
    Twice,
    batches,
    close_gradients,
    network,
    refused,
    sharded,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import libfsdp.torch as ours


def both(job, make, step, layers=None):
    """step(model, rows) on a sharded model and on a whole one; they come to the same gradients. Gives the first."""
    model, plain = make(), make()
    ours_of = sharded(model, layers=model if layers is None else layers(model))
    step(ours_of, slice(job.rank, None, job.size))
    step(plain, slice(None))
    close_gradients(ours_of, plain, job.size)
    return ours_of


def inputs():
    return [batch[0] for batch in batches(4)]


# ---- Graphs ----------------------------------------------------------------------------------------------------------


def deep(frozen):
    torch.manual_seed(5)
    model = nn.Sequential(*(Block() for _ in range(5)), nn.Linear(WIDTH, 1))
    for block in model[1:4]:
        block.requires_grad_(not frozen)
    return model


class Late(nn.Module):
    """Its first unit's second output gets its gradient first, and nothing tells the unit."""

    class Two(nn.Module):
        def __init__(self, hides):
            super().__init__()
            self.one, self.other, self.hides = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), hides

        def forward(self, x):
            seen = torch.tanh(self.one(x))
            return seen, Hidden(self.other(seen)) if self.hides else self.other(seen)[:, :]

    def __init__(self, hides):
        super().__init__()
        torch.manual_seed(1)
        self.two, self.rest = self.Two(hides), nn.Sequential(Block(), Block(), Block())

    def forward(self, x):
        seen, other = self.two(x)
        seen = torch.sin(torch.sin(seen)).sum()
        other = other.value if isinstance(other, Hidden) else other.mul_(3.0)
        return self.rest(other).square().sum() + seen


def graphs(job):
    x = inputs()

    # Gradient penalties: with the loss, alone, and through layers that are frozen.
    def penalty(model, rows, loss=1.0):
        for i in range(2):
            at = x[i][rows].clone().requires_grad_()
            out = model(at)
            (slope,) = torch.autograd.grad(out.sum(), at, create_graph=True)
            (slope.square().sum() + (loss * out.square().sum() if loss else 0)).backward()

    for frozen in (False, True):
        model = both(job, lambda: deep(frozen), penalty)
        both(job, lambda: deep(frozen), lambda m, rows: penalty(m, rows, 0))
        assert not any(m._get_fsdp_state().is_full for m in (*model, model))

    # A backward that is recorded ends with shards in the modules, and gradients that can be dropped.
    def recorded(model, rows):
        for i in range(2):
            model.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model(x[i][rows]).square().sum().backward(create_graph=True)

    both(job, network, recorded)

    # A forward without gradients between a forward and its backward, around parts that are computed again.
    def between(model, rows, context):
        out = model(x[0][rows].clone().requires_grad_())
        with context():
            model(x[1][rows])
        out.square().sum().backward()

    for context in (torch.no_grad, torch.inference_mode):
        for reentrant in (True, False):
            both(job, lambda: Segments(reentrant), lambda m, rows: between(m, rows, context), lambda m: [])

    # What is computed again is computed in the unit's dtype.
    model = Twice("saved")
    ours.fully_shard(model.block, mp_policy=ours.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32))
    ours.fully_shard(model)
    model(x[0].clone().requires_grad_()).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())

    # Parameters are parameters while they are full too, and outputs are cast in named tuples and dataclasses.
    @dataclasses.dataclass
    class Given:
        value: torch.Tensor

    Pair = collections.namedtuple("Pair", "first second")

    class Gives(nn.Linear):
        def forward(self, x):
            assert isinstance(self.weight, nn.Parameter)
            return Pair(super().forward(x), Given(super().forward(x)))

    model = Gives(WIDTH, 2)
    ours.fully_shard(model, mp_policy=ours.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64))
    pair = model(x[0])
    assert pair.first.dtype == pair.second.value.dtype == torch.float64
    pair.second.value.sum().backward()
    assert model.weight.grad is not None

    # A process whose first forward is one in inference mode trains afterwards.
    def evaluated(model, rows):
        with torch.inference_mode():
            model(x[0][rows])
        model(x[0][rows]).square().sum().backward()

    both(job, network, evaluated)

    # A penalty on the parameters: autograd gives gradients to the shards themselves, after those of the
    # model and before.
    def decay(model, rows, first):
        for i in range(2):
            out = None if first else model(x[i][rows])
            values = [(p.to_local(), 1) if isinstance(p, DTensor) else (p, job.size) for p in model.parameters()]
            penalty = sum(factor * value.square().sum() for value, factor in values)
            (penalty + (model(x[i][rows]) if out is None else out).square().sum()).backward()

    for first in (True, False):
        both(job, network, lambda m, rows: decay(m, rows, first))

    # A graph that is gone through twice.
    def twice(model, rows):
        loss = model(x[0][rows]).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    both(job, network, twice)

    # Values of other units are never computed with: outputs that nothing can be hung on.
    for hides in (True, False):
        model = Late(hides)
        sharded(model, layers=[model.two, *model.rest])
        loss = model(x[0])
        refused(loss.backward, RuntimeError, "modified by an inplace operation")
        model.reset_iter_state()

    # Frozen between forward and backward: no gradient. Thawed: one, as the graph has it.
    def frozen_between(model, rows):
        loss = model(x[0][rows]).square().sum()
        model[1].requires_grad_(False)
        loss.backward()
        assert all(p.grad is None for p in model[1].parameters())
        model[1].requires_grad_(True)
        model(x[1][rows]).square().sum().backward()

    both(job, network, frozen_between)

    # Inputs that are leaves gather no hooks, given to a frozen unit or given back.
    class Passes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, 1)

        def forward(self, x):
            return x, self.layer(x)

    leaf = x[0].clone().requires_grad_()
    for model in (ours.fully_shard(network().requires_grad_(False)), ours.fully_shard(Passes())):
        for _ in range(3):
            out = model(leaf)
            (out if isinstance(out, torch.Tensor) else out[0].sum() + out[1]).sum().backward()
        assert not leaf._backward_hooks


@pytest.mark.parametrize("n", [2, 3])
def test_graphs_of_all_kinds(hosted, n):
    hosted(n, graphs)


# ---- Exceptions ------------------------------------------------------------------------------------------------------


class Boom(Exception):
    pass


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Boom


def raise_boom():
    raise Boom


def exceptions(job):
    x, mine = inputs(), slice(job.rank, None, job.size)

    def fail(model, index, function):
        handle = model[1].register_forward_pre_hook(function)
        refused(lambda: model(x[index][mine]).sum().backward(), Boom)
        handle.remove()

    in_forward, in_backward = lambda *_: raise_boom(), lambda module, args: Fails.apply(args[0])
    # In a forward: gradients of before stay, and the next are added to them.
    model, plain = sharded(), network()
    model(x[0][mine]).square().sum().backward()
    fail(model, 1, in_forward)
    model(x[2][mine]).square().sum().backward()
    for i in (0, 2):
        plain(x[i]).square().sum().backward()
    close_gradients(model, plain, job.size)
    # In a backward: the same, and what it had reduced by then is in them, as in any leaf that a backward had come to.
    model, plain, late = sharded(), network(), network()
    model(x[0][mine]).square().sum().backward()
    fail(model, 1, in_backward)
    late(x[1]).sum().backward()
    for i in (0, 2):
        plain(x[i]).square().sum().backward()
    for p, q in zip(plain[2].parameters(), late[2].parameters()):
        p.grad += q.grad
    model(x[2][mine]).square().sum().backward()
    close_gradients(model, plain, job.size)
    # What has failed can't be gone through once more.
    handle = model[1].register_forward_pre_hook(in_backward)
    loss = model(x[1][mine]).sum()
    handle.remove()
    refused(lambda: loss.backward(retain_graph=True), Boom)
    refused(lambda: loss.backward(), RuntimeError, "run forward again")
    # In a hook, after all reductions.
    model.zero_grad(), plain.zero_grad()
    model(x[0][mine]).square().sum().backward()
    handle = model[0].up.weight.register_post_accumulate_grad_hook(lambda p: raise_boom())
    refused(lambda: model(x[1][mine]).square().sum().backward(), Boom)
    handle.remove()
    model(x[2][mine]).square().sum().backward()
    for i in range(3):
        plain(x[i]).square().sum().backward()
    close_gradients(model, plain, job.size)
    # Nothing of before stays where the program zeroes gradients or resets.
    plain.zero_grad()
    plain(x[2]).square().sum().backward()
    for failing in (in_forward, in_backward):
        for clear in (model.reset_iter_state, model.zero_grad, lambda: model.zero_grad(set_to_none=False)):
            fail(model, 0, failing)
            clear()
            model(x[2][mine]).square().sum().backward()
            close_gradients(model, plain, job.size)
    # Gradients that can't stay are not dropped in silence.
    for failing, kind in ((in_forward, "forward"), (in_backward, "backward")):
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        model(x[0][mine]).square().sum().backward()
        fail(model, 1, failing)
        for _ in range(2):
            refused(lambda: model(x[2][mine]), RuntimeError, f"a {kind} has failed while")
        model.reset_iter_state()
        model.set_requires_gradient_sync(True)
        model(x[2][mine]).square().sum().backward()
        close_gradients(model, plain, job.size)


def test_programs_go_on_after_exceptions(hosted):
    hosted(2, exceptions)


# ---- Pipelines -------------------------------------------------------------------------------------------------------


def pipelines(job):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    x, y = inputs()[0][:8], inputs()[1][:8]
    mesh = init_device_mesh("cpu", (2, job.size // 2), mesh_dim_names=("pp", "dp"))
    stage, rows = mesh.get_local_rank("pp"), slice(mesh.get_local_rank("dp"), None, job.size // 2)

    def blocks():
        torch.manual_seed(5)
        return [Block() for _ in range(4)]

    for kind, parts in (
        (Schedule1F1B, {stage: slice(2 * stage, 2 * stage + 2)}),
        (ScheduleInterleaved1F1B, {stage: slice(stage, stage + 1), stage + 2: slice(stage + 2, stage + 3)}),
    ):
        plain = blocks()
        modules = {index: nn.Sequential(*blocks()[part]) for index, part in parts.items()}
        stages = []
        for index, module in modules.items():
            sharded(module, mesh=mesh["dp"])
            count = 2 * len(parts)
            stages.append(PipelineStage(module, index, count, torch.device("cpu"), group=mesh.get_group("pp")))
        schedule = kind(stages if len(parts) > 1 else stages[0], 4, loss_fn=nn.functional.mse_loss)
        for _ in range(2):
            for module in modules.values():
                module.zero_grad()
            _ = schedule.step(x[rows].contiguous()) if stage == 0 else schedule.step(target=y[rows].contiguous())
        nn.functional.mse_loss(nn.Sequential(*plain)(x), y).backward()
        for index, part in parts.items():
            close_gradients(modules[index], nn.Sequential(*plain[part]))
            assert not modules[index]._get_fsdp_state().is_full


def test_stages_of_a_pipeline(hosted):
    hosted(4, pipelines)
