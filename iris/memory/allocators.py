"""Map one rank's memory segment by the allocator that the caller, or `IRIS_ALLOCATOR`, names."""

from __future__ import annotations

from collections.abc import Callable
import os

import torch

from ..errors import ArgumentError
from ..group import Ranks
from .base import Segment

ALLOCATORS = ("torch", "vmem")
ALIASES = {"vmem_chunked": "vmem"}  # as ROCm/iris calls the allocator that maps memory in chunks and reuses it


def map_segment(allocator: str, size: int, device: torch.device, ranks: Ranks) -> Segment:
    """Map `size` bytes of every rank into every rank's address space. Collective.

    Raises `ArgumentError` for an unknown `allocator` and `HeapExhausted` where the memory cannot be allocated.
    """
    allocator = ALIASES.get(str(allocator), allocator)
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
