"""Product and scatter in one kernel, by different programs: most multiply, the last few only move finished tiles.

A multiplying program never waits for the link; in exchange the movers' multiprocessors are lost to the product, and
each tile is read once more. The movers are the last programs, so that where programs run one after the other, in the
interpreter, the tiles are there before they are waited for.

    python -m examples.all_scatter.fused_specialized
"""

import iris
from iris.device import sync
import triton
import triton.language as tl

from examples.all_scatter import common
from examples.all_scatter.common import USER, Case, move_tile, store_tile, tile_product


@triton.jit
def specialized_kernel(
    a, b, out, flags, sync_words, ctx_ptr, M, N, K, MOVERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Compute this rank's columns of every rank's out: MOVERS programs push tiles, the others multiply.

    flags [tiles] of this rank are set to the call's epoch as its tiles are finished.
    """
    ctx = iris.DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE)
    epoch = sync.enter(ctx, sync_words)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    multipliers = tl.num_programs(0) - MOVERS
    ok = True
    if tl.program_id(0) < multipliers:
        for tile in range(tl.program_id(0), tiles, multipliers):
            acc, row, col = tile_product(a, b, tile, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M)
            store_tile(ctx, out, acc, row, col, M, N, BLOCK_M, BLOCK_N)
            sync.signal(ctx, flags + tile, epoch, ctx.rank)
    else:
        ok = sync.await_entered(ctx, sync_words, epoch, USER)  # before that, a peer may still read its out
        for tile in range(tl.program_id(0) - multipliers, tiles, MOVERS):
            ok = sync.wait(ctx, flags + tile, epoch, ctx.rank) & ok
            if ok:
                move_tile(ctx, out, tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    sync.leave(ctx, sync_words, epoch, ok, USER, TOGETHER=True)


def all_scatter(case: Case) -> None:
    movers = min(case.blocks.movers, case.tiles)
    multipliers = min(case.tiles, max(1, case.programs - movers))
    specialized_kernel[(multipliers + movers,)](**case.args(), MOVERS=movers)


def main() -> None:
    common.run(all_scatter)


if __name__ == "__main__":
    main()
