"""`out = sum over ranks of A @ B (+ bias, once)` on every rank, for results of few rows.

There the product is a stream of weights, and what follows it must cost next to nothing. Each program streams the
weights of some columns once, multiplies them as B-columns x A-rows, so that the tensor cores' rows are full however few
rows A has, and sends its tile in words that say themselves whether they have arrived (`iris/device/exchange.py`).

In one shot every rank gets everyone's tile and sums in rank order. In two shots, better from some 32 rows on, the
tile's rows are divided over the ranks: each sums its rows and sends the sums to everyone. Larger results take the
kernel of `matmul_reduce_scatter.py`.
"""

from __future__ import annotations

from iris.device import arch
from iris.device.context import DeviceContext
from iris.device.exchange import load_bases, remote, seal, settled, take
from iris.device.function import device_function
import triton
import triton.language as tl

from .tiles import Matrix, add_bias


@device_function
def _product_t(A, B, row, col, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """(A[row:] @ B[:, col:]).T in fp32."""
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        x = A.load(row, k, BLOCK_M, BLOCK_K)
        y = B.load(k, col, BLOCK_K, BLOCK_N)
        acc = arch.dot(y.T, x.T, acc)
    return acc


@device_function
def _rows_of(rank, rows, WORLD_SIZE: tl.constexpr):
    """(first, end) of the rows, out of `rows`, that a rank sums in two shots."""
    share = tl.cdiv(rows, WORLD_SIZE)
    return rank * share, min(rows, (rank + 1) * share)


@triton.jit(do_not_specialize=["M"])
def exchange_kernel(
    a,
    b,
    bias,
    out,
    staging,
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
    ld,
    slot_words,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHOTS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TMA_A: tl.constexpr,
    TMA_B: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    WAITER: tl.constexpr,
):
    # staging: [2 slots], each [source rank, M, ld] words, then in two shots the sums [M, ld]; sync: [epoch, finished]
    A = Matrix(a, M, K, stride_am, stride_ak, TMA_A)
    B = Matrix(b, K, N, stride_bk, stride_bn, TMA_B, B_TRANSPOSED)
    C = Matrix(out, M, N, stride_om, stride_on, False)
    dtype: tl.constexpr = out.dtype.element_ty
    num_m = tl.cdiv(M, BLOCK_M)
    tiles = num_m * tl.cdiv(N, BLOCK_N)
    own = (tl.load(words), tl.load(sync))
    all_bases = load_bases(words, WORLD_SIZE)
    rank, epoch, bases = 0, 0, all_bases  # every program has a tile and learns them there

    for t in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = (t % num_m) * BLOCK_M, (t // num_m) * BLOCK_N
        product = _product_t(A, B, row, col, K, BLOCK_M, BLOCK_N, BLOCK_K).T
        own_rank, last_epoch = settled(own)
        rank, epoch, bases = own_rank.to(tl.int32), last_epoch + 1, settled(all_bases)
        ctx = DeviceContext.initialize(words, rank, WORLD_SIZE)
        partial = seal(product, dtype)  # our own too: every rank sums the same numbers
        r, c = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
        mask = (r < M)[:, None] & (c < ld)[None, :]
        mine = (rank * M + r).to(tl.int64) * ld + tl.cast(epoch & 1, tl.int64) * slot_words
        place = staging + mine[:, None] + c[None, :]
        for i in tl.static_range(1, WORLD_SIZE + 1):
            to = (rank + i) % WORLD_SIZE
            theirs = mask
            if SHOTS == 2:
                first, end = _rows_of(to, min(BLOCK_M, M - row), WORLD_SIZE)
                theirs = mask & ((r >= row + first) & (r < row + end))[:, None]
            tl.store(remote(ctx, place, bases, to), partial, mask=theirs, cache_modifier=".wt")

    # While the words are under way: all programs have read the epoch, so the last one may advance it.
    tl.debug_barrier()
    if tl.atomic_add(sync + 1, 1, sem="relaxed", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(sync + 1, 0)
        tl.store(sync, epoch)

    ctx = DeviceContext.initialize(words, rank, WORLD_SIZE)
    slot = staging + tl.cast(epoch & 1, tl.int64) * slot_words
    source_step = tl.cast(M, tl.int64) * ld
    sums = slot + WORLD_SIZE * source_step
    if SHOTS == 2:
        SHARE: tl.constexpr = triton.next_power_of_2((BLOCK_M + WORLD_SIZE - 1) // WORLD_SIZE)
        for t in range(tl.program_id(0), tiles, tl.num_programs(0)):
            row, col = (t % num_m) * BLOCK_M, (t // num_m) * BLOCK_N
            first, end = _rows_of(rank, min(BLOCK_M, M - row), WORLD_SIZE)
            r, c = first + tl.arange(0, SHARE), col + tl.arange(0, BLOCK_N)
            mask = (r < end)[:, None] & (c < ld)[None, :]
            place = ((row + r).to(tl.int64) * ld)[:, None] + c[None, :]
            total, ok = take(ctx, slot + place, source_step, mask, 0, epoch, WAITER, dtype, WORLD_SIZE)
            if HAS_BIAS:
                total = add_bias(total, bias, col, N, BLOCK_N)
            total = seal(total, dtype)
            if ok:
                for i in tl.static_range(1, WORLD_SIZE + 1):
                    target = remote(ctx, sums + place, bases, (rank + i) % WORLD_SIZE)
                    tl.store(target, total, mask=mask, cache_modifier=".wt")
    for t in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = (t % num_m) * BLOCK_M, (t // num_m) * BLOCK_N
        r, c = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
        mask = (r < M)[:, None] & (c < ld)[None, :]
        place = (r.to(tl.int64) * ld)[:, None] + c[None, :]
        if SHOTS == 2:
            owner = ((r - row) // tl.cdiv(min(BLOCK_M, M - row), WORLD_SIZE))[:, None]
            total, _ = take(ctx, sums + place, source_step, mask, owner, epoch, WAITER, dtype, 1)
        else:
            total, _ = take(ctx, slot + place, source_step, mask, 0, epoch, WAITER, dtype, WORLD_SIZE)
            if HAS_BIAS:
                total = add_bias(total, bias, col, N, BLOCK_N)
        target, inside = C.pointers(row, col, BLOCK_M, BLOCK_N)
        tl.store(target, arch.round_to(total, dtype), mask=inside)
