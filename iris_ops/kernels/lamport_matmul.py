"""Products of few rows whose results are reduced, scattered or gathered: `matmul_all_reduce`, `matmul_reduce_scatter`
and `matmul_all_gather` where what follows the product must cost next to nothing.

There the product is a stream of weights. Each program streams the weights of some columns once, multiplies them as
B-columns x A-rows, so that the tensor cores' rows are full however few rows A has, and sends its tile in words that say
themselves whether they have arrived (`iris/device/lamport.py`).

    EXCHANGE   a tile goes to     then
    "all"      every rank         each sums everyone's, in rank order: all-reduce in one shot
    "owners"   its rows' owners   they sum it and send the sums to everyone: all-reduce in two shots
    "scatter"  its owners         they sum it: reduce-scatter
    "gather"   every rank         each puts it in its place: all-gather

Where each program has one tile, a rank's own part of "all" stays in registers, and its words are not sent to itself.
Programs start over `stagger` ticks, so that the first send while the last still stream. Larger results take the kernels
of `matmul_reduce.py` and `matmul_gather.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris import platform
from iris.device import arch
from iris.device.context import DeviceContext
from iris.device.function import device_function
from iris.device.lamport import load_bases, put, seal, settled, take, unwrapped
from iris.device.tracing import PRODUCT, PUSH, SUM, device_tracing, tile_bytes
import torch
import triton
import triton.language as tl

from ..planning.workspace_size import exchanged_part, tiles_of
from ..problem import ALL_REDUCE, MATMUL_GATHER, REDUCE_SCATTER, Problem, part_of
from .launching import NO_SCALES, exchange_memory, grid_of, product_arguments, shared_arguments
from .rmsnorm_epilogue import EPILOGUE_NAMES, add_residual, norm_first_half
from .tiles import Matrix, add_bias, first_row, multiply_transposed, rows_from, scale_transposed, start_in_turn

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig
    from ..operands import Operands
    from ..workspace import Workspace
    from .launching import Launch

# What follows the product, by op; an all-reduce in two shots is "owners".
_EXCHANGES = {ALL_REDUCE: "all", REDUCE_SCATTER: "scatter", MATMUL_GATHER: "gather"}


@device_function
def part_at(whole, part, rank):
    """How much of `whole` belongs to `rank`, when parts have `part` but for the last ones."""
    return max(0, min(part, whole - rank * part))


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
    slot_words,
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
    # staging: [2 slots], each [source rank, part_rows, ld] words, then [M, ld] sums ("owners") or [source rank] a word
    # ("scatter", "gather"); sync: [epoch, finished]
    arch.follow()
    SUMS: tl.constexpr = EXCHANGE == "scatter" or EXCHANGE == "owners"
    KEEPS_OWN: tl.constexpr = EXCHANGE == "all" and ONE_TILE
    FOLDED: tl.constexpr = TMA_A and len(a.block_shape) == 3
    A = Matrix(a, M, K, stride_am, stride_ak, TMA_A)
    B = Matrix(b, K, N, stride_bk, stride_bn, TMA_B, B_TRANSPOSED)
    dtype: tl.constexpr = out.dtype.element_ty
    if EXCHANGE == "gather":  # as many tiles on every rank, though its own part may be short
        num_m, num_n = tl.cdiv(part_rows, BLOCK_M), tl.cdiv(part_cols, BLOCK_N)
    else:
        num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tiles = num_m * num_n
    own = (tl.load(ctx_ptr), tl.load(sync))
    all_bases = load_bases(ctx_ptr, WORLD_SIZE)
    rank, epoch, bases = 0, 0, all_bases  # every program has a tile and learns them there
    kept = tl.zeros((BLOCK_M, BLOCK_N), staging.dtype.element_ty) if KEEPS_OWN else None
    start_in_turn(stagger)
    tracing = device_tracing(ctx_ptr, TRACING)

    count = 1 if ONE_TILE else tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))
    for turn in range(count):
        t = tl.program_id(0) + turn * tl.num_programs(0)
        row, col = (t % num_m) * BLOCK_M, (t // num_m) * BLOCK_N
        span = tracing.record_event_start(PRODUCT, -1, out, t % num_m, t // num_m, nbytes=0)
        first = first_row(row, M, BLOCK_M)
        product = multiply_transposed(A, B, first, col, K, BLOCK_M, BLOCK_N, BLOCK_K)
        r, own_row = rows_from(first, row, M, tl.arange(0, BLOCK_M), BLOCK_M, FOLDED)
        own_row &= r < M
        if b_scales is not None:
            product = scale_transposed(product, a_scales, b_scales, r, col, M, N)
        product = product.T
        tracing.record_event_end(span)
        own_rank, last_epoch = settled(own)
        rank, epoch, bases = own_rank.to(tl.int32), last_epoch + 1, settled(all_bases)
        ctx = DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE, TRACING)
        c = col + tl.arange(0, BLOCK_N)
        slot = staging + tl.cast(epoch & 1, tl.int64) * slot_words
        mine = slot + (rank * part_rows).to(tl.int64) * ld
        if EXCHANGE == "gather":
            if HAS_BIAS:
                product = add_bias(product, bias, col, N, BLOCK_N)
            above, before = (0, rank * part_cols) if BY_COLS else (rank * part_rows, 0)
            C = Matrix(out, above + M, before + N, stride_om, stride_on, False)
            target, mask = C.places(above + r, before + c)
            tl.store(target, arch.round_to(product, dtype), mask=mask & own_row[:, None])
        partial = seal(product, dtype)
        if KEEPS_OWN:
            kept = partial
        nbytes = tile_bytes(M - row, N - col, BLOCK_M, BLOCK_N, dtype) // (WORLD_SIZE if SUMS else 1)
        span = tracing.record_event_start(PUSH, -1, staging, t % num_m, t // num_m, nbytes=nbytes)
        if SUMS:
            for i in tl.static_range(1, WORLD_SIZE + 1):
                to = (rank + i) % WORLD_SIZE
                if BY_COLS:
                    left = c - to * part_cols
                    theirs = own_row[:, None] & ((left >= 0) & (left < part_at(N, part_cols, to)))[None, :]
                    put(ctx, mine + (r.to(tl.int64) * ld)[:, None] + left[None, :], partial, theirs, bases, to)
                else:
                    down = r - to * part_rows
                    theirs = (own_row & (down >= 0) & (down < part_at(M, part_rows, to)))[:, None] & (c < ld)[None, :]
                    put(ctx, mine + (down.to(tl.int64) * ld)[:, None] + c[None, :], partial, theirs, bases, to)
        else:
            mask = own_row[:, None] & (c < tl.where(N > 0, ld, 0))[None, :]
            place = mine + (r.to(tl.int64) * ld)[:, None] + c[None, :]
            for i in tl.static_range(1, WORLD_SIZE if EXCHANGE == "gather" or KEEPS_OWN else WORLD_SIZE + 1):
                put(ctx, place, partial, mask, bases, (rank + i) % WORLD_SIZE)
        tracing.record_event_end(span)

    ctx = DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE, TRACING)
    slot = staging + tl.cast(epoch & 1, tl.int64) * slot_words
    source_step = tl.cast(part_rows, tl.int64) * ld
    behind = slot + WORLD_SIZE * source_step  # the sums, or a word from everyone
    if EXCHANGE == "scatter" or EXCHANGE == "gather":
        # Parts may be empty, and who gets nothing from a peer would not know that it has finished the call before.
        peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
        if tl.program_id(0) == 0:
            for i in tl.static_range(1, WORLD_SIZE):
                here = tl.zeros(peers.shape, staging.dtype.element_ty)
                put(ctx, behind + peers, here, peers == rank, bases, (rank + i) % WORLD_SIZE)
    arch.lead()
    # While the words are under way: all programs have read the epoch, so the last one may advance it.
    tl.debug_barrier()
    if tl.atomic_add(sync + 1, 1, sem="relaxed", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(sync + 1, 0)
        tl.store(sync, epoch)

    if SUMS:
        SHARE: tl.constexpr = triton.next_power_of_2((BLOCK_M + WORLD_SIZE - 1) // WORLD_SIZE)
        own_rows, own_cols, width, before = part_at(M, part_rows, rank), N, ld, 0
        if BY_COLS:
            own_rows, own_cols, before = M, part_at(N, part_cols, rank), rank * part_cols
            width = own_cols
        shares = tl.cdiv(own_rows, SHARE)
        for t in range(tl.program_id(0), shares * tl.cdiv(own_cols, BLOCK_N), tl.num_programs(0)):
            row, col = (t % shares) * SHARE, (t // shares) * BLOCK_N
            r, c = row + tl.arange(0, SHARE), col + tl.arange(0, BLOCK_N)
            mask = (r < own_rows)[:, None] & (c < width)[None, :]
            place = (r.to(tl.int64) * ld)[:, None] + c[None, :]
            span = tracing.record_event_start(SUM, rank, staging, t % shares, t // shares, nbytes=0)
            total, ok = take(ctx, slot + place, source_step, mask, 0, epoch, WAITER, dtype, WORLD_SIZE)
            tracing.record_event_end(span)
            if HAS_BIAS:
                total = add_bias(total, bias + before, col, own_cols, BLOCK_N)
            if EXCHANGE == "owners":
                if ok:
                    sums = behind + (rank * part_rows).to(tl.int64) * ld + place
                    sealed = seal(total, dtype)
                    nbytes = tile_bytes(own_rows - row, own_cols - col, SHARE, BLOCK_N, dtype)
                    span = tracing.record_event_start(PUSH, -1, staging, t % shares, t // shares, nbytes=nbytes)
                    for i in tl.static_range(1, WORLD_SIZE + 1):
                        put(ctx, sums, sealed, mask, bases, (rank + i) % WORLD_SIZE)
                    tracing.record_event_end(span)
            else:
                C = Matrix(out, own_rows, own_cols, stride_om, stride_on, False)
                target, inside = C.pointers(row, col, SHARE, BLOCK_N)
                tl.store(target, arch.round_to(total, dtype), mask=inside)

    if EXCHANGE != "scatter":
        for turn in range(count):
            t = tl.program_id(0) + turn * tl.num_programs(0)
            row, col = (t % num_m) * BLOCK_M, (t // num_m) * BLOCK_N
            r, c = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
            if KEEPS_OWN:  # whose rows stand as they were loaded; those that are nobody's are beyond the end
                r, own_row = rows_from(first_row(row, M, BLOCK_M), row, M, tl.arange(0, BLOCK_M), BLOCK_M, FOLDED)
                r = tl.where(own_row, r, M)
            place = (r.to(tl.int64) * ld)[:, None] + c[None, :]
            if EXCHANGE == "gather":
                for i in tl.static_range(1, WORLD_SIZE):
                    source = (rank + i) % WORLD_SIZE
                    if BY_COLS:
                        above, before, rows, cols = 0, source * part_cols, M, part_at(whole, part_cols, source)
                    else:
                        above, before, rows, cols = source * part_rows, 0, part_at(whole, part_rows, source), N
                    mask = (r < rows)[:, None] & (c < tl.where(cols > 0, ld, 0))[None, :]
                    from_them = slot + source * source_step + place
                    tile, _ = take(ctx, from_them, source_step, mask, source, epoch, WAITER, dtype, 1)
                    C = Matrix(out, above + rows, before + cols, stride_om, stride_on, False)
                    target, inside = C.pointers(above + row, before + col, BLOCK_M, BLOCK_N)
                    tl.store(target, arch.round_to(tile, dtype), mask=inside)
            else:
                mask = (r < M)[:, None] & (c < ld)[None, :]
                if scaled is not None:
                    epilogue = add_residual(residual, weight, r, c, M, N)
                if EXCHANGE == "owners":
                    owner = (r // part_rows)[:, None]
                    total, _ = take(ctx, behind + place, source_step, mask, owner, epoch, WAITER, dtype, 1, patience=2)
                else:
                    span = tracing.record_event_start(SUM, rank, staging, t % num_m, t // num_m, nbytes=0)
                    kept_part = unwrapped(kept, dtype) if KEEPS_OWN else None  # rounded: all sum the same numbers
                    first_words = slot + place
                    total, _ = take(ctx, first_words, source_step, mask, 0, epoch, WAITER, dtype, WORLD_SIZE, kept_part)
                    tracing.record_event_end(span)
                    if HAS_BIAS:
                        total = add_bias(total, bias, col, N, BLOCK_N)
                if scaled is not None:
                    total = norm_first_half(total, epilogue, scaled, squares, r, c, col, M, N, BLOCK_N)
                C = Matrix(out, M, N, stride_om, stride_on, False)
                target, inside = C.places(r, c)
                tl.store(target, arch.round_to(total, dtype), mask=inside)
    if EXCHANGE == "scatter" or EXCHANGE == "gather":
        if tl.program_id(0) == 0:
            mask = (peers < WORLD_SIZE) & (peers != rank)
            take(ctx, behind + peers, source_step, mask, peers, epoch, WAITER, dtype, 1)


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
