"""Which rows go to which expert, found on the device: `Routing`, by one kernel that counts and sorts.

Each program places the pairs (token, number of its expert) of one block behind all pairs of lower experts, and behind
those of the same expert in earlier blocks: a stable counting sort. It counts all pairs itself, so no program waits for
another. That reads everything once for each block, which even at 65,536 pairs is 256 KiB from L2 at a time; torch's
sort and search take five launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from iris import platform
from iris.device import arch
from iris.device.context import DeviceContext
from iris.device.function import device_function
from iris.device.waits import BAD_EXPERT, WAITERS, report_difference
from iris.launch import relaunch
import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from iris.rank import Rank

_BLOCK = 128  # pairs that a program places
_MOST_SCANNED = 4096  # pairs that are counted at once
_WAITER = WAITERS.index("moe_route")


@device_function
def report_experts(ctx, expert, wrong, experts, waiter: tl.constexpr):
    """For experts that are out of range, those where `wrong` holds: the rank's next call raises."""
    if tl.max(wrong.to(tl.int32)) > 0:
        seen = tl.max(tl.where(wrong, expert.to(tl.int64), -(1 << 62)))
        report_difference(ctx, waiter, experts, ctx.rank, seen, BAD_EXPERT)


@triton.jit(do_not_specialize=["pairs", "experts"])
def moe_route_kernel(
    chosen, order, offsets, ctx_ptr, pairs, experts, BLOCK: tl.constexpr, SCANNED: tl.constexpr, BINS: tl.constexpr,
    WORLD_SIZE: tl.constexpr, WAITER: tl.constexpr,
):  # fmt: skip
    """chosen [pairs]: experts. order [pairs]: pairs by expert, in order; offsets [experts + 1]: where each begins."""
    arch.follow()
    first = tl.program_id(0) * BLOCK
    before, total = tl.zeros((BINS,), tl.int32), tl.zeros((BINS,), tl.int32)
    for start in range(0, pairs, SCANNED):
        i = start + tl.arange(0, SCANNED)
        inside = i < pairs
        expert = tl.load(chosen + i, mask=inside, other=-1)
        valid = (expert >= 0) & (expert < experts)
        expert = tl.where(valid, expert, 0).to(tl.int32)
        total += tl.histogram(expert, BINS, mask=valid)
        before += tl.histogram(expert, BINS, mask=valid & (i < first))
    ends = tl.cumsum(total)
    begins = ends - total
    e = tl.arange(0, BINS)
    if first == 0:
        tl.store(offsets + e, begins, mask=e < experts)
        tl.store(offsets + experts, tl.sum(total))
    p = first + tl.arange(0, BLOCK)
    expert = tl.load(chosen + p, mask=p < pairs, other=-1)
    valid = (expert >= 0) & (expert < experts)
    wrong = (p < pairs) & (valid == 0)
    ctx = DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr).to(tl.int32), WORLD_SIZE)
    report_experts(ctx, expert, wrong, experts, WAITER)
    known = tl.where(valid, expert, 0).to(tl.int32)
    earlier = (known[None, :] == known[:, None]) & valid[None, :] & (p[None, :] < p[:, None])
    place = tl.gather(begins + before, known, 0) + tl.sum(earlier.to(tl.int32), 1)
    arch.lead()
    tl.store(order + place, p, mask=valid)


@dataclass(frozen=True)
class Routing:
    """Tokens by their experts, for `moe_gate_up` and the `moe_down_*` behind it. Made by `ctx.ops.moe_route`.

    `chosen` [T,k]: each token's experts, as they were given. `rows`, int32 [T*k]: t*k+j of each token and expert of
    its, those of expert 0 first; `offsets`, int32 [E+1]: where in `rows` each expert's begin.
    """

    chosen: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor

    @property
    def experts(self) -> int:
        return self.offsets.shape[0] - 1


def sort(kernels: dict, ctx: Rank, chosen: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor) -> None:
    """Fills `rows` and `offsets` of a `Routing`."""
    pairs, experts = chosen.numel(), offsets.shape[0] - 1
    if pairs == 0:
        offsets.zero_()
        return
    scanned = min(_MOST_SCANNED, max(_BLOCK, triton.next_power_of_2(pairs)))
    args = dict(
        chosen=chosen, order=rows, offsets=offsets, ctx_ptr=ctx.get_device_context(), pairs=pairs, experts=experts,
        BLOCK=_BLOCK, SCANNED=scanned, BINS=max(32, triton.next_power_of_2(experts)), WORLD_SIZE=ctx.num_ranks,
        WAITER=_WAITER,
    )  # fmt: skip
    grid = (triton.cdiv(pairs, _BLOCK), 1, 1)
    options = dict(num_warps=8, num_stages=2, **platform.beside(ctx.device))
    relaunch.launch(kernels, ctx.device, moe_route_kernel, grid, args, (), **options)
