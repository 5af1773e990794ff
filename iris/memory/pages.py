"""Keep memory apart from addresses: `Pages` is the driver's memory (`cuda_pages.py`) or the host's (`host_pages.py`), a
`Region` is a range of addresses with its mappings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol
import weakref

import torch


@dataclass
class Extent:
    """Memory that is mapped at some of a tensor's addresses."""

    address: int
    size: int
    memory: Any
    fd: int
    start: int = 0
    """Where in the memory `address` begins."""


class Pages(Protocol):
    """Reserve, create, export and map memory. Every call raises `OSError` or `PlatformError` that gives the reason."""

    granule: int
    """Addresses and sizes of imports are multiples of it; those of the heap's own chunks, of ALIGNMENT too."""

    def window(self, size: int) -> int:
        """Return how many bytes to reserve for imports in addition to a heap of `size`."""

    def reserve(self, size: int) -> int: ...

    def unreserve(self, base: int, size: int) -> None: ...

    def create(self, size: int) -> Any: ...

    def export(self, memory: Any) -> int:
        """Return a file descriptor of the memory, which the caller closes."""

    def receive(self, fd: int) -> Any: ...

    def release(self, memory: Any) -> None: ...

    def map(self, address: int, size: int, memory: Any, start: int = 0) -> None: ...

    def unmap(self, address: int, size: int) -> None: ...

    def clear(self, address: int, size: int) -> None: ...

    def idle(self) -> None:
        """Wait until nothing on the device can still use the memory about to be unmapped."""

    def tensor(self, address: int, nbytes: int, owner: Any) -> torch.Tensor:
        """Return uint8 [nbytes] at `address`; `owner` lives as long as it does."""

    def extents(self, begin: int, end: int) -> list[Extent]:
        """Return the memory of an outside tensor's addresses. Raise `NotSymmetricError` where it cannot be shared."""


class Region:
    """The addresses of one rank's segment in this process, and what is mapped there. Lives as long as its tensors."""

    def __init__(self, pages: Pages, span: int) -> None:
        self._pages = pages
        self.base = pages.reserve(span)
        self.mapped: dict[int, int] = {}  # [offset] = size
        self.release = weakref.finalize(self, _release, pages, self.base, span, self.mapped)
        self.release.atexit = False  # the process takes everything along

    def map(self, offset: int, size: int, memory: Any, start: int = 0) -> None:
        self._pages.map(self.base + offset, size, memory, start)
        self.mapped[offset] = size

    def unmap(self, begin: int, end: int) -> int:
        """Unmap all mappings that begin in [begin, end); return how many bytes."""
        inside = [offset for offset in self.mapped if begin <= offset < end]
        for offset in inside:
            self._pages.unmap(self.base + offset, self.mapped[offset])
        return sum(self.mapped.pop(offset) for offset in inside)


def _release(pages: Pages, base: int, span: int, mapped: dict[int, int]) -> None:
    pages.idle()
    for offset, size in mapped.items():
        pages.unmap(base + offset, size)
    pages.unreserve(base, span)
