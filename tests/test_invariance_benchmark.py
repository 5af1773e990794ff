"""What `benchmarks.invariance` compares: each kind of product, and that a bit that differs is counted."""

from __future__ import annotations

from dataclasses import replace
import random

import iris
from iris_ops.problem import GATHER_MATMUL, MATMUL_GATHER, NORM
from iris_tp.bench.team import Team
import pytest
import torch

from benchmarks.cases.invariance_case import _FP8, _OPS, EXPERTS, Case, product_of
from tests.harness import WORLDS, run_ranks

NUMBERS = (1, 3, 5, 9, 18)


def case_of(op: str, form: str, fp8: bool = False, dtype: torch.dtype = torch.bfloat16) -> Case:
    bias = dtype == torch.float16
    choices = (4, 2) if op == EXPERTS else (0, 0)
    return Case(op, form, 96, 192, dtype, bias, random.randrange(1 << 30), NUMBERS, fp8, choices)


def differing(ctx: iris.Iris, case: Case, spoil: str = "") -> int:
    """How many numbers differ; with `spoil`, one bit of one operand changes behind the third call, on all ranks."""
    ctx.invariant = "batch"
    product = product_of(Team(ctx.cur_rank, ctx.num_ranks, ctx.device), ctx, case)
    for i in range(len(NUMBERS)):
        product.call(i)
        if spoil and i == 2:
            operand = getattr(product, spoil)
            operand[..., 0] = operand[..., 0] * 1.02
    return int(product.differing.sum())


@pytest.mark.parametrize("world_size", [pytest.param(w, marks=() if w == 2 else pytest.mark.slow) for w in WORLDS])
@pytest.mark.parametrize(("op", "form"), _OPS)
def test_each_kind_of_product_keeps_its_bits(world_size: int, op: str, form: str) -> None:
    kinds = [case_of(op, form), case_of(op, form, dtype=torch.float16)]
    if (op, form) in _FP8:
        kinds += [replace(case_of(op, form, fp8=True), bias=bias) for bias in (False, True)]
    for case in kinds:
        assert run_ranks(world_size, differing, case) == [0] * world_size, case


@pytest.mark.parametrize(
    ("op", "form", "spoil"),
    [(GATHER_MATMUL, "rows", "x"), (MATMUL_GATHER, "cols", "B"), (NORM, "", "residual"), (EXPERTS, "", "down")],
)
def test_another_operand_is_noticed(op: str, form: str, spoil: str) -> None:
    assert all(run_ranks(2, differing, case_of(op, form), spoil))
