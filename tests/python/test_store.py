"""Stores: meeting through each kind of URL and through a service of the host, and what goes wrong there."""

import gc
import socket
import threading
import time

import pytest
from conftest import environment, run_python

import libfsdp
from libfsdp import Store


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet(n, work, url=None, timeout=10, **more):
    """Run work(store) on n threads, each with its own Store; their results, exceptions among them."""
    url = url or f"tcp://127.0.0.1:{free_port()}"
    results = [None] * n

    def one(rank):
        try:
            with Store(url, rank=rank, world_size=n, timeout=timeout, **more) as store:
                results[rank] = work(store)
                store.add("done", 1)
                while rank == 0 and store.add("done", 0) < n:  # rank 0 serves the others
                    time.sleep(0.01)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout + 5)
        assert not thread.is_alive()
    return results


def exchange(store):
    store.set(f"from {store.rank}", bytes([store.rank]) * 3)
    store.add("sum", 10**store.rank)
    neighbour = (store.rank + 1) % store.world_size
    store.wait(f"from {neighbour}")
    return store.rank, store.world_size, store.get(f"from {neighbour}")


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_ranks_exchange_values(scheme, tmp_path):
    url = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/meet"
    assert meet(3, exchange, url) == [(0, 3, b"\1\1\1"), (1, 3, b"\2\2\2"), (2, 3, b"\0\0\0")]
    assert not (tmp_path / "meet").exists()


def test_rank_and_size_in_the_url():
    port = free_port()
    with Store(f"tcp://127.0.0.1:{port}?rank=0&world_size=1") as store:
        assert (store.rank, store.world_size) == (0, 1)
        store.set("text", "grüße")
        assert store.get("text") == "grüße".encode()
        store.set("empty", b"")
        assert store.get("empty") == b""
        store.set("large", b"x" * 65536)
        assert store.get("large") == b"x" * 65536
        assert [store.add("n", 5), store.add("n", -7)] == [5, -2]


def test_alone_without_a_launcher():
    code = "import libfsdp; s = libfsdp.Store(); print(s.rank, s.world_size)"
    env = {key: value for key, value in environment().items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    done = run_python("-c", code, env=env)
    assert done.stdout == "0 1\n", done.stderr


def test_a_missing_variable_is_named():
    env = environment(RANK="0", WORLD_SIZE="2")
    env.pop("MASTER_ADDR", None)
    env.pop("MASTER_PORT", None)
    done = run_python("-c", "import libfsdp; libfsdp.Store('env://', timeout=2)", env=env)
    assert "RendezvousFailed" in done.stderr and "MASTER_" in done.stderr


def test_nobody_comes():
    begin = time.monotonic()
    with pytest.raises(libfsdp.Timeout, match="1"):
        Store(f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=2, timeout=0.5)
    assert time.monotonic() - begin < 3


def test_a_key_that_nobody_sets():
    with Store(f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1, timeout=0.3) as store:
        for call in (store.get, store.wait):
            with pytest.raises(TimeoutError, match="never"):
                call("never")


def test_another_job_at_the_same_address():
    port = free_port()
    found = {}

    def one(rank, key):
        try:
            Store(f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=2, job_key=key)
        except libfsdp.FsdpError as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank, f"job {rank}")) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert isinstance(found[1], libfsdp.RendezvousFailed)
    assert "job" in str(found[1])


@pytest.mark.parametrize(
    "url, settings, kind, says",
    [
        (5, {}, TypeError, "url"),
        ("nonsense", {}, ValueError, "nonsense"),
        ("http://x", {}, ValueError, "http"),
        ("tcp://127.0.0.1", {"rank": 0, "world_size": 1}, ValueError, "port"),
        ("tcp://127.0.0.1:1", {"rank": 2, "world_size": 2}, ValueError, "^rank"),
        ("tcp://127.0.0.1:1", {"rank": 0}, ValueError, "^world_size"),
        ("tcp://127.0.0.1:1", {"world_size": 2}, ValueError, "^rank"),
        ("tcp://127.0.0.1:1", {"rank": 0, "world_size": 0}, ValueError, "^world_size"),
        ("tcp://127.0.0.1:1", {"rank": "0", "world_size": 1}, TypeError, "^rank"),
        ("tcp://127.0.0.1:1", {"rank": 0, "world_size": 1, "timeout": 0}, ValueError, "^timeout"),
        ("tcp://127.0.0.1:1", {"rank": 0, "world_size": 1, "timeout": "1"}, TypeError, "^timeout"),
        ("tcp://127.0.0.1:1", {"rank": 0, "world_size": 1, "job_key": 5}, TypeError, "^job_key"),
        ("tcp://127.0.0.1:1", {"rank": 0, "world_size": 1, "job_key": "k" * 300}, ValueError, "job_key"),
    ],
)
def test_bad_arguments_are_named(url, settings, kind, says):
    with pytest.raises(kind, match=says):
        Store(url, **settings)


def test_bad_keys_and_values():
    with Store(f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1, timeout=1) as store:
        for key, kind in ((5, TypeError), ("a\0b", ValueError), ("k" * 256, ValueError)):
            with pytest.raises(kind, match="key"):
                store.set(key, b"")
        with pytest.raises(TypeError, match="value"):
            store.set("k", 5)
        with pytest.raises(ValueError, match="65536|64 KiB|65537"):
            store.set("k", b"x" * 65537)
        with pytest.raises(TypeError, match="amount"):
            store.add("k", 1.5)
    with pytest.raises(ValueError, match="closed"):
        store.get("k")
    store.close()


# ---- A service of the host -------------------------------------------------------------------------------------------


class Service:
    """A key-value service in this process."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def set(self, key, value):
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def wait(self, key, timeout):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout):
                raise TimeoutError(key)

    def get(self, key, timeout):
        self.wait(key, timeout)
        return self.values[key]

    def add(self, key, amount):
        with self.changed:
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = b"%d" % total
            self.changed.notify_all()
        return total


def test_a_service_of_the_host():
    service = Service()
    store = Store.from_callbacks(service, rank=1, world_size=2, timeout=1)
    assert (store.rank, store.world_size) == (1, 2)
    store.set("a", b"\0\1")
    assert store.get("a") == b"\0\1"
    assert [store.add("n", 2), store.add("n", 3)] == [2, 5]
    store.wait("a")
    with pytest.raises(libfsdp.Timeout):
        store.wait("never")


def test_the_services_own_exception_is_the_cause():
    class Broken(Service):
        def add(self, key, amount):
            raise ZeroDivisionError("inside")

    store = Store.from_callbacks(Broken(), rank=0, world_size=1)
    with pytest.raises(libfsdp.CallbackFailed) as caught:
        store.add("n", 1)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_service_is_let_go_with_its_store():
    from libfsdp.store import _Callbacks

    gc.collect()  # what earlier tests left
    before = len(_Callbacks.living)
    store = Store.from_callbacks(Service(), rank=0, world_size=1)
    assert len(_Callbacks.living) == before + 1
    store.close()
    assert len(_Callbacks.living) == before


def test_a_service_that_lacks_a_method():
    with pytest.raises(TypeError, match="service: object has no method 'set'"):
        Store.from_callbacks(object(), rank=0, world_size=1)
    with pytest.raises(ValueError, match="rank"):
        Store.from_callbacks(Service(), rank=3, world_size=2)


def test_groups_over_a_service():
    service = Service()
    seen = [None] * 2

    def one(rank):
        store = Store.from_callbacks(service, rank=rank, world_size=2, timeout=10)
        with libfsdp.Group(store, timeout=10) as group:
            out = bytearray(2)
            group.all_gather(bytes([rank + 5]), out)
            seen[rank] = bytes(out)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert seen == [b"\5\6", b"\5\6"]
