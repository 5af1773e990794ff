"""`out = this rank's part of sum over ranks of A @ B (+ bias)`: tiles travel to their owner, who sums them.

Each rank computes the tiles of all owners and pushes those of others into the owner's staging memory. A tile is
signalled one tile later, when its stores have long landed. The owner adds what arrived to its own tile in fp32, in rank
order from its own on, and stores the part. A rank's own tiles come last, or, behind the first `early` tiles of each
other owner, between the others' (`turn`). A wait looks at tiles that come earlier in the same order on the peers, so no
wait can be circular, with any number of programs.

`matmul_all_reduce` in two shots is this kernel with owners whose sums go to everyone.
"""

from __future__ import annotations

from iris.device import arch
from iris.device.context import own_context
from iris.device.function import device_function
from iris.device.sync import await_entered, enter, leave, signal, wait
from iris.device.tracing import PRODUCT, PUSH, SUM, tile_bytes
import triton
import triton.language as tl

from .tiles import Matrix, add_bias, grouped, multiply, packed, start_in_turn


@device_function
def turn(t, owned, early, programs, WORLD_SIZE: tl.constexpr):
    """(how many ranks on the owner is, the number of its tile) of the tile that is computed as number `t`.

    With `early == owned` owner by owner, the next rank first and the own one last. Else tile by tile: `early` tiles of
    each other owner, then in each group of WORLD_SIZE tiles one of each owner; the last `early` are own ones. Own tiles
    take longer, so from round to round of `programs` another place in the group is the own one's.
    """
    if WORLD_SIZE == 1:
        return 0, t
    others: tl.constexpr = WORLD_SIZE - 1
    late = t - early * others
    mixed = (owned - early) * WORLD_SIZE
    group, place = late // WORLD_SIZE, late % WORLD_SIZE
    # moves on by one more than a program's place does
    own_place = group // tl.cdiv(programs, WORLD_SIZE) * (programs % WORLD_SIZE + 1) % WORLD_SIZE
    before = tl.where(late < 0, t, early * others + group * others + place - (place > own_place).to(tl.int32))
    own = tl.where(late < mixed, group, late - mixed + owned - early)
    is_own = (late >= mixed) | ((late >= 0) & (place == own_place))
    by_owner = early == owned
    step = tl.where(by_owner, (1 + t // owned) % WORLD_SIZE, tl.where(is_own, 0, 1 + before % others))
    return step, tl.where(by_owner, t % owned, tl.where(is_own, own, before // others))


@triton.jit
def reduce_scatter_kernel(
    a,
    b,
    bias,
    out,
    staging,
    flags,
    sync,
    words,
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
    stagger,
    early,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    BY_COLS: tl.constexpr,
    ALL_REDUCE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TMA_A: tl.constexpr,
    TMA_B: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    WAITER: tl.constexpr,
    TRACING: tl.constexpr = False,
):
    # staging, at each owner: [source rank, owned tile, BLOCK_M, BLOCK_N]; flags: [source rank, owned tile]
    ctx = own_context(words, WORLD_SIZE, TRACING)
    A = Matrix(a, M, K, stride_am, stride_ak, TMA_A)
    B = Matrix(b, K, N, stride_bk, stride_bn, TMA_B, B_TRANSPOSED)
    dtype: tl.constexpr = staging.dtype.element_ty

    num_m = tl.cdiv(part_rows, BLOCK_M)
    num_n = tl.cdiv(part_cols, BLOCK_N)
    owned = num_m * num_n
    epoch = enter(ctx, sync)
    start_in_turn(stagger)

    ok = True  # nothing has been missed so far
    entered = False  # the peers are known to be in this call
    pending = -1  # the slot that was pushed last and not yet signalled
    pending_owner = 0
    for t in range(tl.program_id(0), owned * WORLD_SIZE, tl.num_programs(0)):
        step, number = turn(t, owned, early, tl.num_programs(0), WORLD_SIZE)
        owner = (ctx.rank + step) % WORLD_SIZE
        tile_m, tile_n = grouped(number, num_m, num_n, GROUP_M)
        slot = tile_m * num_n + tile_n
        if BY_COLS:
            row, col = tile_m * BLOCK_M, owner * part_cols + tile_n * BLOCK_N
            rows, cols = M, min(N, (owner + 1) * part_cols)
        else:
            row, col = owner * part_rows + tile_m * BLOCK_M, tile_n * BLOCK_N
            rows, cols = min(M, (owner + 1) * part_rows), N

        if (row < rows) & (col < cols):
            nbytes = tile_bytes(rows - row, cols - col, BLOCK_M, BLOCK_N, dtype)
            span = ctx.tracing.record_event_start(PRODUCT, owner, out, tile_m, tile_n, nbytes=0)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            acc = multiply(A, B, row, col, 0, 0, K, acc, BLOCK_M, BLOCK_N, BLOCK_K)
            ctx.tracing.record_event_end(span)
            if not entered:
                ok = await_entered(ctx, sync, epoch, WAITER, LANES=False)  # lanes take registers that the tile needs
                entered = True
            if pending >= 0:
                if ok:
                    signal(ctx, flags + ctx.rank * owned + pending, epoch, pending_owner)
                pending = -1

            if owner != ctx.rank:
                if ok:
                    span = ctx.tracing.record_event_start(PUSH, owner, staging, tile_m, tile_n, nbytes=nbytes)
                    target, mask = packed(staging, ctx.rank * owned + slot, rows - row, BLOCK_M, BLOCK_N)
                    tl.store(ctx.remote(target, owner), arch.round_to(acc, dtype), mask=mask)
                    ctx.tracing.record_event_end(span)
                pending = slot
                pending_owner = owner
            else:
                span = ctx.tracing.record_event_start(SUM, owner, out, tile_m, tile_n, nbytes=nbytes)
                for i in tl.static_range(1, WORLD_SIZE):
                    source = (ctx.rank + i) % WORLD_SIZE
                    ok = wait(ctx, flags + source * owned + slot, epoch, source, WAITER, exact=True) and ok
                    staged, mask = packed(staging, source * owned + slot, rows - row, BLOCK_M, BLOCK_N)
                    acc += tl.load(staged, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
                ctx.tracing.record_event_end(span)
                if HAS_BIAS:
                    acc = add_bias(acc, bias, col, cols, BLOCK_N)
                result = arch.round_to(acc, dtype)
                if ALL_REDUCE:
                    target, mask = Matrix(out, rows, cols, stride_om, stride_on, False).pointers(
                        row, col, BLOCK_M, BLOCK_N
                    )
                    tl.store(target, result, mask=mask)
                    if ok:
                        span = ctx.tracing.record_event_start(PUSH, -1, out, tile_m, tile_n, nbytes=nbytes)
                        for i in tl.static_range(1, WORLD_SIZE):
                            tl.store(ctx.remote(target, (ctx.rank + i) % WORLD_SIZE), result, mask=mask)
                        ctx.tracing.record_event_end(span)
                else:
                    own_rows = rows if BY_COLS else rows - ctx.rank * part_rows
                    own_cols = cols - ctx.rank * part_cols if BY_COLS else cols
                    target, mask = Matrix(out, own_rows, own_cols, stride_om, stride_on, False).pointers(
                        tile_m * BLOCK_M, tile_n * BLOCK_N, BLOCK_M, BLOCK_N
                    )
                    tl.store(target, result, mask=mask)
    if pending >= 0:
        if ok:
            signal(ctx, flags + ctx.rank * owned + pending, epoch, pending_owner)
    leave(ctx, sync, epoch, ok, WAITER, TOGETHER=ALL_REDUCE)
