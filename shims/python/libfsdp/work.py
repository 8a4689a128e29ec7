"""Work: an operation that goes on while Python does something else.

The library reads and writes an operation's arrays until it is complete, so somebody must keep them alive. A Work does.
A Work that is dropped before its operation is complete leaves them to `_abandoned`, which is looked through whenever the
next operation starts, and at exit.

Waiting. `wait` sleeps in the library in slices of 0.1 s on the main thread, so that Ctrl-C is answered; other threads,
which never see signals, sleep in one piece.
"""

import atexit
import ctypes
import functools
import sys
import threading
import time
import weakref
from ctypes import CFUNCTYPE, byref, c_int32, c_void_p, py_object

from . import abi
from .errors import InvalidArgument, Pending, check, from_info, last
from .handle import Handle, real

lib = abi.lib
SLICE_MS = 100
_ENDLESS = 1e9  # seconds that nobody waits
_keep = ctypes.PYFUNCTYPE(None, py_object)(("Py_IncRef", ctypes.pythonapi))
_main_thread = threading.main_thread().ident
_get_ident = threading.get_ident


class Work:
    """A pending operation, made by a call with `async_op=True`.

    result  what the call gives: its output array, or None where this rank gets none. Defined once `wait` has returned.
    """

    __slots__ = ("_handle", "_arrays", "_group", "_failure", "_complete", "_callbacks", "_lock", "result", "__weakref__")

    def __init__(self, handle, arrays, result, group):
        self._handle = Handle(handle, lib.fsdp_work_release)
        self._group = weakref.ref(group)
        self._arrays = arrays
        self._failure = None
        self._complete = False
        self._callbacks = None
        self._lock = threading.Lock()
        self.result = result
        _started.add(self)

    def __reduce__(self):
        raise TypeError("a libfsdp.Work can't be copied or pickled: it is one operation of this process; wait() for it here")

    def test(self):
        """Whether the operation is complete, successfully or not. Never blocks, never raises its failure."""
        if not self._complete:
            done = c_int32()
            status = lib.fsdp_work_test(self._handle, byref(done))
            if done.value or status:
                self._finish(status)
        return self._complete

    def wait(self, timeout=None):
        """Wait until the operation is complete, and return its `result`.

        timeout: seconds; 0: only look; None or infinite: as long as the group's own timeout allows. Raises Pending, a TimeoutError, when
        `timeout` passes first (the operation goes on; wait again), else what the operation failed with: Mismatch,
        Timeout, PeerLost, Aborted, ... After a KeyboardInterrupt the operation goes on too.
        """
        deadline = None
        if timeout is not None:
            seconds = real(timeout, "timeout")
            if seconds != seconds:
                raise InvalidArgument("timeout: NaN is no number of seconds")
            if seconds < _ENDLESS:
                deadline = time.monotonic() + seconds
        if not self._complete:
            status = self._wait(deadline)
            if status == abi.FSDP_ERR_PENDING:
                raise Pending(f"the operation is not complete after {timeout} s; it goes on")
            self._finish(status)
        if self._failure is not None:
            raise self._failure
        return self.result

    def _wait(self, deadline):
        handle = self._handle
        longest = SLICE_MS if _get_ident() == _main_thread else -1
        while True:
            slice_ms = longest
            if deadline is not None:
                left = max(0, int((deadline - time.monotonic()) * 1000) + 1)
                slice_ms = left if longest < 0 else min(longest, left)
            status = lib.fsdp_work_wait(handle, slice_ms)
            if status != abi.FSDP_ERR_PENDING or (deadline is not None and time.monotonic() >= deadline):
                return status

    @property
    def source(self):
        """The rank whose message a complete `recv` took, also one with src=ANY_RANK. Raises InvalidState otherwise."""
        rank = c_int32()
        check(lib.fsdp_work_source(self._handle, byref(rank)))
        return rank.value

    @property
    def error(self):
        """The exception that the operation failed with; None while it is pending, or when it succeeded."""
        self.test()
        return self._failure

    def on_done(self, callback):
        """Call `callback(work)` once the operation is complete: on the thread that completes it, or here and at once
        when it is complete already. Look at `work.error` in it; don't wait there for the same group. An exception from
        the callback goes to `sys.unraisablehook`."""
        if not callable(callback):
            raise TypeError(f"callback: {callback!r} is not callable")
        with self._lock:
            earlier = self._callbacks
            if earlier is None:
                self._callbacks = [callback]
            elif earlier is not _CALLED:
                earlier.append(callback)
        if earlier is _CALLED:
            callback(self)
        elif earlier is None:  # the first: the library takes one for each handle
            key = id(self)
            _awaited[key] = self
            status = lib.fsdp_work_on_done(self._handle, _on_done, key)
            if status:
                del _awaited[key]
                raise last(status)

    def _call_back(self):
        with self._lock:
            callbacks, self._callbacks = self._callbacks, _CALLED
        for callback in callbacks:
            # Through ctypes, which hands an exception to sys.unraisablehook: there is no caller to raise it to.
            CFUNCTYPE(None)(functools.partial(callback, self))()

    def _finish(self, status):
        if status:
            info = abi.fsdp_error_info()
            lib.fsdp_work_error(self._handle, byref(info))
            self._failure = from_info(info) if info.status == status else last(status)
        self._complete = True
        self._arrays = None

    def __repr__(self):
        if not self.test():
            return "<libfsdp.Work pending>"
        return f"<libfsdp.Work failed: {self._failure}>" if self._failure else "<libfsdp.Work complete>"

    def __del__(self, exiting=sys.is_finalizing, keep=_keep):
        if getattr(self, "_arrays", None) is None:
            return
        if exiting():
            keep(self._arrays)
        elif not self.test():
            _abandoned.append((self._handle, self._arrays, self._group))


def start(function, handle, arguments, result, group):
    """Start an operation of `group`: `function(handle, *arguments, &work)`; the arguments are what must stay alive."""
    if _abandoned:
        _drop_complete()
    work = c_void_p()
    status = function(handle, *arguments, byref(work))
    if status:
        raise last(status)
    return Work(work, arguments, result, group)


# ---- Callbacks -------------------------------------------------------------------------------------------------------

_CALLED = ()  # in place of a Work's list of callbacks, once they were called
_awaited = {}  # key given to the library: the Work that a callback is to be called for


@abi.fsdp_done_fn
def _on_done(status, key):
    work = _awaited.pop(key)
    if not work._complete:
        work._finish(status)
    work._call_back()


# ---- Works that nobody waits for -------------------------------------------------------------------------------------

_started = weakref.WeakSet()  # the Works that somebody holds
_abandoned = []  # (handle, arrays, group) of those that nobody does


def _drop_complete():
    going_on = []
    while _abandoned:
        entry = _abandoned.pop()
        done = c_int32()
        status = lib.fsdp_work_test(entry[0], byref(done))  # FORKED in a child: nothing is pending here
        if not done.value and not status:
            going_on.append(entry)
    _abandoned.extend(going_on)


def pending():
    """The groups of operations that are not complete: a list with an entry for each, None where the group is gone."""
    _drop_complete()
    return [work._group() for work in list(_started) if not work.test()] + [entry[2]() for entry in _abandoned]


def _keep_for_ever():
    """At exit, memory that an operation still uses must outlive the interpreter's clean-up."""
    _drop_complete()
    for entry in _abandoned:
        _keep(entry)


atexit.register(_keep_for_ever)
