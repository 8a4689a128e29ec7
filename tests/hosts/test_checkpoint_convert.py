"""python -m libfsdp.checkpoint and torch's files: what torch has saved goes on from libfsdp's checkpoints, and what
libfsdp has saved goes on in torch, with the very same values; pickles run nothing."""

import json
import os
import pathlib
import pickle
import subprocess
import sys

import numpy
import pytest
from conftest import environment

torch = pytest.importorskip("torch", reason="torch is not installed here; ci/test hosts makes a venv that has it")
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import libfsdp
from libfsdp import checkpoint


class Net(nn.Module):
    """With tied weights, buffers of several dtypes, bfloat16, and a parameter of fewer rows than there are ranks."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(11, 4)
        self.norm = nn.BatchNorm1d(4)
        self.low = nn.Linear(4, 5, dtype=torch.bfloat16)
        self.back = nn.Linear(5, 4, bias=False)
        self.scale = nn.Parameter(torch.full((1, 4), 1.25))
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        x = self.norm(self.words(x)) * self.scale
        return self.head(self.back(self.low(x.bfloat16()).float()))


def batch(step):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, 11, (8,), generator=generator), torch.randint(0, 11, (8,), generator=generator)


def step(model, optimizer, at):
    x, y = batch(at)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def optimizer_of(model, named=False):
    parameters = list(model.named_parameters() if named else model.parameters())
    groups = [{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:], "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=0.02)


def trained(named=False, seed=0):
    model = Net(seed)
    optimizer = optimizer_of(model, named)
    for at in range(3):
        step(model, optimizer, at)
    return model, optimizer


def same_states(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert list(a) == list(b)
    assert all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def goes_on(model, optimizer):
    """It is where `trained` left off, and stays with it."""
    beside, other = trained()
    same_states(model, beside)
    for at in range(3, 6):
        assert step(model, optimizer, at) == step(beside, other, at)
    same_states(model, beside)


# ---- From torch ------------------------------------------------------------------------------------------------------


def write_numbered(path):
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)


def write_numbered_with_names(path):
    model, optimizer = trained(named=True)
    model.register_buffer("table", torch.arange(6.0).view(2, 3))  # a buffer that looks like a parameter
    torch.save({"state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "epoch": 3}, path)


def write_named(path):
    model, optimizer = get_state_dict(*trained())
    torch.save({"model": model, "optim": optimizer, "epoch": 3}, path)


def write_old(path):
    model, optimizer = get_state_dict(*trained())
    torch.save({"model": model, "optim": optimizer, "epoch": 3}, path, _use_new_zipfile_serialization=False)


def write_wrapped(path):
    model, optimizer = trained()
    wrapped = {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    torch.save({"model": wrapped, "optimizer": optimizer.state_dict(), "epoch": 3}, path)


def write_dcp(path):
    model, optimizer = get_state_dict(*trained())
    dcp.save({"model": model, "optim": optimizer, "epoch": 3}, checkpoint_id=path)


def write_dcp_flat(path):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(*trained(), options=options)
    dcp.save({"model": model, "optimizer": optimizer, "epoch": 3}, checkpoint_id=path)


def write_dcp_of_an_app(path):
    """As in torch's tutorial, and with a number that is a tensor."""
    model, optimizer = get_state_dict(*trained())
    dcp.save({"app": {"model": model, "optim": optimizer}, "epoch": torch.tensor(3)}, checkpoint_id=path)


def write_lightning(path):
    model, optimizer = trained()
    values = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 3}
    torch.save(values | {"global_step": 3, "lr_schedulers": []}, path)


FILES = [write_numbered, write_numbered_with_names, write_named, write_old, write_wrapped, write_lightning]
FOLDERS = [write_dcp, write_dcp_flat, write_dcp_of_an_app]


@pytest.mark.parametrize("write", FILES + FOLDERS)
def test_training_of_torchs_goes_on_from_ours(convert, write):
    theirs = "theirs.pt" if write in FILES else "theirs"
    write(theirs)
    assert convert(theirs, "ours", "--to", "sharded", "--ranks", "3") == ""
    model = Net(seed=5)
    optimizer = optimizer_of(model)
    loaded = checkpoint.load("ours", model, optimizer, strict=write is not write_numbered_with_names)
    assert loaded.checkpoint.json["epoch"] == 3
    assert loaded.unexpected == (["table"] if write is write_numbered_with_names else [])
    goes_on(model, optimizer)


def test_an_optimizer_whose_parameters_nobody_can_name(run):
    model, optimizer = trained()
    model.register_buffer("table", torch.arange(6.0).view(2, 3))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "theirs.pt")
    code, _, err = run("convert", "theirs.pt", "ours.safetensors")
    assert code == 2 and "knows 7 parameters by their numbers" in err and "named_parameters" in err
    torch.save(optimizer.state_dict(), "alone.pt")
    code, _, err = run("convert", "alone.pt", "ours.safetensors")
    assert code == 2 and "there is no model" in err


def test_a_model_alone(convert):
    model, _ = trained()
    torch.save(model.state_dict(), "theirs.pt")
    convert("theirs.pt", "ours", "--to", "sharded", "--ranks", "2")
    convert("ours", "back.pt")
    convert("ours", "back", "--to", "dcp")
    back = torch.load("back.pt")
    assert list(back) == list(model.state_dict())
    assert back["head.weight"].data_ptr() == back["words.weight"].data_ptr()
    into = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    dcp.load(into, checkpoint_id="back")
    for found in (back, into):
        assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


# ---- To torch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_names", [False, True])
def test_training_of_ours_goes_on_from_torchs_file(convert, by_names):
    checkpoint.save("ours", *trained(), extra={"step": 3})
    err = convert("ours", "theirs.pt")
    assert "left out: the optimizer's type (AdamW)" in err
    saved = torch.load("theirs.pt", weights_only=True)
    assert saved["extra"] == {"step": 3}
    model = Net(seed=5)
    optimizer = optimizer_of(model)
    if by_names:
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optim"])
    else:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optim"])
    goes_on(model, optimizer)


def test_training_of_ours_goes_on_from_dcp(convert):
    checkpoint.save("ours", *trained(), of_rank={"rng": b"1234"})
    err = convert("ours", "theirs", "--to", "dcp")
    assert "rank/rng" in err and "head.weight" in err
    model = Net(seed=5)
    optimizer = optimizer_of(model)
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
    dcp.load(states, checkpoint_id="theirs")
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"])
    goes_on(model, optimizer)
    assert "model.words.weight" in dcp.FileSystemReader("theirs").read_metadata().state_dict_metadata


def loading_dcp(job, path, other):
    """On ranks: the folder loads into what fully_shard made, and its values are those of the file."""
    model = fully_shard(Net(seed=5))
    optimizer = optimizer_of(model)
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
    dcp.load(states, checkpoint_id=path, process_group=job.gloo)
    wanted = torch.load(other)
    assert states["model"].keys() == wanted["model"].keys()

    def whole(value):
        return value.full_tensor() if isinstance(value, DTensor) else value

    for name, value in wanted["model"].items():
        assert torch.equal(whole(states["model"][name]), value), name
    for name, values in wanted["optim"]["state"].items():
        for key, value in values.items():
            assert torch.equal(whole(states["optim"]["state"][name][key]), value), (name, key)
    groups = [(group["lr"], group["params"]) for group in states["optim"]["param_groups"]]
    assert groups == [(group["lr"], group["params"]) for group in wanted["optim"]["param_groups"]]


def test_dcp_loads_on_ranks(hosted, convert, tmp_path):
    checkpoint.save("ours", *trained())
    convert("ours", "theirs", "--to", "dcp")
    convert("ours", "theirs.pt")
    hosted(2, loading_dcp, str(tmp_path / "theirs"), str(tmp_path / "theirs.pt"))


class Counting(nn.Linear):
    """With an extra state."""

    calls = 0

    def get_extra_state(self):
        return {"calls": self.calls, "scales": [0.5, float("inf"), None], "kind": "counting"}

    def set_extra_state(self, state):
        self.calls = state


def odd_states():
    """Training whose optimizer has states that are no tensors, as some do."""
    model = nn.Sequential(nn.Linear(3, 2), Counting(2, 4))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=torch.tensor([0.25]), momentum=0.9)
    for index, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = {
            "momentum_buffer": None,
            "note": f"number {index}",
            "list": [index, "two", None, [2.5, float("-inf")]],
            "count": 5 + index,
            "large": torch.tensor((1 << 60) + index),
            "low": torch.tensor(1.5 + index, dtype=torch.bfloat16),
        }
    return model, optimizer


@pytest.mark.parametrize("form", ["pt", "dcp"])
def test_states_that_are_no_tensors_go_there_and_back(convert, form):
    model, optimizer = odd_states()
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
    torch.save(states, "theirs.pt") if form == "pt" else dcp.save(states, checkpoint_id="theirs")
    theirs, back = ("theirs.pt", "back.pt") if form == "pt" else ("theirs", "back")
    assert convert(theirs, "ours", "--to", "sharded", "--ranks", "2") == ""
    assert convert("ours", back, *(("--to", "dcp") if form == "dcp" else ())) == ""
    fresh, other = odd_states()
    fresh[1].calls, other.state = 9, {}
    checkpoint.load("ours", fresh, other)
    assert fresh[1].calls == model[1].get_extra_state()
    found = [other.state[parameter] for parameter in fresh.parameters()]
    assert found == [optimizer.state[parameter] for parameter in model.parameters()]
    if form == "dcp":
        dcp_to_torch_save("back", "back.pt")
    saved = torch.load("back.pt")
    assert list(saved["model"]) == list(states["model"])
    assert saved["model"]["1._extra_state"] == model[1].get_extra_state()
    assert saved["optim"]["state"] == states["optim"]["state"]
    kinds = [{key: getattr(value, "dtype", type(value)) for key, value in state.items()} for state in found]
    assert kinds == [
        {key: getattr(value, "dtype", type(value)) for key, value in optimizer.state[parameter].items()}
        for parameter in model.parameters()
    ]
    assert saved["optim"]["param_groups"][0]["lr"] == 0.25


def test_all_that_is_left_out_is_said(run, convert):
    model, optimizer = odd_states()
    first, *others = model.parameters()
    optimizer.state[first] |= {"parts": [torch.ones(2)], "pair": (1, 2), "table": {"a": 1}, 7: 1}
    optimizer.state[first] |= {"a/b": torch.zeros(2, 3), "z": torch.tensor(1 + 2j)}
    optimizer.param_groups[0]["dtype"] = torch.float16
    model.register_buffer("words", torch.ones(2))
    states = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    states |= {"epoch": 3, "modules": [], "optimizer": "SGD"}
    states["ema"] = {"0.weight": torch.ones(2, 3)}
    states["model"]["note"] = "by hand"
    states["model"]["2._extra_state"] = {1, 2}
    states["optim"]["scale"] = 2.0
    states["optim"]["state"]["all"] = {"step": 1}
    states["optim"]["state"]["lot"] = 4
    torch.save(states, "theirs.pt")
    err = convert("theirs.pt", "ours.safetensors", "--trust")
    reasons = dict(line.removeprefix("libfsdp.checkpoint: left out: ").split(": ", 1) for line in err.splitlines())
    assert list(reasons) == [
        "'note' of the model",
        "'2._extra_state' of the model",
        "the optimizer's 'scale' (a float)",
        "the optimizer's state 'all'",
        "the optimizer's state 'lot'",
        "the option 'dtype' of the optimizer's group 0",
        *(f"the optimizer's state {key!r} of 0.weight" for key in ("parts", "pair", "table", 7, "a/b", "z")),
        "'modules'",
        "'optimizer'",
        "'ema'",
    ]
    assert reasons["'ema'"] == "a dict, which JSON can't hold"
    assert "complex" in reasons["the optimizer's state 'z' of 0.weight"]
    with checkpoint.Checkpoint("ours.safetensors") as opened:
        assert opened.json["epoch"] == 3 and opened.json["optimizer"]["numbers"]["0.bias"]["count"] == 6
    assert [line for line in run("list", "theirs.pt", "--trust")[1].splitlines() if "has no place" in line] == [
        f"has no place in libfsdp's checkpoints: {name}: {reason}" for name, reason in reasons.items()
    ]


def test_files_of_ranks_that_say_different_things(convert):
    """Of a pipeline, say: each has its own parameters, and some options that are the same."""
    os.mkdir("stages")
    for rank, name in enumerate("ab"):
        state = {name: {"exp_avg": torch.full((2,), rank + 0.5), "step": torch.tensor(3.0 + rank)}}
        groups = [{"params": [name], "lr": 0.1, "betas": (0.9, 0.99)}, {"params": [f"{name}2"], "lr": 0.2 + rank}]
        model = {name: torch.arange(2.0) + rank, f"{name}2": torch.ones(1) * rank}
        values = {"model": model, "optim": {"state": state, "param_groups": groups}, "epoch": 3, "seed": 10 + rank}
        torch.save(values, f"stages/stage{rank}.pt")
    err = convert("stages", "whole.pt")
    assert err == (
        "libfsdp.checkpoint: left out: 'seed' of other files than the first: these differ, and there can be one only\n"
    )
    saved = torch.load("whole.pt")
    assert (saved["epoch"], saved["seed"]) == (3, 10) and saved["model"]["b"].tolist() == [1.0, 2.0]
    assert [(group["params"], group["lr"]) for group in saved["optim"]["param_groups"]] == [
        (["a", "b"], 0.1),
        (["a2"], 0.2),
        (["b2"], 1.2),
    ]
    state = saved["optim"]["state"]["b"]
    assert state["step"] == 4.0 and state["exp_avg"].tolist() == [1.5, 1.5]


def test_an_optimizers_tensors_alone(convert):
    checkpoint.save("ours", *trained())
    convert("ours", "optim.pt", "--names", "optimizer/*")
    saved, whole = torch.load("optim.pt"), convert("ours", "whole.pt") and torch.load("whole.pt")
    assert saved["model"] == {} and saved["optim"]["param_groups"] == whole["optim"]["param_groups"]
    assert saved["optim"]["state"].keys() == whole["optim"]["state"].keys()
    checkpoint.save("odd", *odd_states())
    convert("odd", "bias.pt", "--names", "*bias")
    assert list(torch.load("bias.pt")) == ["0.bias", "1.bias"]
    convert("odd", "state.pt", "--names", "1.*")
    assert list(torch.load("state.pt")) == ["1.weight", "1.bias", "1._extra_state"]


def test_safetensors_package(convert):
    files = pytest.importorskip("safetensors.torch")
    model, optimizer = trained()
    checkpoint.save("ours", model, optimizer)
    convert("ours", "weights.safetensors", "--names", "!optimizer/*")
    found = files.load_file("weights.safetensors")
    wanted = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_every_dtype_there_and_back(run, convert):
    names = (
        "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int8 int16 int32 int64 uint8 uint16 uint32 uint64"
    )
    tensors = {name: torch.arange(6).to(getattr(torch, name)).view(2, 3) for name in names.split()}
    tensors |= {
        "bool": torch.tensor([True, False]),
        "complex64": torch.tensor([1 + 2j, 3 - 4j]),
        "none": torch.zeros(0, 3),
    }
    tensors |= {"scalar": torch.tensor(2.5), "turned": torch.arange(12.0).view(3, 4).T, "part": torch.arange(9)[2:5]}
    state = libfsdp.StateDict()
    for name, tensor in tensors.items():
        state.add(name, tensor)
    checkpoint.write("ours", state)
    for dst, *to in (("a.pt",), ("b", "--to", "dcp")):
        convert("ours", dst, *to)
        assert run("compare", "ours", dst)[0] == 0
        convert(dst, f"{dst}-back", "--to", "sharded", "--ranks", "2")
        assert run("compare", "ours", f"{dst}-back")[:2] == (
            0,
            f"{len(tensors)} tensors in both: {len(tensors)} equal bit for bit; JSON values are equal\n",
        )
    found = torch.load("a.pt")
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert (
            found[name].contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8))
            or not tensor.numel()
        )


@pytest.mark.parametrize("target", [("out.pt",), ("out", "--to", "dcp")])
def test_a_target_that_can_not_be_written(run, tmp_path, monkeypatch, target):
    torch.save({"x": torch.ones(100_000)}, "theirs.pt")
    script = f"ulimit -f 10; exec {sys.executable} -m libfsdp.checkpoint convert theirs.pt {' '.join(target)}"
    options = {"env": environment(), "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run(["sh", "-c", script], check=False, **options)
    assert done.returncode == 2
    assert done.stderr.startswith(f"libfsdp.checkpoint: {tmp_path / target[0]}: torch can't write")
    assert len(done.stderr.splitlines()) == 1 and ".converting" not in done.stderr
    assert os.listdir() == ["theirs.pt"]

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)  # dcp's as well
    code, out, err = run("convert", "theirs.pt", *target)
    assert (code, out, err) == (2, "", "libfsdp.checkpoint: interrupted; nothing was changed\n")
    assert os.listdir() == ["theirs.pt"]


# ---- Files of ranks --------------------------------------------------------------------------------------------------


def saving(job, folder):
    """All that FSDP1 and FSDP2 save on ranks; of FSDP2 also the whole."""
    folder = pathlib.Path(folder)

    def trained_here(model):
        optimizer = optimizer_of(model)
        for at in range(2):
            step(model, optimizer, at)
        return model, optimizer

    def save(name, states):
        (folder / name).mkdir(exist_ok=True)
        torch.save(states, folder / name / f"rank{job.rank}.pt")

    def save_all(name, model, optimizer):
        states = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
        save(name, states)
        dcp.save(states, checkpoint_id=folder / f"{name}-dcp", process_group=job.gloo)
        return states["model"]

    model = Net()
    fully_shard(model.low)  # of another dtype
    model, optimizer = trained_here(fully_shard(model))
    parts = save_all("fsdp2", model, optimizer)
    save("fsdp2-numbered", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    save("fsdp2-local", {name: value.to_local() for name, value in parts.items() if isinstance(value, DTensor)})
    full = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if job.rank == 0:
        torch.save(dict(zip(("model", "optim"), full)), folder / "fsdp2.pt")
    options = {"process_group": job.gloo, "device_id": torch.device("cpu"), "use_orig_params": True}
    model = Net()
    model.low = FullyShardedDataParallel(model.low, **options)
    parts = save_all("fsdp1", *trained_here(FullyShardedDataParallel(model, **options)))
    assert any(type(value).__name__ == "ShardedTensor" for value in parts.values())


def test_files_of_ranks(hosted, run, convert, tmp_path):
    hosted(3, saving, str(tmp_path))
    dcp_to_torch_save("fsdp1-dcp", "fsdp1.pt")
    for name, whole in (
        ("fsdp2", "fsdp2.pt"),
        ("fsdp2-numbered", "fsdp2.pt"),
        ("fsdp2-dcp", "fsdp2.pt"),
        ("fsdp1", "fsdp1.pt"),
        ("fsdp1-dcp", "fsdp1.pt"),
    ):
        convert(name, f"ours-{name}", "--to", "sharded", "--ranks", "2")
        wanted = torch.load(whole)
        with checkpoint.Checkpoint(f"ours-{name}") as opened:
            for key, value in wanted["model"].items():
                if "running" not in key:  # each rank has its own
                    assert torch.equal(torch.from_dlpack(opened.read(key)), value), (name, key)
            for param, values in wanted["optim"]["state"].items():
                for key, value in values.items():
                    if value.shape == ():
                        assert opened.json["optimizer"]["numbers"][param][key]["value"] == value.item()
                    else:
                        read = torch.from_dlpack(opened.read(f"optimizer/{key}/{param}"))
                        assert torch.equal(read, value), (name, param, key)
            groups = opened.json["optimizer"]["groups"]
            assert [group["lr"] for group in groups] == [0.05, 0.02]
            theirs = [sorted(group["params"]) for group in wanted["optim"]["param_groups"]]
            assert [sorted(group["params"]) for group in groups] == theirs
    for name in ("fsdp2", "fsdp1"):
        code, _, err = run("convert", f"{name}/rank1.pt", "x.safetensors")
        assert code == 2 and "give the folder with the files of all ranks" in err
        os.remove(f"{name}/rank1.pt")
        code, _, err = run("convert", name, "x.safetensors")
        assert code == 2 and "is a rank's file missing?" in err
    code, _, err = run("convert", "fsdp2-local", "x.safetensors")
    assert code == 2 and "nothing says" in err


def test_local_state_dicts_are_refused(run):
    os.mkdir("local")
    for rank in range(2):
        torch.save({"weight": torch.arange(4.0) + rank}, f"local/rank{rank}.pt")
    code, _, err = run("convert", "local", "x.safetensors")
    assert code == 2 and "'weight'" not in err and "weight differs between its files" in err
    torch.save({"_fsdp_wrapped_module._flat_param": torch.arange(4.0)}, "flat.pt")
    code, _, err = run("convert", "flat.pt", "x.safetensors")
    assert code == 2 and "flat parameter" in err


def test_a_model_spread_over_files(convert):
    os.mkdir("hf")
    torch.save({"a": torch.arange(3.0)}, "hf/pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.arange(5)}, "hf/pytorch_model-00002-of-00002.bin")
    files = {name: f"pytorch_model-0000{index}-of-00002.bin" for index, name in enumerate("ab", start=1)}
    pathlib.Path("hf/pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    assert convert("hf", "whole.safetensors") == ""
    with checkpoint.Checkpoint("whole.safetensors") as opened:
        assert torch.equal(torch.from_dlpack(opened.read("a")), torch.arange(3.0))
        assert torch.equal(torch.from_dlpack(opened.read("b")), torch.arange(5))


def test_what_is_no_state_dict(run):
    linear = nn.Linear(2, 3)
    torch.save(torch.ones(3), "tensor.pt")
    torch.save(linear, "module.pt")
    torch.jit.trace(linear, torch.ones(1, 2)).save("program.pt")
    numpy.savez("arrays.npz", x=numpy.ones(3))
    for path, reason in (
        ("tensor.pt", "holds a float32 tensor of shape [3], not a state dict"),
        ("module.pt", "holds a Linear, not a state dict; save its state_dict()"),
        ("program.pt", "is a program of TorchScript's; torch.save its state_dict(), and convert that"),
        ("arrays.npz", "is no checkpoint, but another kind of zip file (it has no data.pkl)"),
    ):
        assert run("list", path, "--trust") == (2, "", f"libfsdp.checkpoint: {path}: {reason}\n")


# ---- What could do harm ----------------------------------------------------------------------------------------------


class Evil:
    """Unpickled, it writes a file."""

    def __reduce__(self):
        return (open, ("harm", "w"))


def evil_file():
    torch.save({"weight": torch.ones(3), "note": Evil()}, "evil.pt")
    return "evil.pt"


def evil_metadata():
    dcp.save({"weight": torch.ones(3)}, checkpoint_id="evil")
    with open("evil/.metadata", "rb") as file:
        metadata = pickle.load(file)
    metadata.planner_data = Evil()
    with open("evil/.metadata", "wb") as file:
        pickle.dump(metadata, file)
    return "evil"


def evil_value():
    dcp.save({"weight": torch.ones(3), "note": Evil()}, checkpoint_id="evil")
    return "evil"


@pytest.mark.parametrize("make", [evil_file, evil_metadata, evil_value])
def test_pickles_run_nothing(run, make):
    path = make()
    for arguments in (("list", path), ("verify", path), ("convert", path, "x.safetensors"), ("compare", path, path)):
        code, out, err = run(*arguments)
        assert code == 2 and out == "" and "could run code" in err and "--trust" in err
    assert not os.path.exists("harm")
    run("list", path, "--trust")
    assert os.path.exists("harm")


def test_damaged_files(run):
    model, _ = trained()
    torch.save(model.state_dict(), "a.pt")
    assert run("verify", "a.pt")[0] == 0
    content = bytearray(pathlib.Path("a.pt").read_bytes())
    at = content.find(model.state_dict()["words.weight"].numpy().tobytes())
    content[at + 5] ^= 4
    pathlib.Path("a.pt").write_bytes(content)
    code, out, _ = run("verify", "a.pt")
    assert code == 1 and "checksum" in out
    pathlib.Path("a.pt").write_bytes(content[: len(content) // 2])
    assert run("list", "a.pt")[0] == 1
    dcp.save(model.state_dict(), checkpoint_id="b")
    assert run("verify", "b")[0] == 0
    file = next(pathlib.Path("b").glob("*.distcp"))
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    code, out, _ = run("verify", "b")
    assert code == 1 and "head.weight" in out and "damaged in" in out
    os.remove("b/.metadata")
    code, _, err = run("list", "b")
    assert code == 1 and "never ended" in err
