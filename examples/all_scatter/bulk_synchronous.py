"""Product, then scatter: two kernels in one stream. While one resource works, the other rests.

python -m examples.all_scatter.bulk_synchronous
"""

import iris
from iris.device import sync
import triton
import triton.language as tl

from examples.all_scatter import common
from examples.all_scatter.common import USER, Case, move_tile, store_tile, tile_product


@triton.jit
def product_kernel(
    a, b, out, flags, sync_words, ctx_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Compute this rank's columns of out."""
    ctx = iris.DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE)
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        acc, row, col = tile_product(a, b, tile, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M)
        store_tile(ctx, out, acc, row, col, M, N, BLOCK_M, BLOCK_N)


@triton.jit
def scatter_kernel(
    a, b, out, flags, sync_words, ctx_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Push this rank's columns to every peer."""
    ctx = iris.DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE)
    epoch = sync.enter(ctx, sync_words)
    ok = sync.await_entered(ctx, sync_words, epoch, USER)  # before that, a peer may still read its out
    if ok:
        for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
            move_tile(ctx, out, tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    sync.leave(ctx, sync_words, epoch, ok, USER, TOGETHER=True)


def all_scatter(case: Case) -> None:
    product_kernel[case.grid()](**case.args())
    scatter_kernel[case.grid()](**case.args())


def main() -> None:
    common.run(all_scatter)


if __name__ == "__main__":
    main()
