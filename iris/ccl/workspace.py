"""The memory that collectives share: for each kernel its epoch, flags and staging.

It grows to the largest call, in powers of two, and never gives back: a captured graph may refer to what it used before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .. import platform
from ..errors import CaptureError, HeapExhausted

if TYPE_CHECKING:
    from .group import Group


@dataclass
class Area:
    """Memory that the calls of one kernel share. `sync`: [epoch, programs that finished]."""

    sync: torch.Tensor
    flags: torch.Tensor
    staging: torch.Tensor


class Workspace:
    """Staging memory of one group, for calls that follow each other in stream order. Made by all its ranks.

    `for_groups`: whether calls of other groups may use it, each of which then has a separate workspace in `parts`. A
    preamble without a group makes such a one, as ROCm/iris's preamble knows no groups.
    """

    def __init__(self, group: Group, for_groups: bool = False) -> None:
        self.group, self.for_groups = group, for_groups
        self.parts: dict[Group, Workspace] = {}
        self.areas: dict[str, Area] = {}
        self._done: torch.cuda.Event | None = None

    def of(self, group: Group) -> Workspace | None:
        """Return the workspace that calls of `group` use; None if they may not use this one."""
        if group is self.group:
            return self
        if not self.for_groups or group.ctx is not self.group.ctx:
            return None
        if group not in self.parts:
            self.parts[group] = Workspace(group)
        return self.parts[group]

    def reserve(self, name: str, num_flags: int, nbytes: int, fill: int = 0, rendezvous: bool = True) -> bool:
        """Make room in an area: int32 flags, bytes of staging, which begins with every byte as `fill`.

        The same on all ranks of the group. They wait for each other if `rendezvous` and there was less before. Returns
        whether there was.
        """
        device = self.group.ctx.device
        area = self.areas.get(name)
        grown = False
        if area is None:
            _refuse_capture(device)
            nothing = torch.empty(0, dtype=torch.int32, device=device)
            area = self.areas[name] = Area(torch.zeros(2, dtype=torch.int32, device=device), nothing, nothing)
        flags, staging = area.flags, area.staging
        if num_flags > flags.numel():
            _refuse_capture(device)
            flags, grown = self.group.reserve(4 * _grown(num_flags)).view(torch.int32).zero_(), True
        if nbytes > staging.nbytes:
            _refuse_capture(device)
            try:
                staging, grown = self.group.reserve(_grown(nbytes)).fill_(fill), True
            except HeapExhausted:  # new flags that peers do not know to be zero must not stay
                if flags is not area.flags:
                    self.group.ctx.heap.free(flags)
                raise
        area.flags, area.staging = flags, staging
        if grown and rendezvous:
            # no peer stores here before this rank's memory is as it must be, and where it must be
            self.group.barrier()
        return grown

    def wait(self) -> None:
        """Make the current stream wait for the last call that ran with `async_op=True`."""
        for part in self.parts.values():
            part.wait()
        if self._done is not None:
            torch.cuda.current_stream(self.group.ctx.device).wait_event(self._done)


def _grown(size: int) -> int:
    return 1 << max(12, (size - 1).bit_length())


def _refuse_capture(device: torch.device) -> None:
    if platform.is_capturing(device):
        raise CaptureError(
            "the first call of a size sets up its workspace and cannot be captured; call it once before capturing"
        )
