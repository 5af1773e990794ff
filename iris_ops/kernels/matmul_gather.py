"""`out = gather over ranks of (A @ B + bias)` by rows or columns: each finished tile goes to every rank.

Nobody consumes a tile inside the kernel, so no tile is signalled: the last program of a rank vouches for all of them,
and the kernel ends when every rank's last program has done so.

Programs that start together finish their tiles together, and then all push at once while nobody multiplies. So they
start one after the other, over `stagger` ticks: while some push, the others multiply.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris import platform
from iris.device import arch
from iris.device.context import own_context
from iris.device.sync import await_entered, enter, leave, out_at
from iris.device.tracing import PRODUCT, PUSH, tile_bytes
import torch
import triton
import triton.language as tl

from ..planning.waves import gemm_tiles
from ..problem import Problem, part_of
from .arguments import PartStep
from .launching import grid_of, product_arguments, shared_arguments
from .tile_orders import grouped
from .tiles import Matrix, add_bias, first_row, multiply, rows_from, start_in_turn

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig
    from ..operands import Operands
    from ..workspace import Workspace
    from .launching import Launch


@triton.jit
def matmul_gather_kernel(
    a, b, epilogue, out, sync, ctx_ptr, M, N, K, strides, step, stagger, tile: tl.constexpr,
    world: tl.constexpr,
):  # fmt: skip
    # M, N: this rank's part, which lies at (rank * step.rows, rank * step.cols) in out
    row_step, col_step = step.rows, step.cols
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    ctx = own_context(ctx_ptr, world.WORLD_SIZE, world.TRACING)
    A = Matrix(a, M, K, strides.am, strides.ak)
    B = Matrix(b, K, N, strides.bk, strides.bn, tile.B_TRANSPOSED)
    start = ctx.rank.to(tl.int64) * row_step * strides.om + ctx.rank.to(tl.int64) * col_step * strides.on
    C = Matrix(out + start, M, N, strides.om, strides.on)
    # as many tiles on every rank, though its own part may be short
    num_m = tl.cdiv(max(M, row_step), BLOCK_M)
    num_n = tl.cdiv(max(N, col_step), BLOCK_N)
    epoch = enter(ctx, sync, out)
    start_in_turn(stagger)

    ok = True
    entered = False
    for t in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        tile_m, tile_n = grouped(t, num_m, num_n, tile.GROUP_M)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        if (row < M) & (col < N):
            span = ctx.tracing.record_event_start(PRODUCT, -1, out, tile_m, tile_n, nbytes=0)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            first = first_row(row, M, BLOCK_M)
            acc = multiply(A, B, first, col, 0, 0, K, acc, tile)
            ctx.tracing.record_event_end(span)
            if epilogue.bias is not None:
                acc = add_bias(acc, epilogue.bias, col, N, BLOCK_N)
            result = arch.round_to(acc, out.dtype.element_ty)
            r, own_row = rows_from(first, row, M, tl.arange(0, BLOCK_M), BLOCK_M, A.FOLDED)
            target, mask = C.places(r, col + tl.arange(0, BLOCK_N))
            mask &= own_row[:, None]
            tl.store(target, result, mask=mask)
            if not entered:
                ok = await_entered(ctx, sync, epoch, world.WAITER, out)  # before that, a peer may still read its out
                entered = True
            if ok:
                nbytes = tile_bytes(M - row, N - col, BLOCK_M, BLOCK_N, out.dtype.element_ty)
                span = ctx.tracing.record_event_start(PUSH, -1, out, tile_m, tile_n, nbytes=nbytes)
                for i in tl.static_range(1, ctx.world_size):
                    tl.store(out_at(ctx, sync, target, i), result, mask=mask)
                ctx.tracing.record_event_end(span)
    if not entered:
        ok = await_entered(ctx, sync, epoch, world.WAITER, out)
    leave(ctx, sync, epoch, ok, world.WAITER, TOGETHER=True)


def gather_arguments(
    rank: Rank, workspace: Workspace, problem: Problem, config: FusedConfig, out: torch.Tensor
) -> dict:
    """Return what this kernel and the warp-specialised one are given."""
    w, by_cols = problem.world_size, problem.form == "cols"
    rows, cols = problem.part_rows, problem.part_cols
    return dict(
        M=problem.M if by_cols else part_of(problem.M, w, rank.cur_rank),
        N=part_of(problem.N, w, rank.cur_rank) if by_cols else problem.N,
        step=PartStep(0 if by_cols else rows, cols if by_cols else 0),
        **shared_arguments(rank, workspace.sync, problem, out),
    )


def launcher(rank: Rank, workspace: Workspace, problem: Problem, config: FusedConfig, tensors: Operands) -> Launch:
    out, A, B, bias, _ = tensors
    args = gather_arguments(rank, workspace, problem, config, out) | dict(
        stagger=platform.ticks(config.stagger_us * 1e-6), **product_arguments(out, A, B, bias, config)
    )
    return matmul_gather_kernel, grid_of(rank.device, config, gemm_tiles(problem, config)), args
