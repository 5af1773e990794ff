"""Message passing by load and store: one rank fetches what another announces, and stores its answer there.

The owner only says that its data is ready. The worker loads it from the owner's memory and stores the result into the
owner's memory; the signals before and after are what orders the two.

    python -m examples.message_passing_load_store
"""

import iris
from iris.device import sync
from iris_tp import launch
import torch
import triton
import triton.language as tl

OWNER, WORKER = tl.constexpr(0), tl.constexpr(1)
READY, DONE = tl.constexpr(0), tl.constexpr(1)  # flags


@triton.jit
def owner_kernel(ctx_ptr, x, answer, total, flags, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Fill x [n], announce it, wait for answer [n] and add it up."""
    ctx = iris.DeviceContext.initialize(ctx_ptr, OWNER, WORLD_SIZE)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(x + offsets, offsets.to(tl.float32), mask=mask)
    sync.signal(ctx, flags + READY, 1, WORKER)
    if sync.wait(ctx, flags + DONE, 1, WORKER):
        tl.store(total, tl.sum(tl.load(answer + offsets, mask=mask, other=0.0)))


@triton.jit
def worker_kernel(ctx_ptr, heap_bases, x, answer, flags, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Double the owner's x into the owner's answer."""
    ctx = iris.DeviceContext.initialize(ctx_ptr, WORKER, WORLD_SIZE)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    if sync.wait(ctx, flags + READY, 1, OWNER):
        values = iris.load(x + offsets, WORKER, OWNER, heap_bases, mask=mask)
        iris.store(answer + offsets, 2 * values, WORKER, OWNER, heap_bases, mask=mask)
        sync.signal(ctx, flags + DONE, 1, OWNER)


def rank_main(n: int = 1000) -> None:
    with iris.iris(heap_size=1 << 24) as ctx:
        x, answer = ctx.zeros(n), ctx.zeros(n)
        flags = ctx.zeros(2, dtype=torch.int32)
        total = torch.zeros(1, device=ctx.device)
        ctx.barrier()
        context, how = ctx.get_device_context(), dict(WORLD_SIZE=ctx.num_ranks, BLOCK=1024)
        if ctx.cur_rank == OWNER.value:
            owner_kernel[(1,)](context, x, answer, total, flags, n, **how)
        elif ctx.cur_rank == WORKER.value:
            worker_kernel[(1,)](context, ctx.get_heap_bases(), x, answer, flags, n, **how)
        ctx.barrier()
        if ctx.cur_rank == OWNER.value:
            assert total.item() == n * (n - 1)
            ctx.info(f"the worker doubled {n} numbers; they add up to {total.item():.0f}")


def main() -> None:
    launch.run(rank_main, 2)


if __name__ == "__main__":
    main()
