"""python -m libfsdp.run: what a rank sees, what comes out, and that nothing stays."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from conftest import environment, launch, run_python

# Each rank writes its process number and goes on: tests look whether those processes are still there.
SLEEPER = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "300"])
with open(os.path.join(sys.argv[1], "pids." + os.environ["RANK"] + ".new"), "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(file.name, file.name[:-4])
time.sleep(300)
"""


def script(folder, text, name="script.py"):
    path = folder / name
    path.write_text(text)
    return path


def state(pid):
    """The process's state letter, None when there is none. A zombie that nobody reaped counts as gone: in a container
    without an init process, orphans stay that way."""
    try:
        letter = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if letter == "Z" else letter


def wait_for(condition, what, seconds=10):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        result = condition()
        if result:
            return result
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what}")


def start(tmp_path, *options, n=2):
    """A job of sleepers, and the processes of its ranks and their children once they run."""
    command = [sys.executable, "-m", "libfsdp.run", "-n", str(n), *options, script(tmp_path, SLEEPER), tmp_path]
    launcher = subprocess.Popen(
        list(map(str, command)), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )

    def all_pids():
        files = [tmp_path / f"pids.{rank}" for rank in range(n)]
        return all(map(pathlib.Path.exists, files)) and [int(pid) for file in files for pid in file.read_text().split()]

    try:
        return launcher, wait_for(all_pids, "ranks start")
    except BaseException:
        launcher.terminate()
        launcher.communicate()
        raise


def assert_gone(pids):
    wait_for(lambda: not any(map(state, pids)), f"processes {pids} end", seconds=5)


def test_ranks_get_their_variables(tmp_path):
    names = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "FSDP_JOB_KEY",
        "OMP_NUM_THREADS",
    ]
    text = f"import json, os, sys; print(json.dumps([[os.environ[n] for n in {names}], sys.argv[1:]]))"
    env = environment()
    del env["OMP_NUM_THREADS"]
    env.pop("FSDP_JOB_KEY", None)
    done = launch(3, script(tmp_path, text), "--a", "b c", "-n", env=env)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert sorted(lines) == ["[0]", "[1]", "[2]"]
    seen = [json.loads(lines[f"[{rank}]"]) for rank in range(3)]
    for rank, (values, arguments) in enumerate(seen):
        assert arguments == ["--a", "b c", "-n"]
        assert values[:5] == [str(rank), str(rank), "3", "3", "127.0.0.1"]
        assert values[5:] == seen[0][0][5:]
    port, key, threads = seen[0][0][5:]
    assert 1024 <= int(port) < 65536
    assert len(key) >= 32
    assert int(threads) == max(1, len(os.sched_getaffinity(0)) // 3)
    assert done.stderr.count("OMP_NUM_THREADS") == 1


def test_two_jobs_have_different_keys_and_a_given_one_is_kept(tmp_path):
    text = "import os; print(os.environ['FSDP_JOB_KEY'], os.environ['OMP_NUM_THREADS'])"
    env = environment(OMP_NUM_THREADS="7")
    env.pop("FSDP_JOB_KEY", None)
    path = script(tmp_path, text)
    keys = [launch(1, path, env=env).stdout.split()[0] for _ in range(2)]
    assert keys[0] != keys[1]
    given = launch(2, path, env=env | {"FSDP_JOB_KEY": "mine"})
    assert sorted(given.stdout.splitlines()) == ["[0] mine 7", "[1] mine 7"]
    assert "OMP_NUM_THREADS" not in given.stderr


def test_lines_come_whole_and_on_their_own_stream(tmp_path):
    text = """
import os, sys
rank = os.environ["RANK"]
for line in range(300):
    sys.stdout.write(f"{rank}:{line:03}:" + "x" * 200 + "\\n")
print("to stderr", file=sys.stderr)
sys.stdout.write("no newline")
"""
    done = launch(2, script(tmp_path, text))
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    for rank in range(2):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] {rank}:{line:03}:" + "x" * 200 for line in range(300)] + [f"[{rank}] no newline"]
    assert len(lines) == 602
    assert sorted(line for line in done.stderr.splitlines() if "to stderr" in line) == ["[0] to stderr", "[1] to stderr"]


def test_lines_come_at_once(tmp_path):
    path = script(tmp_path, "import time; print('ready'); time.sleep(300)")
    command = [sys.executable, "-m", "libfsdp.run", "-n", "1", "--prefix", str(path)]
    env = environment()
    env.pop("PYTHONUNBUFFERED", None)
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as launcher:
        try:
            assert launcher.stdout.readline() == "[0] ready\n"
        finally:
            launcher.terminate()


def test_without_prefix_ranks_write_as_they_are(tmp_path):
    path = script(tmp_path, "import sys; sys.stdout.write('a\\rb'); sys.stdout.flush()")
    done = launch(1, path, options=["--no-prefix"])
    assert done.stdout == "a\nb"  # as text mode reads it


def test_modules_and_other_programs():
    assert launch(1, "-m", "platform").returncode == 0
    done = launch(2, "sh", "-c", 'echo "$RANK of $WORLD_SIZE"', options=["--no-python"])
    assert sorted(done.stdout.splitlines()) == ["[0] 0 of 2", "[1] 1 of 2"]


def test_input_goes_to_rank_0_when_asked(tmp_path):
    path = script(tmp_path, "import sys; print(repr(sys.stdin.read()))")
    source = tmp_path / "input"
    source.write_text("some words")
    for options, expected in ((["--stdin"], ["[0] 'some words'", "[1] ''"]), ([], ["[0] ''", "[1] ''"])):
        with open(source) as stdin:
            done = launch(2, path, options=options, stdin=stdin)
        assert sorted(done.stdout.splitlines()) == expected


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["-n", "0", "x.py"], "-n"),
        (["-n", "2", "nosuch.py"], "nosuch.py"),
        (["-n", "2"], "program"),
        (["x.py"], "-n"),
        (["-n", "1", "--port", "70000", "--no-python", "true"], "--port"),
        (["-n", "1", "--grace", "-1", "--no-python", "true"], "--grace"),
    ],
)
def test_bad_usage_is_said(arguments, says):
    done = run_python("-m", "libfsdp.run", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_that_does_not_exist():
    done = launch(2, "/no/such/program", options=["--no-python"])
    assert done.returncode == 127
    assert "/no/such/program" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_first_failure_ends_all_and_gives_the_code(tmp_path):
    text = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "300"])
print(os.getpid(), child.pid)
time.sleep(0.5)
if os.environ["RANK"] == "1":
    sys.exit(7)
time.sleep(300)
"""
    begin = time.monotonic()
    done = launch(3, script(tmp_path, text))
    assert done.returncode == 7
    assert time.monotonic() - begin < 8
    assert "rank 1" in done.stderr and "code 7" in done.stderr
    pids = [int(word) for line in done.stdout.splitlines() for word in line.split()[1:]]
    assert len(pids) == 6
    assert not any(map(state, pids))


def test_a_signal_that_ended_a_rank_is_named():
    done = launch(2, "sh", "-c", '[ "$RANK" = 0 ] && kill -SEGV $$; sleep 300', options=["--no-python"])
    assert done.returncode == 128 + signal.SIGSEGV
    assert "rank 0" in done.stderr and "SIGSEGV" in done.stderr


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path):
    text = """
import os, signal, sys, time
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf")
    time.sleep(300)
time.sleep(1)
sys.exit(3)
"""
    begin = time.monotonic()
    done = launch(2, script(tmp_path, text), options=["--grace", "0.5"])
    assert done.returncode == 3
    assert "[0] deaf" in done.stdout
    assert time.monotonic() - begin < 6


def test_what_a_rank_leaves_running_is_ended():
    done = launch(1, "sh", "-c", "sleep 300 & echo $!", options=["--no-python", "--prefix"])
    assert done.returncode == 0
    assert_gone([int(done.stdout.split()[1])])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_the_ranks_and_end_the_job(tmp_path, number):
    launcher, pids = start(tmp_path)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=10)
    assert launcher.returncode == 128 + number, (out, err)
    assert_gone(pids)


def test_nothing_outlives_a_killed_launcher(tmp_path):
    launcher, pids = start(tmp_path)
    launcher.kill()
    launcher.communicate()
    assert_gone(pids)


def test_ranks_die_with_the_launcher_even_without_its_guard(tmp_path):
    launcher, pids = start(tmp_path)
    ranks, their_children = pids[0::2], pids[1::2]
    try:
        children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        (guard,) = set(map(int, children)) - set(ranks)
        os.kill(guard, signal.SIGKILL)
        launcher.kill()
        assert_gone([guard, *ranks])
    finally:
        launcher.kill()
        for pid in their_children:
            os.kill(pid, signal.SIGKILL)
        launcher.communicate()


def test_a_closed_output_ends_the_job(tmp_path):
    path = script(tmp_path, "while True: print('x' * 1000)")
    command = f"{sys.executable} -m libfsdp.run -n 2 {path} | head -c 10; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], env=environment(), capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in done.stderr


def test_works_where_the_library_is_not():
    done = launch(1, "true", options=["--no-python"], env=environment(FSDP_LIBRARY="/no/such/libfsdp.so"))
    assert done.returncode == 0, done.stderr


CAUSE = """
import os, sys, time
if os.environ["RANK"] == "1":
    time.sleep(0.3)
    raise ValueError("the cause")
sys.exit(f"Traceback (most recent call last):\\n  ...\\n{sys.argv[1]}: rank 1 ended")
"""


@pytest.mark.parametrize(
    "consequence",
    [
        "libfsdp.errors.Aborted",
        "libfsdp.errors.PeerLost",
        "[rank0]: [rank0]: libfsdp.torch.errors.Aborted",
        "libfsdp.tensorplay.errors.PeerLost",
    ],
)
def test_the_rank_that_failed_first_is_named_and_not_one_that_failed_because_of_it(tmp_path, consequence):
    done = launch(3, script(tmp_path, CAUSE), consequence)
    said = [line for line in done.stderr.splitlines() if line.startswith("libfsdp.run: rank")]
    assert len(said) == 1 and said[0].startswith("libfsdp.run: rank 1 ")


def test_a_consequence_without_a_cause_is_named_itself(tmp_path):
    text = CAUSE.replace("time.sleep(0.3)", "time.sleep(30)")
    begin = time.monotonic()
    done = launch(2, script(tmp_path, text), "libfsdp.errors.PeerLost")
    assert done.returncode == 1 and "libfsdp.run: rank 0 " in done.stderr
    assert time.monotonic() - begin < 8
