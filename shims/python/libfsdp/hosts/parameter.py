"""One parameter of a unit, as the modules see it.

Between uses each place in a module that had the parameter shows `parameter`, which stands for this rank's shard and is
what optimizers step; while the unit is full it shows a tensor on the full parameter's memory. Both memories are the
library's from the first forward on; before, the shard is in memory of its own.

`.grad` is a tensor on the library's sharded gradient. Frameworks let programs set it to None, write it, or put another
tensor there, so what it holds decides at the start of each backward whether the next gradients are added to it.
"""

from ..errors import InvalidArgument
from ..unit import Meta


class ShardedParameter:
    """name: for messages, and the library's. places: [(module, attribute), ...]. placement: what fully_shard was told
    about it; `placement.dim` is the dimension that is cut."""

    def __init__(self, host, parameter, places, placement, shape, dtype):
        self.host, self.parameter, self.places = host, parameter, places
        self.placement, self.shape, self.dtype = placement, tuple(shape), dtype
        self.name = places[0][1]
        self.frozen = not parameter.requires_grad
        self.library = None  # the libfsdp.Param, once there is one
        self.shard = self.full = None  # tensors on its memory
        self._gradient = self._grad = None  # a tensor on the sharded gradient's memory; what `.grad` is then

    # ---- What the modules show ----

    def show(self, tensor):
        for module, attribute in self.places:
            module._parameters[attribute] = tensor

    def shown(self):
        module, attribute = self.places[0]
        return module._parameters.get(attribute)

    def hide(self):
        self.show(self.parameter)

    # ---- The library's memory ----

    def meta(self):
        return Meta(self.shape, self.dtype)

    def bind(self, library):
        """From here on the shard is in the library's memory, with the values that it has now."""
        host = self.host
        self.library = library
        self.full = host.adopt(library.full)
        self.shard = host.adopt(library.shard)
        self._address = host.address(self.shard)
        self._gradient = self._grad = None
        with host.no_grad():
            self.shard.copy_(host.local(self.parameter))
        host.set_local(self.parameter, self.shard)

    def unbind(self):
        """Back into memory of its own, with the values that it has."""
        host = self.host
        grad = self.parameter.grad
        with host.no_grad():
            local = host.local(self.parameter)
            if self.shard is not None and host.address(local) == self._address:
                host.set_local(self.parameter, local.clone())
            if grad is not None:
                grad = host.gradient(self.parameter, host.local(grad).clone())
        self.parameter.grad = None
        if grad is not None:
            self.parameter.grad = grad
        self.library = self.shard = self.full = self._gradient = self._grad = None

    def replaced(self):
        """Whether the module has been given another parameter in this one's place since."""
        return self.shown() is not self.parameter

    def take(self, parameter):
        """Let another parameter of the same kind, which a program put into the module, stand for the shard."""
        if not isinstance(parameter, self.host.Parameter):
            raise InvalidArgument(
                f"parameter {self.name!r} was replaced by a {type(parameter).__name__} after fully_shard; put values into "
                "the parameter that is there, or call fully_shard afterwards"
            )
        self.parameter = parameter
        self._grad = None
        self.hide()

    def settle(self):
        """Before a forward: move values that a program put elsewhere (`.data`, a loaded state) into the library's
        memory. False when dtype or shape have changed as well, so that the unit must be made anew."""
        host, local = self.host, self.host.local(self.parameter)
        if host.address(local) == self._address and local.dtype == self.shard.dtype:
            return True
        if local.dtype != self.shard.dtype:
            return False
        if tuple(local.shape) != tuple(self.shard.shape):
            raise InvalidArgument(
                f"parameter {self.name!r}: its shard has shape {tuple(local.shape)} now, and had {tuple(self.shard.shape)}: "
                "give it values of the same shape"
            )
        with host.no_grad():
            self.shard.copy_(local)
        host.set_local(self.parameter, self.shard)
        return True

    # ---- The gradient ----

    def begin_gradient(self):
        """At the start of a backward. True: the library's gradient holds what the next is added to; False: nothing."""
        grad = self.parameter.grad
        if self._gradient is None:
            self._gradient = self.host.adopt(self.library.grad)
            self._where = self.host.address(self._gradient)
        if grad is None:
            if self._grad is not None and self.host.holds(self._grad):
                self._leave()
            return False
        local = self.host.local(grad)
        if not self._is_own(grad) or local.dtype != self._gradient.dtype:
            self.clear_gradient()
            with self.host.no_grad():
                self._gradient.copy_(local)
            self._grad = None
        return True

    def _leave(self):
        """Somebody keeps the `.grad` of before: it gets memory of its own, as the library's is about to be written."""
        with self.host.no_grad():
            self.host.set_local(self._grad, self._gradient.clone())
        self._grad = None

    def clear_gradient(self):
        """Let the memory hold zeros where it only counts as zeros: before it is written, but by the library."""
        return self.library.grad

    def forget_gradient(self):
        """Frozen or thawed: the memory is given back, or is another."""
        self._gradient = self._grad = None

    def add_gradient(self, part):
        """What did not come from the library: this rank's part of a reduced gradient."""
        self._gradient.add_(part)

    def own_gradient(self):
        """`.grad`, if there is one, is what the library has: so that what autograd adds to it goes there as well, in a
        backward that reaches the shard itself (a penalty on parameters, say)."""
        grad = self.parameter.grad
        if grad is not None and not self._is_own(grad):
            self._present()

    def end_gradient(self):
        """After a reduction: `.grad` is what the library has, and what autograd has put there itself."""
        grad = self.parameter.grad
        if grad is not None and not self._is_own(grad):
            self.add_gradient(self.host.local(grad))
        self._present()
        self.host.accumulated(self.parameter)

    def _is_own(self, grad):
        return self.host.address(self.host.local(grad)) == self._where

    def _present(self):
        if self._grad is None:
            self._grad = self.host.gradient(self.parameter, self.host.twin(self._gradient))
        if self.parameter.grad is not self._grad:
            self.parameter.grad = self._grad
