"""The FSDP runtime: what units cost to unshard and to reduce beside memcpy, a training step beside its compute alone,
and the memory that full parameters take. Models of float32 parameters; a size is that of the whole model. memcpy: all
ranks copy as many bytes as the model has, at once. All contenders of a row live in the same processes and take turns.
"""

import os
import shutil
import tempfile

import bench
from bench import MIB, Contender, Fleet, Row

# design.md, section 8 (must, stretch): over memcpy, by ranks; us; in largest units.
UNSHARD_TARGETS = {2: (0.7, 0.5), 4: (0.5, 0.3)}
AGAIN_TARGET = (20, 2)
REDUCE_TARGET, ALL_REDUCE_TARGET = (1.6, 1.2), (2.4, 1.8)  # 2 ranks: what the collectives of these names must do
MEMORY_TARGET = (3, 2)

UNITS = (1, 4, 16, 64)  # how the same 64 MiB are cut
STEP_UNITS, STEP_BYTES = 12, 48 * MIB  # a model to train: 1.5 to 2.5 ms of compute for a MiB of parameters
MEMORY_UNITS, MEMORY_BYTES = 12, 96 * MIB

UNSHARD_TABLE = "Unshard of a unit, and unshard again in backward"
REDUCE_TABLE = "Reduction of the gradients of one unit (post_backward, with its reshard)"
COUNT_TABLE = "Cost against the number of units: forward (unshard, reshard of each), backward (post_backward of each)"
STEP_TABLE = f"Forward and backward of {STEP_UNITS} units with compute"
OFFLOAD_TABLE = "The same with an optimizer's step, shards and gradients in a file (offload_dir)"


def parse():
    options = bench.parser(__doc__)
    options.add_argument("--ranks", default="1,2,4,8", help="of the rows about the number of units; default: 1,2,4,8")
    options.add_argument("--rounds", type=int, help="for each row, instead of its own number")
    options.add_argument(
        "--offload-dir", default=str(bench.BUILD), help="where shards are offloaded to: a local disk; default: build/"
    )
    options.add_argument("--library", metavar="FILE", help="another build of libfsdp than build/release's")
    options.add_argument(
        "--programs", metavar="DIR", default=str(bench.BUILD / "release"), help="the meson build with fsdp_bench in it"
    )
    options = options.parse_args()
    options.ranks = [int(word) for word in options.ranks.split(",")]
    return options


def start(options, ranks, largest):
    folder = tempfile.mkdtemp(prefix="fsdp-bench-", dir=options.offload_dir)
    options.folders.append(folder)
    return Fleet(
        "libfsdp",
        ranks,
        lambda fleet: [
            [f"{options.programs}/tests/bench/fsdp_bench", rank, ranks, f"file://{fleet.folder}/store", largest, folder]
            for rank in range(ranks)
        ],
        env={"FSDP_LIBRARY": os.path.abspath(options.library)} if options.library else None,
    )


def rounds(options, number):
    return options.rounds or (5 if options.quick else number)


def memcpy(fleet, count):
    return Contender("memcpy", fleet, "memcpy/plain=1", count)


# ---- one unit


def unshard(options, report, ranks):
    count = 64 * MIB
    changed, again = f"unshard_64m_{ranks}r", f"unshard_again_64m_{ranks}r"
    if not (bench.wanted(options, changed) or bench.wanted(options, again)):
        return
    fleet = start(options, ranks, count)
    if bench.wanted(options, changed):
        contenders = [
            Contender("libfsdp", fleet, "unshard/u=1", count),
            Contender("with reshard", fleet, "unshard_reshard/u=1", count),
            Contender("to bf16", fleet, "unshard/u=1,bf16=1", count),
            Contender("private_unshard", fleet, "unshard/u=1,private=1", count),
            memcpy(fleet, count),
        ]
        row = Row("unshard, changed", ranks, count, contenders, rounds(options, 21), table=UNSHARD_TABLE)
        report.measure(row)
        report.figure(f"{changed}_vs_memcpy", row.ratio("libfsdp", "memcpy"), "lower", *UNSHARD_TARGETS.get(ranks, ()))
        report.figure(f"unshard_reshard_64m_{ranks}r_vs_memcpy", row.ratio("with reshard", "memcpy"))
        report.figure(f"unshard_bf16_64m_{ranks}r_vs_memcpy", row.ratio("to bf16", "memcpy"))
        report.figure(f"unshard_private_64m_{ranks}r_vs_memcpy", row.ratio("private_unshard", "memcpy"))
    if bench.wanted(options, again):
        contenders = [Contender("libfsdp", fleet, "unshard_again/u=1,frozen=1", count)]
        row = report.measure(Row("unshard again", ranks, count, contenders, rounds(options, 21), table=UNSHARD_TABLE))
        report.figure(f"{again}_us", row["libfsdp"].median * 1e6, "lower", *AGAIN_TARGET)
    fleet.close()


def reduce(options, report, ranks):
    count = 64 * MIB
    name = f"reduce_64m_{ranks}r"
    if not bench.wanted(options, name):
        return
    fleet = start(options, ranks, count)
    contenders = [
        Contender("sharded", fleet, "reduce/u=1,s=sgo", count),
        Contender("bf16", fleet, "reduce/u=1,s=sgo,bf16=1", count),
        Contender("async", fleet, "reduce_async/u=1,s=sgo", count),
        Contender("NO_SHARD", fleet, "reduce/u=1,s=no", count),
        memcpy(fleet, count),
    ]
    if ranks == 4:
        contenders.insert(4, Contender("HYBRID 2x2", fleet, "reduce/u=1,s=hybrid", count))
    row = report.measure(Row("reduce", ranks, count, contenders, rounds(options, 21), table=REDUCE_TABLE))
    two = ranks == 2
    report.figure(f"{name}_vs_memcpy", row.ratio("sharded", "memcpy"), "lower", *(REDUCE_TARGET if two else ()))
    report.figure(f"reduce_bf16_64m_{ranks}r_vs_memcpy", row.ratio("bf16", "memcpy"))
    report.figure(f"reduce_async_64m_{ranks}r_vs_memcpy", row.ratio("async", "memcpy"))
    targets = ALL_REDUCE_TARGET if two else ()
    report.figure(f"reduce_no_shard_64m_{ranks}r_vs_memcpy", row.ratio("NO_SHARD", "memcpy"), "lower", *targets)
    if row["HYBRID 2x2"]:
        report.figure(f"reduce_hybrid_64m_{ranks}r_vs_memcpy", row.ratio("HYBRID 2x2", "memcpy"))
    fleet.close()


# ---- many units


def units_name(n):
    return f"{n} units" if n > 1 else "1 unit"


def counts(options, report, ranks):
    count = 64 * MIB
    kinds = {
        "forward": ("forward", "unshard_reshard", ""),
        "forward_bf16": ("forward, bf16", "unshard_reshard", ",bf16=1"),
        "backward": ("backward", "reduce", ",s=sgo"),
        "backward_bf16": ("backward, bf16", "reduce", ",s=sgo,bf16=1"),
        "backward_async": ("backward, async", "reduce_async", ",s=sgo"),
    }
    kinds = {name: kind for name, kind in kinds.items() if bench.wanted(options, f"units_{name}_{ranks}r")}
    if not kinds:
        return
    fleet = start(options, ranks, count)
    for name, (title, task, setup) in kinds.items():
        contenders = [Contender(units_name(n), fleet, f"{task}/u={n}{setup}", count) for n in UNITS]
        contenders.append(memcpy(fleet, count))
        row = report.measure(Row(title, ranks, count, contenders, rounds(options, 9), table=COUNT_TABLE))
        for n in UNITS:
            report.figure(f"units_{name}_{n}u_{ranks}r_vs_memcpy", row.ratio(units_name(n), "memcpy"))
        few, many = (row[units_name(n)].median for n in (UNITS[0], UNITS[-1]))
        report.figure(f"units_{name}_{ranks}r_each_us", (many - few) / (UNITS[-1] - UNITS[0]) * 1e6)
    fleet.close()


# ---- a training step


def step(options, report, ranks):
    name = f"step_{ranks}r"
    if not bench.wanted(options, name):
        return
    setups = {
        "FULL_SHARD": "s=full",
        "prefetch PRE": "s=full,fp=1,bp=1",
        "prefetch POST": "s=full,fp=1,bp=2",
        "SHARD_GRAD_OP": "s=sgo",
        "NO_SHARD": "s=no",
        "private_unshard": "s=full,private=1",
        "private, prefetch PRE": "s=full,private=1,fp=1,bp=1",
    }
    fleet = start(options, ranks, STEP_BYTES)
    contenders = [Contender("compute only", fleet, f"iterate/u={STEP_UNITS},plain=1", STEP_BYTES)]
    for label, setup in setups.items():
        contenders.append(Contender(label, fleet, f"iterate/u={STEP_UNITS},{setup}", STEP_BYTES))
        if "private" not in label:
            contenders.append(Contender(f"{label}, async", fleet, f"iterate_async/u={STEP_UNITS},{setup}", STEP_BYTES))
    row = Row("step", ranks, STEP_BYTES, contenders, rounds(options, 15), table=STEP_TABLE, baseline="compute only")
    report.measure(row)
    for contender in contenders[1:]:
        tag = contender.label.lower().replace(", ", "_").replace(" ", "_")
        report.figure(f"{name}_{tag}_vs_compute", row.ratio(contender.label, "compute only"))
    fleet.close()


# ---- memory


def value(fleet, task, count):
    """What ranks answer to a task that counts bytes; they agree, or it is each its own."""
    return int(fleet.ask(f"turn {task} {count} 1")[0].split()[1])


def memory(options, report, ranks):
    lines = [["", "ranks", "shards MiB", "largest MiB", "slots MiB", "resident MiB"]]
    setups = {
        "equal": ("equal units", ""),
        "equal_prefetch": ("equal units, prefetch", ",fp=1,bp=1"),
        "large": ("one large unit", ",big=4"),
        "large_prefetch": ("one large unit, prefetch", ",big=4,fp=1,bp=1"),
        "root": ("root and layers", ",root=1"),
        "root_prefetch": ("root and layers, prefetch", ",root=1,fp=1,bp=1"),
    }
    for name, (title, setup) in setups.items():
        name = f"memory_{name}_{ranks}r"
        if not bench.wanted(options, name):
            continue
        bench.say(f"memory, {title}, {ranks} ranks")
        fleet = start(options, ranks, MEMORY_BYTES)
        setup = f"u={MEMORY_UNITS},frozen=1{setup}"
        taken = value(fleet, f"resident/{setup}", MEMORY_BYTES)
        counted = ("shards", "unsharded", "largest")
        shards, slots, largest = (value(fleet, f"{task}/{setup}", MEMORY_BYTES) for task in counted)
        fleet.close()
        report.figure(f"{name}_counted_units", slots / largest, "lower", *MEMORY_TARGET)
        # To a tenth: the objects of units and the heap come on top of what the target speaks of.
        report.figure(f"{name}_resident_units", round((taken - shards) / largest, 1), "lower", *MEMORY_TARGET)
        lines.append([title, str(ranks), *(f"{number / MIB:.1f}" for number in (shards, largest, slots, taken))])
    if len(lines) > 1:
        note = "Resident: what the ranks' processes have more than before the model was made, shared pages once."
        report.note(f"Memory of parameters, a host\n{note}", lines)


def offload(options, report, ranks):
    name = f"offload_{ranks}r"
    if not bench.wanted(options, name):
        return
    setups = {
        "memory": "",
        "memory, prefetch": ",fp=1,bp=1",
        "file": ",off=1",
        "file, prefetch": ",off=1,fp=1,bp=1",
    }
    fleet = start(options, ranks, STEP_BYTES)
    contenders = [
        Contender(label, fleet, f"train/u={STEP_UNITS}{setup}", STEP_BYTES) for label, setup in setups.items()
    ]
    row = Row("step", ranks, STEP_BYTES, contenders, rounds(options, 15), table=OFFLOAD_TABLE, baseline="memory")
    report.measure(row)
    fleet.close()
    report.figure(f"{name}_vs_memory", row.ratio("file", "memory"))
    report.figure(f"{name}_prefetch_vs_memory", row.ratio("file, prefetch", "memory, prefetch"))
    moments = ("forward", "backward", "step")
    lines = [["", "after forward, MiB", "after backward, MiB", "after the optimizer's step, MiB"]]
    for label, setup in setups.items():
        fleet = start(options, ranks, STEP_BYTES)
        taken = [value(fleet, f"resident_{moment}/u={STEP_UNITS}{setup}", STEP_BYTES) / MIB for moment in moments]
        fleet.close()
        lines.append([label, *(f"{mib:.1f}" for mib in taken)])
        for moment, mib in zip(moments, taken):
            report.figure(f"{name}_{label.replace(', ', '_')}_resident_{moment}_mib", mib)
    report.note("Resident memory of shards, gradients and full parameters, all ranks", lines)


def suite(options, report):
    options.folders = []
    try:
        for ranks in (2, 4):
            unshard(options, report, ranks)
            reduce(options, report, ranks)
        for ranks in options.ranks:
            counts(options, report, ranks)
        step(options, report, 2)
        memory(options, report, 2)
        offload(options, report, 2)
    finally:
        for folder in options.folders:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    bench.main(suite, parse(), "The FSDP runtime, float32", baseline="memcpy")
