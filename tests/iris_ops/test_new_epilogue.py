"""An epilogue with another activation is one object: all products join its columns."""

from __future__ import annotations

from dataclasses import replace

import iris
from iris.machines import machine_named
from iris_ops.activation import Activation
from iris_ops.local import matmul, skinny_matmul
from iris_ops.planning import epilogues, operations
from iris_ops.planning.epilogues import GATE
from iris_ops.planning.operations import BY_NAME, GATED, GATHER_MATMUL
from iris_ops.planning.plan import plan, way_for
from iris_ops.problem import Request, requested_problem
from iris_ops.with_torch import torch_matmul
import pytest
import torch
from torch.nn import functional as F

from tests.harness import run_ranks

GELU = replace(GATE, name="gelu", activation=Activation("gelu_tanh"))


class Gelu(type(BY_NAME[GATED])):  # type: ignore[misc]
    name, epilogue = "all_gather_matmul_gelu", GELU


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch)


def add(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(epilogues.EPILOGUES, GELU.name, GELU)
    patch.setitem(operations.BY_NAME, Gelu.name, Gelu())
    patch.setitem(operations.CALLED, (GATHER_MATMUL, GELU), Gelu.name)


def joined(A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the reference in float64, of halves that are rounded before they are joined."""
    first, second = (A.double() @ B.double() + bias.double()).to(A.dtype).double().chunk(2, dim=1)
    return F.gelu(first, approximate="tanh") * second


def test_plans_are_those_of_the_gate(added: None) -> None:
    for M in (64, 8192):
        given = (M, 2 * 4096, 4096, 4, torch.bfloat16)
        mine, gate = (requested_problem(Request(op, *given)) for op in (Gelu.name, GATED))
        machine = machine_named("NVIDIA H200", 132)
        configs = [plan(problem, machine, explained=False) for problem in (mine, gate)]
        assert configs[0] == configs[1] and mine.out_cols == 4096 and mine.called_op == Gelu.name
    assert GELU in way_for(mine, configs[0]).fuses(mine, configs[0])


def run_gelu(ctx: iris.Iris) -> float:
    with pytest.MonkeyPatch.context() as patch:
        add(patch)
        like = {"dtype": torch.bfloat16, "device": ctx.device}
        torch.manual_seed(3)
        rows, B, bias = (torch.randn(*size, **like) for size in ((8, 64), (96, 64), (96,)))
        A, out = rows.chunk(ctx.num_ranks)[ctx.cur_rank], torch.full((8, 48), torch.nan, **like)
        getattr(ctx.ops, Gelu.name)(out, A, B.t(), bias)
        expected = joined(rows, B.t(), bias)
        results = [out]
        for multiply in (torch_matmul.multiply, lambda *given, **named: matmul.multiply(ctx, *given, **named)):
            results.append(torch.full_like(out, torch.nan))
            multiply(results[-1], rows, B.t(), bias, epilogue=GELU)
        results.append(skinny_matmul.skinny_matmul(rows, B, bias, epilogue=GELU.name))
        return max(float((each.double() - expected).norm() / expected.norm()) for each in results)


def test_every_product_joins_its_columns() -> None:
    assert max(run_ranks(2, run_gelu)) < 2**-7
