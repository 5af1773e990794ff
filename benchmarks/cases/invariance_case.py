"""One product of `benchmarks.invariance`: a few rows, among others of any number, and whether their bits differ.

`Case` says what is multiplied, by which op and at which numbers of rows. `product_of` draws its operands. Rows are
compared on the device, and nothing waits for it: a product is one number in the end, `differing`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
import math
import random

import iris
from iris_ops.kernels.rmsnorm_epilogue import spans
from iris_ops.planning.weights.fp8 import FP8
from iris_ops.problem import (
    ALL_REDUCE,
    GATED,
    GATHER_MATMUL,
    MATMUL_GATHER,
    NORM,
    REDUCE_SCATTER,
    part_of,
    part_size,
)
from iris_tp.bench.team import Team
import torch

PROBES = 4
EXPERTS = "moe_gate_up, moe_down_all_reduce, moe_down_reduce_scatter"
# Of random products: N and K are multiples of 16 times the ranks, up to the last.
SIZES = {"cuda": (512, 8192), "cpu": (64, 256)}
# How often random products are of an op, along what it gathers or scatters.
_OPS = {
    (ALL_REDUCE, ""): 4, (NORM, ""): 3, (REDUCE_SCATTER, "rows"): 3, (REDUCE_SCATTER, "cols"): 2,
    (GATHER_MATMUL, "rows"): 3, (GATHER_MATMUL, "k"): 2, (GATED, "rows"): 2, (MATMUL_GATHER, "rows"): 2,
    (MATMUL_GATHER, "cols"): 2, (EXPERTS, ""): 2,
}  # fmt: skip
_EIGHT_BITS = {(op, "rows") for op in (REDUCE_SCATTER, GATHER_MATMUL, GATED)} | {(ALL_REDUCE, ""), (NORM, "")}


@dataclass(frozen=True)
class Case:
    """N, K: of the whole product, before it is gated. Of a mixture K is H and N is a rank's I; `choices`: (E, k)."""

    op: str
    form: str
    N: int
    K: int
    dtype: torch.dtype
    bias: bool
    seed: int
    numbers: tuple[int, ...]
    fp8: bool = False
    choices: tuple[int, int] = (0, 0)

    @property
    def kind(self) -> str:
        named = [f"{self.op} {self.form}".strip(), str(self.dtype).removeprefix("torch.")]
        return ", ".join([*named, "B in eight bits"] if self.fp8 else named)

    def __str__(self) -> str:
        mixture = ", {} experts, {} of a token".format(*self.choices) if self.op == EXPERTS else ""
        return f"{self.kind}, N = {self.N}, K = {self.K}{mixture}"


def random_case(rng: random.Random, world: int, device: str, numbers: tuple[int, ...]) -> Case:
    """dtype and bias go together, for each kernel is compiled with a bias or without; with B in eight bits, either."""
    ((op, form),) = rng.choices(list(_OPS), list(_OPS.values()))
    step, (least, most) = 16 * world, SIZES[device]
    N, K = (rng.randrange(max(step, least), most + 1, step) for _ in range(2))
    dtype = torch.bfloat16 if rng.random() < 0.7 else torch.float16
    fp8 = (op, form) in _EIGHT_BITS and dtype == torch.bfloat16 and rng.random() < 0.3
    choices = (0, 0)
    if op == EXPERTS:
        N, K = (max(step, size // step * step) for size in (N // 4, K // 2))
        choices = rng.choice([(4, 1), (8, 2), (16, 4)])
    bias = dtype == torch.float16 or fp8 and rng.random() < 0.5
    seed, chosen = rng.randrange(1 << 30), tuple(sorted(rng.sample(numbers, 10)))
    return Case(op, form, N, K, dtype, bias, seed, chosen, fp8, choices)


def said_of_random(world: int, device: str, all_of_them: bool) -> str:
    """How products are drawn, for those who read what was found."""
    least, most = SIZES[device]
    which = "all products" if all_of_them else "products behind those of models' layers"
    return (
        f"{which} at random: N and K from {least} to {most}, multiples of {16 * world}, so that each is compiled for"
        f" sizes that are multiples of 16; of mixtures H up to {most // 2}, I up to {most // 4}; float16 with a bias,"
        " bfloat16 without; B in eight bits with any scales, with a bias or without; four rows of each call are looked"
        " at, in random places, beside others that are random or NaN"
    )


@dataclass(frozen=True)
class _Seen:
    """Which probes a rank has of a result, and in which of its rows; the first `fresh` for the first time."""

    probes: torch.Tensor
    rows: torch.Tensor
    fresh: int


class Product(ABC):
    """A case's operands, of this rank, and the rows that are looked at: the probes."""

    def __init__(self, team: Team, ctx: iris.Iris, case: Case) -> None:
        self.team, self.ctx, self.case = team, ctx, case
        self.differing = torch.zeros(len(case.numbers), dtype=torch.int64, device=team.device)
        self.lent: list[torch.Tensor] = []  # of the heap; to be freed when all ranks are done with them
        self._first: dict[str, torch.Tensor] = {}
        rng = random.Random(case.seed)
        self.nan = [rng.random() < 0.5 for _ in case.numbers]
        self.on_heap = [rng.random() < 0.5 for _ in case.numbers]
        places = []
        for M in case.numbers:
            count = min(M, PROBES)
            places.append(list(zip(rng.sample(range(PROBES), count), rng.sample(range(M), count), strict=True)))
        own = [self._part(M) for M in case.numbers]
        parts = [
            [(probe, row - part.start) for probe, row in placed if row in part]
            for placed, part in zip(places, own, strict=True)
        ]
        self.whole, self.part = self._on_device(places, parts)

    def _part(self, M: int) -> range:
        """This rank's rows of M."""
        begin = self.team.rank * part_size(M, self.team.world)
        return range(begin, begin + part_of(M, self.team.world, self.team.rank))

    def _on_device(self, *every: list[list[tuple[int, int]]]) -> list[list[_Seen]]:
        """By one copy."""
        counts, flat = [], []
        for placed in every:
            known: set[int] = set()
            for pairs in placed:
                pairs.sort(key=lambda pair: pair[0] in known)
                counts.append((len(pairs), sum(probe not in known for probe, _ in pairs)))
                known |= {probe for probe, _ in pairs}
                flat += [each for pair in zip(*pairs, strict=True) for each in pair]
        sizes = [count for count, _ in counts for _ in range(2)]
        numbers = iter(torch.tensor(flat, dtype=torch.int64, device=self.team.device).split(sizes))
        seen = iter([_Seen(next(numbers), next(numbers), fresh) for _, fresh in counts])
        return [[next(seen) for _ in placed] for placed in every]

    def generator(self, number: int, by_rank: bool = False) -> torch.Generator:
        rank = self.team.rank if by_rank else 0
        return torch.Generator(self.team.device).manual_seed(64 * self.case.seed + 8 * number + rank)

    def drawn(self, generator: torch.Generator, *size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=self.team.device, dtype=self.case.dtype).mul_(scale)

    def among(self, i: int, probes: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """As many rows as call number `i` has: the probes in their places, and others, or NaN."""
        found = others[: self.case.numbers[i]].clone()
        if self.nan[i] and found.is_floating_point():
            found.fill_(math.nan)
        seen = self.whole[i]
        return found.index_copy_(0, seen.rows, probes.index_select(0, seen.probes))

    def poisoned(self, i: int, *size: int) -> torch.Tensor:
        out = (self.ctx if self.on_heap[i] else torch).empty(*size, dtype=self.case.dtype, device=self.team.device)
        if self.on_heap[i]:
            self.lent.append(out)
        return out.fill_(math.nan)

    def run(self) -> None:
        """All calls. Counts in `differing`, for each, the numbers that differ from the first call's, or are none."""
        for i in range(len(self.case.numbers)):
            self.call(i)

    @abstractmethod
    def call(self, i: int) -> None:
        """The op, at the case's i-th number of rows."""

    def compare(self, name: str, i: int, rows: torch.Tensor, seen: _Seen) -> None:
        """`rows`: what the ranks, or this one, have of a result: [rows, ...]."""
        found = rows.flatten(1).index_select(0, seen.rows)
        if name not in self._first:
            self._first[name] = found.new_zeros(PROBES, found.shape[1])
        first = self._first[name]
        if seen.fresh:
            first.index_copy_(0, seen.probes[: seen.fresh], found[: seen.fresh])
        bits = torch.int16 if found.element_size() == 2 else torch.int32
        unlike = found.view(bits) != first.index_select(0, seen.probes).view(bits)
        self.differing[i] += unlike.logical_or_(found.isnan()).sum()


class Fused(Product):
    """One of the four ops, gated, with a norm or neither."""

    def __init__(self, team: Team, ctx: iris.Iris, case: Case) -> None:
        super().__init__(team, ctx, case)
        sums = case.op in (ALL_REDUCE, NORM, REDUCE_SCATTER)
        columns = case.N
        if (case.op, case.form) == (MATMUL_GATHER, "cols"):
            columns = part_of(case.N, team.world, team.rank)
        rows = self.generator(0, by_rank=sums)
        self.x, self.others = (self.drawn(rows, n, case.K) for n in (PROBES, max(case.numbers)))
        # gathered rows are multiplied by their own rank, and a probe may be any rank's
        weights = self.generator(1, by_rank=(case.op, case.form) != (MATMUL_GATHER, "rows"))
        B = self.drawn(weights, columns, case.K, scale=1.0 if case.fp8 else case.K**-0.5)
        self.given: dict[str, torch.Tensor] = {}
        if case.fp8:
            scale = torch.rand(columns, generator=weights, device=team.device)
            B, self.given = B.to(FP8), {"scale": scale.add_(0.5).mul_(case.K**-0.5)}
        self.B = B.t()
        shared = self.generator(2)
        self.bias = self.drawn(shared, columns) if case.bias else None
        if case.op == NORM:
            self.weight = self.drawn(shared, columns)
            self.residual, self.residuals = (self.drawn(shared, n, columns) for n in (PROBES, max(case.numbers)))

    def call(self, i: int) -> None:
        case, world, rank, M = self.case, self.team.world, self.team.rank, self.case.numbers[i]
        A, own, seen = self.among(i, self.x, self.others), self._part(M), self.whole[i]
        if case.op in (GATHER_MATMUL, MATMUL_GATHER, GATED) and case.form == "rows":
            A = A[own.start : own.stop]
        elif case.form == "k":
            k = rank * part_size(case.K, world)
            A = A[:, k : k + part_of(case.K, world, rank)].contiguous()
        if case.op == NORM:
            return self._normed(i, A)
        if (case.op, case.form) == (REDUCE_SCATTER, "rows"):
            out, seen = self.poisoned(i, part_size(M, world), case.N)[: len(own)], self.part[i]
        elif case.op == REDUCE_SCATTER:
            out = self.poisoned(i, M, part_size(case.N, world))[:, : part_of(case.N, world, rank)]
        else:
            out = self.poisoned(i, M, case.N // 2 if case.op == GATED else case.N)
        getattr(self.ctx.ops, case.op)(out, A, self.B, self.bias, **self.given)
        return self.compare("out", i, out, seen)

    def _normed(self, i: int, A: torch.Tensor) -> None:
        M, N = self.case.numbers[i], self.case.N
        residual = self.among(i, self.residual, self.residuals)
        out, scaled = self.poisoned(i, M, N), torch.full_like(residual, math.nan)
        squares = torch.full((spans(N), M), math.nan, device=self.team.device)
        given = residual, self.weight, self.bias
        self.ctx.ops.matmul_all_reduce_norm(out, scaled, squares, A, self.B, *given, **self.given)
        for name, found in (("out", out), ("scaled", scaled), ("squares", squares.t())):
            self.compare(name, i, found, self.whole[i])


class Mixture(Product):
    """The ops of a mixture of experts, one behind the other; what is scattered equals what is reduced."""

    def __init__(self, team: Team, ctx: iris.Iris, case: Case) -> None:
        super().__init__(team, ctx, case)
        (experts, k), H, width, most = case.choices, case.K, case.N, max(case.numbers)
        shared, own = self.generator(0), self.generator(1, by_rank=True)
        self.x, self.others = (self.drawn(shared, n, H) for n in (PROBES, most))
        logits = torch.rand(PROBES + most, experts, generator=shared, device=team.device)
        self.factors, self.chosen = logits.topk(k, dim=1)
        self.up = self.drawn(own, experts, 2 * width, H, scale=H**-0.5).transpose(1, 2)
        self.down = self.drawn(own, experts, H, width, scale=width**-0.5).transpose(1, 2)
        self.shared, self.shares = (self.drawn(own, n, H) for n in (PROBES, most))
        self.up_bias = self.drawn(own, experts, 2 * width) if case.bias else None
        self.bias = self.drawn(shared, experts, H) if case.bias else None

    def call(self, i: int) -> None:
        ops, M, (_, k) = self.ctx.ops, self.case.numbers[i], self.case.choices
        A, seen, own = self.among(i, self.x, self.others), self.whole[i], self._part(M)
        chosen, factors = (self.among(i, each[:PROBES], each[PROBES:]) for each in (self.chosen, self.factors))
        inner = self.poisoned(i, M * k, self.case.N)
        ops.moe_gate_up(inner, A, self.up, chosen, self.up_bias)
        self.compare("inner", i, inner.view(M, -1), seen)
        given = inner, self.down, chosen, factors, self.bias, self.among(i, self.shared, self.shares)
        out = self.poisoned(i, M, self.case.K)
        ops.moe_down_all_reduce(out, *given)
        self.compare("out", i, out, seen)
        part = self.poisoned(i, part_size(M, self.team.world), self.case.K)[: len(own)]
        ops.moe_down_reduce_scatter(part, *given)
        self.compare("out", i, part, _Seen(self.part[i].probes, self.part[i].rows, 0))


def product_of(team: Team, ctx: iris.Iris, case: Case) -> Product:
    return (Mixture if case.op == EXPERTS else Fused)(team, ctx, case)
