"""TensorPlay's stores as libfsdp.Store.from_callbacks wants a key-value service."""

from ..hosts import rendezvous


class Service(rendezvous.Service):
    """A store, with a prefix before its keys."""

    def wait(self, key, timeout):
        if self._store.wait([self._prefix + key], timeout) is False:
            raise TimeoutError(f"{key} was not set in {timeout:g} s")
