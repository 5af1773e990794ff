"""Kernels that use the RMA functions as a user would, and broken ones; compiled and inspected by test_codegen*.py."""

import iris
from iris.device import arch, sync, tracing
import triton
import triton.language as tl


@triton.jit
def store_kernel(src, dst, ctx_ptr, heap_bases, rank, peer, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    iris.store(dst + offsets, tl.load(src + offsets, mask=inside), rank, peer, heap_bases, mask=inside)


@triton.jit
def load_kernel(src, dst, ctx_ptr, heap_bases, rank, peer, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    tl.store(dst + offsets, iris.load(src + offsets, rank, peer, heap_bases, mask=inside), mask=inside)


@triton.jit
def context_get_kernel(src, dst, ctx_ptr, heap_bases, rank, peer, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ctx.get(src + offsets, dst + offsets, peer, mask=offsets < n)


@triton.jit
def get_kernel(src, dst, ctx_ptr, heap_bases, rank, peer, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0) * 2 + tl.arange(0, 2)[:, None], tl.arange(0, BLOCK // 2)[None, :]
    offsets = row * (BLOCK // 2) + lane
    iris.get(src + offsets, dst + offsets, rank, peer, heap_bases, mask=offsets < n)


@triton.jit
def volatile_load_kernel(src, dst, ctx_ptr, heap_bases, rank, peer, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = iris.load(src + offsets, rank, peer, heap_bases, offsets < n, cache_modifier=".cg", volatile=True)
    tl.store(dst + offsets, value, mask=offsets < n)


@triton.jit
def hinted_store_kernel(src, dst, ctx_ptr, flags, rank, peer, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Goes to rows that a table names, which the compiler cannot know to be whole."""
    ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE)
    lane = tl.arange(0, BLOCK)
    row = tl.load(flags + lane // 16)
    ctx.store(dst + row * 16 + lane % 16, tl.load(src + lane), peer, hint=16)


@triton.jit
def tiles_kernel(src, dst, ctx_ptr, flags, rank, peer, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """`flags` is the space."""
    ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE)
    tiles = iris.tiles.open_tiles(ctx, flags)
    offsets = tl.arange(0, BLOCK)
    for number in range(tl.program_id(0), n, tl.num_programs(0)):
        tile = tl.load(src + number * BLOCK + offsets)
        total = tiles.all_reduce(tile, 2 * number)
        tiles.all_gather(total, 2 * number + 1, dst + number * BLOCK + offsets, n * BLOCK, None, tl.bfloat16)
    tiles.close()


@triton.jit
def put_and_signal_kernel(src, dst, ctx_ptr, flags, rank, peer, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ctx.put(src + offsets, dst + offsets, peer, mask=offsets < n)
    sync.signal(ctx, flags + tl.program_id(0), 1, peer)
    sync.wait(ctx, flags + tl.program_id(0), 1, peer)


@triton.jit
def recorded_put_kernel(src, dst, ctx_ptr, rank, peer, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE, tracing=True)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    span = ctx.tracing.record_event_start(tracing.PUT, peer, dst + offsets, tl.program_id(0), mask=offsets < n)
    ctx.put(src + offsets, dst + offsets, peer, mask=offsets < n)
    ctx.tracing.record_event_end(span)


# --- each lacks one thing that assembly.py looks for -----------------------------------------------------------------


@triton.jit
def no_barrier_kernel(src, dst, ctx_ptr, flags, rank, peer, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ctx.put(src + offsets, dst + offsets, peer, mask=offsets < n)
    ctx.atomic_xchg(flags, 1, peer, sem="release")


@triton.jit
def late_store_kernel(src, dst, ctx_ptr, flags, rank, peer, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    data = tl.load(src + offsets, mask=offsets < n)
    arch.drain_stores()
    tl.debug_barrier()
    ctx.store(dst + offsets, data, peer)
    ctx.atomic_xchg(flags, 1, peer, sem="release")


@triton.jit
def gpu_scope_kernel(src, dst, ctx_ptr, flags, rank, peer, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE)
    arch.drain_stores()
    tl.debug_barrier()
    ctx.atomic_xchg(flags, 1, peer, sem="release", scope="gpu")


@triton.jit
def endless_wait_kernel(src, dst, ctx_ptr, flags, rank, peer, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    while tl.atomic_add(flags, 0, sem="acquire", scope="sys") == 0:
        pass


@triton.jit
def narrow_store_kernel(src, dst, ctx_ptr, flags, rank, peer, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    base = tl.load(ctx_ptr + 8 + peer) - tl.load(ctx_ptr + 8 + rank)
    remote = ((dst + offsets).to(tl.int64, bitcast=True) + base).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    tl.store(remote, tl.load(src + offsets, mask=offsets < n), mask=offsets < n)
