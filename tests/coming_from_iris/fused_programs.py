"""`ctx.ops` and `iris.ops`, with the names and configurations of ROCm/iris."""

import iris
from iris import ops
from iris.ops import FusedConfig
import pytest
import torch


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.float16)


def _close(out: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(out.double().cpu(), want, rtol=1e-2, atol=3e-2)


def product_and_sum():
    shmem = iris.iris(1 << 24)
    n, rank = shmem.num_ranks, shmem.cur_rank
    M, N, K = 32, 48, 16
    A, B = (_random(M, K, seed=i) for i in range(n)), [_random(K, N, seed=100 + i) for i in range(n)]
    A = list(A)
    output = shmem.zeros((M, N), dtype=torch.float16)
    a, b = A[rank].to(shmem.device), B[rank].to(shmem.device)
    want = sum(x.double() @ y.double() for x, y in zip(A, B, strict=True))
    config = FusedConfig(block_size_m=32, block_size_n=32, block_size_k=16, group_size_m=1, num_sms=None)
    config.validate(world_size=n)
    workspace = ops.matmul_all_reduce_preamble(shmem, output, a, b, config)
    ops.matmul_all_reduce(shmem, output, a, b, async_op=False, config=config, workspace=workspace)
    shmem.barrier()
    _close(output, want)
    output.fill_(float("nan"))
    shmem.ops.matmul_all_reduce(output_tensor=output, A=a, B=b)
    shmem.barrier()
    _close(output, want)


def arguments_by_position():
    from iris.ops.config import FusedConfig

    shmem = iris.iris(1 << 24)
    n, rank = shmem.num_ranks, shmem.cur_rank
    shards = [_random(16, 16, seed=i).to(shmem.device) for i in range(n)]
    B = _random(16 * n, 16, seed=50).to(shmem.device)
    bias = _random(16, seed=60).to(shmem.device)
    config = FusedConfig(block_size_m=16, block_size_n=16, block_size_k=16)
    output = shmem.full((16, 16), float("nan"), dtype=torch.float16)
    workspace = ops.all_gather_matmul_preamble(shmem, shards[rank], B, config)
    ops.all_gather_matmul(shmem, output, shards[rank], B, bias, False, config, workspace)
    shmem.barrier()
    gathered = torch.cat(shards, 1).double().cpu() @ B.double().cpu()
    _close(output, gathered + bias.double().cpu())
    part = B[16 * rank : 16 * (rank + 1)]
    workspace = ops.matmul_all_reduce_preamble(shmem, output, shards[rank], part, config, workspace)
    ops.matmul_all_reduce(shmem, output, shards[rank], part, False, config, workspace)
    shmem.barrier()
    _close(output, gathered)


def what_main_does_not_take():
    shmem = iris.iris(1 << 24)
    n = shmem.num_ranks
    A, B = shmem.zeros((32, 16), dtype=torch.float16), shmem.zeros((16, 48 * n), dtype=torch.float16)
    with pytest.raises(RuntimeError, match=r"out \+= bias\[:, None\]"):
        shmem.ops.matmul_all_reduce(shmem.zeros_like(A @ B), A, B, bias=A[:, 0])
    if n > 1:
        with pytest.raises(RuntimeError, match="ctx.ccl.reduce_scatter.*coming-from-iris"):
            shmem.ops.matmul_reduce_scatter(shmem.zeros((32, 48 * n), dtype=torch.float16), A, B)
    shmem.barrier()
