"""What the command line prints: aligned tables, human units, and a progress bar for long work.

Tables and results go to the standard output; progress goes to the error output: as one line that is drawn again on a
terminal, else as a plain line every few seconds, so that a log stays readable.
"""

import os
import re
import sys
import threading
import time

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_FACTORS = {"": 1} | {
    f"{letter}{binary}b": (1024 if binary else 1000) ** power
    for power, letter in enumerate(("", "k", "m", "g", "t", "p"))
    for binary in ("", "i")
}
_EVERY_S = 5  # between plain lines of progress
_REDRAW_S = 0.1
_WIDTH = 30  # of the bar
_LINE = 90  # and of its line, so that another work's bar is covered


def human(n):
    """A number of bytes, for people: 12.3 MB."""
    value, unit = float(n), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{n} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def parse_bytes(text):
    """The bytes that a text such as "5GB", "512 MiB" or "1000000" means. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if factor is None or float(match[1]) * factor < 1:
        raise ValueError(f"{text!r} is no size; give a number of bytes, or one such as 5GB or 512MiB")
    return round(float(match[1]) * factor)


def table(rows, header, right=()):
    """Print rows under a header, columns aligned; those whose numbers are in `right` to the right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ]
        print("  ".join(cells).rstrip())


def printable(text):
    """Names come from files: what a terminal would obey is shown instead."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def shape_text(shape):
    return "[" + ", ".join(map(str, shape)) + "]"


def count(n, what, many=None):
    """1 tensor, 2 tensors."""
    return f"{n} {what if n == 1 else many or what + 's'}"


def _columns(stream):
    """Of a terminal, which may have become another width; some say that it has none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or _LINE + 1
    except (OSError, ValueError):
        return _LINE + 1


class Progress:
    """A bar: progress(done, total) while work goes on; a context manager, which wipes it at the end.

    what     the work's name, before the bar
    measure  where the work itself tells nothing: a function that gives (done, total), asked now and then on a thread
    """

    def __init__(self, what, measure=None, stream=None):
        self.what, self.measure = what, measure
        self.stream = sys.stderr if stream is None else stream
        self.terminal = self.stream is not None and self.stream.isatty()
        self.began = self.last = None  # when something was first done, and last shown
        self.drawn = 0
        self.over = threading.Event()
        self.thread = None

    def __enter__(self):
        if self.measure is not None:
            self.thread = threading.Thread(target=self._watch, daemon=True)
            self.thread.start()
        return self

    def __exit__(self, *exception):
        self.over.set()
        if self.thread is not None:
            self.thread.join()
        if self.drawn:
            self.stream.write("\r" + " " * self.drawn + "\r")
            self.stream.flush()

    def _watch(self):
        while not self.over.wait(_REDRAW_S):
            self(*self.measure())

    def __call__(self, done, total):
        if not done or self.stream is None:  # Python has none where the descriptor is closed
            return
        now = time.monotonic()
        if self.began is None:
            self.began, self.last = now, now - _REDRAW_S
        if now - self.last < (_REDRAW_S if self.terminal else _EVERY_S):
            return
        self.last = now
        done = min(done, total)
        part = done / total if total else 1.0
        text = f"{part:4.0%}  {human(done)} of {human(total)}, {human(int(done / max(now - self.began, 1e-3)))}/s"
        if self.terminal:
            columns = _columns(self.stream)
            width = min(_WIDTH, columns - len(self.what) - len(text) - len(" [] ") - 1)
            full = round(part * width)
            text = f"{self.what} [{'#' * full}{'.' * (width - full)}] {text}" if width > 2 else f"{self.what} {text}"
            text = text[: columns - 1]
            self.drawn = min(max(self.drawn, len(text), _LINE), columns - 1)  # a longer one would not be drawn over
            self.stream.write("\r" + text.ljust(self.drawn))
        else:
            text = f"{self.what} {text}"
            self.stream.write(text + "\n")
        self.stream.flush()
