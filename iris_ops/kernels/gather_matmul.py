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
from .descriptors import operand
from .launching import gathered_arguments, grid_of, parts_memory, product_arguments, shared_arguments
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
    ctx,
    own,
    gathered,
    flags,
    sync,
    epoch,
    cols,
    part_rows,
    ld,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    BY_K: tl.constexpr,
    COMM_PROGRAMS: tl.constexpr,
    PIECES: tl.constexpr,
    WAITER: tl.constexpr,
):
    """Pushes `own` [part_rows, cols], zero beyond its edges, to its place in every peer's `gathered`.

    In pieces of BLOCK_M rows by a PIECES-th of the columns, each with its signal.
    """
    # wide enough that a program has tens of KiB under way
    COPY_K: tl.constexpr = min(4 * BLOCK_K, max(BLOCK_K, 32768 // BLOCK_M))
    blocks = tl.cdiv(part_rows, BLOCK_M)
    width = tl.cdiv(tl.cdiv(cols, COPY_K), PIECES) * COPY_K  # columns of a unit
    target = Matrix(gathered, part_rows * (ctx.rank + 1), cols, ld, 1, False)
    ok = await_entered(ctx, sync, epoch, WAITER)
    for unit in range(tl.program_id(0), blocks * PIECES * (WORLD_SIZE - 1), COMM_PROGRAMS):
        if BY_K:  # every tile needs a block from everyone
            piece, step = unit // (WORLD_SIZE - 1), unit % (WORLD_SIZE - 1)
        else:  # a peer works through one rank's part after the other
            piece, step = unit % (blocks * PIECES), unit // (blocks * PIECES)
        row, first = piece // PIECES * BLOCK_M, piece % PIECES * width
        peer = (ctx.rank + 1 + step) % WORLD_SIZE
        if ok & (row < own.rows):  # what nobody multiplies nobody waits for, and would come too late for the next call
            nbytes = tile_bytes(part_rows - row, cols - first, BLOCK_M, width, gathered.dtype.element_ty)
            span = ctx.tracing.record_event_start(PUSH, peer, gathered, row // BLOCK_M, piece % PIECES, nbytes=nbytes)
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
    a,
    a_rows,
    a_cols,
    a_tile,
    gathered,
    gathered_tile,
    b,
    bias,
    out,
    parts,
    flags,
    sync,
    ctx_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_om,
    stride_on,
    part_rows,
    part_cols,
    ld,
    columns,
    rounded,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    COMM_PROGRAMS: tl.constexpr,
    PIECES: tl.constexpr,
    SPLITS: tl.constexpr,
    BY_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TMA_A: tl.constexpr,
    TMA_G: tl.constexpr,
    TMA_B: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    WAITER: tl.constexpr,
    TRACING: tl.constexpr = False,
):
    # a: [a_rows, a_cols], this rank's part of A; gathered: [source rank, part_rows, part_cols], rows of ld elements;
    # a_tile and gathered_tile are descriptors of the two where TMA can serve. flags: [source rank, row block, piece],
    # then those of `join_parts`.
    ctx = own_context(ctx_ptr, WORLD_SIZE, TRACING)
    own = Matrix(a, a_rows, a_cols, stride_am, stride_ak, False)
    own_tile = Matrix(a_tile, a_rows, a_cols, stride_am, stride_ak, TMA_A)
    peers_tile = Matrix(gathered_tile, part_rows * WORLD_SIZE, part_cols, ld, 1, TMA_G)
    B = Matrix(b, K, N, stride_bk, stride_bn, TMA_B, B_TRANSPOSED)
    epoch = enter(ctx, sync)
    ok = True
    if tl.program_id(0) < COMM_PROGRAMS:
        ok = _push_part(
            ctx,
            own,
            gathered,
            flags,
            sync,
            epoch,
            part_cols,
            part_rows,
            ld,
            BLOCK_M,
            BLOCK_K,
            WORLD_SIZE,
            BY_K,
            COMM_PROGRAMS,
            PIECES,
            WAITER,
        )

    num_m = tl.cdiv(part_rows, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    sources = 1 if BY_K else WORLD_SIZE
    tiles = num_m * num_n * sources
    units = rounded + (tiles - rounded) * SPLITS
    arrived = flags + WORLD_SIZE * num_m * PIECES  # of parts of tiles
    unit = next_tile(sync)
    while unit < units:
        t, k, k_depth = unit_tile(unit, rounded, K, BLOCK_K, SPLITS)
        part, tile_m, tile_n = sources_in_turn(t, ctx.rank, num_m, num_n, columns, sources, GROUP_M, WORLD_SIZE)
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
                acc = multiply(own_tile, B, loaded, col, a0, k0, own_depth, acc, BLOCK_M, BLOCK_N, BLOCK_K)
                start = source * part_rows + loaded
                acc = multiply(peers_tile, B, start, col, a0, k0, depth, acc, BLOCK_M, BLOCK_N, BLOCK_K)
                ctx.tracing.record_event_end(span)
            acc, whole, joined = join_parts(ctx, acc, parts, arrived, unit, rounded, epoch, SPLITS, WAITER)
            ok = ok and joined
            if whole:
                if HAS_BIAS:
                    acc = add_bias(acc, bias, col, N, BLOCK_N)
                C = Matrix(out, first + rows, N, stride_om, stride_on, False)
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
    gathered_tile, tma_g = operand(gathered, (config.block_m, config.block_k))
    product = product_arguments(out, A, B, bias, config, k_step=cols if by_k else 0, folds=False)
    tiles = gemm_tiles(problem, config)
    cut = cut_tiles(problem, config, platform.num_programs(rank.device))
    grid = grid_of(rank.device, config, max(tiles + cut * (config.splits - 1), config.comm_programs))
    # Where a rank has few rows, weights would be read anew for each rank's: then a wave of programs works on the same.
    low, wide = triton.cdiv(rows, config.block_m), triton.cdiv(problem.N, config.block_n)
    columns = wide if by_k or low >= _TALL else max(1, min(wide, grid[0] // (low * w)))
    args = dict(
        a_tile=product.pop("a"),
        **gathered_arguments(problem, A, gathered, gathered_tile, tma_g),
        ld=ld,
        columns=columns,
        COMM_PROGRAMS=min(config.comm_programs, grid[0]),
        PIECES=pieces(problem, config),
        rounded=tiles - cut,
        SPLITS=config.splits if cut else 1,
        GROUP_M=config.group_m,
        **product,
        parts=parts_memory(workspace, problem, config, cut * (config.splits - 1)),
        flags=workspace.flags,
        **shared_arguments(rank, workspace.sync, problem, config, out),
    )
    return gather_matmul_kernel, grid, args
