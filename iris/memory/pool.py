"""Place ordinary torch allocations on the heap, in `with ctx.memory_pool():`.

On GPUs, a `torch.cuda.MemPool`: torch's caching allocator takes its segments of 2 MiB and more from the heap and cuts
and reuses them as it always does, so a tensor's memory comes back to the pool when the tensor dies. torch takes the two
functions of an allocator as C pointers; ctypes makes them from Python, which is fast enough for one call a segment.
They take the GIL while torch holds its allocator's lock, so a pool is for one thread; nor does torch send other
threads' allocations there.

On CPUs torch has no such pools: a dispatch mode moves what each operation returns to the heap, where it stays.

Either way a tensor's offset follows from the allocations in the block, and, with torch's pool, from when tensors die in
it. So the ranks compare their layouts at the end of each block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
import ctypes
import gc
import hashlib
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..heap import Heap
from .base import ALIGNMENT


class Pool(Protocol):
    def use(self) -> Any:
        """Return a context manager: allocations inside come from the heap."""

    def layout(self) -> str:
        """Return a digest of which tensor lies where."""

    def close(self) -> None:
        """Free the memory in which no tensor lies, if the pool keeps track of that."""


def pool_of(heap: Heap, device: torch.device) -> Pool:
    return HostPool(heap) if device.type == "cpu" else DevicePool(heap, device)


class DevicePool:
    def __init__(self, heap: Heap, device: torch.device) -> None:
        self._heap, self._device = heap, device
        self._held: dict[int, torch.Tensor] = {}  # [address]: the heap lives as long as a segment of torch's does
        self._failure: BaseException | None = None
        allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(self._allocate)
        release = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(self._release)
        addresses = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in (allocate, release))
        allocator = torch._C._cuda_customAllocator(*addresses)
        self._pool = torch.cuda.MemPool(allocator)
        # torch may call back as long as the process lives, whenever a tensor dies; and a pool that nobody closed must
        # not be freed while the interpreter ends
        ctypes.pythonapi.Py_IncRef(ctypes.py_object((self, allocator, allocate, release)))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pool))

    def _allocate(self, size: int, device: int, stream: int | None) -> int | None:
        try:
            offset = self._heap.take(size, "a segment of torch's pool", ALIGNMENT, lent=True)
            address = self._heap.base + offset
            self._held[address] = self._heap.memory
            return address
        except BaseException as error:  # ctypes would print it and go on
            self._failure = error
            return None  # torch raises OutOfMemoryError

    def _release(self, address: int | None, size: int, device: int, stream: int | None) -> None:
        if address is not None and self._held.pop(address, None) is not None:
            self._heap.give(address - self._heap.base)

    @contextmanager
    def use(self) -> Iterator[None]:
        self._failure = None
        try:
            with torch.cuda.use_mem_pool(self._pool, self._device):
                yield
        except torch.OutOfMemoryError as error:
            if self._failure is None:
                raise
            raise self._failure from error

    def layout(self) -> str:
        gc.collect()  # cycles die at times that differ by rank
        blocks = [
            (block["address"] - self._heap.base, block["size"])
            for segment in self._pool.snapshot()
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        ]
        return _digest(sorted(blocks))

    def close(self) -> None:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._pool))
        self._failure = None
        del self._pool  # torch gives back what no tensor lies in


class HostPool:
    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self.blocks: list[tuple[int, int]] = []

    @contextmanager
    def use(self) -> Iterator[None]:
        with _ToHeap(self._heap, self.blocks):
            yield

    def layout(self) -> str:
        return _digest(self.blocks)

    def close(self) -> None:
        pass


class _ToHeap(TorchDispatchMode):
    """A dispatch mode that moves every tensor that an operation allocates to the heap."""

    def __init__(self, heap: Heap, blocks: list[tuple[int, int]]) -> None:
        super().__init__()
        self._heap, self._blocks = heap, blocks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor() has allocated its argument
            given = []
        known = {tensor.untyped_storage().data_ptr() for tensor in given if _movable(tensor)}
        return tree_map_only(torch.Tensor, lambda tensor: self._moved(tensor, known), result)

    def _moved(self, tensor: torch.Tensor, known: set[int]) -> torch.Tensor:
        if not _movable(tensor) or not tensor.numel() or tensor.untyped_storage().data_ptr() in known:
            return tensor
        if self._heap.contains(tensor):
            return tensor
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        there = self._heap.allocate((reach,), tensor.dtype)
        self._blocks.append((there.data_ptr() - self._heap.base, there.nbytes))
        return there.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def _movable(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain and tensor.device.type == "cpu" and tensor.layout is torch.strided


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
