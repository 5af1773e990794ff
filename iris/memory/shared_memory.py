"""Share segments as anonymous shared memory among ranks that are processes of one host without GPUs.

Each rank makes a memfd and maps it; peers open it through /proc by process id and descriptor, and check its inode. The
memory has no name in any file system and vanishes with its last process.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from ..descriptors import is_lacking, remedy
from ..errors import PlatformError
from ..group import Ranks
from .base import ALIGNMENT, FixedSegment, allocating

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # Linux; Python names the second only since 3.13


class SharedMemorySegment(FixedSegment):
    def __init__(self, size: int, ranks: Ranks) -> None:
        fd = -1

        def make() -> tuple[mmap.mmap, int]:
            nonlocal fd
            with allocating(size):
                fd = os.memfd_create("iris-heap")
                os.ftruncate(fd, size)
                return _map(fd, size)

        def map_peers() -> list[tuple[mmap.mmap, int]]:
            with allocating(size):
                return [mine if r == ranks.rank else _map_peer(r, size, *descriptors[r]) for r in range(ranks.size)]

        try:
            mine = ranks.together("allocating the heap", make)
            descriptors = ranks.all_gather((os.getpid(), fd, os.fstat(fd).st_ino), "mapping the heaps of a context")
            # a peer's descriptor must stay open until everyone has opened it
            self._maps = ranks.together("mapping the heaps", map_peers)
        finally:
            if fd >= 0:
                os.close(fd)
        self.bases = [base for _, base in self._maps]
        region, base = mine
        # frombuffer keeps the mapping alive for as long as a tensor refers to it
        self.local = torch.frombuffer(region, dtype=torch.uint8, count=size, offset=base - _address(region))

    def close(self) -> None:
        self._maps.clear()
        self.local = torch.empty(0, dtype=torch.uint8, device="cpu")


def _address(region: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(region))


def _map(fd: int, size: int) -> tuple[mmap.mmap, int]:
    """Map the file at an aligned address inside a reserved region; the region object owns both."""
    region = mmap.mmap(-1, size + ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    base = -(-_address(region) // ALIGNMENT) * ALIGNMENT
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if libc.mmap(base, size, protection, flags, fd, 0) != base:
        raise OSError(ctypes.get_errno(), f"cannot map {size} bytes of shared memory")
    return region, base


def _map_peer(rank: int, size: int, pid: int, peer_fd: int, inode: int) -> tuple[mmap.mmap, int]:
    try:
        fd = os.open(f"/proc/{pid}/fd/{peer_fd}", os.O_RDWR)
    except OSError as error:
        if is_lacking(error):
            raise PlatformError(f"no file descriptor is left for the heap of a peer: {remedy()}") from None
        raise PlatformError(
            f"cannot open the heap of rank {rank} (process {pid}): {error}. All ranks must run on one host, as one "
            f"user and in one process namespace."
        ) from None
    try:
        if os.fstat(fd).st_ino != inode:
            raise PlatformError(f"process {pid} is not rank {rank}: all ranks must share one process namespace")
        return _map(fd, size)
    finally:
        os.close(fd)
