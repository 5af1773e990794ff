"""Share segments by PyTorch symmetric memory, for GPUs of one host: one allocation, one rendezvous."""

from __future__ import annotations

import os
from typing import Any

import torch

from .. import platform
from ..errors import PlatformError
from ..group import Ranks
from .base import ALIGNMENT, FixedSegment, allocating

# torch maps a GPU's memory for two ranks on that GPU only if this variable allows it.
_ENV_OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class TorchSymmetricSegment(FixedSegment):
    def __init__(self, size: int, device: torch.device, ranks: Ranks) -> None:
        self._handle: Any = None

        def make() -> torch.Tensor:
            with allocating(size):
                return _aligned(size, device) if ranks.group is None else _symmetric(size, device)

        def map_peers() -> list[int]:
            if ranks.group is None:
                return [local.data_ptr()]
            import torch.distributed._symmetric_memory as symm_mem

            if platform.sharing_gpus():
                os.environ[_ENV_OVERLAPPING] = "1"
            self._handle = symm_mem.rendezvous(local, ranks.group.group_name)
            return [int(pointer) for pointer in self._handle.buffer_ptrs]

        def check() -> None:
            if any(base % ALIGNMENT for base in self.bases):
                raise PlatformError(f"the driver mapped heaps at {list(map(hex, self.bases))}, not on 2 MiB boundaries")
            local.zero_()

        local = self.local = ranks.together("allocating the heap", make)
        self.bases = ranks.together("mapping the heaps", map_peers)
        ranks.together("zeroing the heap", check)

    def close(self) -> None:
        self._handle = None
        self.local = torch.empty(0, dtype=torch.uint8, device="cpu")


def _symmetric(size: int, device: torch.device) -> torch.Tensor:
    import torch.distributed._symmetric_memory as symm_mem

    return symm_mem.empty(size, dtype=torch.uint8, device=device)


def _aligned(size: int, device: torch.device) -> torch.Tensor:
    """Return ordinary memory, aligned by hand: a world of one shares with nobody."""
    block = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -block.data_ptr() % ALIGNMENT
    return block[start : start + size]
