"""Two ranks exchange Lamport values in one shot: `matmul_all_reduce`, and `matmul_reduce_scatter` by rows.

For results of some megabytes, where signals, and the stores that they wait for, cost as much as they hide. Between two
ranks one shot sends no more than two: each sends all that it has multiplied, or a half and then the sums. And one shot
is one hop, in which a rank waits for nothing but the same tile of its peer. The values stand in the same places as
those of `lamport_matmul.py`, so the ranks may even mix the two kernels. Only a rank's own tiles stay in shared memory.
With LEAVES a rank's sum is one of half of K's leaves (`iris_ops/sum_tree.py`), and `tree_matmul.py` may stand in.

    MMA warps     compute one tile's product after the other (`pipeline.py`)
    mover warps   all-reduce: send a finished tile to the peer, then take the peer's, add it and store the sum
                  reduce-scatter: send the peer's rows of a finished tile; take, add and store own rows

No wait of an all-reduce is circular. Both ranks compute their tiles in the same order, and a program sends a tile
before it waits for anything but earlier tiles. In the portable kernel a program sends all of its tiles before it waits.
So of all tiles that are waited for, the first is under way.

No wait of a reduce-scatter is circular. Tiles with rows of the peer's come first (`tile_orders.OthersFirst`). While
those travel, a rank multiplies its own, and behind the last it sends nothing. A program sends a tile before it waits
for anything but earlier ones. What a rank waits for is among its peer's first tiles. Tiles with rows of both, for which
both wait, stand in the same order on both. So again the first is under way, with any number of programs.
"""

from typing import TYPE_CHECKING

from iris import platform
from iris.device import arch
from iris.device.context import own_context
from iris.device.lamport import load_bases, put, remote, take, take_found, without_sentinel
from iris.device.sync import advance
from iris.device.tracing import PUSH, SUM, tile_bytes
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...planning.waves import columns_together
from ...problem import Problem
from ...sum_tree import blocks_of
from ..lamport_steps import part_at
from ..stream_k import Units
from ..tile_orders import OthersFirst, PartTiles, own_blocks
from ..tiles import start_in_turn
from .mma import Mma
from .operands import MOVER_WARPS, lamport_specialised_arguments
from .pipeline import (
    NOWHERE,
    Leaves,
    allocate,
    await_tile,
    give_back,
    multiply_tiles,
    pace,
    part_of,
    places_of,
    rows_of,
)

if TYPE_CHECKING:
    from iris.rank import Rank

    from ...config import FusedConfig
    from ...operands import Operands
    from ...workspace import Workspace
    from ..launching import Launch

# Finished tiles that a program has room for: one is sent while the one before waits for the peer's.
PLACES = 2
# Each thread of the mover warps has a value of its own.
_MOVER_THREADS = gl.constexpr(32 * MOVER_WARPS)
_LANES = gl.constexpr(gl.BlockedLayout([1], [32], [MOVER_WARPS], [0]))


@gluon.jit
def rows_among(shared, part, row, col, first, rows, M, MOVE: gl.constexpr):
    """(which of `rows` rows from `first` on a part of a tile has, which columns, and which of the rows there are)."""
    r, c, own = places_of(shared, part, row, M, MOVE)
    r -= first
    return r, col + c, own & (r >= 0) & (r < rows)


@gluon.jit
def value_places(shared, source, part, row, col, first, rows, M, ld, MOVE: gl.constexpr):
    """(where the values of those rows of a part of the tile stand among those of `source`, which of them there are)."""
    r, c, inside = rows_among(shared, part, row, col, first, rows, M, MOVE)
    return source + (r.to(gl.int64) * ld)[:, None] + c[None, :], inside[:, None] & (c < ld)[None, :]


# In what follows: of the tile at (`row`, `col`) the rows that are among `rows` from `first` on.


@gluon.jit
def send(shared, done, there, row, col, first, rows, M, ld, spread, MOVE: gl.constexpr):
    """Sends tile number `done` to `there`, this rank's values at the peer. The tile stays in shared memory."""
    begin = arch.clock()
    for part in range(shared.PARTS):
        pace(begin, spread, part, shared.PARTS)
        values = without_sentinel(part_of(shared, done, part).load(MOVE).to(gl.float32), shared.product.dtype)
        target, mask = value_places(shared, there, part, row, col, first, rows, M, ld, MOVE)
        gl.store(target, values, mask=mask, cache_modifier=".wt")


@gluon.jit
def _look(shared, theirs, row, col, first, rows, M, ld, exists, MOVE: gl.constexpr):
    """Loads what has arrived so far of all parts of a peer's tile, which may not exist."""
    found = ()
    for part in gl.static_range(shared.PARTS):
        place, mask = value_places(shared, theirs, part, row, col, first, rows, M, ld, MOVE)
        found = found + (arch.load_fresh(place, mask & exists),)
    return found


@gluon.jit
def _add(
    ctx, shared, done, found, theirs, peer, out, bias, row, col, first, rows, M, N, ld, stride_om, epoch,
    HAS_BIAS: gl.constexpr, LEAVES: gl.constexpr, MOVE: gl.constexpr, WAITER: gl.constexpr,
):  # fmt: skip
    """Stores the sum of tile number `done` and the peer's to `out`. `found`: what `_look` has loaded of the peer's."""
    for part in range(shared.PARTS):
        place, mask = value_places(shared, theirs, part, row, col, first, rows, M, ld, MOVE)
        total, waited = take_found(ctx, found[0], place, mask, peer, epoch, WAITER, shared.product.dtype, LANES=False)
        if shared.PARTS > 1:
            ahead = found[1]
            if waited:  # then what was found of the next is old, too
                place, mask = value_places(shared, theirs, part + 1, row, col, first, rows, M, ld, MOVE)
                ahead = arch.load_fresh(place, mask & (part + 1 < shared.PARTS))
            found = (ahead,) + found[2:] + found[:1]
        total += rows_of(shared, done, part, MOVE).to(gl.float32)
        r, c, inside = rows_among(shared, part, row, col, first, rows, M, MOVE)
        if HAS_BIAS:
            if LEAVES > 1:  # as all sums of the tree are
                total = total.to(out.dtype.element_ty).to(gl.float32)
            total += gl.load(bias + c, mask=c < N, other=0.0).to(gl.float32)[None, :]
        target = out + (r.to(gl.int64) * stride_om)[:, None] + c[None, :]
        gl.store(target, total.to(out.dtype.element_ty), mask=inside[:, None] & (c < N)[None, :])


@gluon.jit
def _swap_tiles(
    ctx, shared, tiles, half, there, theirs, bases, out, bias, M, N, part_rows, ld, stride_om, epoch, spread,
    HAS_BIAS: gl.constexpr, LEAVES: gl.constexpr, MOVE: gl.constexpr, WAITER: gl.constexpr,
):  # fmt: skip
    """What the mover warps of an all-reduce do: send each tile before they take the one before it."""
    peer = 1 - ctx.rank
    programs = gl.num_programs(0)
    count = gl.cdiv(gl.maximum(tiles.num_m * tiles.num_n - gl.program_id(0), 0), programs)
    for i in range(count + 1):
        # carried from tile to tile they would not be known to be multiples of a block
        before_row, before_col, _bias = tiles.place(gl.program_id(0) + gl.maximum(i - 1, 0) * programs)
        if i < count:
            await_tile(shared, i)
        # now: the later the more has come, but loads wait behind stores to peers
        found = _look(shared, theirs, before_row, before_col, 0, M, M, ld, i > 0, MOVE)
        if i < count:
            row, col, _bias = tiles.place(gl.program_id(0) + i * programs)
            tile_m, tile_n = row // tiles.BLOCK_M, col // tiles.BLOCK_N
            nbytes = tile_bytes(M - row, N - col, tiles.BLOCK_M, tiles.BLOCK_N, shared.product.dtype)
            span = ctx.tracing.record_event_start(PUSH, peer, half, tile_m, tile_n, nbytes=nbytes)
            push = gl.where(i + 1 < count, spread, 0)  # nothing is loaded behind the last
            send(shared, i, there, row, col, 0, M, M, ld, push, MOVE)
            ctx.tracing.record_event_end(span)
        if i > 0:
            tile_m, tile_n = before_row // tiles.BLOCK_M, before_col // tiles.BLOCK_N
            span = ctx.tracing.record_event_start(SUM, -1, out, tile_m, tile_n, nbytes=0)
            _add(
                ctx, shared, i - 1, found, theirs, peer, out, bias, before_row, before_col, 0, M, M, N, ld, stride_om,
                epoch, HAS_BIAS, LEAVES, MOVE, WAITER,
            )  # fmt: skip
            ctx.tracing.record_event_end(span)


@gluon.jit
def _scatter_tiles(
    ctx, shared, tiles, half, there, theirs, bases, out, bias, M, N, part_rows, ld, stride_om, epoch, spread,
    HAS_BIAS: gl.constexpr, LEAVES: gl.constexpr, MOVE: gl.constexpr, WAITER: gl.constexpr,
):  # fmt: skip
    """What the mover warps of a reduce-scatter do: send the peer's rows of each tile, and take the own ones."""
    peer = 1 - ctx.rank
    first, rows = ctx.rank * part_rows, part_at(M, part_rows, ctx.rank)
    peer_first, peer_rows = peer * part_rows, part_at(M, part_rows, peer)
    programs = gl.num_programs(0)
    count = gl.cdiv(gl.maximum(tiles.num_m * tiles.num_n - gl.program_id(0), 0), programs)
    for i in range(count):
        row, col, _bias = tiles.place(gl.program_id(0) + i * programs)
        tile_m, tile_n = row // tiles.BLOCK_M, col // tiles.BLOCK_N
        end = gl.minimum(row + tiles.BLOCK_M, M)
        own = gl.maximum(gl.minimum(end, first + rows) - gl.maximum(row, first), 0)
        await_tile(shared, i)
        found = _look(shared, theirs, row, col, first, rows, M, ld, own > 0, MOVE)
        if own < end - row:
            nbytes = tile_bytes(end - row - own, N - col, tiles.BLOCK_M, tiles.BLOCK_N, shared.product.dtype)
            span = ctx.tracing.record_event_start(PUSH, peer, half, tile_m, tile_n, nbytes=nbytes)
            push = gl.where(i + 1 < count, spread, 0)  # nothing is loaded behind the last
            send(shared, i, there, row, col, peer_first, peer_rows, M, ld, push, MOVE)
            ctx.tracing.record_event_end(span)
        if own > 0:
            span = ctx.tracing.record_event_start(SUM, -1, out, tile_m, tile_n, nbytes=0)
            _add(
                ctx, shared, i, found, theirs, peer, out, bias, row, col, first, rows, M, N, ld, stride_om, epoch,
                HAS_BIAS, LEAVES, MOVE, WAITER,
            )  # fmt: skip
            ctx.tracing.record_event_end(span)
        else:
            give_back(shared, i, shared.PARTS - 1)
    if gl.program_id(0) == 0:  # a rank to which nothing else is sent must still learn that its peer is in this call
        lanes = gl.arange(0, _MOVER_THREADS, layout=_LANES)
        behind = half + 2 * (part_rows.to(gl.int64) * ld) + lanes
        here = gl.zeros([_MOVER_THREADS], half.dtype.element_ty, _LANES)
        put(ctx, behind, here, lanes == ctx.rank, bases, peer)
        take(ctx, behind, 0, lanes == peer, peer + 0 * lanes, epoch, WAITER, shared.product.dtype, 1, LANES=False)


@gluon.jit
def _move_tiles(
    ctx, shared, tiles, half, out, bias, sync, M, N, part_rows, ld, stride_om, epoch, spread, MOVED: gl.constexpr,
    HAS_BIAS: gl.constexpr, LEAVES: gl.constexpr, MOVE: gl.constexpr, WAITER: gl.constexpr,
):  # fmt: skip
    """What the mover warps do: find where values stand, then `MOVED` with all tiles, then advance the epoch."""
    bases = load_bases(ctx.ctx_ptr, ctx.world_size)
    peer = 1 - ctx.rank
    step = part_rows.to(gl.int64) * ld
    there = remote(ctx, half + ctx.rank * step, bases, peer)  # this rank's values at the peer
    MOVED(
        ctx, shared, tiles, half, there, half + peer * step, bases, out, bias, M, N, part_rows, ld, stride_om, epoch,
        spread, HAS_BIAS, LEAVES, MOVE, WAITER,
    )  # fmt: skip
    advance(sync, epoch)  # which all warps have read


@gluon.jit
def _specialise(
    ctx, a, b, a_scales, b_scales, bias, out, staging, sync, mma, tiles, M, N, K, stride_om, part_rows, ld,
    half_elements, spread, first_leaf, blocks, MOVED: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
    LEAVES: gl.constexpr, PRODUCT: gl.constexpr, MOVE: gl.constexpr, ROWS: gl.constexpr, PLACES: gl.constexpr,
    MOVER_WARPS: gl.constexpr, MOVER_REGISTERS: gl.constexpr, WAITER: gl.constexpr,
):  # fmt: skip
    """MMA warps multiply `tiles`, one after the other; mover warps do `MOVED` with the finished ones."""
    epoch = gl.load(sync) + 1
    half = staging + (epoch & 1).to(gl.int64) * half_elements
    units = Units(tiles.num_m * tiles.num_n, gl.cdiv(K, mma.BLOCK_K), 0, 0, 0, False)
    leaves: gl.constexpr = None
    if LEAVES > 1:
        leaves = Leaves(first_leaf, blocks)
    shared = allocate(a, b, out.dtype.element_ty, STAGES, tiles.BLOCK_M, tiles.BLOCK_N, ROWS, PRODUCT, PLACES)
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (
                    ctx, a, NOWHERE, b, a_scales, b_scales, mma, shared, units, tiles, out, out, sync, epoch, M, N,
                    False, WAITER, leaves, LEAVES,
                ),
            ),
            (
                _move_tiles,
                (
                    ctx, shared, tiles, half, out, bias, sync, M, N, part_rows, ld, stride_om, epoch, spread, MOVED,
                    HAS_BIAS, LEAVES, MOVE, WAITER,
                ),
            ),
        ],
        [MOVER_WARPS],
        [MOVER_REGISTERS],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "part_rows", "spread", "stagger"])
def lamport_pair_kernel(
    a, b, a_scales, b_scales, bias, out, staging, sync, ctx_ptr, M, N, K, stride_om, part_rows, ld, half_elements,
    spread, stagger, first_leaf, blocks,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    WORLD_SIZE: gl.constexpr, HAS_BIAS: gl.constexpr, B_TRANSPOSED: gl.constexpr, ACC: gl.constexpr,
    PRODUCT: gl.constexpr, MOVE: gl.constexpr, ROWS: gl.constexpr, PLACES: gl.constexpr, MOVER_WARPS: gl.constexpr,
    MOVER_REGISTERS: gl.constexpr, WAITER: gl.constexpr, LEAVES: gl.constexpr = 1, TRACING: gl.constexpr = False,
):  # fmt: skip
    """a, b: descriptors of A [M, K] and of B [K, N] or, `B_TRANSPOSED`, [N, K]; else as `lamport_matmul_kernel`.

    LEAVES: of a sum that is the same on any number of ranks, this rank's leaves, from `first_leaf` on; else 1. `blocks`
    of 64 products: all ranks'.
    """
    start_in_turn(stagger)
    ctx = own_context(ctx_ptr, WORLD_SIZE, TRACING)
    num_m, num_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    tiles = PartTiles(num_m, num_n, BLOCK_M, BLOCK_N, GROUP_M)
    mma = Mma(a, b, ACC, BLOCK_M, BLOCK_N, B_TRANSPOSED)
    _specialise(
        ctx, a, b, a_scales, b_scales, bias, out, staging, sync, mma, tiles, M, N, K, stride_om, part_rows, ld,
        half_elements, spread, first_leaf, blocks, _swap_tiles, STAGES, HAS_BIAS, LEAVES, PRODUCT, MOVE, ROWS, PLACES,
        MOVER_WARPS, MOVER_REGISTERS, WAITER,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "part_rows", "spread", "group"])
def lamport_pair_scatter_kernel(
    a, b, a_scales, b_scales, bias, out, staging, sync, ctx_ptr, M, N, K, stride_om, part_rows, ld, half_elements,
    spread, group, first_leaf, blocks,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    WORLD_SIZE: gl.constexpr, HAS_BIAS: gl.constexpr, B_TRANSPOSED: gl.constexpr, ACC: gl.constexpr,
    PRODUCT: gl.constexpr, MOVE: gl.constexpr, ROWS: gl.constexpr, PLACES: gl.constexpr, MOVER_WARPS: gl.constexpr,
    MOVER_REGISTERS: gl.constexpr, WAITER: gl.constexpr, LEAVES: gl.constexpr = 1, TRACING: gl.constexpr = False,
):  # fmt: skip
    """a, b: descriptors of A [M, K] and of B [K, N] or, `B_TRANSPOSED`, [N, K]; else as `lamport_matmul_kernel`.

    LEAVES: of a sum that is the same on any number of ranks, this rank's leaves, from `first_leaf` on; else 1. `blocks`
    of 64 products: all ranks'.
    """
    ctx = own_context(ctx_ptr, WORLD_SIZE, TRACING)
    num_m, num_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    begin, own = own_blocks(ctx.rank * part_rows, part_at(M, part_rows, ctx.rank), M, BLOCK_M)
    tiles = OthersFirst(num_m, num_n, begin, own, group, BLOCK_M, BLOCK_N)
    mma = Mma(a, b, ACC, BLOCK_M, BLOCK_N, B_TRANSPOSED)
    _specialise(
        ctx, a, b, a_scales, b_scales, bias, out, staging, sync, mma, tiles, M, N, K, stride_om, part_rows, ld,
        half_elements, spread, first_leaf, blocks, _scatter_tiles, STAGES, HAS_BIAS, LEAVES, PRODUCT, MOVE, ROWS,
        PLACES, MOVER_WARPS, MOVER_REGISTERS, WAITER,
    )  # fmt: skip


def _leaves(problem: Problem, rank: int) -> dict:
    if not problem.by_tree:
        return dict(first_leaf=None, blocks=None, LEAVES=1)
    first, last = problem.tree.spans[rank]
    return dict(first_leaf=first, blocks=blocks_of(problem.tree.K), LEAVES=last - first)


def launcher(
    rank: "Rank", workspace: "Workspace", problem: Problem, config: "FusedConfig", tensors: "Operands"
) -> "Launch":
    grid, args = lamport_specialised_arguments(rank, workspace, problem, config, tensors)
    stagger = platform.ticks(config.stagger_us * 1e-6)
    args |= dict(GROUP_M=config.group_m, PLACES=PLACES, stagger=stagger, **_leaves(problem, rank.cur_rank))
    return lamport_pair_kernel, grid, args


def scatter_launcher(
    rank: "Rank", workspace: "Workspace", problem: Problem, config: "FusedConfig", tensors: "Operands"
) -> "Launch":
    grid, args = lamport_specialised_arguments(rank, workspace, problem, config, tensors)
    group = columns_together(problem, config, grid[0])
    args |= dict(PLACES=PLACES, group=group, **_leaves(problem, rank.cur_rank))
    return lamport_pair_scatter_kernel, grid, args
