"""`matmul_reduce_scatter`, and `matmul_all_reduce` in two shots, by warp-specialised programs (`pipeline.py`).

Tiles, their order, and where they are staged and signalled are those of `matmul_reduce.py`. Here the mover warps push,
signal, wait and sum, while the MMA warps multiply on.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from iris.device import arch
from iris.device.context import own_context
from iris.device.sync import await_entered, enter, leave, next_epoch, out_at, signal, wait
from iris.device.tracing import PUSH, SUM, tile_bytes
from iris.device.waits import healthy
from iris.triton_private import warp_specialize
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...problem import Problem
from ..matmul_reduce import reduce_arguments
from ..stream_k import Units
from ..tile_orders import OwnedTiles
from ..tiles import Matrix
from .loading import NOWHERE, Work, load_ahead
from .operands import specialised_arguments
from .pipeline import allocate, await_tile, multiply_tiles, pace, places_of, rows_of
from .policies import mma_of

if TYPE_CHECKING:
    from iris.rank import Rank

    from ...config import FusedConfig
    from ...operands import Operands
    from ...workspace import Workspace
    from ..launching import Launch


@gluon.jit
def _stage(shared, done, staged, row, end, M, spread, MOVE: gl.constexpr, ok):
    """Push the finished tile, rows `row` to `end` of M, to `staged` [BLOCK_M, BLOCK_N] in its owner's memory."""
    begin = arch.clock()
    for part in range(shared.PARTS):
        pace(begin, spread, part, shared.PARTS)
        values = rows_of(shared, done, part, MOVE)
        if ok:
            place, inside = _packed(shared, part, row, end, M, MOVE)
            gl.store(staged + place, values, mask=inside)


@gluon.jit
def _packed(shared, part, row, end, M, MOVE: gl.constexpr):
    """Return the offsets of a part in a staged tile [BLOCK_M, BLOCK_N], and which lie in its rows, `row` to `end`."""
    r, c, own = places_of(shared, part, row, M, MOVE)
    inside = own & (r < min(end, row + shared.BLOCK_M))  # parts after the last are requested, too
    return (r - row)[:, None] * shared.BLOCK_N + c[None, :], inside[:, None] & (c >= 0)[None, :]


@gluon.jit
def _load_staged(shared, sources, part, row, end, M, MOVE: gl.constexpr, COUNT: gl.constexpr):
    """Load one part of the tile from each of `sources`, the tiles that peers have staged."""
    place, inside = _packed(shared, part, row, end, M, MOVE)
    parts = ()
    for i in gl.static_range(COUNT):
        parts = parts + (gl.load(sources[i] + place, mask=inside, other=0.0, cache_modifier=".cg"),)
    return parts


@gluon.jit
def _in_rank_order(ctx, own, others, OTHERS: gl.constexpr):
    """Sum this rank's values and those of all `others`, which are in rank order, in fp32 from rank 0 on."""
    if OTHERS < 2:  # two add up to the same in either order
        total = own.to(gl.float32)
        for i in gl.static_range(OTHERS):
            total += others[i].to(gl.float32)
    else:
        total = gl.full(own.shape, -0.0, gl.float32, own.type.layout)  # to which any number adds up to itself
        for i in gl.static_range(OTHERS):
            total = gl.where(ctx.rank == i, total + own.to(gl.float32), total) + others[i].to(gl.float32)
        total = gl.where(ctx.rank == OTHERS, total + own.to(gl.float32), total)
    return total


@gluon.jit
def _sum(
    ctx, shared, staging, index, owned, sync, bias, target, row, end, M, ALL_REDUCE: gl.constexpr, MOVE: gl.constexpr,
    done, ok,
):  # fmt: skip
    """Add what peers have staged for the finished tile, number `index` of `owned`, and store the sum to `target`.

    The tile has rows to `end`; `bias` is of its columns.
    """
    out, width = target.data, target.cols
    ELEMENTS: gl.constexpr = shared.BLOCK_M * shared.BLOCK_N
    OTHERS: gl.constexpr = ctx.world_size - 1
    sources = ()
    targets = ()
    for i in gl.static_range(OTHERS):
        source = gl.where(i < ctx.rank, i, i + 1)  # in rank order
        sources = sources + (staging + (source * owned + index).to(gl.int64) * ELEMENTS,)
        if ALL_REDUCE:
            targets = targets + (out_at(ctx, sync, out, i + 1),)
    AHEAD: gl.constexpr = 4 // OTHERS if OTHERS else 0  # parts under way; as many as there are registers for
    under_way = ()
    for i in gl.static_range(AHEAD):
        under_way = under_way + (_load_staged(shared, sources, i, row, end, M, MOVE, OTHERS),)
    await_tile(shared, done)
    for part in range(shared.PARTS):
        under_way = under_way + (_load_staged(shared, sources, part + AHEAD, row, end, M, MOVE, OTHERS),)
        total = _in_rank_order(ctx, rows_of(shared, done, part, MOVE), under_way[0], OTHERS)
        under_way = under_way[1:]
        r, c, own = places_of(shared, part, row, M, MOVE)
        if bias is not None:
            total += gl.load(bias + c, mask=c < width, other=0.0).to(gl.float32)[None, :]
        result = total.to(out.dtype.element_ty)
        place = ((r - row).to(gl.int64) * target.stride_row)[:, None] + c[None, :]
        mask = (own & (r < end))[:, None] & (c < width)[None, :]
        gl.store(out + place, result, mask=mask)
        if ALL_REDUCE:
            if ok:
                for i in gl.static_range(OTHERS):
                    gl.store(targets[i] + place, result, mask=mask)


@gluon.jit
def _move_tiles(
    ctx, shared, work, bias, C, staged_at, sync, spread, ALL_REDUCE: gl.constexpr, MOVE: gl.constexpr,
    WAITER: gl.constexpr,
):  # fmt: skip
    """Run the mover warps: push peers' tiles to their owners, and sum own tiles, for `out` or for all ranks.

    `C` is `out`, with the edges of the whole result.
    """
    units, tiles, out, M = work.units, work.tiles, C.data, C.rows
    staging, flags = staged_at.staging, staged_at.flags
    BLOCK_M: gl.constexpr = shared.BLOCK_M
    BLOCK_N: gl.constexpr = shared.BLOCK_N
    ELEMENTS: gl.constexpr = BLOCK_M * BLOCK_N
    owned = tiles.owned()
    place = out if ALL_REDUCE else None
    epoch = enter(ctx, sync, place, LANES=False)
    ok = await_entered(ctx, sync, epoch, WAITER, place, LANES=False)
    done = 0
    programs = gl.num_programs(0)
    for unit in range(gl.program_id(0), units.count(programs), programs):
        t, _, _, complete = units.at(unit, programs)
        if complete:
            owner, index, tile_m, tile_n, row, col, rows, cols = tiles.at(t)
            inside = (row < rows) & (col < cols)  # else there is no such tile in a short part
            nbytes = tile_bytes(rows - row, cols - col, BLOCK_M, BLOCK_N, staging.dtype.element_ty)
            if owner != ctx.rank:
                await_tile(shared, done)
                number = ctx.rank * owned + index
                staged = ctx.remote(staging + number.to(gl.int64) * ELEMENTS, owner)
                span = ctx.tracing.record_event_start(PUSH, owner, staged, tile_m, tile_n, nbytes=nbytes)
                # nothing is loaded after the last
                over = gl.where(unit + programs < units.count(programs), spread, 0)
                _stage(shared, done, staged, row, rows, M, over, MOVE, ok)
                ctx.tracing.record_event_end(span)
                if units.SHARED:
                    if unit < 2 * programs:  # a part of it may not have come, which has marked the rank
                        ok = healthy(ctx) and ok
                if ok & inside:
                    signal(ctx, flags + number, epoch, owner)
            else:
                if inside:
                    for i in gl.static_range(1, ctx.world_size):
                        source = (ctx.rank + i) % ctx.world_size
                        ok = wait(ctx, flags + source * owned + index, epoch, source, WAITER, exact=True) and ok
                # only an all-reduce has all of `out`, others this rank's part
                first_row, first_col = row, col
                if not ALL_REDUCE:
                    first_row, first_col = tile_m * BLOCK_M, tile_n * BLOCK_N
                span = ctx.tracing.record_event_start(SUM, -1, out, tile_m, tile_n, nbytes=nbytes)
                if ALL_REDUCE:  # part by part, as it is summed
                    push = ctx.tracing.record_event_start(PUSH, -1, out, tile_m, tile_n, nbytes=nbytes)
                target = Matrix(
                    out + first_row.to(gl.int64) * C.stride_row + first_col, rows - row, cols - col, C.stride_row, 1
                )
                _sum(
                    ctx, shared, staging, index, owned, sync, bias + col if bias is not None else bias, target, row,
                    rows, M, ALL_REDUCE, MOVE, done, ok,
                )  # fmt: skip
                if ALL_REDUCE:
                    ctx.tracing.record_event_end(push)
                ctx.tracing.record_event_end(span)
            done += 1
    leave(ctx, sync, epoch, ok, WAITER, TOGETHER=ALL_REDUCE, LANES=False)


@gluon.jit(do_not_specialize=["shared_tiles", "sharers", "skew", "spread"])
def hopper_matmul_reduce_kernel(
    a, b, epilogue, out, staged, joins, sync, ctx_ptr, M, N, K, stride_om, shared_tiles, sharers, skew, spread,
    tile: gl.constexpr, pipeline: gl.constexpr, world: gl.constexpr, form: gl.constexpr,
):  # fmt: skip
    """Multiply, push each tile to its owner, and sum the tiles that this rank owns, in rank order.

    a, b: descriptors of A [M, K] and of B [K, N] or, with `B_TRANSPOSED`, [N, K]; the others are as in the portable
    kernel.
    """
    ALL_REDUCE: gl.constexpr = form.ALL_REDUCE
    ctx = own_context(ctx_ptr, world.WORLD_SIZE, world.TRACING)
    tiles = OwnedTiles(
        ctx.rank, M, N, staged.part_rows, staged.part_cols, staged.early, tile.BLOCK_M, tile.BLOCK_N, tile.GROUP_M,
        world.WORLD_SIZE, form.BY_COLS,
    )  # fmt: skip
    units = Units(tiles.count(), gl.cdiv(K, tile.BLOCK_K), shared_tiles, sharers, skew, form.SHARED)
    work = Work(a, b, NOWHERE, mma_of(a, b, epilogue, tile, pipeline, N, K), units, tiles)
    shared = allocate(a, b, out.dtype.element_ty, tile, pipeline)
    C = Matrix(out, M, N, stride_om, 1)
    epoch = next_epoch(sync)  # `leave` advances it when all tiles have been moved
    warp_specialize(
        [
            (multiply_tiles, (ctx, work, shared, joins, epilogue, C, epoch, False, world.WAITER)),
            (
                _move_tiles,
                (
                    ctx, shared, work, epilogue.bias, C, staged, sync, spread, ALL_REDUCE, pipeline.MOVE,
                    world.WAITER,
                ),
            ),
            (load_ahead, (ctx, work, shared, world.WAITER)),
        ],
        [pipeline.MOVER_WARPS, pipeline.LOADER_WARPS],
        [pipeline.MOVER_REGISTERS, pipeline.LOADER_REGISTERS],
    )  # fmt: skip


def launcher(
    rank: "Rank", workspace: "Workspace", problem: Problem, config: "FusedConfig", tensors: "Operands"
) -> "Launch":
    args = reduce_arguments(rank, workspace, problem, config, tensors.out)
    grid, args = specialised_arguments(rank, workspace, problem, config, args, tensors)
    args["form"] = replace(args["form"], SHARED=args.pop("SHARED"))
    return hopper_matmul_reduce_kernel, grid, args
