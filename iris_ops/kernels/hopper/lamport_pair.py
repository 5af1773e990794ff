"""Let two ranks exchange Lamport values in one shot: `matmul_all_reduce`, and `matmul_reduce_scatter` by rows.

For results of some megabytes, where signals, and the stores that they wait for, cost as much as they hide. Between two
ranks one shot sends no more than two: each sends all that it has multiplied, or a half and then the sums. And one shot
is one hop, in which a rank waits for nothing but the same tile of its peer. The values lie in the same places as
those of `lamport_matmul.py`, so the ranks may even mix the two kernels. Only a rank's own tiles stay in shared memory.
With LEAVES a rank's sum is one of half of K's leaves (`iris_ops/sum_tree.py`), and `tree_matmul.py` may stand in.

    MMA warps     compute one tile's product after the other (`pipeline.py`)
    mover warps   all-reduce: send a finished tile to the peer, then take the peer's, add it and store the sum
                  reduce-scatter: send the peer's rows of a finished tile; take, add and store own rows

No wait of an all-reduce is circular. Both ranks compute their tiles in the same order, and a program sends a tile
before it waits for anything but earlier tiles. In the portable kernel a program sends all of its tiles before it waits.
So of all tiles that are waited for, the first is under way.

No wait of a reduce-scatter is circular. Tiles with rows of the peer's come first (`tile_orders.OthersFirst`). While
those travel, a rank multiplies its own, and after the last it sends nothing. A program sends a tile before it waits
for anything but earlier ones. What a rank waits for is among its peer's first tiles. Tiles with rows of both, for which
both wait, stand in the same order on both. So again the first is under way, with any number of programs.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from iris import platform
from iris.device import arch
from iris.device.context import DeviceContext, own_context
from iris.device.lamport import load_bases, put, remote, take, take_loaded, without_sentinel
from iris.device.sync import advance
from iris.device.tracing import PUSH, SUM, tile_bytes
from iris.triton_private import aggregate, base_value, warp_specialize
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...planning.waves import columns_together
from ...problem import Problem
from ...sum_tree import blocks_of
from ..lamport_steps import part_at
from ..stream_k import Units
from ..tile_orders import OthersFirst, PartTiles, own_blocks
from ..tiles import Matrix, known, start_in_turn
from .leaves import Leaves
from .loading import NOWHERE, Work, load_ahead
from .operands import MOVER_WARPS, lamport_specialised_arguments
from .pipeline import (
    Shared,
    allocate,
    await_tile,
    give_back,
    multiply_tiles,
    pace,
    part_of,
    places_of,
    rows_of,
)
from .policies import mma_of
from .tile_sums import Unshared

if TYPE_CHECKING:
    from iris.rank import Rank

    from ...config import FusedConfig
    from ...operands import Operands
    from ...workspace import Workspace
    from ..launching import Launch

# Finished tiles that a program has room for: one is sent while the one before waits for the peer's.
PLACES = 2
# Each thread of the mover warps has a separate value.
_MOVER_THREADS = gl.constexpr(32 * MOVER_WARPS)
_LANES = gl.constexpr(gl.BlockedLayout([1], [32], [MOVER_WARPS], [0]))


@aggregate
class Pair:
    """A call's exchange as the mover warps of one of two ranks see it.

    `work`, `shared`: what is multiplied, and where finished tiles lie. `C`: `out`, with the edges of the product.
    `half`: this epoch's buffer; `there`: where this rank's values lie at the peer; `theirs`: where the peer's lie
    here, in rows of `ld`. A push takes `spread` ticks.
    """

    ctx: DeviceContext
    work: Work
    shared: Shared
    C: Matrix
    bias: base_value
    half: base_value
    there: base_value
    theirs: base_value
    bases: gl.tuple
    part_rows: base_value
    ld: base_value
    epoch: base_value
    spread: base_value
    LEAVES: gl.constexpr
    MOVE: gl.constexpr
    WAITER: gl.constexpr

    @triton.constexpr_function
    def __init__(
        self, ctx, work, shared, C, bias, half, there, theirs, bases, part_rows, ld, epoch, spread, LEAVES, MOVE, WAITER
    ):
        self.ctx, self.work, self.shared, self.C = ctx, work, shared, C
        self.bias = gl.constexpr(None) if bias is None else bias
        self.half, self.there, self.theirs, self.bases = half, there, theirs, gl.tuple(bases)
        self.part_rows, self.ld, self.epoch, self.spread = part_rows, known(ld), epoch, spread
        self.LEAVES, self.WAITER = known(LEAVES), known(WAITER)
        self.MOVE = gl.constexpr(getattr(MOVE, "value", MOVE))

    # In what follows: of the tile at (`row`, `col`) the rows that are among `rows` from `first` on.

    @gluon.jit
    def rows_among(self, part, row, col, first, rows):
        """Return (which of the rows a part of the tile has, its columns, which of the rows exist)."""
        r, c, own = places_of(self.shared, part, row, self.C.rows, self.MOVE)
        r -= first
        return r, col + c, own & (r >= 0) & (r < rows)

    @gluon.jit
    def value_places(self, source, part, row, col, first, rows):
        """Return (where the values of the rows of a part lie in `source`'s block, which of them exist)."""
        r, c, inside = self.rows_among(part, row, col, first, rows)
        return source + (r.to(gl.int64) * self.ld)[:, None] + c[None, :], inside[:, None] & (c < self.ld)[None, :]

    @gluon.jit
    def send(self, done, row, col, first, rows, spread):
        """Send tile number `done`, over `spread` ticks. The tile stays in shared memory."""
        dtype: gl.constexpr = self.shared.product.dtype
        begin = arch.clock()
        for part in range(self.shared.PARTS):
            pace(begin, spread, part, self.shared.PARTS)
            values = without_sentinel(part_of(self.shared, done, part).load(self.MOVE).to(gl.float32), dtype)
            target, mask = self.value_places(self.there, part, row, col, first, rows)
            gl.store(target, values, mask=mask, cache_modifier=".wt")

    @gluon.jit
    def look(self, row, col, first, rows, exists):
        """Load what has arrived so far of all parts of a peer's tile, which may not exist."""
        values = ()
        for part in gl.static_range(self.shared.PARTS):
            place, mask = self.value_places(self.theirs, part, row, col, first, rows)
            values = values + (arch.load_fresh(place, mask & exists),)
        return values

    @gluon.jit
    def add(self, done, values, row, col, first, rows):
        """Store the sum of tile number `done` and the peer's to `out`. `values`: what `look` has loaded of those."""
        ctx, shared, C, peer = self.ctx, self.shared, self.C, 1 - self.ctx.rank
        for part in range(shared.PARTS):
            place, mask = self.value_places(self.theirs, part, row, col, first, rows)
            total, waited = take_loaded(
                ctx, values[0], place, mask, peer, self.epoch, self.WAITER, shared.product.dtype, LANES=False
            )
            if shared.PARTS > 1:
                following = values[1]
                if waited:  # then what was loaded of the next part is old, too
                    place, mask = self.value_places(self.theirs, part + 1, row, col, first, rows)
                    following = arch.load_fresh(place, mask & (part + 1 < shared.PARTS))
                values = (following,) + values[2:] + values[:1]
            total += rows_of(shared, done, part, self.MOVE).to(gl.float32)
            r, c, inside = self.rows_among(part, row, col, first, rows)
            if self.bias is not None:
                if self.LEAVES > 1:  # as all sums of the tree are
                    total = total.to(C.data.dtype.element_ty).to(gl.float32)
                total += gl.load(self.bias + c, mask=c < C.cols, other=0.0).to(gl.float32)[None, :]
            target = C.data + (r.to(gl.int64) * C.stride_row)[:, None] + c[None, :]
            gl.store(target, total.to(C.data.dtype.element_ty), mask=inside[:, None] & (c < C.cols)[None, :])


@gluon.jit
def _swap_tiles(pair):
    """Run the mover warps of an all-reduce: send each tile before receiving the one before it."""
    ctx, shared, tiles, M, N = pair.ctx, pair.shared, pair.work.tiles, pair.C.rows, pair.C.cols
    peer = 1 - ctx.rank
    programs = gl.num_programs(0)
    count = gl.cdiv(gl.maximum(tiles.num_m * tiles.num_n - gl.program_id(0), 0), programs)
    for i in range(count + 1):
        # carried from tile to tile they would not be known to be multiples of a block
        before_row, before_col, _bias = tiles.place(gl.program_id(0) + gl.maximum(i - 1, 0) * programs)
        if i < count:
            await_tile(shared, i)
        # now: the later the more has come, but loads wait behind stores to peers
        values = pair.look(before_row, before_col, 0, M, i > 0)
        if i < count:
            row, col, _bias = tiles.place(gl.program_id(0) + i * programs)
            tile_m, tile_n = row // tiles.BLOCK_M, col // tiles.BLOCK_N
            nbytes = tile_bytes(M - row, N - col, tiles.BLOCK_M, tiles.BLOCK_N, shared.product.dtype)
            span = ctx.tracing.record_event_start(PUSH, peer, pair.half, tile_m, tile_n, nbytes=nbytes)
            push = gl.where(i + 1 < count, pair.spread, 0)  # nothing is loaded after the last
            pair.send(i, row, col, 0, M, push)
            ctx.tracing.record_event_end(span)
        if i > 0:
            tile_m, tile_n = before_row // tiles.BLOCK_M, before_col // tiles.BLOCK_N
            span = ctx.tracing.record_event_start(SUM, -1, pair.C.data, tile_m, tile_n, nbytes=0)
            pair.add(i - 1, values, before_row, before_col, 0, M)
            ctx.tracing.record_event_end(span)


@gluon.jit
def _scatter_tiles(pair):
    """Run the mover warps of a reduce-scatter: send the peer's rows of each tile, and receive this rank's own."""
    ctx, shared, tiles, M, N = pair.ctx, pair.shared, pair.work.tiles, pair.C.rows, pair.C.cols
    part_rows = pair.part_rows
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
        values = pair.look(row, col, first, rows, own > 0)
        if own < end - row:
            nbytes = tile_bytes(end - row - own, N - col, tiles.BLOCK_M, tiles.BLOCK_N, shared.product.dtype)
            span = ctx.tracing.record_event_start(PUSH, peer, pair.half, tile_m, tile_n, nbytes=nbytes)
            push = gl.where(i + 1 < count, pair.spread, 0)  # nothing is loaded after the last
            pair.send(i, row, col, peer_first, peer_rows, push)
            ctx.tracing.record_event_end(span)
        if own > 0:
            span = ctx.tracing.record_event_start(SUM, -1, pair.C.data, tile_m, tile_n, nbytes=0)
            pair.add(i, values, row, col, first, rows)
            ctx.tracing.record_event_end(span)
        else:
            give_back(shared, i, shared.PARTS - 1)
    if gl.program_id(0) == 0:  # a rank to which nothing else is sent must still learn that its peer is in this call
        lanes = gl.arange(0, _MOVER_THREADS, layout=_LANES)
        after_blocks = pair.half + 2 * (part_rows.to(gl.int64) * pair.ld) + lanes
        here = gl.zeros([_MOVER_THREADS], pair.half.dtype.element_ty, _LANES)
        put(ctx, after_blocks, here, lanes == ctx.rank, pair.bases, peer)
        dtype: gl.constexpr = shared.product.dtype
        take(ctx, after_blocks, 0, lanes == peer, peer + 0 * lanes, pair.epoch, pair.WAITER, dtype, 1, LANES=False)


@gluon.jit
def _move_tiles(
    ctx, work, shared, C, bias, half, sync, part_rows, ld, epoch, spread, MOVED: gl.constexpr, LEAVES: gl.constexpr,
    MOVE: gl.constexpr, WAITER: gl.constexpr,
):  # fmt: skip
    """Run the mover warps: locate the values, call `MOVED` with all tiles, then advance the epoch."""
    bases = load_bases(ctx.ctx_ptr, ctx.world_size)
    peer = 1 - ctx.rank
    step = part_rows.to(gl.int64) * ld
    there = remote(ctx, half + ctx.rank * step, bases, peer)  # this rank's values at the peer
    theirs = half + peer * step
    MOVED(
        Pair(ctx, work, shared, C, bias, half, there, theirs, bases, part_rows, ld, epoch, spread, LEAVES, MOVE, WAITER)
    )
    advance(sync, epoch)  # which all warps have read


@gluon.jit
def _specialise(
    ctx, work, C, epilogue, lamport, sync, part_rows, spread, first_leaf, blocks, MOVED: gl.constexpr,
    tile: gl.constexpr, pipeline: gl.constexpr, LEAVES: gl.constexpr, WAITER: gl.constexpr,
):  # fmt: skip
    """Start the MMA warps, which multiply the tiles of `work` in turn, and the mover warps, which run `MOVED`."""
    epoch = gl.load(sync) + 1
    half = lamport.staging + (epoch & 1).to(gl.int64) * lamport.half_elements
    leaves: gl.constexpr = None
    if LEAVES > 1:
        leaves = Leaves(first_leaf, blocks)
    shared = allocate(work.a, work.b, C.data.dtype.element_ty, tile, pipeline)
    warp_specialize(
        [
            (multiply_tiles, (ctx, work, shared, Unshared(C.data), epilogue, C, epoch, False, WAITER, leaves, LEAVES)),
            (
                _move_tiles,
                (
                    ctx, work, shared, C, epilogue.bias, half, sync, part_rows, lamport.ld, epoch, spread, MOVED,
                    LEAVES, pipeline.MOVE, WAITER,
                ),
            ),
            (load_ahead, (ctx, work, shared, WAITER)),
        ],
        [pipeline.MOVER_WARPS, pipeline.LOADER_WARPS],
        [pipeline.MOVER_REGISTERS, pipeline.LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "part_rows", "spread", "stagger"])
def lamport_pair_kernel(
    a, b, epilogue, out, lamport, sync, ctx_ptr, M, N, K, stride_om, part_rows, spread, stagger, first_leaf, blocks,
    tile: gl.constexpr, pipeline: gl.constexpr, world: gl.constexpr, LEAVES: gl.constexpr = 1,
):  # fmt: skip
    """Multiply and all-reduce between two ranks, which swap Lamport values in one shot.

    a, b: descriptors of A [M, K] and of B [K, N] or, with `B_TRANSPOSED`, [N, K]; the others are as in
    `lamport_matmul_kernel`. LEAVES: this rank's leaves, from `first_leaf` on, of a sum that does not depend on the
    number of ranks; else 1. blocks: blocks of 64 products of all ranks.
    """
    start_in_turn(stagger)
    ctx = own_context(ctx_ptr, world.WORLD_SIZE, world.TRACING)
    num_m, num_n = gl.cdiv(M, tile.BLOCK_M), gl.cdiv(N, tile.BLOCK_N)
    tiles = PartTiles(num_m, num_n, tile.BLOCK_M, tile.BLOCK_N, tile.GROUP_M)
    units = Units(num_m * num_n, gl.cdiv(K, tile.BLOCK_K), 0, 0, 0, False)
    work = Work(a, b, NOWHERE, mma_of(a, b, epilogue, tile, pipeline, N, K), units, tiles)
    _specialise(
        ctx, work, Matrix(out, M, N, stride_om, 1), epilogue, lamport, sync, part_rows, spread, first_leaf, blocks,
        _swap_tiles, tile, pipeline, LEAVES, world.WAITER,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "part_rows", "spread", "group"])
def lamport_pair_scatter_kernel(
    a, b, epilogue, out, lamport, sync, ctx_ptr, M, N, K, stride_om, part_rows, spread, group, first_leaf, blocks,
    tile: gl.constexpr, pipeline: gl.constexpr, world: gl.constexpr, LEAVES: gl.constexpr = 1,
):  # fmt: skip
    """Multiply and reduce-scatter between two ranks, with the arguments of `lamport_pair_kernel`.

    group: as in `OthersFirst`.
    """
    ctx = own_context(ctx_ptr, world.WORLD_SIZE, world.TRACING)
    num_m, num_n = gl.cdiv(M, tile.BLOCK_M), gl.cdiv(N, tile.BLOCK_N)
    begin, own = own_blocks(ctx.rank * part_rows, part_at(M, part_rows, ctx.rank), M, tile.BLOCK_M)
    tiles = OthersFirst(num_m, num_n, begin, own, group, tile.BLOCK_M, tile.BLOCK_N)
    units = Units(num_m * num_n, gl.cdiv(K, tile.BLOCK_K), 0, 0, 0, False)
    work = Work(a, b, NOWHERE, mma_of(a, b, epilogue, tile, pipeline, N, K), units, tiles)
    _specialise(
        ctx, work, Matrix(out, M, N, stride_om, 1), epilogue, lamport, sync, part_rows, spread, first_leaf, blocks,
        _scatter_tiles, tile, pipeline, LEAVES, world.WAITER,
    )  # fmt: skip


def _leaves(problem: Problem, rank: int) -> dict:
    if not problem.tree:
        return dict(first_leaf=None, blocks=None, LEAVES=1)
    first, last = problem.tree.spans[rank]
    return dict(first_leaf=first, blocks=blocks_of(problem.tree.K), LEAVES=last - first)


def launcher(
    rank: "Rank", workspace: "Workspace", problem: Problem, config: "FusedConfig", tensors: "Operands"
) -> "Launch":
    grid, args = lamport_specialised_arguments(rank, workspace, problem, config, tensors)
    stagger = platform.ticks(config.stagger_us * 1e-6)
    args |= dict(stagger=stagger, **_leaves(problem, rank.cur_rank))
    args["pipeline"] = replace(args["pipeline"], PLACES=PLACES)
    return lamport_pair_kernel, grid, args


def scatter_launcher(
    rank: "Rank", workspace: "Workspace", problem: Problem, config: "FusedConfig", tensors: "Operands"
) -> "Launch":
    grid, args = lamport_specialised_arguments(rank, workspace, problem, config, tensors)
    group = columns_together(problem, config, grid[0])
    args |= dict(group=group, **_leaves(problem, rank.cur_rank))
    args["pipeline"] = replace(args["pipeline"], PLACES=PLACES)
    return lamport_pair_scatter_kernel, grid, args
