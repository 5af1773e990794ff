"""All-reduces of few rows in one shot, to the bit: by programs of one tile each, which keep their own part in
registers, by one that takes several, and by tiles of few columns; in turn, for their values share places.
"""

from __future__ import annotations

import iris
from iris_ops import FusedConfig
import pytest
import torch

from tests.checks import poison
from tests.harness import WORLDS, both, run_ranks

pytestmark = both

N, K = 64, 96
TILE = dict(block_n=64, block_k=32, num_warps=4, num_stages=2, algorithm="one_shot")
ONE = FusedConfig(64, **TILE)
SEVERAL = FusedConfig(16, **TILE, num_programs=1)
NARROW = FusedConfig(64, **TILE | dict(block_n=32))


@torch.no_grad()
def bits_body(ctx: iris.Iris, M: int, dtype: torch.dtype, bias: bool) -> torch.Tensor:
    draw = torch.Generator().manual_seed(M)
    numbers = torch.randint(-4, 5, (ctx.num_ranks, M + N + 1, K), generator=draw).float()  # sums of them are exact
    A, B = numbers[:, :M].to(dtype), numbers[:, M : M + N].to(dtype)
    added = numbers[0, M, :N].to(dtype) if bias else None
    expected = torch.zeros(M, N)
    for a, b in zip(A, B, strict=True):  # ranks' products are rounded before they are added, in the order of ranks
        expected = expected + (a.double() @ b.double().t()).to(dtype).float()
    expected = (expected + (added.float() if bias else 0)).to(dtype)
    own = A[ctx.cur_rank].to(ctx.device), B[ctx.cur_rank].to(ctx.device).t()
    out = ctx.empty(M, N, dtype=dtype)
    for call, config in enumerate((ONE, SEVERAL, NARROW, ONE, NARROW, SEVERAL, SEVERAL, ONE)):
        ctx.ops.matmul_all_reduce(poison(out), *own, added.to(ctx.device) if bias else None, config=config)
        assert torch.equal(out.cpu(), expected), (call, config)
    return out.cpu()


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("M, dtype, bias", [
    (1, torch.bfloat16, True), (33, torch.bfloat16, False), (50, torch.float16, True), (64, torch.bfloat16, True),
    (64, torch.float32, False),
])  # fmt: skip
@pytest.mark.some(6, on_gpus=3)
def test_sums_of_few_rows_to_the_bit(world_size: int, M: int, dtype: torch.dtype, bias: bool) -> None:
    first, *others = run_ranks(world_size, bits_body, M, dtype, bias)
    assert all(torch.equal(first, other) for other in others)
