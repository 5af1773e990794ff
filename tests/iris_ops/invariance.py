"""A row among others: how tests ask whether its bits depend on them.

`Probe` holds a few rows with what they are multiplied by, different on each rank. `found(ctx, M, place, ...)` makes a
call of M rows among which the probe's stand from `place` on, the others poisoned with NaN or random, and returns their
rows of the result, as this rank has them; rows that another rank has are missing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import iris
from iris.machines import machine_of
from iris_ops import FusedConfig
from iris_ops.planning.plan import WAYS, common_order, compare_ways
from iris_ops.planning.weights.fp8 import FP8
from iris_ops.problem import (
    GATHER_MATMUL,
    MATMUL_GATHER,
    REDUCE_SCATTER,
    Request,
    part_of,
    part_size,
    requested_problem,
)
import torch

from tests.checks import poison
from tests.reference import Case


@dataclass(frozen=True)
class Place:
    """`M` rows, the probe's first at `first`; `others`: "nan" or "random". `on_heap`: where `out` lies."""

    M: int
    first: int
    others: str = "nan"
    on_heap: bool = True
    config: FusedConfig | None = None


class Probe:
    """Rows that are looked at, and all that is multiplied, for one rank."""

    def __init__(self, ctx: iris.Iris, case: Case, rows: int = 1, fp8: bool = False) -> None:
        self.ctx, self.case, self.rows = ctx, case, rows
        w, rank = ctx.num_ranks, ctx.cur_rank
        own = torch.Generator().manual_seed(case.seed + (rank if case.reduces else 0))
        self.x = torch.randn(rows, case.K, generator=own).to(ctx.device, case.dtype)
        weights = torch.Generator().manual_seed(case.seed + 100 + rank)
        columns = part_of(case.N, w, rank) if case.op == MATMUL_GATHER and case.form == "cols" else case.N
        if case.op == MATMUL_GATHER and case.form == "rows":
            weights.manual_seed(case.seed + 100)
        B = torch.randn(columns, case.K, generator=weights).to(ctx.device, case.dtype)
        self.scale = None
        if fp8:
            self.scale = torch.rand(columns, generator=weights).to(ctx.device) + 0.5
            B = B.to(FP8)
        self.B = B.t() if case.transposed else B.t().contiguous()
        shared = torch.Generator().manual_seed(case.seed + 200)
        self.bias = torch.randn(columns, generator=shared).to(ctx.device, case.dtype) if case.bias else None

    def copies(self, place: Place) -> dict[int, torch.Tensor]:
        """Of the probe's rows, by number, those that this rank has of the result."""
        ctx, case, M = self.ctx, self.case, place.M
        w, rank = ctx.num_ranks, ctx.cur_rank
        others = torch.Generator().manual_seed(M)
        A = torch.randn(M, case.K, generator=others).to(ctx.device, case.dtype)
        if place.others == "nan":
            A.fill_(float("nan"))
        A[place.first : place.first + self.rows] = self.x
        begin = rank * part_size(M, w)
        mine = slice(begin, begin + part_of(M, w, rank))
        if (case.op, case.form) in ((GATHER_MATMUL, "rows"), (MATMUL_GATHER, "rows")):
            A = A[mine]
        elif (case.op, case.form) == (GATHER_MATMUL, "k"):
            k = rank * part_size(case.K, w)
            A = A[:, k : k + part_of(case.K, w, rank)]
        size = (M, case.N)
        if case.op == REDUCE_SCATTER:
            size = (part_size(M, w), case.N) if case.form == "rows" else (M, part_size(case.N, w))
        out = (ctx if place.on_heap else torch).empty(*size, dtype=case.dtype, device=ctx.device)
        if case.op == REDUCE_SCATTER:
            out = out[: part_of(M, w, rank)] if case.form == "rows" else out[:, : part_of(case.N, w, rank)]
        poison(out)
        given = {} if self.scale is None else {"scale": self.scale}
        getattr(ctx.ops, case.op)(out, A.contiguous(), self.B, self.bias, config=place.config, **given)
        scattered = case.op == REDUCE_SCATTER and case.form == "rows"
        here = range(mine.start, mine.stop) if scattered else range(M)
        rows = [(i, place.first + i) for i in range(self.rows)]
        return {i: out[row - here.start].clone() for i, row in rows if row in here}


def ways(ctx: iris.Iris, case: Case, M: int) -> list[FusedConfig]:
    """One configuration of each kernel that a plan for the case may take."""
    problem = requested_problem(Request(case.op, M, case.N, case.K, ctx.num_ranks, case.dtype, case.form or None))
    problem = ctx.level.promise(problem, biased=case.bias)
    machine = machine_of(ctx.device)
    required = common_order(WAYS, replace(problem, M=0), machine)
    candidates = compare_ways(WAYS, problem, machine).candidates
    alike = [each.config for each in candidates if each.way.order(problem, each.config, machine) == required]
    one_each = {(config.algorithm, config.warp_specialised, config.lamport): config for config in reversed(alike)}
    return list(one_each.values())


def different_rows(probe: Probe, places: list[Place]) -> list[str]:
    """Where a row of the probe has other bits than in the first place that it was seen in, in words."""
    first: dict[int, tuple[Place, torch.Tensor]] = {}
    differences = []
    for place in places:
        for i, row in probe.copies(place).items():
            assert not row.isnan().any(), f"row {i} of {place} is no number"
            seen, expected = first.setdefault(i, (place, row))
            if row.view(torch.uint8).ne(expected.view(torch.uint8)).any():
                count = int((row != expected).sum())
                differences.append(f"row {i}: {count} of {row.numel()} numbers of {place} differ from those of {seen}")
    return differences
