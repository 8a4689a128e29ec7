"""Collectives and unshard of libfsdp beside memcpy, gloo (through torch) and Open MPI. float32; a size is that of the
whole: what an all-gather gives, what a reduce-scatter or all-reduce takes. memcpy: all ranks copy as much, at once.
"""

import os
import subprocess
import sys

import bench
from bench import HERE, KIB, MIB, Contender, Failed, Fleet, Row

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
SIZES = {"64k": 64 * KIB, "1m": MIB, "64m": 64 * MIB}
# design.md, section 8: 2 ranks, 64 MiB. Over memcpy (must, stretch), faster than gloo, faster than Open MPI.
TARGETS = {
    "all_gather": ((1.15, 0.8), 6, 1),
    "reduce_scatter": ((1.6, 1.2), 6, 5),
    "all_reduce": ((2.4, 1.8), 2, 3),
}
UNSHARD_TARGETS = {2: (0.7, 0.5), 4: (0.5, 0.3)}
SMALL_TARGET, AGAIN_TARGET = (3, 1), (20, 2)  # us


def parse():
    options = bench.parser(__doc__)
    options.add_argument("--sizes", default="64k,1m,64m", help="of 64k,1m,64m (default: all)")
    options.add_argument("--ranks", default="2,4", help="default: 2,4")
    options.add_argument("--no-gloo", action="store_true", help="without gloo, and so without torch")
    options.add_argument("--no-mpi", action="store_true", help="without Open MPI")
    options.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME:OPTION=VALUE,...",
        help="libfsdp once more, with other options of the group (staging_bytes, direct_read, spin_us) or "
        "library=FILE, another build; repeatable",
    )
    options = options.parse_args()
    unknown = set(options.sizes.split(",")) - set(SIZES)
    if unknown:
        raise SystemExit(f"--sizes: not one of {', '.join(SIZES)}: {', '.join(sorted(unknown))}")
    options.sizes = [SIZES[name] for name in options.sizes.split(",")]
    options.ranks = [int(word) for word in options.ranks.split(",")]
    return options


# ---- contenders


def start_fsdp(label, ranks, largest, words=()):
    settings = dict(word.split("=", 1) for word in words)
    library = settings.pop("library", None)
    return Fleet(
        label,
        ranks,
        lambda fleet: [
            [bench.BUILD / "release/tests/bench/collectives_bench", rank, ranks, f"file://{fleet.folder}/store", largest]
            + [f"{key}={value}" for key, value in settings.items()]
            for rank in range(ranks)
        ],
        env={"FSDP_LIBRARY": os.path.abspath(library)} if library else None,
    )


def start_gloo(ranks, largest):
    return Fleet(
        "gloo",
        ranks,
        lambda fleet: [
            [sys.executable, HERE / "torch_worker.py", "gloo", r, ranks, fleet.folder, largest] for r in range(ranks)
        ],
    )


def start_mpi(ranks, largest):
    program = bench.BUILD / "bench" / "mpi_bench"
    sources = [HERE / "mpi_bench.c", HERE / "worker.c"]
    if not program.exists() or program.stat().st_mtime < max(s.stat().st_mtime for s in [*sources, HERE / "worker.h"]):
        program.parent.mkdir(parents=True, exist_ok=True)
        made = subprocess.run(
            ["mpicc", "-O2", "-D_GNU_SOURCE", "-o", program, *sources], capture_output=True, text=True, check=False
        )
        if made.returncode:
            raise Failed(f"mpicc: {made.stderr.strip()}")
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", ranks, program, largest]
    return Fleet("Open MPI", ranks, [command])


class Contest:
    """The fleets for one number of ranks."""

    def __init__(self, options, ranks):
        largest = max(options.sizes)
        self.fsdp = start_fsdp("libfsdp", ranks, largest)
        self.others = {}
        for text in options.variant:
            name, _, words = text.partition(":")
            self.others[name] = start_fsdp(name, ranks, largest, words.split(",") if words else ())
        self.variants = list(self.others)
        if not options.no_gloo:
            self.others["gloo"] = start_gloo(ranks, largest)
        if not options.no_mpi:
            self.others["Open MPI"] = start_mpi(ranks, largest)

    def contenders(self, task, count):
        return [Contender("libfsdp", self.fsdp, task, count)] + [
            Contender(label, fleet, task, count) for label, fleet in self.others.items()
        ]

    def ours(self, task, count):
        return [c for c in self.contenders(task, count) if c.label == "libfsdp" or c.label in self.variants]

    def memcpy(self, count):
        return Contender("memcpy", self.fsdp, "memcpy", count)

    def close(self):
        for fleet in (self.fsdp, *self.others.values()):
            fleet.close()


# ---- rows


def rounds(options, count):
    if options.quick:
        return 5
    return 21 if count > 16 * MIB else 41


def collective(options, report, contest, task, count, ranks):
    name = f"{task}_{bench.size_tag(count)}_{ranks}r"
    if not bench.wanted(options, name):
        return
    contenders = contest.contenders(task, count)
    contenders.insert(1, contest.memcpy(count))
    row = Row(task.replace("_", "-"), ranks, count, contenders, rounds(options, count))
    report.measure(row)
    copies, gloo, mpi = TARGETS[task] if (count, ranks) == (64 * MIB, 2) else ((None, None), None, None)
    report.figure(f"{name}_vs_memcpy", row.ratio("libfsdp", "memcpy"), "lower", *copies)
    if row["gloo"]:
        report.figure(f"{name}_speedup_vs_gloo", row.ratio("gloo", "libfsdp"), "higher", gloo)
    if row["Open MPI"]:
        report.figure(f"{name}_speedup_vs_mpi", row.ratio("Open MPI", "libfsdp"), "higher", mpi)


def small(options, report, contest, ranks):
    name = f"all_reduce_16b_{ranks}r"
    if not bench.wanted(options, name):
        return
    contenders = contest.contenders("all_reduce", 16)
    row = Row("all-reduce", ranks, 16, contenders, rounds(options, 16), pin=True)
    report.measure(row)
    report.figure(f"{name}_us", row["libfsdp"].median * 1e6, "lower", *SMALL_TARGET)


def unshard(options, report, contest, ranks):
    count = 64 * MIB
    name = f"unshard_64m_{ranks}r"
    if bench.wanted(options, name):
        contenders = contest.ours("unshard", count) + [contest.memcpy(count)]
        row = report.measure(Row("unshard, changed", ranks, count, contenders, rounds(options, count)))
        must, stretch = UNSHARD_TARGETS.get(ranks, (None, None))
        report.figure(f"{name}_vs_memcpy", row.ratio("libfsdp", "memcpy"), "lower", must, stretch)
        contenders = contest.ours("unshard_reshard", count) + [contest.memcpy(count)]
        row = report.measure(Row("unshard and reshard", ranks, count, contenders, rounds(options, count)))
        report.figure(f"unshard_reshard_64m_{ranks}r_vs_memcpy", row.ratio("libfsdp", "memcpy"))
    name = f"unshard_again_64m_{ranks}r"
    if bench.wanted(options, name):
        row = Row("unshard, as before", ranks, count, contest.ours("unshard_again", count), rounds(options, 0))
        report.measure(row)
        must, stretch = AGAIN_TARGET if ranks == 2 else (None, None)
        report.figure(f"{name}_us", row["libfsdp"].median * 1e6, "lower", must, stretch)


def suite(options, report):
    for ranks in options.ranks:
        contest = Contest(options, ranks)
        if 64 * MIB in options.sizes:
            unshard(options, report, contest, ranks)
        if ranks == 2:
            small(options, report, contest, ranks)
        for count in sorted(options.sizes, reverse=True):
            for task in COLLECTIVES:
                collective(options, report, contest, task, count, ranks)
        contest.close()


if __name__ == "__main__":
    bench.main(suite, parse(), "Collectives of libfsdp, private to private, float32", baseline="memcpy")
