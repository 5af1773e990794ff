"""Offsets on the symmetric heap.

The same calls give the same offsets on every rank without communication, because nothing depends on when a tensor dies
(Python frees cycles at times that differ by rank). An allocation lives until `free`, which every rank calls alike,
until the ranks agree that all of them have dropped it, or until the context closes. They agree when an allocation finds
no room: all ranks come to that point in the same call, and reuse what is in the `dropped` of each
(`TensorMethods._room`). The heap does not depend on the kind of memory that it cuts.

Users' tensors are cut from the heap's low end, the library's workspaces from its high end. So a user's allocation that
differs between ranks shifts later tensors of users only, never a workspace. `digest` sums up all places; barriers
exchange it (`iris/barrier.py`), and `first_difference` then names the allocation that differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import hashlib
import math
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from . import platform
from .errors import ArgumentError, CaptureError, DeviceError, HeapExhausted
from .memory.base import Segment
from .memory.offsets import Offsets, rounded

# Wide enough for tensor descriptors and full cache lines.
GRANULE = 256


@dataclass(frozen=True)
class Allocation:
    """A block that was taken: its number at its end of the heap, place, requested bytes, and purpose."""

    number: int
    library: bool
    offset: int
    nbytes: int
    what: str
    filled: int
    """The bytes of this rank's tensor. They are fewer than the block has if another rank's tensor is larger."""

    def __str__(self) -> str:
        return f"{self.what} ({self.nbytes} bytes at offset {self.offset})"


class Heap:
    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.size = segment.local.numel()
        self.base = segment.local.data_ptr()
        self.heap_bases: torch.Tensor | None = None
        """The tensor of `Iris.get_heap_bases()`, once the context has it on its device."""
        self._ends = Offsets(self.size), Offsets(self.size)  # users', and the library's, counted down from the top
        self._taken, self._reached = [0, 0], [0, 0]  # how many blocks, and how far, from each end
        self._blocks: dict[int, Allocation] = {}
        self._storages: dict[int, StorageWeakRef] = {}  # [offset]: of the users' tensors
        self.digest = _DIGEST
        """A number of 62 bits that is the same on ranks with the same allocations, in whatever order they were made."""
        self.lent: set[int] = set()
        """Blocks that torch's pool cuts and gives back itself, at times that differ by rank: not in `digest`."""

    @property
    def memory(self) -> torch.Tensor:
        """Return the heap's bytes as a uint8 tensor, which keeps the heap mapped while it lives."""
        return self._segment.local

    @property
    def used(self) -> tuple[int, int]:
        """Return the bytes up to the last allocation, from the low end and from the high end."""
        low, high = self._ends
        return low.used, high.used

    @property
    def free_bytes(self) -> int:
        """Return the bytes that belong to no allocation."""
        return self.size - sum(end - begin for begin, end in self._live())

    @property
    def longest(self) -> int:
        """Return the size of the largest block that the library can allocate, in bytes."""
        low, high = self._ends
        high.size = self.size - low.used
        return high.longest

    def cut(self, used: tuple[int, int]) -> list[tuple[int, int]]:
        """Free what was taken beyond an earlier `used`; return the [begin, end) that was used there since."""
        (low, high), (begin, top) = used, self._reached
        self._reached = list(used)
        for offset, block in list(self._blocks.items()):
            beyond = self.size - offset > high if block.library else offset >= low
            if beyond:
                self.give(offset)
        return [span for span in ((low, begin), (self.size - top, self.size - high)) if span[0] < span[1]]

    def allocate(self, sizes: tuple[int, ...], dtype: torch.dtype, nbytes: int | None = None) -> torch.Tensor:
        """Return an uninitialised contiguous tensor of `sizes` for a user, in a block of `nbytes`; default: enough.

        Its storage is its own and keeps the heap mapped. Raises `HeapExhausted`, and then nothing was taken.
        """
        filled = math.prod(sizes) * dtype.itemsize
        what = f"a tensor {tuple(sizes)} of {dtype}"
        offset = self.take(filled if nbytes is None else nbytes, what, filled=filled)
        block = self._segment.local[offset : offset + rounded(max(filled, 1), GRANULE)]
        own = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(block))
        self._storages[offset] = StorageWeakRef(own.untyped_storage())
        return own[:filled].view(dtype).view(sizes)

    def dropped(self) -> list[int]:
        """Return the offsets of users' allocations of which this rank has no tensor or view any more."""
        return [offset for offset, storage in self._storages.items() if storage.expired()]

    def can_reuse(self, nbytes: int) -> bool:
        """Return whether `nbytes` might fit if all users' tensors were dropped; the same on all ranks."""
        taken = sum(rounded(max(self._blocks[offset].nbytes, 1), GRANULE) for offset in self._storages)
        return rounded(max(nbytes, 1), GRANULE) <= self._ends[0].free + taken

    def reserve(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate for the library itself, from the high end of the heap."""
        offset = self.take(math.prod(sizes) * dtype.itemsize, f"{tuple(sizes)} of {dtype} of a workspace", library=True)
        return self._tensor(offset, sizes, dtype)

    def _tensor(self, offset: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._segment.local[offset : offset + math.prod(sizes) * dtype.itemsize].view(dtype).view(sizes)

    def take(self, nbytes: int, what: str, alignment: int = GRANULE, library: bool = False, lent: bool = False,
        filled: int | None = None,
    ) -> int:  # fmt: skip
        """Return the offset of `nbytes` for `what`, with memory mapped there; `library`: from the high end.

        `lent`: to torch's pool. Raises `HeapExhausted`; `CaptureError` in a capture, whose replays would use memory
        that may belong to another tensor by then.
        """
        if platform.is_capturing(self._segment.local.device):
            raise CaptureError(
                f"{what} cannot be allocated on the heap while a CUDA graph is captured; allocate it before the capture"
            )
        taken, end = rounded(max(nbytes, 1), GRANULE), self._ends[library]
        end.size = self.size - self._ends[not library].used
        offset = end.take(taken, alignment)
        if offset is None:
            raise HeapExhausted(
                f"{what} needs {taken} bytes in one piece; expected at most {end.longest}, the largest free piece "
                f"({end.free} of the heap's {self.size} bytes are free). Make the heap larger "
                f"(iris.iris(heap_size=...)), drop tensors on all ranks, or allocate once and reuse with out=."
            )
        begin = self.size - offset - taken if library else offset
        try:
            self._segment.back(begin, begin + taken)
        except BaseException:
            end.give(offset)
            raise
        self._taken[library] += 1
        self._reached[library] = max(self._reached[library], end.used)
        block = self._blocks[begin] = Allocation(
            self._taken[library], library, begin, nbytes, what, nbytes if filled is None else filled
        )
        if lent:
            self.lent.add(begin)
        else:
            self.digest ^= _mark(block)
        return begin

    def give(self, offset: int) -> None:
        """Free what `take` gave; raise `KeyError` if it gave nothing there."""
        block = self._blocks.pop(offset)
        self._storages.pop(offset, None)
        taken = rounded(max(block.nbytes, 1), GRANULE)
        self._ends[block.library].give(self.size - offset - taken if block.library else offset)
        if offset in self.lent:
            self.lent.discard(offset)
        else:
            self.digest ^= _mark(block)

    def allocations(self) -> list[Allocation]:
        """Return the allocations in `digest`: users' first, in the order in which they were made."""
        blocks = (block for offset, block in self._blocks.items() if offset not in self.lent)
        return sorted(blocks, key=lambda block: (block.library, block.number))

    def offset(self, tensor: torch.Tensor) -> int:
        """Return the offset in the heap, in bytes, at which `tensor` begins; negative if its layout has no address."""
        return _first_byte(tensor) - self.base if tensor.layout is torch.strided else -1

    def free(self, *tensors: torch.Tensor) -> None:
        """Free the blocks that these tensors fill. Raise `ArgumentError` where one fills none, and free nothing."""
        if platform.is_capturing(self._segment.local.device):
            raise CaptureError(
                "free() cannot be called while a CUDA graph is captured, because replays use the memory; call it later"
            )
        offsets = [self.offset(tensor) for tensor in tensors]
        for number, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
            block = None if offset in self.lent else self._blocks.get(offset)
            fills = block and rounded(max(block.filled, 1), GRANULE) == rounded(max(span(tensor), 1), GRANULE)
            if not (fills or self._segment.imported(offset)) or offset in offsets[:number]:
                raise ArgumentError(
                    f"free: the tensor {tuple(tensor.shape)} of {tensor.dtype} is no allocation of this heap; "
                    f"expected a tensor as ctx.empty(...) or ctx.as_symmetric(...) returned it, not freed before. "
                    f"Tensors from memory_pool() are freed when Python drops them."
                )
        for offset in offsets:
            if self._segment.imported(offset):
                self._segment.dismiss(offset)
            else:
                self.give(offset)

    def adopt(self, tensor: torch.Tensor, inside: bool) -> torch.Tensor:
        """Return a tensor on the heap that shares memory with `tensor`, itself if it lies `inside`."""
        return self._segment.adopt(tensor, inside)

    def trim(self) -> int:
        """Return memory without allocations to the system; return how many bytes. Collective."""
        return self._segment.trim(self._live())

    def _live(self) -> list[tuple[int, int]]:
        return sorted((b, b + rounded(max(block.nbytes, 1), GRANULE)) for b, block in self._blocks.items())

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return whether every element of `tensor` lies in this heap, or in an import."""
        return self.holds(*extent(tensor))

    def holds(self, begin: int, end: int) -> bool:
        """Return whether all bytes between two addresses lie in this heap, or in an import."""
        return self.base <= begin and end <= self.base + self._segment.span


# Digests begin with it, so that they are numbers of more than 32 bits: a kernel takes them in one compiled form.
_DIGEST = 1 << 61


def _mark(block: Allocation) -> int:
    digest = hashlib.blake2b(f"{block.offset} {block.nbytes}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def first_difference(by_rank: dict[int, list[Allocation]]) -> str | None:
    """Return the first of the ranks' `allocations` that is not the same on all of them; None if all are alike."""
    places = {rank: {(block.offset, block.nbytes) for block in blocks} for rank, blocks in by_rank.items()}
    common = set.intersection(*places.values())
    rest = [block for blocks in by_rank.values() for block in blocks if (block.offset, block.nbytes) not in common]
    if not rest:
        return None
    first = min((block.library, block.number) for block in rest)
    first_of = {rank: [b for b in blocks if (b.library, b.number) == first] for rank, blocks in sorted(by_rank.items())}
    listed = ", ".join(f"{blocks[0] if blocks else 'none'} on rank {rank}" for rank, blocks in first_of.items())
    return f"{'workspace' if first[0] else 'allocation'} number {first[1]} differs between ranks: {listed}"


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses at which a tensor's elements begin and end."""
    if not tensor.numel():
        begin = _first_byte(tensor)
        return begin, begin
    begin, reach = tensor.data_ptr(), 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        reach += (size - 1) * stride
    return begin, begin + reach * tensor.element_size()


def span(tensor: torch.Tensor | None) -> int:
    """Return the bytes between the begin and the end of a tensor's elements."""
    begin, end = extent(tensor) if tensor is not None else (0, 0)
    return end - begin


def check_tensor(call: str, name: str, t: object, device: torch.device) -> None:
    """Raise a typed error for anything but a strided tensor on `device`."""
    if not isinstance(t, torch.Tensor):
        raise ArgumentError(f"{call}: {name} is {type(t).__name__}; expected a torch.Tensor")
    if t.is_nested:  # which has no shape
        raise ArgumentError(f"{call}: {name} is a nested tensor; expected a strided one")
    if t.device != device:
        raise DeviceError(f"{call}: {name} is on {t.device}; expected {device}, the context's device")
    if t.layout is not torch.strided:
        raise ArgumentError(f"{call}: {name} is {t.layout}; expected a strided tensor with its elements in memory")


def check_memory(call: str, names: Sequence[str], begins: Sequence[int], spans: Sequence[int]) -> None:
    """Raise for a tensor without memory at an address of its own: freed, wrapped or traced."""
    for name, begin, nbytes in zip(names, begins, spans, strict=True):
        if nbytes and not begin:
            raise ArgumentError(
                f"{call}: {name} has no memory; expected a tensor with its elements in memory, of a DTensor "
                f"its to_local()"
            )


def check_written(call: str, name: str, t: torch.Tensor) -> None:
    """Raise for a tensor to be written whose elements overlap in memory."""
    if t.is_contiguous() or not t.numel() or not _overlaps_itself(t):
        return
    raise ArgumentError(
        f"{call}: {name} {tuple(t.shape)} has strides {t.stride()}; expected no expanded tensor, and none whose rows"
        " overlap"
    )


def _overlaps_itself(t: torch.Tensor) -> bool:
    """Return whether two elements of `t` have one address."""
    dims = sorted((stride, size) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1)
    beyond = 1  # the reach of smaller strides
    for stride, size in dims:
        if stride < beyond:
            break
        beyond += stride * (size - 1)
    else:
        return False
    if dims[0][0] == 0:
        return True
    if len(dims) == 2:
        (narrow, columns), (wide, rows) = dims
        common = math.gcd(narrow, wide)
        return wide // common < columns and narrow // common < rows  # both strides reach one address
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    for stride, size in dims:
        places = (places[:, None] + torch.arange(size, device="cpu") * stride).flatten().unique()
    return len(places) < t.numel()


def _first_byte(tensor: torch.Tensor) -> int:
    # not tensor.data_ptr(), which is 0 for an empty tensor
    offset: Any = tensor.storage_offset()  # an int, for torch does not trace here
    return tensor.untyped_storage().data_ptr() + offset * tensor.element_size()
