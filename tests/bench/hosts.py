"""fully_shard of libfsdp beside the host's own on gloo and beside the computation alone, in torch and in TensorPlay: the
step's time in the same processes, taking turns; and the memory of processes that do nothing else. float32, 2 ranks, a
processor for each.
"""

import time

import bench
from bench import HERE, Contender, Fleet, Peak, Row, pss

RANKS = 2
# design.md, section 8: forward and backward over compute only (must, stretch).
TARGETS = {"torch": (1.12, 1.05), "tensorplay": (1.3, 1.15)}
MODELS = {"torch": "6 transformer layers of 512", "tensorplay": "6 x (512, 2048, 512)"}
GPT_TOKENS = 4 * 128  # a rank's batch of hosts_worker.gpt


def parse():
    options = bench.parser(__doc__)
    options.add_argument("--torch", metavar="PYTHON", help="the Python that has torch; none: not measured")
    options.add_argument("--tensorplay", metavar="PYTHON", help="the Python that has TensorPlay; none: not measured")
    options.add_argument("--rounds", type=int, help="for each row, instead of 21")
    return options.parse_args()


def start(host, python):
    return Fleet(
        f"{host}",
        RANKS,
        lambda fleet: [[python, HERE / "hosts_worker.py", host, rank, RANKS, fleet.folder] for rank in range(RANKS)],
    )


def memory(report, host, python, tasks):
    """MiB of the host's processes over what they hold before a model is there: one fleet for each contender."""
    lines = [["whose", "peak MiB", "after 8 steps", "after 24"]]
    for task in tasks:
        fleet = start(host, python)
        pids = [child.pid for child in fleet.children]
        before = pss(pids)
        with Peak(pids) as peak:
            fleet.turn(task, 0, 8)
            early = pss(pids)
            fleet.turn(task, 0, 16)
        late = pss(pids)
        lines.append([task.split("/")[1], *(f"{(kib - before) / 1024:.0f}" for kib in (peak.most, early, late))])
        report.figure(f"{host}_{task.replace('/', '_')}_peak_mib", (peak.most - before) / 1024)
        fleet.close()
    report.note(f"{host}: memory of {RANKS} ranks together (PSS), above that of the processes without a model", lines)


def one_host(options, report, host, python):
    whose = ["libfsdp", "own", "compute"]
    rounds = options.rounds or (5 if options.quick else 21)
    fleet = start(host, python)

    def measure(what, title):
        contenders = [Contender(name, fleet, f"{what}/{name}", 0) for name in reversed(whose)]
        row = Row(f"{host}: {title}", RANKS, 0, contenders, rounds, pin=True, baseline="compute", table="Steps")
        return report.measure(row)

    if bench.wanted(options, f"{host}_step"):
        row = measure("step", MODELS[host])
        report.figure(f"{host}_step_over_compute", row.ratio("libfsdp", "compute"), "lower", *TARGETS[host])
        report.figure(f"{host}_own_step_over_compute", row.ratio("own", "compute"))
        over = [row.ratio(name, "compute") - 1 for name in ("own", "libfsdp")]
        report.figure(f"{host}_overhead_of_own_in_ours", over[0] / max(over[1], 1e-3), "higher")
    if host == "torch" and bench.wanted(options, "torch_gpt"):
        row = measure("gpt", "GPT with AdamW")
        for name in whose:
            report.figure(f"torch_gpt_{name}_tokens_per_s", RANKS * GPT_TOKENS / row[name].median, "higher")
    fleet.close()
    if bench.wanted(options, f"{host}_memory"):
        memory(report, host, python, [f"step/{name}" for name in whose])


def suite(options, report):
    begun = time.monotonic()
    for host in ("torch", "tensorplay"):
        python = getattr(options, host)
        if python:
            one_host(options, report, host, python)
        else:
            bench.say(f"{host}: no Python that has it, so it is not measured")
    bench.say(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    bench.main(suite, parse(), "fully_shard, 2 ranks, float32", baseline="compute")
