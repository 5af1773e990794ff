"""`matmul_reduce_scatter` by rows between two ranks, in one shot of words, by warp-specialised programs
(`pipeline.py`).

For results of some megabytes: what flags, and the stores that they wait for, cost there is as much as they hide. The
words stand in the same places as those of `lamport_matmul.py`, so the ranks may even mix the two; only that of a rank's
own rows its own part stays in shared memory.

    multiplying warps  one tile's product after the other
    moving warps       send what a finished tile has of the peer's rows; to own rows add what the peer has sent

Tiles with rows of the peer's come first: while those travel own ones are multiplied, and behind the last nothing is
sent. A program sends a tile before it waits for anything but earlier ones. What is waited for is among the peer's first
tiles, and those that both ranks wait for, with rows of both, are in the same order on both. So of what is waited for,
the first is under way, with any number of programs.
"""

from typing import TYPE_CHECKING

from iris.device.context import own_context
from iris.device.function import device_function
from iris.device.lamport import load_bases, put, remote, take
from iris.device.sync import advance
from iris.device.tracing import PUSH, SUM, tile_bytes
from iris.triton_private import aggregate, base_value
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
import triton.language as tl

from ...planning.waves import columns_together
from ...problem import Problem
from ..lamport_steps import part_at
from ..stream_k import Units
from ..tiles import known
from .lamport_pair import PLACES, add, look, send
from .operands import MOVING, lamport_specialised_arguments
from .pipeline import NOWHERE, allocate, await_tile, give_back, multiply_tiles

if TYPE_CHECKING:
    from iris.rank import Rank

    from ...config import FusedConfig
    from ...operands import Operands
    from ...workspace import Workspace
    from ..launching import Launch

# A word for each moving thread.
_THREADS = gl.constexpr(32 * MOVING)
_LANES = gl.constexpr(gl.BlockedLayout([1], [32], [MOVING], [0]))


@aggregate
class OthersFirst:
    """The order of num_m by num_n tiles: `group` columns of them after the other; in each, column by column, first
    those with rows of the peer's, then the `own` row blocks from number `begin` on.
    """

    num_m: base_value
    num_n: base_value
    begin: base_value
    own: base_value
    group: base_value
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr

    @triton.constexpr_function
    def __init__(self, num_m, num_n, begin, own, group, BLOCK_M, BLOCK_N):
        self.num_m, self.num_n = known(num_m), known(num_n)
        self.begin, self.own, self.group = map(known, (begin, own, group))
        self.BLOCK_M, self.BLOCK_N = known(BLOCK_M), known(BLOCK_N)

    @device_function
    def place(self, t):
        """(first row, first column, True) of number t."""
        before = t // (self.num_m * self.group) * self.group
        t -= before * self.num_m
        others = self.num_m - self.own
        sent = others * tl.minimum(self.group, self.num_n - before)
        is_own = t >= sent
        high = tl.maximum(tl.where(is_own, self.own, others), 1)
        t -= tl.where(is_own, sent, 0)
        row = t % high
        row += tl.where(is_own, self.begin, tl.where(row < self.begin, 0, self.own))
        return row * self.BLOCK_M, (before + t // high) * self.BLOCK_N, True


@device_function
def own_blocks(first, rows, M, BLOCK_M: tl.constexpr):
    """(number of the first row block, how many) of those that have nothing but the `rows` rows from `first` on."""
    begin, end = tl.cdiv(first, BLOCK_M), first + rows
    behind = tl.where(end == M, tl.cdiv(M, BLOCK_M), end // BLOCK_M)
    return begin, tl.maximum(behind - begin, 0)


@gluon.jit
def _move_tiles(
    ctx, shared, tiles, slot, out, bias, sync, M, N, part_rows, ld, stride_om, epoch, spread,
    HAS_BIAS: gl.constexpr, MOVE: gl.constexpr, WAITER: gl.constexpr,
):  # fmt: skip
    """The moving warps."""
    bases = load_bases(ctx.ctx_ptr, ctx.world_size)
    peer = 1 - ctx.rank
    step = part_rows.to(gl.int64) * ld
    there = remote(ctx, slot + ctx.rank * step, bases, peer)
    theirs = slot + peer * step
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
        found = look(shared, theirs, row, col, first, rows, M, ld, own > 0, MOVE)
        if own < end - row:
            nbytes = tile_bytes(end - row - own, N - col, tiles.BLOCK_M, tiles.BLOCK_N, shared.product.dtype)
            span = ctx.tracing.record_event_start(PUSH, peer, slot, tile_m, tile_n, nbytes=nbytes)
            push = gl.where(i + 1 < count, spread, 0)  # nothing is loaded behind the last
            send(shared, i, there, row, col, peer_first, peer_rows, M, ld, push, MOVE)
            ctx.tracing.record_event_end(span)
        if own > 0:
            span = ctx.tracing.record_event_start(SUM, -1, out, tile_m, tile_n, nbytes=0)
            add(
                ctx, shared, i, found, theirs, peer, out, bias, row, col, first, rows, M, N, ld, stride_om, epoch,
                HAS_BIAS, MOVE, WAITER,
            )  # fmt: skip
            ctx.tracing.record_event_end(span)
        else:
            give_back(shared, i, shared.PARTS - 1)
    if gl.program_id(0) == 0:  # who is sent nothing else would not know that the peer has finished the call before
        lanes = gl.arange(0, _THREADS, layout=_LANES)
        behind = slot + 2 * step + lanes
        here = gl.zeros([_THREADS], slot.dtype.element_ty, _LANES)
        put(ctx, behind, here, lanes == ctx.rank, bases, peer)
        take(ctx, behind, 0, lanes == peer, peer + 0 * lanes, epoch, WAITER, shared.product.dtype, 1, LANES=False)
    advance(sync, epoch)  # which all warps have read


@gluon.jit(do_not_specialize=["M", "part_rows", "spread", "group"])
def lamport_pair_scatter_kernel(
    a, b, a_scales, b_scales, bias, out, staging, sync, ctx_ptr, M, N, K, stride_om, part_rows, ld, slot_words, spread,
    group,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    WORLD_SIZE: gl.constexpr, HAS_BIAS: gl.constexpr, B_TRANSPOSED: gl.constexpr, ACC: gl.constexpr,
    PRODUCT: gl.constexpr, MOVE: gl.constexpr, ROWS: gl.constexpr, PLACES: gl.constexpr, MOVING: gl.constexpr,
    MOVING_REGISTERS: gl.constexpr, WAITER: gl.constexpr, TRACING: gl.constexpr = False,
):  # fmt: skip
    """a, b: descriptors of A [M, K] and of B [K, N] or, `B_TRANSPOSED`, [N, K]; else as `lamport_matmul_kernel`."""
    ctx = own_context(ctx_ptr, WORLD_SIZE, TRACING)
    epoch = gl.load(sync) + 1
    slot = staging + (epoch & 1).to(gl.int64) * slot_words
    num_m, num_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    begin, own = own_blocks(ctx.rank * part_rows, part_at(M, part_rows, ctx.rank), M, BLOCK_M)
    tiles = OthersFirst(num_m, num_n, begin, own, group, BLOCK_M, BLOCK_N)
    units = Units(num_m * num_n, gl.cdiv(K, BLOCK_K), 0, 0, 0, False)
    shared = allocate(a, b, out.dtype.element_ty, STAGES, BLOCK_M, BLOCK_N, ROWS, PRODUCT, PLACES)
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (
                    ctx, a, NOWHERE, b, a_scales, b_scales, shared, units, tiles, out, out, sync, epoch, M, N,
                    B_TRANSPOSED, False, ACC, WAITER,
                ),
            ),
            (
                _move_tiles,
                (
                    ctx, shared, tiles, slot, out, bias, sync, M, N, part_rows, ld, stride_om, epoch, spread, HAS_BIAS,
                    MOVE, WAITER,
                ),
            ),
        ],
        [MOVING],
        [MOVING_REGISTERS],
    )  # fmt: skip


def launcher(
    rank: "Rank", workspace: "Workspace", problem: Problem, config: "FusedConfig", tensors: "Operands"
) -> "Launch":
    grid, args = lamport_specialised_arguments(rank, workspace, problem, config, tensors)
    args |= dict(PLACES=PLACES, group=columns_together(problem, config, grid[0]))
    return lamport_pair_scatter_kernel, grid, args
