"""A host's tensors as the library sees them, and lists of tensors as the one tensor that the library has instead.

`Memory` is the part that hosts share. A host's subclass says how one of its tensors is lent (`lend`, `lend_bits`) and
how a new one is made (`empty`); the rest needs only what tensors of all hosts have: `shape`, `dtype`, `numel()`,
`is_contiguous()`.

A contiguous tensor is lent as one dimension of so many elements, whatever its shape: what ranks compare are counts and
dtypes. Others keep shape and strides, and the library packs them. Lists are copied by the library, not by the host:
autograd does not see it, as it does not see what a collective writes, and it may happen on any thread.
"""

import functools

from .. import abi
from ..borrow import _describe
from ..errors import InvalidArgument, check


class Memory:
    """What operations ask of a host's tensors. One for each host, without state."""

    kind = object  # the host's class of tensors
    kind_name = "tensor"

    def lend(self, tensor, name):
        """The DLTensor of a tensor, which `name` calls in messages; it keeps the tensor's memory.

        Raises TypeError for what is no tensor, InvalidArgument or Unsupported for one that can't be lent as it is.
        """
        raise TypeError(f"{type(self).__name__} does not say how a tensor is lent")

    lend_bits = lend  # for operations that only move elements: also dtypes that the library does not know

    def empty(self, count, like):
        """A new flat tensor of `count` elements with the dtype of the tensor `like`."""
        raise TypeError(f"{type(self).__name__} does not say how a tensor is made")

    def failed(self, status):
        """Raise for a copy that the library refused."""
        check(status)

    # ---- Lists -------------------------------------------------------------------------------------------------------

    def like(self, tensors, first, name):
        """Raise unless the tensors have the shape and dtype of `first`."""
        shape, dtype = tuple(first.shape), first.dtype
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, self.kind):
                raise TypeError(f"{name}[{index}]: a {type(tensor).__name__} is not a {self.kind_name}")
            if tensor.dtype != dtype:
                raise InvalidArgument(f"{name}[{index}] has dtype {tensor.dtype}, expected {dtype}")
            if tuple(tensor.shape) != shape:
                raise InvalidArgument(f"{name}[{index}] has shape {tuple(tensor.shape)}, expected {shape}")

    def input(self, tensors, name):
        """The DLTensor of all these tensors' elements, one after the other: of the tensors themselves where they lie
        so, as the chunks of a tensor do, else of a copy."""
        parts = [self.lend_bits(tensor, name) for tensor in tensors]
        whole = _joined(parts)
        if whole is None:
            flat = self._flat(tensors)
            whole = self.lend_bits(flat, name)
            self._copy(parts, tensors, whole, to_parts=False)
        return whole

    def output(self, tensors, name):
        """(the DLTensor that takes the elements of all these tensors, what is left to do then, or None)."""
        parts = [self.lend_bits(tensor, name) for tensor in tensors]
        whole = _joined(parts)
        if whole is not None:
            return whole, None
        whole = self.lend_bits(self._flat(tensors), name)
        return whole, functools.partial(self._copy, parts, tensors, whole, to_parts=True)

    def flat_input(self, tensor, name):
        """The DLTensor of a tensor for an operation that knows elements only: of a copy when it is strided."""
        return self.input([tensor], name)

    def flat_output(self, tensor, name):
        """The same for its output: (DLTensor, what is left to do then, or None)."""
        return self.output([tensor], name)

    def _flat(self, tensors):
        return self.empty(sum(tensor.numel() for tensor in tensors), tensors[0])

    def _copy(self, parts, tensors, whole, *, to_parts):
        address = whole.data or 0
        for tensor, part in zip(tensors, parts):
            count = tensor.numel()
            shape = part.shape[: part.ndim]
            piece = _describe(whole, address, whole.dtype.code, whole.dtype.bits, shape, _row_major(shape))
            address += count * whole.dtype.bits // 8
            status = abi.lib.fsdp_copy(piece, part) if to_parts else abi.lib.fsdp_copy(part, piece)
            if status:
                self.failed(status)


def _joined(parts):
    """The DLTensor of tensors of one dtype that lie one after the other without gaps; None when these don't."""
    start = end = parts[0].data or 0
    size = parts[0].dtype.bits // 8
    count = 0
    for part in parts:
        if part.ndim != 1 or part.byte_offset or (part.data or 0) != end or (part.strides and part.strides[0] != 1):
            return None
        count += part.shape[0]
        end += part.shape[0] * size
    head = parts[0].dtype
    return _describe(parts, start, head.code, head.bits, (count,), (1,))


def _row_major(shape):
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return strides[::-1]
