"""Products of few rows whose results are reduced, scattered or gathered: `matmul_all_reduce`, `matmul_reduce_scatter`
and `matmul_all_gather`, where what follows the product must cost next to nothing.

With few rows the product is a stream of weights. Each program streams the weights of some columns once. It multiplies
them as B-columns x A-rows, so that the tensor cores' rows are full however few rows A has. It sends its tile as Lamport
values, which show by themselves whether they have arrived (`lamport_steps.py`).

    EXCHANGE   a tile goes to     then
    "all"      every rank         each rank sums everyone's, in rank order: all-reduce in one shot
    "owners"   its rows' owners   they sum it and send the sums to everyone: all-reduce in two shots
    "scatter"  its owners         they sum it: reduce-scatter
    "gather"   every rank         each rank puts it in its place: all-gather

No wait is circular: a program sends all of its tiles before it takes any. Where each program has one tile, a rank's own
part of "all" stays in registers, and the rank sends itself nothing. Programs start over `stagger` ticks, so that the
first send while the last still stream. Larger results take the kernels of `matmul_reduce.py` and `matmul_gather.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from iris import platform
from iris.device import arch
from iris.device.context import DeviceContext
from iris.device.function import device_function
from iris.device.lamport import load_bases, settled, unwrapped, without_sentinel
from iris.device.sync import advance
from iris.device.tracing import PRODUCT, PUSH, SUM, device_tracing, tile_bytes
import torch
import triton
import triton.language as tl

from ..planning.workspace_size import exchanged_part, tiles_of
from ..problem import ALL_REDUCE, MATMUL_GATHER, REDUCE_SCATTER, Problem, part_of
from .arguments import LamportForm
from .lamport_steps import part_at
from .launching import grid_of, lamport_memory, product_arguments, shared_arguments
from .rmsnorm_epilogue import add_residual, norm_first_half
from .sum_orders import RankOrder, TreeOrder
from .tile_orders import by_columns
from .tiles import Matrix, add_bias, first_row, rows_from, scale_transposed, start_in_turn

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig
    from ..operands import Operands
    from ..workspace import Workspace
    from .launching import Launch

# What follows the product, by op; an all-reduce in two shots is "owners".
_EXCHANGES = {ALL_REDUCE: "all", REDUCE_SCATTER: "scatter", MATMUL_GATHER: "gather"}


# The steps of the kernel. C is `out` as a matrix with the edges of this rank's product.


@device_function
def _store_own(exchange, product, C, r, c, own_row, BY_COLS: tl.constexpr):
    """Store a tile of this rank's part at its place in the gathered matrix."""
    above, before = exchange.corner(exchange.ctx.rank, BY_COLS)
    target, mask = C.until(above + C.rows, before + C.cols).places(above + r, before + c)
    tl.store(target, arch.round_to(product, C.data.dtype.element_ty), mask=mask & own_row[:, None])


@device_function
def sum_own_part(
    exchange, order, bias, C, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BY_COLS: tl.constexpr, TO_ALL: tl.constexpr
):
    """Sum what all ranks have sent of this rank's part, in `order`. The sums go to `out` or, `TO_ALL`, to everyone.

    A program takes one share after the other: as many rows as an owner has of a tile, so that there are about as many
    shares as tiles.
    """
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
        place = exchange.places(r, c)
        span = ctx.tracing.record_event_start(SUM, ctx.rank, exchange.buffer, share, tile_n, nbytes=0)
        total, ok = order.sum(exchange, place, mask, dtype)
        ctx.tracing.record_event_end(span)
        if bias is not None:
            total = add_bias(total, bias + before, col, own_cols, BLOCK_N)
        if TO_ALL:
            if ok:
                nbytes = tile_bytes(own_rows - row, own_cols - col, SHARE, BLOCK_N, dtype)
                span = ctx.tracing.record_event_start(PUSH, -1, exchange.buffer, share, tile_n, nbytes=nbytes)
                exchange.send_to_all(without_sentinel(total, dtype), exchange.own_sums() + place, mask, TO_SELF=True)
                ctx.tracing.record_event_end(span)
        else:
            target, inside = C.until(own_rows, own_cols).pointers(row, col, SHARE, BLOCK_N)
            tl.store(target, arch.round_to(total, dtype), mask=inside)


@device_function
def _sum_tile(exchange, order, kept, bias, C, r, c, tile_m, tile_n, mask):
    """Return the sum of a tile that all ranks have sent to all.

    `kept` holds this rank's own values, or None if it sent them to itself.
    """
    ctx = exchange.ctx
    dtype: tl.constexpr = C.data.dtype.element_ty
    span = ctx.tracing.record_event_start(SUM, ctx.rank, exchange.buffer, tile_m, tile_n, nbytes=0)
    own = unwrapped(kept, dtype) if kept is not None else None  # rounded: all ranks sum the same numbers
    total, _ = order.sum(exchange, exchange.places(r, c), mask, dtype, own)
    ctx.tracing.record_event_end(span)
    if bias is not None:
        total = add_bias(total, bias, tile_n * c.shape[0], C.cols, c.shape[0])
    return total


@device_function
def _finish_tile(
    exchange, order, kept, epilogue, C, tile_m, tile_n, tile: tl.constexpr, TWO_SHOT: tl.constexpr, FOLDED: tl.constexpr
):
    """Store the sum of a tile in `out`, after the norm if the epilogue has one."""
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
    dtype: tl.constexpr = C.data.dtype.element_ty
    r, c = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    if kept is not None:  # whose rows lie as they were loaded; those that are nobody's are beyond the end
        first = first_row(row, C.rows, BLOCK_M)
        r, own_row = rows_from(first, row, C.rows, tl.arange(0, BLOCK_M), BLOCK_M, FOLDED)
        r = tl.where(own_row, r, C.rows)
    mask = (r < C.rows)[:, None] & (c < exchange.ld)[None, :]
    if epilogue.scaled is not None:  # on its way while others' values are
        added = add_residual(epilogue.residual, epilogue.weight, r, c, C.rows, C.cols)
    if TWO_SHOT:
        total = exchange.take_sums(r, c, mask, dtype)
    else:
        total = _sum_tile(exchange, order, kept, epilogue.bias, C, r, c, tile_m, tile_n, mask)
    if epilogue.scaled is not None:
        total = norm_first_half(total, added, epilogue.scaled, epilogue.squares, r, c, col, C.rows, C.cols, BLOCK_N)
    target, inside = C.places(r, c)
    tl.store(target, arch.round_to(total, dtype), mask=inside)


@device_function
def _order_of(epilogue, tree, first_leaf, first_root, tile: tl.constexpr, SUMS: tl.constexpr):
    """Return the policy of sums that a kernel is compiled for."""
    if SUMS is None:
        return RankOrder(epilogue.block_scales, epilogue.block_stride)
    else:
        own_sums = tree.sums + tl.program_id(0).to(tl.int64) * (SUMS.OWN * tile.BLOCK_M * tile.BLOCK_N)
        return TreeOrder(own_sums, first_leaf, first_root, tree.blocks, tree.leaves, SUMS)


@triton.jit(do_not_specialize=["M", "whole", "part_rows", "first_leaf", "first_root"])
def lamport_matmul_kernel(
    a, b, epilogue, out, lamport, tree, sync, ctx_ptr, M, N, K, strides, whole, part_rows, stagger, first_leaf,
    first_root, tile: tl.constexpr, form: tl.constexpr, world: tl.constexpr,
):  # fmt: skip
    # M, N: of this rank's product. `whole`: rows, or units of columns, that are divided into the ranks' parts.
    # tree, first_leaf, first_root: of sums in a tree (`sum_orders.TreeOrder`), else None.
    # lamport: two buffers, each as `lamport_steps.py` says; sync: [epoch, finished]
    arch.follow()
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    EXCHANGE: tl.constexpr = form.EXCHANGE
    SUMS: tl.constexpr = form.SUMS
    TO_OWNERS: tl.constexpr = EXCHANGE == "scatter" or EXCHANGE == "owners"
    KEEPS_OWN: tl.constexpr = EXCHANGE == "all" and form.ONE_TILE and (SUMS is None or SUMS.PAIR)
    # else all ranks send each other values anyway
    MEETS: tl.constexpr = (
        EXCHANGE == "scatter" or EXCHANGE == "gather" or (EXCHANGE == "all" and SUMS is not None and SUMS.ROOTLESS)
    )
    A = Matrix(a, M, K, strides.am, strides.ak)
    B = Matrix(b, K, N, strides.bk, strides.bn, tile.B_TRANSPOSED)
    C = Matrix(out, M, N, strides.om, strides.on)
    dtype: tl.constexpr = out.dtype.element_ty
    if EXCHANGE == "gather":  # as many tiles on every rank, though its own part may be short
        num_m, num_n = tl.cdiv(part_rows, BLOCK_M), tl.cdiv(lamport.part_cols, BLOCK_N)
    else:
        num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    own = (tl.load(ctx_ptr), tl.load(sync))
    all_bases = load_bases(ctx_ptr, world.WORLD_SIZE)
    rank, epoch, bases = 0, 0, all_bases  # every program has a tile and learns them there
    kept = tl.zeros((BLOCK_M, BLOCK_N), lamport.staging.dtype.element_ty) if KEEPS_OWN else None
    start_in_turn(stagger)
    tracing = device_tracing(ctx_ptr, world.TRACING)
    order = _order_of(epilogue, tree, first_leaf, first_root, tile, SUMS)

    count = 1 if form.ONE_TILE else tl.cdiv(num_m * num_n - tl.program_id(0), tl.num_programs(0))
    for turn in range(count):
        tile_m, tile_n = by_columns(tl.program_id(0) + turn * tl.num_programs(0), num_m)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        span = tracing.record_event_start(PRODUCT, -1, out, tile_m, tile_n, nbytes=0)
        first = first_row(row, M, BLOCK_M)
        product = order.multiply(A, B, first, col, dtype, tile)
        r, own_row = rows_from(first, row, M, tl.arange(0, BLOCK_M), BLOCK_M, A.FOLDED)
        own_row &= r < M
        if epilogue.a_scales is not None:
            product = scale_transposed(product, epilogue.a_scales, epilogue.b_scales, r, col, M, N)
        c = col + tl.arange(0, BLOCK_N)
        tracing.record_event_end(span)
        own_rank, last_epoch = settled(own)
        rank, epoch, bases = own_rank.to(tl.int32), last_epoch + 1, settled(all_bases)
        ctx = DeviceContext.initialize(ctx_ptr, rank, world.WORLD_SIZE, world.TRACING)
        for i in tl.static_range(order.BLOCKS):
            exchange = order.exchange(ctx, bases, epoch, lamport, part_rows, i, world.WAITER)
            block = order.block(product, i, tile)
            if EXCHANGE == "gather":
                if epilogue.bias is not None:
                    block = add_bias(block, epilogue.bias, col, N, BLOCK_N)
                _store_own(exchange, block, C, r, c, own_row, form.BY_COLS)
            partial = without_sentinel(block, dtype)
            if KEEPS_OWN:
                kept = partial
            nbytes = tile_bytes(M - row, N - col, BLOCK_M, BLOCK_N, dtype) // (world.WORLD_SIZE if TO_OWNERS else 1)
            span = tracing.record_event_start(PUSH, -1, lamport.staging, tile_m, tile_n, nbytes=nbytes)
            if TO_OWNERS:
                exchange.send_to_owners(partial, r, c, own_row, M, N, form.BY_COLS)
            else:
                exchange.send_tile(partial, r, c, own_row, N, TO_SELF=EXCHANGE == "all" and not KEEPS_OWN)
            tracing.record_event_end(span)
        if SUMS is not None:
            if SUMS.OWN > 1 and not form.ONE_TILE:
                tl.debug_barrier()  # all threads have taken back what they had put by

    ctx = DeviceContext.initialize(ctx_ptr, rank, world.WORLD_SIZE, world.TRACING)
    exchange = order.exchange(ctx, bases, epoch, lamport, part_rows, 0, world.WAITER)
    if MEETS:
        exchange.tell_peers()
    arch.lead()
    advance(sync, epoch)  # which all programs have read; meanwhile the values are under way

    if TO_OWNERS:
        sum_own_part(exchange, order, epilogue.bias, C, BLOCK_M, BLOCK_N, form.BY_COLS, TO_ALL=EXCHANGE == "owners")
    if EXCHANGE != "scatter":
        for turn in range(count):
            tile_m, tile_n = by_columns(tl.program_id(0) + turn * tl.num_programs(0), num_m)
            if EXCHANGE == "gather":
                gathered = C.until(M if form.BY_COLS else whole, whole * form.UNIT if form.BY_COLS else N)
                exchange.take_parts(gathered, tile_m * BLOCK_M, tile_n * BLOCK_N, BLOCK_M, BLOCK_N, form.BY_COLS)
            else:
                _finish_tile(exchange, order, kept, epilogue, C, tile_m, tile_n, tile, EXCHANGE == "owners", A.FOLDED)
    if MEETS:
        exchange.wait_for_peers(dtype)


def lamport_arguments(
    rank: Rank, workspace: Workspace, problem: Problem, config: FusedConfig, out: torch.Tensor
) -> tuple[tuple[int, int, int], dict]:
    """Return the grid, and what this kernel and the warp-specialised ones are given."""
    w, by_cols, gather = problem.world_size, problem.form == "cols", problem.op == MATMUL_GATHER
    rows, cols = exchanged_part(problem, config)
    tiles = tiles_of(*((rows, cols) if gather else (problem.M, problem.N)), config)
    args = dict(
        lamport=lamport_memory(workspace, problem.dtype, cols),
        M=part_of(problem.M, w, rank.cur_rank) if gather and not by_cols else problem.M,
        N=part_of(problem.N, w, rank.cur_rank) if gather and by_cols else problem.N,
        part_rows=rows,
        **shared_arguments(rank, workspace.exchange_sync, problem, out),
    )
    return grid_of(rank.device, config, tiles), args


def launcher(rank: Rank, workspace: Workspace, problem: Problem, config: FusedConfig, tensors: Operands) -> Launch:
    out, A, B, bias, _ = tensors
    grid, args = lamport_arguments(rank, workspace, problem, config, out)
    gather, by_cols = problem.op == MATMUL_GATHER, problem.form == "cols"
    tiles = tiles_of(*(exchanged_part(problem, config) if gather else (problem.M, problem.N)), config)
    exchange = "owners" if config.algorithm == "two_shot" else _EXCHANGES[problem.op]
    unit = math.gcd(problem.N, 16) if by_cols else 1  # so that the compiler knows how the columns divide
    args |= dict(
        **dict.fromkeys(("tree", "first_leaf", "first_root")),
        whole=problem.N // unit if by_cols else problem.M,
        stagger=platform.ticks(config.stagger_us * 1e-6),
        form=LamportForm(exchange, by_cols, tiles == grid[0], UNIT=unit),
        **product_arguments(out, A, B, bias, config),
    )
    return lamport_matmul_kernel, grid, args
