"""Share segments of virtual memory: addresses are reserved once, chunks of memory are mapped there as needed.

Every rank reserves, for itself and for each peer, addresses for the whole heap and after them a window for imports.
Where an allocation needs memory, each rank makes one chunk of the same size at the same offset, sends it to all peers
as a file descriptor (`iris/channel.py`) and maps theirs. So growing, trimming and importing are collective, and follow
from the calls alone: ranks that make the same calls do it at the same points. `Pages` (`pages.py`) hides what a chunk
is.
"""

from __future__ import annotations

from collections.abc import Sequence
import hashlib
import os
from typing import Any, NamedTuple

import torch

from .. import platform
from ..errors import CaptureError, HeapExhausted, IrisError, NotSymmetricError, PlatformError
from ..group import Ranks
from ..packets import close_all
from .base import ALIGNMENT, allocating
from .offsets import Offsets, rounded
from .pages import Extent, Pages, Region

# The heap grows and shrinks in chunks of this size, at multiples of it. Larger ones cost fewer exchanges, smaller ones
# return more of a heap that is nearly empty.
CHUNK = 64 << 20
# Descriptors that a rank sends to each peer at once.
_BATCH = 32


class _Report(NamedTuple):
    """The outcome of a call on one rank, which the ranks exchange."""

    numbers: tuple[int, ...]
    failure: str
    fds: list[int]


def pages_of(device: torch.device) -> Pages:
    if device.type == "cpu":
        from .host_pages import HostPages

        return HostPages()
    if torch.version.hip:
        raise PlatformError("allocator 'vmem' is not supported on AMD GPUs; use allocator_type='torch'")
    from .cuda_pages import CudaPages

    return CudaPages(device)


class VirtualSegment:
    def __init__(self, size: int, device: torch.device, ranks: Ranks) -> None:
        self._device, self._rank, self._ranks = device, ranks.rank, ranks
        self._pages = pages = ranks.together("the driver's virtual memory", lambda: pages_of(device))
        self._limit = rounded(size, ALIGNMENT)
        self._window = Offsets(pages.window(size))
        self.span = self._limit + self._window.size
        self._regions: list[Region] = []

        def reserve() -> None:
            with allocating(size, PlatformError):
                for _ in range(ranks.size):
                    self._regions.append(Region(pages, self.span))

        try:
            ranks.together("reserving addresses", reserve)
            self.bases = [region.base for region in self._regions]
            self._imports: dict[int, tuple[int, int]] = {}  # [offset of the tensor] = offset and size in the window
            self._dismissed: list[tuple[int, int]] = []
            self.back(0, 1)
        except BaseException:
            self._unmap_peers()
            for region in self._regions:
                region.release()
            raise
        self.local = pages.tensor(self.bases[self._rank], size, self._regions[self._rank])

    def _exchange(
        self, topic: str, numbers: tuple[int, ...] = (), failure: str = "", fds: Sequence[int] = ()
    ) -> list[_Report]:
        messages = self._ranks.exchange(topic, (numbers, failure), fds=fds)
        return [_Report(message.value[0], message.value[1], message.fds) for message in messages]

    # --- growing and shrinking ---------------------------------------------------------------------------------------

    def back(self, begin: int, end: int) -> None:
        mapped = self._regions[self._rank].mapped
        missing = [offset for offset in range(begin // CHUNK * CHUNK, end, CHUNK) if offset not in mapped]
        for first in range(0, len(missing), _BATCH):
            self._grow([(offset, min(CHUNK, self._limit - offset)) for offset in missing[first : first + _BATCH]])

    def _grow(self, chunks: list[tuple[int, int]]) -> None:
        """Create memory for the (offset, size) of `chunks` and map every rank's; all or, raising, nothing."""
        self._refuse_capture()
        created: list[Extent] = []
        failure, own = "", self._regions[self._rank]
        try:
            try:
                for offset, size in chunks:
                    memory = self._pages.create(size)
                    created.append(Extent(own.base + offset, size, memory, -1))
                    created[-1].fd = self._pages.export(memory)
            except (OSError, PlatformError) as error:
                failure, sent = str(error), []
            else:
                sent = [chunk.fd for chunk in created]
            reports = self._exchange("grow", sum(chunks, ()), failure, sent)
            try:
                _raise_exhausted(_first_failure(reports) or _differs(reports))  # every rank has the same reports
                for chunk in created:
                    own.map(chunk.address - own.base, chunk.size, chunk.memory)
                    self._pages.clear(chunk.address, chunk.size)
                for rank, report in enumerate(reports):
                    for fd, (offset, size) in zip(report.fds, chunks, strict=False):
                        self._map_received(rank, fd, offset, size, 0)
            except (OSError, PlatformError) as error:
                failure = str(error)
            finally:
                close_all(fd for report in reports for fd in report.fds)
            _raise_exhausted(_first_failure(self._exchange("grown", (), failure)))
        except BaseException:
            for offset, _ in chunks:
                self._unmap_everywhere(offset, offset + 1)
            raise
        finally:
            for chunk in created:
                if chunk.fd >= 0:
                    os.close(chunk.fd)
                self._pages.release(chunk.memory)  # the mappings keep it

    def _map_received(self, rank: int, fd: int, offset: int, size: int, start: int) -> None:
        memory = self._pages.receive(fd)
        try:
            self._regions[rank].map(offset, size, memory, start)
        finally:
            self._pages.release(memory)

    def trim(self, live: list[tuple[int, int]]) -> int:
        self._refuse_capture()
        chunks = [
            (start, start + size)
            for start, size in self._regions[self._rank].mapped.items()
            if start < self._limit and not any(begin < start + size and start < end for begin, end in live)
        ]
        reports = self._exchange("trim", (len(self._dismissed), _digest(chunks)))
        if _differs(reports):
            raise NotSymmetricError("trim() would unmap other chunks on other ranks; expected the same calls on all")
        self._pages.idle()
        returned = sum(self._unmap_everywhere(begin, end) for begin, end in chunks)
        for at, size in self._dismissed:
            self._unmap_everywhere(self._limit + at, self._limit + at + size)
            self._window.give(at)
        self._dismissed.clear()
        self._exchange("trimmed")  # what a rank gave is free once every peer has unmapped it
        return returned

    def _unmap_everywhere(self, begin: int, end: int) -> int:
        sizes = [region.unmap(begin, end) for region in self._regions]
        return sizes[self._rank]

    # --- imports -----------------------------------------------------------------------------------------------------

    def adopt(self, tensor: torch.Tensor, inside: bool) -> torch.Tensor:
        self._refuse_capture()
        base, granule = self.bases[self._rank], self._pages.granule
        first, nbytes, extents, failure = 0, 0, [], ""
        try:
            if tensor.device != self._device or tensor.layout is not torch.strided:
                raise NotSymmetricError(
                    f"it is {tensor.layout} on {tensor.device}; expected torch.strided on {self._device}, as from "
                    f"ctx.empty(...)"
                )
            if not tensor.numel() and not inside:
                raise NotSymmetricError("it has no elements; make it with ctx.empty(...)")
            first = tensor.data_ptr() or base
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            nbytes = (last + 1) * tensor.element_size()
            extents = [] if inside else self._pages.extents(first, first + nbytes)
        except (IrisError, OSError) as error:
            failure = str(error)
        try:
            place = (first - base) if inside else first % granule
            before = first - extents[0].address if extents else 0
            after = extents[-1].address + extents[-1].size - first if extents else 0
            form = _digest((tensor.dtype, tensor.shape, nbytes and tensor.stride()))
            reports = self._exchange("as_symmetric", (form, inside, place, before, after, len(extents)), failure)
            self._check_alike(reports, tensor)
            if inside:
                return tensor
            before, after = (max(report.numbers[i] for report in reports) for i in (3, 4))
            at = self._window.take(rounded(before + after, granule), granule)
            if at is None:
                raise HeapExhausted(
                    f"as_symmetric() needs {after} bytes for the tensor; expected at most {self._window.free}, which "
                    f"are left of {self._window.size} for imports: free imports (ctx.free, ctx.trim) or make the heap "
                    "larger"
                )
            offset = self._limit + at + before
            failure = self._import(offset - first, extents, max(report.numbers[5] for report in reports))
            if failure:
                self._unmap_everywhere(self._limit + at, self._limit + at + before + after)
                self._window.give(at)
                raise PlatformError(f"the tensor's memory could not be mapped: {failure}")
        finally:
            close_all(extent.fd for extent in extents)
            for extent in extents:
                self._pages.release(extent.memory)
        self._imports[offset] = at, rounded(before + after, granule)
        whole = self._pages.tensor(base + offset, nbytes, (self._regions[self._rank], tensor.detach()))
        return whole.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def _check_alike(self, reports: list[_Report], tensor: torch.Tensor) -> None:
        failures = {rank: report.failure for rank, report in enumerate(reports) if report.failure}
        for text in sorted(set(failures.values())):
            ranks = [rank for rank, failure in failures.items() if failure == text]
            raise NotSymmetricError(f"as_symmetric() cannot import the tensor of ranks {ranks}: {text}")
        forms, insides, places = (tuple(report.numbers[i] for report in reports) for i in range(3))
        if len(set(forms)) > 1:
            raise NotSymmetricError(
                f"as_symmetric() takes a tensor {tuple(tensor.shape)} of {tensor.dtype}, strides {tensor.stride()}, on "
                f"rank {self._rank} and another form on other ranks; expected the same on all"
            )
        if len(set(insides)) > 1:
            raise NotSymmetricError(
                "as_symmetric() gets a tensor on the heap on some ranks and outside on others; expected one kind on all"
            )
        if len(set(places)) > 1:
            where = "offsets on the heap" if insides[0] else f"distances from a page of {self._pages.granule} bytes"
            raise NotSymmetricError(
                f"as_symmetric(): the tensors of the ranks lie at different {where}: {places}; expected equal ones: "
                f"make the same allocations in the same order on every rank"
            )

    def _import(self, shift: int, extents: list[Extent], most: int) -> str:
        """Map the extents of all ranks, `shift` from their owner's addresses to offsets; return the first failure."""
        failure, own = "", self._regions[self._rank]
        for begin in range(0, most, _BATCH):
            batch = extents[begin : begin + _BATCH]
            places = [(extent.address + shift, extent.size, extent.start) for extent in batch]
            reports = self._exchange("import", sum(places, ()), failure, [extent.fd for extent in batch])
            try:
                for (offset, size, start), extent in zip(places, batch, strict=True):
                    own.map(offset, size, extent.memory, start)
                for rank, report in enumerate(reports):
                    for index, fd in enumerate(report.fds):
                        self._map_received(rank, fd, *report.numbers[3 * index : 3 * index + 3])
            except (OSError, PlatformError) as error:
                failure = failure or str(error)
            finally:
                close_all(fd for report in reports for fd in report.fds)
        return _first_failure(self._exchange("imported", (), failure))

    def imported(self, offset: int) -> bool:
        return offset in self._imports

    def dismiss(self, offset: int) -> None:
        self._dismissed.append(self._imports.pop(offset))

    def close(self) -> None:
        self._pages.idle()
        self._unmap_peers()
        self._regions, self.local, self.span = [], torch.empty(0, dtype=torch.uint8, device="cpu"), 0

    def _unmap_peers(self) -> None:
        for rank, region in enumerate(self._regions):
            if rank != self._rank:
                region.release()

    def _refuse_capture(self) -> None:
        if platform.is_capturing(self._device):
            raise CaptureError("memory of the heap cannot be mapped while a graph is captured; allocate before")


def _first_failure(reports: list[_Report]) -> str:
    return next((f"rank {rank}: {report.failure}" for rank, report in enumerate(reports) if report.failure), "")


def _differs(reports: list[_Report]) -> str:
    numbers = [report.numbers for report in reports]
    if len(set(numbers)) == 1:
        return ""
    return f"the ranks want chunks (offset, size, ...) {numbers}; expected the same allocations on every rank"


def _raise_exhausted(failure: str) -> None:
    if failure:
        raise HeapExhausted(f"the heap could not grow: {failure}")


def _digest(value: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")
