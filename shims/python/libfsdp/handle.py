"""Ownership of a C object: one Python object holds one reference, and drops it when Python drops the object."""

import ctypes
import math
import numbers
import operator

from .errors import InvalidArgument


class Handle:
    """A reference to a C object; passes where a `c_void_p` is wanted.

    A method that calls the library holds the Handle itself in a local variable. So an object that another thread closes
    meanwhile is released only when the call is over.
    """

    __slots__ = ("_as_parameter_", "_release", "__weakref__")

    def __init__(self, pointer, release):
        self._as_parameter_ = pointer.value if isinstance(pointer, ctypes.c_void_p) else pointer
        self._release = release

    def __del__(self):
        self._release(self._as_parameter_)

    def __reduce__(self):
        raise TypeError("a handle of libfsdp can't be copied or pickled: it is one reference, which is given back once")


def milliseconds(seconds, name):
    """A time for the C side: None is 0, the library's default."""
    if seconds is None:
        return 0
    seconds = real(seconds, name)
    if not 0 < seconds < 1e12:
        raise InvalidArgument(f"{name}: {seconds!r} seconds; give a positive number, or None for the default")
    return math.ceil(seconds * 1000)


def integer(value, name, bits=32):
    """An integer for the C side, int32 or int64."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: {value!r} is not an integer") from None
    if not -1 << bits - 1 <= number < 1 << bits - 1:
        raise InvalidArgument(f"{name}: {number} does not fit in {bits} bits")
    return number


def real(value, name):
    """A float64 for the C side."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name}: {value!r} is not a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidArgument(f"{name}: too large a number") from None


def text(value, name):
    """A string for the C side: None stays None, the library's default."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"{name}: {value!r} is not a string")
    if "\0" in value:
        raise InvalidArgument(f"{name}: {value!r} contains a zero character")
    return value.encode()
