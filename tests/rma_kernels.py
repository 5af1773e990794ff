"""Kernels that use the RMA functions as a user would; compiled and inspected by test_codegen.py."""

import triton
import triton.language as tl

import iris
from iris.device import sync


@triton.jit
def store_kernel(src, dst, words, heap_bases, rank, peer, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    iris.store(dst + offsets, tl.load(src + offsets, mask=inside), rank, peer, heap_bases, mask=inside)


@triton.jit
def load_kernel(src, dst, words, heap_bases, rank, peer, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    tl.store(dst + offsets, iris.load(src + offsets, rank, peer, heap_bases, mask=inside), mask=inside)


@triton.jit
def put_and_signal_kernel(src, dst, words, flags, rank, peer, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(words, rank, WORLD_SIZE)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ctx.put(src + offsets, dst + offsets, peer, mask=offsets < n)
    sync.signal(ctx, flags + tl.program_id(0), 1, peer)
    sync.wait(ctx, flags + tl.program_id(0), 1, peer, 0)


ALL = {"rma_store": store_kernel, "rma_load": load_kernel, "rma_put_and_signal": put_and_signal_kernel}
