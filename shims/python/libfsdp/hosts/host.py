"""What an adapter tells the core about its framework: a subclass of Host, one object of it.

A "tensor" is one of the framework's; a "parameter" is what its modules hold and its optimizers step.
"""

import contextlib


class Host:
    """A framework. The methods that raise NotImplementedError are the adapter's to write; the others may stay.

    name           for messages
    Tensor, Parameter, Module   the framework's classes
    Containers     its module classes that hold others and have no forward of their own: a tuple
    NotSharded     the exception for a module that fully_shard was not called on, where one that was is needed
    writes_back    whether `unshard(); edit; reshard()` keeps the edit
    """

    name = None
    Tensor = Parameter = Module = None
    Containers = ()
    NotSharded = ValueError
    writes_back = False

    # ---- Memory ----

    def lend(self, tensor, name):
        """The DLTensor of a dense tensor, which it keeps; raises the framework's error for one that has no memory."""
        raise NotImplementedError

    def adopt(self, tensor):
        """A tensor on the memory of a libfsdp.Tensor."""
        raise NotImplementedError

    def twin(self, tensor):
        """Another tensor on the same memory, with no place in autograd, and no view of the first: what `unreadable` does
        to the first holds for it."""
        raise NotImplementedError

    def unreadable(self, fulls):
        """Full parameters have lost their values: where the framework can do so, let it refuse to use them (their twins,
        which share what it keeps for that) in a backward."""

    def readable(self, fulls):
        """And they have values again."""

    def address(self, tensor):
        """Where a tensor's elements begin: an integer."""
        raise NotImplementedError

    def cast(self, tensor, dtype):
        """A float tensor in another dtype, in the graph; others as they are."""
        raise NotImplementedError

    # ---- Communication of the framework's own, for comm.py ----

    SUM = AVG = None  # its names for reductions

    class Buffers:
        """Memory for a reduction: like the framework's ReduceScatter, allocate(size, *, dtype, device)."""

    def reduce_scatter(self, output, input, group, average):
        raise NotImplementedError

    def all_reduce(self, tensor, group):
        """Sum, in place."""
        raise NotImplementedError

    # ---- Autograd ----

    def anchor(self, iteration):
        """A tensor that requires a gradient, for `gather`: of one forward of the outermost module.

        Where the framework calls what at_end_of_backward was given after an exception too, the host keeps
        `iteration.unfinished`: forwards whose backward has begun and has not gone through all that needs their anchor."""
        raise NotImplementedError

    def gather(self, anchor, use):
        """Apply the class that state.gather_function(self.Function) gave."""
        raise NotImplementedError

    def no_grad(self):
        """A context manager in which nothing is recorded."""
        raise NotImplementedError

    def grad_enabled(self):
        raise NotImplementedError

    def on_gradient(self, tensor, function):
        """Call function(gradient) when the gradient of a tensor that is not a leaf has been computed."""
        raise NotImplementedError

    def at_end_of_backward(self, function):
        """Call function() when the backward pass that is running is over, and drop it uncalled when it fails (or see
        `anchor`)."""
        raise NotImplementedError

    def records_backward(self):
        """Whether the backward that is running is recorded (create_graph), so that it can be differentiated itself."""
        return False

    def backward_id(self):
        """A number for the backward pass that is running, another one for a pass inside it; -1 when none is. None where
        the framework does not say."""
        return None

    def outside_graph(self, function):
        """`function`, for hooks: as it is, or told to a compiler that it is not to be traced."""
        return function

    def compiling(self):
        """Whether a compiler is tracing what calls this."""
        return False

    # ---- Modules ----

    def class_name(self, original):
        """The name of the class that a module of class `original` gets."""
        raise NotImplementedError

    def hook(self, module, state):
        """Register state.pre_forward, state.after_forward, and state.reshard_now before state dicts are read or
        loaded."""
        raise NotImplementedError

    # ---- Parameters ----

    def whole(self, parameter):
        """(shape, dtype) of a parameter that is to be sharded."""
        return tuple(parameter.shape), parameter.dtype

    def check_parameter(self, parameter, name):
        """Raise the framework's error for a parameter that can't be sharded: on a device, say."""

    def is_meta(self, parameter):
        """Whether a sharded parameter has a shape but no values yet."""
        raise NotImplementedError

    def placement(self, parameter, dim, ranks):
        """What the adapter wants to remember of how a parameter lies; `.dim` is the dimension that is cut."""
        raise NotImplementedError

    def shard_of(self, parameter, placement, ranks):
        """The parameter that stands for this rank's shard, with its values in memory of its own: a new one, or the
        same object that has become smaller. Called by fully_shard, once for each."""
        raise NotImplementedError

    def present(self, tensor, placement):
        """What the module is to show for a full parameter's `tensor`, in the graph."""
        return tensor

    def local(self, parameter):
        """The plain tensor that a sharded parameter, or a gradient of one, holds on this rank."""
        raise NotImplementedError

    def set_local(self, parameter, tensor):
        """Let a sharded parameter, which stays the same object, hold another tensor."""
        raise NotImplementedError

    def gradient(self, parameter, tensor):
        """What is to be `parameter.grad` when `tensor` holds its values."""
        return tensor

    def accumulated(self, parameter):
        """parameter.grad has been written by a backward pass: the framework's own hooks, if any."""

    def holds(self, gradient):
        """Whether something but the core, and parameter.grad, still has this object: then its values must last."""
        return True

    @contextlib.contextmanager
    def named(self, label):
        """A block that profilers show under this name."""
        yield
