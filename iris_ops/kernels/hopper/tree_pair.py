"""`matmul_all_reduce` between two ranks with `invariant="ranks"`, by warp-specialised programs (`pipeline.py`).

For many rows, where `tree_matmul.py` is bound by its product. The sums along K are the same, in the order of
`iris_ops/sum_tree.py`. Here each rank has one root, half of K, and sends it to its peer as Lamport values in fp32.

    MMA warps     multiply a tile leaf by leaf. Of the sums that wait for the one to their right, the last stays in
                  registers, and others go to shared memory. The root is left there, too.
    mover warps   send a finished tile to the peer, then take the peer's, add it and store the sum

A tile's sums in fp32 fill the shared memory: of those that wait, number 1 shares its place with finished tiles. So the
MMA warps put no sum there before the mover warps are done with the tile before. They have most of a tile's time for it,
for number 1 is needed behind three quarters of a half of K. Therefore they take a tile of the peer's as soon as they
have sent theirs, where `lamport_pair.py` first sends the next.

No wait between ranks is circular. Both ranks compute their tiles in the same order, and a program sends a tile before
it waits for the peer's same tile. In the portable kernel a program sends all of its tiles before it waits.
"""

from typing import TYPE_CHECKING

from iris import platform
from iris.device import arch
from iris.device.context import own_context
from iris.device.lamport import load_bases, remote, take_found
from iris.device.sync import advance
from iris.device.tracing import PRODUCT, PUSH, SUM, tile_bytes
from iris.triton_private import mbarrier, program_barrier, reinterpret
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...planning.workspace_size import exchange_ld
from ...problem import Problem
from ..stream_k import Units
from ..tile_orders import PartTiles
from ..tiles import start_in_turn
from ..tree_matmul import tables_of
from ..tree_steps import PLACE
from .lamport_pair import rows_among, send, value_places
from .mma import Mma
from .operands import lamport_specialised_arguments
from .pipeline import NOWHERE, allocate, await_tile, begin_unit, load_block, rows_of

if TYPE_CHECKING:
    from iris.rank import Rank

    from ...config import FusedConfig
    from ...operands import Operands
    from ...workspace import Workspace
    from ..launching import Launch

# Sums that wait in shared memory, beside one in registers: those of half of K (`sum_tree.places`).
_WAITING = gl.constexpr(2)
_BYTE = gl.constexpr(255)


@gluon.jit
def _load_next(ctx, a, b, mma, shared, units, tiles, stage, unit, row, col, k, end):
    """Loads the next block into `stage`; what is loaded behind it: (unit, row, column, where along K, its end)."""
    load_block(ctx, a, NOWHERE, b, mma, shared, stage, row, col, k)
    k += mma.BLOCK_K
    if k >= end:
        unit, row, col, k, end = begin_unit(
            units, tiles, a, NOWHERE, unit + gl.num_programs(0), shared.BLOCK_M, mma.BLOCK_K
        )
    return unit, row, col, k, end


@gluon.jit
def _multiply_leaves(ctx, a, b, mma, shared, units, tiles, out, leaf_table, num_leaves, LEAF_STEPS: gl.constexpr):
    """What the MMA warps do: of each tile, sum leaves in fp32, join them by the tree, and hand the root over."""
    BLOCK_M: gl.constexpr = shared.BLOCK_M
    STAGES: gl.constexpr = shared.STAGES
    # sum number i waits at [_WAITING - 1 - i]; [0] is also for finished tiles
    kept = reinterpret(shared.product, gl.float32, [_WAITING, BLOCK_M, shared.BLOCK_N], shared.product.layout)
    programs = gl.num_programs(0)
    unit, row, col, k, end = begin_unit(units, tiles, a, NOWHERE, gl.program_id(0), BLOCK_M, mma.BLOCK_K)
    for i in gl.static_range(STAGES - 1):
        if unit < units.tiles:
            unit, row, col, k, end = _load_next(ctx, a, b, mma, shared, units, tiles, i, unit, row, col, k, end)
    stage = 0
    phase = 0
    done = 0
    for u in range(gl.program_id(0), units.tiles, programs):
        span = ctx.tracing.record_event_start(PRODUCT, -1, out, u, nbytes=0)
        total = mma.zeros()  # of those that wait, the last
        for leaf in range(num_leaves):
            acc = mma.begin(mma.zeros())
            for _i in range(LEAF_STEPS):
                mbarrier.wait(shared.loaded.index(stage), phase)
                acc = mma.issue(shared.a_parts.index(stage), shared.b_parts.index(stage), acc)
                acc = mma.await_last_but_one(acc)
                if unit < units.tiles:
                    program_barrier()  # all warps have multiplied the step before, whose place is free now
                    free = gl.where(stage == 0, STAGES - 1, stage - 1)
                    unit, row, col, k, end = _load_next(
                        ctx, a, b, mma, shared, units, tiles, free, unit, row, col, k, end
                    )
                last = stage == STAGES - 1
                stage, phase = gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)
            summed = mma.result(acc)
            step = gl.load(leaf_table + leaf)
            waiting, place = step & _BYTE, (step >> PLACE) & _BYTE
            if place < waiting:
                summed += total
            elif waiting > 0:
                if waiting == _WAITING:
                    mbarrier.wait(shared.free.index(0), done & 1 ^ 1)
                kept.index(_WAITING - waiting).store(total)
            for i in gl.static_range(_WAITING):
                if (place <= _WAITING - 1 - i) & (_WAITING - 1 - i < waiting - 1):
                    summed += kept.index(i).load(mma.LAYOUT)
            total = summed
        ctx.tracing.record_event_end(span)
        mbarrier.wait(shared.free.index(0), done & 1 ^ 1)
        kept.index(0).store(total)
        program_barrier()
        mbarrier.arrive(shared.ready.index(0), count=1)
        done += 1


@gluon.jit
def _swap_tiles(
    ctx, shared, tiles, half, out, bias, sync, M, N, part_rows, ld, stride_om, epoch, spread, HAS_BIAS: gl.constexpr,
    MOVE: gl.constexpr, WAITER: gl.constexpr,
):  # fmt: skip
    """What the mover warps do: send each tile, take the peer's, store the sum."""
    bases = load_bases(ctx.ctx_ptr, ctx.world_size)
    peer, programs = 1 - ctx.rank, gl.num_programs(0)
    step = part_rows.to(gl.int64) * ld
    there, theirs = remote(ctx, half + ctx.rank * step, bases, peer), half + peer * step
    count = gl.cdiv(gl.maximum(tiles.num_m * tiles.num_n - gl.program_id(0), 0), programs)
    for i in range(count):
        row, col, _bias = tiles.place(gl.program_id(0) + i * programs)
        tile_m, tile_n = row // tiles.BLOCK_M, col // tiles.BLOCK_N
        await_tile(shared, i)
        nbytes = tile_bytes(M - row, N - col, tiles.BLOCK_M, tiles.BLOCK_N, gl.float32)
        span = ctx.tracing.record_event_start(PUSH, peer, half, tile_m, tile_n, nbytes=nbytes)
        push = gl.where(i + 1 < count, spread, 0)  # nothing is loaded behind the last
        send(shared, i, there, row, col, 0, M, M, ld, push, MOVE)
        ctx.tracing.record_event_end(span)
        span = ctx.tracing.record_event_start(SUM, -1, out, tile_m, tile_n, nbytes=0)
        place, mask = value_places(shared, theirs, 0, row, col, 0, M, M, ld, MOVE)
        found = arch.load_fresh(place, mask)
        for part in range(shared.PARTS):
            place, mask = value_places(shared, theirs, part, row, col, 0, M, M, ld, MOVE)
            total, _waited = take_found(ctx, found, place, mask, peer, epoch, WAITER, gl.float32, LANES=False)
            place, mask = value_places(shared, theirs, part + 1, row, col, 0, M, M, ld, MOVE)
            found = arch.load_fresh(place, mask & (part + 1 < shared.PARTS))
            total += rows_of(shared, i, part, MOVE)
            r, c, inside = rows_among(shared, part, row, col, 0, M, M, MOVE)
            if HAS_BIAS:
                total += gl.load(bias + c, mask=c < N, other=0.0).to(gl.float32)[None, :]
            target = out + (r.to(gl.int64) * stride_om)[:, None] + c[None, :]
            gl.store(target, total.to(out.dtype.element_ty), mask=inside[:, None] & (c < N)[None, :])
        ctx.tracing.record_event_end(span)
    advance(sync, epoch)  # which all warps have read


@gluon.jit(do_not_specialize=["M", "part_rows", "spread", "stagger", "num_leaves"])
def tree_pair_kernel(
    a, b, bias, out, staging, sync, ctx_ptr, leaf_table, num_leaves, M, N, K, stride_om, part_rows, ld, half_elements,
    spread, stagger,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    LEAF_STEPS: gl.constexpr, WORLD_SIZE: gl.constexpr, HAS_BIAS: gl.constexpr, B_TRANSPOSED: gl.constexpr,
    ACC: gl.constexpr, PRODUCT: gl.constexpr, MOVE: gl.constexpr, ROWS: gl.constexpr, MOVER_WARPS: gl.constexpr,
    MOVER_REGISTERS: gl.constexpr, WAITER: gl.constexpr, TRACING: gl.constexpr = False,
):  # fmt: skip
    """a, b: descriptors, as in `lamport_pair_kernel`. K: this rank's, of `num_leaves` leaves of LEAF_STEPS blocks each.

    leaf_table [num_leaves]: int32, see `tree_steps.py`. staging: fp32 as int32, [2 buffers], each [2 ranks, M, ld].
    """
    start_in_turn(stagger)
    ctx = own_context(ctx_ptr, WORLD_SIZE, TRACING)
    epoch = gl.load(sync) + 1
    half = staging + (epoch & 1).to(gl.int64) * half_elements
    num_m, num_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    tiles = PartTiles(num_m, num_n, BLOCK_M, BLOCK_N, GROUP_M)
    units = Units(num_m * num_n, num_leaves * LEAF_STEPS, 0, 0, 0, False)
    mma = Mma(a, b, ACC, BLOCK_M, BLOCK_N, B_TRANSPOSED)
    shared = allocate(a, b, gl.float32, STAGES, BLOCK_M, BLOCK_N, ROWS, PRODUCT, 1, _WAITING - 1)
    gl.warp_specialize(
        [
            (_multiply_leaves, (ctx, a, b, mma, shared, units, tiles, out, leaf_table, num_leaves, LEAF_STEPS)),
            (
                _swap_tiles,
                (
                    ctx, shared, tiles, half, out, bias, sync, M, N, part_rows, ld, stride_om, epoch, spread, HAS_BIAS,
                    MOVE, WAITER,
                ),
            ),
        ],
        [MOVER_WARPS],
        [MOVER_REGISTERS],
    )  # fmt: skip


def launcher(
    rank: "Rank", workspace: "Workspace", problem: Problem, config: "FusedConfig", tensors: "Operands"
) -> "Launch":
    grid, args = lamport_specialised_arguments(rank, workspace, problem, config, tensors)
    tree, values = problem.tree, workspace.exchange.view(torch.int32)
    first, last = tree.spans[rank.cur_rank]
    args |= dict(
        leaf_table=tables_of(rank, tree)[0],
        num_leaves=last - first,
        LEAF_STEPS=tree.width // config.block_k,
        staging=values,
        half_elements=values.numel() // 2,
        ld=exchange_ld(problem.N),
        GROUP_M=config.group_m,
        stagger=platform.ticks(config.stagger_us * 1e-6),
    )
    del args["a_scales"], args["b_scales"]
    return tree_pair_kernel, grid, args
