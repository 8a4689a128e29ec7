"""torch.distributed on libfsdp's backend beside the same on gloo, in one run: collectives, and a step of torch's FSDP2.
float32; a size is that of the whole: what an all-gather gives, what a reduce-scatter or all-reduce takes.
"""

import sys

import bench
from bench import HERE, KIB, MIB, Contender, Fleet, Row

COLLECTIVES = {"all_gather": 6, "reduce_scatter": 6, "all_reduce": 2}  # times faster than gloo, 2 ranks and 64 MiB
SIZES = (64 * KIB, MIB, 64 * MIB)
SMALL_TARGET = (25, 10)  # us
BACKENDS = ("fsdp", "gloo")


def start(backend, ranks):
    return Fleet(
        backend,
        ranks,
        lambda fleet: [
            [sys.executable, HERE / "torch_worker.py", backend, rank, ranks, fleet.folder, max(SIZES)]
            for rank in range(ranks)
        ],
    )


def rounds(options, count):
    if options.quick:
        return 5
    return 21 if count > 16 * MIB else 41


def suite(options, report):
    ranks = 2
    fleets = {backend: start(backend, ranks) for backend in BACKENDS}

    def measure(title, task, count, pin=False):
        contenders = [Contender(backend, fleet, task, count) for backend, fleet in fleets.items()]
        return report.measure(Row(title, ranks, count, contenders, rounds(options, count), pin=pin))

    if bench.wanted(options, "all_reduce_16b"):
        row = measure("all-reduce", "all_reduce", 16, pin=True)
        report.figure("all_reduce_16b_us", row["fsdp"].median * 1e6, "lower", *SMALL_TARGET)
        report.figure("all_reduce_16b_speedup_vs_gloo", row.ratio("gloo", "fsdp"), "higher", 1)
    for count in sorted(SIZES, reverse=True):
        for task, times in COLLECTIVES.items():
            name = f"{task}_{bench.size_tag(count)}"
            if bench.wanted(options, name):
                row = measure(task.replace("_", "-"), task, count)
                must = times if count == 64 * MIB else None
                report.figure(f"{name}_speedup_vs_gloo", row.ratio("gloo", "fsdp"), "higher", must)
    if bench.wanted(options, "fsdp2_step"):
        contenders = [Contender(backend, fleet, "step", 0) for backend, fleet in fleets.items()]
        contenders.append(Contender("compute", fleets["fsdp"], "compute", 0))
        row = report.measure(Row("FSDP2 step", ranks, 0, contenders, rounds(options, 64 * MIB), pin=True))
        over = {backend: row.ratio(backend, "compute") - 1 for backend in BACKENDS}
        report.figure("fsdp2_step_over_compute", 1 + over["fsdp"], "lower")
        report.figure("fsdp2_overhead_vs_gloo", over["fsdp"] / over["gloo"], "lower", 0.5)
    for fleet in fleets.values():
        fleet.close()


if __name__ == "__main__":
    bench.main(suite, bench.parser(__doc__).parse_args(), "torch.distributed, 2 ranks, float32", baseline="gloo")
