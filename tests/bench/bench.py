"""Compares contenders in one run. The suites in this folder say who they are and what each must do; the rest is here.

Contenders take turns. The rank processes of all of them live through the run, asleep in read() on a socket to this
process, so that whoever has its turn has the machine. A round gives each contender one turn: its ranks meet, repeat the
task, and the last one to finish counts. Rounds begin with another contender each time. What is reported are medians over
the rounds of the ratios within a round, so that a machine that is slow for a while is slow for both sides of a ratio.

    Fleet      the rank processes of one program
    Contender  a label, a fleet, and the task and size that its ranks are told
    Row        contenders that do the same thing, and how often; rows of one `table` are printed together
    Figure     what is reported: a line `BENCH name value=X must=Y stretch=Z better=lower|higher`
    Report     rows and figures; the lines, the table and the picture

A suite is a function suite(options, report) given to main(). See worker.h for what is said between this and the ranks.
"""

import argparse
import dataclasses
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from textwrap import fill

HERE = Path(__file__).resolve().parent
BUILD = Path(os.environ.get("FSDP_BUILD", HERE.parent.parent / "build"))
START_S, ANSWER_S = 120, 120  # how long ranks may take to come up, and for one turn

KIB, MIB = 1 << 10, 1 << 20


class Failed(Exception):
    """Something that ends the run with one sentence instead of a traceback."""


def say(message):
    print(message, file=sys.stderr, flush=True)


def size_name(count):
    return f"{count // MIB} MiB" if count >= MIB else f"{count // KIB} KiB" if count >= KIB else f"{count} B"


def size_tag(count):
    return size_name(count).replace(" ", "").replace("iB", "").lower()


def time_name(seconds):
    for unit, scale in (("s", 1), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            break
    return f"{seconds / scale:.3g} {unit}"


# ---- the machine


def hop_ns():
    """How long a word takes between the first two processors and back; None where there is one, or no build of cores.c.

    Ratios depend on it, and on a virtual machine it changes from minute to minute (190 ns within a cache complex of
    an EPYC, 540 ns across two), so each row says what it was."""
    cpus = sorted(os.sched_getaffinity(0))
    program = BUILD / "release/tests/bench/cores"
    if len(cpus) < 2 or not program.exists():
        return None
    done = subprocess.run([program, str(cpus[0]), str(cpus[1])], capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else None


# ---- processes


class Fleet:
    """The rank processes of one program, from start to close().

    commands: argument lists, one for each process to start (one mpirun may start all ranks); each rank connects to
    BENCH_SOCKET. Every rank is held by a pidfd from then on, so that ending it can't hit another process.
    """

    running = []

    def __init__(self, label, ranks, commands, env=None):
        self.label, self.ranks = label, ranks
        self.folder = Path(tempfile.mkdtemp(prefix="fsdp-bench-"))
        self.children, self.peers, self.pidfds = [], [None] * ranks, []
        Fleet.running.append(self)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.folder / "driver"))
        self.listener.listen(ranks)
        self.log = (self.folder / "log").open("wb")
        env = {**os.environ, "BENCH_SOCKET": str(self.folder / "driver"), **(env or {})}
        for command in commands(self) if callable(commands) else commands:
            self.children.append(
                subprocess.Popen(
                    [str(word) for word in command],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=self.log,
                    stderr=self.log,
                    process_group=0,  # Ctrl-C reaches this process only, which then ends them
                )
            )
        self._meet()

    def _meet(self):
        self.listener.settimeout(0.5)
        deadline = time.monotonic() + START_S
        while None in self.peers:
            try:
                peer, _ = self.listener.accept()
            except socket.timeout:
                self._look(deadline)
                continue
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            self.pidfds.append(os.pidfd_open(int.from_bytes(credentials[:4], sys.byteorder)))
            peer.settimeout(START_S)
            words = self._line(peer, "?").split()
            self.peers[int(words[1])] = peer
        for peer in self.peers:
            peer.settimeout(ANSWER_S)

    def _look(self, deadline):
        for child in self.children:
            if child.poll() is not None:
                raise self._failure(f"a rank ended with {child.returncode} before it began")
        if time.monotonic() > deadline:
            missing = [rank for rank, peer in enumerate(self.peers) if peer is None]
            raise self._failure(f"ranks {missing} did not come up within {START_S} s")

    def _failure(self, what):
        self.log.flush()
        text = (self.folder / "log").read_text(errors="replace").strip()[-2000:]
        return Failed(f"{self.label} with {self.ranks} ranks: {what}" + (f"\n{text}" if text else ""))

    def _line(self, peer, rank):
        line = b""
        while not line.endswith(b"\n"):
            try:
                part = peer.recv(4096)
            except socket.timeout:
                raise self._failure(f"rank {rank} did not answer within {ANSWER_S} s") from None
            except OSError:
                part = b""
            if not part:
                raise self._failure(f"rank {rank} has ended")
            line += part
        return line.decode(errors="replace").strip()

    def ask(self, line):
        """Tell all ranks; their answers, in rank order."""
        for rank, peer in enumerate(self.peers):
            try:
                peer.sendall(line.encode() + b"\n")
            except OSError:
                raise self._failure(f"rank {rank} has ended") from None
        answers = [self._line(peer, rank) for rank, peer in enumerate(self.peers)]
        for rank, answer in enumerate(answers):
            if answer.startswith("bad"):
                raise self._failure(f"rank {rank}, told '{line}': {answer[4:]}")
        return answers

    def check(self, task, count):
        self.ask(f"check {task} {count}")

    def turn(self, task, count, repetitions):
        """Seconds for one repetition: from when the first rank began to when the last had finished."""
        answers = [answer.split() for answer in self.ask(f"turn {task} {count} {repetitions}")]
        if answers[0][0] == "took":
            took = max(int(words[1]) for words in answers)
        else:
            took = max(int(words[2]) for words in answers) - min(int(words[1]) for words in answers)
        return took * 1e-9 / repetitions

    def pin(self, on):
        """Each rank to a processor of its own, or anywhere again."""
        cpus = sorted(os.sched_getaffinity(0))
        for rank, peer in enumerate(self.peers):
            peer.sendall(b"pin %d\n" % (cpus[rank % len(cpus)] if on else -1))
        for rank, peer in enumerate(self.peers):
            if self._line(peer, rank) != "ok":
                raise self._failure(f"rank {rank} can't be pinned")

    def close(self):
        """Hang up, which ends ranks that are well; then kill what is left."""
        if self not in Fleet.running:
            return
        self.listener.close()
        for peer in self.peers:
            if peer:
                peer.close()
        deadline = time.monotonic() + (3 if sys.exc_info()[0] is None else 0.5)
        for child in self.children:
            try:
                child.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.terminate()  # mpirun ends its ranks
        for pidfd in self.pidfds:
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            os.close(pidfd)
        for child in self.children:
            try:
                child.wait(3)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        Fleet.running.remove(self)


# ---- memory


def pss(pids):
    """KiB that these processes hold together, what they share counted once."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup") as lines:
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


class Peak(threading.Thread):
    """The largest PSS of a fleet's processes while it runs."""

    def __init__(self, pids):
        super().__init__(daemon=True)
        self.pids, self.most, self.over = pids, 0, threading.Event()

    def run(self):
        while not self.over.wait(0.003):
            self.most = max(self.most, pss(self.pids))

    def __exit__(self, *exception):
        self.over.set()
        self.join()

    def __enter__(self):
        self.start()
        return self


# ---- measuring


@dataclasses.dataclass
class Contender:
    label: str
    fleet: Fleet
    task: str
    count: int  # bytes
    repetitions: int = 1
    times: list = dataclasses.field(default_factory=list)  # one for each round

    def turn(self, repetitions=None):
        return self.fleet.turn(self.task, self.count, repetitions or self.repetitions)

    @property
    def median(self):
        return statistics.median(self.times)


@dataclasses.dataclass
class Row:
    """Contenders that do the same thing. turn_s: how long a turn should last, which decides the repetitions."""

    title: str
    ranks: int
    count: int
    contenders: list
    rounds: int = 24
    turn_s: float = 0.015
    warm_up: int = 2
    pin: bool = False
    hops: list = None  # hop_ns() before and after
    table: str = ""  # the heading it is printed under; "": the report's
    baseline: str = None  # whom its contenders are compared with there; None: the suite's baseline

    def __getitem__(self, label):
        return next((c for c in self.contenders if c.label == label), None)

    def measure(self):
        fleets = {id(c.fleet): c.fleet for c in self.contenders}.values()
        for contender in self.contenders:
            contender.fleet.check(contender.task, contender.count)
        if self.pin:
            for fleet in fleets:
                fleet.pin(True)
        for contender in self.contenders:
            self._choose_repetitions(contender)
        for number in range(self.warm_up + self.rounds):
            first = number % len(self.contenders)
            for contender in self.contenders[first:] + self.contenders[:first]:
                took = contender.turn()
                if number >= self.warm_up:
                    contender.times.append(took)
        if self.pin:
            for fleet in fleets:
                fleet.pin(False)

    def _choose_repetitions(self, contender):
        """By this process's clock: a repetition may have parts that don't count."""
        repetitions = 1
        while True:
            begin = time.monotonic()
            contender.turn(repetitions)
            took = time.monotonic() - begin
            if took >= self.turn_s / 4 or repetitions >= 1 << 16:
                break
            repetitions *= 4
        contender.repetitions = max(1, round(repetitions * self.turn_s / took))

    def ratio(self, label, other):
        """How many times as long `label` takes as `other`."""
        return statistics.median(a / b for a, b in zip(self[label].times, self[other].times))


# ---- reporting


@dataclasses.dataclass
class Figure:
    name: str
    value: float
    better: str = "lower"
    must: float = None
    stretch: float = None

    def _meets(self, target):
        return self.value <= target if self.better == "lower" else self.value >= target

    @property
    def verdict(self):
        if self.must is None:
            return ""
        if self.stretch is not None and self._meets(self.stretch):
            return "stretch met"
        return "met" if self._meets(self.must) else "MISSED"

    def line(self):
        words = [f"BENCH {self.name} value={self.value:.4g}"]
        words += [f"{key}={getattr(self, key):g}" for key in ("must", "stretch") if getattr(self, key) is not None]
        return " ".join(words + [f"better={self.better}"])


class Report:
    def __init__(self, title, pin=False):
        self.title, self.pin = title, pin
        self.rows, self.figures, self.notes = [], [], []

    def measure(self, row):
        say(f"{row.title}, {row.ranks} ranks, {size_name(row.count)}")
        row.pin |= self.pin
        row.hops = [hop_ns()]
        row.measure()
        row.hops.append(hop_ns())
        self.rows.append(row)
        return row

    def figure(self, name, value, better="lower", must=None, stretch=None):
        figure = Figure(name, value, better, must, stretch)
        self.figures.append(figure)
        print(figure.line(), flush=True)

    def note(self, title, lines):
        """A table of something else than times: lists of words, the first of them the heads of the columns."""
        self.notes.append(f"{title}\n{_aligned(lines)}")

    def tables(self, baseline=None):
        """All rows: each contender's median, and how it compares to the baseline."""
        names = dict.fromkeys(row.table for row in self.rows)
        return "\n\n".join([self._table(name, baseline) for name in names] + self.notes)

    def _table(self, name, baseline):
        rows = [row for row in self.rows if row.table == name]
        baseline = rows[0].baseline or baseline
        labels = list(dict.fromkeys(c.label for row in rows for c in row.contenders))
        lines = [["", "ranks", "size", "hop ns", *labels]]
        for row in rows:
            hops = "-".join(str(hop) for hop in dict.fromkeys(row.hops) if hop is not None)
            cells = [row.title, str(row.ranks), size_name(row.count), hops]
            for label in labels:
                contender = row[label]
                cell = time_name(contender.median) if contender else ""
                if contender and baseline and row[baseline] and label != baseline:
                    cell += f" ({row.ratio(label, baseline):.2f}x)"
                cells.append(cell)
            lines.append(cells)
        if len(lines) == 2 and len(labels) > 6:
            lines = [list(pair) for pair in zip(*lines)]  # too wide to read across
        note = f"Medians; in brackets, times {baseline}. " if baseline else "Medians. "
        note += "hop: a word from processor to processor and back, before and after the row.\n"
        return f"{name or self.title}\n{note}" + _aligned(lines)

    def targets(self):
        lines = [["figure", "value", "must", "stretch", ""]]
        for figure in self.figures:
            if figure.must is None:
                continue
            bound = "<= " if figure.better == "lower" else ">= "
            lines.append(
                [
                    figure.name,
                    f"{figure.value:.3g}",
                    f"{bound}{figure.must:g}",
                    f"{bound}{figure.stretch:g}" if figure.stretch is not None else "",
                    figure.verdict,
                ]
            )
        return _aligned(lines) if len(lines) > 1 else ""

    def plot(self, path, baseline):
        """Bars: each row's contenders as multiples of the baseline, one panel for each size."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        rows = [row for row in self.rows if row[baseline]]
        if not rows:
            raise Failed(f"--plot: no row was compared with {baseline}")
        sizes = sorted({row.count for row in rows})
        labels = list(dict.fromkeys(c.label for row in rows for c in row.contenders if c.label != baseline))
        figure, panels = pyplot.subplots(len(sizes), 1, figsize=(11, 3.4 * len(sizes)), squeeze=False)
        for panel, count in zip(panels[:, 0], sizes):
            shown = [row for row in rows if row.count == count]
            width = 0.8 / len(labels)
            for index, label in enumerate(labels):
                places = [i for i, row in enumerate(shown) if row[label]]
                values = [shown[i].ratio(label, baseline) for i in places]
                at = [i + width * (index - (len(labels) - 1) / 2) for i in places]
                bars = panel.bar(at, values, width, label=label)
                panel.bar_label(bars, [f"{v:.2f}" if v < 10 else f"{v:.0f}" for v in values], fontsize=7)
            panel.axhline(1, color="black", linewidth=0.8, linestyle="--")
            panel.set_xticks(range(len(shown)), [f"{fill(row.title, 14)}\n{row.ranks} ranks" for row in shown], fontsize=8)
            panel.set_yscale("log")
            panel.margins(y=0.15)
            panel.set_ylabel(f"times {baseline}")
            panel.set_title(size_name(count), fontsize=10)
        panels[0, 0].legend(fontsize=8)
        figure.suptitle(f"{self.title} (lower is better)")
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        say(f"drawn: {path}")


def _aligned(lines):
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


# ---- the program


def parser(description):
    """What every suite takes; a suite adds its own."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--plot", metavar="FILE", help="draw the figures as bars (the name's end decides the format)")
    options.add_argument("--quick", action="store_true", help="few rounds: a look, not a measurement")
    options.add_argument("--pin", action="store_true", help="keep each rank on a processor (rank modulo processors)")
    options.add_argument("--only", metavar="WORD", action="append", help="only rows whose name contains WORD; repeatable")
    return options


def wanted(options, name):
    return not options.only or any(word in name for word in options.only)


def _end(number, frame):
    raise KeyboardInterrupt(number)


def main(suite, options, title, baseline=None):
    """Run the suite; print the lines and the tables. Exits 0 even where a target is missed: the table says so."""
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, _end)
    report = Report(title, options.pin)
    status = 0
    try:
        suite(options, report)
    except Failed as failure:
        say(f"error: {failure}")
        status = 1
    except KeyboardInterrupt as interrupt:
        say("interrupted")
        status = 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    finally:
        for fleet in list(Fleet.running):
            fleet.close()
    if report.rows or report.notes:
        print(f"\n{report.tables(baseline)}")
        if report.targets():
            print(f"\n{report.targets()}")
    if options.plot and status == 0:
        report.plot(options.plot, baseline)
    sys.exit(status)
