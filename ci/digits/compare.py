"""The demo: trains a classifier of scikit-learn's handwritten digits four times, and says whether it came to the same.

The first time it is one process of the host (NumPy layers, torch, TensorPlay), without sharding: the reference. Then
libfsdp shards its parameters over one rank and over several, and at last the host's own FSDP does, on gloo, if it has
one. All runs begin with the same values and take the same steps on the same batches; with several ranks, each computes
on its part of every batch. So the parameters at the end may differ by round-off, and by nothing else. The bound on it:
sums of float32 numbers taken in another order differ by a few units in the last place, and training at this rate does
not amplify them, so that 64 units in the last place of the largest parameter are ample (7e-6, where a gradient scaled
wrongly moves parameters by 0.1). The host's own FSDP is measured beside libfsdp; the verdict is about libfsdp only.

This file makes the data and compares; rank.py is what each rank runs, in the host's own Python.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import plot
import rank

BATCH = 128
HELD_OUT = 261
BOUND_IN_ULPS = 64
LEAST_ACCURACY = 0.95
TITLES = {"numpy": "NumPy", "torch": "PyTorch", "tensorplay": "TensorPlay"}
SIZES = (64, 128, 64, 10)  # of the network's layers


def main():
    options = parse()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # subprocess.run then ends its process
    try:
        sys.exit(demo(options))
    except KeyboardInterrupt:
        sys.exit(130)


def parse():
    parser = argparse.ArgumentParser(prog="ci/demo", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--host",
        choices=tuple(TITLES),
        default="numpy",
        help="whose layers and optimizer (default: tensorplay where it can be installed, else numpy)",
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the runs with several (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data (default: %(default)s)")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="the curves' file (default: build/demo.png)")
    parser.add_argument("--python", default=sys.executable, help=argparse.SUPPRESS)  # that of the host
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error("argument --epochs: give at least 1")
    if not 1 <= options.ranks <= 64:
        parser.error("argument --ranks: give 1 to 64")
    if options.plot is None:
        options.plot = pathlib.Path(__file__).resolve().parents[2] / "build" / "demo.png"
    if not options.plot.absolute().parent.is_dir():
        parser.error(f"argument --plot: there is no folder {options.plot.absolute().parent}")
    if options.plot.suffix.lower() not in plot.FORMATS:
        parser.error(f"argument --plot: the name's end decides the format, one of {', '.join(plot.FORMATS)}")
    return options


def demo(options):
    title, own = describe(options.host, options.python)
    with tempfile.TemporaryDirectory(prefix="fsdp-demo-") as name:
        folder = pathlib.Path(name)
        steps = write_task(folder / "task.npz", options.epochs)
        print(
            f"{title} learns to read handwritten digits: {options.epochs} epochs of {steps // options.epochs} steps, "
            "each time the same ones."
        )
        several = f"{options.ranks} rank{'s' if options.ranks > 1 else ''}"
        runs = [
            Run("one process", "alone", 1, folder, options),
            Run("libfsdp, 1 rank", "libfsdp", 1, folder, options),
            Run(f"libfsdp, {several}", "libfsdp", options.ranks, folder, options),
        ]
        if own is None:
            runs.append(Run(f"own FSDP, {several}", "own", options.ranks, folder, options))
        else:
            print(own)
        runs = [run for run in runs if run.go()]
    return report(options, title, runs, steps)


def describe(host, python):
    """A host's name and version, and why its own FSDP is left out, None where it is not."""
    if host == "numpy":
        return TITLES[host], "NumPy has no FSDP of its own."
    code = f"import importlib.metadata as m; print(m.version({host!r}))"
    version = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    if not version:
        sys.exit(f"ci/demo: {python} has no {host}: let ci/demo install it")
    title = f"{TITLES[host]} {version.split('+')[0]}"
    if title.startswith("TensorPlay 1.0"):
        return title, f"{title}'s own FSDP raises in backward, so it is left out (1.1's, for Python 3.10, trains)."
    return title, None


def write_task(path, epochs):
    """What every run is given: images, labels, the batches of each epoch, and the values that parameters begin with.
    Returns the number of steps."""
    import numpy as np
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.data[order] / 16).astype("float32")
    labels = digits.target[order].astype("int64")
    count = len(labels) - HELD_OUT  # to learn from
    rng = np.random.default_rng(1)
    values = {}
    for index, (inputs, outputs) in enumerate(zip(SIZES, SIZES[1:])):  # between two of them is a Tanh
        bound = inputs**-0.5
        for name, shape in (("weight", (outputs, inputs)), ("bias", outputs)):
            values[f"{2 * index}.{name}"] = rng.uniform(-bound, bound, shape).astype("float32")
    shuffle = np.random.default_rng(2)
    whole = count // BATCH * BATCH
    batches = np.stack([shuffle.permutation(count)[:whole].reshape(-1, BATCH) for _ in range(epochs)])
    np.savez(
        path,
        train_images=images[:count],
        train_labels=labels[:count],
        test_images=images[count:],
        test_labels=labels[count:],
        batches=batches,
        **values,
    )
    return batches.shape[0] * batches.shape[1]


class Run:
    """One training: what it is called in the table, and after go() what came of it.

    losses      the mean loss of each epoch                 values      {name: whole parameter}
    accuracy    on the held-out images                      seconds     of training, without starting and meeting
    kept        bytes of parameters that a rank has between steps, on the rank that has most
    """

    def __init__(self, name, whose, ranks, folder, options):
        self.name, self.whose, self.ranks, self.options = name, whose, ranks, options
        self.folder = folder / f"{whose}-{ranks}"
        self.command = [options.python, "-m", "libfsdp.run", "-n", str(ranks), "--no-prefix", rank.__file__]
        self.command += [options.host, whose, str(folder / "task.npz"), str(self.folder), name]

    def go(self):
        """Train. False if the host's own FSDP could not; the demo ends if another could not."""
        import numpy as np

        self.folder.mkdir(exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        status = subprocess.run(self.command, env=environment, stdin=subprocess.DEVNULL, check=False).returncode
        if status and self.whose == "own":
            print(f"{self.name}: left out, as it failed with code {status}")
            return False
        if status:
            sys.exit(f"ci/demo: {self.name}: training failed with code {status}")
        ranks = []
        for number in range(self.ranks):
            with np.load(self.folder / f"{number}.npz") as facts:
                ranks.append(dict(facts))
        self.losses = np.mean([facts.pop("losses") for facts in ranks], axis=0)
        self.kept = max(int(facts.pop("kept")) for facts in ranks)
        self.seconds = float(ranks[0].pop("seconds"))
        self.accuracy = float(ranks[0].pop("accuracy"))
        self.values = ranks[0]
        return True

    def difference(self, other):
        """The largest difference of a parameter of another run."""
        import numpy as np

        if self.values.keys() != other.values.keys():
            sys.exit(f"ci/demo: {self.name} and {other.name} name their parameters differently")
        return max(float(np.max(np.abs(self.values[name] - other.values[name]))) for name in self.values)


def report(options, title, runs, steps):
    import numpy as np

    reference = runs[0]
    largest = max(float(np.max(np.abs(values))) for values in reference.values.values())
    bound = BOUND_IN_ULPS * float(np.finfo("float32").eps) * largest

    width = max(len(run.name) for run in runs) + 3
    print(f"\n{'':26}" + "".join(f"{run.name:>{width}}" for run in runs))
    for label, text in (
        ("loss, last epoch", lambda run: f"{run.losses[-1]:.6f}"),
        ("accuracy, held-out images", lambda run: f"{run.accuracy:.1%}"),
        ("seconds of training", lambda run: f"{run.seconds:.2f}"),
        ("bytes kept by a rank", lambda run: f"{run.kept}"),
        ("off from one process by", lambda run: "-" if run is reference else f"{run.difference(reference):.1e}"),
    ):
        print(f"{label:26}" + "".join(f"{text(run):>{width}}" for run in runs))

    plot.curves(options.plot, runs, f"{title}, {steps} steps")
    print("\nThe network is small: what is timed is mostly the work around each step. ci/bench measures large models.")
    print(f"Learning curves: {options.plot}")
    several = runs[2]
    off = max(run.difference(reference) for run in runs[1:3])
    holds = off <= bound and several.accuracy > LEAST_ACCURACY
    print(
        f"{'HOLDS' if holds else 'DOES NOT HOLD'}: after {steps} steps libfsdp's parameters differ from one process's "
        f"by {off:.1e} at most, where round-off allows {bound:.1e}; accuracy {several.accuracy:.1%}, where "
        f"{LEAST_ACCURACY:.0%} is asked"
    )
    return 0 if holds else 1


if __name__ == "__main__":
    main()
