"""Communication that programs put in place of the library's for one unit: set_custom_all_gather,
set_custom_reduce_scatter, set_all_reduce_hook.

Such functions want one flat tensor. Of each parameter it holds the shard of every rank, padded to the first rank's size,
one rank after the other: what torch's own fully_shard hands to them. The library still gathers and reshards, which is
when full parameters have memory; their values are then those that the function gathered. Gradients that such a function
reduces do not pass the library at all.
"""

import math

from ..tensor import shard_extent


class Comm:
    """all_gather, reduce_scatter: objects with allocate(size, *, dtype, device) and __call__; all_reduce_hook: a function.
    None: the library's own."""

    def __init__(self, state):
        self._state = state
        self.all_gather = self.reduce_scatter = self.all_reduce_hook = None
        self._accumulated = None  # full gradients of passes without sync
        self._partial = None  # reduced over the shard dimension only

    @property
    def reduces(self):
        return self.reduce_scatter is not None or self.all_reduce_hook is not None

    def forget(self):
        self._accumulated = self._partial = None

    # ---- Layout ----

    def _pieces(self):
        """(param, where its piece begins, shape of a padded shard) for each parameter, and the sum of their sizes."""
        pieces, start = [], 0
        for param in self._state.params:
            shape = list(param.shape)
            shape[param.placement.dim] = -(-shape[param.placement.dim] // self._state.ranks.shard_size)
            pieces.append((param, start, shape))
            start += math.prod(shape)
        return pieces, start

    def _extent(self, param, rank):
        return shard_extent(param.shape[param.placement.dim], rank, self._state.ranks.shard_size)

    def _one_dtype(self, dtypes, what):
        dtypes = set(dtypes)
        if len(dtypes) > 1:
            raise ValueError(
                f"{what} of {self._state.name}: its parameters have different dtypes ({', '.join(sorted(map(str, dtypes)))}), and "
                "such a function gets one tensor: shard them in separate units, or set mp_policy's dtypes"
            )
        return dtypes.pop()

    # ---- Gather ----

    def gather(self):
        """Let the program's function gather, into the full parameters."""
        state, host, ranks = self._state, self._state.host, self._state.ranks
        pieces, total = self._pieces()
        dtype = self._one_dtype((param.full.dtype for param in state.params), "custom all-gather")
        with host.no_grad():
            whole = self.all_gather.allocate((total * ranks.shard_size,), dtype=dtype, device=state.params[0].full.device)
            mine = whole.narrow(0, total * ranks.shard_rank, total)
            for param, start, shape in pieces:
                _, length = self._extent(param, ranks.shard_rank)
                piece = mine.narrow(0, start, math.prod(shape)).view(shape)
                if length < shape[param.placement.dim]:
                    piece.zero_()
                piece.narrow(param.placement.dim, 0, length).copy_(param.shard)
            work = self.all_gather(output_tensor=whole, input_tensor=mine, group=ranks.shard_group, async_op=False)
            if work is not None:
                work.wait()
            for rank in range(ranks.shard_size):
                for param, start, shape in pieces:
                    at, length = self._extent(param, rank)
                    piece = whole.narrow(0, rank * total + start, math.prod(shape)).view(shape)
                    dim = param.placement.dim
                    # By .data: for autograd these are the values that forward used.
                    param.full.data.narrow(dim, at, length).copy_(piece.narrow(dim, 0, length))

    # ---- Reduce ----

    def reduce(self, grads):
        """What State.reduce asks of the library otherwise."""
        state, host, ranks = self._state, self._state.host, self._state.ranks
        with host.no_grad():
            grads = [None if grad is None or param.frozen else grad for grad, param in zip(grads, state.params)]
            if self._accumulated is not None:
                grads = [added(old, new) for old, new in zip(self._accumulated, grads)]
                self._accumulated = None
            if not state.reduce_grads:
                self._accumulated = [None if grad is None else grad.clone() for grad in grads]
                return
            output = self._reduced(grads)
            if output is None:
                return
            pieces, _ = self._pieces()
            for param, start, shape in pieces:
                if not param.frozen:
                    _, length = self._extent(param, ranks.shard_rank)
                    piece = output.narrow(0, start, math.prod(shape)).view(shape).narrow(param.placement.dim, 0, length)
                    param.add_gradient(piece)

    def _reduced(self, grads):
        """This rank's part of the reduced gradients, flat; None when it is kept for the next pass."""
        state, ranks = self._state, self._state.ranks
        output = self._scatter(grads)
        if ranks.replicate_group is not None:
            if self._partial is not None:
                output, self._partial = output + self._partial, None
            if not state.all_reduce_grads:
                self._partial = output
                return None
            state.host.all_reduce(output, ranks.replicate_group)
            if state.divisor is None:
                output.div_(ranks.replicate_size)
        if state.divisor is not None:
            output.div_(state.divisor)
        if self.all_reduce_hook is not None:
            self.all_reduce_hook(output)
        return output

    def _packed(self, grads, comm):
        """The gradients as such functions want them, and a tensor for this rank's part of their reduction. comm: what
        allocates them."""
        state, host, ranks = self._state, self._state.host, self._state.ranks
        pieces, total = self._pieces()
        dtype = state.policy.reduce_dtype
        if dtype is None:
            dtype = self._one_dtype((param.full.dtype for param in state.params), "custom reduce-scatter")
        device = state.params[0].full.device
        whole = comm.allocate((total * ranks.shard_size,), dtype=dtype, device=device)
        output = comm.allocate((total,), dtype=dtype, device=device)
        whole.zero_()
        for rank in range(ranks.shard_size):
            for (param, start, shape), grad in zip(pieces, grads):
                if grad is not None:
                    at, length = self._extent(param, rank)
                    dim = param.placement.dim
                    piece = whole.narrow(0, rank * total + start, math.prod(shape)).view(shape)
                    piece.narrow(dim, 0, length).copy_(host.local(grad).narrow(dim, at, length))
        return whole, output

    def _scatter(self, grads):
        """This rank's part of the sum (the mean, where no divisor was set) over the shard dimension, flat."""
        state, host, ranks = self._state, self._state.host, self._state.ranks
        whole, output = self._packed(grads, self.reduce_scatter or host.Buffers)
        average = state.divisor is None
        if self.reduce_scatter is None:
            host.reduce_scatter(output, whole, ranks.shard_group, average)
            return output
        work = self.reduce_scatter(
            output_tensor=output,
            input_tensor=whole,
            group=ranks.shard_group,
            op=host.AVG if average else host.SUM,
            async_op=False,
        )
        if work is not None:
            work.wait()
        return output


def added(a, b):
    """The sum of two gradients, either of which may be None."""
    if a is None or b is None:
        return b if a is None else a
    return a + b
