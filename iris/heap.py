"""Offsets on the symmetric heap.

The same calls give the same offsets on every rank, without a word between them, because nothing depends on when a
tensor dies (Python frees cycles at times that differ by rank). So an allocation lives until `free`, which every rank
calls alike, or until the context closes: allocate once, then write into it with `out=`. The heap never asks which
kind of memory it cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
import math

import torch

from .errors import ArgumentError, DeviceError, HeapExhausted
from .memory import Segment
from .memory.offsets import Offsets, rounded

# Wide enough for tensor descriptors and full cache lines.
GRANULE = 256


class Heap:
    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.size = segment.local.numel()
        self.base = segment.local.data_ptr()
        self._offsets = Offsets(self.size)
        self.lent: set[int] = set()
        """Blocks that torch's pool cuts and gives back itself."""

    @property
    def memory(self) -> torch.Tensor | None:
        """The heap's bytes, uint8; who keeps them keeps the heap mapped."""
        return self._segment.local

    @property
    def used(self) -> int:
        """Where the last allocation ends; set to an earlier value, all that begins from there on is freed."""
        return self._offsets.used

    @used.setter
    def used(self, value: int) -> None:
        self._offsets.cut(value)

    def allocate(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor of `sizes`. Raises `HeapExhausted`, and then nothing was taken."""
        nbytes = math.prod(sizes) * dtype.itemsize
        offset = self.take(nbytes, f"a tensor {tuple(sizes)} of {dtype}")
        return self._segment.local[offset : offset + nbytes].view(dtype).view(sizes)

    def take(self, nbytes: int, what: str, alignment: int = GRANULE) -> int:
        """The offset of `nbytes` for `what`, with memory behind them."""
        taken = rounded(max(nbytes, 1), GRANULE)
        offset = self._offsets.take(taken, alignment)
        if offset is None:
            raise HeapExhausted(
                f"{what} needs {taken} bytes in one piece; {self._offsets.free} of the heap's {self.size} are free, "
                f"{self._offsets.longest} of them together. Make the heap larger (iris.iris(heap_size=...)), or "
                f"allocate once and reuse with out=."
            )
        try:
            self._segment.back(offset, offset + taken)
        except BaseException:
            self._offsets.give(offset)
            raise
        return offset

    def give(self, offset: int) -> None:
        """Frees what `take` gave."""
        self._offsets.give(offset)

    def offset(self, tensor: torch.Tensor) -> int:
        """Where `tensor` begins, counted from the heap's first byte; negative if it has no one place."""
        return _first_byte(tensor) - self.base if tensor.layout is torch.strided else -1

    def free(self, *tensors: torch.Tensor) -> None:
        """Frees the blocks that these fill. Raises `ArgumentError` where one fills none, and frees nothing."""
        offsets = [self.offset(tensor) for tensor in tensors]
        for number, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
            length = 0 if offset in self.lent else self._offsets.length(offset)
            allocated = length and length == rounded(max(span(tensor), 1), GRANULE)
            if not (allocated or self._segment.imported(offset)) or offset in offsets[:number]:
                raise ArgumentError(
                    f"no allocation of this heap lies where the tensor {tuple(tensor.shape)} of {tensor.dtype} does; "
                    f"expected a tensor as ctx.empty(...) or ctx.as_symmetric(...) returned it, not freed before. What "
                    f"memory_pool() gave returns when it dies."
                )
        for offset in offsets:
            if self._segment.imported(offset):
                self._segment.dismiss(offset)
            else:
                self.give(offset)

    def adopt(self, tensor: torch.Tensor, inside: bool) -> torch.Tensor:
        """A tensor on the heap that shares memory with `tensor`, itself if it lies `inside`."""
        return self._segment.adopt(tensor, inside)

    def trim(self) -> int:
        """Gives memory without allocations back to the system. Collective. Returns how many bytes."""
        return self._segment.trim(self._offsets.blocks)

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether every element of `tensor` lies in this heap, or in what was imported into it."""
        return self.holds(*extent(tensor))

    def holds(self, begin: int, end: int) -> bool:
        """The same of the elements between two addresses."""
        return self.base <= begin and end <= self.base + self._segment.span


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses at which a tensor's elements begin and end."""
    if not tensor.numel():
        begin = _first_byte(tensor)
        return begin, begin
    begin, reach = tensor.data_ptr(), 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        reach += (size - 1) * stride
    return begin, begin + reach * tensor.element_size()


def span(tensor: torch.Tensor | None) -> int:
    """The bytes between where a tensor's elements begin and where they end."""
    begin, end = extent(tensor) if tensor is not None else (0, 0)
    return end - begin


def check_tensor(call: str, name: str, t: object, device: torch.device) -> None:
    """Raises a typed error for anything but a tensor on `device`, of which shape and strides can be asked."""
    if not isinstance(t, torch.Tensor):
        raise ArgumentError(f"{call}: {name} is {type(t).__name__}; expected a torch.Tensor")
    if t.is_nested:  # which has no shape
        raise ArgumentError(f"{call}: {name} is a nested tensor; expected a strided one")
    if t.device != device:
        raise DeviceError(f"{call}: {name} is on {t.device}; expected {device}, the context's device")


def check_memory(call: str, names: Sequence[str], begins: Sequence[int], spans: Sequence[int]) -> None:
    """Raises for a tensor without memory at an address of its own: what has been freed, wrapped or traced."""
    for name, begin, nbytes in zip(names, begins, spans, strict=True):
        if nbytes and not begin:
            raise ArgumentError(
                f"{call}: {name} has no memory of its own; expected a tensor with its elements in memory, of a DTensor "
                f"its to_local()"
            )


def _first_byte(tensor: torch.Tensor) -> int:
    # not tensor.data_ptr(), which is 0 for an empty tensor
    return tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()
