"""load, store, get, put and copy: every dtype, scalar, block and masked, all pairs of ranks, by both spellings."""

import iris
import pytest
import torch
import triton
import triton.language as tl

from tests.harness import ON_GPU, WORLDS, both, run_ranks

pytestmark = both

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
# Every dtype between two ranks and on GPUs; a few in the other worlds, where the interpreter is slow.
CASES = [
    (world_size, dtype)
    for world_size in WORLDS
    for dtype in DTYPES
    if ON_GPU or world_size == 2 or dtype in (torch.bfloat16, torch.int64)
]
BLOCK = 32
UNTOUCHED, OTHER = 77, 55  # bool takes both as True; its patterns are mostly False
LOAD, STORE, GET, PUT = range(4)


@triton.jit
def _move_kernel(
    src, dst, copied, rank, bases, ctx_ptr, n, VIA_CONTEXT: tl.constexpr, MASKED: tl.constexpr, OTHER: tl.constexpr,
    N: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """dst [4, WORLD, N]: row `peer` of load and get are filled here, row `rank` of store and put at each peer.

    copied [WORLD, WORLD, N]: at each `to`, row [rank, from_].
    """
    ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD)
    i = tl.arange(0, N) if N > 1 else 0
    mask = i < n if MASKED else None
    other = OTHER if MASKED else None
    mine = tl.load(src + i, mask=mask)
    for peer in range(WORLD):
        load_to, get_to = dst + peer * N + i, dst + (2 * WORLD + peer) * N + i
        store_to, put_to = dst + (WORLD + rank) * N + i, dst + (3 * WORLD + rank) * N + i
        if VIA_CONTEXT:
            tl.store(load_to, ctx.load(src + i, peer, mask=mask, other=other))
            ctx.store(store_to, mine, peer, mask=mask)
            ctx.get(src + i, get_to, peer, mask=mask)
            ctx.put(src + i, put_to, peer, mask=mask)
        else:
            tl.store(load_to, iris.load(src + i, rank, peer, bases, mask=mask, other=other))
            iris.store(store_to, mine, rank, peer, bases, mask=mask)
            iris.get(src + i, get_to, peer, rank, bases, mask=mask)
            iris.put(src + i, put_to, rank, peer, bases, mask=mask)
        for to in range(WORLD):
            copy_to = copied + (rank * WORLD + peer) * N + i
            if VIA_CONTEXT:
                ctx.copy(src + i, copy_to, peer, to, mask=mask)
            else:
                iris.copy(src + i, copy_to, peer, to, rank, bases, mask=mask)


def _pattern(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.arange(length) % 5 == rank
    return (torch.arange(length) % 10 * 5 + rank).to(dtype)


def _check_moves(ctx, dtype, via_context, length, masked):
    n = length * 2 // 3 if masked else length
    src = ctx.empty(length, dtype=dtype).copy_(_pattern(ctx.cur_rank, length, dtype))
    dst = ctx.full((4, ctx.num_ranks, length), UNTOUCHED, dtype=dtype)
    copied = ctx.full((ctx.num_ranks, ctx.num_ranks, length), UNTOUCHED, dtype=dtype)
    other = float(OTHER) if dtype.is_floating_point else OTHER  # the interpreter has no cast from int to bf16
    ctx.barrier()
    _move_kernel[(1,)](
        src, dst, copied, ctx.cur_rank, ctx.get_heap_bases(), ctx.get_device_context(), n,
        VIA_CONTEXT=via_context, MASKED=masked, OTHER=other, N=length, WORLD=ctx.num_ranks,
    )  # fmt: skip
    ctx.barrier()

    def expected(peer, beyond):
        row = torch.full((length,), beyond, dtype=dtype)
        row[:n] = _pattern(peer, length, dtype)[:n]
        return row

    for peer in range(ctx.num_ranks):
        for kind in (LOAD, STORE, GET, PUT):
            want = expected(peer, OTHER if kind == LOAD else UNTOUCHED)
            assert torch.equal(dst[kind, peer].cpu(), want), (kind, peer, dst[kind, peer], want)
        for from_ in range(ctx.num_ranks):
            assert torch.equal(copied[peer, from_].cpu(), expected(from_, UNTOUCHED)), (peer, from_)


def _moves(ctx, dtype):
    for via_context in (False, True):
        for length, masked in ((1, False), (BLOCK, False), (BLOCK, True)):
            _check_moves(ctx, dtype, via_context, length, masked)


@pytest.mark.four
@pytest.mark.parametrize("world_size, dtype", CASES, ids=str)
def test_moves_between_all_pairs_of_ranks(world_size, dtype):
    run_ranks(world_size, _moves, dtype)


@triton.jit
def _modifiers_kernel(src, dst, rank, peer, ctx_ptr, N: tl.constexpr, WORLD: tl.constexpr):
    ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD)
    i = tl.arange(0, N)
    value = ctx.load(src + i, peer, cache_modifier=".cg") * 0 + ctx.load(src + i, peer, volatile=True)
    ctx.store(dst + i, value, peer, cache_modifier=".wt")
    ctx.get(src + i, dst + N + i, peer, load_cache_modifier=".cv", store_cache_modifier=".cs")
    ctx.put(src + i, dst + 2 * N + i, peer, load_cache_modifier=".ca", store_cache_modifier=".wb")
    ctx.copy(src + i, dst + 3 * N + i, rank, peer, load_cache_modifier=".cg", store_cache_modifier=".cg")


def _cache_modifiers(ctx):
    peer = (ctx.cur_rank + 1) % ctx.num_ranks
    before = (ctx.cur_rank - 1) % ctx.num_ranks
    src = ctx.empty(BLOCK, dtype=torch.float32).copy_(_pattern(ctx.cur_rank, BLOCK, torch.float32))
    dst = ctx.zeros(4, BLOCK)
    ctx.barrier()
    _modifiers_kernel[(1,)](src, dst, ctx.cur_rank, peer, ctx.get_device_context(), N=BLOCK, WORLD=ctx.num_ranks)
    ctx.barrier()
    came_from = [ctx.cur_rank, peer, before, before]  # the first: read here by `before`, and stored back here
    for row, rank in zip(dst.cpu(), came_from, strict=True):
        assert torch.equal(row, _pattern(rank, BLOCK, torch.float32)), (row, rank)


@pytest.mark.parametrize("world_size", WORLDS)
def test_cache_modifiers_change_no_value(world_size):
    run_ranks(world_size, _cache_modifiers)


@triton.jit
def _far_kernel(src, dst, rank, to, bases, offset, N: tl.constexpr):
    i = tl.arange(0, N)
    iris.put(src + i, dst + offset.to(tl.int64) + i, rank, to, bases)


@triton.jit
def _either_order_kernel(src, dst, rank, bases, rows, columns, R: tl.constexpr, C: tl.constexpr, WORLD: tl.constexpr):
    """dst [2, WORLD, R, C]: what each peer has, by both orders of the two ranks."""
    m, n = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    at, mask = m * C + n, (m < rows) & (n < columns)
    for peer in range(WORLD):
        caller_last, caller_first = dst + peer * R * C, dst + (WORLD + peer) * R * C
        iris.get(src + at, caller_last + at, peer, rank, bases, mask=mask)
        iris.get(src + at, caller_first + at, rank, peer, bases, mask=mask)
        if rows == 1:  # a single element by a scalar
            iris.get(src, caller_first, rank, peer, bases)


def _either_order(ctx, dtype, rows):
    R, C = 8, 16
    src = ctx.empty(R, C, dtype=dtype).copy_(_pattern(ctx.cur_rank, R * C, dtype).view(R, C))
    dst = ctx.full((2, ctx.num_ranks, R, C), UNTOUCHED, dtype=dtype)
    ctx.barrier()
    _either_order_kernel[(1,)](src, dst, ctx.cur_rank, ctx.get_heap_bases(), rows, 11, R=R, C=C, WORLD=ctx.num_ranks)
    ctx.barrier()
    for order in range(2):
        for peer in range(ctx.num_ranks):
            want = torch.full((R, C), UNTOUCHED, dtype=dtype)
            want[:rows, :11] = _pattern(peer, R * C, dtype).view(R, C)[:rows, :11]
            assert torch.equal(dst[order, peer].cpu(), want), (order, peer, dst[order, peer])
    return ctx.get_heap_bases().tolist()


@pytest.mark.some(4)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("world_size", WORLDS)
def test_get_takes_its_two_ranks_in_either_order(world_size, dtype):
    for rows in (1, 5):
        run_ranks(world_size, _either_order, dtype, rows)


@triton.jit
def _hints_kernel(src, dst, rank, peer, ctx_ptr, bases, R: tl.constexpr, C: tl.constexpr, WORLD: tl.constexpr):
    """dst [6, R, C]: by each function that moves data, with hints for one and for two dimensions."""
    ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD)
    flat, tile = tl.arange(0, R * C), tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    size: tl.constexpr = R * C
    tl.store(dst + flat, ctx.load(src + flat, peer, hint=16))
    tl.store(dst + size + tile, iris.load(src + tile, rank, peer, bases, hint=(1, 16)))
    ctx.get(src + flat, dst + 2 * size + flat, peer, hint=C)
    iris.get(src + tile, dst + 3 * size + tile, rank, peer, bases, hint=(1, C))
    ctx.put(src + tile, dst + 4 * size + tile, peer, hint=(1, 16))
    ctx.store(dst + 5 * size + flat, tl.load(src + flat), peer, hint=16)
    ctx.atomic_add(dst + 5 * size + flat, tl.load(src + flat), peer, hint=16)
    iris.copy(src + tile, dst + 6 * size + tile, peer, peer, rank, bases, hint=(1, 16))


def _hints(ctx):
    R, C = 4, 16
    peer, before = (ctx.cur_rank + 1) % ctx.num_ranks, (ctx.cur_rank - 1) % ctx.num_ranks
    src = ctx.empty(R * C, dtype=torch.int32).copy_(_pattern(ctx.cur_rank, R * C, torch.int32))
    dst = ctx.full((7, R * C), UNTOUCHED, dtype=torch.int32)
    ctx.barrier()
    _hints_kernel[(1,)](
        src, dst, ctx.cur_rank, peer, ctx.get_device_context(), ctx.get_heap_bases(), R=R, C=C, WORLD=ctx.num_ranks
    )
    ctx.barrier()
    own, theirs, sent = (_pattern(rank, R * C, torch.int32) for rank in (ctx.cur_rank, peer, before))
    for row, want in zip(dst.cpu(), (theirs, theirs, theirs, theirs, sent, 2 * sent, own), strict=True):
        assert torch.equal(row, want), (row, want)


@pytest.mark.parametrize("world_size", WORLDS)
def test_hints_change_no_value(world_size):
    run_ranks(world_size, _hints)
