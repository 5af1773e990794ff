"""`all_gather_matmul` of few rows: the ranks gather A first, as Lamport values, and then multiply.

The product is that of `lamport_matmul.py`, which reads every weight once. Every program moves a piece of A: it sends
the piece to every peer, and puts what arrives of the peers' pieces into one local matrix. The matrix is whole when
every program of this rank has done so, which a count and a flag tell them all. Until then programs prefetch their first
weights, so that these come from the L2 cache when the product begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris import platform
from iris.device import arch
from iris.device.context import own_context
from iris.device.function import device_function
from iris.device.lamport import load_bases, without_sentinel
from iris.device.sync import wait
from iris.device.tracing import PRODUCT, PUSH, tile_bytes
import triton
import triton.language as tl

from ..planning.workspace_size import exchange_ld, gathered_part, tiles_of
from ..problem import Problem
from .arguments import Pieces, Rows
from .descriptors import rows_operand
from .lamport_steps import exchange_of
from .launching import grid_of, lamport_memory, product_arguments, shared_arguments
from .tile_orders import by_columns
from .tiles import Matrix, add_bias, first_row, multiply_transposed, rows_from

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig
    from ..operands import Operands
    from ..workspace import Workspace
    from .launching import Launch

# Columns of a piece of A that a program moves.
_PIECE_K = 512


@device_function
def _send_piece(
    exchange, own, whole, piece_m, piece_k, PIECE_M: tl.constexpr, PIECE_K: tl.constexpr, BY_K: tl.constexpr
):
    """Send a piece of this rank's part of A to every peer, and store it in `whole`."""
    dtype: tl.constexpr = whole.data.dtype.element_ty
    tracing, rank, buffer = exchange.ctx.tracing, exchange.ctx.rank, exchange.buffer
    row, col = piece_m * PIECE_M, piece_k * PIECE_K
    nbytes = tile_bytes(own.rows - row, own.cols - col, PIECE_M, PIECE_K, dtype)
    span = tracing.record_event_start(PUSH, -1, buffer, piece_m, piece_k, nbytes=nbytes)
    values = own.load(row, col, PIECE_M, PIECE_K)
    r, c = row + tl.arange(0, PIECE_M), col + tl.arange(0, PIECE_K)
    mask = (r < own.rows)[:, None] & (c < tl.where(own.cols > 0, exchange.ld, 0))[None, :]
    place = exchange.pointers(rank, r, c)
    exchange.send_to_all(without_sentinel(values.to(tl.float32), dtype), place, mask, TO_SELF=False)
    tracing.record_event_end(span)
    above, before = exchange.corner(rank, BY_K)
    part = whole.until(above + own.rows, before + own.cols)
    target, inside = part.pointers(above + row, before + col, PIECE_M, PIECE_K)
    tl.store(target, values, mask=inside)


@triton.jit(do_not_specialize=["M", "a_rows", "part_rows"])
def lamport_gather_matmul_kernel(
    a, gathered_tile, b, epilogue, out, gathered, lamport, sync, ctx_ptr, M, N, K, a_rows, a_cols, strides, part_rows,
    pieces: tl.constexpr, tile: tl.constexpr, world: tl.constexpr,
):  # fmt: skip
    # a: [a_rows, a_cols], this rank's part; gathered: [M, K], rows of gathered.ld elements; gathered_tile: its
    # descriptor, where TMA can serve. lamport: two buffers, each as `lamport_steps.py` says; sync: [epoch, programs
    # that have moved their pieces, epoch in which all have]
    arch.follow()
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    PIECE_M: tl.constexpr = pieces.PIECE_M
    PIECE_K: tl.constexpr = pieces.PIECE_K
    BY_K: tl.constexpr = pieces.BY_K
    ctx = own_context(ctx_ptr, world.WORLD_SIZE, world.TRACING)
    bases = load_bases(ctx_ptr, world.WORLD_SIZE)
    dtype: tl.constexpr = out.dtype.element_ty
    epoch = tl.load(sync) + 1
    exchange = exchange_of(ctx, bases, epoch, lamport, part_rows, world.WAITER)
    own = Matrix(a, a_rows, a_cols, strides.am, strides.ak)
    whole = Matrix(gathered.data, M, K, gathered.ld, 1)
    A = Matrix(gathered_tile, M, K, gathered.ld, 1)
    B = Matrix(b, K, N, strides.bk, strides.bn, tile.B_TRANSPOSED)

    down, across = tl.cdiv(part_rows, PIECE_M), tl.cdiv(lamport.part_cols, PIECE_K)
    for piece in range(tl.program_id(0), down * across, tl.num_programs(0)):
        piece_m, piece_k = by_columns(piece, down)
        _send_piece(exchange, own, whole, piece_m, piece_k, PIECE_M, PIECE_K, BY_K)
    exchange.tell_peers()
    ok = True
    for piece in range(tl.program_id(0), down * across, tl.num_programs(0)):
        piece_m, piece_k = by_columns(piece, down)
        ok = exchange.take_parts(whole, piece_m * PIECE_M, piece_k * PIECE_K, PIECE_M, PIECE_K, BY_K, ok)
    ok = exchange.wait_for_peers(dtype) and ok

    # All programs have read the epoch and moved their pieces when the last one comes here.
    arch.drain_stores()
    tl.debug_barrier()
    if tl.atomic_add(sync + 1, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(sync + 1, 0)
        tl.store(sync, epoch)
        tl.debug_barrier()
        tl.atomic_xchg(sync + 2, epoch, sem="release", scope="gpu")
    ok = wait(ctx, sync + 2, epoch, ctx.rank, world.WAITER, exact=True) and ok
    arch.fence_async_proxy()
    if ok:
        num_m = tl.cdiv(M, BLOCK_M)
        for t in range(tl.program_id(0), num_m * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
            tile_m, tile_n = by_columns(t, num_m)
            row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
            span = ctx.tracing.record_event_start(PRODUCT, -1, out, tile_m, tile_n, nbytes=0)
            first = first_row(row, M, BLOCK_M)
            product = multiply_transposed(A, B, first, col, K, tile).T
            r, own_row = rows_from(first, row, M, tl.arange(0, BLOCK_M), BLOCK_M, A.FOLDED)
            ctx.tracing.record_event_end(span)
            if epilogue.bias is not None:
                product = add_bias(product, epilogue.bias, col, N, BLOCK_N)
            target, mask = Matrix(out, M, N, strides.om, strides.on).places(r, col + tl.arange(0, BLOCK_N))
            tl.store(target, arch.round_to(product, dtype), mask=mask & own_row[:, None])
    arch.lead()


def launcher(rank: Rank, workspace: Workspace, problem: Problem, config: FusedConfig, tensors: Operands) -> Launch:
    out, A, B, bias, _ = tensors
    rows, cols, _ = gathered_part(problem)
    ld = exchange_ld(problem.K)
    gathered = workspace.staging.view(problem.dtype)[: problem.M * ld].view(problem.M, ld)[:, : problem.K]
    # pieces: about as many as programs, so that all move data at once
    across = triton.cdiv(cols, _PIECE_K)
    programs = config.num_programs or platform.num_programs(rank.device)
    piece_m = min(32, triton.next_power_of_2(max(1, triton.cdiv(rows * across, programs))))
    pieces = triton.cdiv(rows, piece_m) * across
    args = product_arguments(out, A, B, bias, config) | dict(
        a=A,
        gathered_tile=rows_operand(gathered, (config.block_m, config.block_k))[0],
        gathered=Rows(gathered, ld),
        lamport=lamport_memory(workspace, problem.dtype, cols),
        M=problem.M,
        N=problem.N,
        a_rows=A.shape[0],
        a_cols=A.shape[1],
        part_rows=rows,
        pieces=Pieces(piece_m, _PIECE_K, problem.form == "k"),
        **shared_arguments(rank, workspace.exchange_sync, problem, out),
    )
    grid = grid_of(rank.device, config, max(pieces, tiles_of(problem.M, problem.N, config)))
    return lamport_gather_matmul_kernel, grid, args
