"""Run `matmul_all_reduce` in two shots of Lamport values, by warp-specialised programs (`pipeline.py`).

For results of some megabytes. They are so large that their exchange must hide behind the product, which it does not in
`lamport_matmul.py`, and so small that signals cost as much as they hide. The values lie in the same places as those
of `lamport_matmul.py`, so ranks may even mix the two kernels.

    MMA warps     compute one tile's product after the other; after the last they receive the sums that owners send, and
                  store them to `out`
    mover warps   send a finished tile's rows to their owners; after each tile they sum what all ranks have sent for
                  this rank's own rows, in columns that are complete, and send the sums to everyone

No wait is circular: a program sums no column before it has sent all of its own tiles of that and of earlier columns. So
of all tiles that are waited for, the first is always under way, with any number of programs.
"""

from typing import TYPE_CHECKING

from iris.device import arch
from iris.device.context import DeviceContext, own_context
from iris.device.lamport import load_bases, remote, take, without_sentinel
from iris.device.sync import advance
from iris.device.tracing import PUSH, SUM, tile_bytes
from iris.triton_private import aggregate, base_value, warp_specialize
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...problem import Problem
from ..lamport_steps import part_at
from ..stream_k import Units
from ..tile_orders import PartTiles, by_columns
from ..tiles import Matrix, known
from .loading import NOWHERE, Work, load_ahead
from .mma import MMA_WARPS
from .operands import MOVER_WARPS, in_rows, lamport_specialised_arguments
from .pipeline import allocate, await_tile, multiply_tiles, pace, places_of, rows_of
from .policies import mma_of
from .tile_sums import Unshared

if TYPE_CHECKING:
    from iris.rank import Rank

    from ...config import FusedConfig
    from ...operands import Operands
    from ...workspace import Workspace
    from ..launching import Launch

# Vectors that a mover thread loads at a time, of all ranks together.
_UNDER_WAY = 8
_ALL = gl.constexpr(1 << 20)  # row blocks work on the same columns of B


@aggregate
class TwoShot:
    """A call's exchange as the warps of one rank see it.

    `C`: `out`, with the edges of the product. `half`: this epoch's buffer, [source rank, part_rows, ld]; `sums`: the
    sums that owners send, after that buffer, [M, ld].
    """

    ctx: DeviceContext
    C: Matrix
    bias: base_value
    half: base_value
    sums: base_value
    part_rows: base_value
    ld: base_value
    epoch: base_value
    MOVE: gl.constexpr
    WAITER: gl.constexpr

    @triton.constexpr_function
    def __init__(self, ctx, C, bias, half, sums, part_rows, ld, epoch, MOVE, WAITER):
        self.ctx, self.C, self.half, self.sums = ctx, C, half, sums
        self.bias = gl.constexpr(None) if bias is None else bias
        self.part_rows, self.ld, self.epoch = part_rows, known(ld), epoch
        self.MOVE, self.WAITER = gl.constexpr(getattr(MOVE, "value", MOVE)), known(WAITER)

    @gluon.jit
    def step(self):
        """Return the distance from one rank's values to the next rank's."""
        return self.part_rows.to(gl.int64) * self.ld


@gluon.jit
def _multiply_and_take(work, shared, epilogue, exchange, TAKE: gl.constexpr):
    """Run the MMA warps: multiply, without the bias, and after the last tile store all owners' sums in `out`."""
    ctx, C, tiles, ld = exchange.ctx, exchange.C, work.tiles, exchange.ld
    multiply_tiles(ctx, work, shared, Unshared(C.data), epilogue, C, exchange.epoch, False, exchange.WAITER)
    ROWS: gl.constexpr = min(tiles.BLOCK_M, 2 * shared.BLOCK_M // shared.PARTS)  # there are twice as many warps as move
    step = exchange.step()
    for t in range(gl.program_id(0), work.units.tiles, gl.num_programs(0)):
        row, col, _bias = tiles.place(t)
        c = col + gl.arange(0, tiles.BLOCK_N, layout=gl.SliceLayout(0, TAKE))
        for part in range(tiles.BLOCK_M // ROWS):
            r = row + part * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, TAKE))
            place = exchange.sums + (r.to(gl.int64) * ld)[:, None] + c[None, :]
            mask = (r < C.rows)[:, None] & (c < ld)[None, :]
            owner = (r // exchange.part_rows)[:, None]
            total, _ok = take(
                ctx, place, step, mask, owner, exchange.epoch, exchange.WAITER, C.data.dtype.element_ty, 1, patience=2,
                LANES=False,
            )  # fmt: skip
            target = C.data + (r.to(gl.int64) * C.stride_row)[:, None] + c[None, :]
            gl.store(target, total.to(C.data.dtype.element_ty), mask=(r < C.rows)[:, None] & (c < C.cols)[None, :])


@gluon.jit
def _send(exchange, shared, done, bases, row, col, spread):
    """Send the finished tile's rows to where their owners expect this rank's."""
    ctx, part_rows, ld, M = exchange.ctx, exchange.part_rows, exchange.ld, exchange.C.rows
    mine = exchange.half + (ctx.rank * part_rows).to(gl.int64) * ld
    begin = arch.clock()
    for part in range(shared.PARTS):
        pace(begin, spread, part, shared.PARTS)
        values = without_sentinel(rows_of(shared, done, part, exchange.MOVE).to(gl.float32), shared.product.dtype)
        r, c, own = places_of(shared, part, row, M, exchange.MOVE)
        c = col + c
        for i in gl.static_range(1, ctx.world_size + 1):  # our own too: every rank sums the same numbers
            to = (ctx.rank + i) % ctx.world_size
            down = r - to * part_rows
            theirs = (own & (down >= 0) & (down < part_at(M, part_rows, to)))[:, None] & (c < ld)[None, :]
            place = (down.to(gl.int64) * ld)[:, None] + c[None, :]
            gl.store(remote(ctx, mine, bases, to) + place, values, mask=theirs, cache_modifier=".wt")


@gluon.jit
def _sum(
    exchange, bases, row, col, own_rows, spread, dtype: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr,
    SUMMED: gl.constexpr,
):  # fmt: skip
    """Sum ROWS rows of this rank's part, from `row` on, in rank order, SUMMED at a time; send the sums to all."""
    ctx, bias, half, ld, N = exchange.ctx, exchange.bias, exchange.half, exchange.ld, exchange.C.cols
    step = exchange.step()
    r = row + gl.arange(0, SUMMED, layout=gl.SliceLayout(1, exchange.MOVE))
    c = col + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, exchange.MOVE))
    place = (r.to(gl.int64) * ld)[:, None] + c[None, :]
    share, tile_n = row // ROWS, col // BLOCK_N
    span = ctx.tracing.record_event_start(SUM, ctx.rank, half, share, tile_n, nbytes=0)
    sums = ()
    complete = True
    for i in gl.static_range(ROWS // SUMMED):  # all before the first is sent: loads wait behind stores to peers
        mask = (r + i * SUMMED < own_rows)[:, None] & (c < ld)[None, :]
        values = half + place + i * SUMMED * ld
        total, ok = take(
            ctx, values, step, mask, 0, exchange.epoch, exchange.WAITER, dtype, ctx.world_size, LANES=False
        )
        if bias is not None:
            total += gl.load(bias + c, mask=c < N, other=0.0).to(gl.float32)[None, :]
        sums = sums + (without_sentinel(total, dtype),)
        complete = complete & ok
    ctx.tracing.record_event_end(span)
    if complete:
        nbytes = tile_bytes(own_rows - row, N - col, ROWS, BLOCK_N, dtype)
        span = ctx.tracing.record_event_start(PUSH, -1, half, share, tile_n, nbytes=nbytes)
        begin = arch.clock()
        for i in gl.static_range(ROWS // SUMMED):
            pace(begin, spread, i, ROWS // SUMMED)
            mask = (r + i * SUMMED < own_rows)[:, None] & (c < ld)[None, :]
            for j in gl.static_range(1, ctx.world_size + 1):
                target = remote(ctx, exchange.sums + ctx.rank * step, bases, (ctx.rank + j) % ctx.world_size)
                gl.store(target + place + i * SUMMED * ld, sums[i], mask=mask, cache_modifier=".wt")
        ctx.tracing.record_event_end(span)


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
    unit = gl.program_id(0)
    done = 0
    for t in range(gl.program_id(0), count, programs):
        row, col, _bias = tiles.place(t)
        await_tile(shared, done)
        # each row goes to one owner
        nbytes = tile_bytes(M - row, N - col, tiles.BLOCK_M, tiles.BLOCK_N, dtype) // ctx.world_size
        tile_m, tile_n = row // tiles.BLOCK_M, col // tiles.BLOCK_N
        span = ctx.tracing.record_event_start(PUSH, -1, exchange.half, tile_m, tile_n, nbytes=nbytes)
        push = gl.where(t + programs < count, spread, 0)  # nothing is loaded after the last
        _send(exchange, shared, done, bases, row, col, push)
        ctx.tracing.record_event_end(span)
        done += 1
        while (unit < shares * tiles.num_n) & ((unit // gl.maximum(shares, 1) + 1) * tiles.num_m <= t + programs):
            share, tile_n = by_columns(unit, shares)
            row, col = share * ROWS, tile_n * tiles.BLOCK_N
            _sum(exchange, bases, row, col, own_rows, push, dtype, tiles.BLOCK_N, ROWS, SUMMED)
            unit += programs
    advance(sync, exchange.epoch)  # which all warps have read


@gluon.jit(do_not_specialize=["M", "part_rows", "spread"])
def lamport_two_shot_kernel(
    a, b, epilogue, out, lamport, sync, ctx_ptr, M, N, K, stride_om, part_rows, spread, tile: gl.constexpr,
    pipeline: gl.constexpr, world: gl.constexpr, TAKE: gl.constexpr, OWNED: gl.constexpr, SUMMED: gl.constexpr,
):  # fmt: skip
    """Multiply and all-reduce in two shots of Lamport values: ranks sum the rows that they own, then send the sums.

    a, b: descriptors of A [M, K] and of B [K, N] or, with `B_TRANSPOSED`, [N, K]; the others are as in
    `lamport_matmul_kernel`.
    """
    ctx = own_context(ctx_ptr, world.WORLD_SIZE, world.TRACING)
    epoch = gl.load(sync) + 1
    half = lamport.staging + (epoch & 1).to(gl.int64) * lamport.half_elements
    sums = half + world.WORLD_SIZE * (part_rows.to(gl.int64) * lamport.ld)
    num_m, num_n = gl.cdiv(M, tile.BLOCK_M), gl.cdiv(N, tile.BLOCK_N)
    tiles = PartTiles(num_m, num_n, tile.BLOCK_M, tile.BLOCK_N, _ALL)
    units = Units(num_m * num_n, gl.cdiv(K, tile.BLOCK_K), 0, 0, 0, False)
    work = Work(a, b, NOWHERE, mma_of(a, b, epilogue, tile, pipeline, N, K), units, tiles)
    shared = allocate(a, b, out.dtype.element_ty, tile, pipeline)
    C = Matrix(out, M, N, stride_om, 1)
    exchange = TwoShot(ctx, C, epilogue.bias, half, sums, part_rows, lamport.ld, epoch, pipeline.MOVE, world.WAITER)
    warp_specialize(
        [
            (_multiply_and_take, (work, shared, epilogue, exchange, TAKE)),
            (_move_tiles, (work, shared, exchange, sync, spread, OWNED, SUMMED)),
            (load_ahead, (ctx, work, shared, world.WAITER)),
        ],
        [pipeline.MOVER_WARPS, pipeline.LOADER_WARPS],
        [pipeline.MOVER_REGISTERS, pipeline.LOADER_REGISTERS],
    )


def layouts(block_m: int, block_n: int, world_size: int) -> dict:
    """Return what this kernel is given beside `operands.layouts`; OWNED: of a tile, the rows of one owner."""
    parts = triton.next_power_of_2(world_size)
    lines = MOVER_WARPS * 32 * 8 // block_n  # of which all mover threads hold a vector each
    owned = max(lines, block_m // parts)
    summed = min(owned, lines * max(1, _UNDER_WAY // parts))
    return dict(TAKE=in_rows(MMA_WARPS, block_n), OWNED=owned, SUMMED=summed)


def launcher(
    rank: "Rank", workspace: "Workspace", problem: Problem, config: "FusedConfig", tensors: "Operands"
) -> "Launch":
    grid, args = lamport_specialised_arguments(rank, workspace, problem, config, tensors)
    args |= layouts(config.block_m, config.block_n, problem.world_size)
    return lamport_two_shot_kernel, grid, args
