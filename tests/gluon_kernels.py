"""Gluon kernels as a user would write them; test_codegen*.py looks at the assembly, test_gluon.py runs them."""

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
    ctx.atomic_add(flags + 8 * BLOCK, ctx.rank + 10 * ctx.world_size, peer, sem="release", scope="gpu")
