"""A matrix product and its all-reduce in one kernel of one's own: each finished tile is summed over the ranks at once.

`iris.tiles` has the exchange: a tile goes to every rank, theirs come back, and nobody sees a flag (python -m
examples.tile_all_reduce).
"""

import iris
from iris_tp import launch
import torch
import triton
import triton.language as tl


@triton.jit
def matmul_all_reduce_kernel(
    ctx_ptr, space, a, b, out, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """out [M,N] = sum over ranks of a [M,K] @ b [K,N]; all contiguous."""
    ctx = iris.DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE)
    tiles = iris.tiles.open_tiles(ctx, space)
    across, k = tl.cdiv(N, BLOCK_N), tl.arange(0, BLOCK_K)
    for number in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * across, tl.num_programs(0)):
        m = number // across * BLOCK_M + tl.arange(0, BLOCK_M)
        n = number % across * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            inside = start + k < K
            left = tl.load(a + m[:, None] * K + (start + k)[None, :], (m < M)[:, None] & inside[None, :], 0.0)
            right = tl.load(b + (start + k)[:, None] * N + n[None, :], inside[:, None] & (n < N)[None, :], 0.0)
            acc = tl.dot(left, right, acc, input_precision="ieee")
        total = tiles.all_reduce(acc, number, out.dtype.element_ty)
        tl.store(out + m[:, None] * N + n[None, :], total.to(out.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])
    tiles.close()


def rank_main(M: int = 100, N: int = 200, K: int = 96) -> None:
    with iris.iris(heap_size=1 << 26) as ctx:
        dtype = torch.bfloat16 if ctx.device.type == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(0)
        A = torch.randn(ctx.num_ranks, M, K, generator=generator).to(ctx.device, dtype)
        B = torch.randn(ctx.num_ranks, K, N, generator=generator).to(ctx.device, dtype)
        out, blocks = torch.empty(M, N, dtype=dtype, device=ctx.device), (64, 64, 32)
        number = triton.cdiv(M, blocks[0]) * triton.cdiv(N, blocks[1])
        space = ctx.ccl.tile_space(number, blocks[0] * blocks[1], dtype)
        grid = (min(number, ctx.get_cu_count()),)  # all programs of a grid that waits run at once
        a, b = A[ctx.cur_rank], B[ctx.cur_rank]
        matmul_all_reduce_kernel[grid](ctx.get_device_context(), space, a, b, out, M, N, K, *blocks, ctx.num_ranks)
        exact = torch.bmm(A.double(), B.double()).sum(0)
        error = (out - exact).abs().max() / exact.abs().max()
        ctx.barrier()
        ctx.info(f"out is {tuple(out.shape)} {dtype}; largest error {error:.1e} of the largest value")
        assert error < (1e-2 if dtype is torch.bfloat16 else 1e-5)


if __name__ == "__main__":
    launch.run(rank_main)
