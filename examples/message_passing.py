"""Messages and signals inside a kernel: two ranks pass a vector to and fro, and each adds one to it.

The host is not involved between the passes. A signal makes the stores before it visible to whoever waits for it, and a
wait is bounded: if the other rank is lost, the kernel ends and the next host call raises.

    python -m examples.message_passing
"""

import iris
from iris.device import sync
from iris_tp import launch
import torch
import triton
import triton.language as tl


@triton.jit
def play_kernel(ctx_ptr, ball, flag, n, passes, RANK: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Pass ball [n] back and forth `passes` times; rank 0 begins.

    flag: one int32, the number of passes that have arrived here.
    """
    ctx = iris.DeviceContext.initialize(ctx_ptr, RANK, WORLD_SIZE)
    other = 1 - ctx.rank
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    for i in range(1, passes + 1):
        if i % 2 != RANK:  # this rank's turn to pass
            tl.store(ball + offsets, tl.load(ball + offsets, mask=mask) + 1, mask=mask)
            ctx.put(ball + offsets, ball + offsets, other, mask=mask)
            sync.signal(ctx, flag, i, other)
        else:
            sync.wait(ctx, flag, i, other)


def rank_main(passes: int = 6, n: int = 1000) -> None:
    with iris.iris(heap_size=1 << 24) as ctx:
        ball = ctx.zeros(n)
        flag = ctx.zeros(1, dtype=torch.int32)
        ctx.barrier()
        if ctx.cur_rank < 2:
            context = ctx.get_device_context()
            play_kernel[(1,)](context, ball, flag, n, passes, RANK=ctx.cur_rank, WORLD_SIZE=ctx.num_ranks, BLOCK=1024)
        ctx.barrier()
        if ctx.cur_rank < 2:
            assert ball.eq(passes).all(), ball
            ctx.info(f"after {passes} passes every element is {ball[0]:.0f}; {flag.item()} was the last to arrive here")


def main() -> None:
    launch.run(rank_main, 2)


if __name__ == "__main__":
    main()
