"""The protocol that every way of sharing memory implements.

A segment is one block of bytes on every rank, of the same size, mapped into every other rank. The code above this
folder needs no more: the heap hands out offsets, and adding the difference of two bases makes a pointer a peer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from ..errors import HeapExhausted, IrisError, NotSymmetricError

# Every base is aligned to this on every platform: pointer translation hints it to the compiler.
ALIGNMENT = 2 << 20


class Segment(Protocol):
    """One rank's view of the memory that all ranks share."""

    local: torch.Tensor
    """This rank's bytes: uint8 [size] on the device, zeroed where memory is mapped. Empty once closed."""

    bases: list[int]
    """Address of each rank's segment in this process."""

    @property
    def span(self) -> int:
        """Return the bytes of address space that the heap occupies from a base on: `local` and the imports after it."""

    def back(self, begin: int, end: int) -> None:
        """Map memory to these bytes of `local` where it is missing. Collective if any is."""

    def trim(self, live: list[tuple[int, int]]) -> int:
        """Unmap memory that overlaps none of the [begin, end) in `live`; return how many bytes. Collective."""

    def adopt(self, tensor: torch.Tensor, inside: bool) -> torch.Tensor:
        """Return a tensor on the heap that shares memory with `tensor`, `inside` the heap or not. Collective."""

    def imported(self, offset: int) -> bool:
        """Return whether a tensor imported by `adopt` begins at `offset`."""

    def dismiss(self, offset: int) -> None:
        """Mark the import at `offset` as unused; the next `trim` unmaps it."""

    def close(self) -> None:
        """Unmap the peers' memory. This rank's own lives on while tensors refer to it."""


class FixedSegment:
    """Methods of segments whose memory is allocated once, in full."""

    local: torch.Tensor
    bases: list[int]

    @property
    def span(self) -> int:
        return self.local.numel()

    def back(self, begin: int, end: int) -> None:
        pass

    def trim(self, live: list[tuple[int, int]]) -> int:
        return 0

    def adopt(self, tensor: torch.Tensor, inside: bool) -> torch.Tensor:
        if inside:
            return tensor
        raise NotSymmetricError(
            f"a tensor {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device} lies outside the symmetric heap, and "
            f"allocator 'torch' cannot import memory. Make one with ctx.empty(...) on every rank and copy_ into it, or "
            f"make the context with allocator_type='vmem'."
        )

    def imported(self, offset: int) -> bool:
        return False

    def dismiss(self, offset: int) -> None:
        pass  # nothing was imported


@contextmanager
def allocating(size: int, refusal: type[IrisError] = HeapExhausted) -> Iterator[None]:
    """Turn an out-of-memory error of the system, or a driver's `refusal`, into `HeapExhausted`."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.OutOfMemoryError among them
        if isinstance(error, IrisError) and not isinstance(error, refusal):
            raise
        raise HeapExhausted(
            f"heap_size is {size} bytes, which could not be allocated: {str(error).splitlines()[0]}"
        ) from error
