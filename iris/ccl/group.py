"""The ranks of a collective: those of the context, or some of them, counted in the group's order.

Kernels know a group by its context tensor, in which the members are all ranks there are. Its workspaces lie on the
heap like everything else: they are where all ranks have them if every rank makes the same calls in the same order,
each in its own group, as the groups along a dimension of a mesh do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..device.context import HEADER
from ..errors import ArgumentError

if TYPE_CHECKING:
    from ..context import Iris

_NAMES = 7  # of the context tensor: where to find what the members are called in failure records


class Group:
    """All ranks of the context, or those in `members`, with the process group that they share."""

    def __init__(self, ctx: Iris, members: list[int] | None = None, processes: Any = None) -> None:
        self.ctx, self._processes = ctx, processes
        self.rank, self.size = ctx.cur_rank, ctx.num_ranks
        self.words = ctx.get_device_context()
        self._group: Any = None
        if members is not None:
            self._group = members
            self.rank, self.size = members.index(ctx.cur_rank), len(members)
            self._names = torch.tensor(members, dtype=torch.int64, device=ctx.device)
            self.words = _words(self.words, self.rank, members, self._names)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, counted in the context."""
        return tuple(self._group or range(self.size))

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Bytes at the same heap offset on every member."""
        memory = self.ctx._heap.allocate((nbytes,), torch.uint8)
        if self._processes is not None:
            offsets: list[Any] = [None] * self.size
            dist.all_gather_object(offsets, memory.data_ptr() - self.ctx._heap.base, self._processes)
            if len(set(offsets)) > 1:
                raise ArgumentError(
                    f"group: its ranks {self._group} have made different allocations before, their heaps are at "
                    f"{offsets}. Every rank must make the same calls in the same order, each in its own group; or give "
                    f"the group a context of its own: iris.iris(group=...)"
                )
        return memory

    def barrier(self) -> None:
        self.ctx.device_barrier(self._group)


def _words(words: torch.Tensor, rank: int, members: list[int], names: torch.Tensor) -> torch.Tensor:
    """The context tensor with only the members in it."""
    listed = words.tolist()
    header, ranks = listed[: HEADER.value], listed[HEADER.value :]
    world = header[1]
    header[:2] = rank, len(members)
    header[_NAMES] = names.data_ptr()
    bases, pids = ranks[:world], ranks[world:]
    found = [*header, *(bases[m] for m in members), *(pids[m] for m in members)]
    return torch.tensor(found, dtype=torch.int64, device=words.device)


def group_of(ctx: Iris, group: Any) -> Group:
    """Raises `ArgumentError` for what is no process group of ranks of the context, this one among them."""
    if group is None:
        return Group(ctx)
    if isinstance(group, (list, tuple)):
        raise ArgumentError(f"group is {group!r}; expected a ProcessGroup or a one-dimensional DeviceMesh")
    members = ctx._ranks.members(group)
    processes = group.get_group() if hasattr(group, "get_group") else group
    return Group(ctx, members, processes)
