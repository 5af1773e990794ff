"""`out = sum over ranks of A @ B (+ bias, once)` on every rank, in one of two algorithms.

One shot, for small results: every rank pushes each of its tiles to all ranks and sums all of them itself, in rank
order, so all ranks hold the same bits after one hop. Two shots, for large ones: the kernel of
`matmul_reduce_scatter` with owners interleaved by row blocks; an owner sends its sums to everyone.
"""

from __future__ import annotations

from iris.device import arch
from iris.device.context import own_context
from iris.device.sync import await_entered, enter, leave, signal, wait
import triton
import triton.language as tl

from .tiles import Matrix, add_bias, grouped, multiply, packed


@triton.jit
def one_shot_kernel(
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TMA_A: tl.constexpr,
    TMA_B: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    WAITER: tl.constexpr,
):
    # staging, on each rank: [source rank, tile, BLOCK_M, BLOCK_N]; flags: [source rank, tile]
    ctx = own_context(words, WORLD_SIZE)
    A = Matrix(a, M, K, stride_am, stride_ak, TMA_A)
    B = Matrix(b, K, N, stride_bk, stride_bn, TMA_B, B_TRANSPOSED)
    C = Matrix(out, M, N, stride_om, stride_on, False)
    dtype: tl.constexpr = staging.dtype.element_ty
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    tiles = num_m * num_n
    epoch = enter(ctx, sync)

    ok = True
    entered = False
    for t in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile_m, tile_n = grouped(t, num_m, num_n, GROUP_M)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        acc = multiply(A, B, row, col, 0, K, acc, BLOCK_M, BLOCK_N, BLOCK_K)
        partial = arch.round_to(acc, dtype)  # our own too: every rank sums the same numbers
        slot, mask = packed(staging, ctx.rank * tiles + t, M - row, BLOCK_M, BLOCK_N)
        if not entered:
            ok = await_entered(ctx, sync, epoch, WAITER)
            entered = True
        tl.store(slot, partial, mask=mask)
        if ok:
            for i in tl.static_range(1, WORLD_SIZE):
                tl.store(ctx.remote(slot, (ctx.rank + i) % WORLD_SIZE), partial, mask=mask)
            for i in tl.static_range(1, WORLD_SIZE):
                signal(ctx, flags + ctx.rank * tiles + t, epoch, (ctx.rank + i) % WORLD_SIZE)

    # all of this program's tiles are under way before it waits for any
    tl.debug_barrier()  # it reads below what it staged above, in another layout
    for t in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile_m, tile_n = grouped(t, num_m, num_n, GROUP_M)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        for i in tl.static_range(1, WORLD_SIZE):
            source = (ctx.rank + i) % WORLD_SIZE
            ok = wait(ctx, flags + source * tiles + t, epoch, source, WAITER, exact=True) and ok
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for source in tl.static_range(WORLD_SIZE):
            slot, mask = packed(staging, source * tiles + t, M - row, BLOCK_M, BLOCK_N)
            total += tl.load(slot, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        if HAS_BIAS:
            total = add_bias(total, bias, col, N, BLOCK_N)
        target, inside = C.pointers(row, col, BLOCK_M, BLOCK_N)
        tl.store(target, arch.round_to(total, dtype), mask=inside)
    leave(ctx, sync, epoch, ok, WAITER)
