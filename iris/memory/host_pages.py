"""Map virtual memory of the host, as anonymous shared files, for ranks without GPUs.

A chunk is a memfd; its handle is the descriptor. A tensor can be imported if it lies in a shared mapping of a file that
this process still holds open: `tensor.share_memory_()`, a memfd, multiprocessing's shared memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import torch

from ..errors import NotSymmetricError
from .base import ALIGNMENT
from .pages import Extent

# Linux; Python names the second only since 3.13.
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_LEAST_WINDOW = 128 << 20


class HostPages:
    granule = mmap.PAGESIZE

    def window(self, size: int) -> int:
        return max(_LEAST_WINDOW, -(-size // ALIGNMENT) * ALIGNMENT)

    def reserve(self, size: int) -> int:
        start = _mmap(None, size + ALIGNMENT, 0, _NOTHING, -1, 0)
        base = -(-start // ALIGNMENT) * ALIGNMENT
        if base > start:
            _munmap(start, base - start)
        _munmap(base + size, start + ALIGNMENT - base)
        return base

    def unreserve(self, base: int, size: int) -> None:
        _munmap(base, size)

    def create(self, size: int) -> int:
        fd = os.memfd_create("iris-heap")
        try:
            os.ftruncate(fd, size)
        except OSError:
            os.close(fd)
            raise
        return fd

    def export(self, memory: int) -> int:
        return os.dup(memory)

    receive = export

    def release(self, memory: int) -> None:
        os.close(memory)

    def map(self, address: int, size: int, memory: int, start: int = 0) -> None:
        _mmap(address, size, _READ_WRITE, mmap.MAP_SHARED | _MAP_FIXED, memory, start)

    def unmap(self, address: int, size: int) -> None:
        _mmap(address, size, 0, _NOTHING | _MAP_FIXED, -1, 0)

    def clear(self, address: int, size: int) -> None:
        pass  # a new memfd is all zeros

    def idle(self) -> None:
        pass

    def tensor(self, address: int, nbytes: int, owner: Any) -> torch.Tensor:
        span: Any = (ctypes.c_uint8 * nbytes).from_address(address)
        span.owner = owner  # frombuffer keeps the span
        return torch.frombuffer(span, dtype=torch.uint8)

    def extents(self, begin: int, end: int) -> list[Extent]:
        extents: list[Extent] = []
        try:
            at = begin // self.granule * self.granule
            while at < end:
                extents.append(_extent(at, -(-end // self.granule) * self.granule))
                at += extents[-1].size
        except BaseException:
            for extent in extents:
                os.close(extent.fd)
                os.close(extent.memory)
            raise
        return extents


def _extent(at: int, end: int) -> Extent:
    """Return the mapping at `at`, up to `end`, with its file."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, rights, offset, device, inode = line.split()[:5]
            first, last = (int(text, 16) for text in addresses.split("-"))
            if first <= at < last:
                break
        else:
            raise NotSymmetricError(f"nothing is mapped at {at:#x}")
    if rights[3] != "s":
        raise NotSymmetricError(
            "its memory is private to this process. Call tensor.share_memory_() before, or allocate it in "
            "`with ctx.memory_pool():`, or copy_ it into ctx.empty(...)"
        )
    major, minor = (int(text, 16) for text in device.split(":"))
    file = os.makedev(major, minor), int(inode)
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.stat(f"/proc/self/fd/{name}")
            if (status.st_dev, status.st_ino) == file:
                memory = os.open(f"/proc/self/fd/{name}", os.O_RDWR | os.O_CLOEXEC)
                return Extent(at, min(last, end) - at, memory, os.dup(memory), int(offset, 16) + at - first)
        except FileNotFoundError:
            continue
    raise NotSymmetricError(
        f"the tensor lies in shared memory whose file (inode {inode}) this process has closed; keep it open, or copy_ "
        f"the tensor into ctx.empty(...)"
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _mmap(address: int | None, size: int, protection: int, flags: int, fd: int, start: int) -> int:
    mapped = _libc.mmap(address, size, protection, flags, fd, start)
    if mapped in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"mmap of {size} bytes: {os.strerror(ctypes.get_errno())}")
    return mapped


def _munmap(address: int, size: int) -> None:
    if size and _libc.munmap(address, size):
        raise OSError(ctypes.get_errno(), f"munmap of {size} bytes: {os.strerror(ctypes.get_errno())}")
