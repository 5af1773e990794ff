"""Collectives over the ranks of several hosts: ours inside a host, torch.distributed's across.

Ranks are counted host by host. Rank r of a host exchanges with rank r of the others, so each network link carries one
rank's data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..rank import Rank


class HierarchicalCollectives:
    """Sums and gathers over all ranks of all hosts of a context with `across`. All are collective."""

    def __init__(self, ctx: Rank) -> None:
        assert ctx.across is not None
        self._ctx: Any = ctx
        self._line = ctx.across

    def all_reduce(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        """Fill `out` [M, N] with the sum of all ranks' `inp` [M, N], the same bits on all ranks."""
        total = torch.empty_like(inp, memory_format=torch.contiguous_format)
        self._ctx.ccl.all_reduce(total, inp)
        self._line.all_reduce(total, "all_reduce")
        out.copy_(total)

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        """Fill `out` [w * m, N] with the `inp` [m, N] of all w ranks, in their order."""
        out.copy_(self.gathered(inp).reshape(out.shape))

    def gathered(self, inp: torch.Tensor) -> torch.Tensor:
        """Return [hosts, ranks, m, N] of all ranks' `inp` [m, N], by a transfer of each rank's own rows across."""
        (m, N), hosts, ranks = inp.shape, self._line.size, self._ctx.num_ranks
        lines = inp.new_empty(hosts * m, N)
        self._line.all_gather(lines, inp.contiguous(), "all_gather")
        whole = inp.new_empty(ranks * hosts * m, N)
        self._ctx.ccl.all_gather(whole, lines)
        return whole.view(ranks, hosts, m, N).transpose(0, 1)
