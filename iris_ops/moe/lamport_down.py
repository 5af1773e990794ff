"""`moe_down_all_reduce` of few tokens in one kernel: a stream of weights, and one hop between the ranks.

    1. A program multiplies a block of one expert's rows by some columns of its weight (`grouped.py`), and leaves the
       product, rounded, in this rank's memory. It then counts itself among the programs of these columns.
    2. The last to be counted finds all products of the columns there. It adds them up for each token, in the order of
       the token's experts (`combine.py`), and sends the sums to every rank as Lamport values (`lamport_steps.py`).
    3. The same program takes what the peers have sent of these columns, adds it in rank order and stores `out`.

So the weights are streamed by all programs alike, however unevenly experts are chosen, and no program waits for another
of its rank. Why not a program for each block of columns, which would need no count: an expert's K is short, and its
products would come one after the other.

No wait is circular. A program waits only for values that a peer's last program of the same columns sends, once it has
no work left but to take. Of those that wait there are as many as blocks of columns, fewer than run at once
(`moe_ways.py` sees to that); so the others always go on, on every rank. In the interpreter programs run in turn, by
columns: a rank that waits has sent its own values of the columns, and so will its peer, which waits for lower ones at
most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris.device import arch
from iris.device.context import DeviceContext
from iris.device.lamport import load_bases, settled, unwrapped, without_sentinel
from iris.device.sync import advance
import torch
import triton
import triton.language as tl

from ..kernels.lamport_steps import exchange_of
from ..planning.workspace_size import exchange_ld
from .combine import combined
from .grouped import Experts, bias_of, check_pairs, pair_block, product, same_expert, sorted_block
from .grouped_matmul import arguments

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig
    from ..planning.moe_problem import MoeProblem
    from ..workspace import Workspace
    from .routing import Routing
    from .steps import Steps

_TOKENS = 16  # that are added up at once


@triton.jit(do_not_specialize=["pairs", "experts", "blocks", "tokens"])
def moe_lamport_down_kernel(
    a, b, bias, chosen, order, offsets, products, counts, weights, shared, out, staging, sync, ctx_ptr, pairs, experts,
    blocks, tokens, N, K, stride_am, stride_ak, stride_be, stride_bk, stride_bn, stride_bias, stride_wt, stride_st,
    stride_sn, stride_om, stride_on, ld, half_elements, TOP_K: tl.constexpr, SORTED: tl.constexpr,
    SEARCHED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SHARED: tl.constexpr, ONE_TILE: tl.constexpr,
    TMA_B: tl.constexpr, B_TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, WORLD_SIZE: tl.constexpr, WAITER: tl.constexpr,
):  # fmt: skip
    """products [pairs, ld]: in between; counts: int32, zero, one for each block of columns. `blocks`: of rows, at most.

    SORTED, SEARCHED: as in `moe_matmul_kernel`. ONE_TILE: all tokens are added up at once, this rank's sums then stay
    in registers. staging: [2 buffers] as `lamport_steps.py` says; sync: [epoch, finished].
    """
    arch.follow()
    B = Experts(b, K, N, stride_be, stride_bk, stride_bn, TMA_B, B_TRANSPOSED)
    dtype: tl.constexpr = out.dtype.element_ty
    own_rank = (tl.load(ctx_ptr), tl.load(sync))
    all_bases = load_bases(ctx_ptr, WORLD_SIZE)
    tile_n, which = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    c = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    expert, count = 0, 0
    if SORTED:
        expert, pair, own = sorted_block(order, offsets, which, experts, BLOCK_M, SEARCHED)
        count = tl.where(expert < experts, 1, 0)
    else:
        expert, rows, same = same_expert(chosen, which, pairs, experts, SEARCHED)
        count = tl.cdiv(rows, BLOCK_M)
    for turn in range(count):
        if not SORTED:
            pair, own = pair_block(same, which, turn * BLOCK_M, BLOCK_M, SEARCHED)
        value = product(a, pair, own, stride_am, stride_ak, B, expert, tile_n * BLOCK_N, BLOCK_M, BLOCK_N, BLOCK_K)
        if HAS_BIAS:
            value += bias_of(bias, expert, stride_bias, c, N)[None, :]
        places = products + (pair.to(tl.int64) * ld)[:, None] + c[None, :]
        tl.store(places, arch.round_to(value, dtype), mask=own[:, None] & (c < N)[None, :])
    if not SORTED:
        check_pairs(ctx_ptr, chosen, pairs, experts, SEARCHED, WORLD_SIZE, WAITER)
    arch.lead()
    arch.drain_stores()
    tl.debug_barrier()
    if tl.atomic_add(counts + tile_n, 1, sem="acq_rel", scope="gpu") == blocks - 1:
        tl.store(counts + tile_n, 0)
        my_rank, last_epoch = settled(own_rank)
        rank, epoch, bases = my_rank.to(tl.int32), last_epoch + 1, settled(all_bases)
        ctx = DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE)
        exchange = exchange_of(ctx, bases, epoch, staging, half_elements, tokens, N, ld, WAITER)
        kept = tl.zeros((BLOCK_T, BLOCK_N), staging.dtype.element_ty)
        turns = 1 if ONE_TILE else tl.cdiv(tokens, BLOCK_T)
        for turn in range(turns):
            t = turn * BLOCK_T + tl.arange(0, BLOCK_T)
            total = combined(
                products, weights, shared, t, c, tokens, N, ld, stride_wt, stride_st, stride_sn, TOP_K, HAS_SHARED
            )  # fmt: skip
            kept = without_sentinel(total, dtype)
            exchange.send_tile(kept, t, c, t < tokens, N, TO_SELF=not ONE_TILE)
        advance(sync, epoch, tl.num_programs(0) // blocks)
        for turn in range(turns):
            t = turn * BLOCK_T + tl.arange(0, BLOCK_T)
            mask = (t < tokens)[:, None] & (c < ld)[None, :]
            mine = unwrapped(kept, dtype) if ONE_TILE else None
            total, _ = exchange.sum_all(exchange.places(t, c), mask, dtype, mine)
            places = out + (t.to(tl.int64) * stride_om)[:, None] + (c.to(tl.int64) * stride_on)[None, :]
            tl.store(places, arch.round_to(total, dtype), mask=(t < tokens)[:, None] & (c < N)[None, :])


def launch(
    steps: Steps, workspace: Workspace, problem: MoeProblem, config: FusedConfig, out: torch.Tensor, A: torch.Tensor,
    B: torch.Tensor, where: torch.Tensor | Routing, weights: torch.Tensor, bias: torch.Tensor | None,
    shared: torch.Tensor | None,
) -> None:  # fmt: skip
    """`where`: experts as they were chosen, or sorted. The workspace has room in its exchange area."""
    ctx: Rank = workspace.ctx
    ld, size = exchange_ld(problem.N), problem.dtype.itemsize
    products = workspace.local("moe products", problem.pairs * ld * size).view(problem.dtype).view(problem.pairs, ld)
    once = bias if ctx.cur_rank == 0 else None
    _, known = arguments(ctx, problem, config, products, A, B, where, once, None, False)
    values = workspace.exchange.view(torch.int32 if problem.dtype == torch.float32 else torch.int16)
    across = triton.cdiv(problem.N, config.block_n)
    known |= dict(
        products=products, counts=workspace.local("moe counts", 4 * across).view(torch.int32), weights=weights,
        shared=shared, out=out, staging=values, sync=workspace.exchange_sync, tokens=problem.tokens,
        stride_wt=weights.stride(0), stride_st=0 if shared is None else shared.stride(0),
        stride_sn=0 if shared is None else shared.stride(1), stride_om=out.stride(0), stride_on=out.stride(1), ld=ld,
        half_elements=values.numel() // 2, TOP_K=problem.top_k, HAS_SHARED=shared is not None,
        ONE_TILE=problem.tokens <= _TOKENS, BLOCK_T=_TOKENS,
    )  # fmt: skip
    args = {name: known[name] for name in moe_lamport_down_kernel.arg_names}
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    grid = (known["blocks"] * across, 1, 1)
    steps.launch(moe_lamport_down_kernel, grid, args, **options)
