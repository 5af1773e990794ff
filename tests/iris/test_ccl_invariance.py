"""Sums of `ctx.ccl` have the same bits by whatever variant, protocol and block, so for any number of rows too."""

from __future__ import annotations

import iris
from iris.ccl import Config
import pytest
import torch

from tests.harness import WORLDS, both, run_ranks

pytestmark = both
WAYS = [("one_shot", "lamport"), ("two_shot", "lamport"), ("two_shot", "flags")]


def sums_body(ctx: iris.Iris, dtype: torch.dtype) -> list[str]:
    own = torch.Generator().manual_seed(7 + ctx.cur_rank)
    row = torch.randn(200, generator=own).to(ctx.device, dtype)
    row[:20] *= -0.0  # whose sums are -0 on all ranks
    first, messages = None, []
    for M in (1, 3, 40):
        for variant, protocol in WAYS:
            inp, place = torch.full((M, 200), float("nan"), dtype=dtype, device=ctx.device), M // 2
            inp[place] = row
            out = torch.empty_like(inp)
            ctx.ccl.all_reduce(out, inp, config=Config(all_reduce_variant=variant, protocol=protocol))
            actual = out[place].view(torch.uint8).clone()
            first = actual if first is None else first
            if not torch.equal(actual, first):
                messages.append(f"{variant} by {protocol}, {M} rows: {int((actual != first).sum())} bytes differ")
    scattered = torch.empty(1, 200, dtype=dtype, device=ctx.device)
    ctx.ccl.reduce_scatter(scattered, row.expand(ctx.num_ranks, 200).contiguous())
    if not torch.equal(scattered[0].view(torch.uint8), first):
        messages.append("a part of a reduce_scatter differs from the same rows of an all_reduce")
    return messages


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.some(2)
def test_sums_have_the_same_bits_by_any_way(world_size, dtype):
    assert not any(actual := run_ranks(world_size, sums_body, dtype)), actual
