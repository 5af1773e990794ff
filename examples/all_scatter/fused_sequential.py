"""Product and scatter in one kernel: a program pushes each tile as soon as it has it, then computes the next.

Nothing is read back and nothing is signalled. A program that pushes does not multiply, but others do meanwhile.

    python -m examples.all_scatter.fused_sequential
"""

import iris
from iris.device import sync
import triton
import triton.language as tl

from examples.all_scatter import common
from examples.all_scatter.common import USER, Case, push, store_tile, tile_product


@triton.jit
def fused_kernel(
    a, b, out, flags, sync_words, ctx_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Compute this rank's columns of every rank's out."""
    ctx = iris.DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE)
    epoch = sync.enter(ctx, sync_words)
    ok = True
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        acc, row, col = tile_product(a, b, tile, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M)
        pointers, values, mask = store_tile(ctx, out, acc, row, col, M, N, BLOCK_M, BLOCK_N)
        if tile == tl.program_id(0):  # before that, a peer may still read its out
            ok = sync.await_entered(ctx, sync_words, epoch, USER)
        if ok:
            push(ctx, pointers, values, mask)
    sync.leave(ctx, sync_words, epoch, ok, USER, TOGETHER=True)


def all_scatter(case: Case) -> None:
    fused_kernel[case.grid()](**case.args())


def main() -> None:
    common.run(all_scatter)


if __name__ == "__main__":
    main()
