"""`Steps`: the launches of one call, and how to make them again without the checks and the look-ups before them."""

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

_KEPT = 4096  # calls

# Given to tell calls apart: tensors, None, and whatever has a hash.
Parts = Sequence[object]


class Steps:
    """Launches on one rank. Those between `begin` and `keep` are what makes a call."""

    def __init__(self, ctx: Rank) -> None:
        self.ctx = ctx
        self._kernels: dict[tuple, object] = {}
        self._known: dict[tuple, list[Callable[[], object]]] = {}
        self._now: list[Callable[[], object]] | None = None
        self._rooms: list[torch.Tensor] = []

    def again(self, key: tuple | None) -> bool:
        """Makes a call that was kept once more. Returns whether it was."""
        known = self._known.get(key) if key is not None and self.ctx.agreement is None else None
        # a launch refuses, of its own accord, while somebody listens: then the first of them does
        return known is not None and all(step() for step in known)

    def forget(self) -> None:
        """Calls are launched anew: memory that they use has changed, on all ranks."""
        self._known.clear()

    def room(self, nbytes: int) -> torch.Tensor:
        """Memory of this rank for what one launch leaves to the next; what was too small stays, for captured graphs."""
        if not self._rooms or self._rooms[-1].nbytes < nbytes:
            refuse_capture(self.ctx)
            size = 1 << max(12, (nbytes - 1).bit_length())
            self._rooms.append(torch.empty(size, dtype=torch.uint8, device=self.ctx.device))
        return self._rooms[-1][:nbytes]

    def begin(self) -> None:
        self._now = []

    def launch(self, kernel: triton.JITFunction, grid: tuple[int, int, int], args: dict, **options: int) -> None:
        """Launches a kernel that begins by `arch.follow`."""
        options |= platform.beside(self.ctx.device)
        found = relaunch.launch(self._kernels, self.ctx.device, kernel, grid, args, (), **options)
        if found is None:
            self._now = None
        elif self._now is not None:
            self._now.append(found.again)

    def run(self, step: Callable[[], object]) -> None:
        """Makes a step that is no launch, and says something true where it succeeds."""
        step()
        if self._now is not None:
            self._now.append(step)

    def keep(self, key: tuple | None) -> None:
        """Remembers the launches since `begin` as the call `key`; None: one that cannot be made again."""
        if key is not None and self._now is not None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[key] = self._now
        self._now = None


def key_of(op: str, parts: Parts) -> tuple | None:
    """What a call comes down to: one with the same key passes the same checks and launches the same. None: unknown."""
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
    found = tuple(key)
    try:
        hash(found)
    except TypeError:
        return None
    return found
