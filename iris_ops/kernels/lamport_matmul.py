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
from .lamport_steps import exchange_of, part_at
from .launching import NO_SCALES, exchange_memory, grid_of, product_arguments, shared_arguments
from .rmsnorm_epilogue import EPILOGUE_NAMES, add_residual, norm_first_half
from .tile_orders import by_columns
from .tiles import Matrix, add_bias, first_row, multiply_transposed, rows_from, scale_transposed, start_in_turn

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
def _multiply_tile(
    A, B, a_scales, b_scales, row, col, FOLDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(the tile of A @ B at (row, col), which rows of A were loaded for it, which of these are the tile's own)."""
    first = first_row(row, A.rows, BLOCK_M)
    product = multiply_transposed(A, B, first, col, A.cols, BLOCK_M, BLOCK_N, BLOCK_K)
    r, own_row = rows_from(first, row, A.rows, tl.arange(0, BLOCK_M), BLOCK_M, FOLDED)
    own_row &= r < A.rows
    if b_scales is not None:
        product = scale_transposed(product, a_scales, b_scales, r, col, A.rows, B.cols)
    return product.T, r, own_row


@device_function
def _store_own(exchange, product, C, r, c, own_row, BY_COLS: tl.constexpr):
    """A tile of this rank's part to its place in the gathered matrix."""
    above, before = exchange.corner(exchange.ctx.rank, BY_COLS)
    target, mask = C.until(above + C.rows, before + C.cols).places(above + r, before + c)
    tl.store(target, arch.round_to(product, C.data.dtype.element_ty), mask=mask & own_row[:, None])


@device_function
def sum_own_part(
    exchange, bias, C, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BY_COLS: tl.constexpr, HAS_BIAS: tl.constexpr,
    TO_ALL: tl.constexpr,
):  # fmt: skip
    """Sums what all ranks have sent of this rank's part, in rank order. The sums go to `out` or, `TO_ALL`, to everyone.

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
        total, ok = exchange.sum_all(place, mask, dtype)
        ctx.tracing.record_event_end(span)
        if HAS_BIAS:
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
def _sum_tile(
    exchange, kept, bias, C, r, c, tile_m, tile_n, mask, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """The sum of a tile that all ranks have sent to all. `kept`: this rank's own values, or None where it sent them."""
    ctx = exchange.ctx
    dtype: tl.constexpr = C.data.dtype.element_ty
    span = ctx.tracing.record_event_start(SUM, ctx.rank, exchange.buffer, tile_m, tile_n, nbytes=0)
    own = unwrapped(kept, dtype) if kept is not None else None  # rounded: all ranks sum the same numbers
    total, _ = exchange.sum_all(exchange.places(r, c), mask, dtype, own)
    ctx.tracing.record_event_end(span)
    if HAS_BIAS:
        total = add_bias(total, bias, tile_n * BLOCK_N, C.cols, BLOCK_N)
    return total


@device_function
def _finish_tile(
    exchange, kept, bias, residual, weight, scaled, squares, C, tile_m, tile_n, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TWO_SHOT: tl.constexpr, HAS_BIAS: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    """The sum of a tile, with the norm epilogue where `scaled` is given, to `out`."""
    row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
    dtype: tl.constexpr = C.data.dtype.element_ty
    r, c = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    if kept is not None:  # whose rows stand as they were loaded; those that are nobody's are beyond the end
        first = first_row(row, C.rows, BLOCK_M)
        r, own_row = rows_from(first, row, C.rows, tl.arange(0, BLOCK_M), BLOCK_M, FOLDED)
        r = tl.where(own_row, r, C.rows)
    mask = (r < C.rows)[:, None] & (c < exchange.ld)[None, :]
    if scaled is not None:  # on its way while others' values are
        epilogue = add_residual(residual, weight, r, c, C.rows, C.cols)
    if TWO_SHOT:
        total = exchange.take_sums(r, c, mask, dtype)
    else:
        total = _sum_tile(exchange, kept, bias, C, r, c, tile_m, tile_n, mask, BLOCK_N, HAS_BIAS)
    if scaled is not None:
        total = norm_first_half(total, epilogue, scaled, squares, r, c, col, C.rows, C.cols, BLOCK_N)
    target, inside = C.places(r, c)
    tl.store(target, arch.round_to(total, dtype), mask=inside)


@triton.jit(do_not_specialize=["M", "whole", "part_rows"])
def lamport_matmul_kernel(
    a,
    b,
    a_scales,
    b_scales,
    bias,
    residual,
    weight,
    scaled,
    squares,
    out,
    staging,
    sync,
    ctx_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_om,
    stride_on,
    whole,
    part_rows,
    part_cols,
    ld,
    half_elements,
    stagger,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXCHANGE: tl.constexpr,
    BY_COLS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TMA_A: tl.constexpr,
    TMA_B: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    WAITER: tl.constexpr,
    TRACING: tl.constexpr = False,
):
    # M, N: of this rank's product. `whole`: rows, or columns, that are divided into the ranks' parts.
    # ONE_TILE: each program has one; then there are no loops, and of "all" this rank's own tile stays in registers.
    # a_scales [M], b_scales [N]: where both are in eight bits, else None.
    # residual, weight, scaled, squares: of all-reduces that end as `rmsnorm_epilogue.py` says.
    # staging: [2 buffers], each as `lamport_steps.py` says; sync: [epoch, finished]
    arch.follow()
    TO_OWNERS: tl.constexpr = EXCHANGE == "scatter" or EXCHANGE == "owners"
    KEEPS_OWN: tl.constexpr = EXCHANGE == "all" and ONE_TILE
    MEETS: tl.constexpr = EXCHANGE == "scatter" or EXCHANGE == "gather"  # else all ranks send each other values anyway
    FOLDED: tl.constexpr = TMA_A and len(a.block_shape) == 3
    A = Matrix(a, M, K, stride_am, stride_ak, TMA_A)
    B = Matrix(b, K, N, stride_bk, stride_bn, TMA_B, B_TRANSPOSED)
    C = Matrix(out, M, N, stride_om, stride_on, False)
    dtype: tl.constexpr = out.dtype.element_ty
    if EXCHANGE == "gather":  # as many tiles on every rank, though its own part may be short
        num_m, num_n = tl.cdiv(part_rows, BLOCK_M), tl.cdiv(part_cols, BLOCK_N)
    else:
        num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    own = (tl.load(ctx_ptr), tl.load(sync))
    all_bases = load_bases(ctx_ptr, WORLD_SIZE)
    rank, epoch, bases = 0, 0, all_bases  # every program has a tile and learns them there
    kept = tl.zeros((BLOCK_M, BLOCK_N), staging.dtype.element_ty) if KEEPS_OWN else None
    start_in_turn(stagger)
    tracing = device_tracing(ctx_ptr, TRACING)

    count = 1 if ONE_TILE else tl.cdiv(num_m * num_n - tl.program_id(0), tl.num_programs(0))
    for turn in range(count):
        tile_m, tile_n = by_columns(tl.program_id(0) + turn * tl.num_programs(0), num_m)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        span = tracing.record_event_start(PRODUCT, -1, out, tile_m, tile_n, nbytes=0)
        product, r, own_row = _multiply_tile(A, B, a_scales, b_scales, row, col, FOLDED, BLOCK_M, BLOCK_N, BLOCK_K)
        c = col + tl.arange(0, BLOCK_N)
        tracing.record_event_end(span)
        own_rank, last_epoch = settled(own)
        rank, epoch, bases = own_rank.to(tl.int32), last_epoch + 1, settled(all_bases)
        ctx = DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE, TRACING)
        exchange = exchange_of(ctx, bases, epoch, staging, half_elements, part_rows, part_cols, ld, WAITER)
        if EXCHANGE == "gather":
            if HAS_BIAS:
                product = add_bias(product, bias, col, N, BLOCK_N)
            _store_own(exchange, product, C, r, c, own_row, BY_COLS)
        partial = without_sentinel(product, dtype)
        if KEEPS_OWN:
            kept = partial
        nbytes = tile_bytes(M - row, N - col, BLOCK_M, BLOCK_N, dtype) // (WORLD_SIZE if TO_OWNERS else 1)
        span = tracing.record_event_start(PUSH, -1, staging, tile_m, tile_n, nbytes=nbytes)
        if TO_OWNERS:
            exchange.send_to_owners(partial, r, c, own_row, M, N, BY_COLS)
        else:
            exchange.send_tile(partial, r, c, own_row, N, TO_SELF=EXCHANGE == "all" and not KEEPS_OWN)
        tracing.record_event_end(span)

    ctx = DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE, TRACING)
    exchange = exchange_of(ctx, bases, epoch, staging, half_elements, part_rows, part_cols, ld, WAITER)
    if MEETS:
        exchange.tell_peers()
    arch.lead()
    advance(sync, epoch)  # which all programs have read; meanwhile the values are under way

    if TO_OWNERS:
        sum_own_part(exchange, bias, C, BLOCK_M, BLOCK_N, BY_COLS, HAS_BIAS, TO_ALL=EXCHANGE == "owners")
    if EXCHANGE != "scatter":
        for turn in range(count):
            tile_m, tile_n = by_columns(tl.program_id(0) + turn * tl.num_programs(0), num_m)
            if EXCHANGE == "gather":
                gathered = C.until(M if BY_COLS else whole, whole if BY_COLS else N)
                exchange.take_parts(gathered, tile_m * BLOCK_M, tile_n * BLOCK_N, BLOCK_M, BLOCK_N, BY_COLS)
            else:
                _finish_tile(
                    exchange, kept, bias, residual, weight, scaled, squares, C, tile_m, tile_n, BLOCK_M, BLOCK_N,
                    EXCHANGE == "owners", HAS_BIAS, FOLDED,
                )  # fmt: skip
    if MEETS:
        exchange.hear_from_peers(dtype)


def lamport_arguments(
    rank: Rank, workspace: Workspace, problem: Problem, config: FusedConfig, out: torch.Tensor
) -> tuple[tuple[int, int, int], dict]:
    """The grid, and what this kernel and the warp-specialised ones are given."""
    w, by_cols, gather = problem.world_size, problem.form == "cols", problem.op == MATMUL_GATHER
    rows, cols = exchanged_part(problem, config)
    tiles = tiles_of(*((rows, cols) if gather else (problem.M, problem.N)), config)
    args = dict(
        **NO_SCALES,
        **exchange_memory(workspace, problem, cols),
        M=part_of(problem.M, w, rank.cur_rank) if gather and not by_cols else problem.M,
        N=part_of(problem.N, w, rank.cur_rank) if gather and by_cols else problem.N,
        part_rows=rows,
        **shared_arguments(rank, workspace.exchange_sync, problem, config, out),
    )
    return grid_of(rank.device, config, tiles), args


def launcher(rank: Rank, workspace: Workspace, problem: Problem, config: FusedConfig, tensors: Operands) -> Launch:
    out, A, B, bias, _ = tensors
    grid, args = lamport_arguments(rank, workspace, problem, config, out)
    gather, by_cols = problem.op == MATMUL_GATHER, problem.form == "cols"
    rows, cols = exchanged_part(problem, config)
    tiles = tiles_of(*((rows, cols) if gather else (problem.M, problem.N)), config)
    args |= dict(
        whole=problem.N if by_cols else problem.M,
        part_cols=cols,
        stagger=platform.ticks(config.stagger_us * 1e-6),
        EXCHANGE="owners" if config.algorithm == "two_shot" else _EXCHANGES[problem.op],
        ONE_TILE=tiles == grid[0],
        BY_COLS=by_cols,
        **dict.fromkeys(EPILOGUE_NAMES),
        **product_arguments(out, A, B, bias, config),
    )
    return lamport_matmul_kernel, grid, args
