"""Stores: how the ranks of a job find each other."""

import ctypes
import threading
from ctypes import byref, c_int32, c_int64, c_size_t, c_void_p

from . import abi
from .errors import CallbackFailed, InvalidArgument, check, last
from .handle import Handle, integer, milliseconds, text

lib = abi.lib
_LARGEST_VALUE = 64 * 1024


class Store:
    """A small key-value service that the ranks of a job share, used to meet. A context manager; closes itself.

    url        "env://" (the launcher's variables), "tcp://host:port?rank=R&world_size=N" or "file:///path?..."
    rank, world_size   where the URL does not have them
    timeout    seconds, for every wait through this store, and for meeting; None: 300
    job_key    all ranks of a job give the same; None: the environment's FSDP_JOB_KEY, else none

    Returns when every rank has arrived. Raises InvalidArgument (malformed URL, rank out of range), RendezvousFailed (a
    variable is missing, the port is in use, two ranks with one number, ranks that disagree), Timeout (names the ranks
    that did not come).
    """

    def __init__(self, url="env://", *, rank=None, world_size=None, timeout=None, job_key=None):
        if not isinstance(url, str):
            raise TypeError(f"url: {url!r} is not a string")
        options = _options(rank, world_size, timeout, job_key)
        pointer = c_void_p()
        check(lib.fsdp_store_open(text(url, "url"), options, byref(pointer)))
        self._take(pointer)

    @classmethod
    def from_callbacks(cls, service, *, rank, world_size, timeout=None, job_key=None):
        """A store over a key-value service of the host: any object with these methods, called from any thread.

        set(key, value)         key is a str, value bytes
        get(key, timeout)       wait until key exists, at most timeout seconds; return its value (bytes)
        add(key, amount)        atomically add to the integer at key (absent: 0); return the sum
        wait(key, timeout)      wait until key exists, at most timeout seconds

        A method that finds its time is up raises TimeoutError. Any other exception makes the library's call raise
        CallbackFailed with that exception as its `__cause__`.
        """
        for method in ("set", "get", "add", "wait"):
            if not callable(getattr(service, method, None)):
                raise TypeError(f"service: {type(service).__name__} has no method {method!r}")
        options = _options(rank, world_size, timeout, job_key)
        callbacks = _Callbacks(service)
        pointer = c_void_p()
        status = lib.fsdp_store_from_callbacks(callbacks.struct, options, byref(pointer))
        if status:
            callbacks.forget()
            raise last(status)
        self = cls.__new__(cls)
        self._take(pointer)
        return self

    def _take(self, pointer):
        self._owned = Handle(pointer, lib.fsdp_store_release)
        rank, world_size = c_int32(), c_int32()
        check(lib.fsdp_store_identity(self._owned, byref(rank), byref(world_size)))
        self.rank = rank.value
        self.world_size = world_size.value

    @property
    def _handle(self):
        handle = self._owned
        if handle is None:
            raise InvalidArgument("the store is closed")
        return handle

    def __reduce__(self):
        raise TypeError(
            "a libfsdp.Store can't be copied or pickled: it is this process's connection; make one in each process"
        )

    def set(self, key, value):
        """Set `key` (at most 255 bytes) to `value` (bytes or a str, at most 64 KiB)."""
        if isinstance(value, str):
            value = value.encode()
        elif not isinstance(value, (bytes, bytearray, memoryview)):
            raise TypeError(f"value: {type(value).__name__} is neither bytes nor str")
        value = bytes(value)
        _checked(lib.fsdp_store_set(self._handle, _key(key), value, len(value)))

    def get(self, key):
        """The value of `key` as bytes; waits until it exists, up to the store's timeout."""
        buffer = ctypes.create_string_buffer(_LARGEST_VALUE)
        size = c_size_t()
        _checked(lib.fsdp_store_get(self._handle, _key(key), buffer, len(buffer), byref(size)))
        return ctypes.string_at(buffer, size.value)

    def add(self, key, amount):
        """Atomically add `amount` to the integer at `key` (absent: 0) and return the sum."""
        result = c_int64()
        _checked(lib.fsdp_store_add(self._handle, _key(key), integer(amount, "amount", bits=64), byref(result)))
        return result.value

    def wait(self, key):
        """Wait until `key` exists, up to the store's timeout."""
        _checked(lib.fsdp_store_wait(self._handle, _key(key)))

    def close(self):
        """Give the store back; a second close does nothing. Groups made with it keep what they need of it. Rank 0 of a
        tcp store serves until its store and all groups made with it are closed: close it after the others are done."""
        self._owned = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __repr__(self):
        return f"<libfsdp.Store rank {self.rank} of {self.world_size}{' closed' if self._owned is None else ''}>"


def _key(key):
    if not isinstance(key, str):
        raise TypeError(f"key: {key!r} is not a string")
    return text(key, "key")


def _options(rank, world_size, timeout, job_key):
    if rank is not None and world_size is None:
        raise InvalidArgument("world_size: give it together with rank")
    if world_size is not None and rank is None:
        raise InvalidArgument("rank: give it together with world_size")
    options = abi.fsdp_store_options()
    if world_size is not None:
        options.world_size = integer(world_size, "world_size")
        options.rank = integer(rank, "rank")
        if options.world_size < 1:
            raise InvalidArgument(f"world_size: {world_size}; there is at least one rank")
        if not 0 <= options.rank < options.world_size:
            raise InvalidArgument(f"rank: {rank} is not in 0 .. {world_size - 1}")
    options.timeout_ms = milliseconds(timeout, "timeout")
    options.job_key = text(job_key, "job_key")
    return options


# ---- A service of the host -------------------------------------------------------------------------------------------

_failure = threading.local()  # .exception: what a callback raised during this thread's present call


def _checked(status):
    if status:
        raise explained(status)


def explained(status):
    """The exception for a call that may have gone through a host's store: with what its callback raised as its cause."""
    error = last(status)
    cause, _failure.exception = getattr(_failure, "exception", None), None
    if isinstance(error, CallbackFailed):
        error.__cause__ = cause
    return error


class _Callbacks:
    """Keeps a service and the C functions that call it alive, until the library says that it is done with them."""

    living = {}  # id: instance

    def __init__(self, service):
        def answer(function):
            def call(user, *arguments):
                try:
                    function(*arguments)
                    return 0
                except TimeoutError as error:
                    _failure.exception = error
                    return 1
                except BaseException as error:
                    _failure.exception = error
                    return 2

            return call

        def set_(key, value, size):
            service.set(key.decode(), ctypes.string_at(value, size))

        def get(key, buffer, capacity, size, timeout_ms):
            value = bytes(service.get(key.decode(), timeout_ms / 1000))
            size[0] = len(value)
            if len(value) > capacity:
                raise ValueError(f"the value of {key.decode()!r} has {len(value)} bytes, more than {capacity}")
            ctypes.memmove(buffer, value, len(value))

        def add(key, amount, result):
            result[0] = int(service.add(key.decode(), amount))

        def wait(key, timeout_ms):
            service.wait(key.decode(), timeout_ms / 1000)

        self.struct = abi.fsdp_store_callbacks(
            None,
            abi.fsdp_store_set_fn(answer(set_)),
            abi.fsdp_store_get_fn(answer(get)),
            abi.fsdp_store_add_fn(answer(add)),
            abi.fsdp_store_wait_fn(answer(wait)),
            abi.fsdp_store_release_fn(lambda user: self.forget()),
        )
        self.living[id(self)] = self

    def forget(self):
        self.living.pop(id(self), None)
