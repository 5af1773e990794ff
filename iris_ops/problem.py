"""From tensors to a `Problem`: what is multiplied, what is gathered or scattered, and along which dimension.

Uneven splits follow `torch.chunk`: the first parts have ceil(size / world_size) elements, and the last may be short or
empty. This module imports no triton. `checks.py` refuses tensors that make no problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from iris.aliases import PAGE
from iris.errors import ArgumentError, ShapeError
from iris.invariance import RANKS, refusal
import torch

from . import sum_tree
from .planning import needs
from .planning.needs import FREE_SUMS, PLAIN, RANKS_ALIKE, ROWS_ALIKE, Epilogue, Sums, WeightFormat
from .planning.op_names import ALL_REDUCE, GATED, GATHER_MATMUL, MATMUL_GATHER, NORM, OPS, REDUCE_SCATTER, SCALED, SUMS
from .planning.weights import format_of

if TYPE_CHECKING:
    from iris.machines import Machine

    from .config import FusedConfig

NORM_SPAN = 64  # columns that share a sum of squares
# Ops that are another one with an epilogue.
_KINDS: dict[str, tuple[str, Epilogue]] = {NORM: (ALL_REDUCE, needs.NORM), GATED: (GATHER_MATMUL, needs.GATE)}
_NAMES = {epilogue: name for name, (_, epilogue) in _KINDS.items()}

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Tensor descriptors need this, in bytes, of strides, base addresses and the places in a row where tiles begin (an H200
# reports an illegal instruction for a tile that begins elsewhere).
TMA_ALIGNMENT = 16


def part_size(size: int, world_size: int) -> int:
    """Return the largest part when `size` is split over the ranks."""
    return -(-size // world_size)


def part_of(size: int, world_size: int, rank: int) -> int:
    """Return how much of `size` belongs to `rank`."""
    part = part_size(size, world_size)
    return max(0, min(part, size - rank * part))


@dataclass(frozen=True)
class Problem:
    """One fused product. Sizes are those of the whole: `M`, `N` of the unscattered or gathered result, `K` of the
    product that is computed (for a reduction, this rank's depth).

    `form`: along which dimension is gathered or scattered: "rows", "cols", "k", or "" for all-reduce.
    """

    op: str
    form: str
    M: int
    N: int
    K: int
    world_size: int
    dtype: torch.dtype
    weights: WeightFormat = PLAIN
    """How B is stored; `dtype` is that of everything else."""
    epilogue: Epilogue | None = None
    """What follows the sum: a gate, or a residual sum and the first half of a norm."""
    sums: Sums = FREE_SUMS
    """Which results of a row are to have the same bits (`planning/orders.py`)."""

    counted = "rows"

    @property
    def called_op(self) -> str:
        """The op that was called."""
        return _NAMES[self.epilogue] if self.epilogue else self.op

    @property
    def itemsize(self) -> int:
        """Bytes of a number of A and B as they are multiplied."""
        return self.weights.operand_bytes or self.dtype.itemsize

    @property
    def chooses_order(self) -> bool:
        """Whether a plan takes tiles of one order only, which it finds first."""
        return self.sums.promised

    @property
    def text(self) -> str:
        """The problem in the words of a plan's first line."""
        stored = "" if self.weights is PLAIN else f", B {self.weights.name}"
        return f"{self.called_op} {self.form} M={self.M} N={self.N} K={self.K} {self.dtype}{stored}"

    @property
    def free(self) -> Problem:
        """The same problem without a promise of equal bits."""
        return replace(self, sums=FREE_SUMS)

    def converted(self, machine: Machine) -> str:
        """Return the reason why each call converts B to A's dtype; "" if it does not."""
        return self.weights.converted(self, machine)

    @property
    def empty(self) -> bool:
        """Whether no rank has anything to compute. In `all_gather_matmul` N may differ by rank, so only M tells."""
        return self.M == 0 or (self.N == 0 and self.op != GATHER_MATMUL)

    @property
    def tree(self) -> sum_tree.Tree | None:
        """The tree in which the ranks add up products along K, if the same bits are promised on any number of them."""
        return self.sums.tree

    @property
    def part_rows(self) -> int:
        """Rows of the largest part that one rank contributes or owns."""
        return part_size(self.M, self.world_size) if self.form == "rows" else self.M

    @property
    def part_cols(self) -> int:
        return part_size(self.N, self.world_size) if self.form == "cols" else self.N

    @property
    def gemm(self) -> tuple[int, int, int]:
        """The product that one rank computes: (m, n, k) of its largest part."""
        if self.op == MATMUL_GATHER:
            return self.part_rows, self.part_cols, self.K
        return self.M, self.N, self.K

    def whole_vectors(self, size: int) -> bool:
        """Return whether rows of `size` elements that follow each other begin at whole vectors, as TMA needs it."""
        return size * self.dtype.itemsize % TMA_ALIGNMENT == 0

    @property
    def link_bytes(self) -> float:
        """Bytes that each rank sends in the bandwidth-optimal algorithm."""
        others = (self.world_size - 1) / self.world_size
        size = self.M * (self.K if self.op == GATHER_MATMUL else self.N) * self.dtype.itemsize
        return size * others * (2 if self.op == ALL_REDUCE else 1)


def requested_problem(
    op: str, M: int, N: int, K: int, world_size: int, dtype: torch.dtype, form: str | None = None,
    weights: WeightFormat = PLAIN, invariant: str | None = None, k_per_rank: Sequence[int] | None = None,
) -> Problem:  # fmt: skip
    """Return the problem that the arguments describe. Raises `ArgumentError` where they make no sense."""
    if op not in (*OPS, *_KINDS):
        raise ArgumentError(f"op is {op!r}; expected one of {', '.join((*OPS, *_KINDS))}")
    check_sizes(M, N, K, world_size, dtype, invariant)
    if op == GATED and N % 2:
        raise ArgumentError(f"N is {N} for {op}; expected an even number, the columns of gate and up together")
    forms = {ALL_REDUCE: ("",), NORM: ("",), GATHER_MATMUL: ("rows", "k"), GATED: ("rows",)}.get(op, ("rows", "cols"))
    form = forms[0] if form is None else form
    if form not in forms:
        expected = f"one of {', '.join(forms)}" if len(forms) > 1 else "none: there is one only"
        raise ArgumentError(f"form is {form!r} for {op}; expected {expected}")
    if weights is not PLAIN and op not in SCALED:
        served = ", ".join(name for name in (*OPS, *_KINDS) if name in SCALED)
        raise ArgumentError(f"{weights.request} for {op}; expected {weights.no_request}, or one of {served}")
    return promised(_planned(Problem(op, form, M, N, K, world_size, dtype, weights)), invariant, k_per_rank)


def promised(
    problem: Problem, invariant: str | None, k_per_rank: Sequence[int] | None, biased: bool = False
) -> Problem:
    """Return `problem` with its promise of equal bits. `k_per_rank`: each rank's K, for a sum; None if all are equal.

    `biased`: whether the call has a bias.

    Raises `ArgumentError` or `ShapeError` where the promise cannot be kept.
    """
    if not invariant and k_per_rank is None:
        return problem
    if invariant == RANKS and problem.weights is not PLAIN and problem.weights.by_rank:
        raise ArgumentError(
            f"{problem.called_op}: B is {problem.weights.name}, whose scales go by the rank; with invariant='ranks'"
            " expected weights in 16 bits or float32"
        )
    ordered = invariant == RANKS and problem.op in SUMS
    kind = RANKS_ALIKE if ordered else ROWS_ALIKE if invariant else FREE_SUMS.kind
    sums = Sums(kind, invariant, biased=biased and bool(invariant) and problem.op in SUMS)
    if k_per_rank is not None:
        known = isinstance(k_per_rank, Sequence) and all(type(k) is int and k >= 0 for k in k_per_rank)
        if not known or len(k_per_rank) != problem.world_size:
            raise ArgumentError(
                f"{problem.called_op}: k_per_rank is {k_per_rank!r}; expected {problem.world_size} integers"
                " from 0, each rank's K"
            )
    if ordered:
        sums = replace(sums, k_per_rank=(problem.K,) * problem.world_size if k_per_rank is None else tuple(k_per_rank))
        sum_tree.tree_of(problem.called_op, sums.k_per_rank)  # raises unless leaves are whole
    return replace(problem, sums=sums)


def check_sizes(M: int, N: int, K: int, world_size: int, dtype: torch.dtype, invariant: str | None) -> None:
    """Raise `ArgumentError` unless sizes, ranks, dtype and `invariant` make sense for any op."""
    if wrong := refusal(invariant):
        raise wrong
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype is {dtype!r}; expected one of {', '.join(map(str, DTYPES))}")
    for name, size in (("M", M), ("N", N), ("K", K)):
        if type(size) is not int or not 0 <= size < 2**31:
            raise ArgumentError(f"{name} is {size!r}; expected an integer from 0 below 2**31")
    if not isinstance(world_size, int) or world_size < 1:
        raise ArgumentError(f"world_size is {world_size!r}; expected an integer from 1")


def _planned(problem: Problem) -> Problem:
    """Return `problem`, by the op of which it is a kind."""
    kind = _KINDS.get(problem.op)
    return replace(problem, op=kind[0], epilogue=kind[1]) if kind else problem


def owned_part(problem: Problem, config: FusedConfig) -> tuple[int, int, bool]:
    """Return (rows, columns) of the sum that one rank owns, at most, and whether the ranks' parts lie side by side.

    A reduce-scatter's parts are given. An all-reduce's are whole blocks, along the dimension that shares them out more
    evenly; where both do alike, by rows.
    """
    if problem.op == REDUCE_SCATTER:
        return problem.part_rows, problem.part_cols, problem.form == "cols"
    rows = -(-problem.M // (problem.world_size * config.block_m)) * config.block_m
    cols = -(-problem.N // (problem.world_size * config.block_n)) * config.block_n
    return (rows, problem.N, False) if rows * problem.N <= problem.M * cols else (problem.M, cols, True)


def describe(
    op: str, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, rank: int, world_size: int,
    scale: torch.Tensor | None = None,
) -> Problem:  # fmt: skip
    """Return the problem that the shapes say. Raises `ShapeError` where no form of `op` fits them."""
    m, k = A.shape
    stored, n = B.shape
    weights = format_of(B, scale)
    kb = weights.depth(stored, k)
    rows, cols = out.shape
    w = world_size

    def problem_if(form: str, M: int, N: int, K: int, **expected: tuple[int, float]) -> Problem | None:
        given = {"A": (m, k), "B": (kb, n), "out": (rows, cols)}
        if all(given[name] == shape for name, shape in expected.items()):
            return Problem(op, form, M, N, K, w, A.dtype)
        return None

    def part(size: int) -> int:
        return part_of(size, w, rank)

    # The order decides where both forms fit, which is only so when the whole is at most one element wide: it lies on
    # rank 0 in either form, and the other ranks, whose part is empty, come to "rows" as well.
    if op in (ALL_REDUCE, NORM):
        problem = problem_if("", m, n, k, B=(k, n), out=(m, n))
        expected = "A (M,K), B (K,N), out (M,N)"
    elif op == GATHER_MATMUL:
        problem = problem_if("rows", rows, n, kb, A=(part(rows), kb), out=(rows, n))
        problem = problem or problem_if("k", rows, n, kb, A=(rows, part(kb)), out=(rows, n))
        if problem and problem.form == "k" and rows == 1 and kb <= 1:
            problem = Problem(op, "rows", rows, n, kb, w, A.dtype)
        expected = "A (M/w,K) or (M,K/w), B (K,N), out (M,N)"
    elif op == GATED:
        problem = problem_if("rows", rows, n, kb, A=(part(rows), kb), out=(rows, n / 2))
        expected = "A (M/w,K), B (K,N), out (M,N/2)"
    elif op == MATMUL_GATHER:
        problem = problem_if("rows", rows, n, k, A=(part(rows), k), B=(k, n), out=(rows, n))
        problem = problem or problem_if("cols", rows, cols, k, A=(rows, k), B=(k, part(cols)))
        if problem and problem.form == "cols" and rows == cols == 1:
            problem = Problem(op, "rows", rows, cols, k, w, A.dtype)
        expected = "A (M/w,K), B (K,N), out (M,N), or A (M,K), B (K,N/w), out (M,N)"
    else:
        problem = problem_if("rows", m, n, k, B=(k, n), out=(part(m), n))
        problem = problem or problem_if("cols", m, n, k, B=(k, n), out=(m, part(n)))
        if problem and problem.form == "cols" and m == n == 1:
            problem = Problem(op, "rows", m, n, k, w, A.dtype)
        expected = "A (M,K), B (K,N), out (M/w,N) or (M,N/w)"
        if (rows, cols) == (m, n):
            expected += f", or ctx.ccl.reduce_scatter(out, A @ B) for this rank's tiles in an out (M,N) ({PAGE}),"
    if problem is None:
        raise ShapeError(
            f"{op}: A is {(m, k)}, B is {(kb, n)}, out is {(rows, cols)} on rank {rank}; expected {expected} with "
            f"w = {w} ranks, parts as torch.chunk splits them"
        )
    return replace(_planned(problem), weights=weights)
