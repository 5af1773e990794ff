"""What the promise of the same bits at every number of rows should cost, by the planner's model alone."""

from __future__ import annotations

from iris.machines import machine_named
from iris_ops.planning.plan import plan
from iris_ops.problem import Problem, Request, requested_problem
from iris_tp.bench.rows import CALLS, Row
import torch

from benchmarks.measuring import shapes

LEVELS = (None, "batch")
SETS = "facts,prefill,decode,between"


def problem(row: Row, world: int, dtype: torch.dtype, level: str | None) -> Problem:
    form = None if row.op == "ar" else row.form
    return requested_problem(Request(CALLS[row.op], row.M, row.N, row.K, world, dtype, form, invariant=level))


def expected(gpu: str, world: int) -> list[dict]:
    """Return what the planner expects of each row of the benchmarks, with the promise and without."""
    machine = machine_named(gpu, 132)
    rows = []
    for row in shapes.select(SETS, list(CALLS), world):
        free, alike = (plan(problem(row, world, torch.bfloat16, level), machine, explained=False) for level in LEVELS)
        assert free.prediction is not None and alike.prediction is not None
        us = free.prediction.total_us, alike.prediction.total_us
        rows.append(
            {"row": str(row), "op": row.op, "kernels": [free.kernel, alike.kernel], "us": us, "cost": us[1] / us[0]}
        )
    return rows
