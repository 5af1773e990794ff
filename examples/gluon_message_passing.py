"""Message passing in Gluon, Triton's language with explicit layouts: two ranks pass a vector to and fro.

The same game as `examples.message_passing`; here the kernel says which thread holds which elements, and the remote
copies follow that layout: 4 floats a thread make accesses of 16 bytes. Gluon has no interpreter, so this needs two
GPUs; without, it says so and ends.

    python -m examples.gluon_message_passing
"""

from iris import platform
from iris.device import sync
import iris.experimental.iris_gluon as iris_gl
from iris_tp import launch
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WARPS = 4


@gluon.jit
def play_kernel(ctx_ptr, ball, flag, n, passes, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """Pass ball [n] back and forth `passes` times; rank 0 begins.

    flag: one int32, the number of passes that have arrived here.
    """
    ctx = iris_gl.IrisDeviceCtx.initialize(ctx_ptr)
    other = 1 - ctx.rank
    offsets = gl.arange(0, BLOCK, layout=LAYOUT)
    mask = offsets < n
    for i in range(1, passes + 1):
        if i % 2 != ctx.rank:  # this rank's turn to pass
            gl.store(ball + offsets, gl.load(ball + offsets, mask=mask) + 1, mask=mask)
            ctx.put(ball + offsets, ball + offsets, other, mask=mask)
            sync.signal(ctx, flag, i, other)
        else:
            sync.wait(ctx, flag, i, other)


def rank_main(passes: int = 6, n: int = 1000) -> None:
    with iris_gl.iris(heap_size=1 << 24) as ctx:
        ball = ctx.zeros(n)
        flag = ctx.zeros(1, dtype=torch.int32)
        ctx.barrier()
        if ctx.cur_rank < 2:
            threads = torch.cuda.get_device_properties(ctx.device).warp_size
            layout = gl.BlockedLayout(size_per_thread=[4], threads_per_warp=[threads], warps_per_cta=[WARPS], order=[0])
            context = ctx.get_device_context()
            play_kernel[(1,)](context, ball, flag, n, passes, BLOCK=1024, LAYOUT=layout, num_warps=WARPS)
        ctx.barrier()
        if ctx.cur_rank < 2:
            assert ball.eq(passes).all(), ball
            ctx.info(f"after {passes} passes every element is {ball[0]:.0f}; {flag.item()} was the last to arrive here")


def main() -> None:
    if torch.cuda.device_count() < (1 if platform.sharing_gpus() else 2):
        print("skipped: Gluon kernels need a GPU, and this example two; examples.message_passing runs anywhere")
        return
    launch.run(rank_main, 2)


if __name__ == "__main__":
    main()
