"""Gluon kernels as a user would write them; test_codegen*.py looks at the assembly, test_gluon.py runs them."""

import iris
from iris.device import sync, tracing
import iris.experimental.iris_gluon as iris_gl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def gluon_put_and_signal_kernel(src, dst, ctx_ptr, flags, peer, n, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    ctx = iris_gl.IrisDeviceCtx.initialize(ctx_ptr)
    offsets = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=LAYOUT)
    ctx.put(src + offsets, dst + offsets, peer, mask=offsets < n)
    sync.signal(ctx, flags + gl.program_id(0), 1, peer)
    sync.wait(ctx, flags + gl.program_id(0), 1, peer)


@gluon.jit
def gluon_copies_kernel(src, dst, ctx_ptr, peer, n, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """Four ways into dst [4, n]: a store of what was loaded at the peer, a get, a put, a copy within the peer."""
    ctx = iris_gl.IrisDeviceCtx.initialize(ctx_ptr)
    offsets = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=LAYOUT)
    mask = offsets < n
    values = ctx.load(src + offsets, peer, mask=mask, other=0.0)
    ctx.store(dst + offsets, values, peer, mask=mask)
    ctx.get(src + offsets, dst + n + offsets, peer, mask=mask)
    ctx.put(src + offsets, dst + 2 * n + offsets, peer, mask=mask)
    ctx.copy(src + offsets, dst + 3 * n + offsets, peer, peer, mask=mask)


@gluon.jit
def gluon_recorded_put_kernel(src, dst, ctx_ptr, peer, n, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    ctx = iris_gl.IrisDeviceCtx.initialize(ctx_ptr, tracing=True)
    offsets = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=LAYOUT)
    mask = offsets < n
    span = ctx.tracing.record_event_start(tracing.PUT, peer, dst + offsets, gl.program_id(0), mask=mask)
    ctx.put(src + offsets, dst + offsets, peer, mask=mask)
    ctx.tracing.record_event_end(span)


@gluon.jit
def gluon_atomics_kernel(flags, ctx_ptr, peer, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """flags: int32 [9, BLOCK] at the peer; each row meets one atomic with the offset as operand."""
    ctx = iris_gl.IrisDeviceCtx.initialize(ctx_ptr)
    i = gl.arange(0, BLOCK, layout=LAYOUT)
    mask = i < BLOCK - 1
    ctx.atomic_add(flags + i, i, peer, mask=mask)
    ctx.atomic_xchg(flags + BLOCK + i, i, peer, mask=mask, sem="relaxed")
    ctx.atomic_xor(flags + 2 * BLOCK + i, i, peer, mask=mask)
    ctx.atomic_and(flags + 3 * BLOCK + i, i, peer, mask=mask)
    ctx.atomic_or(flags + 4 * BLOCK + i, i, peer, mask=mask)
    ctx.atomic_min(flags + 5 * BLOCK + i, i, peer, mask=mask)
    ctx.atomic_max(flags + 6 * BLOCK + i, i, peer, mask=mask)
    ctx.atomic_cas(flags + 7 * BLOCK + i, i, i + 1, peer)
    ctx.atomic_add(flags + 8 * BLOCK, ctx.cur_rank + 10 * ctx.num_ranks, peer, sem="release", scope="gpu")


@gluon.jit
def gluon_tiles_kernel(
    ctx_ptr, sync, inp, out, num_tiles, WORLD_SIZE: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    TWO_SHOT: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """All collectives on tiles of inp [num_tiles, M, N]; out [num_tiles, 2 + 2 * world, M, N]: the sum of tile i, the
    sum again on rank i % world, every rank's tile, and of every rank the r-th of these, for this is rank r.
    """
    ctx = iris.DeviceContext.initialize(ctx_ptr, gl.load(ctx_ptr).to(gl.int32), WORLD_SIZE)
    tiles = iris.tiles.open_tiles(ctx, sync)
    m, n = gl.arange(0, M, layout=gl.SliceLayout(1, LAYOUT)), gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT))
    at = m[:, None] * N + n[None, :]
    for i in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile = gl.load(inp + i * M * N + at)
        result = out + i * (2 + 2 * WORLD_SIZE) * M * N + at
        total = tiles.all_reduce(tile, 4 * i, two_shot=TWO_SHOT)
        gl.store(result, total.to(out.dtype.element_ty))
        total = tiles.reduce_scatter(tile, 4 * i + 1, i % WORLD_SIZE)
        gl.store(result + M * N, total.to(out.dtype.element_ty), mask=(at >= 0) & (ctx.rank == i % WORLD_SIZE))
        tiles.all_gather(tile, 4 * i + 2, result + 2 * M * N, M * N)
        tiles.all_to_all(result + 2 * M * N, M * N, 4 * i + 3, result + (2 + WORLD_SIZE) * M * N, M * N)
    tiles.close()
