"""Comparing two checkpoints of any kinds: names, dtypes, shapes, values tensor by tensor, and JSON values.

Values are the same where their bits are, or, with a tolerance (rtol, atol), where |a-b| <= atol + rtol * |b|, NaN and
NaN, infinity and the same infinity, whatever their dtypes.
"""

import math

from .formats import bits, cast
from .table import Progress, count, printable, shape_text, table

_CHUNK = 1 << 22  # elements that are compared at a time
_SHOWN = 20  # differences of each sort that are printed


def compare(a, b, tolerance=None, stream=None):
    """Print how two Contents differ, and a summary; whether they do. tolerance: (rtol, atol), or None."""
    only_a = [name for name in a.items if name not in b.items]
    only_b = [name for name in b.items if name not in a.items]
    both = [name for name in a.items if name in b.items]
    _names(f"only in {a.path}", [_named(a, name) for name in only_a])
    _names(f"only in {b.path}", [_named(b, name) for name in only_b])
    _names("dtypes or shapes that differ", [_unlike(a, b, name) for name in both if _unlike(a, b, name)])
    _names("names tied otherwise", [_tie(a, b, name) for name in both if _tie(a, b, name)])
    equal, rows, alike = _values(a, b, both, tolerance, stream)
    if rows:
        print("values that differ")
        shown = [row.cells() for row in rows[:_SHOWN]]
        table(shown, ["name", "elements", "differ", "largest |a-b|", "relative"], right=(1, 2, 3, 4))
        _more(len(rows))
    own = _own(a, b)
    _names("entries of ranks that differ", own)
    json = list(_json(a.json, b.json, ""))
    _names("JSON values that differ", json)
    said = [f"{count(len(both), 'tensor')} in both: {equal} equal bit for bit"]
    if alike:
        said.append(f"{alike} {'of the same values in another dtype' if tolerance is None else 'within the tolerance'}")
    unlike = sum(1 for name in both if _shape(a, name) != _shape(b, name))
    if rows:
        worst = max(rows, key=lambda row: row.largest)
        said.append(f"{len(rows)} of other values (largest difference {worst.largest:.3g}, in {printable(worst.name)})")
    if unlike:
        said.append(f"{unlike} of another shape")
    for names, path in ((only_a, a.path), (only_b, b.path)):
        if names:
            said.append(f"{len(names)} only in {path}")
    if own:
        said.append(f"entries of ranks differ ({len(own)})")
    said.append(f"JSON values differ (at {count(len(json), 'place')})" if json else "JSON values are equal")
    print("; ".join(said))
    dtypes = tolerance is None and any(_unlike(a, b, name) for name in both)
    ties = any(_tie(a, b, name) for name in both)
    return bool(only_a or only_b or rows or own or json or unlike or dtypes or ties)


def _names(title, lines):
    if lines:
        print(title)
        for line in lines[:_SHOWN]:
            print(f"  {printable(line)}")
        _more(len(lines))


def _more(n):
    if n > _SHOWN:
        print(f"  and {n - _SHOWN} more")


def _shape(content, name):
    return content.items[name].shape


def _named(content, name):
    item = content.items[name]
    return f"{name}  {item.dtype} {shape_text(item.shape)}"


def _unlike(a, b, name):
    """How an item's dtype and shape differ, or ""."""
    one, other = a.items[name], b.items[name]
    if (one.dtype, one.shape) == (other.dtype, other.shape):
        return ""
    return f"{name}  {one.dtype} {shape_text(one.shape)}, {other.dtype} {shape_text(other.shape)}"


def _tie(a, b, name):
    one, other = a.items[name].tied_to, b.items[name].tied_to
    return "" if one == other else f"{name}  is tied to {one or 'nothing'}, {other or 'nothing'}"


class _Difference:
    """Of the values of one tensor."""

    def __init__(self, name):
        self.name, self.elements, self.differ, self.largest, self.relative = name, 0, 0, 0.0, 0.0

    def cells(self):
        return [self.name, self.elements, self.differ, f"{self.largest:.3g}", f"{self.relative:.3g}"]


def _values(a, b, both, tolerance, stream):
    """(how many are equal bit for bit, [_Difference of those that are not the same], how many others are)."""
    equal, rows, alike, done = 0, [], 0, 0
    names = [name for name in both if _shape(a, name) == _shape(b, name)]
    total = sum(a.items[name].nbytes for name in names)
    with Progress("comparing", stream=stream) as progress:
        for name in names:
            progress(done, total)
            found = difference(name, a.items[name], b.items[name], tolerance)
            if found is None:
                equal += 1
            elif found.differ:
                rows.append(found)
            else:
                alike += 1
            done += a.items[name].nbytes
    return equal, rows, alike


def difference(name, one, other, tolerance=None):
    """The _Difference of two items of the same shape; None where they are equal bit for bit, of one dtype."""
    import numpy

    first, second = one.read(), other.read()
    if one.dtype == other.dtype:
        x, y = bits(first), bits(second)
        if numpy.array_equal(x, y):
            return None
    found = _Difference(name)
    found.elements = math.prod(one.shape)
    x, y = (_numbers(array, item) for array, item in ((first, one), (second, other)))
    for start in range(0, found.elements, _CHUNK):
        _compare_chunk(found, x[start : start + _CHUNK], y[start : start + _CHUNK], tolerance)
    if tolerance is None and one.dtype == other.dtype and not found.differ:  # bits that mean the same: -0.0 and NaNs
        found.differ = _bits_that_differ(first, second, one)
    return found


def _bits_that_differ(first, second, item):
    x, y = bits(first).reshape(math.prod(item.shape), -1), bits(second).reshape(math.prod(item.shape), -1)
    return int((x != y).any(axis=1).sum())


def _numbers(array, item):
    """A flat NumPy array of an item's values: floats of 16 and 8 bits as float32."""
    small = item.floats and item.dtype not in ("float32", "float64")
    return cast(array, item.shape, "float32" if small else item.dtype).numpy().reshape(-1)


def _compare_chunk(found, x, y, tolerance):
    import numpy

    exact = not any(array.dtype.kind in "fc" for array in (x, y))
    differs = x != y
    if not exact:
        differs &= ~(numpy.isnan(x) & numpy.isnan(y))
    x, y = x[differs], y[differs]
    with numpy.errstate(all="ignore"):
        apart, size = _apart(x, y), numpy.maximum(abs(_wide(x)), abs(_wide(y)))
        apart[numpy.isnan(apart)] = numpy.inf  # NaN or infinity on one side only
        if tolerance is not None:
            rtol, atol = tolerance
            outside = ~((apart <= atol + rtol * abs(_wide(y))) & (apart < numpy.inf))
            apart, size = apart[outside], size[outside]
        relative = apart / size
        relative[numpy.isnan(relative)] = numpy.inf
    found.differ += len(apart)
    found.largest = max(found.largest, float(apart.max(initial=0)))
    found.relative = max(found.relative, float(relative.max(initial=0)))


def _wide(x):
    return x.astype("complex128" if x.dtype.kind == "c" else "float64")


def _apart(x, y):
    """|x - y| as float64; of whole numbers it is the difference that is rounded, not they."""
    import numpy

    if x.dtype.kind not in "iu" or y.dtype.kind not in "iu":
        return abs(_wide(x) - _wide(y))
    if x.dtype.kind != y.dtype.kind:
        return abs(x.astype(object) - y.astype(object)).astype("float64")
    larger, smaller = numpy.maximum(x, y).astype("uint64"), numpy.minimum(x, y).astype("uint64")
    return (larger - smaller).astype("float64")  # modulo 2**64, where it is right


def _own(a, b):
    """How entries of ranks differ."""
    mine, theirs = ({(rank, name): item for rank, name, item in content.of_ranks} for content in (a, b))
    lines = []
    for rank, name in dict.fromkeys([*mine, *theirs]):
        one, other = mine.get((rank, name)), theirs.get((rank, name))
        if one is None or other is None:
            lines.append(f"{name} of rank {rank}  only in {(a if other is None else b).path}")
        elif (one.dtype, one.shape) != (other.dtype, other.shape) or not (bits(one.read()) == bits(other.read())).all():
            lines.append(f"{name} of rank {rank}")
    return lines


def _json(a, b, where):
    """Lines for all places at which two JSON values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            place = f"{where}.{key}" if where else key
            if place == "optimizer.type" and None in (a.get(key), b.get(key)):
                continue  # other formats have no place for it
            if key not in a or key not in b:
                yield f"{place}  only in the {'first' if key in a else 'second'}"
            else:
                yield from _json(a[key], b[key], place)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (one, other) in enumerate(zip(a, b)):
            yield from _json(one, other, f"{where}[{index}]")
    elif a != b or isinstance(a, bool) != isinstance(b, bool):
        yield f"{where}  {_short(a)}, {_short(b)}"


def _short(value):
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
