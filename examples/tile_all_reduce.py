"""A matrix product and its all-reduce or reduce-scatter in one kernel of one's own: a tile is summed when it is done.

`iris.tiles` has the exchange: a tile goes to every rank, or to the one that owns its rows, theirs come back, and nobody
sees a flag.

    python -m examples.tile_all_reduce
"""

import iris
from iris_tp import launch
import torch
import triton
import triton.language as tl


@triton.jit
def tile_matmul_kernel(
    ctx_ptr, space, a, b, out, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WORLD_SIZE: tl.constexpr,
    SCATTER: tl.constexpr = False, TWO_SHOT: tl.constexpr = False,
):  # fmt: skip
    """out [M,N] = sum over ranks of a [M,K] @ b [K,N]; all contiguous.

    SCATTER: out [M/w,N] is this rank's rows of it; M is a multiple of w * BLOCK_M. TWO_SHOT: the sum takes two hops.
    """
    ctx = iris.DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE)
    tiles = iris.tiles.open_tiles(ctx, space)
    across, k, rows = tl.cdiv(N, BLOCK_N), tl.arange(0, BLOCK_K), M // WORLD_SIZE
    for number in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * across, tl.num_programs(0)):
        first, owner = number // across * BLOCK_M, 0
        if SCATTER:  # the ranks' rows in turn, so that all links are busy
            owner = number // across % WORLD_SIZE
            first = owner * rows + number // across // WORLD_SIZE * BLOCK_M
        m = first + tl.arange(0, BLOCK_M)
        n = number % across * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            inside = start + k < K
            left = tl.load(a + m[:, None] * K + (start + k)[None, :], (m < M)[:, None] & inside[None, :], 0.0)
            right = tl.load(b + (start + k)[:, None] * N + n[None, :], inside[:, None] & (n < N)[None, :], 0.0)
            acc = tl.dot(left, right, acc, input_precision="ieee")
        there = (m < M)[:, None] & (n < N)[None, :]
        if SCATTER:
            total = tiles.reduce_scatter(acc, number, owner, out.dtype.element_ty)
            m, there = m - owner * rows, there & (owner == ctx.rank)
        else:
            total = tiles.all_reduce(acc, number, out.dtype.element_ty, TWO_SHOT)
        tl.store(out + m[:, None] * N + n[None, :], total.to(out.dtype.element_ty), there)
    tiles.close()


def rank_main(M: int = 100, N: int = 200, K: int = 96) -> None:
    with iris.iris(heap_size=1 << 26) as ctx:
        dtype = torch.bfloat16 if ctx.device.type == "cuda" else torch.float32
        w, rank, blocks = ctx.num_ranks, ctx.cur_rank, (64, 64, 32)
        for options in ({}, {"TWO_SHOT": True}, {"SCATTER": True}):
            rows = 2 * w * blocks[0] if "SCATTER" in options else M
            generator = torch.Generator().manual_seed(0)
            A = torch.randn(w, rows, K, generator=generator).to(ctx.device, dtype)
            B = torch.randn(w, K, N, generator=generator).to(ctx.device, dtype)
            exact = torch.bmm(A.double(), B.double()).sum(0)
            exact = exact.chunk(w)[rank] if "SCATTER" in options else exact
            out = torch.full(exact.shape, 7.0, dtype=dtype, device=ctx.device)
            number = triton.cdiv(rows, blocks[0]) * triton.cdiv(N, blocks[1])
            space = ctx.ccl.tile_space(number, blocks[0] * blocks[1], dtype)
            grid = (min(number, ctx.get_cu_count()),)  # all programs of a grid that waits run at once
            tile_matmul_kernel[grid](
                ctx.get_device_context(), space, A[rank], B[rank], out, rows, N, K, *blocks, w, **options
            )
            error = (out - exact).abs().max() / exact.abs().max()
            ctx.barrier()
            ctx.info(f"{options or 'one shot'}: out {tuple(out.shape)} {dtype}; error {error:.1e} of the largest value")
            assert error < (1e-2 if dtype is torch.bfloat16 else 1e-5)


if __name__ == "__main__":
    launch.run(rank_main)
