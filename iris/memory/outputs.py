"""Allocate results on the heap that live as long as their tensors: layers return them, peers store into them.

Peers of an overlapped op store into `out`, so `out` has to lie on the heap. A layer returns a new tensor in each call,
and Python frees that tensor at a time that differs by rank. So it cannot lie at the same offset on all ranks, as
everything else on the heap does, unless the ranks agree before each reuse. Agreement takes an exchange a call, or
counts that arrive a call late; and a block that one rank still holds is then lost to all of them.

Instead each rank cuts its outputs, by itself, from a region that all ranks have reserved alike. Nobody has to agree:
the signal by which a rank enters a call carries the address of its `out`, and peers store there (`out_at` in
`iris/device/sync.py`). A rank that finds no room takes ordinary memory, and the op copies (`Workspace.results`); its
peers receive the address that the copy reads. So ranks may differ in this, too.

The region has a part for eager calls and, with CUDA, a part for graphs. Each holds one or two of the largest output.

    eager, CUDA   torch's caching allocator cuts its part, as one segment of a `MemPool`: so torch handles streams,
                  `record_stream` and the splitting of blocks, as with any other tensor
    eager, CPU    first fit; a block is free when its tensor's storage has died
    graphs        replays write to a block long after its tensor has died. So blocks belong to a `GraphOutputs`, which
                  the owner of the graphs keeps with them; a call captured without one takes ordinary memory and copies
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
import math
import sys
from typing import TYPE_CHECKING, Any, Protocol
import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import HeapExhausted
from ..heap import GRANULE, Heap
from .base import ALIGNMENT
from .offsets import Offsets, rounded
from .pool import DevicePool

if TYPE_CHECKING:
    from ..rank import Rank

_COUNTS = 2, 1  # outputs of the largest size in a part, as room allows
_SHARE = 3, 8  # at most 3/8 of the heap, and at most half of what is free
_SMALL = 1 << 20  # bytes: torch shares segments among tensors up to this; copying one takes 2 us
_LEAST = {"cpu": ALIGNMENT, "cuda": 16 << 20}  # bytes of a part; torch requests 2 or from 20 MiB
_MOST_SKIPPED = 255
_MOST_STREAMS = 8


class _Part(Protocol):
    def empty(self, size: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> torch.Tensor | None:
        """Return a new tensor; None where there is no room."""

    def held(self) -> tuple[int, int]:
        """Return the bytes of live tensors in the part, and the bytes of the part."""

    def foreign(self) -> bool:
        """Return whether the free blocks belong to another stream than the current one."""


class Outputs:
    """New tensors for results that peers write. Creating one of these allocates nothing."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._on_gpu = rank.device.type == "cuda"
        self.largest = 0
        """Bytes of the largest output for which there is room, if the heap has it."""
        self._logged = False
        self._eager: _Part | None = None
        self._graphs: _Blocks | None = None
        self._kept: GraphOutputs | None = None

    def reserve(self, nbytes: int) -> None:
        """Reserve room for outputs of `nbytes`, more than the `largest` before. Collective."""
        rank, heap = self._rank, self._rank.heap
        self.largest = max(_LEAST[rank.device.type], 1 << (nbytes - 1).bit_length())
        with rank.exchanging():
            part = min(rank.hosts.all_gather(self._affordable(), "room for outputs on the heap"))
        if not part:
            return
        parts = 2 if self._on_gpu else 1
        try:
            begin = heap.take(parts * part + ALIGNMENT, "outputs of layers", library=True)
        except HeapExhausted:  # by what torch's pool has borrowed here alone; the barrier tells the others
            begin = -1
        rank.barrier()
        if begin < 0:
            return
        rank.hand_out_from(begin)
        begin = rounded(begin, ALIGNMENT)
        if self._on_gpu:
            try:
                self._eager = _Cached(heap, rank.device, begin, part)
            except RuntimeError as error:  # torch's caching allocator is not in use
                rank.log.info(f"outputs of layers are copied, because torch makes no pool on the heap: {error}")
                self._eager, self._logged = None, True
            self._graphs = _Blocks(heap, begin + part, part)
        else:
            self._eager = _Counted(_Blocks(heap, begin, part))

    def _affordable(self) -> int:
        """Return the bytes of a part of the region; 0 if the heap has too little."""
        parts, (of, whole), heap = 2 if self._on_gpu else 1, _SHARE, self._rank.heap
        most = min(heap.size * of // whole, heap.longest // 2)
        sizes = (count * self.largest for count in _COUNTS)
        return next((size for size in sizes if parts * size + ALIGNMENT <= most), 0)

    def empty(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return a new tensor on the heap, or None.

        None if there is no room, for small tensors on GPUs, in a capture without a `GraphOutputs`, and inside torch's
        graph trees, which keep outputs in a pool of their own.
        """
        nbytes = math.prod(size) * dtype.itemsize
        if nbytes == 0 or self._on_gpu and nbytes <= _SMALL:
            return None
        if self._on_gpu:
            if torch.cuda.is_current_stream_capturing():
                keeper, blocks = self._kept, self._graphs
                return keeper.empty(blocks, size, dtype, nbytes) if keeper is not None and blocks is not None else None
            if _in_trees(self._rank.device):
                return None
        tensor = self._eager.empty(size, dtype, nbytes) if self._eager is not None else None
        if tensor is None and not self._logged:
            self._logged = True
            self._rank.log.info(
                f"an output of {nbytes} bytes finds no room on the heap, so peers write it elsewhere and it is copied, "
                f"as later ones may be: {self._shortage()}"
            )
        return tensor

    def _shortage(self) -> str:
        """Return why an output of an eager call found no room, and what helps."""
        larger = "make it larger (iris.iris(heap_size=...))"
        held, whole = (0, 0) if self._eager is None else self._eager.held()
        if self._eager is None or whole < self.largest:
            return f"the heap has no more to give to outputs than {whole} bytes; {larger}"
        if self._eager.foreign():
            return f"the {whole} bytes of outputs serve another stream, of which {held} are in use; call in one stream"
        shortage = f"outputs that are alive hold {held} of {whole} bytes; let go of them earlier"
        return shortage if whole >= _COUNTS[0] * self.largest else f"{shortage}, or {larger}"

    @contextmanager
    def keeping(self, kept: GraphOutputs) -> Iterator[None]:
        """Take outputs of calls captured in the block from the heap; they last as long as `kept`."""
        before, self._kept = self._kept, kept
        try:
            yield
        finally:
            self._kept = before


class GraphOutputs:
    """Blocks of CUDA graphs that share their memory. Keep it as long as the graphs, and replay one after the other.

    Calls that are captured later use a block again, in the same stream, when its tensor has died. `record_stream` of
    such a tensor has no effect.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[_Blocks, int, int, int, StorageWeakRef]] = []  # whose, offset, bytes, stream, tensor's
        weakref.finalize(self, _give_back, self._blocks)

    def empty(self, blocks: _Blocks, size: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> torch.Tensor | None:
        stream = torch.cuda.current_stream(blocks.device.index).cuda_stream
        free = [
            (room, number)
            for number, (_, _, room, of, storage) in enumerate(self._blocks)
            if room >= nbytes and of == stream and storage.expired()
        ]
        if free:
            blocks, offset, nbytes, *_ = self._blocks.pop(min(free)[1])
        else:
            nbytes = rounded(nbytes, GRANULE)
            cut = blocks.cut(nbytes)
            if cut is None:
                return None
            offset = cut
        storage = torch._C._construct_storage_from_data_pointer(blocks.address + offset, blocks.device, nbytes)
        self._blocks.append((blocks, offset, nbytes, stream, StorageWeakRef(storage)))
        return _tensor(storage, size, dtype)


def _give_back(blocks: list[tuple]) -> None:
    for whose, offset, *_ in blocks:
        whose.give(offset)


def _tensor(storage: Any, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    strides = [math.prod(size[i + 1 :]) for i in range(len(size))]
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, size, strides)


class _Blocks:
    """A part of the region whose blocks are freed explicitly by the code that allocated them."""

    def __init__(self, heap: Heap, begin: int, nbytes: int) -> None:
        self.memory = heap.memory[begin : begin + nbytes]
        self.address, self.device = heap.base + begin, heap.memory.device
        self._offsets, self.nbytes = Offsets(nbytes), nbytes

    def cut(self, nbytes: int) -> int | None:
        """Return the offset of `nbytes` free bytes from the beginning of the part, or None."""
        return self._offsets.take(rounded(nbytes, GRANULE), GRANULE)

    def give(self, offset: int) -> None:
        self._offsets.give(offset)


class _Counted:
    """Ordinary tensors on CPUs; a block is free once its tensor's storage has died."""

    def __init__(self, blocks: _Blocks) -> None:
        self._blocks = blocks
        self._live: dict[int, StorageWeakRef] = {}
        self._sizes: dict[int, int] = {}

    def held(self) -> tuple[int, int]:
        return sum(self._sizes[offset] for offset in self._live), self._blocks.nbytes

    def foreign(self) -> bool:
        return False

    def empty(self, size: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> torch.Tensor | None:
        for expired in [offset for offset, storage in self._live.items() if storage.expired()]:
            del self._live[expired]
            self._blocks.give(expired)
        offset = self._blocks.cut(nbytes)
        if offset is None:
            return None
        # a separate storage, which keeps the heap mapped
        storage = torch.from_numpy(self._blocks.memory[offset : offset + nbytes].numpy()).untyped_storage()
        self._live[offset], self._sizes[offset] = StorageWeakRef(storage), nbytes
        return _tensor(storage, size, dtype)


class _Cached:
    """Tensors that torch's caching allocator cuts from one segment.

    Torch keeps free blocks by stream, so they serve the stream that was current when torch took the segment. Calls in
    another stream get blocks once no tensor lies in the segment: it then becomes that stream's. Where torch finds no
    room, which costs an exception, some of the following calls do not try.
    """

    def __init__(self, heap: Heap, device: torch.device, begin: int, nbytes: int) -> None:
        self._heap, self._device, self._begin, self._nbytes = heap, device, begin, nbytes
        self._streams = self._missed = self._skipped = 0
        self._open()

    def _open(self) -> None:
        self._segment = _Segment(self._heap, self._device, self._begin, self._nbytes)
        self._pool = self._segment.pool
        self._close = weakref.finalize(self, self._segment.close)
        self._close.atexit = False
        self._stream = torch.cuda.current_stream(self._device.index)
        self._streams += 1
        self._allocate_from_pool((self._nbytes,), torch.uint8)  # torch takes the segment, and has it free at once

    def empty(self, size: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> torch.Tensor | None:
        if self._skipped < self._missed:
            self._skipped += 1
            return None
        tensor = self._allocate_from_pool(size, dtype)
        if tensor is None and self._follow():
            tensor = self._allocate_from_pool(size, dtype)
        self._missed, self._skipped = 0 if tensor is not None else min(2 * self._missed + 1, _MOST_SKIPPED), 0
        return tensor

    def held(self) -> tuple[int, int]:
        return sum(block["size"] for block in self._blocks() if block["state"] != "inactive"), self._nbytes

    def foreign(self) -> bool:
        return self._stream != torch.cuda.current_stream(self._device.index)

    def _blocks(self) -> Iterator[dict[str, Any]]:
        return (block for segment in self._pool.snapshot() for block in segment["blocks"])

    def _allocate_from_pool(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        try:
            with torch.cuda.use_mem_pool(self._pool, self._device):
                return torch.empty(size, dtype=dtype, device=self._device)
        except torch.OutOfMemoryError:
            return None

    def _follow(self) -> bool:
        """Move the segment to the current stream if another owns it and it is empty; return whether it moved."""
        if self._streams >= _MOST_STREAMS or not self.foreign():
            return False
        if any(block["state"] != "inactive" for block in self._blocks()):
            return False
        torch.cuda.synchronize(self._device)  # the other stream may still be at work there
        del self._pool
        self._close()
        self._open()
        return True


class _Segment(DevicePool):
    """A pool with this one piece of memory."""

    def __init__(self, heap: Heap, device: torch.device, begin: int, nbytes: int) -> None:
        self._address, self._nbytes = heap.base + begin, nbytes
        super().__init__(heap, device)

    @property
    def pool(self) -> torch.cuda.MemPool:
        return self._pool

    def _allocate(self, size: int, device: int, stream: int | None) -> int | None:
        if self._held or size > self._nbytes:
            return None
        self._held[self._address] = self._heap.memory
        return self._address

    def _release(self, address: int | None, size: int, device: int, stream: int | None) -> None:
        self._held.clear()


def _in_trees(device: torch.device) -> bool:
    """Return whether torch.compile(mode="reduce-overhead") runs this: its outputs must lie in a pool that it knows."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    manager = trees.get_manager(device.index, create_if_none_exists=False) if trees is not None else None
    return manager is not None and manager.stream == torch.cuda.current_stream(device.index)
