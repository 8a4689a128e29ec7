"""The demo's picture: the loss of each run over the epochs. Runs that agree lie on one another, so later ones are drawn
thinner and with more of a gap, and each is seen."""

FORMATS = (".png", ".svg", ".pdf")


def curves(path, runs, title):
    """Draw runs (name, losses, seconds) to a file, in the format that its name ends with."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8, 4.5))
    for run, width, style, color in zip(runs, (9, 5, 2, 2), ("-", "-", "-", (0, (1, 4))), ("0.8", "C0", "C1", "k")):
        epochs = range(1, len(run.losses) + 1)
        label = f"{run.name}: {run.seconds:.2f} s"
        marker = "o" if len(run.losses) == 1 else ""
        panel.plot(epochs, run.losses, linewidth=width, linestyle=style, color=color, marker=marker, label=label)
    panel.set_yscale("log")
    panel.set_xlabel("epoch")
    panel.set_ylabel("mean loss")
    panel.set_title(f"Handwritten digits: {title}", fontsize=10)
    panel.grid(alpha=0.3)
    panel.legend(title="training took", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
