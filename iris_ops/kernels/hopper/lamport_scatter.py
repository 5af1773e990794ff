"""Run `matmul_reduce_scatter` by rows among three ranks and more, in one shot of Lamport values, by warp-specialised
programs (`pipeline.py`).

For results of some megabytes, where signals cost as much as they hide. The values lie in the same places as those of
`lamport_matmul.py`, so ranks may even mix the two kernels. Between two ranks `lamport_pair.py` scatters.

    MMA warps     compute one tile's product after the other, first those with rows of peers (`OthersFirst`)
    mover warps   send a finished tile's rows to their owners, this rank among them; sum own rows, in columns that are
                  complete, as soon as all ranks' values are there

No wait is circular. A program sums a column only after it has sent all of its tiles up to that column's last one. A
peer sends the awaited rows before its own rows of that group of columns. Until then it waits at most for sums of
earlier columns. So of all columns that are waited for, the first one's values are under way, with any number of
programs.
"""

from typing import TYPE_CHECKING

from iris.device.context import own_context
from iris.device.lamport import load_bases, put, take
from iris.device.sync import advance
from iris.device.tracing import PUSH, tile_bytes
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...planning.waves import columns_together
from ...problem import Problem
from ..lamport_steps import part_at
from ..stream_k import Units
from ..tile_orders import OthersFirst, by_columns, own_blocks
from ..tiles import Matrix
from .lamport_two_shot import TwoShot, layouts, send_to_owners, share_places, sum_share
from .operands import MOVER_WARPS, lamport_specialised_arguments
from .pipeline import NOWHERE, Unshared, Work, allocate, await_tile, multiply_tiles
from .policies import mma_of

if TYPE_CHECKING:
    from iris.rank import Rank

    from ...config import FusedConfig
    from ...operands import Operands
    from ...workspace import Workspace
    from ..launching import Launch

# Each thread of the mover warps has a separate value.
_MOVER_THREADS = gl.constexpr(32 * MOVER_WARPS)
_LANES = gl.constexpr(gl.BlockedLayout([1], [32], [MOVER_WARPS], [0]))


@gluon.jit
def _store_sums(
    exchange, row, col, own_rows, dtype: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr, SUMMED: gl.constexpr
):  # fmt: skip
    """Store the sums of ROWS rows of this rank's part, from `row` on, to `out`."""
    C = exchange.C
    sums, _complete = sum_share(exchange, row, col, own_rows, dtype, BLOCK_N, ROWS, SUMMED)
    for i in gl.static_range(ROWS // SUMMED):
        r, c, mask = share_places(exchange, row, col, own_rows, C.cols, BLOCK_N, SUMMED, i)
        target = C.data + (r.to(gl.int64) * C.stride_row)[:, None] + c[None, :]
        gl.store(target, sums[i].to(dtype, bitcast=True), mask=mask)


@gluon.jit
def _move_tiles(work, shared, exchange, sync, spread, ROWS: gl.constexpr, SUMMED: gl.constexpr):
    """Run the mover warps: send tiles to their owners, and sum own rows as soon as their columns are complete."""
    ctx, tiles, M, N = exchange.ctx, work.tiles, exchange.C.rows, exchange.C.cols
    dtype: gl.constexpr = shared.product.dtype
    bases = load_bases(ctx.ctx_ptr, ctx.world_size)
    own_rows = part_at(M, exchange.part_rows, ctx.rank)
    shares = gl.cdiv(own_rows, ROWS)
    programs = gl.num_programs(0)
    count = tiles.num_m * tiles.num_n
    # a rank to which nothing else is sent must still learn that its peers are in this call
    lanes = gl.arange(0, _MOVER_THREADS, layout=_LANES)
    after_blocks = exchange.sums + lanes
    if gl.program_id(0) == 0:
        here = gl.zeros([_MOVER_THREADS], exchange.half.dtype.element_ty, _LANES)
        for i in gl.static_range(1, ctx.world_size):
            put(ctx, after_blocks, here, lanes == ctx.rank, bases, (ctx.rank + i) % ctx.world_size)
    unit = gl.program_id(0)
    done = 0
    for t in range(gl.program_id(0), count, programs):
        row, col, _bias = tiles.place(t)
        await_tile(shared, done)
        nbytes = tile_bytes(M - row, N - col, tiles.BLOCK_M, tiles.BLOCK_N, dtype) // ctx.world_size
        tile_m, tile_n = row // tiles.BLOCK_M, col // tiles.BLOCK_N
        span = ctx.tracing.record_event_start(PUSH, -1, exchange.half, tile_m, tile_n, nbytes=nbytes)
        push = gl.where(t + programs < count, spread, 0)  # nothing is loaded after the last
        send_to_owners(exchange, shared, done, bases, row, col, push)
        ctx.tracing.record_event_end(span)
        done += 1
        while (unit < shares * tiles.num_n) & (tiles.complete_after(unit // gl.maximum(shares, 1)) <= t + programs):
            share, tile_n = by_columns(unit, shares)
            _store_sums(exchange, share * ROWS, tile_n * tiles.BLOCK_N, own_rows, dtype, tiles.BLOCK_N, ROWS, SUMMED)
            unit += programs
    if gl.program_id(0) == 0:
        peers = (lanes < ctx.world_size) & (lanes != ctx.rank)
        take(ctx, after_blocks, 0, peers, lanes, exchange.epoch, exchange.WAITER, dtype, 1, LANES=False)
    advance(sync, exchange.epoch)  # which all warps have read


@gluon.jit(do_not_specialize=["M", "part_rows", "spread", "group"])
def lamport_scatter_kernel(
    a, b, epilogue, out, lamport, sync, ctx_ptr, M, N, K, stride_om, part_rows, spread, group, tile: gl.constexpr,
    pipeline: gl.constexpr, world: gl.constexpr, OWNED: gl.constexpr, SUMMED: gl.constexpr,
):  # fmt: skip
    """Multiply and reduce-scatter in one shot of Lamport values: ranks sum the rows that they own.

    a, b: descriptors of A [M, K] and of B [K, N] or, with `B_TRANSPOSED`, [N, K]; the others are as in
    `lamport_matmul_kernel`. group: as in `OthersFirst`.
    """
    ctx = own_context(ctx_ptr, world.WORLD_SIZE, world.TRACING)
    epoch = gl.load(sync) + 1
    half = lamport.staging + (epoch & 1).to(gl.int64) * lamport.half_elements
    after_blocks = half + world.WORLD_SIZE * (part_rows.to(gl.int64) * lamport.ld)
    num_m, num_n = gl.cdiv(M, tile.BLOCK_M), gl.cdiv(N, tile.BLOCK_N)
    begin, own = own_blocks(ctx.rank * part_rows, part_at(M, part_rows, ctx.rank), M, tile.BLOCK_M)
    tiles = OthersFirst(num_m, num_n, begin, own, group, tile.BLOCK_M, tile.BLOCK_N)
    units = Units(num_m * num_n, gl.cdiv(K, tile.BLOCK_K), 0, 0, 0, False)
    work = Work(a, b, NOWHERE, mma_of(a, b, epilogue, tile, pipeline, N, K), units, tiles)
    shared = allocate(a, b, out.dtype.element_ty, tile, pipeline)
    C = Matrix(out, M, N, stride_om, 1)
    exchange = TwoShot(
        ctx, C, epilogue.bias, half, after_blocks, part_rows, lamport.ld, epoch, pipeline.MOVE, world.WAITER
    )
    gl.warp_specialize(
        [
            (multiply_tiles, (ctx, work, shared, Unshared(out), epilogue, C, epoch, False, world.WAITER)),
            (_move_tiles, (work, shared, exchange, sync, spread, OWNED, SUMMED)),
        ],
        [pipeline.MOVER_WARPS],
        [pipeline.MOVER_REGISTERS],
    )


def launcher(
    rank: "Rank", workspace: "Workspace", problem: Problem, config: "FusedConfig", tensors: "Operands"
) -> "Launch":
    grid, args = lamport_specialised_arguments(rank, workspace, problem, config, tensors)
    args |= dict(group=columns_together(problem, config, grid[0]))
    args |= layouts(config.block_m, config.block_n, problem.world_size)
    return lamport_scatter_kernel, grid, args
