"""A weight format that is added by one object and one line of the table is planned, converted and multiplied."""

from __future__ import annotations

from dataclasses import dataclass, replace

import iris
from iris.errors import DtypeError
from iris_ops.operands import Operands
from iris_ops.planning import weights
from iris_ops.planning.needs import PLAIN, WeightFormat
from iris_ops.problem import ALL_REDUCE, GATHER_MATMUL, REDUCE_SCATTER
from iris_ops.quantised.steps import Restore
import pytest
import torch

from tests.harness import run_ranks


@dataclass(frozen=True)
class Int16(WeightFormat):
    """16-bit integers, a scale for each column."""

    def converted(self, problem, machine) -> str:
        return "no kernel widens integers"


# It is unpacked as fp8 is: a number an element, times its column's scale.
INT16 = Int16("in integers", dtype=torch.int16, packing="fp8", operands="tests.iris_ops.test_new_format:operands")


def operands(rank, problem, config, tensors):
    """Return a step that decodes the weight to A's dtype."""
    out, A, B, bias, _ = tensors
    weight = out.new_empty(B.shape[1], B.shape[0]).t()
    return [Restore()], Operands(out, A, weight, bias), replace(problem, weights=PLAIN)


def multiply(ctx: iris.Iris, M: int, op: str) -> None:
    N, K, w = 48, 64, ctx.num_ranks
    generator = torch.Generator().manual_seed(M)
    ranks = [torch.randint(-127, 128, (N, K), generator=generator, dtype=torch.int16) for _ in range(w)]
    scales = [torch.rand(N, generator=generator) / 100 for _ in range(w)]
    rows = [torch.randn(M, K, generator=generator).bfloat16() for _ in range(w)]
    me = ctx.cur_rank
    exact = [each.double() @ (B.double() * scale.double()[:, None]).t() for each, B, scale in
             zip(rows, ranks, scales, strict=True)]  # fmt: skip
    whole = sum(exact)
    A, expected = rows[me], whole
    if op == REDUCE_SCATTER:
        expected = whole.chunk(w)[me]
    if op == GATHER_MATMUL:  # all ranks' parts of one A, by this rank's weight
        A = rows[0].chunk(w)[me]
        expected = rows[0].double() @ (ranks[me].double() * scales[me].double()[:, None]).t()
    out = ctx.zeros(*expected.shape, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "FORMATS", (*weights.FORMATS, INT16))
        getattr(ctx.ops, op)(out, A, ranks[me].t(), scale=scales[me])
    lost = (expected - out.double()).abs().max() / expected.abs().max()
    assert lost < 0.02, lost  # of bf16: the weight, the partial sums and the result are rounded


@pytest.mark.parametrize("op", [ALL_REDUCE, REDUCE_SCATTER, GATHER_MATMUL])
def test_a_new_format_is_multiplied(op: str) -> None:
    run_ranks(2, multiply, 24, op)


def refuse(ctx: iris.Iris) -> None:
    A, B = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(16, 8, dtype=torch.int16)
    out = torch.zeros(4, 16, dtype=torch.bfloat16)
    with pytest.raises(DtypeError, match="B has dtype torch.int16 and there is a scale"):
        ctx.ops.matmul_all_reduce(out, A, B.t(), scale=torch.ones(16))


def test_what_no_format_stores_is_refused() -> None:
    run_ranks(2, refuse)
