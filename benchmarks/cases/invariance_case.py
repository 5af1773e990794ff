"""One product of `benchmarks.invariance`: a few rows, among others of any number, and whether their bits differ."""

import math
import random

import iris
from iris_ops.problem import part_of, part_size
from iris_tp.bench.rows import CALLS, Row
from iris_tp.bench.team import Team
import torch

PROBES = 4
# Of random products, N and K: multiples of `step`, up to the last.
SIZES = {"cuda": range(512, 8193, 16), "cpu": range(64, 257, 16)}


class Product:
    """One product: probe rows, and what they are multiplied by, of this rank."""

    def __init__(self, team: Team, ctx: iris.Iris, row: Row, dtype: torch.dtype, bias: bool, seed: int) -> None:
        self.team, self.ctx, self.row, self.dtype = team, ctx, row, dtype
        reduces = row.op in ("ar", "rs")
        self.random = torch.Generator(team.device).manual_seed(seed + (team.rank if reduces else 0))
        columns = part_of(row.N, team.world, team.rank) if (row.op, row.form) == ("ga", "cols") else row.N
        self.x = self.drawn(PROBES, row.K)
        alike = (row.op, row.form) == ("ga", "rows")  # a row may be any rank's
        weights = torch.Generator(team.device).manual_seed(seed + 1 + (0 if alike else team.rank))
        self.B = torch.randn(columns, row.K, generator=weights, device=team.device).to(dtype).t()
        shared = torch.Generator(team.device).manual_seed(seed + 2)
        self.bias = torch.randn(columns, generator=shared, device=team.device).to(dtype) if bias else None
        self.first: torch.Tensor | None = None  # the probes' rows of the result, NaN where another rank has them
        self.differing = torch.zeros(1, dtype=torch.int64, device=team.device)

    def drawn(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.random, device=self.team.device).to(self.dtype)

    def call(self, M: int, rng: random.Random) -> None:
        """The probes among M rows: counts numbers that differ from those of the first call."""
        row, world, rank = self.row, self.team.world, self.team.rank
        places = [rng.randrange(M) for _ in range(PROBES)]
        nan, on_heap = rng.random() < 0.5, rng.random() < 0.5
        A = torch.full((M, row.K), math.nan, dtype=self.dtype, device=self.team.device) if nan else self.drawn(M, row.K)
        probes = dict(zip(places, range(PROBES), strict=True))  # of two in one place the last
        A[[*probes]] = self.x[[*probes.values()]]
        begin, size = rank * part_size(M, world), part_of(M, world, rank)
        if row.op in ("ag", "ga") and row.form == "rows":
            A = A[begin : begin + size]
        elif row.form == "k":
            k = rank * part_size(row.K, world)
            A = A[:, k : k + part_of(row.K, world, rank)].contiguous()
        rows, columns = M, row.N
        if row.op == "rs":
            rows, columns = (part_size(M, world), row.N) if row.form == "rows" else (M, part_size(row.N, world))
        out = (self.ctx if on_heap else torch).empty(rows, columns, dtype=self.dtype, device=self.team.device)
        if row.op == "rs":
            out = out[:size] if row.form == "rows" else out[:, : part_of(row.N, world, rank)]
        out.fill_(math.nan)
        getattr(self.ctx.ops, CALLS[row.op])(out, A, self.B, self.bias)
        here = begin if (row.op, row.form) == ("rs", "rows") else 0
        for place, number in probes.items():
            if here <= place < here + out.shape[0]:
                self.compare(number, out[place - here])

    def compare(self, number: int, found: torch.Tensor) -> None:
        if self.first is None:
            self.first = torch.full((PROBES, found.shape[0]), math.nan, dtype=self.dtype, device=self.team.device)
        known = ~self.first[number].isnan().any()
        unlike = found.view(torch.int16 if found.element_size() == 2 else torch.int32) != self.first[number].view(
            torch.int16 if found.element_size() == 2 else torch.int32
        )
        self.differing += torch.where(known, unlike.sum(), found.isnan().sum())
        self.first[number] = torch.where(known, self.first[number], found)


def random_row(rng: random.Random, world: int, sizes: range) -> Row:
    op, form = rng.choice([("ar", "rows"), ("ar", "rows"), ("rs", "rows"), ("rs", "cols"), ("ag", "rows"), ("ag", "k"),
                           ("ga", "rows"), ("ga", "cols")])  # fmt: skip
    N, K = (rng.choice(sizes) for _ in range(2))
    step = 16 * world  # so that ranks' parts begin at whole vectors, too
    return Row(op, 0, max(step, N // step * step), max(step, K // step * step), form)
