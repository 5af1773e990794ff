"""The protocol that every way of sharing memory serves.

A segment is one block of bytes on every rank, of the same size, mapped into every other rank. Nothing above this
folder asks how: the heap hands out offsets, and a pointer becomes a peer's by the difference of two bases.
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
    """This rank's bytes: uint8 [size] on the device, zeroed where memory stands behind them. Empty once closed."""

    bases: list[int]
    """Where each rank's segment begins in this process's address space."""

    @property
    def span(self) -> int:
        """Bytes of address space from a base on that belong to the heap: `local`, and what was imported behind it."""

    def back(self, begin: int, end: int) -> None:
        """Sees to it that memory stands behind these bytes of `local`. Collective where some is missing."""

    def trim(self, live: list[tuple[int, int]]) -> int:
        """Gives memory back in which none of `live`, [begin, end) each, lies. Collective. Returns how many bytes."""

    def adopt(self, tensor: torch.Tensor, inside: bool) -> torch.Tensor:
        """A tensor on the heap that shares memory with `tensor`, which lies `inside` already or not. Collective."""

    def imported(self, offset: int) -> bool:
        """Whether what `adopt` placed begins at `offset`."""

    def dismiss(self, offset: int) -> None:
        """Ends the use of what `adopt` placed at `offset`, until the next `trim`."""

    def close(self) -> None:
        """Unmaps the peers' memory. This rank's own lives on while tensors refer to it."""


class FixedSegment:
    """What segments have in common that are allocated once and whole."""

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
    """What the system, or a driver by `refusal`, says of memory that it does not have, as `HeapExhausted`."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.OutOfMemoryError among them
        if isinstance(error, IrisError) and not isinstance(error, refusal):
            raise
        raise HeapExhausted(
            f"heap_size is {size} bytes, which could not be allocated: {str(error).splitlines()[0]}"
        ) from error
