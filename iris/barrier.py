"""Barriers of the ranks in stream order: work after one begins when all ranks have reached it.

`Iris.barrier` and `Iris.device_barrier` launch one small kernel. Its flags count barriers and are never reset, so a
captured barrier can be replayed. Ranks exchange a digest of their heaps with it: ranks whose allocations differ learn
it here, at no cost.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import platform
from .device import sync
from .errors import CaptureError
from .launch import relaunch

_NO_DIGEST = 1 << 61  # as wide as those of a heap, so that one compiled kernel fits both


class DeviceBarrier:
    """Barriers with separate counts: two of them may be under way in two streams. Construction is collective.

    Those of one object follow each other in the same order on all ranks. Code that makes one after the context must
    synchronise all ranks before its first call: a peer must not signal here before the counts are zero.
    """

    WORDS = 7  # int32 of each rank

    def __init__(self, device: torch.device, context: torch.Tensor, world: int, memory: torch.Tensor) -> None:
        """Take `context`, the context tensor, and `memory`, int32 [WORDS * world] of the heap, zeroed."""
        self._device, self._context, self._world = device, context, world
        self._digests, self.counts = (
            memory[: 4 * world].view(torch.int64).view(2, world),
            memory[4 * world :].view(3, world),
        )
        self.passed = self.counts[2, :1]  # the number of barriers that this rank has passed
        self._known: dict[tuple[int, ...], tuple[torch.Tensor, int, Callable[[], bool] | None]] = {}

    def __call__(self, members: tuple[int, ...], digest: int = _NO_DIGEST) -> None:
        """Launch a barrier of the ranks `members` in the current stream; fail if their `digest`s differ."""
        table, before, again = self._known.get(members, (None, digest, None))
        if table is None:
            if platform.is_capturing(self._device):
                raise CaptureError(
                    "device_barrier() is called for this group for the first time while a CUDA graph is captured; "
                    "expected an earlier call: call it once before capturing it"
                )
            table = torch.tensor(members, dtype=torch.int32, device=self._device)
        if again is None or digest != before or not again():
            sent, arrived, _ = self.counts
            args = dict(ctx_ptr=self._context, members=table, num_members=len(members), sent=sent, arrived=arrived,
                        passed=self.passed, digests=self._digests, digest=digest, WORLD_SIZE=self._world)  # fmt: skip
            launched = relaunch.launch({}, self._device, sync.device_barrier_kernel, (1, 1, 1), args, num_warps=1)
            self._known[members] = table, digest, launched and launched.again
