"""TensorPlay's stores as libfsdp.Store.from_callbacks wants a key-value service."""


class Service:
    """A store, with a prefix before its keys."""

    def __init__(self, store, prefix):
        self._store = store
        self._prefix = prefix

    def set(self, key, value):
        self._store.set(self._prefix + key, value)

    def get(self, key, timeout):
        self.wait(key, timeout)
        return self._store.get(self._prefix + key)

    def add(self, key, amount):
        return self._store.add(self._prefix + key, amount)

    def wait(self, key, timeout):
        if self._store.wait([self._prefix + key], timeout) is False:
            raise TimeoutError(f"{key} was not set in {timeout:g} s")
