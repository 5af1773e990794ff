"""`matmul_all_gather` by warp-specialised programs (`pipeline.py`): tiles travel while the next are multiplied.

The mover warps store each finished tile into every rank's `out`. Nobody consumes a tile inside the kernel, so no tile
is signalled: at the end the last program of a rank vouches for all of them.
"""

from typing import TYPE_CHECKING

from iris.device import arch
from iris.device.context import own_context
from iris.device.sync import await_entered, enter, leave, next_epoch, out_at
from iris.device.tracing import PUSH, tile_bytes
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...problem import Problem
from ..matmul_gather import gather_arguments
from ..stream_k import Units
from ..tile_orders import PartTiles
from .mma import Mma
from .operands import specialised_arguments
from .pipeline import NOWHERE, allocate, await_tile, multiply_tiles, pace, places_of, rows_of

if TYPE_CHECKING:
    from iris.rank import Rank

    from ...config import FusedConfig
    from ...operands import Operands
    from ...workspace import Workspace
    from ..launching import Launch


@gluon.jit
def _push_tiles(
    ctx, shared, units, tiles, whole, out, sync, M, N, stride_om, spread, MOVE: gl.constexpr, WAITER: gl.constexpr
):  # fmt: skip
    """What the mover warps do: store each tile at every rank.

    `out`: where this rank's part, M by N, begins in the `whole`.
    """
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
            nbytes = tile_bytes(M - row, N - col, tiles.BLOCK_M, tiles.BLOCK_N, out.dtype.element_ty)
            tile_m, tile_n = row // tiles.BLOCK_M, col // tiles.BLOCK_N
            span = ctx.tracing.record_event_start(PUSH, -1, out, tile_m, tile_n, nbytes=nbytes)
            begin = arch.clock()
            for part in range(shared.PARTS):
                if unit + programs < units.count(programs):  # nothing is loaded behind the last
                    pace(begin, spread, part, shared.PARTS)
                values = rows_of(shared, done, part, MOVE)
                r, c, own = places_of(shared, part, row, M, MOVE)
                c = col + c
                place = (r.to(gl.int64) * stride_om)[:, None] + c[None, :]
                mask = (own & (r < M))[:, None] & (c < N)[None, :]
                gl.store(out + place, values, mask=mask)
                if ok:
                    for i in gl.static_range(ctx.world_size - 1):
                        gl.store(targets[i] + place, values, mask=mask)
            ctx.tracing.record_event_end(span)
            done += 1
    leave(ctx, sync, epoch, ok, WAITER, TOGETHER=True, LANES=False)


@gluon.jit(do_not_specialize=["shared_tiles", "sharers", "skew", "spread"])
def hopper_matmul_gather_kernel(
    a, b, bias, out, parts, left, sync, ctx_ptr, M, N, K, stride_om, row_step, col_step, shared_tiles, sharers, skew,
    spread,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    SHARED: gl.constexpr, WORLD_SIZE: gl.constexpr, HAS_BIAS: gl.constexpr, B_TRANSPOSED: gl.constexpr,
    ACC: gl.constexpr, PRODUCT: gl.constexpr, MOVE: gl.constexpr, ROWS: gl.constexpr, MOVER_WARPS: gl.constexpr,
    MOVER_REGISTERS: gl.constexpr, WAITER: gl.constexpr, TRACING: gl.constexpr = False,
):  # fmt: skip
    """a, b: descriptors of A [M, K] and of B [K, N] or, `B_TRANSPOSED`, [N, K]; the rest as in the portable kernel."""
    ctx = own_context(ctx_ptr, WORLD_SIZE, TRACING)
    num_m = gl.cdiv(max(M, row_step), BLOCK_M)
    num_n = gl.cdiv(max(N, col_step), BLOCK_N)
    tiles = PartTiles(num_m, num_n, BLOCK_M, BLOCK_N, GROUP_M)
    units = Units(num_m * num_n, gl.cdiv(K, BLOCK_K), shared_tiles, sharers, skew, SHARED)
    part = out + ctx.rank.to(gl.int64) * row_step * stride_om + ctx.rank.to(gl.int64) * col_step
    mma = Mma(a, b, ACC, BLOCK_M, BLOCK_N, B_TRANSPOSED)
    shared = allocate(a, b, out.dtype.element_ty, STAGES, BLOCK_M, BLOCK_N, ROWS, PRODUCT)
    epoch = next_epoch(sync)  # `leave` advances it when all tiles have been moved
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (
                    ctx, a, NOWHERE, b, NOWHERE, NOWHERE, mma, shared, units, tiles, bias, parts, left, epoch, M, N,
                    HAS_BIAS, WAITER,
                ),
            ),
            (_push_tiles, (ctx, shared, units, tiles, out, part, sync, M, N, stride_om, spread, MOVE, WAITER)),
        ],
        [MOVER_WARPS],
        [MOVER_REGISTERS],
    )  # fmt: skip


def launcher(
    rank: "Rank", workspace: "Workspace", problem: Problem, config: "FusedConfig", tensors: "Operands"
) -> "Launch":
    args = gather_arguments(rank, workspace, problem, config, tensors.out)
    grid, args = specialised_arguments(rank, workspace, problem, config, args, tensors)
    return hopper_matmul_gather_kernel, grid, args
