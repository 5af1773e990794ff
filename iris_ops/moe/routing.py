"""Sort rows by expert on the device: `Routing`, by a stable counting sort.

A program takes the pairs (token, number of its expert) of one block. It places each after all pairs of experts with
lower numbers, and after those of the same expert in earlier blocks. Up to some thousand pairs, each program counts them
all by itself: one launch, and no program waits for another. More pairs are counted by a kernel ahead, block by block.
torch's sort and search take five launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from iris.device import arch
from iris.device.context import DeviceContext
from iris.device.function import device_function
from iris.device.waits import BAD_EXPERT, WAITERS, report_difference
import torch
import triton
import triton.language as tl

from ..workspace import refuse_capture, room_for

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..steps import Run

_BLOCK, _BLOCKS = 128, 4  # pairs that a program places at once, and how often it does where they were counted ahead
_LEAST_SCANNED, _MOST_SCANNED = 512, 4096  # pairs that each program counts by itself
_COUNTS = tl.constexpr(16)  # of blocks, that are added up at once
_WAITER = WAITERS.index("moe_route")


@device_function
def report_experts(ctx, expert, wrong, experts, waiter: tl.constexpr):
    """Report the experts for which `wrong` holds, so that the rank's next call raises."""
    if tl.max(wrong.to(tl.int32)) > 0:
        seen = tl.max(tl.where(wrong, expert.to(tl.int64), -(1 << 62)))
        report_difference(ctx, waiter, experts, ctx.rank, seen, BAD_EXPERT)


@device_function
def _chosen(chosen, p, pairs, experts):
    """Return (the experts of pairs p, whether each is in range)."""
    expert = tl.load(chosen + p, mask=p < pairs, other=-1)
    valid = (expert >= 0) & (expert < experts)
    return expert, tl.where(valid, expert, 0).to(tl.int32), valid


@triton.jit(do_not_specialize=["pairs", "experts"])
def moe_count_kernel(chosen, counts, pairs, experts, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """Count each program's pairs by expert: counts [programs, BINS]."""
    arch.follow()
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, expert, valid = _chosen(chosen, p, pairs, experts)
    by_expert = tl.histogram(expert, BINS, mask=valid)
    arch.lead()
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), by_expert)


@triton.jit(do_not_specialize=["pairs", "experts"])
def moe_route_kernel(
    chosen, counts, order, offsets, ctx_ptr, pairs, experts, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    SCANNED: tl.constexpr, BINS: tl.constexpr, WORLD_SIZE: tl.constexpr, WAITER: tl.constexpr,
):  # fmt: skip
    """Sort pairs by expert: order [pairs] holds them, offsets [experts + 1] where each expert's pairs begin.

    chosen [pairs] holds experts. SCANNED is the most pairs, if each program counts all of them; if it is 0, `counts`
    holds the counts of each program's BLOCKS blocks.
    """
    arch.follow()
    first, e = tl.program_id(0) * (BLOCK * BLOCKS), tl.arange(0, BINS)
    if SCANNED > 0:
        i = tl.arange(0, SCANNED)
        _, expert, valid = _chosen(chosen, i, pairs, experts)
        total = tl.histogram(expert, BINS, mask=valid)
        before = tl.histogram(expert, BINS, mask=valid & (i < first))
    else:
        before, total = tl.zeros((BINS,), tl.int32), tl.zeros((BINS,), tl.int32)
        for start in range(0, tl.num_programs(0), _COUNTS):
            b = start + tl.arange(0, _COUNTS)
            places = counts + (b * BINS)[:, None] + e[None, :]
            loaded = tl.load(places, mask=(b < tl.num_programs(0))[:, None], other=0)
            total += tl.sum(loaded, 0)
            before += tl.sum(tl.where((b < tl.program_id(0))[:, None], loaded, 0), 0)
    begins = tl.cumsum(total) - total
    if first == 0:
        tl.store(offsets + e, begins, mask=e < experts)
        tl.store(offsets + experts, tl.sum(total))
    ctx = DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr).to(tl.int32), WORLD_SIZE)
    arch.lead()
    for block in range(BLOCKS):
        p = first + block * BLOCK + tl.arange(0, BLOCK)
        given, known, there = _chosen(chosen, p, pairs, experts)
        report_experts(ctx, given, (p < pairs) & (there == 0), experts, WAITER)
        earlier = (known[None, :] == known[:, None]) & there[None, :] & (p[None, :] < p[:, None])
        place = tl.gather(begins + before, known, 0) + tl.sum(earlier.to(tl.int32), 1)
        tl.store(order + place, p, mask=there)
        if BLOCKS > 1:
            before += tl.histogram(known, BINS, mask=there)


@dataclass(frozen=True)
class Routing:
    """Hold the tokens sorted by their experts, for `moe_gate_up` and the `moe_down_*` after it.

    `ctx.ops.moe_route` makes it. `chosen` [T, k] has each token's experts, as they were given. `rows`, int32 [T * k],
    has the pairs t * k + j of a token and its j-th expert, sorted by expert. `offsets`, int32 [E + 1]: where each
    expert's pairs begin in `rows`.
    """

    chosen: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(cls, chosen: torch.Tensor, experts: int) -> Routing:
        """Return a routing of these choices, with memory that `sort` fills.

        Args:
            chosen: [T, k], int32 or int64: each token's experts.
            experts: E, the number of experts.
        """
        rows = torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device)
        return cls(chosen, rows, torch.empty(experts + 1, dtype=torch.int32, device=chosen.device))

    @property
    def experts(self) -> int:
        return self.offsets.shape[0] - 1

    def sort(self, run: Run) -> None:
        """Fill `rows` and `offsets`, on the device.

        Args:
            run: the launches of the call.
        """
        ctx, pairs, experts = run.rank, self.chosen.numel(), self.experts
        if pairs == 0:
            self.offsets.zero_()
            return
        bins = max(32, triton.next_power_of_2(experts))
        counts, blocks, scanned = self.rows, 1, _LEAST_SCANNED
        if pairs > _MOST_SCANNED:
            blocks, scanned = _BLOCKS, 0
            programs = triton.cdiv(pairs, _BLOCK * blocks)
            counts = _room(run.rank, 4 * programs * bins).view(torch.int32)
            given = dict(chosen=self.chosen, counts=counts, pairs=pairs, experts=experts)
            args = given | dict(BLOCK=_BLOCK * blocks, BINS=bins)
            run.launch(moe_count_kernel, (programs, 1, 1), args, num_warps=4, num_stages=1)
        elif pairs > _LEAST_SCANNED:  # few kernels for all numbers of tokens
            scanned = _MOST_SCANNED
        args = dict(
            chosen=self.chosen, counts=counts, order=self.rows, offsets=self.offsets, pairs=pairs, experts=experts,
            ctx_ptr=ctx.get_device_context(), BLOCK=_BLOCK, BLOCKS=blocks, SCANNED=scanned, BINS=bins,
            WORLD_SIZE=ctx.num_ranks, WAITER=_WAITER,
        )  # fmt: skip
        grid = (triton.cdiv(pairs, _BLOCK * blocks), 1, 1)
        run.launch(moe_route_kernel, grid, args, num_warps=8, num_stages=2)


class _Counts:
    """This rank's memory for what one launch leaves to the next. What became too small is kept, for captured graphs."""

    def __init__(self, rank: Rank) -> None:
        self.rooms = [torch.empty(0, dtype=torch.uint8, device=rank.device)]


def _room(rank: Rank, nbytes: int) -> torch.Tensor:
    rooms = rank.once(_Counts).rooms
    if rooms[-1].nbytes < nbytes:
        refuse_capture(rank)
        rooms.append(torch.empty(room_for(nbytes), dtype=torch.uint8, device=rank.device))
    return rooms[-1][:nbytes]
