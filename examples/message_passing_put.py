"""Message passing by put: rank 0 produces blocks, and a program on rank 1 works on each as soon as it has come.

python -m examples.message_passing_put
"""

import iris
from iris.device import sync
from iris_tp import launch
import torch
import triton
import triton.language as tl


@triton.jit
def producer_kernel(ctx_ptr, heap_bases, x, inbox, flags, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store a block of x [n] in rank 1's inbox [n], then set the block's flag."""
    ctx = iris.DeviceContext.initialize(ctx_ptr, 0, WORLD_SIZE)
    block = tl.program_id(0)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    iris.put(x + offsets, inbox + offsets, 0, 1, heap_bases, mask=offsets < n)
    sync.signal(ctx, flags + block, 1, 1)


@triton.jit
def consumer_kernel(ctx_ptr, inbox, squares, flags, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Wait for a block, then square it."""
    ctx = iris.DeviceContext.initialize(ctx_ptr, 1, WORLD_SIZE)
    block = tl.program_id(0)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    if sync.wait(ctx, flags + block, 1, 0):
        values = tl.load(inbox + offsets, mask=mask)
        tl.store(squares + offsets, values * values, mask=mask)


def rank_main(n: int = 1000, block: int = 128) -> None:
    with iris.iris(heap_size=1 << 24) as ctx:
        blocks = triton.cdiv(n, block)
        x = torch.arange(n, dtype=torch.float32, device=ctx.device)
        inbox = ctx.zeros(n)
        flags = ctx.zeros(blocks, dtype=torch.int32)
        squares = torch.zeros(n, device=ctx.device)
        ctx.barrier()
        how = dict(WORLD_SIZE=ctx.num_ranks, BLOCK=block)
        if ctx.cur_rank == 0:
            producer_kernel[(blocks,)](ctx.get_device_context(), ctx.get_heap_bases(), x, inbox, flags, n, **how)
        elif ctx.cur_rank == 1:
            consumer_kernel[(blocks,)](ctx.get_device_context(), inbox, squares, flags, n, **how)
        ctx.barrier()
        if ctx.cur_rank == 1:
            assert torch.equal(squares, x * x)
            ctx.info(f"{blocks} blocks came and were squared; the last value is {squares[-1]:.0f}")


def main() -> None:
    launch.run(rank_main, 2)


if __name__ == "__main__":
    main()
