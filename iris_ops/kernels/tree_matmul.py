"""Products whose sums over ranks have the same bits on any number of ranks: `matmul_all_reduce` and
`matmul_reduce_scatter` with `invariant="ranks"`.

`iris_ops/sum_tree.py` says in which order products along K are added, whoever has them. A program multiplies a tile
from the first product of its rank's K to the last. Where a leaf ends, it puts the leaf's sum by, rounded, in memory of
its own that L2 holds, and begins the next from zero. Behind the last leaf it takes them back and adds them in the
tree's order. A sum whose other half another rank has is a root. Roots travel as Lamport values, which show by
themselves whether they have arrived (`lamport_steps.py`). The receiver joins all ranks' roots. Then comes the bias.

    EXCHANGE    a root goes to     then
    "all"       every rank         each rank joins all roots: all-reduce in one shot
    "owners"    its rows' owners   they join them and send the sums to everyone: all-reduce in two shots
    "scatter"   its owners         they join them: reduce-scatter

A buffer has a block for each root, where those of `lamport_steps.py` have one for each rank; else this kernel is
`lamport_matmul.py`. No wait is circular: a program sends all of its roots before it takes any. A rank without leaves
sends no root, so there peers tell each other that they have begun (`MEETS`).

Sums wait in memory, since in registers they would take a tile each, and the compiler would exchange them through shared
memory at each leaf's end. So the loop over K is one, whose loads never pause, as where nothing is promised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris import platform
from iris.device import arch
from iris.device.context import DeviceContext
from iris.device.function import device_function
from iris.device.lamport import load_bases, settled, take, unwrapped, without_sentinel
from iris.device.sync import advance
from iris.device.tracing import PRODUCT, SUM, device_tracing
import triton
import triton.language as tl

from .. import sum_tree
from ..planning.workspace_size import exchanged_part, tiles_of
from ..problem import ALL_REDUCE, REDUCE_SCATTER, Problem
from .lamport_steps import Exchange, part_at
from .launching import exchange_memory, grid_of, product_arguments, shared_arguments
from .tile_orders import by_columns
from .tiles import Matrix, add_bias, first_row, rows_from, start_in_turn
from .tree_steps import joined, length, list_at, multiply_leaves, num_lists, number_at, root_of, tree_constants

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig
    from ..operands import Operands
    from ..workspace import Workspace
    from .launching import Launch

_EXCHANGES = {ALL_REDUCE: "all", REDUCE_SCATTER: "scatter"}


@device_function
def _root_exchange(ctx, bases, epoch, staging, half_elements, part_rows, part_cols, ld, number, count, WAITER):
    """The `Exchange` of call `epoch` in which root `number` of `count` is sent."""
    buffer = staging + tl.cast(epoch & 1, tl.int64) * half_elements
    step = tl.cast(part_rows, tl.int64) * ld
    own_block, behind = buffer + number * step, buffer + count * step
    return Exchange(ctx, bases, buffer, own_block, step, behind, epoch, part_rows, part_cols, ld, WAITER)


@device_function
def _join(
    exchange, kept, place, mask, JOINS: tl.constexpr, SOURCES: tl.constexpr, PAIR: tl.constexpr, dtype: tl.constexpr
):
    """(the sum of all ranks' roots at `place`, rounded, in fp32; whether all came in time).

    `PAIR`: one or two ranks have one each, which are looked at together. `kept`: this rank's own then, or None.
    """
    if PAIR:
        total, ok = exchange.sum_all(place, mask, dtype, kept)
        total = arch.round_to(total, dtype)
    else:
        waiting, ok = (), True
        for i in tl.static_range(length(JOINS)):
            value, came = take(
                exchange.ctx, exchange.buffer + i * exchange.step + place, 0, mask, number_at(SOURCES, i),
                exchange.epoch, exchange.WAITER, dtype, 1,
            )  # fmt: skip
            waiting = joined(arch.round_to(value, dtype), waiting, number_at(JOINS, i))
            ok = ok & came
        total = waiting[0]
    return total.to(tl.float32), ok


@device_function
def _join_own_part(
    exchange, bias, C, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, JOINS: tl.constexpr, SOURCES: tl.constexpr,
    PAIR: tl.constexpr, BY_COLS: tl.constexpr, HAS_BIAS: tl.constexpr, TO_ALL: tl.constexpr,
):  # fmt: skip
    """Joins the roots of this rank's part. The sums go to `out` or, `TO_ALL`, to everyone."""
    ctx = exchange.ctx
    dtype: tl.constexpr = C.data.dtype.element_ty
    SHARE: tl.constexpr = triton.next_power_of_2((BLOCK_M + ctx.world_size - 1) // ctx.world_size)
    own_rows, own_cols, width, before = part_at(C.rows, exchange.part_rows, ctx.rank), C.cols, exchange.ld, 0
    if BY_COLS:
        own_rows, own_cols = C.rows, part_at(C.cols, exchange.part_cols, ctx.rank)
        width, before = own_cols, ctx.rank * exchange.part_cols
    shares = tl.cdiv(own_rows, SHARE)
    for t in range(tl.program_id(0), shares * tl.cdiv(own_cols, BLOCK_N), tl.num_programs(0)):
        share, tile_n = by_columns(t, shares)
        row, col = share * SHARE, tile_n * BLOCK_N
        r, c = row + tl.arange(0, SHARE), col + tl.arange(0, BLOCK_N)
        mask = (r < own_rows)[:, None] & (c < width)[None, :]
        span = ctx.tracing.record_event_start(SUM, ctx.rank, exchange.buffer, share, tile_n, nbytes=0)
        total, ok = _join(exchange, None, exchange.places(r, c), mask, JOINS, SOURCES, PAIR, dtype)
        ctx.tracing.record_event_end(span)
        if HAS_BIAS:
            total = add_bias(total, bias + before, col, own_cols, BLOCK_N)
        if TO_ALL:
            if ok:
                place = exchange.own_sums() + exchange.places(r, c)
                exchange.send_to_all(without_sentinel(total, dtype), place, mask, TO_SELF=True)
        else:
            target, inside = C.until(own_rows, own_cols).pointers(row, col, SHARE, BLOCK_N)
            tl.store(target, arch.round_to(total, dtype), mask=inside)


@device_function
def _finish_tile(
    exchange, kept, bias, C, tile_m, tile_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, JOINS: tl.constexpr,
    SOURCES: tl.constexpr, PAIR: tl.constexpr, TWO_SHOT: tl.constexpr, HAS_BIAS: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    """The sum of a tile to `out`. `kept`: this rank's own root where it sent itself none, in the rows as loaded."""
    row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
    dtype: tl.constexpr = C.data.dtype.element_ty
    r, c = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    if kept is not None:
        r, own_row = rows_from(first_row(row, C.rows, BLOCK_M), row, C.rows, tl.arange(0, BLOCK_M), BLOCK_M, FOLDED)
        r = tl.where(own_row, r, C.rows)
    mask = (r < C.rows)[:, None] & (c < exchange.ld)[None, :]
    span = exchange.ctx.tracing.record_event_start(SUM, exchange.ctx.rank, exchange.buffer, tile_m, tile_n, nbytes=0)
    if TWO_SHOT:
        total = exchange.take_sums(r, c, mask, dtype)
    else:
        own = unwrapped(kept, dtype) if kept is not None else None
        total, _ = _join(exchange, own, exchange.places(r, c), mask, JOINS, SOURCES, PAIR, dtype)
        if HAS_BIAS:
            total = add_bias(total, bias, col, C.cols, BLOCK_N)
    exchange.ctx.tracing.record_event_end(span)
    target, inside = C.places(r, c)
    tl.store(target, arch.round_to(total, dtype), mask=inside)


@triton.jit(do_not_specialize=["M", "part_rows", "first_leaf", "first_root", "blocks", "leaves"])
def tree_matmul_kernel(
    a,
    b,
    bias,
    out,
    sums,
    staging,
    sync,
    ctx_ptr,
    first_leaf,
    blocks,
    leaves,
    first_root,
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
    half_elements,
    stagger,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OWN: tl.constexpr,
    OWN_ROOTS: tl.constexpr,
    JOINS: tl.constexpr,
    SOURCES: tl.constexpr,
    EXCHANGE: tl.constexpr,
    ONE_TILE: tl.constexpr,
    PAIR: tl.constexpr,
    BY_COLS: tl.constexpr,
    MEETS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TMA_A: tl.constexpr,
    TMA_B: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    WAITER: tl.constexpr,
    TRACING: tl.constexpr = False,
):
    # K: of this rank's share, which has OWN leaves from number `first_leaf` on, of `leaves` of `blocks` blocks in all.
    # OWN_ROOTS: of each root of this rank the leaves' list; JOINS, SOURCES: of all ranks' roots, as `_joins` says.
    # sums: this rank's own memory, [programs, OWN, BLOCK_M * BLOCK_N]. first_root: number of this rank's first root.
    # ONE_TILE: each program has one; where ranks have one root each, their own then stays in registers.
    # staging: [2 buffers], each [number of roots, part_rows, ld] and what follows; sync: [epoch, finished]
    arch.follow()
    FOLDED: tl.constexpr = TMA_A and len(a.block_shape) == 3
    KEEPS_OWN: tl.constexpr = EXCHANGE == "all" and ONE_TILE and PAIR
    A = Matrix(a, M, K, stride_am, stride_ak, TMA_A)
    B = Matrix(b, K, N, stride_bk, stride_bn, TMA_B, B_TRANSPOSED)
    C = Matrix(out, M, N, stride_om, stride_on, False)
    dtype: tl.constexpr = out.dtype.element_ty
    NUM_ROOTS: tl.constexpr = length(JOINS)
    own, all_bases = (tl.load(ctx_ptr), tl.load(sync)), load_bases(ctx_ptr, WORLD_SIZE)  # while a tile is multiplied
    kept = tl.zeros((BLOCK_M, BLOCK_N), staging.dtype.element_ty) if KEEPS_OWN else None
    rank, epoch, bases = 0, 0, all_bases  # every program has a tile and learns them there
    start_in_turn(stagger)
    tracing = device_tracing(ctx_ptr, TRACING)
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    own_sums = sums + tl.program_id(0).to(tl.int64) * (OWN * BLOCK_M * BLOCK_N)

    count = 1 if ONE_TILE else tl.cdiv(num_m * num_n - tl.program_id(0), tl.num_programs(0))
    for turn in range(count):
        tile_m, tile_n = by_columns(tl.program_id(0) + turn * tl.num_programs(0), num_m)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        span = tracing.record_event_start(PRODUCT, -1, out, tile_m, tile_n, nbytes=0)
        first = first_row(row, M, BLOCK_M)
        last = multiply_leaves(
            A, B, own_sums, first, col, first_leaf, blocks, leaves, OWN, dtype, BLOCK_M, BLOCK_N, BLOCK_K
        )
        r, own_row = rows_from(first, row, M, tl.arange(0, BLOCK_M), BLOCK_M, FOLDED)
        own_row &= r < M
        c = col + tl.arange(0, BLOCK_N)
        own_rank, last_epoch = settled(own)
        rank, epoch, bases = own_rank.to(tl.int32), last_epoch + 1, settled(all_bases)
        ctx = DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE, TRACING)
        if OWN > 1:
            tl.debug_barrier()  # all threads have put by what they had
        before = 0
        for i in tl.static_range(num_lists(OWN_ROOTS)):
            exchange = _root_exchange(
                ctx, bases, epoch, staging, half_elements, part_rows, part_cols, ld, first_root + i, NUM_ROOTS, WAITER
            )
            root = root_of(own_sums, last, before, list_at(OWN_ROOTS, i), i == num_lists(OWN_ROOTS) - 1, BLOCK_N >= 64)
            before += length(list_at(OWN_ROOTS, i))
            values = without_sentinel(root.to(tl.float32), dtype)
            if KEEPS_OWN:
                kept = values
            if EXCHANGE == "all":
                exchange.send_tile(values, r, c, own_row, N, TO_SELF=not KEEPS_OWN)
            else:
                exchange.send_to_owners(values, r, c, own_row, M, N, BY_COLS)
        if OWN > 1 and not ONE_TILE:
            tl.debug_barrier()  # all threads have taken them back
        tracing.record_event_end(span)

    ctx = DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE, TRACING)
    exchange = _root_exchange(
        ctx, bases, epoch, staging, half_elements, part_rows, part_cols, ld, first_root, NUM_ROOTS, WAITER
    )
    if MEETS:
        exchange.tell_peers()
    arch.lead()
    advance(sync, epoch)  # which all programs have read; meanwhile the values are under way

    if EXCHANGE != "all":
        _join_own_part(
            exchange, bias, C, BLOCK_M, BLOCK_N, JOINS, SOURCES, PAIR, BY_COLS, HAS_BIAS, EXCHANGE == "owners"
        )
    if EXCHANGE != "scatter":
        for turn in range(count):
            tile_m, tile_n = by_columns(tl.program_id(0) + turn * tl.num_programs(0), num_m)
            _finish_tile(
                exchange, kept, bias, C, tile_m, tile_n, BLOCK_M, BLOCK_N, JOINS, SOURCES, PAIR, EXCHANGE == "owners",
                HAS_BIAS, FOLDED,
            )  # fmt: skip
    if MEETS:
        exchange.hear_from_peers(dtype)


def launcher(rank: Rank, workspace: Workspace, problem: Problem, config: FusedConfig, tensors: Operands) -> Launch:
    out, A, B, bias, _ = tensors
    me, tree = rank.cur_rank, problem.tree
    rows, cols = exchanged_part(problem, config)
    exchange = "owners" if config.algorithm == "two_shot" else _EXCHANGES[problem.op]
    tiles = tiles_of(problem.M, problem.N, config)
    grid, known = grid_of(rank.device, config, tiles), tree_constants(tree, me)
    room = grid[0] * max(1, known["OWN"]) * config.block_m * config.block_n * problem.dtype.itemsize
    args = dict(
        **known,
        sums=workspace.local("leaves", room).view(problem.dtype),
        first_leaf=tree.spans[me][0],
        blocks=sum_tree.blocks_of(tree.K),
        leaves=max(1, tree.leaves),
        first_root=sum(map(len, tree.roots[:me])),
        M=problem.M,
        N=problem.N,
        part_rows=rows,
        part_cols=cols,
        stagger=platform.ticks(config.stagger_us * 1e-6),
        EXCHANGE=exchange,
        ONE_TILE=tiles == grid[0],
        BY_COLS=problem.form == "cols",
        MEETS=exchange == "scatter" or (exchange == "all" and not all(tree.roots)),
        **exchange_memory(workspace, problem, cols),
        **shared_arguments(rank, workspace.exchange_sync, problem, config, out),
        **product_arguments(out, A, B, bias, config),
    )
    return tree_matmul_kernel, grid, args
