"""Kernels around a copy between heaps in a stream: a wait for a flag before it, a signal after it."""

import triton
import triton.language as tl

from . import atomics, sync, waits
from .context import own_context


@triton.jit
def wait_kernel(ctx_ptr, flag, value, peer, WORLD_SIZE: tl.constexpr):
    """Wait until this rank's `flag` has reached `value`, which `peer` signals."""
    sync.wait(own_context(ctx_ptr, WORLD_SIZE), flag, value, peer)


@triton.jit
def signal_kernel(ctx_ptr, flag, value, to_rank, WORLD_SIZE: tl.constexpr):
    """Add `value` to `flag` at `to_rank`, unless a wait of this rank has failed."""
    ctx = own_context(ctx_ptr, WORLD_SIZE)
    if waits.healthy(ctx):
        atomics.atomic_add(flag, value, ctx.rank, to_rank, ctx.heap_bases(), sem="release", scope="sys")
