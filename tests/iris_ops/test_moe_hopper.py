"""Grouped products by warp-specialised programs: the portable kernel's bits, for every row, whatever the routing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import iris
from iris_ops import FusedConfig
from iris_ops.moe import hopper_matmul
from iris_ops.moe.activation import GPT_OSS, Activation
from iris_ops.moe.grouped_matmul import launch
from iris_ops.moe.routing import Routing
from iris_ops.moe.steps import Steps
from iris_ops.planning.moe_problem import DOWN_ALL_REDUCE, GATE_UP, MoeProblem
import pytest
import torch
import triton

from tests.harness import run_ranks

WIDE = FusedConfig(128, 256, 64, num_warps=8, num_stages=3, warp_specialised=True, algorithm="sequential")
NARROW = replace(WIDE, block_n=128, num_stages=5)


@dataclass(frozen=True)
class Case:
    tokens: int
    k: int
    experts: int
    N: int
    K: int
    gated: bool = True
    activation: Activation | None = Activation()
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    config: FusedConfig = WIDE
    crowded: bool = False
    """All tokens choose expert 1 first, and only so many experts in all as they must."""
    wrong: bool = False
    """Some choices are out of range."""


CASES = {
    "gate_up": Case(700, 2, 8, 768, 1024),
    "narrow": Case(700, 2, 8, 768, 1024, config=NARROW, bias=True, activation=GPT_OSS),
    "edges": Case(333, 3, 5, 304, 400, bias=True, dtype=torch.float16),
    "narrow_edges": Case(333, 3, 5, 304, 80, config=NARROW),
    "short": Case(600, 4, 32, 128, 16),
    "crowded": Case(900, 2, 16, 256, 512, crowded=True),
    "few": Case(9, 2, 64, 256, 512),
    "many_experts": Case(4100, 8, 256, 128, 192),
    "wrong": Case(300, 2, 8, 256, 512, wrong=True),
    "ungated": Case(500, 2, 8, 272, 512, gated=False, activation=Activation("relu2"), bias=True),
    "down": Case(700, 2, 8, 1024, 768, gated=False, activation=None),
    "down_edges": Case(333, 3, 5, 400, 304, gated=False, activation=None, bias=True, config=NARROW),
    "down_short": Case(2000, 8, 64, 2048, 384, gated=False, activation=None),
}


@torch.no_grad()
def product_body(ctx: iris.Iris, case: Case) -> None:
    generator = torch.Generator(ctx.device).manual_seed(7)
    down = not case.gated and case.activation is None
    op, pairs, columns = DOWN_ALL_REDUCE if down else GATE_UP, case.tokens * case.k, case.N * (2 if case.gated else 1)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device=ctx.device).to(case.dtype)

    A = draw(pairs if down else case.tokens, case.K)
    B = draw(case.experts, columns, case.K).mul_(case.K**-0.5).transpose(1, 2)
    bias = draw(case.experts, columns) if case.bias else None
    logits = torch.randn(case.tokens, case.experts, generator=generator, device=ctx.device)
    if case.crowded:
        logits += 100.0 * torch.arange(case.experts, device=ctx.device).eq(1)
        logits[:, case.k + 1 :] -= 100.0
    chosen = logits.topk(case.k, dim=1).indices
    valid = torch.ones(pairs, dtype=torch.bool, device=ctx.device)
    problem = MoeProblem(op, case.tokens, case.k, case.experts, case.N, case.K, ctx.num_ranks, case.dtype, case.gated)
    order = chosen.flatten().argsort(stable=True)
    if case.wrong:  # as `moe_route` leaves them out
        valid[order[-200:]] = False
        order = order[:-200]
    counts = chosen.flatten()[order].bincount(minlength=case.experts)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    rows = torch.zeros(pairs, dtype=torch.int32, device=ctx.device)
    rows[: len(order)] = order.int()
    routing, steps = Routing(chosen, rows, offsets), Steps(ctx)
    found = []
    for config in (replace(case.config, warp_specialised=False), *[case.config] * 3):
        out = torch.full((pairs, case.N), float("nan"), dtype=case.dtype, device=ctx.device)
        if config.warp_specialised:
            reason = hopper_matmul.supports(problem, config, out, A, B, routing, False)
            assert reason is None, reason
        launch(steps, problem, config, out, A, B, routing, bias, case.activation, False)
        assert torch.equal(out.isnan().all(1), ~valid), "rows that no expert has are stored, or others are not"
        found.append(out[valid])
    portable, *specialised = found
    assert not portable.isnan().any()
    for out in specialised:
        assert torch.equal(portable, out), f"{(portable != out).sum().item()} of {out.numel()} values differ"


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_specialised_programs_give_the_portable_kernels_bits(name: str) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    run_ranks(torch.cuda.device_count(), product_body, CASES[name])


def blocks_body(ctx: iris.Iris, counts: list[int]) -> None:
    experts, pairs, high = len(counts), sum(counts), 128
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=ctx.device)
    most = pairs // high + min(experts, pairs)
    lines = torch.full((most + 1, 4), -7, dtype=torch.int32, device=ctx.device)
    args = dict(BLOCK_M=high, EXPERTS=max(16, triton.next_power_of_2(experts)), BLOCK=32)
    hopper_matmul.moe_blocks_kernel[(triton.cdiv(most, 32),)](offsets, lines, experts, most, **args)
    expected = []
    for expert, count in enumerate(counts):
        begin = offsets[expert].item()
        blocks = range(begin, begin + count, high)
        expected += [[expert, first, min(first + high, begin + count)] for first in blocks]
    assert lines[: len(expected), :3].tolist() == expected
    assert lines[most, 0].item() == len(expected)


@pytest.mark.parametrize("counts", [[3], [0, 128, 129, 0, 700, 1, 0], [5] * 200, [0, 0, 1]], ids=len)
def test_blocks_of_rows_are_found_on_the_device(counts: list[int]) -> None:
    run_ranks(1, blocks_body, counts)
