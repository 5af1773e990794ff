"""`Steps`: the launches of one call of a mixture's op."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from iris import platform
from iris.launch import relaunch
import torch
import triton

from ..workspace import refuse_capture

if TYPE_CHECKING:
    from iris.rank import Rank

Launches = list[Callable[[], object]]


class Steps:
    """The launches of one call on one rank, between `begin` and `end`."""

    def __init__(self, ctx: Rank, kernels: dict[tuple, object]) -> None:
        self.ctx = ctx
        self._kernels = kernels
        self._now: Launches | None = None
        self._rooms: list[torch.Tensor] = []

    def room(self, nbytes: int) -> torch.Tensor:
        """Return this rank's memory for what one launch leaves to the next.

        Memory that became too small is kept, for captured graphs.
        """
        if not self._rooms or self._rooms[-1].nbytes < nbytes:
            refuse_capture(self.ctx)
            size = 1 << max(12, (nbytes - 1).bit_length())
            self._rooms.append(torch.empty(size, dtype=torch.uint8, device=self.ctx.device))
        return self._rooms[-1][:nbytes]

    def begin(self) -> None:
        """Begin a call."""
        self._now = []

    def end(self) -> Launches | None:
        """Return the launches since `begin`, or None where the call cannot be made again by them alone."""
        launches, self._now = self._now, None
        return launches

    def together(self, t: torch.Tensor | None) -> torch.Tensor | None:
        """Return `t`, or a copy if elements of its rows lie apart, with which the call cannot be made again."""
        if t is None or t.stride(1) == 1:
            return t
        self._now = None
        return t.contiguous()

    def launch(self, kernel: triton.JITFunction, grid: tuple[int, int, int], args: dict, **options: int) -> None:
        """Launch a kernel that begins by `arch.follow`."""
        options |= platform.pdl_options(self.ctx.device)
        launched = relaunch.launch(self._kernels, self.ctx.device, kernel, grid, args, (), **options)
        if launched is None:
            self._now = None
        elif self._now is not None:
            self._now.append(launched.again)

    def run(self, step: Callable[[], object]) -> None:
        """Run a step that is no launch and returns a true value where it succeeds."""
        step()
        if self._now is not None:
            self._now.append(step)
