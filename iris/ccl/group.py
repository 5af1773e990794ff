"""The ranks of a collective: those of the context, or some of them, counted in the group's order.

Kernels know a group by its context tensor, in which the members are all ranks there are. Its workspaces lie on the
heap, at the same offsets on all ranks. That requires that every rank of the context makes the same calls in the same
order, each in its own group, as the groups along a dimension of a mesh do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..device.context import HEADER
from ..errors import ArgumentError

if TYPE_CHECKING:
    from ..rank import Rank

_NAMES = 7  # of the context tensor: where to find what the members are called in failure records


class Group:
    """All ranks of the context, or those in `members`."""

    def __init__(self, ctx: Rank, members: list[int] | None = None) -> None:
        self.ctx = ctx
        self.rank, self.size = ctx.cur_rank, ctx.num_ranks
        self.context_tensor = ctx.get_device_context()
        self._group: Any = None
        if members is not None:
            self._group = members
            self.rank, self.size = members.index(ctx.cur_rank), len(members)
            self._names = torch.tensor(members, dtype=torch.int64, device=ctx.device)
            self.context_tensor = _of_members(self.context_tensor, self.rank, members, self._names)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the members, as ranks of the context."""
        return tuple(self._group or range(self.size))

    def reserve(self, nbytes: int) -> torch.Tensor:
        """Return memory at the same heap offset on every member, which the next `barrier` checks."""
        return self.ctx.heap.reserve((nbytes,), torch.uint8)

    def barrier(self) -> None:
        """Wait for all members on the host; raise on all of them if their heaps differ."""
        self.ctx.barrier(group=self._group)


def _of_members(context: torch.Tensor, rank: int, members: list[int], names: torch.Tensor) -> torch.Tensor:
    """Return the context tensor with only the members in it."""
    listed = context.tolist()
    header, ranks = listed[: HEADER.value], listed[HEADER.value :]
    world = header[1]
    header[:2] = rank, len(members)
    header[_NAMES] = names.data_ptr()
    bases, pids = ranks[:world], ranks[world:]
    values = [*header, *(bases[m] for m in members), *(pids[m] for m in members)]
    return torch.tensor(values, dtype=torch.int64, device=context.device)


def group_of(ctx: Rank, group: Any) -> Group:
    """Return the `Group` of a process group.

    Raises `ArgumentError` unless all of its ranks are in the context, and this rank is one of them.
    """
    if group is None:
        return Group(ctx)
    if isinstance(group, (list, tuple)):
        raise ArgumentError(f"group is {group!r}; expected a ProcessGroup or a one-dimensional DeviceMesh")
    return Group(ctx, ctx.hosts.members(group))
