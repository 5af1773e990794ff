"""The protocol that every way of sharing memory serves, and the choice between them.

A segment is one block of bytes on every rank, of the same size, mapped into every other rank. Nothing above this
folder asks how: the heap hands out offsets, and a pointer becomes a peer's by the difference of two bases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import os
from typing import Protocol

import torch

from ..errors import ArgumentError, HeapExhausted, IrisError, NotSymmetricError
from ..group import Ranks

# Every base is aligned to this on every platform: pointer translation hints it to the compiler.
ALIGNMENT = 2 << 20
ALLOCATORS = ("torch", "vmem")


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


def map_segment(allocator: str, size: int, device: torch.device, ranks: Ranks) -> Segment:
    """Maps `size` bytes of every rank everywhere. Collective.

    Raises `ArgumentError` for an unknown `allocator` and `HeapExhausted` when the memory cannot be had.
    """
    if allocator not in ALLOCATORS:
        name = "IRIS_ALLOCATOR" if "IRIS_ALLOCATOR" in os.environ else "allocator_type"  # the first overrides
        raise ArgumentError(f"{name} is {allocator!r}; expected one of {ALLOCATORS}")
    if allocator == "vmem":
        return ranks.together("importing", _virtual)(size, device, ranks)
    if device.type == "cpu":
        return ranks.together("importing", _shared)(size, ranks)
    return ranks.together("importing", _symmetric)(size, device, ranks)


def _virtual() -> Callable[..., Segment]:
    from .vmem import VirtualSegment

    return VirtualSegment


def _shared() -> Callable[..., Segment]:
    from .shared_memory import SharedMemorySegment

    return SharedMemorySegment


def _symmetric() -> Callable[..., Segment]:
    from .torch_symmetric import TorchSymmetricSegment

    return TorchSymmetricSegment


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
