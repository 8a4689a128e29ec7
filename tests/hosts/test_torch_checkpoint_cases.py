"""libfsdp.checkpoint with torch's modules where what was saved and what loads it are not quite alike: copies that
differ between ranks, names that are tied on one side, other dtypes, groups and wrappers; and that a load which fails
has changed nothing."""

import pathlib

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from libfsdp import InvalidArgument, Mismatch, checkpoint
from libfsdp.torch import FullyShardedDataParallel, ShardedGradScaler, fully_shard


def layers(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).to(dtype)


def step(model, optimizer, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(4, 3, dtype=next(model.parameters()).dtype)
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def read(path, name):
    with checkpoint.Checkpoint(path) as opened:
        return torch.from_dlpack(opened.read(name))


# ---- Copies on several ranks ----


def differing(job, folder):
    folder = pathlib.Path(folder)
    model = layers()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    checkpoint.save(folder / "alike", model, optimizer)
    state = optimizer.state[model[1].weight]
    state["exp_avg"][1, 2] += job.rank
    with pytest.raises(Mismatch, match="'exp_avg' of '1.weight', .* not sharded, .* rank 1 than on rank 0") as raised:
        checkpoint.save(folder / "no", model, optimizer)
    assert raised.value.ranks == (0, 1)
    with torch.no_grad():
        model[0].bias[4] += job.rank
    for full in (False, True):
        with pytest.raises(Mismatch, match="the parameter '0.bias', which is not sharded"):
            checkpoint.save(folder / "no", model, full=full)
    experts = layers()
    ignored = {experts[1].weight}
    fully_shard(experts, ignored_params=ignored)
    checkpoint.save(folder / "experts", experts)
    with torch.no_grad():
        experts[1].weight += job.rank
    with pytest.raises(Mismatch, match="'1.weight', which is not sharded.*of_rank"):
        checkpoint.save(folder / "no", experts)
    transposed = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        transposed.weight.copy_(torch.arange(16.0).view(4, 4))
    if job.rank:  # the same values, though they lie in another order
        transposed.weight.data = transposed.weight.data.t().contiguous().t()
    checkpoint.save(folder / "order", transposed)
    assert torch.equal(read(folder / "order", "weight"), torch.arange(16.0).view(4, 4))
    mesh = init_device_mesh("cpu", (job.size // 2, 2), mesh_dim_names=("replicate", "shard"))
    parts = nn.Linear(4, 4, bias=False)
    torch.manual_seed(1)
    parts.weight = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Replicate(), Shard(0)]))
    checkpoint.save(folder / "parts", parts)  # other parts differ, and may
    if job.size == 4:
        with torch.no_grad():
            parts.weight._local_tensor[0] += job.rank == 3
        with pytest.raises(Mismatch, match="rank 3 than on rank 1"):
            checkpoint.save(folder / "no", parts)
    assert not (folder / "no").exists()
    dist.barrier()


@pytest.mark.parametrize("n", [2, 4])
def test_a_parameter_that_nothing_keeps_alike_is_compared_between_ranks(hosted, tmp_path, n):
    hosted(n, differing, str(tmp_path))


# ---- Ties ----


class Pair(nn.Module):
    """Two layers, tied or not, whose names stand in one or the other order."""

    def __init__(self, tie, order="ab"):
        super().__init__()
        torch.manual_seed(4)
        for name in order:
            setattr(self, name, nn.Linear(3, 3, bias=False))
        if tie == "parameter":
            self.b.weight = self.a.weight
        elif tie == "memory":
            self.b.weight.data = self.a.weight.data
        elif tie == "module":
            self.b = self.a

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def ties(job, folder):
    folder = pathlib.Path(folder)
    apart, alike = Pair(""), Pair("")
    with torch.no_grad():
        alike.b.weight.copy_(alike.a.weight)
    for name, model in (("apart", apart), ("alike", alike)):
        checkpoint.save(folder / name, model)
        checkpoint.save(folder / f"{name}.safetensors", model, full=True)
    for tie in ("parameter", "memory", "module"):
        for kind in ("", ".safetensors"):
            model = Pair(tie)
            with torch.no_grad():
                model.a.weight.fill_(9)
            with pytest.raises(InvalidArgument, match="'a.weight' and 'b.weight' have values of their own"):
                checkpoint.load(folder / f"apart{kind}", model)
            assert (model.a.weight == 9).all()
            loaded = checkpoint.load(folder / f"apart{kind}", model, strict=False)
            assert loaded.unexpected == ["b.weight"] and torch.equal(model.b.weight, apart.a.weight)
            assert checkpoint.load(folder / f"alike{kind}", model).unexpected == []
            assert torch.equal(model.b.weight, alike.a.weight)
        checkpoint.save(folder / tie, model)
        with checkpoint.Checkpoint(folder / tie) as opened:
            assert opened["b.weight"].tied_to == "a.weight"
        again = Pair(tie)
        with torch.no_grad():
            again.a.weight.fill_(9)
        checkpoint.load(folder / tie, again)
        assert torch.equal(again.b.weight, model.a.weight)
    tied = Pair("parameter")
    optimizer = torch.optim.Adam(tied.parameters(), lr=0.1)
    step(tied, optimizer)
    checkpoint.save(folder / "optimizer", tied, optimizer)
    other = Pair("parameter", order="ba")
    again = torch.optim.Adam(other.parameters(), lr=0.1)
    checkpoint.load(folder / "optimizer", other, again)
    assert torch.equal(again.state[other.a.weight]["exp_avg"], optimizer.state[tied.a.weight]["exp_avg"])
    assert [name for name, _ in other.named_parameters()] == ["b.weight"]


def test_names_that_are_one_tensor_here_had_one_value_there(hosted, tmp_path):
    hosted(1, ties, str(tmp_path))


# ---- Optimizers ----


def partly(job, folder):
    folder = pathlib.Path(folder)
    model = layers()
    fully_shard(model)
    first = list(model[0].parameters())
    optimizer = torch.optim.Adam([{"params": first}, {"params": [], "lr": 0.75}], lr=0.5)
    step(model, optimizer)
    checkpoint.save(folder / "first", model, optimizer)
    for_all = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, for_all)
    kept = for_all.state[model[1].weight]["exp_avg"].full_tensor()
    with pytest.raises(InvalidArgument, match="it lacks '1.weight', '1.bias'"):
        checkpoint.load(folder / "first", model, for_all)
    loaded = checkpoint.load(folder / "first", model, for_all, strict=False)
    assert (loaded.missing_state, loaded.unexpected_state) == (["1.weight", "1.bias"], [])
    assert torch.equal(for_all.state[model[1].weight]["exp_avg"].full_tensor(), kept)
    given = optimizer.state[model[0].weight]["exp_avg"].full_tensor()
    assert torch.equal(for_all.state[model[0].weight]["exp_avg"].full_tensor(), given)
    checkpoint.save(folder / "all", model, for_all)
    again = torch.optim.Adam([{"params": first}, {"params": [], "lr": 0.1}], lr=0.1)
    with pytest.raises(InvalidArgument, match="has also '1.weight', '1.bias'"):
        checkpoint.load(folder / "all", model, again)
    loaded = checkpoint.load(folder / "all", model, again, strict=False)
    assert (loaded.missing_state, loaded.unexpected_state) == ([], ["1.weight", "1.bias"])
    checkpoint.load(folder / "first", model, again)
    assert [group["lr"] for group in again.param_groups] == [0.5, 0.75]


def test_what_an_optimizer_did_not_get_is_told(hosted, tmp_path):
    hosted(2, partly, str(tmp_path))


def dtypes(job, folder):
    folder = pathlib.Path(folder)
    for wrap in (lambda model: model, fully_shard):
        name = wrap.__name__.strip("<>")
        model = wrap(layers())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        step(model, optimizer)
        checkpoint.save(folder / name, model, optimizer)
        double = wrap(layers(1, torch.float64))
        again = torch.optim.Adam(double.parameters(), lr=0.1)
        checkpoint.load(folder / name, double, again)
        state, saved = again.state[double[0].weight], optimizer.state[model[0].weight]
        assert state["exp_avg"].dtype == torch.float64 and state["step"].dtype == torch.float32
        assert torch.equal(whole_of(state["exp_avg"]), whole_of(saved["exp_avg"]).double())
        step(double, again, 1)  # which torch refuses for other dtypes
        step(model, optimizer, 1)
        low = wrap(layers(1, torch.bfloat16))
        masters = torch.optim.SGD(low.parameters(), lr=0.1)
        for parameter in low.parameters():
            masters.state[parameter]["master"] = parameter.detach().float() / 3
        checkpoint.save(folder / f"low{name}", low, masters)
        other = wrap(layers(2, torch.bfloat16))
        again = torch.optim.SGD(other.parameters(), lr=0.1)
        checkpoint.load(folder / f"low{name}", other, again)
        for mine, its in zip(other.parameters(), low.parameters()):
            master = again.state[mine]["master"]
            assert master.dtype == torch.float32
            assert torch.equal(whole_of(master), whole_of(masters.state[its]["master"]))
        dist.barrier()


def whole_of(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_a_state_goes_along_where_its_parameter_has_another_dtype_now(hosted, tmp_path):
    hosted(2, dtypes, str(tmp_path))


def unlike(job, folder):
    model = fully_shard(nn.Linear(4, 4))
    mesh = model.weight.device_mesh
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for values, placement in ((torch.zeros(6), Shard(0)), (torch.zeros(4, 4), Shard(1)), (torch.zeros(4, 1), Shard(0))):
        optimizer.state[model.weight]["factor"] = distribute_tensor(values, mesh, [placement])
        with pytest.raises(InvalidArgument, match="the state 'factor' .* unlike the parameter"):
            checkpoint.save(folder, model, optimizer)
    for values, placement in ((torch.arange(6.0), Replicate()), (torch.arange(16.0).view(4, 4), Replicate())):
        optimizer.state[model.weight]["factor"] = distribute_tensor(values, mesh, [placement])
        checkpoint.save(folder, model, optimizer)
        assert torch.equal(read(folder, "optimizer/factor/weight"), values)
        dist.barrier()


def test_a_state_that_is_sharded_unlike_its_parameter_is_refused(hosted, tmp_path):
    hosted(2, unlike, str(tmp_path / "saved"))


# ---- Wrappers ----


def wrappers(job, folder):
    folder = pathlib.Path(folder)
    wrapped = {
        "ddp": lambda: nn.parallel.DistributedDataParallel(layers(job.rank)),
        "fully_shard": lambda: fully_shard(layers()),
        "compiled": lambda: torch.compile(layers()),
        "both": lambda: torch.compile(nn.parallel.DistributedDataParallel(layers())),
        "classic": lambda: FullyShardedDataParallel(layers(), device_id=torch.device("cpu")),
        "one_process": lambda: nn.DataParallel(layers()),
    }
    expected = None
    for how, make in wrapped.items():
        model = make()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        if how in ("ddp", "fully_shard", "classic"):
            step(model, optimizer)
        if expected is None:
            expected = {name: value.clone() for name, value in model.module.state_dict().items()}
            averages = optimizer.state[model.module[0].weight]["exp_avg"].clone()
        else:
            checkpoint.load(folder / "ddp", model, optimizer)
        checkpoint.save(folder / how, model, optimizer)
        with checkpoint.Checkpoint(folder / how) as opened:
            assert [name for name in opened if "/" not in name] == ["0.weight", "0.bias", "1.weight", "1.bias"]
            for name, value in expected.items():
                assert torch.equal(torch.from_dlpack(opened.read(name)), value), (how, name)
            assert torch.equal(torch.from_dlpack(opened.read("optimizer/exp_avg/0.weight")), averages), how
    plain = nn.Sequential()
    plain.module = nn.Linear(2, 2)  # a name that a program has given stays
    checkpoint.save(folder / "named", plain)
    assert list(checkpoint.Checkpoint(folder / "named")) == ["module.weight", "module.bias"]
    alone = dist.new_group([job.rank], use_local_synchronization=True)
    model = nn.parallel.DistributedDataParallel(layers(job.rank), process_group=alone)
    checkpoint.save(folder / f"of{job.rank}", model)
    with checkpoint.Checkpoint(folder / f"of{job.rank}") as opened:
        assert opened.info.ranks == 1
    assert torch.equal(read(folder / f"of{job.rank}", "0.bias"), layers(job.rank)[0].bias)


def test_wrappers_for_data_parallelism_and_compilers_are_no_part_of_names(hosted, tmp_path):
    hosted(2, wrappers, str(tmp_path))


# ---- When, and what fails ----


def between(job, folder):
    folder = pathlib.Path(folder)
    model = layers()
    checkpoint.save(folder / "all", model)
    for wrapped in (model, nn.parallel.DistributedDataParallel(layers())):
        loss = wrapped(torch.ones(2, 3)).square().sum()
        checkpoint.save(folder / "again", wrapped)  # which writes nothing
        checkpoint.save(folder / "full", wrapped, full=True)
        loss.backward()
        loss = wrapped(torch.ones(2, 3)).square().sum()
        checkpoint.load(folder / "all", wrapped)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    checkpoint.save(folder / "part", nn.Sequential(layers()[0]))
    loss = model(torch.ones(2, 3)).square().sum()
    assert checkpoint.load(folder / "part", model, strict=False).missing == ["1.weight", "1.bias"]
    loss.backward()  # of 1.weight, to which nothing was written; no gradient needs the values of 0.weight


def test_a_load_between_forward_and_backward_is_noticed_and_a_save_is_harmless(hosted, tmp_path):
    hosted(1, between, str(tmp_path))


class Picky(nn.Linear):
    """A layer that refuses some extra states."""

    state = "first"

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, value):
        if value == "bad":
            raise ValueError("not this one")
        self.state = value


def fails(job, folder):
    folder = pathlib.Path(folder)
    model = Picky(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    scaler = ShardedGradScaler(init_scale=8.0)
    model.state = "saved"
    checkpoint.save(folder / "good", model, optimizer, scaler=scaler, extra={"scheduler": scheduler.state_dict()})
    checkpoint.save(folder / "empty", model, optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False))
    model.state = "bad"
    checkpoint.save(folder / "bad", model, optimizer, scaler=scaler)
    [file] = (folder / "good").glob("rank-*.safetensors")
    damaged = folder / "damaged"
    damaged.mkdir()
    for path in (folder / "good").iterdir():
        data = bytearray(path.read_bytes())
        if path.name == file.name:
            data[-1] ^= 1
        (damaged / path.name).write_bytes(data)
    model.state = "first"
    for name, error in (("bad", ValueError), ("empty", RuntimeError), ("damaged", ValueError)):
        other = torch.amp.GradScaler("cpu", init_scale=2.0)
        with torch.no_grad():
            model.weight.fill_(7)
        optimizer.param_groups[0]["lr"] = 0.25
        with pytest.raises(error):
            checkpoint.load(folder / name, model, optimizer, scaler=other)
        assert other.get_scale() == 2.0 and model.state == "first" and optimizer.param_groups[0]["lr"] == 0.25
        assert name == "damaged" or (model.weight == 7).all()
    extra = checkpoint.load(folder / "good", model, optimizer, scaler=other).extra
    assert other.get_scale() == 8.0 and model.state == "saved" and optimizer.param_groups[0]["lr"] == 0.5
    assert extra["scheduler"] == scheduler.state_dict()
    scheduler.load_state_dict(extra["scheduler"])


def test_what_can_refuse_its_state_does_so_before_the_model_is_written(hosted, tmp_path):
    hosted(1, fails, str(tmp_path))
