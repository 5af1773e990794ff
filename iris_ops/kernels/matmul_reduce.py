"""`out = this rank's part of sum over ranks of A @ B (+ bias)`: tiles travel to their owners, which sum them.

Each rank computes the tiles of all owners and pushes those of others into the owner's staging memory. It signals a tile
one tile later, when the stores have long landed. The owner rounds its own tile as its peers round theirs, adds what
arrived in fp32, in rank order, and stores the part. So the sum of a row has the same bits whoever owns it. A rank's own
tiles come last, or, after the first `early` tiles of each other owner, between the others' (`tile_orders.turn`). A
wait looks at tiles that come earlier in the same order on the peers, so no wait can be circular, with any number of
programs.

`matmul_all_reduce` in two shots is this kernel with owners that send their sums to everyone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris import platform
from iris.device import arch
from iris.device.context import own_context
from iris.device.function import device_function
from iris.device.sync import await_entered, enter, leave, out_at, signal, wait
from iris.device.tracing import PRODUCT, PUSH, SUM, tile_bytes
import torch
import triton
import triton.language as tl

from ..planning.waves import early_tiles, gemm_tiles
from ..problem import ALL_REDUCE, Problem, owned_part
from .arguments import ReduceForm, Staged
from .launching import grid_of, product_arguments, shared_arguments
from .tile_orders import OwnedTiles
from .tiles import Matrix, add_bias, first_row, multiply, packed_rows, rows_from, start_in_turn

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig
    from ..operands import Operands
    from ..workspace import Workspace
    from .launching import Launch


@device_function
def _sum_in_rank_order(ctx, own, staging, index, owned, down, own_row):
    """Sum `own`, this rank's tile, and what peers have staged for it in `index` of `owned`, in fp32 from rank 0 on."""
    BLOCK_M: tl.constexpr = own.shape[0]
    BLOCK_N: tl.constexpr = own.shape[1]
    if ctx.world_size == 2:  # two add up to the same in either order
        staged = packed_rows(staging, (1 - ctx.rank) * owned + index, down, BLOCK_M, BLOCK_N)
        theirs = tl.load(staged, mask=own_row[:, None], other=0.0, cache_modifier=".cg")
        return own.to(tl.float32) + theirs.to(tl.float32)
    elif ctx.world_size == 1:
        return own.to(tl.float32)
    else:  # to where a peer's would be: beside a sum, a tile has no room in registers
        mine = packed_rows(staging, ctx.rank * owned + index, down, BLOCK_M, BLOCK_N)
        tl.store(mine, own, mask=own_row[:, None])
        tl.debug_barrier()
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in tl.static_range(ctx.world_size):
            staged = packed_rows(staging, i * owned + index, down, BLOCK_M, BLOCK_N)
            part = tl.load(staged, mask=own_row[:, None], other=0.0, cache_modifier=".cg").to(tl.float32)
            total = part if i == 0 else total + part
        return total


@triton.jit
def matmul_reduce_kernel(
    a, b, epilogue, out, staged, sync, ctx_ptr, M, N, K, strides, stagger, tile: tl.constexpr, world: tl.constexpr,
    form: tl.constexpr,
):  # fmt: skip
    BY_COLS: tl.constexpr = form.BY_COLS
    ALL_REDUCE: tl.constexpr = form.ALL_REDUCE
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    staging, flags = staged.staging, staged.flags
    dtype: tl.constexpr = staging.dtype.element_ty
    ctx = own_context(ctx_ptr, world.WORLD_SIZE, world.TRACING)
    A = Matrix(a, M, K, strides.am, strides.ak)
    B = Matrix(b, K, N, strides.bk, strides.bn, tile.B_TRANSPOSED)

    tiles = OwnedTiles(
        ctx.rank, M, N, staged.part_rows, staged.part_cols, staged.early, BLOCK_M, BLOCK_N, tile.GROUP_M,
        world.WORLD_SIZE, BY_COLS,
    )  # fmt: skip
    owned = tiles.owned()
    epoch = enter(ctx, sync, out if ALL_REDUCE else None)
    start_in_turn(stagger)

    ok = True  # nothing has been missed so far
    entered = False  # the peers are known to be in this call
    pending = -1  # the index that was pushed last and not yet signalled
    pending_owner = 0
    for t in range(tl.program_id(0), tiles.count(), tl.num_programs(0)):
        owner, index, tile_m, tile_n, row, col, rows, cols = tiles.at(t)
        if (row < rows) & (col < cols):
            nbytes = tile_bytes(rows - row, cols - col, BLOCK_M, BLOCK_N, dtype)
            span = ctx.tracing.record_event_start(PRODUCT, owner, out, tile_m, tile_n, nbytes=0)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            first = first_row(row, M, BLOCK_M)
            acc = multiply(A, B, first, col, 0, 0, K, acc, tile)
            r, own_row = rows_from(first, row, M, tl.arange(0, BLOCK_M), BLOCK_M, A.FOLDED)
            down, own_row = r - row, own_row & (r < rows)  # in the tile, of this owner
            c = tl.arange(0, BLOCK_N)
            ctx.tracing.record_event_end(span)
            if not entered:
                # lanes take registers that the tile needs
                ok = await_entered(ctx, sync, epoch, world.WAITER, out if ALL_REDUCE else None, LANES=False)
                entered = True
            if pending >= 0:
                if ok:
                    signal(ctx, flags + ctx.rank * owned + pending, epoch, pending_owner)
                pending = -1

            if owner != ctx.rank:
                if ok:
                    span = ctx.tracing.record_event_start(PUSH, owner, staging, tile_m, tile_n, nbytes=nbytes)
                    target = packed_rows(staging, ctx.rank * owned + index, down, BLOCK_M, BLOCK_N)
                    tl.store(ctx.remote(target, owner), arch.round_to(acc, dtype), mask=own_row[:, None])
                    ctx.tracing.record_event_end(span)
                pending = index
                pending_owner = owner
            else:
                span = ctx.tracing.record_event_start(SUM, owner, out, tile_m, tile_n, nbytes=nbytes)
                for i in tl.static_range(1, ctx.world_size):
                    source = (ctx.rank + i) % ctx.world_size
                    ok = wait(ctx, flags + source * owned + index, epoch, source, world.WAITER, exact=True) and ok
                # as its peers' is: a row's sum is the same whoever owns it
                acc = _sum_in_rank_order(ctx, arch.round_to(acc, dtype), staging, index, owned, down, own_row)
                ctx.tracing.record_event_end(span)
                if epilogue.bias is not None:
                    acc = add_bias(acc, epilogue.bias, col, cols, BLOCK_N)
                result = arch.round_to(acc, dtype)
                if ALL_REDUCE:
                    target, mask = Matrix(out, rows, cols, strides.om, strides.on).places(r, col + c)
                    mask &= own_row[:, None]
                    tl.store(target, result, mask=mask)
                    if ok:
                        span = ctx.tracing.record_event_start(PUSH, -1, out, tile_m, tile_n, nbytes=nbytes)
                        for i in tl.static_range(1, ctx.world_size):
                            tl.store(out_at(ctx, sync, target, i), result, mask=mask)
                        ctx.tracing.record_event_end(span)
                else:
                    own_rows = rows if BY_COLS else rows - ctx.rank * staged.part_rows
                    own_cols = cols - ctx.rank * staged.part_cols if BY_COLS else cols
                    target, mask = Matrix(out, own_rows, own_cols, strides.om, strides.on).places(
                        tile_m * BLOCK_M + down, tile_n * BLOCK_N + c
                    )
                    tl.store(target, result, mask=mask & own_row[:, None])
    if pending >= 0:
        if ok:
            signal(ctx, flags + ctx.rank * owned + pending, epoch, pending_owner)
    leave(ctx, sync, epoch, ok, world.WAITER, TOGETHER=ALL_REDUCE)


def reduce_arguments(
    rank: Rank, workspace: Workspace, problem: Problem, config: FusedConfig, out: torch.Tensor
) -> dict:
    """Return what this kernel and the warp-specialised one are given."""
    rows, cols, by_cols = owned_part(problem, config)
    return dict(
        staged=Staged(
            workspace.staging.view(problem.dtype),
            workspace.flags,
            rows,
            cols,
            early_tiles(problem, config, platform.num_programs(rank.device)),
        ),
        M=problem.M,
        N=problem.N,
        form=ReduceForm(problem.op == ALL_REDUCE, by_cols),
        **shared_arguments(rank, workspace.sync, problem, out),
    )


def column_step(problem: Problem, config: FusedConfig) -> int:
    """Return the width of an owner's part in a row of B or `out`; 0 where owners have rows."""
    _rows, cols, by_cols = owned_part(problem, config)
    return cols if by_cols else 0


def launcher(rank: Rank, workspace: Workspace, problem: Problem, config: FusedConfig, tensors: Operands) -> Launch:
    out, A, B, bias, _ = tensors
    args = reduce_arguments(rank, workspace, problem, config, out) | dict(
        stagger=platform.ticks(config.stagger_us * 1e-6),
        **product_arguments(out, A, B, bias, config, n_step=column_step(problem, config)),
    )
    return matmul_reduce_kernel, grid_of(rank.device, config, gemm_tiles(problem, config)), args
