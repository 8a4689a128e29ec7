"""Callbacks of units: Python functions that run when a unit's full parameters become valid, or are about to be invalid.

How long they live. The library is given two C functions of this module, which are there for as long as the process,
and a number that finds the Unit; the Unit owns the callables. So a Unit whose callbacks refer to it is ordinary
garbage, and a unit of the library that outlives its Unit (tensors hold it) calls nothing.

What they raise. The library calls them on the thread of the call by which it happens, which a method here makes, and
has no way to hand an exception on. So `call` and `collect` keep the first one and raise it when the library has
returned, with everything done that the call does. What nobody is there to raise, a second exception of one
call too, goes to `sys.unraisablehook`.
"""

import ctypes
import itertools
import threading
import weakref

from . import abi
from .errors import check

_numbers = itertools.count(1)  # not id(): a number must not find another Unit later
_units = weakref.WeakValueDictionary()  # number given to the library: the Unit whose callbacks are to be called


class _Thread(threading.local):
    raised = None  # what callbacks raised during this thread's present `collect`; None outside


_thread = _Thread()


def collect(function, *arguments):
    """function(*arguments), and its result. What a callback raised meanwhile is raised afterwards; when the function
    raises too, that is its cause."""
    outer, raised = _thread.raised, []
    _thread.raised = raised
    try:
        result = function(*arguments)
    except Exception as error:
        if raised:
            raise error from raised[0]
        raise
    finally:
        _thread.raised = outer
    if raised:
        raise raised[0]
    return result


def call(function, *arguments):
    """Call a function of the library that may call callbacks; raise for its status, and what they raised."""
    collect(_checked, function, arguments)


def _checked(function, arguments):
    check(function(*arguments))


def set_callbacks(unit, handle, valid, invalid):
    """Have the library call valid(unit) and invalid(unit), which stand in `unit._valid` and `unit._invalid`."""
    if unit._number is None:
        unit._number = next(_numbers)
        _units[unit._number] = unit
    check(
        abi.lib.fsdp_unit_set_callbacks(
            handle, _on_valid if valid else _NONE, _on_invalid if invalid else _NONE, unit._number
        )
    )


# What these need is bound here, as a module's names may be gone at interpreter exit.


def _run(number, attribute, units, thread):
    unit = units.get(number)
    function = None if unit is None or unit._owned is None else getattr(unit, attribute)
    if function is None:
        return
    try:
        function(unit)
    except BaseException as error:
        if thread.raised is None or thread.raised:
            raise  # ctypes hands it to sys.unraisablehook
        thread.raised.append(error)


@abi.fsdp_unit_fn
def _on_valid(_, number, run=_run, units=_units, thread=_thread):
    run(number, "_valid", units, thread)


@abi.fsdp_unit_fn
def _on_invalid(_, number, run=_run, units=_units, thread=_thread):
    run(number, "_invalid", units, thread)


_NONE = abi.fsdp_unit_fn()
for _function in (_on_valid, _on_invalid):  # never freed: units of the library may keep their addresses to the end
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_function))
