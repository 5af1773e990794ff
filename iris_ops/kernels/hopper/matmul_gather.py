"""`matmul_all_gather` by warp-specialised programs (`pipeline.py`): tiles travel while the next are multiplied.

The mover warps store each finished tile into every rank's `out`. Nobody consumes a tile inside the kernel, so no tile
is signalled: at the end the last program of a rank vouches for all of them.
"""

from typing import TYPE_CHECKING

from iris.device import arch
from iris.device.context import own_context
from iris.device.sync import await_entered, enter, leave, next_epoch, out_at
from iris.device.tracing import PUSH, tile_bytes
from iris.triton_private import warp_specialize
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...problem import Problem
from ..matmul_gather import gather_arguments
from ..stream_k import Units
from ..tile_orders import PartTiles
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
def _push_tiles(ctx, shared, work, whole, C, sync, spread, MOVE: gl.constexpr, WAITER: gl.constexpr):
    """Run the mover warps: store each tile at every rank. `C` is this rank's part of `whole`."""
    units, tiles, out = work.units, work.tiles, C.data
    epoch = enter(ctx, sync, whole, LANES=False)
    ok = await_entered(ctx, sync, epoch, WAITER, whole, LANES=False)  # before that, a peer may still read its out
    targets = ()
    for i in gl.static_range(1, ctx.world_size):
        targets = targets + (out_at(ctx, sync, out, i),)
    done = 0
    programs = gl.num_programs(0)
    for unit in range(gl.program_id(0), units.count(programs), programs):
        tile, _, _, complete = units.at(unit, programs)
        if complete:
            row, col, _bias = tiles.place(tile)
            await_tile(shared, done)
            nbytes = tile_bytes(C.rows - row, C.cols - col, tiles.BLOCK_M, tiles.BLOCK_N, out.dtype.element_ty)
            tile_m, tile_n = row // tiles.BLOCK_M, col // tiles.BLOCK_N
            span = ctx.tracing.record_event_start(PUSH, -1, out, tile_m, tile_n, nbytes=nbytes)
            begin = arch.clock()
            for part in range(shared.PARTS):
                if unit + programs < units.count(programs):  # nothing is loaded after the last
                    pace(begin, spread, part, shared.PARTS)
                values = rows_of(shared, done, part, MOVE)
                r, c, own = places_of(shared, part, row, C.rows, MOVE)
                c = col + c
                place = (r.to(gl.int64) * C.stride_row)[:, None] + c[None, :]
                mask = (own & (r < C.rows))[:, None] & (c < C.cols)[None, :]
                gl.store(out + place, values, mask=mask)
                if ok:
                    for i in gl.static_range(ctx.world_size - 1):
                        gl.store(targets[i] + place, values, mask=mask)
            ctx.tracing.record_event_end(span)
            done += 1
    leave(ctx, sync, epoch, ok, WAITER, TOGETHER=True, LANES=False)


@gluon.jit(do_not_specialize=["shared_tiles", "sharers", "skew", "spread"])
def hopper_matmul_gather_kernel(
    a, b, epilogue, out, joins, sync, ctx_ptr, M, N, K, stride_om, step, shared_tiles, sharers, skew,
    spread, tile: gl.constexpr, pipeline: gl.constexpr, world: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Multiply, and store each finished tile at every rank.

    a, b: descriptors of A [M, K] and of B [K, N] or, with `B_TRANSPOSED`, [N, K]; the others are as in the portable
    kernel.
    """
    row_step, col_step = step.rows, step.cols
    ctx = own_context(ctx_ptr, world.WORLD_SIZE, world.TRACING)
    num_m = gl.cdiv(max(M, row_step), tile.BLOCK_M)
    num_n = gl.cdiv(max(N, col_step), tile.BLOCK_N)
    tiles = PartTiles(num_m, num_n, tile.BLOCK_M, tile.BLOCK_N, tile.GROUP_M)
    units = Units(num_m * num_n, gl.cdiv(K, tile.BLOCK_K), shared_tiles, sharers, skew, SHARED)
    part = out + ctx.rank.to(gl.int64) * row_step * stride_om + ctx.rank.to(gl.int64) * col_step
    C = Matrix(part, M, N, stride_om, 1)
    work = Work(a, b, NOWHERE, mma_of(a, b, epilogue, tile, pipeline, N, K), units, tiles)
    shared = allocate(a, b, out.dtype.element_ty, tile, pipeline)
    epoch = next_epoch(sync)  # `leave` advances it when all tiles have been moved
    warp_specialize(
        [
            (multiply_tiles, (ctx, work, shared, joins, epilogue, C, epoch, True, world.WAITER)),
            (_push_tiles, (ctx, shared, work, out, C, sync, spread, pipeline.MOVE, world.WAITER)),
            (load_ahead, (ctx, work, shared, world.WAITER)),
        ],
        [pipeline.MOVER_WARPS, pipeline.LOADER_WARPS],
        [pipeline.MOVER_REGISTERS, pipeline.LOADER_REGISTERS],
    )


def launcher(
    rank: "Rank", workspace: "Workspace", problem: Problem, config: "FusedConfig", tensors: "Operands"
) -> "Launch":
    args = gather_arguments(rank, workspace, problem, config, tensors.out)
    grid, args = specialised_arguments(rank, workspace, problem, config, args, tensors)
    return hopper_matmul_gather_kernel, grid, args
