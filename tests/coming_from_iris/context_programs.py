"""Kernels with `DeviceContext`, by its names old and new, and tracing."""

import iris
from iris import Context, DeviceContext
import torch
import triton
import triton.language as tl


@triton.jit
def _ring(context_tensor, src, dst, rank: tl.constexpr, world_size: tl.constexpr, BLOCK: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor, rank, world_size)
    offsets = tl.arange(0, BLOCK)
    data = ctx.load(src + offsets, from_rank=(rank + 1) % world_size, mask=offsets < BLOCK)
    tl.store(dst + offsets, data)


def load_by_a_device_context():
    shmem = iris.iris(1 << 20)
    src, dst = shmem.full((16,), shmem.cur_rank), shmem.zeros(16, dtype=torch.int64)
    shmem.barrier()
    _ring[(1,)](shmem.get_device_context(), src, dst, shmem.cur_rank, shmem.num_ranks, BLOCK=16)
    shmem.barrier()
    assert dst.tolist() == [(shmem.cur_rank + 1) % shmem.num_ranks] * 16
    shmem.barrier()


@triton.jit
def _scatter(context_tensor, src, dst, count, rank: tl.constexpr, world_size: tl.constexpr, BLOCK: tl.constexpr):
    ctx = Context.initialize(context_tensor, rank, world_size)
    offsets = tl.arange(0, BLOCK)
    for to in range(world_size):
        ctx.store(dst + rank * BLOCK + offsets, tl.load(src + offsets), to_rank=to, hint=16)
        ctx.atomic_add(count, 1, to_rank=to, sem="release", scope="sys")


def scatter_by_a_context():
    shmem = iris.iris(1 << 20)
    n = shmem.num_ranks
    src, dst = shmem.full((16,), float(shmem.cur_rank)), shmem.zeros((n, 16))
    count = shmem.zeros((1,), dtype=torch.int32)
    shmem.barrier()
    _scatter[(1,)](shmem.get_device_context(), src, dst, count, shmem.cur_rank, n, BLOCK=16)
    shmem.barrier()
    assert count.item() == n and dst[:, 7].tolist() == [float(i) for i in range(n)]
    shmem.barrier()


@triton.jit
def _get_put(context_tensor, src, got, given, rank: tl.constexpr, world_size: tl.constexpr, R: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor, rank, world_size)
    rows, cols = tl.arange(0, R), tl.arange(0, 16)
    tile = rows[:, None] * 16 + cols[None, :]
    after = (rank + 1) % world_size
    ctx.get(src + tile, got + tile, from_rank=after, hint=(1, 16))
    ctx.put(src + tile, given + tile, to_rank=after, hint=(1, 16))


def tiles_by_get_and_put():
    shmem = iris.iris(1 << 20)
    rank, n = shmem.cur_rank, shmem.num_ranks
    src, got, given = shmem.full((8, 16), rank), shmem.full((8, 16), -1), shmem.full((8, 16), -1)
    shmem.barrier()
    _get_put[(1,)](shmem.get_device_context(), src, got, given, rank, n, R=8)
    shmem.barrier()
    assert (got == (rank + 1) % n).all() and (given == (rank - 1) % n).all()
    shmem.barrier()


@triton.jit
def _traced(context_tensor, buffer, cur_rank: tl.constexpr, num_ranks: tl.constexpr, TRACING: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor, cur_rank, num_ranks, tracing=TRACING)
    mask = tl.full([64], True, dtype=tl.int1)
    handle = ctx.tracing.record_event_start(
        event_id=iris.TraceEvent().put,
        target_rank=(cur_rank + 1) % num_ranks,
        address=buffer + tl.arange(0, 64),
        pid_m=tl.program_id(0),
        pid_n=0,
        mask=mask,
    )
    ctx.put(buffer + tl.arange(0, 64), buffer + 64 + tl.arange(0, 64), (cur_rank + 1) % num_ranks)
    ctx.tracing.record_event_end(handle)


def a_traced_kernel():
    shmem = iris.iris(1 << 20)
    shmem.tracing.enable(max_events=1000)
    buffer = shmem.ones(128, dtype=torch.float32)
    shmem.barrier()
    _traced[(1,)](shmem.get_device_context(), buffer, shmem.cur_rank, shmem.num_ranks, TRACING=True)
    shmem.barrier()
    assert shmem.tracing.trace_counter.item() == 1 <= shmem.tracing.max_events
    shmem.tracing.reset()
    assert shmem.tracing.trace_counter.item() == 0
    shmem.barrier()
