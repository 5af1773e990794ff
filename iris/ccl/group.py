"""The ranks of a collective: those of the context, or some of them, counted in the group's order.

Kernels know a group by its context tensor, in which the members are all ranks there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..context import Iris


class Group:
    """All ranks of the context."""

    def __init__(self, ctx: Iris) -> None:
        self.ctx = ctx
        self.rank, self.size = ctx.cur_rank, ctx.num_ranks
        self.words = ctx.get_device_context()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Bytes at the same heap offset on every member."""
        return self.ctx._heap.allocate((nbytes,), torch.uint8)

    def barrier(self) -> None:
        self.ctx.device_barrier()


def group_of(ctx: Iris, group: Any) -> Group:
    return Group(ctx)
