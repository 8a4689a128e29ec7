"""Training runs of the NumPy host in checkpoints: any number of ranks saves, any other goes on, as if nothing had been."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from test_numpy import batch, net

import libfsdp
from libfsdp import Mesh, StateDict, checkpoint
from libfsdp.numpy import SGD, Adam, Linear, Sequential, fully_shard, softmax_cross_entropy

SAMPLES, BEFORE, AFTER = 24, 3, 3
OPTIMIZERS = ["sgd", "momentum", "adam"]
STRATEGIES = ["full_shard", "shard_grad_op", "no_shard"]
SIZES = ["1", "2", "3", "4", "2x2"]


def optimizer_of(model, kind):
    if kind == "adam":
        return Adam(model.parameters(), 0.05)
    return SGD(model.parameters(), 0.2, momentum=0.9 if kind == "momentum" else 0.0)


def sharded(group, size, strategy, offset=0.0):
    """The model; with an offset, with other values than it would begin with."""
    model = net()
    for parameter in model.parameters():
        parameter.value[...] += offset
    if size == "2x2":
        return fully_shard(model, Mesh(group, {"replicate": 2, "shard": 2}), strategy="hybrid_shard")
    return fully_shard(model, group, strategy=strategy)


def train(group, model, optimizer, steps):
    """The whole batch's losses: each rank has its part of it."""
    losses = []
    for step in steps:
        x, labels = batch(SAMPLES)
        mine = slice(group.rank, None, group.size)
        loss, slope = softmax_cross_entropy(model.forward(x[mine] + 0.01 * step), labels[mine])
        model.backward(slope)
        optimizer.step()
        model.zero_grad()
        total = np.array([loss / group.size])
        group.all_reduce(total)
        losses.append(float(total[0]))
    return losses


def ranks_of(size):
    return 4 if size == "2x2" else int(size)


def saves(group, size, folder):
    """Train, save, and note how it goes on without a break."""
    for strategy in STRATEGIES if size != "2x2" else STRATEGIES[:1]:
        for kind in OPTIMIZERS:
            model = sharded(group, size, strategy)
            optimizer = optimizer_of(model, kind)
            train(group, model, optimizer, range(BEFORE))
            place = pathlib.Path(folder) / f"{size}-{strategy}-{kind}"
            checkpoint.save(place, model, optimizer, extra={"step": BEFORE}, of_rank={"rng": bytes([group.rank] * 5)})
            losses = train(group, model, optimizer, range(BEFORE, BEFORE + AFTER))
            values = {name: value.tolist() for name, value in model.full_parameters().items()}
            if group.rank == 0:
                (place / "expected").write_text(json.dumps([losses, values]))
    group.barrier()


def goes_on(group, size, folder):
    """From every checkpoint there is."""
    for strategy in STRATEGIES if size != "2x2" else STRATEGIES[:1]:
        for place in sorted(pathlib.Path(folder).iterdir()):
            saved_by, saved_strategy, kind = place.name.split("-")
            if saved_strategy != strategy and size != saved_by and strategy != STRATEGIES[0]:
                continue  # each pair of sizes, each pair of strategies, but not all of both
            model = sharded(group, size, strategy, offset=0.5)
            optimizer = optimizer_of(model, kind)
            loaded = checkpoint.load(place, model, optimizer)
            step = loaded.extra["step"]
            assert (loaded.of_rank is not None) == (ranks_of(saved_by) == group.size), place
            if loaded.of_rank:
                assert bytes(loaded.of_rank["rng"].numpy()) == bytes([group.rank] * 5)
            losses = train(group, model, optimizer, range(step, step + AFTER))
            expected_losses, expected = json.loads((place / "expected").read_text())
            exact = saved_by == size and saved_strategy == strategy
            for name, value in model.full_parameters().items():
                wanted = np.array(expected[name])
                assert np.abs(value - wanted).max() <= (0 if exact else 1e-12), (place.name, size, strategy, name)
            assert np.allclose(losses, expected_losses, rtol=0, atol=0 if exact else 1e-12), (place.name, size)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.mark.parametrize("size", SIZES)
def test_training_is_saved(ranks, saved, size):
    ranks(ranks_of(size), saves, size, str(saved), timeout=60)


@pytest.mark.parametrize("size", SIZES)
def test_any_number_of_ranks_goes_on(ranks, saved, size):
    assert len(list(saved.iterdir())) == 3 * 3 * 4 + 3, "the tests above save what this one loads"
    ranks(ranks_of(size), goes_on, size, str(saved), timeout=90)


def test_a_process_without_ranks_reads_what_ranks_have_saved(saved):
    place = saved / "3-full_shard-adam"
    model = net()
    optimizer = Adam(model.parameters(), 0.05)
    for parameter in model.parameters():
        parameter.value[...] = 7
    checkpoint.load(place, model, optimizer)
    with checkpoint.Checkpoint(place) as opened:
        assert opened.info.ranks == 3 and not opened.info.full and opened.info.checksums
        assert len(opened.of_ranks) == 3 and opened.json["extra"] == {"step": BEFORE}
        for parameter in model.parameters():
            assert np.array_equal(opened.read(parameter.name).numpy(), parameter.value)
            half = np.zeros_like(parameter.value[1:])
            offset = (1,) + (0,) * (half.ndim - 1)
            assert np.array_equal(opened.read(parameter.name, half, offset=offset), parameter.value[1:])
            state = opened.read(f"optimizer/exp_avg/{parameter.name}").numpy()
            assert np.array_equal(state, optimizer.state(parameter.name)["exp_avg"])
            assert optimizer.state(parameter.name)["step"] == BEFORE
        opened.verify()


def full_files(group, folder):
    model = sharded(group, str(group.size), "full_shard")
    folder = pathlib.Path(folder)
    checkpoint.save(folder / "one.safetensors", model, full=True)
    checkpoint.save(folder / "many", model, full=True, max_file_bytes=1000)
    whole = model.full_parameters()
    if group.rank == 0:
        for path in ("one.safetensors", "many"):
            with checkpoint.Checkpoint(folder / path) as opened:
                assert opened.info.full and list(opened) == list(whole)
                for name, value in whole.items():
                    assert np.array_equal(opened.read(name).numpy(), value)


def test_whole_tensors_are_files_that_the_safetensors_package_reads(ranks, tmp_path):
    ranks(3, full_files, str(tmp_path))
    safetensors = pytest.importorskip("safetensors.numpy")
    expected = {parameter.name: parameter.value for parameter in net().parameters()}
    for found in (
        safetensors.load_file(tmp_path / "one.safetensors"),
        {
            name: safetensors.load_file(tmp_path / "many" / file)[name]
            for name, file in json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())["weight_map"].items()
        },
    ):
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1


def test_weights_of_others_load_into_a_model(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    values = {parameter.name: np.arange(parameter.value.size, dtype="float32").reshape(parameter.value.shape) for parameter in net().parameters()}
    safetensors.save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = fully_shard(net())
    loaded = checkpoint.load(tmp_path, model)
    assert not loaded.checkpoint.info.checksums and loaded.checkpoint.info.full
    for name, value in model.full_parameters().items():
        assert np.array_equal(value, values[name])


def in_the_background(group, folder):
    model = sharded(group, str(group.size), "full_shard")
    optimizer = optimizer_of(model, "adam")
    train(group, model, optimizer, range(2))
    before = model.full_parameters()
    saving = checkpoint.save(folder, model, optimizer, background=True)
    train(group, model, optimizer, range(2, 5))  # values change at once
    saving.wait(30)
    assert saving.done and saving.progress[0] == saving.progress[1] > 0
    after = model.full_parameters()
    checkpoint.load(folder, model, optimizer)
    for name, value in model.full_parameters().items():
        assert np.array_equal(value, before[name]) and not np.array_equal(value, after[name])
    assert optimizer.state("0.weight")["step"] == 2


@pytest.mark.parametrize("n", [1, 3])
def test_a_save_in_the_background_has_the_values_of_its_call(ranks, tmp_path, n):
    ranks(n, in_the_background, str(tmp_path / "saved"))


def saves_and_ends(group, folder):
    model = sharded(group, str(group.size), "full_shard")
    checkpoint.save(folder, model, background=True)


def test_the_end_of_the_program_waits_for_a_save(ranks, tmp_path):
    ranks(2, saves_and_ends, str(tmp_path / "saved"))
    with checkpoint.Checkpoint(tmp_path / "saved") as opened:
        opened.verify()
        assert opened.info.ranks == 2


def test_names_that_do_not_fit_are_told_and_nothing_is_written(tmp_path):
    state = StateDict()
    state.add("0.weight", np.ones((16, 8), "float32"))
    state.add("other", np.ones(3, "float32"))
    checkpoint.write(tmp_path / "saved", state)
    model = fully_shard(net())
    checkpoint.save(tmp_path / "fits", model)
    before = model.full_parameters()
    with pytest.raises(libfsdp.InvalidArgument, match="'other'"):
        checkpoint.load(tmp_path / "saved", model)
    with pytest.raises(libfsdp.InvalidArgument, match="0.weight.*shape|shape.*0.weight"):
        checkpoint.load(tmp_path / "saved", model, strict=False)
    with pytest.raises(libfsdp.NotFound, match="optimizer"):
        checkpoint.load(tmp_path / "fits", model, SGD(model.parameters(), 0.1))
    with pytest.raises(libfsdp.NotFound, match="nowhere"):
        checkpoint.load(tmp_path / "nowhere", model)
    assert all(np.array_equal(value, before[name]) for name, value in model.full_parameters().items())


def test_options_of_the_optimizer_come_back(tmp_path):
    model = fully_shard(net())
    optimizer = Adam(model.parameters(), 0.25, betas=(0.8, 0.5))
    checkpoint.save(tmp_path / "saved", model, optimizer, extra={"note": "é", "list": [1, 2.5, None]})
    other = SGD(model.parameters(), 0.1, momentum=0.5)
    loaded = checkpoint.load(tmp_path / "saved", model, other)
    assert other.options() == {"lr": 0.25, "momentum": 0.5} and sorted(loaded.unused) == ["betas", "eps"]
    assert loaded.extra == {"note": "é", "list": [1, 2.5, None]}
    again = Adam(model.parameters(), 1.0)
    checkpoint.load(tmp_path / "saved", model, again)
    assert again.options() == {"lr": 0.25, "betas": [0.8, 0.5], "eps": 1e-8}


def test_the_state_of_another_kind_of_optimizer_is_refused(tmp_path):
    model = fully_shard(net())
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    x, labels = batch(12)
    _, slope = softmax_cross_entropy(model.forward(x), labels)
    model.backward(slope)
    optimizer.step()
    checkpoint.save(tmp_path / "saved", model, optimizer)
    before = model.full_parameters()
    with pytest.raises(libfsdp.InvalidArgument, match="SGD.*Adam"):
        checkpoint.load(tmp_path / "saved", model, Adam(model.parameters(), 0.1))
    assert all(np.array_equal(value, before[name]) for name, value in model.full_parameters().items())
    checkpoint.load(tmp_path / "saved", model, SGD(model.parameters(), 0.5, momentum=0.1))


def damaged(path, at):
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))


def test_damage_is_told_with_its_file_and_tensor(tmp_path):
    model = fully_shard(net())
    checkpoint.save(tmp_path / "saved", model)
    [file] = (tmp_path / "saved").glob("rank-*.safetensors")
    damaged(file, -1)
    with pytest.raises(libfsdp.Corrupt) as raised:
        checkpoint.load(tmp_path / "saved", model)
    assert file.name in str(raised.value) and any(repr(p.name) in str(raised.value) for p in model.parameters())
    damaged(file, -1)
    checkpoint.load(tmp_path / "saved", model)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(libfsdp.Corrupt, match=file.name):
        checkpoint.Checkpoint(tmp_path / "saved")
    file.unlink()
    with pytest.raises(libfsdp.FsdpError, match=file.name):
        checkpoint.Checkpoint(tmp_path / "saved")


def test_loading_reports_progress_and_can_be_ended(tmp_path):
    model = fully_shard(net())
    checkpoint.save(tmp_path / "saved", model)
    seen = []
    checkpoint.load(tmp_path / "saved", model, progress=lambda done, total: seen.append((done, total)))
    assert seen and seen[-1][0] == seen[-1][1] > 0 and seen == sorted(seen)

    def enough(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.load(tmp_path / "saved", model, progress=enough)


def test_what_would_come_back_as_something_else_is_refused(tmp_path):
    model = fully_shard(net())
    for extra, place in (({1: 2}, ""), ({"milestones": [{30: 1}]}, r"\.milestones\[0\]"), ({"a": ({None: 1},)}, r"\.a\[0\]")):
        with pytest.raises(libfsdp.InvalidArgument, match=f"extra{place}: .*the key"):
            checkpoint.save(tmp_path / "saved", model, extra=extra)
    for value in (np.ones(1), np.float32(1), {1, 2}, b"x", {"float": "inf"}):
        with pytest.raises(libfsdp.InvalidArgument, match=r"extra\.a\.b: "):
            checkpoint.save(tmp_path / "saved", model, extra={"a": {"b": value}})
    with pytest.raises(libfsdp.InvalidArgument, match="'rng' is a text"):
        checkpoint.save(tmp_path / "saved", model, of_rank={"rng": "text"})
    assert not (tmp_path / "saved").exists()


def test_infinities_come_back(tmp_path):
    model = fully_shard(net())
    extra = {"best": float("inf"), "worst": [-float("inf")], "float": {"float": 2.5}, "large": 2**62 + 1, "text": "inf"}
    checkpoint.save(tmp_path / "saved", model, extra=extra)
    assert checkpoint.load(tmp_path / "saved", model).extra == extra
    checkpoint.save(tmp_path / "saved", model, extra=float("nan"))
    assert np.isnan(checkpoint.load(tmp_path / "saved", model).extra)


def test_paths_are_bytes_and_may_end_with_slashes(tmp_path):
    model = net()
    for path in (f"{tmp_path}/file.safetensors/", os.fsencode(tmp_path) + b"/\xff\xfe.safetensors", f"{tmp_path}/folder//"):
        checkpoint.save(path, model, full=True)
        for again in (path, os.fsdecode(path), pathlib.Path(os.fsdecode(path))):
            assert checkpoint.load(again, model).missing == []
    assert (tmp_path / "file.safetensors").is_file() and (tmp_path / "folder").is_dir()
    with pytest.raises(libfsdp.InvalidArgument, match="zero character"):
        checkpoint.save("a\0b", model)
    with pytest.raises(libfsdp.NotFound):
        checkpoint.load(os.fsencode(tmp_path) + b"/\xff", model)


def plain_copies(group, folder):
    folder = pathlib.Path(folder)
    model = net()
    optimizer = optimizer_of(model, "adam")
    x, labels = batch(8)
    _, slope = softmax_cross_entropy(model.forward(x), labels)
    model.backward(slope)
    optimizer.step()
    checkpoint.save(folder / "saved", model, optimizer, group=group)
    last = model.parameters()[-1].name
    optimizer.state(last)["exp_avg_sq"].flat[0] += group.rank == 2
    with pytest.raises(libfsdp.Mismatch, match=f"the state 'exp_avg_sq' of '{last}', .* rank 2 than on rank 0"):
        checkpoint.save(folder / "no", model, optimizer, group=group)
    model.parameters()[0].value[1, 2] *= -1 if group.rank else 1
    with pytest.raises(libfsdp.Mismatch, match="the parameter '0.weight', .* rank 1 than on rank 0"):
        checkpoint.save(folder / "no", model, group=group, background=True)
    other = net()
    checkpoint.load(folder / "saved", other, group=group)
    group.barrier()
    assert [path.name for path in folder.iterdir()] == ["saved"]


def test_plain_parameters_that_differ_between_ranks_are_not_mixed(ranks, tmp_path):
    ranks(3, plain_copies, str(tmp_path))


def wrong_on_one_rank(group, folder):
    folder = pathlib.Path(folder)
    model = sharded(group, group.size, "full_shard")
    expected = "extra.when: a complex can't be kept" if group.rank == 1 else "rank 1 reported: extra.when: a complex"
    for background in (False, True):
        with pytest.raises(libfsdp.InvalidArgument, match=expected):
            wrong = {"when": 1j if group.rank == 1 else 1}
            checkpoint.save(folder / "no", model, extra=wrong, background=background)
    group.barrier()
    assert not list(folder.iterdir())
    checkpoint.save(folder / "run", model, extra={"when": 2})
    assert checkpoint.load(folder / "run", model).extra == {"when": 2}


def test_what_is_wrong_on_one_rank_is_raised_on_all(ranks, tmp_path):
    ranks(3, wrong_on_one_rank, str(tmp_path))


def test_layers_that_share_an_array_have_one_in_the_checkpoint(tmp_path):
    def shared():
        model = Sequential(Linear(4, 4), Linear(4, 4))
        model.layers[1].params["weight"] = model.layers[0].params["weight"]
        return model

    model, other, apart = shared(), shared(), Sequential(Linear(4, 4), Linear(4, 4))
    model.layers[0].params["weight"][...] = np.arange(16).reshape(4, 4)
    checkpoint.save(tmp_path / "saved", model)
    assert checkpoint.Checkpoint(tmp_path / "saved")["1.weight"].tied_to == "0.weight"
    checkpoint.load(tmp_path / "saved", other)
    assert np.array_equal(other.layers[1].params["weight"], np.arange(16).reshape(4, 4))
    apart.layers[0].params["weight"][...] = 5
    checkpoint.save(tmp_path / "apart", apart)
    with pytest.raises(libfsdp.InvalidArgument, match="'0.weight' and '1.weight' have values of their own"):
        checkpoint.load(tmp_path / "apart", other)
    assert checkpoint.load(tmp_path / "apart", other, strict=False).unexpected == ["1.weight"]
    assert (other.layers[1].params["weight"] == 5).all()


def test_values_under_two_names_are_compared_to_the_last_row(tmp_path):
    rows = 70_000  # more than are read at a time
    values = np.arange(rows * 40, dtype="float32").reshape(rows, 40)

    def model():
        layer = Sequential(Linear(1, 1, bias=False), Linear(1, 1, bias=False))
        layer.layers[0].params["weight"] = layer.layers[1].params["weight"] = np.zeros((rows, 40), "float32")
        return layer

    for last, fits in ((0, True), (1, False)):
        state = StateDict()
        state.add("0.weight", values.copy())
        values[-1, -1] += last
        state.add("1.weight", values)
        checkpoint.write(tmp_path / "x.safetensors", state, full=True)
        loaded = checkpoint.load(tmp_path / "x.safetensors", model(), strict=False)
        assert loaded.unexpected == ([] if fits else ["1.weight"])


def test_a_state_goes_along_where_its_parameter_has_another_dtype_now(tmp_path):
    model = Sequential(Linear(8, 4), Linear(4, 4, dtype="float64"))
    optimizer = Adam(model.parameters(), 0.1)
    for parameter in model.parameters():
        state = {"exp_avg": np.full(parameter.value.shape, 1 / 3, "float32"), "step": 7}
        optimizer.set_state(parameter.name, state | {"exp_avg_sq": np.ones(parameter.value.shape, "float32")})
    optimizer.state("0.bias")["step"] = np.array([2**24 - 1], "float32")  # of no parameter's shape, and a counter
    optimizer.state("0.bias")["factor"] = np.array([0.1], "float32")
    checkpoint.save(tmp_path / "saved", model, optimizer)
    other = Sequential(Linear(8, 4, dtype="float64"), Linear(4, 4, dtype="float64"))
    again = Adam(other.parameters(), 0.1)
    checkpoint.load(tmp_path / "saved", other, again)
    assert again.state("0.weight")["exp_avg"].dtype == np.float64 and again.state("0.weight")["step"] == 7
    assert (again.state("0.weight")["exp_avg"] == np.float32(1 / 3)).all()
    counter, factor = again.state("0.bias")["step"], again.state("0.bias")["factor"]
    assert (counter.dtype, counter.tolist()) == (np.float32, [2**24 - 1])
    assert (factor.dtype, factor.tolist()) == (np.float64, [float(np.float32(0.1))])
    assert again.state("1.weight")["exp_avg"].dtype == np.float32  # as it was beside the same parameter


def test_a_relative_path_is_of_the_folder_where_the_save_began(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    model = fully_shard(net())
    for turn in range(10):  # the thread may be quicker
        monkeypatch.chdir(tmp_path / "here")
        saving = checkpoint.save(f"saved{turn}", model, background=True)
        monkeypatch.chdir(tmp_path / "there")
        saving.wait(30)
        with checkpoint.Checkpoint(tmp_path / "here" / f"saved{turn}") as opened:
            opened.verify()
    assert not any((tmp_path / "there").iterdir())


def test_a_child_says_nothing_of_its_parents_saves(tmp_path):
    program = """if True:
        import os, sys
        from test_numpy import net
        from libfsdp import checkpoint
        from libfsdp.numpy import fully_shard
        saving = checkpoint.save(sys.argv[1], fully_shard(net()), background=True)
        child = os.fork()
        if child:
            assert os.waitpid(child, 0)[1] == 0
            saving.wait()
    """
    here = pathlib.Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "saved")], cwd=here, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    checkpoint.Checkpoint(tmp_path / "saved").verify()
