"""python -m libfsdp.checkpoint without a framework: list, verify, compare and convert, of libfsdp's own checkpoints
and of safetensors files. tests/hosts/test_checkpoint_convert.py has the frameworks'.
"""

import fcntl
import json
import os
import pathlib
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time

import ml_dtypes
import numpy as np
import pytest
from conftest import environment, run_python

import libfsdp
from libfsdp import checkpoint
from libfsdp.checkpoint import table
from libfsdp.checkpoint.__main__ import main
from libfsdp.checkpoint.table import human, parse_bytes

RNG = np.random.default_rng(7)
TENSORS = {
    "embed.weight": RNG.standard_normal((10, 4)).astype(np.float32),
    "half": RNG.standard_normal((5, 3)).astype(ml_dtypes.bfloat16),
    "empty": np.zeros((0, 3), np.float32),
    "steps": np.array(1 << 40, np.int64),
    "mask": np.array([True, False, True]),
    "eighth": np.arange(6).astype(ml_dtypes.float8_e4m3fn),
    "wide": RNG.standard_normal((3, 2)),
    "optimizer/exp_avg/embed.weight": RNG.standard_normal((10, 4)).astype(np.float32),
    "optimizer/exp_avg/half": RNG.standard_normal((5, 3)).astype(np.float32),
}
OPTIMIZER = {
    "type": "AdamW",
    "groups": [{"params": ["embed.weight", "half"], "lr": 0.1, "betas": [0.9, 0.99]}],
    "numbers": {"embed.weight": {"step": {"value": 3.0, "dtype": "float32"}}, "half": {"step": 4}},
}


def save(path, tensors=TENSORS, json={"optimizer": OPTIMIZER, "extra": {"epoch": 3}}, ties=True, rng=None):
    state = libfsdp.StateDict()
    for name, array in tensors.items():
        state.add(name, array.copy(), read_only=True)
        if name == "embed.weight" and ties:
            state.tie("head.weight", name)
    for name, value in json.items():
        state.set_json(name, value)
    if rng is not None:
        state.add("rank/rng", rng, of_rank=True)
    checkpoint.write(path, state)
    return path


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """The command line in this process, in a folder of its own: run(...) gives (code, output, error output)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table, "_EVERY_S", 3600)  # on a slow disk there would be lines of progress

    def go(*arguments):
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return go


def read(path):
    """{name: NumPy array} of a checkpoint."""
    with checkpoint.Checkpoint(path) as opened:
        return {name: opened.read(name).numpy() for name in opened}


def same(found, wanted):
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


def with_tie(tensors):
    wanted = {}
    for name, array in tensors.items():
        wanted[name] = array
        if name == "embed.weight":
            wanted["head.weight"] = array
    return wanted


# ---- list, verify ----------------------------------------------------------------------------------------------------


def test_list_tells_what_there_is(run):
    save("run", rng=np.arange(100, dtype=np.uint8))
    code, out, err = run("list", "run")
    assert code == 0 and err == ""
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert "sharded" in lines["run:"] and "1 rank" in lines["run:"]
    assert lines["embed.weight"].split() == ["embed.weight", "float32", "[10,", "4]", "160", "B", "1"]
    assert "= embed.weight" in lines["head.weight"]
    assert "bfloat16" in lines["half"] and "30 B" in lines["half"]
    assert "rank 0" in lines["rank/rng"] and "100 B" in lines["rank/rng"]
    assert "rank-00000-of-00001" not in out
    assert 'extra: {"epoch": 3}' in out
    assert "rank-00000-of-00001" in run("list", "run", "--parts")[1]


def test_list_for_programs(run):
    save("run", rng=np.arange(3, dtype=np.uint8))
    code, out, _ = run("list", "run", "--json")
    found = json.loads(out)
    assert code == 0 and list(found["tensors"]) == list(with_tie(TENSORS))
    assert found["tensors"]["half"]["dtype"] == "bfloat16" and found["tensors"]["half"]["shape"] == [5, 3]
    assert found["tensors"]["half"]["parts"][0]["bytes"] == 30
    assert found["tensors"]["head.weight"]["tied_to"] == "embed.weight"
    assert found["of_ranks"][0]["name"] == "rank/rng" and found["of_ranks"][0]["rank"] == 0
    assert found["json"] == {"optimizer": OPTIMIZER, "extra": {"epoch": 3}}


def test_names_from_files_do_not_reach_the_terminal_as_they_are(run):
    save("run", {"\x1b[31mred\nline": np.ones(2, np.float32)}, {"\x1b]0;title\x07": 1}, ties=False)
    for arguments in (("list", "run"), ("compare", "run", save("other", {"b": np.ones(1)}, {}, ties=False))):
        out = run(*arguments)[1]
        assert "\x1b" not in out and "\x07" not in out
        assert "\\x1b[31mred\\nline" in out


def test_verify_finds_every_damage(run):
    save("one")
    run("convert", "one", "run", "--to", "sharded", "--ranks", "3")
    assert run("verify", "run")[:2] == (0, "run: 10 tensors, 475 B: all checksums are right\n")
    file = next(pathlib.Path("run").glob("rank-00001*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # of "mask": one byte for each element comes last
    content[-60] ^= 128
    file.write_bytes(content)
    code, out, err = run("verify", "run")
    assert code == 1 and err == ""
    lines = out.splitlines()
    assert len(lines) == 3 and all(line.startswith("damaged: ") and "rank-00001" in line for line in lines[:2])
    assert "damaged in 2 places" in lines[2]
    file.unlink()
    code, _, err = run("verify", "run")
    assert code == 1 and "rank-00001" in err and len(err.splitlines()) == 1


# ---- compare ---------------------------------------------------------------------------------------------------------


def test_compare_equal(run):
    save("a")
    save("b")
    code, out, _ = run("compare", "a", "b")
    assert (code, out) == (0, "10 tensors in both: 10 equal bit for bit; JSON values are equal\n")


def test_compare_tells_all_differences(run):
    a = dict(TENSORS, x=np.array([1.0, 2.0, np.nan, 4.0], np.float32), n=np.array([1, 5], np.int64), shape=np.zeros(3))
    b = dict(TENSORS, x=np.array([1.0, 2.5, np.nan, 4.0], np.float32), n=np.array([1, 3], np.int64), shape=np.zeros(4))
    b["half"] = a["half"].copy()
    b["half"][2, 1] = a["half"][2, 1] + 1
    b["wide"] = a["wide"].astype(np.float32)
    del a["mask"]
    save("a", a)
    save("b", b, {"optimizer": dict(OPTIMIZER, type="SGD"), "new": 1})
    code, out, _ = run("compare", "a", "b")
    lines = [line.split() for line in out.splitlines()]
    assert code == 1
    assert ["mask", "bool", "[3]"] in lines and ["only", "in", "b"] in lines
    assert ["shape", "float64", "[3],", "float64", "[4]"] in lines
    assert ["wide", "float64", "[3,", "2],", "float32", "[3,", "2]"] in lines
    assert ["x", "4", "1", "0.5", "0.2"] in lines  # elements, of which differ, |a-b|, relative
    assert ["n", "2", "1", "2", "0.4"] in lines
    apart = abs(float(a["half"][2, 1]) - float(b["half"][2, 1]))
    assert ["half", "15", "1", f"{apart:.3g}"] in [line[:4] for line in lines]
    rounding = np.abs(TENSORS["wide"] - TENSORS["wide"].astype(np.float32)).max()
    assert ["wide", "6", "6", f"{rounding:.3g}"] in [line[:4] for line in lines]
    assert ["optimizer.type", "AdamW,", "SGD"] in lines
    assert ["extra", "only", "in", "the", "first"] in lines and ["new", "only", "in", "the", "second"] in lines
    assert out.splitlines()[-1].startswith(
        "12 tensors in both: 7 equal bit for bit; 4 of other values (largest difference 2, in n)"
    )
    assert run("compare", "a", "b", "--names", "optimizer/*", "--names", "steps")[0] == 1  # JSON still differs
    save("c", TENSORS, {"optimizer": OPTIMIZER})
    for kind, same in (("SGD", False), (None, True)):  # other formats don't say which optimizer it was
        shutil.rmtree("b")
        save("b", TENSORS, {"optimizer": dict(OPTIMIZER, type=kind)})
        assert (run("compare", "c", "b")[0] == 0) is same


def test_compare_bits_that_mean_the_same(run):
    save("a", {"x": np.array([0.0, 1.0], np.float32)}, {}, ties=False)
    save("b", {"x": np.array([-0.0, 1.0], np.float32)}, {}, ties=False)
    code, out, _ = run("compare", "a", "b")
    assert code == 1 and ["x", "2", "1", "0", "0"] in [line.split() for line in out.splitlines()]


def test_compare_nan_on_one_side(run):
    save("a", {"x": np.array([np.nan, 1.0], np.float32)}, {}, ties=False)
    save("b", {"x": np.array([5.0, 1.0], np.float32)}, {}, ties=False)
    assert ["x", "2", "1", "inf", "inf"] in [line.split() for line in run("compare", "a", "b")[1].splitlines()]


def test_compare_whole_numbers_that_floats_can_not_tell_apart(run):
    big = 1 << 62
    pairs = {
        "signed": (np.array([big, -big, 7], np.int64), np.array([big + 3, -big - 1, 7], np.int64)),
        "far": (np.array([-big - 1, 5], np.int64), np.array([big, 5], np.int64)),
        "unsigned": (np.array([(1 << 63) + 1], np.uint64), np.array([1 << 63], np.uint64)),
        "mixed": (np.array([big], np.int64), np.array([big + 2], np.uint64)),
        "small": (np.array([250, 3], np.uint8), np.array([3, 250], np.uint8)),
    }
    for path, index in (("a", 0), ("b", 1)):
        save(path, {name: pair[index] for name, pair in pairs.items()}, {}, ties=False)
    code, out, _ = run("compare", "a", "b")
    cells = {line.split()[0]: line.split()[1:4] for line in out.splitlines() if line.split()[0] in pairs}
    assert code == 1 and cells == {
        "signed": ["3", "2", "3"],
        "far": ["2", "1", f"{2.0**63:.3g}"],
        "unsigned": ["1", "1", "1"],
        "mixed": ["1", "1", "2"],
        "small": ["2", "2", "247"],
    }


@pytest.mark.parametrize(
    "options, code, differ",
    [
        ((), 1, {"near": 2, "edge": 1, "odd": 1, "low": 1}),
        (("--rtol", "1e-3"), 1, {"near": 1, "odd": 1}),  # of 2000 that is 2, of 0 nothing
        (("--rtol", "1e-3", "--atol", "0.5"), 1, {"odd": 1}),
        (("--rtol", "1e-3", "--atol", "0.5", "--names", "!odd"), 0, {}),
        (("--atol", "0.49", "--names", "[nl]*"), 1, {"near": 2}),
        (("--rtol", "0", "--names", "same*"), 0, {}),
        (("--names", "same"), 1, {}),  # the dtype
    ],
)
def test_compare_with_a_tolerance(run, options, code, differ):
    nan, inf = np.nan, np.inf
    pairs = {
        "near": (np.array([2000, 0, 7], np.float32), np.array([2001.5, 0.5, 7], np.float32)),
        "edge": (np.array([1.0, 3.0]), np.array([1.0009, 3.0])),
        "odd": (np.array([nan, inf, -inf, inf], np.float32), np.array([nan, inf, -inf, 1e38], np.float32)),
        "low": (np.array([1.0, 3.0], ml_dtypes.bfloat16), np.array([1.0, 3.002], np.float32)),
        "same": (np.array([1.0, nan], ml_dtypes.bfloat16), np.array([1.0, nan])),
        "same bits": (np.arange(3), np.arange(3)),
    }
    for path, index in (("a", 0), ("b", 1)):
        save(path, {name: pair[index] for name, pair in pairs.items()}, {}, ties=False)
    found, out, _ = run("compare", "a", "b", *options)
    rows = out.partition("values that differ\n")[2].splitlines()
    assert found == code and {line.split()[0]: int(line.split()[2]) for line in rows[1:-1]} == differ
    if options == ("--names", "same"):
        assert "0 equal bit for bit; 1 of the same values in another dtype; JSON" in out
    if code == 0:
        assert "within the tolerance; JSON values are equal" in out
    assert "tolerance" in run("compare", "a", "b", "--atol", "-1")[2]


def test_compare_by_names(run):
    save("a")
    save("b", dict(TENSORS, half=np.zeros((5, 3), ml_dtypes.bfloat16)))
    assert run("compare", "a", "b")[0] == 1
    assert run("compare", "a", "b", "--names", "!half")[0] == 0
    assert run("compare", "a", "b", "--names", "[es]*")[0] == 0
    code, _, err = run("compare", "a", "b", "--names", "nothing*")
    assert code == 2 and "nothing" not in err.partition(":")[0] and "none of a's 10 names" in err


# ---- convert ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_there_and_back(run, ranks):
    save("one")
    assert run("convert", "one", "many", "--to", "sharded", "--ranks", ranks) == (
        0,
        "many: 10 tensors (1 of them tied to another), 475 B, from one (libfsdp checkpoint, sharded, written by 1 rank)\n",
        "",
    )
    assert len(list(pathlib.Path("many").glob("rank-*"))) == ranks
    assert checkpoint.Checkpoint("many").info.ranks == ranks
    for src, dst, *more in (
        ("many", "full.safetensors"),
        ("full.safetensors", "folder", "--to", "full", "--max-file-size", "1kB"),
        ("folder", "again", "--to", "sharded", "--ranks", "3"),
    ):
        assert run("convert", src, dst, *more)[0] == 0
    assert pathlib.Path("folder/model.safetensors.index.json").exists()
    for path in ("many", "full.safetensors", "folder", "again"):
        same(read(path), with_tie(TENSORS))
        with checkpoint.Checkpoint(path) as opened:
            assert opened["head.weight"].tied_to == "embed.weight"
            assert opened.json == {"optimizer": OPTIMIZER, "extra": {"epoch": 3}}
        assert run("verify", path)[0] == 0
    assert sorted(os.listdir()) == ["again", "folder", "full.safetensors", "many", "one"]


def test_ranks_cut_the_first_dimension(run):
    save("one")
    run("convert", "one", "many", "--to", "sharded", "--ranks", 3)
    with checkpoint.Checkpoint("many") as opened:
        parts = [(part.offset, part.length) for part in opened.parts("embed.weight")]
        assert sorted(parts) == [((0, 0), (4, 4)), ((4, 0), (4, 4)), ((8, 0), (2, 4))]
        assert {part.file[:10] for part in opened.parts("half")} == {"rank-00000", "rank-00001", "rank-00002"}


def test_whats_of_ranks(run):
    save("one", rng=np.arange(9, dtype=np.uint8))
    code, _, err = run("convert", "one", "same", "--to", "sharded")
    assert (code, err) == (0, "")
    with checkpoint.Checkpoint("same") as opened:
        assert opened.read("rank/rng", rank=0).numpy().tolist() == list(range(9))
    for dst, *more in (("two", "--to", "sharded", "--ranks", "2"), ("full.safetensors",)):
        code, _, err = run("convert", "one", dst, *more)
        assert code == 0 and err.startswith("libfsdp.checkpoint: left out: ") and "rank/rng" in err


def test_dtype_and_names(run):
    save("one")
    run("convert", "one", "small.safetensors", "--dtype", "bfloat16", "--names", "!optimizer/*", "--names", "!embed*")
    with checkpoint.Checkpoint("small.safetensors") as opened:
        assert list(opened) == ["head.weight", "half", "empty", "steps", "mask", "eighth", "wide"]
        assert opened["head.weight"].tied_to is None  # what it was tied to is left out
        assert list(opened.json) == ["extra"]
        dtypes = {name: entry.dtype for name, entry in opened.items()}
    floats = ("head.weight", "half", "empty", "eighth", "wide")
    assert dtypes == dict.fromkeys(floats, "bfloat16") | {"steps": "int64", "mask": "bool"}
    found = read("small.safetensors")
    for name, source in (("head.weight", "embed.weight"), ("wide", "wide"), ("eighth", "eighth")):
        assert found[name].tobytes() == TENSORS[source].astype(np.float32).astype(ml_dtypes.bfloat16).tobytes()
    run("convert", "one", "some", "--to", "sharded", "--dtype", "float16", "--names", "*half")
    found = read("some")
    assert list(found) == ["half", "optimizer/exp_avg/half"]
    assert found["half"].dtype == np.float16 and found["optimizer/exp_avg/half"].dtype == np.float32
    with checkpoint.Checkpoint("some") as opened:  # of the optimizer, what is about these
        assert opened.json["optimizer"]["groups"] == [{"params": ["half"], "lr": 0.1, "betas": [0.9, 0.99]}]
        assert opened.json["optimizer"]["numbers"] == {"half": {"step": 4}}


def test_other_safetensors_files(run):
    numpy_files = pytest.importorskip("safetensors.numpy")
    tensors = {name: TENSORS[name] for name in ("embed.weight", "half", "empty", "steps", "mask", "wide")}
    os.mkdir("theirs")
    numpy_files.save_file(tensors, "theirs/model.safetensors")
    for src, dst, *more in (("theirs", "ours", "--to", "sharded", "--ranks", "2"), ("ours", "back.safetensors")):
        assert run("convert", src, dst, *more)[0] == 0
    found = numpy_files.load_file("back.safetensors")
    same({name: found[name] for name in tensors}, tensors)
    assert "not written by libfsdp" in run("list", "theirs")[1]
    assert "there are no checksums in it" in run("verify", "theirs")[1]


def test_what_belongs_to_no_checkpoint_is_said(run):
    """Notes in the headers of other programs' files, and files beside them."""
    head = json.dumps(
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "__metadata__": {"format": "pt", "trigger": "\x1b[31m" + "x" * 50},
        }
    ).encode()
    os.mkdir("hf")
    file = len(head).to_bytes(8, "little") + head + np.array([1.5, 2.5], np.float32).tobytes()
    pathlib.Path("hf/model.safetensors").write_bytes(file)
    pathlib.Path("hf/config.json").write_text("{}")
    for path in ("hf", "hf/model.safetensors"):
        wanted = ["'trigger' (\\x1b[31m" + "x" * 35 + "...): a note in the file's header"]
        assert "has no place in libfsdp's checkpoints: " + wanted[0] in run("list", path)[1].splitlines()
        wanted += ["config.json in hf: no part of the checkpoint"] if path == "hf" else []
        code, _, err = run("convert", path, "out.safetensors", "--force")
        assert (code, err.splitlines()) == (0, [f"libfsdp.checkpoint: left out: {line}" for line in wanted])


# ---- What is there already -------------------------------------------------------------------------------------------


def test_a_target_is_replaced_with_force_only(run):
    save("one")
    save("two", {"x": np.ones(3)}, {}, ties=False)
    for dst, *to in (("out", "--to", "sharded"), ("out.safetensors",)):
        assert run("convert", "one", dst, *to)[0] == 0
        code, _, err = run("convert", "two", dst, *to)
        assert code == 2 and "--force" in err
        same(read(dst), with_tie(TENSORS))
        assert run("convert", "two", dst, *to, "--force")[0] == 0
        assert list(read(dst)) == ["x"]
    assert run("convert", "out", "out", "--to", "full", "--force")[0] == 0  # itself, as another kind
    assert list(read("out")) == ["x"] and not os.path.exists("out/manifest.json")
    assert sorted(os.listdir()) == ["one", "out", "out.safetensors", "two"]


def test_what_is_no_checkpoint_is_never_replaced(run):
    save("one")
    os.mkdir("thesis")
    pathlib.Path("thesis/chapter1").write_text("It was")
    pathlib.Path("notes.safetensors").write_text("notes")
    save("run")
    pathlib.Path("run/README").write_text("by hand")
    for dst, *to in (("thesis", "--to", "full"), ("run", "--to", "full"), ("notes.txt", "--to", "full")):
        if dst == "notes.txt":
            pathlib.Path(dst).write_text("notes")
        code, _, err = run("convert", "one", dst, *to, "--force")
        assert code == 2 and "another path" in err, dst
    assert pathlib.Path("thesis/chapter1").read_text() == "It was"
    assert pathlib.Path("run/README").read_text() == "by hand" and os.path.exists("run/manifest.json")


def test_a_failure_leaves_the_earlier_target(run):
    save("one")
    save("broken")
    run("convert", "one", "out.safetensors")
    file = next(pathlib.Path("broken").glob("rank-*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    code, out, err = run("convert", "broken", "out.safetensors", "--force")
    assert code == 1 and out == "" and "damaged" in err
    same(read("out.safetensors"), with_tie(TENSORS))
    assert sorted(os.listdir()) == ["broken", "one", "out.safetensors"]
    assert run("convert", "broken", "new/deep/out.safetensors")[0] == 1
    assert sorted(os.listdir()) == ["broken", "one", "out.safetensors"]  # nor the folders that were made for it


def test_killed_at_any_time_there_is_no_half_target(tmp_path):
    save(tmp_path / "one", {f"x{i}": np.full((256, 1024), i, np.float32) for i in range(32)}, {}, ties=False)
    for delay in (0.3, 0.4, 0.5, 0.6):
        command = [
            sys.executable,
            "-m",
            "libfsdp.checkpoint",
            "convert",
            "one",
            "out",
            "--to",
            "sharded",
            "--ranks",
            "3",
        ]
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if (tmp_path / "out").exists():
            with checkpoint.Checkpoint(tmp_path / "out") as opened:
                opened.verify()
            break


def test_another_save_into_the_folder_goes_on_meanwhile(run):
    save("one")
    folder = os.open(".", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # as a save does that writes a file there
        assert run("convert", "one", "out.safetensors")[0] == 0
    finally:
        os.close(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_conversion_leaves_nothing(tmp_path, number):
    save(tmp_path / "one", {f"x{i}": np.full((512, 1024), i, np.float32) for i in range(64)}, {}, ties=False)
    command = [sys.executable, "-m", "libfsdp.checkpoint", "convert", "one", "out", "--to", "sharded", "--ranks", "3"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 20
        while not list(tmp_path.glob(".converting-*/*")) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(number)
        err = process.communicate(timeout=20)[1]
    if process.returncode:  # else it was quicker
        assert process.returncode == 2 and err == "libfsdp.checkpoint: interrupted; nothing was changed\n"
        assert os.listdir(tmp_path) == ["one"]


# ---- The command line itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("list", "nowhere"), "nowhere: no such file or folder"),
        (("list", "."), "no checkpoint is there"),
        (("convert", "one", "x"), "--to: give one of sharded, full, dcp, torch, tensorplay"),
        (("convert", "one", "x.safetensors", "--to", "sharded"), "libfsdp's folder"),
        (("convert", "one", "x.safetensors", "--ranks", "2"), "--ranks: goes with --to sharded"),
        (("convert", "one", "x.safetensors", "--max-file-size", "5GB"), "--max-file-size"),
        (("convert", "one", "x", "--to", "full", "--max-file-size", "five"), "'five' is no size"),
        (("convert", "one", "x", "--to", "sharded", "--ranks", "0"), "'0' is not a number of ranks"),
        (("convert", "one", "x", "--to", "sharded", "--dtype", "int8"), "int8"),
        (("convert", "one", "x", "--to", "sharded", "--names", "zzz"), "--names: none of one's 10 names matches"),
        (("convert", "nowhere", "x", "--to", "full"), "nowhere: no such file or folder"),
        (("convert", "one", "one/manifest.json/x.safetensors"), "one/manifest.json: is a file"),
        (("list", "one/manifest.json/x"), "one/manifest.json/x: no such file or folder"),
        (("list", ""), "'': no such file or folder"),
        ((), "COMMAND"),
    ],
)
def test_what_can_not_be_done_is_said_in_a_sentence(run, arguments, message):
    save("one")
    code, out, err = run(*arguments)
    assert code == 2 and out == ""
    assert message in err.splitlines()[-1]
    assert os.listdir() == ["one"]


def test_files_that_are_no_checkpoints(run):
    for name, content in (("a.pt", b"not a pickle"), ("b", b"\x00" * 100), ("c.safetensors", b"short"), ("d.bin", b"")):
        pathlib.Path(name).write_bytes(content)
        code, out, err = run("list", name)
        assert code in (1, 2) and out == "" and name in err and len(err.splitlines()) == 1


def test_nothing_is_read_from_a_pipe(run):
    os.mkfifo("pipe")
    code, _, err = run("list", "pipe")
    assert code == 2 and err == "libfsdp.checkpoint: pipe: is neither a file nor a folder\n"


@pytest.mark.parametrize("closed, code", [("2>&-", 0), (">&-", 0), (">/dev/full", 2)])
def test_without_an_output(tmp_path, closed, code):
    save(tmp_path / "one")
    script = f"{sys.executable} -m libfsdp.checkpoint convert one out.safetensors {closed}"
    options = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True, "timeout": 30}
    done = subprocess.run(["sh", "-c", script], check=False, **options)
    assert done.returncode == code and (tmp_path / "out.safetensors").exists()
    assert done.stderr == ("libfsdp.checkpoint: the output: No space left on device\n" if code else "")
    assert done.stdout == "" or closed == "2>&-"


def test_the_program_itself(tmp_path):
    save(tmp_path / "one")
    done = run_python("-m", "libfsdp.checkpoint", "list", tmp_path / "one")
    assert done.returncode == 0 and "embed.weight" in done.stdout
    done = run_python("-m", "libfsdp.checkpoint", "--help")
    assert done.returncode == 0 and "examples:" in done.stdout
    done = run_python("-m", "libfsdp.checkpoint", "verify", tmp_path / "two")
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_files_are_called_by_their_targets_names(tmp_path):
    save(tmp_path / "one", {"x": np.ones(100_000, np.float32)}, {}, ties=False)
    script = f"ulimit -f 10; exec {sys.executable} -m libfsdp.checkpoint convert one out.safetensors"
    options = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True, "timeout": 30}
    done = subprocess.run(["sh", "-c", script], check=False, **options)
    assert done.returncode == 2 and "out.safetensors" in done.stderr and ".converting" not in done.stderr
    assert len(done.stderr.splitlines()) == 1 and os.listdir(tmp_path) == ["one"]


def test_without_the_library(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"")
    command = ("-m", "libfsdp.checkpoint", "list", tmp_path / "x.safetensors")
    done = run_python(*command, env=environment(FSDP_LIBRARY="/nowhere"))
    assert done.returncode == 2 and "/nowhere" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("columns", [0, 200, 60, 20])  # 0: a terminal that does not say
def test_a_bar_on_a_terminal_only(tmp_path, columns):
    save(tmp_path / "one", {f"x{i}": np.full((512, 512), i, np.float32) for i in range(20)}, {}, ties=False)
    command = [sys.executable, "-m", "libfsdp.checkpoint", "convert", "one", "out", "--to", "sharded"]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=theirs, stdout=subprocess.PIPE) as process:
        os.close(theirs)
        shown = b""
        try:
            while block := os.read(ours, 4096):
                shown += block
        except OSError:  # the other end is closed
            pass
        os.close(ours)
        assert process.stdout.read().startswith(b"out: 20 tensors, 21 MB")
    lines = shown.split(b"\r")
    wide = columns in (0, 200)
    assert (b"\rreading [##" in shown and b"MB of 21 MB" in shown) if wide else b"\rreading" in shown
    assert max(map(len, lines)) < (columns or 100)  # else it would go on in the next line, and not be drawn over
    assert shown.endswith(b" \r")  # wiped
    done = run_python("-m", "libfsdp.checkpoint", "verify", tmp_path / "out")
    assert done.returncode == 0 and "\r" not in done.stderr


def test_units():
    for n, text in (
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (12_345_678, "12.3 MB"),
        (999_600_000, "1 GB"),
        (5 * 10**12, "5 TB"),
    ):
        assert human(n) == text
    for text, n in (("5GB", 5 * 10**9), ("512 MiB", 512 << 20), ("1000000", 10**6), ("1.5kb", 1500), ("7 B", 7)):
        assert parse_bytes(text) == n
    for text in ("", "GB", "-1", "0", "5 parsecs", "0.1B"):
        with pytest.raises(ValueError, match="is no size"):
            parse_bytes(text)
