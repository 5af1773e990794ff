"""`out = gather over ranks of A, by rows or along K, @ B + bias`: parts of A arrive while others are multiplied.

The first programs of the grid push this rank's A into every peer's staging memory and signal it piece by piece; then
they join the others, which take tiles from a common count. By rows, the own part comes first and the others in the
order of their arrival. Along K, every tile sums the ranks' parts in rank order, so the result has the same bits on all
ranks. Movers wait for no data, and tiles wait for movers only: no wait is circular.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris import platform
from iris.device import arch
from iris.device.context import own_context
from iris.device.function import device_function
from iris.device.sync import await_entered, enter, leave, next_tile, signal, wait
from iris.device.tracing import PRODUCT, PUSH, tile_bytes
import triton
import triton.language as tl

from ..planning.waves import cut_tiles, gemm_tiles
from ..planning.workspace_size import gathered_part, pieces
from ..problem import Problem
from .arguments import Gathered, Moves
from .descriptors import operand
from .launching import grid_of, parts_memory, product_arguments, shared_arguments
from .stream_k import join_parts, unit_tile
from .tile_orders import sources_in_turn
from .tiles import Matrix, add_bias, first_row, multiply, rows_from

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig
    from ..operands import Operands
    from ..workspace import Workspace
    from .launching import Launch

# Blocks of rows from which on a rank's rows are worth reading all weights for.
_TALL = 4


@device_function
def _push_part(
    ctx, own, target, flags, sync, epoch, part_rows, tile: tl.constexpr, moves: tl.constexpr, world: tl.constexpr
):
    """Push `own`, zero beyond its edges, to its place in every peer's `target`, in which a rank has `part_rows`.

    In pieces of BLOCK_M rows by a PIECES-th of the columns, each with its signal.
    """
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    PIECES: tl.constexpr = moves.PIECES
    cols, others = target.cols, world.WORLD_SIZE - 1
    # wide enough that a program has tens of KiB under way
    COPY_K: tl.constexpr = min(4 * BLOCK_K, max(BLOCK_K, 32768 // BLOCK_M))
    blocks = tl.cdiv(part_rows, BLOCK_M)
    width = tl.cdiv(tl.cdiv(cols, COPY_K), PIECES) * COPY_K  # columns of a unit
    ok = await_entered(ctx, sync, epoch, world.WAITER)
    for unit in range(tl.program_id(0), blocks * PIECES * others, moves.PROGRAMS):
        if moves.BY_K:  # every tile needs a block from everyone
            piece, step = unit // others, unit % others
        else:  # a peer works through one rank's part after the other
            piece, step = unit % (blocks * PIECES), unit // (blocks * PIECES)
        row, first = piece // PIECES * BLOCK_M, piece % PIECES * width
        peer = (ctx.rank + 1 + step) % world.WORLD_SIZE
        if ok & (row < own.rows):  # what nobody multiplies nobody waits for, and would come too late for the next call
            nbytes = tile_bytes(part_rows - row, cols - first, BLOCK_M, width, target.data.dtype.element_ty)
            span = ctx.tracing.record_event_start(
                PUSH, peer, target.data, row // BLOCK_M, piece % PIECES, nbytes=nbytes
            )
            for k in range(first, min(first + width, cols), COPY_K):
                # read with this rank's own edges, so that what lies beyond its last column arrives as zero
                values = own.load(row, k, BLOCK_M, COPY_K)
                places, mask = target.pointers(ctx.rank * part_rows + row, k, BLOCK_M, COPY_K)
                tl.store(ctx.remote(places, peer), values, mask=mask)
            ctx.tracing.record_event_end(span)
            signal(ctx, flags + ctx.rank * blocks * PIECES + piece, epoch, peer)
    return ok


@triton.jit
def gather_matmul_kernel(
    a, a_tile, gathered_tile, b, epilogue, out, gathered, parts, flags, sync, ctx_ptr, M, N, K, strides, columns,
    rounded, tile: tl.constexpr, moves: tl.constexpr, world: tl.constexpr,
):  # fmt: skip
    # a: this rank's part of A; gathered: all ranks', [source rank, part_rows, part_cols]; a_tile and gathered_tile are
    # descriptors of the two where TMA can serve. flags: [source rank, row block, piece], then those of `join_parts`.
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BY_K: tl.constexpr = moves.BY_K
    PIECES: tl.constexpr = moves.PIECES
    SPLITS: tl.constexpr = moves.SPLITS
    WORLD_SIZE: tl.constexpr = world.WORLD_SIZE
    WAITER: tl.constexpr = world.WAITER
    ctx = own_context(ctx_ptr, WORLD_SIZE, world.TRACING)
    a_cols, part_rows, part_cols, ld = gathered.a_cols, gathered.part_rows, gathered.part_cols, gathered.ld
    own = Matrix(a, gathered.a_rows, a_cols, strides.am, strides.ak)
    own_tile = Matrix(a_tile, gathered.a_rows, a_cols, strides.am, strides.ak)
    peers_tile = Matrix(gathered_tile, part_rows * WORLD_SIZE, part_cols, ld, 1)
    B = Matrix(b, K, N, strides.bk, strides.bn, tile.B_TRANSPOSED)
    epoch = enter(ctx, sync)
    ok = True
    if tl.program_id(0) < moves.PROGRAMS:
        target = Matrix(gathered.data, part_rows * (ctx.rank + 1), part_cols, ld, 1)
        ok = _push_part(ctx, own, target, flags, sync, epoch, part_rows, tile, moves, world)

    num_m = tl.cdiv(part_rows, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    sources = 1 if BY_K else WORLD_SIZE
    tiles = num_m * num_n * sources
    units = rounded + (tiles - rounded) * SPLITS
    arrived = flags + WORLD_SIZE * num_m * PIECES  # of parts of tiles
    unit = next_tile(sync)
    while unit < units:
        t, k, k_depth = unit_tile(unit, rounded, K, tile.BLOCK_K, SPLITS)
        part, tile_m, tile_n = sources_in_turn(t, ctx.rank, num_m, num_n, columns, sources, tile.GROUP_M, WORLD_SIZE)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        first = 0 if BY_K else part * part_rows
        rows = min(M - first, part_rows)
        if row < rows:
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            loaded = first_row(row, rows, BLOCK_M)
            for i in tl.static_range(WORLD_SIZE if BY_K else 1):
                source = part * 0 + i if BY_K else part
                k0 = source * part_cols if BY_K else k
                a0 = 0 if BY_K else k
                # Two loops of which one is empty, not two branches: so they share their pipeline's shared memory.
                own_depth, depth = a_cols if BY_K else k_depth, 0
                if source != ctx.rank:
                    for piece in range(PIECES):
                        flag = flags + (source * num_m + tile_m) * PIECES + piece
                        ok = wait(ctx, flag, epoch, source, WAITER, exact=True) and ok
                    arch.fence_async_proxy()
                    own_depth, depth = 0, min(part_cols, K - k0) if BY_K else k_depth
                span = ctx.tracing.record_event_start(PRODUCT, source, out, tile_m, tile_n, nbytes=0)
                acc = multiply(own_tile, B, loaded, col, a0, k0, own_depth, acc, tile)
                start = source * part_rows + loaded
                acc = multiply(peers_tile, B, start, col, a0, k0, depth, acc, tile)
                ctx.tracing.record_event_end(span)
            acc, whole, joined = join_parts(ctx, acc, parts, arrived, unit, rounded, epoch, SPLITS, WAITER)
            ok = ok and joined
            if whole:
                if epilogue.bias is not None:
                    acc = add_bias(acc, epilogue.bias, col, N, BLOCK_N)
                C = Matrix(out, first + rows, N, strides.om, strides.on)
                r, own_row = rows_from(loaded, row, rows, tl.arange(0, BLOCK_M), BLOCK_M, False)
                target, mask = C.places(first + r, col + tl.arange(0, BLOCK_N))
                tl.store(target, arch.round_to(acc, out.dtype.element_ty), mask=mask & own_row[:, None])
        unit = next_tile(sync)
    if (num_n == 0) & (tl.program_id(0) == 0):  # no tile here waits for what peers store here, whose own N may be more
        for i in range(num_m * PIECES * (WORLD_SIZE - 1)):
            source = (ctx.rank + 1 + i // (num_m * PIECES)) % WORLD_SIZE
            piece = i % (num_m * PIECES)
            first = 0 if BY_K else source * part_rows
            if piece // PIECES * BLOCK_M < min(M - first, part_rows):
                ok = wait(ctx, flags + source * num_m * PIECES + piece, epoch, source, WAITER, exact=True) and ok
    leave(ctx, sync, epoch, ok, WAITER)


def launcher(rank: Rank, workspace: Workspace, problem: Problem, config: FusedConfig, tensors: Operands) -> Launch:
    out, A, B, bias, _ = tensors
    w, by_k = problem.world_size, problem.form == "k"
    rows, cols, ld = gathered_part(problem)
    gathered = workspace.staging.view(problem.dtype)[: w * rows * ld].view(w * rows, ld)[:, :cols]
    product = product_arguments(out, A, B, bias, config, k_step=cols if by_k else 0, folds=False)
    tiles = gemm_tiles(problem, config)
    cut = cut_tiles(problem, config, platform.num_programs(rank.device))
    grid = grid_of(rank.device, config, max(tiles + cut * (config.splits - 1), config.comm_programs))
    # Where a rank has few rows, weights would be read anew for each rank's: then a wave of programs works on the same.
    low, wide = triton.cdiv(rows, config.block_m), triton.cdiv(problem.N, config.block_n)
    columns = wide if by_k or low >= _TALL else max(1, min(wide, grid[0] // (low * w)))
    args = dict(
        a=A,
        a_tile=product.pop("a"),
        gathered_tile=operand(gathered, (config.block_m, config.block_k))[0],
        gathered=Gathered(gathered, A.shape[0], A.shape[1], rows, cols, ld),
        M=problem.M,
        N=problem.N,
        columns=columns,
        rounded=tiles - cut,
        moves=Moves(by_k, min(config.comm_programs, grid[0]), pieces(problem, config), config.splits if cut else 1),
        **product,
        parts=parts_memory(workspace, problem, config, cut * (config.splits - 1)),
        flags=workspace.flags,
        **shared_arguments(rank, workspace.sync, problem, out),
    )
    return gather_matmul_kernel, grid, args
