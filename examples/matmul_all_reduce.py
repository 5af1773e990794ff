"""A fused op: `out = sum over ranks of A @ B`, the row-parallel layer of tensor parallelism, in one kernel.

python -m examples.matmul_all_reduce
"""

import iris
from iris_tp import launch
import torch


def rank_main(M: int = 128, N: int = 256, K: int = 192) -> None:
    with iris.iris(heap_size=1 << 26) as ctx:
        on_gpu = ctx.device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        # Every rank draws all the parts, so that each can check the sum by itself.
        generator = torch.Generator().manual_seed(0)
        A = torch.randn(ctx.num_ranks, M, K, generator=generator).to(ctx.device, dtype)
        B = torch.randn(ctx.num_ranks, K, N, generator=generator).to(ctx.device, dtype)

        plan = ctx.ops.plan("matmul_all_reduce", M, N, K, dtype)
        if ctx.cur_rank == 0:
            print(plan)
        out = ctx.empty(M, N, dtype=dtype)  # on the heap, so that peers write it directly
        ctx.ops.matmul_all_reduce(out, A[ctx.cur_rank], B[ctx.cur_rank])

        exact = torch.bmm(A.double(), B.double()).sum(0)
        error = (out - exact).abs().max() / exact.abs().max()
        ctx.barrier()
        ctx.info(f"out is {tuple(out.shape)} {dtype}; largest error {error:.1e} of the largest value")
        assert error < (1e-2 if on_gpu else 1e-5)


def main() -> None:
    launch.run(rank_main)


if __name__ == "__main__":
    main()
