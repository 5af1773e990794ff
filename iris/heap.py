"""Offsets on the symmetric heap.

A bump allocator: the same calls give the same offsets on every rank, without a word between them, because nothing
depends on when a tensor dies (Python frees cycles at times that differ by rank). So allocations live until the
context closes: allocate once, then write into them with `out=`. It never asks which kind of memory it cuts.
"""

from __future__ import annotations

import math

import torch

from .errors import HeapExhausted
from .memory import Segment

# Wide enough for tensor descriptors and full cache lines.
GRANULE = 256


class Heap:
    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.size = segment.local.numel()
        self.base = segment.local.data_ptr()
        self.used = 0

    def allocate(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor of `sizes`. Raises `HeapExhausted`, and then nothing was taken."""
        nbytes = math.prod(sizes) * dtype.itemsize
        taken = -(-max(nbytes, 1) // GRANULE) * GRANULE
        if self.used + taken > self.size:
            raise HeapExhausted(
                f"a tensor {tuple(sizes)} of {dtype} needs {nbytes} bytes; {self.size - self.used} of the heap's "
                f"{self.size} are free. Make the heap larger (iris.iris(heap_size=...)), or allocate once and reuse "
                f"with out=."
            )
        offset, self.used = self.used, self.used + taken
        return self._segment.local[offset : offset + nbytes].view(dtype).view(sizes)

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether every element of `tensor` lies in this heap."""
        # not tensor.data_ptr(), which is 0 for an empty tensor
        first = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else -1
        end = first + (reach + 1) * tensor.element_size()
        return self.base <= first and end <= self.base + self.size
