"""python -m libfsdp.checkpoint and TensorPlay's files: what TensorPlay has saved goes on from libfsdp's checkpoints,
and what libfsdp or torch has saved goes on in TensorPlay, with the very same values."""

import os
import pathlib
import subprocess

import numpy as np
import pytest
from conftest import ROOT, environment

tp = pytest.importorskip(
    "tensorplay", reason="TensorPlay is not installed here; ci/test tensorplay makes a venv that has it"
)
import tensorplay.distributed.checkpoint as dcp
from tensorplay import nn

import libfsdp
import libfsdp.tensorplay
from libfsdp import checkpoint

TORCH = pathlib.Path(os.environ.get("FSDP_BUILD", ROOT / "build")) / "torch-venv" / "bin" / "python"
CUDA = "/usr/local/cuda/lib64"


def net(seed=0):
    tp.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3), nn.Linear(3, 1, bias=False))


def optimizer_of(model):
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:], "weight_decay": 0.1}]
    return tp.optim.AdamW(groups, lr=0.02)


def step(model, optimizer, at):
    x = tp.tensor(np.random.default_rng(at).standard_normal((8, 4)).astype(np.float32))
    optimizer.zero_grad()
    loss = (model(x) * model(x)).sum()
    loss.backward()
    optimizer.step()
    return loss.item()


def trained(seed=0):
    model = net(seed)
    optimizer = optimizer_of(model)
    for at in range(3):
        step(model, optimizer, at)
    return model, optimizer


def values(model):
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


def goes_on(model, optimizer):
    """It is where `trained` left off, and stays with it."""
    beside, other = trained()
    for at in range(3, 7):
        mine, its = values(model), values(beside)
        assert list(mine) == list(its)
        for name in its:
            assert mine[name].tobytes() == its[name].tobytes(), name
        assert step(model, optimizer, at) == step(beside, other, at)


def states(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def write_file(path):
    tp.save(states(*trained()), f"{path}.pt")
    return f"{path}.pt"


def write_dcp(path):
    dcp.save(states(*trained()), checkpoint_id=path)
    return path


@pytest.mark.parametrize("write", [write_file, write_dcp])
def test_training_of_tensorplays_goes_on_from_ours(convert, write):
    convert(write("theirs"), "ours", "--to", "sharded", "--ranks", "2")
    model = net(seed=5)
    optimizer = optimizer_of(model)
    assert checkpoint.load("ours", model, optimizer).checkpoint.json["epoch"] == 3
    goes_on(model, optimizer)


@pytest.mark.parametrize("ending", ["pt", "pth"])
def test_training_of_ours_goes_on_from_tensorplays_file(convert, ending):
    checkpoint.save("ours", *trained(), extra={"step": 3})
    convert("ours", f"theirs.{ending}", "--to", "tensorplay")
    saved = tp.load(f"theirs.{ending}")
    assert saved["extra"] == {"step": 3}
    model = net(seed=5)
    optimizer = optimizer_of(model)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optim"])
    goes_on(model, optimizer)


def test_training_of_ours_goes_on_from_tensorplays_folder(convert):
    checkpoint.save("ours", *trained())
    convert("ours", "theirs", "--to", "tensorplay")
    model, _ = trained(seed=5)
    into = {"model": {name: tp.zeros_like(value) for name, value in model.state_dict().items()}}
    into["optim"] = {"state": {"0.weight": {"exp_avg": tp.zeros([6, 4]), "step": tp.tensor(0.0)}}}
    dcp.load(into, checkpoint_id="theirs")
    wanted, optimizer = trained()
    for name, value in values(wanted).items():
        assert into["model"][name].numpy().tobytes() == value.tobytes(), name
    state = optimizer.state_dict()["state"][0]
    for key, value in into["optim"]["state"]["0.weight"].items():
        assert value.numpy().tobytes() == state[key].numpy().tobytes()


def test_mega_there_and_back(run, convert):
    """Its keys are names only, so an optimizer's numbers for parameters are none of it."""
    pytest.importorskip("megatensors", reason="TensorPlay needs it for .mega; ci/test does not install it")
    checkpoint.save("ours", *trained(), extra={"step": 3})
    convert("ours", "theirs.mega")
    convert("theirs.mega", "back", "--to", "sharded", "--ranks", "2")
    model = net(seed=5)
    optimizer = optimizer_of(model)
    assert checkpoint.load("back", model, optimizer).extra == {"step": 3}
    goes_on(model, optimizer)
    assert run("verify", "theirs.mega")[0] == 0


def test_every_dtype_there_and_back(run, convert):
    names = "float64 float32 float16 bfloat16 int8 int16 int32 int64 uint8"
    tensors = {name: tp.arange(6).to(getattr(tp, name)).reshape([2, 3]) for name in names.split()}
    tensors |= {"bool": tp.tensor([True, False]), "none": tp.zeros([0, 3]), "scalar": tp.tensor(2.5)}
    state = libfsdp.StateDict()
    for name, tensor in tensors.items():
        state.add(name, tensor)
    state.tie("again", "float32")
    checkpoint.write("ours", state)
    convert("ours", "theirs.pt", "--to", "tensorplay")
    convert("theirs.pt", "back", "--to", "sharded", "--ranks", "3")
    for path in ("theirs.pt", "back"):
        assert run("compare", "ours", path)[:2] == (
            0,
            "13 tensors in both: 13 equal bit for bit; JSON values are equal\n",
        )
    found = tp.load("theirs.pt")
    assert found["bfloat16"].dtype == tp.bfloat16 and found["again"].data_ptr() == found["float32"].data_ptr()


def test_float8_is_refused_by_name(run):
    state = libfsdp.StateDict()
    state.add("weight", libfsdp.zeros((2, 3), "float8_e4m3fn"))
    checkpoint.write("ours", state)
    code, _, err = run("convert", "ours", "x.pt", "--to", "tensorplay")
    assert code == 2 and "weight: TensorPlay has no float8_e4m3fn" in err and not os.path.exists("x.pt")


def test_torch_and_tensorplay_read_each_others_files(convert, run):
    """By way of torch's own Python."""
    if not TORCH.exists():
        pytest.skip(f"no {TORCH}: ci/test hosts makes it")

    def in_torch(*command):
        env = environment()
        env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [CUDA, env.get("LD_LIBRARY_PATH")]))
        done = subprocess.run([TORCH, *command], env=env, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr

    checkpoint.save("ours", *trained())
    in_torch("-m", "libfsdp.checkpoint", "convert", "ours", "torchs.pt")
    saved = tp.load("torchs.pt")
    model = net(seed=5)
    optimizer = optimizer_of(model)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optim"])
    goes_on(model, optimizer)
    convert("ours", "theirs.pt", "--to", "tensorplay")
    in_torch("-m", "libfsdp.checkpoint", "compare", "torchs.pt", "theirs.pt", "--names", "!optimizer/*")
    code, _, err = run("convert", "ours", "x", "--to", "dcp")
    assert code == 2 and "needs torch" in err
