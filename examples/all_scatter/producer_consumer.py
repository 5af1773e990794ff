"""Product and scatter at once: a kernel on each of two streams, and a flag a tile between them.

The consumer takes some multiprocessors from the producer, and both must be resident, since one waits for the other.
On CPUs, where there are no streams, the consumer runs after the producer.

    python -m examples.all_scatter.producer_consumer
"""

import iris
from iris.device import sync
import torch
import triton
import triton.language as tl

from examples.all_scatter import common
from examples.all_scatter.common import USER, Case, move_tile, store_tile, tile_product


@triton.jit
def producer_kernel(
    a, b, out, flags, sync_words, ctx_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Compute this rank's columns of out, and set flags [tiles] to the call's epoch."""
    ctx = iris.DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE)
    epoch = sync.next_epoch(sync_words)  # the consumer advances it, when it has all tiles
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        acc, row, col = tile_product(a, b, tile, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M)
        store_tile(ctx, out, acc, row, col, M, N, BLOCK_M, BLOCK_N)
        sync.signal(ctx, flags + tile, epoch, ctx.rank)


@triton.jit
def consumer_kernel(
    a, b, out, flags, sync_words, ctx_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Push each tile to every peer once the producer has finished it."""
    ctx = iris.DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE)
    epoch = sync.enter(ctx, sync_words)
    ok = sync.await_entered(ctx, sync_words, epoch, USER)  # before that, a peer may still read its out
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        ok = sync.wait(ctx, flags + tile, epoch, ctx.rank) & ok
        if ok:
            move_tile(ctx, out, tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    sync.leave(ctx, sync_words, epoch, ok, USER, TOGETHER=True)


def all_scatter(case: Case) -> None:
    consumers = case.grid(case.blocks.movers)
    producers = case.grid(max(1, case.programs - consumers[0]))
    if case.ctx.device.type == "cpu":
        producer_kernel[producers](**case.args())
        consumer_kernel[consumers](**case.args())
        return
    first, second = torch.cuda.current_stream(), case.second_stream
    second.wait_stream(first)
    producer_kernel[producers](**case.args())  # first, so that it is right too where the two end up in one queue
    with torch.cuda.stream(second):
        consumer_kernel[consumers](**case.args())
    first.wait_stream(second)


def main() -> None:
    common.run(all_scatter)


if __name__ == "__main__":
    main()
