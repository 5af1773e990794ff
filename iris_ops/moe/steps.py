"""`Steps`: the launches of one call of a mixture's op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from iris import platform, transforms
from iris.launch import relaunch
import torch
import triton

from ..workspace import refuse_capture

if TYPE_CHECKING:
    from iris.rank import Rank

# Given to tell calls apart: tensors, None, and whatever has a hash.
Parts = Sequence[object]
Launches = list[Callable[[], object]]


class Steps:
    """Launches on one rank. Those between `begin` and `end` are what makes a call."""

    def __init__(self, ctx: Rank) -> None:
        self.ctx = ctx
        self._kernels: dict[tuple, object] = {}
        self._now: Launches | None = None
        self._rooms: list[torch.Tensor] = []

    def room(self, nbytes: int) -> torch.Tensor:
        """Memory of this rank for what one launch leaves to the next; what was too small stays, for captured graphs."""
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
        """Return `t`, or a copy if elements of its rows stand apart, with which the call cannot be made again."""
        if t is None or t.stride(1) == 1:
            return t
        self._now = None
        return t.contiguous()

    def launch(self, kernel: triton.JITFunction, grid: tuple[int, int, int], args: dict, **options: int) -> None:
        """Launch a kernel that begins by `arch.follow`."""
        options |= platform.beside(self.ctx.device)
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


def key_of(op: str, parts: Parts) -> tuple | None:
    """Return the key of a call: one with the same key passes the same checks and launches the same. None: unknown."""
    if transforms.any_hides(*(part for part in parts if isinstance(part, torch.Tensor))):
        return None
    key: list[Any] = [op]
    for part in parts:
        if not isinstance(part, torch.Tensor):
            key.append(part)
            continue
        try:
            if part.requires_grad and torch.is_grad_enabled() or part.dtype in relaunch.LAZY and part.is_neg():
                return None
            key += (part.data_ptr(), part.shape, part.stride(), part.dtype, part.device)
        except RuntimeError:  # no memory of its own: the checks will say so
            return None
    result = tuple(key)
    try:
        hash(result)
    except TypeError:
        return None
    return result
