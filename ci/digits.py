"""The demo: a classifier of scikit-learn's handwritten digits, trained on one rank and then sharded over several.

Both runs take the same steps on the same batches; with several ranks, each computes on its part of every batch. So the
parameters at the end may differ by round-off, and by nothing else. The bound on that: sums of float32 numbers taken in
another order differ by a few units in the last place, and training at this rate does not amplify them, so that 64 units
in the last place of the largest parameter are ample (8e-6, where a gradient scaled wrongly moves parameters by 0.1).

Started without --out, this file runs itself through libfsdp.run; with it, it is one rank.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

BATCH = 128
HELD_OUT = 261
BOUND_IN_ULPS = 64


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=60, help="passes over the data (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the second run (default: %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error("argument --epochs: give at least 1")
    if not 1 <= options.ranks <= 64:
        parser.error("argument --ranks: give 1 to 64")
    if options.out:
        train(options)
    else:
        sys.exit(compare(options))


# ---- One rank --------------------------------------------------------------------------------------------------------


def train(options):
    import numpy as np
    from sklearn.datasets import load_digits

    import libfsdp
    from libfsdp.numpy import SGD, Linear, Sequential, Tanh, fully_shard, softmax_cross_entropy

    group = libfsdp.init(timeout=60)
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.data[order] / 16).astype("float32")
    labels = digits.target[order]
    train_images, test_images = images[:-HELD_OUT], images[-HELD_OUT:]
    train_labels, test_labels = labels[:-HELD_OUT], labels[-HELD_OUT:]

    rng = np.random.default_rng(1)  # the same initial values on every rank
    net = Sequential(Linear(64, 128, rng=rng), Tanh(), Linear(128, 64, rng=rng), Tanh(), Linear(64, 10, rng=rng))
    net = fully_shard(net, group)
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)

    shuffle = np.random.default_rng(2)  # the same batches on every rank
    steps_per_epoch = len(train_labels) // BATCH
    bar = Bar(f"{group.size} rank{'s' if group.size > 1 else ''}", options.epochs, group.rank == 0)
    begin = time.perf_counter()
    for epoch in range(options.epochs):
        indices = shuffle.permutation(len(train_labels))
        losses = 0.0
        for step in range(steps_per_epoch):
            batch = indices[step * BATCH : (step + 1) * BATCH]
            # Parts may differ by one image: weighted, their mean over the ranks is the mean over the batch.
            mine = batch[group.rank :: group.size]
            loss, slope = softmax_cross_entropy(net.forward(train_images[mine]), train_labels[mine])
            weight = len(mine) * group.size / BATCH
            net.backward(slope * np.float32(weight))
            optimizer.step()
            net.zero_grad()
            losses += loss * weight
        mean_loss = group.all_reduce(np.array(losses / steps_per_epoch), op="avg")
        bar.show(epoch + 1, f"loss {mean_loss:.4f}")
    seconds = time.perf_counter() - begin

    accuracy = float(np.mean(net.forward(test_images).argmax(axis=1) == test_labels))  # as sharded as in training
    bar.show(options.epochs, f"loss {mean_loss:.4f}  accuracy {accuracy:.1%} of {HELD_OUT} held-out images", last=True)

    memory = net.model.memory()
    shards = np.zeros((group.size, 1), "int64")
    group.all_gather(np.array([memory.shards]), shards)
    values = net.full_parameters()
    if group.rank == 0:
        np.savez(options.out.with_suffix(".npz"), **values)
        facts = {
            "loss": float(mean_loss),
            "accuracy": accuracy,
            "seconds": seconds,
            "steps": options.epochs * steps_per_epoch,
            "shards": shards[:, 0].tolist(),
            "host": memory.host_parameters,
            "unsharded_peak": memory.unsharded_peak,
            "total": memory.total_parameters,
        }
        options.out.with_suffix(".json").write_text(json.dumps(facts))
    group.barrier()
    group.close()


class Bar:
    """A progress bar on one line; where the output is no terminal, ten lines."""

    WIDTH = 24

    def __init__(self, title, total, visible):
        self.title, self.total, self.visible = title, total, visible
        self.terminal = sys.stdout.isatty()

    def show(self, done, text, last=False):
        tenth = max(1, self.total // 10)
        due = done % tenth == 0 and done < self.total  # the last line comes with the accuracy
        if not self.visible or not (self.terminal or last or due):
            return
        filled = self.WIDTH * done // self.total
        line = f"{self.title:8} [{'#' * filled}{'.' * (self.WIDTH - filled)}] {done:3}/{self.total} epochs  {text}"
        end = "\n" if last or not self.terminal else ""
        print(("\r" if self.terminal else "") + line, end=end, flush=True)


# ---- Both runs -------------------------------------------------------------------------------------------------------


def compare(options):
    import numpy as np

    with tempfile.TemporaryDirectory(prefix="fsdp-demo-") as folder:
        runs = [run(ranks, options, pathlib.Path(folder) / f"{turn}") for turn, ranks in enumerate((1, options.ranks))]
    (alone, one), (together, several) = runs

    difference = max(float(np.max(np.abs(one[name] - several[name]))) for name in one)
    largest = max(float(np.max(np.abs(values))) for values in one.values())
    bound = BOUND_IN_ULPS * float(np.finfo("float32").eps) * largest
    holds = one.keys() == several.keys() and difference <= bound and together["accuracy"] > 0.95

    print()
    print(f"{'ranks':>28}{'1':>14}{options.ranks:>14}")
    for label, key, form in (
        ("loss, last epoch", "loss", "{:.6f}"),
        ("accuracy, held-out", "accuracy", "{:.4f}"),
        ("seconds of training", "seconds", "{:.2f}"),
    ):
        print(f"{label:>28}{form.format(alone[key]):>14}{form.format(together[key]):>14}")
    for label, value in (
        ("parameter bytes, a rank", lambda facts: max(facts["shards"])),
        ("peak of full parameters", lambda facts: facts["unsharded_peak"]),
        ("parameter bytes, the host", lambda facts: facts["host"]),
    ):
        print(f"{label:>28}{value(alone):>14}{value(together):>14}")
    print(f"\nlargest difference of a parameter: {difference:.2e}; round-off allows {bound:.2e}")
    verdict = "HOLDS" if holds else "DOES NOT HOLD"
    print(
        f"{verdict}: after {together['steps']} steps, {options.ranks} ranks with sharded parameters "
        f"{'have' if holds else 'do not have'} the same model as 1 rank, accuracy {together['accuracy']:.1%}"
    )
    return 0 if holds else 1


def run(ranks, options, out):
    import numpy as np

    launch = [sys.executable, "-m", "libfsdp.run", "-n", str(ranks), "--no-prefix"]
    program = [__file__, "--epochs", str(options.epochs), "--out", str(out)]
    status = subprocess.run(launch + program, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode
    if status:
        sys.exit(f"digits.py: training on {ranks} rank(s) failed with code {status}")
    with np.load(out.with_suffix(".npz")) as values:
        return json.loads(out.with_suffix(".json").read_text()), dict(values)


if __name__ == "__main__":
    main()
