"""Operations on whole tensors, under the names that this torch has for them.

torch 2.15 renamed five virtual functions of a process group, and its C++ looks for the old name where the new one is
not found, or is the caller's. A call that goes up to the base class (see dispatch.py) must not come back by the other
name, so a group has one of the two: where it has the new one, the base class has the old and calls it.
"""

import torch.distributed as dist

from .arguments import reducing, rooted, scaled
from .dispatch import given, kernels, summing, watched


class _Before:
    """Names up to 2.14."""

    def _allgather_base(self, output, input, opts=None, timeout=None):
        if watched():
            with kernels():
                return super()._allgather_base(*given(output, input, opts, timeout))
        return self._all_gather_tensor(output, input, opts, timeout)

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        if watched():
            with kernels():
                return super().allgather_into_tensor_coalesced(*given(outputs, inputs, opts))
        return self._all_gather_tensors(outputs, inputs, opts)

    def _reduce_scatter_base(self, output, input, opts=None, timeout=None):
        if watched():
            whole = scaled(input, reducing(opts)[1])
            with kernels():
                return super()._reduce_scatter_base(*given(output, whole, summing(opts), timeout))
        return self._reduce_scatter_tensor(output, input, opts, timeout)

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        if watched():
            wholes = [scaled(input, reducing(opts)[1]) for input in inputs]
            with kernels():
                return super().reduce_scatter_tensor_coalesced(*given(outputs, wholes, summing(opts)))
        return self._reduce_scatter_tensors(outputs, inputs, opts)

    def alltoall_base(self, output, input, output_split_sizes, input_split_sizes, opts=None, timeout=None):
        sizes = output_split_sizes, input_split_sizes
        if watched():
            with kernels():
                return super().alltoall_base(*given(output, input, *sizes, opts, timeout))
        return self._all_to_all_tensor(output, input, *sizes, opts, timeout)


class _Since215:
    """The same, and one that is new."""

    def all_gather_single(self, output, input, opts=None, timeout=None):
        if watched():
            with kernels():
                return super().all_gather_single(*given(output, input, opts, timeout))
        return self._all_gather_tensor(output, input, opts, timeout)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        if watched():
            with kernels():
                return super().all_gather_single_coalesced(*given(outputs, inputs, opts))
        return self._all_gather_tensors(outputs, inputs, opts)

    def reduce_scatter_single(self, output, input, opts=None, timeout=None):
        if watched():
            whole = scaled(input, reducing(opts)[1])
            with kernels():
                return super().reduce_scatter_single(*given(output, whole, summing(opts), timeout))
        return self._reduce_scatter_tensor(output, input, opts, timeout)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        if watched():
            wholes = [scaled(input, reducing(opts)[1]) for input in inputs]
            with kernels():
                return super().reduce_scatter_single_coalesced(*given(outputs, wholes, summing(opts)))
        return self._reduce_scatter_tensors(outputs, inputs, opts)

    def all_to_all_single(self, output, input, output_split_sizes, input_split_sizes, opts=None, timeout=None):
        sizes = output_split_sizes, input_split_sizes
        if watched():
            with kernels():
                return super().all_to_all_single(*given(output, input, *sizes, opts, timeout))
        return self._all_to_all_tensor(output, input, *sizes, opts, timeout)

    def gather_single(self, output, input, opts=None, timeout=None):
        if watched():
            with kernels():
                return super().gather_single(*given(output, input, opts, timeout))
        return self._operations.gather_tensor(output, input, *rooted(opts, timeout))


Names = _Since215 if hasattr(dist.ProcessGroup, "all_gather_single") else _Before
