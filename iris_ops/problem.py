"""Turn tensors into a `Problem`: what is multiplied, what is gathered or scattered, and along which dimension.

Uneven splits follow `torch.chunk`: the first parts have ceil(size / world_size) elements, and the last may be short or
empty. This module imports no triton. `checks.py` refuses tensors that make no problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from iris.errors import ArgumentError, ShapeError
from iris.invariance import level_of, refusal
import torch

from . import sum_tree
from .planning import operations
from .planning.epilogues import NO_EPILOGUE, Epilogue
from .planning.experts import MOST_CHOSEN, MOST_EXPERTS, ONE_EXPERT, Experts
from .planning.needs import PLAIN, WeightFormat
from .planning.operations import (  # noqa: F401  (callers take the names from here)
    ALL_REDUCE,
    GATHER_MATMUL,
    MATMUL_GATHER,
    NORM,
    OPS,
    REDUCE_SCATTER,
    SCALED,
    SUMS,
    Operation,
    Shapes,
)
from .planning.sums import FREE_SUMS, Level, Sums
from .planning.weights import format_of

if TYPE_CHECKING:
    from iris.machines import Machine

    from .config import FusedConfig

NORM_SPAN = 64  # columns that share a sum of squares

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
    """One fused product. Sizes are those of the whole: `M`, `N` of the unscattered or gathered result before its
    epilogue, `K` of the product that is computed (for a reduction, this rank's depth). Of a mixture, `M` counts tokens.

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
    epilogue: Epilogue = NO_EPILOGUE
    """What follows the sum."""
    sums: Sums = FREE_SUMS
    """Which results of a row are to have the same bits (`planning/orders.py`)."""
    experts: Experts = ONE_EXPERT
    """Which of several weights multiply a row; without a mixture there is one."""

    @property
    def operation(self) -> Operation:
        """Return the op whose product and exchange this is."""
        return operations.BY_NAME[self.op]

    @property
    def called_op(self) -> str:
        """Return the name of the op that was called."""
        return operations.CALLED.get((self.op, self.epilogue), self.op)

    @property
    def itemsize(self) -> int:
        """Return the bytes of a number of A and B as they are multiplied."""
        return self.weights.operand_bytes or self.dtype.itemsize

    @property
    def chooses_order(self) -> bool:
        """Return whether a plan takes tiles of one order only, which it finds first."""
        return self.sums.promised and not self.operation.one_order

    @property
    def text(self) -> str:
        """Return the problem as the first line of a plan shows it."""
        weight = "experts" if self.operation.mixes else "B"
        stored = "" if self.weights is PLAIN else f", {weight} {self.weights.name}"
        return f"{self.called_op} {self.operation.text(self)} {self.dtype}{stored}"

    @property
    def free(self) -> Problem:
        """Return the same problem without a promise of equal bits."""
        return replace(self, sums=FREE_SUMS)

    def converted(self, machine: Machine) -> str:
        """Return the reason why each call converts B to A's dtype; "" if it does not."""
        return "" if self.operation.widens else self.weights.converted(self, machine)

    def by_mean(self, k_per_rank: Sequence[int] | None) -> Problem:
        """Return the problem with the mean of all ranks' K, so that ranks with different K plan alike."""
        if k_per_rank is None or self.sums.k_per_rank or len(set(k_per_rank)) == 1:
            return self
        return replace(self, K=-(-sum(k_per_rank) // self.world_size))

    @property
    def empty(self) -> bool:
        """Return whether no rank has anything to compute. If N may differ by rank, only M counts."""
        return self.M == 0 or (self.N == 0 and self.operation.shared == "N")

    @property
    def tree(self) -> sum_tree.Tree | None:
        """Return the tree in which the ranks add up products along K, if equal bits are promised on any number of
        ranks."""
        return self.sums.tree

    @property
    def out_cols(self) -> int:
        """Return the columns of the result."""
        return self.N // self.epilogue.matrices

    @property
    def pairs(self) -> int:
        """Return the rows of the product: one for each row of A and each of its experts."""
        return self.M * self.experts.top_k

    @property
    def part_rows(self) -> int:
        """Return the rows of the largest part that one rank contributes or owns."""
        return part_size(self.M, self.world_size) if self.form == "rows" else self.M

    @property
    def part_cols(self) -> int:
        return part_size(self.N, self.world_size) if self.form == "cols" else self.N

    @property
    def gemm(self) -> tuple[int, int, int]:
        """Return (m, n, k) of the largest product that one rank computes."""
        return self.operation.product(self)

    def whole_vectors(self, size: int) -> bool:
        """Return whether rows of `size` elements that follow each other begin at whole vectors, as TMA needs it."""
        return size * self.dtype.itemsize % TMA_ALIGNMENT == 0

    @property
    def link_bytes(self) -> float:
        """Return the bytes that each rank sends in the bandwidth-optimal algorithm."""
        others = (self.world_size - 1) / self.world_size
        return self.operation.sent(self) * self.dtype.itemsize * others


@dataclass(frozen=True)
class Request:
    """A question to the planner, as `ctx.ops.plan` and `iris-tp plan` put it.

    `M`, `N`: of the whole result, before its epilogue; `K`: the depth that one rank multiplies. `form`: "rows", "cols"
    or "k" for an op that has several; None: the first. `invariant`: as of `iris.iris`. `k_per_rank`: each rank's K, for
    ops that add along it. `experts`, `top_k` (by default 1): of the ops of a mixture. Their `M` is the number of
    tokens, their `N` of the result, after its epilogue, and their `form` "rows" if weights lie [E, K, N].
    """

    op: str
    M: int
    N: int
    K: int
    world_size: int
    dtype: torch.dtype
    form: str | None = None
    weights: WeightFormat = PLAIN
    invariant: str | None = None
    experts: int | None = None
    top_k: int | None = None
    k_per_rank: Sequence[int] | None = None

    def check_sizes(self) -> None:
        """Raise `ArgumentError` unless sizes, ranks, dtype and `invariant` make sense for any op."""
        if wrong := refusal(self.invariant):
            raise wrong
        if self.dtype not in DTYPES:
            raise ArgumentError(f"dtype is {self.dtype!r}; expected one of {', '.join(map(str, DTYPES))}")
        for name, size in (("M", self.M), ("N", self.N), ("K", self.K)):
            if type(size) is not int or not 0 <= size < 2**31:
                raise ArgumentError(f"{name} is {size!r}; expected an integer from 0 below 2**31")
        if not isinstance(self.world_size, int) or self.world_size < 1:
            raise ArgumentError(f"world_size is {self.world_size!r}; expected an integer from 1")


def requested_problem(request: Request, level: Level | None = None) -> Problem:
    """Return the problem that a request describes, at the `level` of a context or at that which the request names.

    Raises `ArgumentError` where it makes no sense.
    """
    operation = operations.BY_NAME.get(request.op)
    if operation is None:
        raise ArgumentError(f"op is {request.op!r}; expected one of {', '.join(operations.BY_NAME)}")
    request.check_sizes()
    problem = _requested_mixture(request, operation) if operation.mixes else _requested_product(request, operation)
    level = level or level_of(request.invariant)
    return level.promise(problem, request.k_per_rank).by_mean(request.k_per_rank)


def _requested_product(request: Request, operation: Operation) -> Problem:
    op, N, form, weights = request.op, request.N, request.form, request.weights
    if reason := operation.refuses(N):
        raise ArgumentError(f"N is {N} for {op}; {reason}")
    forms = operation.forms
    form = forms[0] if form is None else form
    if form not in forms:
        expected = f"one of {', '.join(forms)}" if len(forms) > 1 else "none: there is one only"
        raise ArgumentError(f"form is {form!r} for {op}; expected {expected}")
    if weights is not PLAIN and not operation.scaled:
        raise ArgumentError(f"{weights.request} for {op}; expected {weights.no_request}, or one of {', '.join(SCALED)}")
    for name, value in (("experts", request.experts), ("top_k", request.top_k)):
        if value is not None:
            mixtures = ", ".join(operations.MOE_OPS)
            raise ArgumentError(f"{name} is {value!r} for {op}; expected none, or one of {mixtures}")
    sizes = request.M, N, request.K, request.world_size
    return Problem(operation.base or op, form, *sizes, request.dtype, weights, operation.epilogue)


def _requested_mixture(request: Request, operation: Operation) -> Problem:
    op, form, weights, experts = request.op, request.form, request.weights, request.experts
    top_k = 1 if request.top_k is None else request.top_k
    for name, size, most in (("experts", experts, MOST_EXPERTS), ("top_k", top_k, MOST_CHOSEN)):
        if type(size) is not int or not 1 <= size <= most:
            raise ArgumentError(f"{name} is {size!r} for {op}; expected an integer from 1 to {most}")
    assert experts is not None
    if top_k > experts:
        raise ArgumentError(f"top_k is {top_k} for {op}; expected at most {experts}, the experts that there are")
    if form not in (None, "rows"):
        raise ArgumentError(f"form is {form!r} for {op}; expected none, or 'rows' for weights that lie [E,K,N]")
    if weights is not PLAIN and form == "rows":
        raise ArgumentError(
            f"form is 'rows' for {op}, and {weights.request}; expected none: experts {weights.name} lie [E,N,K]"
        )
    N = request.N * operation.epilogue.matrices
    sizes, of_rows = (request.M, N, request.K, request.world_size), Experts(experts, top_k, form == "rows")
    return Problem(op, operation.forms[0], *sizes, request.dtype, weights, operation.epilogue, experts=of_rows)


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
    """Return the problem that the shapes describe. Raises `ShapeError` if no form of `op` fits them."""
    operation, weights = operations.BY_NAME[op], format_of(B, scale)
    stored = weights.depth(B.shape[0], A.shape[1]), B.shape[1]
    shapes = Shapes(tuple(A.shape), stored, tuple(out.shape), lambda size: part_of(size, world_size, rank))
    fitting = operation.matching_form(shapes)
    if fitting is None:
        raise ShapeError(
            f"{op}: A is {shapes.A}, B is {shapes.B}, out is {shapes.out} on rank {rank}; expected"
            f" {operation.expects(shapes)} with w = {world_size} ranks, parts as torch.chunk splits them"
        )
    return Problem(operation.base or op, *fitting, world_size, A.dtype, weights, operation.epilogue)
