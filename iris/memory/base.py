"""The protocol that every way of sharing memory serves, and the choice between them.

A segment is one block of bytes on every rank, of the same size, mapped into every other rank. Nothing above this
folder asks how: the heap hands out offsets, and a pointer becomes a peer's by the difference of two bases.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..errors import ArgumentError, HeapExhausted
from ..group import Ranks

# Every base is aligned to this on every platform: pointer translation hints it to the compiler.
ALIGNMENT = 2 << 20


class Segment(Protocol):
    """One rank's view of the memory that all ranks share."""

    local: torch.Tensor
    """This rank's bytes: uint8 [size], zeroed, on the device."""

    bases: list[int]
    """Where each rank's segment begins in this process's address space."""

    def close(self) -> None:
        """Unmaps the peers' memory. This rank's own lives on while tensors refer to it."""


def map_segment(allocator: str, size: int, device: torch.device, ranks: Ranks) -> Segment:
    """Allocates `size` zeroed bytes on every rank and maps them everywhere. Collective.

    Raises `ArgumentError` for an unknown `allocator` and `HeapExhausted` when the memory cannot be had.
    """
    if allocator != "torch":
        raise ArgumentError(f"allocator_type is {allocator!r}; expected 'torch'")
    if device.type == "cpu":
        from .shared_memory import SharedMemorySegment

        return SharedMemorySegment(size, ranks)
    from .torch_symmetric import TorchSymmetricSegment

    return TorchSymmetricSegment(size, device, ranks)


def agree_on_success(failure: str | None, size: int, ranks: Ranks) -> None:
    """Raises `HeapExhausted` on every rank when any rank failed to allocate: none is left waiting for the others."""
    failures = {rank: told for rank, told in enumerate(ranks.all_gather(failure)) if told}
    if failures:
        raise HeapExhausted(f"heap_size is {size} bytes, which could not be allocated on rank: {failures}")
