"""libfsdp.checkpoint with torch's modules: any number of ranks saves, any other loads; precision, meshes, tied, frozen and
tensor-parallel parameters, buffers, and modules that torch's own fully_shard has sharded."""

import itertools
import pathlib

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from libfsdp import InvalidArgument, InvalidState, Mismatch, StateDict, checkpoint
from libfsdp.torch import FullyShardedDataParallel, ShardedGradScaler, fully_shard


class Net(nn.Module):
    """Tied weights, a frozen layer, a one-element parameter, and buffers of three dtypes, one of them not kept."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens):
        self.seen += 1
        return self.head(torch.tanh(self.frozen(self.norm(self.words(tokens)))) * self.scale)


def made(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return Net().to(dtype)


def sharded(model, how, size):
    """The model as `how` says; a new one where a wrapper is put around it."""
    if how == "none":
        return model
    if how in ("fully_shard", "own"):
        shard = fully_shard if how == "fully_shard" else theirs.fully_shard
        shard([model.words, model.head])
        return shard(model)
    if how == "hybrid":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard([model.words, model.head], mesh=mesh)
        return fully_shard(model, mesh=mesh)
    strategy = getattr(theirs.ShardingStrategy, how)
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), sharding_strategy=strategy)


def optimizer_of(model, kind):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if kind == "adamw":
        return torch.optim.AdamW(trained, lr=0.02, amsgrad=True)
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9 if kind == "momentum" else 0)


def train(model, optimizer, steps, rank, size):
    """All ranks have the whole batch, as BatchNorm looks at it."""
    losses = []
    for step in steps:
        tokens = torch.arange(step, step + 16) % 10
        loss = nn.functional.cross_entropy(model(tokens).float(), (tokens * 3) % 10)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_of(model):
    """{name: whole tensor}, gathered by torch alone."""
    found = {}
    with torch.no_grad():
        for name, value in checkpoint_names(model):
            found[name] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return found


def checkpoint_names(model):
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.state_dict_type(model, theirs.StateDictType.FULL_STATE_DICT):
            return list(model.state_dict().items())
    return list(model.state_dict().items())


WAYS = {1: ["none", "fully_shard"], 2: ["fully_shard", "FULL_SHARD", "NO_SHARD", "own"], 3: ["fully_shard"], 4: ["hybrid", "fully_shard"]}


def saves(job, folder):
    for how, kind, dtype in itertools.product(WAYS[job.size], ["sgd", "momentum", "adamw"], [torch.float32, torch.bfloat16]):
        if dtype == torch.bfloat16 and kind == "momentum":
            continue
        model = sharded(made(dtype=dtype), how, job.size)
        optimizer = optimizer_of(model, kind)
        train(model, optimizer, range(3), job.rank, job.size)
        place = pathlib.Path(folder) / f"{job.size}-{how}-{kind}-{str(dtype)[6:]}"
        checkpoint.save(place, model, optimizer, extra=3)
        whole = state_of(model)
        losses = train(model, optimizer, range(3, 6), job.rank, job.size)
        if job.rank == 0:
            torch.save((whole, losses), place / "expected")
    dist.barrier()


def loads(job, folder):
    for place in sorted(pathlib.Path(folder).iterdir()):
        size, saved_how, kind, dtype = place.name.split("-")
        for how in WAYS[job.size] if int(size) == job.size else WAYS[job.size][:1]:
            model = sharded(made(1, getattr(torch, dtype)), how, job.size)
            optimizer = optimizer_of(model, kind)
            train(model, optimizer, range(10, 11), job.rank, job.size)
            loaded = checkpoint.load(place, model, optimizer)
            whole, losses = torch.load(place / "expected")
            found = state_of(model)
            assert found.keys() == whole.keys() and "scratch" not in whole
            for name, value in whole.items():
                assert torch.equal(found[name], value) and found[name].dtype == value.dtype, (place.name, how, name)
            again = train(model, optimizer, range(loaded.extra, loaded.extra + 3), job.rank, job.size)
            exact = how == saved_how and int(size) == job.size
            far = max(abs(a - b) for a, b in zip(again, losses))
            assert far <= (0 if exact else 1e-6 if dtype == "float32" else 0.05), (place.name, how, far)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_training_is_saved(hosted, saved, n):
    hosted(n, saves, str(saved))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_any_number_of_ranks_goes_on(hosted, saved, n):
    assert len(list(saved.iterdir())) == 5 * 9, "the tests above save what this one loads"
    hosted(n, loads, str(saved))


def meshes(job, folder):
    """Tensor parallelism below fully_shard on a 2 x 2 mesh, loaded by fully_shard over all ranks, and by one process."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def layers():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))

    def steps(model, optimizer, numbers):
        for number in numbers:
            torch.manual_seed(number)
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = parallelize_module(layers(), mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    steps(model, optimizer, range(3))
    checkpoint.save(folder, model, optimizer)
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    alone = layers()
    optimizer_alone = torch.optim.Adam(alone.parameters(), lr=0.1)
    checkpoint.load(folder, alone, optimizer_alone)
    for name, value in alone.state_dict().items():
        assert torch.equal(value, whole[name]), name
    other = fully_shard(layers())
    optimizer_other = torch.optim.Adam(other.parameters(), lr=0.1)
    checkpoint.load(folder, other, optimizer_other)
    for each, its in ((model, optimizer), (alone, optimizer_alone), (other, optimizer_other)):
        steps(each, its, range(3, 5))
    for name, value in alone.state_dict().items():
        for each in (model, other):
            assert (each.state_dict()[name].full_tensor() - value).abs().max() < 1e-6, name


def test_two_dimensions_to_one(hosted, tmp_path):
    hosted(4, meshes, str(tmp_path / "saved"))


def buffers_in_mixed_precision(job, folder):
    """A15: buffers that compute in bfloat16 are kept in the dtypes that they were made with."""
    policy = theirs.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(made(), device_id=torch.device("cpu"), mixed_precision=policy)
    optimizer = optimizer_of(model, "adamw")
    train(model, optimizer, range(2), job.rank, job.size)
    checkpoint.save(folder, model, optimizer)
    with checkpoint.Checkpoint(folder) as opened:
        dtypes = {name: opened[name].dtype for name in opened if not name.startswith("optimizer/")}
    assert dtypes["norm.running_mean"] == dtypes["norm.running_var"] == dtypes["words.weight"] == "float32"
    assert (dtypes["seen"], dtypes["mask"], dtypes["norm.num_batches_tracked"]) == ("int64", "bool", "int64")
    assert "scratch" not in dtypes
    live = dict(model.module.named_buffers())
    assert live["norm.running_mean"].dtype == torch.bfloat16 and int(live["seen"]) == 2
    other = made(1)
    checkpoint.load(folder, other)
    assert int(other.seen) == 2 and other.mask.tolist() == [True, False, True]
    assert torch.equal(other.norm.running_mean, live["norm.running_mean"].float())


def test_buffers_are_kept_in_their_own_dtypes(hosted, tmp_path):
    hosted(2, buffers_in_mixed_precision, str(tmp_path / "saved"))


def few_rows(job, folder):
    """A13, A14: optimizer state of parameters of which some ranks have nothing."""

    def layer():
        torch.manual_seed(2)
        return nn.Linear(3, 6, bias=False)

    model = fully_shard(layer())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    checkpoint.save(folder, model, optimizer)
    for ranks in range(1, job.size + 1):
        group = dist.new_group(list(range(ranks)), backend="fsdp")
        if job.rank < ranks:
            from torch.distributed.device_mesh import DeviceMesh

            mesh = DeviceMesh.from_group(group, "cpu")
            other = fully_shard(layer(), mesh=mesh)
            again = torch.optim.Adam(other.parameters(), lr=0.1)
            checkpoint.load(folder, other, again)
            state = again.state[other.weight]
            assert float(state["step"]) == 1
            for key in ("exp_avg", "exp_avg_sq"):
                whole = optimizer_whole(folder, key)
                assert torch.equal(state[key].full_tensor(), whole), (ranks, key)
    dist.barrier()


def optimizer_whole(folder, key):
    with checkpoint.Checkpoint(folder) as opened:
        return torch.from_dlpack(opened.read(f"optimizer/{key}/weight"))


def test_ranks_without_rows_have_a_state_too(hosted, tmp_path):
    hosted(4, few_rows, str(tmp_path / "saved"))


def snapshot(job, folder):
    """A16: a save in the background has the values of its call; and the scaler's state comes along."""
    model = fully_shard(made())
    optimizer = optimizer_of(model, "adamw")
    scaler = ShardedGradScaler(init_scale=64.0, growth_interval=2)
    train(model, optimizer, range(2), job.rank, job.size)
    before = state_of(model)
    saving = checkpoint.save(folder, model, optimizer, scaler=scaler, background=True, of_rank={"rng": torch.get_rng_state()})
    train(model, optimizer, range(2, 5), job.rank, job.size)
    saving.wait(60)
    other = fully_shard(made(1))
    scaler_again = ShardedGradScaler()
    loaded = checkpoint.load(folder, other, optimizer_of(other, "adamw"), scaler=scaler_again)
    after = state_of(other)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert scaler_again.get_scale() == 64.0
    torch.set_rng_state(torch.from_dlpack(loaded.of_rank["rng"]).clone())


def test_a_save_in_the_background_has_the_values_of_its_call(hosted, tmp_path):
    hosted(2, snapshot, str(tmp_path / "saved"))


def misuse(job, folder):
    model = fully_shard(made())
    stale = torch.optim.SGD(made().parameters(), lr=0.1)
    with pytest.raises(InvalidArgument, match="none of the model's"):
        checkpoint.save(folder, model, stale)
    checkpoint.save(folder, model)
    other = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(InvalidArgument, match="'0.weight'"):
        checkpoint.load(folder, other)
    mesh = init_device_mesh("cpu", (job.size,))
    linear = nn.Linear(4, 4)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(1)]))
    linear.bias = nn.Parameter(distribute_tensor(linear.bias.detach(), mesh, [Replicate()]))
    checkpoint.save(pathlib.Path(folder) / "dtensors", linear)
    with checkpoint.Checkpoint(pathlib.Path(folder) / "dtensors") as opened:
        assert len(opened.parts("weight")) == job.size and len(opened.parts("bias")) == job.size
        assert torch.equal(torch.from_dlpack(opened.read("weight")), linear.weight.full_tensor())


def test_what_does_not_fit_is_named(hosted, tmp_path):
    hosted(2, misuse, str(tmp_path / "saved"))


class Counting(nn.Linear):
    """A layer with a value beside its tensors."""

    seen = {"calls": 0}

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, value):
        self.seen = value


class Noting(torch.optim.SGD):
    """An optimizer that notes things beside tensors."""

    def note(self, **notes):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update(notes)
        return self


def beside_tensors(job, folder):
    folder = pathlib.Path(folder)
    model = Counting(3, 4)
    model.seen = {"calls": 2**53 + 1, "scale": float("inf"), "of": ["a", None]}
    kept = {"none": None, "list": [1, 2.5, "x"], "text": "é"}
    checkpoint.save(folder / "a", model, Noting(model.parameters(), lr=1.0).note(**kept))
    other = Counting(3, 4)
    again = Noting(other.parameters(), lr=2.0)
    checkpoint.load(folder / "a", other, again)
    assert other.seen == model.seen
    assert all(again.state[parameter] == kept for parameter in other.parameters())
    with pytest.raises(InvalidArgument, match="has also '_extra_state'"):
        checkpoint.load(folder / "a", nn.Linear(3, 4))
    plain = nn.Linear(3, 4)
    assert checkpoint.load(folder / "a", plain, strict=False).unexpected == ["_extra_state"]
    checkpoint.save(folder / "b", plain)
    with pytest.raises(InvalidArgument, match="lacks '_extra_state'"):
        checkpoint.load(folder / "b", other)
    for value in ((1, 2), torch.ones(1), {1: 2}):
        other.seen = value
        with pytest.raises(InvalidArgument, match="_extra_state"):
            checkpoint.save(folder / "c", other)
    for note in ({"a": 1}, (1,), [torch.ones(1)]):
        with pytest.raises(InvalidArgument, match="the state 'memo' of 'weight'"):
            checkpoint.save(folder / "c", plain, Noting(plain.parameters(), lr=1.0).note(memo=note))
    stray = torch.optim.SGD(plain.parameters(), lr=1.0)
    stray.state["all"]["k"] = 5
    with pytest.raises(InvalidArgument, match="'all' belongs to no parameter"):
        checkpoint.save(folder / "c", plain, stray)
    assert not (folder / "c").exists()


def test_what_is_beside_tensors_comes_back_or_is_refused(hosted, tmp_path):
    hosted(1, beside_tensors, str(tmp_path))


def other_groups(job, folder):
    def layers():
        return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))

    folder = pathlib.Path(folder)
    model = layers()
    named = list(model.named_parameters())
    checkpoint.save(folder / "named", model, torch.optim.AdamW([{"params": named[:2]}, {"params": named[2:]}], lr=0.5))
    names = [["1.bias", "0.weight"], ["0.bias", "1.weight"]]
    optimizer = torch.optim.AdamW(
        [{"params": [(name, model.get_parameter(name)) for name in group]} for group in names], lr=0.1
    )
    checkpoint.load(folder / "named", model, optimizer)
    assert [group["param_names"] for group in optimizer.param_groups] == names
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    checkpoint.save(folder / "adam", model, torch.optim.Adam(model.parameters(), lr=0.25))
    checkpoint.load(folder / "adam", model, optimizer)
    assert all(group["lr"] == 0.25 and group["decoupled_weight_decay"] for group in optimizer.param_groups)


def test_groups_keep_their_names_and_adamw_stays_what_it_is(hosted, tmp_path):
    hosted(1, other_groups, str(tmp_path))


def tied_once(job, folder):
    """Hugging Face keeps a tied tensor under one of its names."""
    path = pathlib.Path(folder) / "model.safetensors"
    for name in ("words.weight", "head.weight"):
        model, state = made(), StateDict()
        for key, value in made(1).state_dict().items():
            if key not in ("words.weight", "head.weight") or key == name:
                state.add(key, value)
        checkpoint.write(path, state, full=True)
        assert checkpoint.load(path, model).missing == []
        assert torch.equal(model.head.weight, made(1).head.weight) and model.head.weight is model.words.weight


def test_a_tied_tensor_is_there_by_one_of_its_names(hosted, tmp_path):
    hosted(1, tied_once, str(tmp_path))


def of_ranks(job, folder):
    """Buffers that differ are those of the first rank; an optimizer's state that differs has no meaning."""
    folder = pathlib.Path(folder)
    model = nn.BatchNorm1d(6)
    model.register_buffer("bits", torch.full((5, 2), job.rank, dtype=torch.uint8))
    model.running_mean.fill_(job.rank + 1)
    model.num_batches_tracked.fill_(job.rank + 10)
    fully_shard(model)
    for name, full in (("parts", False), ("whole", True)):
        checkpoint.save(folder / name, model, full=full)
        with checkpoint.Checkpoint(folder / name) as opened:
            assert opened.read("running_mean").numpy().tolist() == [1] * 6 and opened.read("num_batches_tracked").numpy() == 10
            assert opened.read("bits").numpy().tolist() == [[0, 0]] * 5
    optimizer = Noting(model.parameters(), lr=1.0).note(factor=torch.arange(7.0))
    checkpoint.save(folder / "alike", model, optimizer)
    optimizer.note(factor=torch.arange(7.0) + job.rank)
    with pytest.raises(Mismatch, match="the state 'factor' of 'weight'.* rank 1 than on rank 0"):
        checkpoint.save(folder / "alike", model, optimizer)
    low = fully_shard(nn.Linear(3, 4).bfloat16())
    masters = torch.optim.SGD(low.parameters(), lr=1.0)
    for parameter in low.parameters():
        masters.state[parameter]["master"] = parameter.detach().double() / 3
    checkpoint.save(folder / "low", low, masters)
    again = torch.optim.SGD(low.parameters(), lr=1.0)
    checkpoint.load(folder / "low", low, again)
    for parameter in low.parameters():
        master, saved = again.state[parameter]["master"], masters.state[parameter]["master"]
        assert master.dtype == master._spec.tensor_meta.dtype == (master * 1)._spec.tensor_meta.dtype == torch.float64
        assert torch.equal(master.full_tensor(), saved.full_tensor())
    wrapper = FullyShardedDataParallel(nn.Linear(3, 4), device_id=torch.device("cpu"))
    with FullyShardedDataParallel.summon_full_params(wrapper):
        with pytest.raises(InvalidState, match="outside of summon_full_params"):
            checkpoint.save(folder / "summoned", wrapper)
    alone = dist.new_group([0]), dist.new_group([1])
    single = FullyShardedDataParallel(nn.Linear(3, 4), alone[job.rank], device_id=torch.device("cpu"))
    checkpoint.save(folder / f"of{job.rank}", single)  # each by itself
    with checkpoint.Checkpoint(folder / f"of{job.rank}") as opened:
        assert opened.info.ranks == 1 and torch.equal(torch.from_dlpack(opened.read("bias")), wrapper_bias(single))
    dist.barrier()


def wrapper_bias(wrapper):
    with FullyShardedDataParallel.summon_full_params(wrapper):
        return wrapper.module.bias.detach().clone()


def test_ranks_whose_values_differ(hosted, tmp_path):
    hosted(2, of_ranks, str(tmp_path))
