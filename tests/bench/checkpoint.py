"""Saving and loading a checkpoint of 2 ranks, beside a plain write and read of the same bytes, safetensors.torch (each
rank its shards in a file of its own) and torch's distributed checkpoints (DCP). Everything that is written is also synced
to the disk; what is read is in the page cache. And the memory that a save and a load take beside the shards.
"""

import os
import shutil
import sys
import tempfile

import bench
from bench import HERE, MIB, Contender, Fleet, Peak, Row, pss

RANKS = 2


def parse():
    options = bench.parser(__doc__)
    options.add_argument("--mib", type=int, default=256, help="MiB of all shards together (256)")
    options.add_argument("--folder", metavar="DIR", help="where files are written: a folder on the disk to measure")
    options.add_argument("--rounds", type=int, help="for each row, instead of 9")
    return options.parse_args()


def suite(options, report):
    rounds = options.rounds or (3 if options.quick else 9)
    asked = (options.mib // 8 if options.quick else options.mib) * MIB
    layer = 4 * (12 * 1024 * 1024 + 5 * 1024) if asked >= 64 * MIB else 4 * (12 * 256 * 256 + 5 * 256)
    bytes = -(-asked // layer) * layer  # as checkpoint_worker's tensors are whole layers
    folder = tempfile.mkdtemp(prefix="fsdp-bench-checkpoint-", dir=options.folder or bench.BUILD)
    worker = HERE / "checkpoint_worker.py"
    try:
        fleet = Fleet(
            "checkpoint",
            RANKS,
            lambda fleet: [[sys.executable, worker, rank, RANKS, asked, fleet.folder, folder] for rank in range(RANKS)],
        )

        def row(title, what, whose):
            contenders = [Contender(name, fleet, f"{what}/{name}", bytes) for name in whose]
            return report.measure(Row(title, RANKS, bytes, contenders, rounds, turn_s=1e-4, warm_up=1, baseline="plain"))

        saved = row("save, shards", "save", ["plain", "libfsdp", "safetensors", "dcp"])
        report.figure("save_over_plain_write", saved.ratio("libfsdp", "plain"), "lower", 1.3)
        report.figure("save_in_that_of_dcp", saved.ratio("libfsdp", "dcp"), "lower", 1.0)
        report.figure("save_in_that_of_safetensors", saved.ratio("libfsdp", "safetensors"))
        report.figure("save_mib_per_s", bytes / MIB / saved["libfsdp"].median, "higher")
        loaded = row("load, shards", "load", ["plain", "libfsdp", "safetensors", "dcp"])
        report.figure("load_over_plain_read", loaded.ratio("libfsdp", "plain"), "lower", 1.3)
        report.figure("load_in_that_of_dcp", loaded.ratio("libfsdp", "dcp"), "lower", 1.0)
        report.figure("load_in_that_of_safetensors", loaded.ratio("libfsdp", "safetensors"))
        report.figure("load_mib_per_s", bytes / MIB / loaded["libfsdp"].median, "higher")
        row("load, saved by 3 ranks", "reshard", ["plain", "libfsdp", "dcp"])
        row("save, whole tensors by rank 0", "full", ["plain", "libfsdp"])
        row("background: until the call returns", "background", ["plain", "libfsdp"])
        memory(report, fleet, bytes)
        fleet.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()


def memory(report, fleet, bytes):
    """The largest PSS of both ranks during a task, above that before it, in shards of a rank."""
    lines = [["what", "peak MiB beside the shards", "bound"]]
    part = bytes / RANKS / MIB
    largest = 16 if bytes >= 64 * MIB else 1  # of checkpoint_worker's tensors
    bounds = {
        "save/libfsdp": (8 * RANKS, "a few MiB a rank"),
        "load/libfsdp": (8 * RANKS, "a few MiB a rank"),
        "background/libfsdp": (part * RANKS + 8 * RANKS, "a copy of the shards"),
        "full/libfsdp": (2 * largest + 8 * RANKS, "one whole tensor, and a part of it"),
        "save/dcp": (None, ""),
        "load/dcp": (None, ""),
    }
    pids = [child.pid for child in fleet.children]
    for task, (bound, words) in bounds.items():
        before = pss(pids)
        with Peak(pids) as peak:
            fleet.turn(task, bytes, 1)
        extra = max(0, peak.most - before) / 1024
        lines.append([task, f"{extra:.1f}", words])
        report.figure(f"{task.replace('/', '_')}_extra_mib", extra, "lower", bound)
    report.note(f"Memory of {RANKS} ranks together (PSS) above that before, {bytes / MIB:.0f} MiB of shards", lines)


if __name__ == "__main__":
    bench.main(suite, parse(), "Checkpoints, 2 ranks, float32", baseline="plain")
