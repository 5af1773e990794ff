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
from ..kernels.launching import lamport_memory
from ..planning.workspace_size import exchange_ld
from .arguments import DownForm, DownMemory, Sizes, combine_of
from .coded import experts_of
from .combine import combined
from .grouped import PairRows, bias_of, check_pairs, pair_block, product, same_expert, sorted_block
from .grouped_matmul import arguments

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig
    from ..problem import Problem
    from ..steps import Run
    from ..workspace import Workspace
    from .operands import Down

_TOKENS = 16  # that are added up at once


@triton.jit(do_not_specialize=["pairs", "experts", "blocks", "tokens"])
def moe_lamport_down_kernel(
    a, b, scale, bias, choice, combine, out, memory, ctx_ptr, pairs, experts, blocks, tokens, sizes, strides,
    tile: tl.constexpr, form: tl.constexpr, codes: tl.constexpr, widen: tl.constexpr, world: tl.constexpr,
):  # fmt: skip
    """Multiply by the down projection, combine each token's products, and exchange the sums as Lamport values.

    `blocks`: the most blocks of rows. memory: a `DownMemory`.
    """
    arch.follow()
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_T: tl.constexpr = form.BLOCK_T
    SORTED: tl.constexpr = form.SORTED
    SEARCHED: tl.constexpr = form.SEARCHED
    ONE_TILE: tl.constexpr = form.ONE_TILE
    WORLD_SIZE: tl.constexpr = world.WORLD_SIZE
    WAITER: tl.constexpr = world.WAITER
    products, counts, lamport, sync = memory.products, memory.counts, memory.lamport, memory.sync
    N, ld = sizes.N, lamport.ld
    B = experts_of(b, scale, sizes.K, N, strides, tile.B_TRANSPOSED, codes, widen, a.dtype.element_ty)
    dtype: tl.constexpr = out.dtype.element_ty
    own_rank = (tl.load(ctx_ptr), tl.load(sync))
    all_bases = load_bases(ctx_ptr, WORLD_SIZE)
    tile_n, which = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    c = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    expert, count = 0, 0
    if SORTED:
        expert, pair, own = sorted_block(choice.order, choice.offsets, which, experts, BLOCK_M, SEARCHED)
        count = tl.where(expert < experts, 1, 0)
    else:
        expert, rows, same = same_expert(choice.chosen, which, pairs, experts, SEARCHED)
        count = tl.cdiv(rows, BLOCK_M)
    for turn in range(count):
        if not SORTED:
            pair, own = pair_block(same, which, turn * BLOCK_M, BLOCK_M, SEARCHED)
        rows_of_pairs = PairRows(a, pair, own, strides.am, strides.ak)
        value = product(rows_of_pairs, B, expert, tile_n * BLOCK_N, BLOCK_N, tile.BLOCK_K)
        if bias.data is not None:
            value += bias_of(bias, expert, c, N)[None, :]
        places = products + (pair.to(tl.int64) * ld)[:, None] + c[None, :]
        tl.store(places, arch.round_to(value, dtype), mask=own[:, None] & (c < N)[None, :])
    if not SORTED:
        check_pairs(ctx_ptr, choice.chosen, pairs, experts, SEARCHED, WORLD_SIZE, WAITER)
    arch.lead()
    arch.drain_stores()
    tl.debug_barrier()
    if tl.atomic_add(counts + tile_n, 1, sem="acq_rel", scope="gpu") == blocks - 1:
        tl.store(counts + tile_n, 0)
        my_rank, last_epoch = settled(own_rank)
        rank, epoch, bases = my_rank.to(tl.int32), last_epoch + 1, settled(all_bases)
        ctx = DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE)
        exchange = exchange_of(ctx, bases, epoch, lamport, tokens, WAITER)
        kept = tl.zeros((BLOCK_T, BLOCK_N), lamport.staging.dtype.element_ty)
        turns = 1 if ONE_TILE else tl.cdiv(tokens, BLOCK_T)
        for turn in range(turns):
            t = turn * BLOCK_T + tl.arange(0, BLOCK_T)
            total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
            total = combined(total, products, combine, t, c, tokens, N, ld, form.TOP_K)
            kept = without_sentinel(total, dtype)
            exchange.send_tile(kept, t, c, t < tokens, N, TO_SELF=not ONE_TILE)
        advance(sync, epoch, tl.num_programs(0) // blocks)
        for turn in range(turns):
            t = turn * BLOCK_T + tl.arange(0, BLOCK_T)
            mask = (t < tokens)[:, None] & (c < ld)[None, :]
            mine = unwrapped(kept, dtype) if ONE_TILE else None
            total, _ = exchange.sum_all(exchange.places(t, c), mask, dtype, mine)
            places = out + (t.to(tl.int64) * strides.om)[:, None] + (c.to(tl.int64) * strides.on)[None, :]
            tl.store(places, arch.round_to(total, dtype), mask=(t < tokens)[:, None] & (c < N)[None, :])


def launch(run: Run, workspace: Workspace, problem: Problem, config: FusedConfig, tensors: Down) -> None:
    """Launch the kernel. The workspace has room in its exchange area."""
    ctx: Rank = workspace.ctx
    ld, size = exchange_ld(problem.N), problem.dtype.itemsize
    products = workspace.local("moe products", problem.pairs * ld * size).view(problem.dtype).view(problem.pairs, ld)
    _, known = arguments(ctx, problem, config, tensors.product(products, ctx.cur_rank))
    across = triton.cdiv(problem.N, config.block_n)
    known |= dict(
        memory=DownMemory(
            products, workspace.local("moe counts", 4 * across).view(torch.int32),
            lamport_memory(workspace, problem.dtype, problem.N), workspace.exchange_sync,
        ),
        combine=combine_of(tensors.weights, tensors.shared), out=tensors.out, tokens=problem.M,
        sizes=Sizes(problem.N, problem.K),
        strides=known["strides"]._replace(om=tensors.out.stride(0), on=tensors.out.stride(1)),
        form=DownForm(
            known["form"].SORTED, known["form"].SEARCHED, problem.experts.top_k, problem.M <= _TOKENS, _TOKENS
        ),
    )  # fmt: skip
    args = {name: known[name] for name in moe_lamport_down_kernel.arg_names}
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    grid = (known["blocks"] * across, 1, 1)
    run.launch(moe_lamport_down_kernel, grid, args, **options)
