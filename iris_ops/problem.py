"""From tensors to a `Problem`: what is multiplied, what is gathered or scattered, and along which dimension.

Uneven splits follow `torch.chunk`: the first parts have ceil(size / world_size) elements, and the last may be short or
empty. This module imports no triton. `checks.py` refuses tensors that make no problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from iris.aliases import PAGE
from iris.errors import ArgumentError, ShapeError
from iris.invariance import RANKS, refusal
import torch

from . import sum_tree
from .planning import needs
from .planning.needs import ANY_ORDER, EIGHT_BITS, PLAIN, RANKS_ALIKE, ROWS_ALIKE, Epilogue, Sums, WeightFormat

if TYPE_CHECKING:
    from .config import FusedConfig

ALL_REDUCE = "matmul_all_reduce"
GATHER_MATMUL = "all_gather_matmul"
MATMUL_GATHER = "matmul_all_gather"
REDUCE_SCATTER = "matmul_reduce_scatter"
OPS = (ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, REDUCE_SCATTER)
SUMS = (ALL_REDUCE, REDUCE_SCATTER)  # those that add up what the ranks multiply
# An all-reduce, and what follows it (`rmsnorm_epilogue.py`).
NORM = "matmul_all_reduce_norm"
NORM_SPAN = 64  # columns that share a sum of squares
# `all_gather_matmul` by rows, of whose result the first half gates the second: to plan and launch, the same problem.
GATED = "all_gather_matmul_gated"
# Those that take B in eight bits, with scales (`fp8/scaled_matmul.py`).
SCALED = (ALL_REDUCE, NORM, GATHER_MATMUL, GATED, REDUCE_SCATTER)
_KINDS: dict[str, dict[str, Any]] = {
    NORM: {"op": ALL_REDUCE, "normed": True},
    GATED: {"op": GATHER_MATMUL, "gated": True},
}

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn  # of B, where there are scales
# Tensor descriptors need this, in bytes, of strides, base addresses and the places in a row where tiles begin (an H200
# reports an illegal instruction for a tile that begins elsewhere).
TMA_ALIGNMENT = 16


def part_size(size: int, world_size: int) -> int:
    """The largest part when `size` is split over the ranks."""
    return -(-size // world_size)


def part_of(size: int, world_size: int, rank: int) -> int:
    """How much of `size` belongs to `rank`."""
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
    gated: bool = False
    fp8: bool = False
    """Whether B is in eight bits; `dtype` is that of everything else."""
    normed: bool = False
    """Whether a residual sum and the first half of a norm follow."""
    invariant: str | None = None
    """"batch": a row has the same bits however many there are; "ranks": and on however many ranks
    (`planning/orders.py`)."""
    depths: tuple[int, ...] = ()
    """Each rank's K, of a sum that is to be the same on any number of ranks; else empty."""
    biased: bool = False
    """Whether a bias follows the ranks' sum, of which bits are promised; else False."""

    @property
    def asked(self) -> str:
        """The op that was called."""
        return GATED if self.gated else NORM if self.normed else self.op

    @property
    def weights(self) -> WeightFormat:
        """How B is stored."""
        return EIGHT_BITS if self.fp8 else PLAIN

    @property
    def sums(self) -> Sums:
        """Which results of a row are to have the same bits."""
        return RANKS_ALIKE if self.by_tree else ROWS_ALIKE if self.invariant else ANY_ORDER

    @property
    def epilogue(self) -> tuple[Epilogue, ...]:
        """What follows the sum."""
        return (needs.GATE,) if self.gated else (needs.NORM,) if self.normed else ()

    counted = "rows"

    @property
    def chooses_order(self) -> bool:
        """Whether a plan takes tiles of one order only, which it finds first."""
        return self.invariant is not None

    @property
    def text(self) -> str:
        """The problem in the words of a plan's first line."""
        stored = "" if self.weights is PLAIN else f", B {self.weights.name}"
        return f"{self.asked} {self.form} M={self.M} N={self.N} K={self.K} {self.dtype}{stored}"

    @property
    def free(self) -> Problem:
        """The same problem without a promise of equal bits."""
        return replace(self, invariant=None, depths=(), biased=False)

    @property
    def empty(self) -> bool:
        """Whether no rank has anything to compute. In `all_gather_matmul` N may differ by rank, so only M tells."""
        return self.M == 0 or (self.N == 0 and self.op != GATHER_MATMUL)

    @property
    def by_tree(self) -> bool:
        """Whether products along K are added in a tree that the ranks share (`sum_tree.py`)."""
        return self.invariant == RANKS and self.op in SUMS

    @property
    def tree(self) -> sum_tree.Tree:
        """In which order a sum `by_tree` adds up, and who adds what. Raises `ShapeError` where a leaf is cut."""
        return sum_tree.tree_of(self.asked, self.depths)

    @property
    def by_halves(self) -> bool:
        """Whether a sum `by_tree` is that of two ranks, each of which has half of the leaves."""
        return self.by_tree and [last - first for first, last in self.tree.spans] == [sum_tree.LEAVES // 2] * 2

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
        """Whether rows of `size` elements that follow each other begin at whole vectors, as TMA needs it."""
        return size * self.dtype.itemsize % TMA_ALIGNMENT == 0

    @property
    def link_bytes(self) -> float:
        """Bytes that each rank sends in the bandwidth-optimal algorithm."""
        others = (self.world_size - 1) / self.world_size
        size = self.M * (self.K if self.op == GATHER_MATMUL else self.N) * self.dtype.itemsize
        return size * others * (2 if self.op == ALL_REDUCE else 1)


def problem_asked(
    op: str, M: int, N: int, K: int, world_size: int, dtype: torch.dtype, form: str | None = None, fp8: bool = False,
    invariant: str | None = None, depths: Sequence[int] | None = None,
) -> Problem:  # fmt: skip
    """The problem that a question to the planner describes. Raises `ArgumentError` where it makes no sense."""
    if op not in (*OPS, *_KINDS):
        raise ArgumentError(f"op is {op!r}; expected one of {', '.join((*OPS, *_KINDS))}")
    check_asked(M, N, K, world_size, dtype, invariant)
    if op == GATED and N % 2:
        raise ArgumentError(f"N is {N} for {op}; expected an even number, the columns of gate and up together")
    forms = {ALL_REDUCE: ("",), NORM: ("",), GATHER_MATMUL: ("rows", "k"), GATED: ("rows",)}.get(op, ("rows", "cols"))
    form = forms[0] if form is None else form
    if form not in forms:
        expected = f"one of {', '.join(forms)}" if len(forms) > 1 else "none: there is one only"
        raise ArgumentError(f"form is {form!r} for {op}; expected {expected}")
    if fp8 and op not in SCALED:
        served = ", ".join(each for each in (*OPS, *_KINDS) if each in SCALED)
        raise ArgumentError(f"fp8 is True for {op}; expected False, or one of {served}")
    return promised(_planned(Problem(op, form, M, N, K, world_size, dtype, fp8=fp8)), invariant, depths)


def promised(problem: Problem, invariant: str | None, depths: Sequence[int] | None, biased: bool = False) -> Problem:
    """`problem`, of which bits are promised. `depths`: each rank's K, of a sum; None where all have the same.

    `biased`: whether the call has a bias.

    Raises `ArgumentError` or `ShapeError` where the promise cannot be kept.
    """
    if not invariant and depths is None:
        return problem
    if invariant == RANKS and problem.fp8:
        raise ArgumentError(
            f"{problem.asked}: B is in eight bits, whose scales go by the rank; with invariant='ranks' expected weights"
            " in 16 bits or float32"
        )
    problem = replace(problem, invariant=invariant, biased=biased and bool(invariant) and problem.op in SUMS)
    if depths is not None:
        known = isinstance(depths, Sequence) and all(type(each) is int and each >= 0 for each in depths)
        if not known or len(depths) != problem.world_size:
            raise ArgumentError(
                f"{problem.asked}: depths is {depths!r}; expected {problem.world_size} integers from 0, each rank's K"
            )
    if not problem.by_tree:
        return problem
    problem = replace(problem, depths=(problem.K,) * problem.world_size if depths is None else tuple(depths))
    assert problem.tree  # or an error: leaves are whole
    return problem


def check_asked(M: int, N: int, K: int, world_size: int, dtype: torch.dtype, invariant: str | None) -> None:
    """Raises `ArgumentError` unless a question to the planner may have these, whichever the op."""
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
    """`problem`, by the op of which it is a kind."""
    kind = _KINDS.get(problem.op)
    return replace(problem, **kind) if kind else problem


def owned_part(problem: Problem, config: FusedConfig) -> tuple[int, int, bool]:
    """(rows, columns) of the sum that one rank owns, at most, and whether the ranks' parts lie side by side.

    A reduce-scatter's parts are given. An all-reduce's are whole blocks, along the dimension that shares them out more
    evenly; where both do alike, by rows.
    """
    if problem.op == REDUCE_SCATTER:
        return problem.part_rows, problem.part_cols, problem.form == "cols"
    rows = -(-problem.M // (problem.world_size * config.block_m)) * config.block_m
    cols = -(-problem.N // (problem.world_size * config.block_n)) * config.block_n
    return (rows, problem.N, False) if rows * problem.N <= problem.M * cols else (problem.M, cols, True)


def describe(op: str, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, rank: int, world_size: int) -> Problem:
    """The problem that the shapes say. Raises `ShapeError` where no form of `op` fits them."""
    m, k = A.shape
    kb, n = B.shape
    rows, cols = out.shape
    w = world_size

    def fits(form: str, M: int, N: int, K: int, **expected: tuple[int, float]) -> Problem | None:
        given = {"A": (m, k), "B": (kb, n), "out": (rows, cols)}
        if all(given[name] == shape for name, shape in expected.items()):
            return Problem(op, form, M, N, K, w, A.dtype)
        return None

    def part(size: int) -> int:
        return part_of(size, w, rank)

    # The order decides where both forms fit, which is only so when the whole is at most one element wide: it lies on
    # rank 0 in either form, and the other ranks, whose part is empty, come to "rows" as well.
    if op in (ALL_REDUCE, NORM):
        found = fits("", m, n, k, B=(k, n), out=(m, n))
        wanted = "A (M,K), B (K,N), out (M,N)"
    elif op == GATHER_MATMUL:
        found = fits("rows", rows, n, kb, A=(part(rows), kb), out=(rows, n))
        found = found or fits("k", rows, n, kb, A=(rows, part(kb)), out=(rows, n))
        if found and found.form == "k" and rows == 1 and kb <= 1:
            found = Problem(op, "rows", rows, n, kb, w, A.dtype)
        wanted = "A (M/w,K) or (M,K/w), B (K,N), out (M,N)"
    elif op == GATED:
        found = fits("rows", rows, n, kb, A=(part(rows), kb), out=(rows, n / 2))
        wanted = "A (M/w,K), B (K,N), out (M,N/2)"
    elif op == MATMUL_GATHER:
        found = fits("rows", rows, n, k, A=(part(rows), k), B=(k, n), out=(rows, n))
        found = found or fits("cols", rows, cols, k, A=(rows, k), B=(k, part(cols)))
        if found and found.form == "cols" and rows == cols == 1:
            found = Problem(op, "rows", rows, cols, k, w, A.dtype)
        wanted = "A (M/w,K), B (K,N), out (M,N), or A (M,K), B (K,N/w), out (M,N)"
    else:
        found = fits("rows", m, n, k, B=(k, n), out=(part(m), n))
        found = found or fits("cols", m, n, k, B=(k, n), out=(m, part(n)))
        if found and found.form == "cols" and m == n == 1:
            found = Problem(op, "rows", m, n, k, w, A.dtype)
        wanted = "A (M,K), B (K,N), out (M/w,N) or (M,N/w)"
        if (rows, cols) == (m, n):
            wanted += f", or ctx.ccl.reduce_scatter(out, A @ B) for this rank's tiles in an out (M,N) ({PAGE}),"
    if found is None:
        raise ShapeError(
            f"{op}: A is {(m, k)}, B is {(kb, n)}, out is {(rows, cols)} on rank {rank}; expected {wanted} with "
            f"w = {w} ranks, parts as torch.chunk splits them"
        )
    return replace(_planned(found), fp8=B.dtype == FP8)
