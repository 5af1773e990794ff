"""Torch's product, and a collective of `iris.ccl` after it; for a gather before it (`with_torch/sequential.py`).

Where rows are to be alike the product is `local/matmul.py`'s in place of torch's.
"""

from __future__ import annotations

from collections.abc import Sequence

from iris.ccl import Config
from iris.ccl import plan as collectives
from iris.ccl import problem as ccl
from iris.machines import Machine

from ...config import FusedConfig, Prediction
from ...problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, OPS, Problem
from ..needs import PLAIN
from ..orders import Order, of_library
from ..product_model import library_us
from ..torch_model import library_refused
from ..way import Sizes, Way
from ..weights import SCALED_AT_END

SEQUENTIAL = "with_torch.sequential"
# Microseconds from one kernel to the next that reads what it wrote.
_BETWEEN_US = 2.3
# What a collective takes longer whose number of elements is no multiple of so many: it moves one element at a time.
_VECTORS, _MOVED_APART = 16, 3.0


class Sequential(Way):
    """Several launches, so it must be faster than one of ours by more than a graph of them would gain."""

    kernel = SEQUENTIAL
    launcher = "with_torch.sequential:prepare"
    several_launches = True
    ops = frozenset(OPS)
    algorithms = ("sequential",)
    weights = frozenset((PLAIN, *SCALED_AT_END))
    lead = 0.02, 7.0

    def accepts(self, problem: Problem, machine: Machine) -> str | None:
        return library_refused(problem, machine) or self.refuses(problem)

    def refuses(self, problem: Problem) -> str | None:
        if problem.form not in ("", "rows"):
            return f"the collectives of whole tensors gather and scatter rows, not {problem.form}"
        if problem.op in (GATHER_MATMUL, MATMUL_GATHER) and problem.M % problem.world_size:
            return f"{problem.M} rows to gather do not split evenly over {problem.world_size} ranks"
        width = problem.K if problem.op == GATHER_MATMUL else problem.N
        elements, most = (1 if problem.op == ALL_REDUCE else problem.M) * width, ccl.MAX_ELEMENTS
        if elements > most:
            return f"a collective moves at most {most} elements in a call, not {elements}"
        return None

    def means(self, problem: Problem, config: FusedConfig) -> bool:
        return config.algorithm in self.algorithms

    def rounds_rows(self, problem: Problem) -> bool:
        return False  # the product does

    def tiles(self, problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
        return [FusedConfig(algorithm="sequential", kernel=self.kernel)]

    def times(self, problem: Problem, config: FusedConfig, machine: Machine) -> Prediction:
        return Prediction(*_sequential_us(problem, config, machine))

    def order(self, problem: Problem, config: FusedConfig, machine: Machine) -> Order | None:
        return of_library(problem, config, machine)

    def workspace(self, problem: Problem, config: FusedConfig, programs: int) -> Sizes:
        return Sizes(staging=sequential_elements(problem) * problem.dtype.itemsize)

    def label(self, problem: Problem, config: FusedConfig) -> str:
        return self.kernel + ("" if problem.weights is PLAIN else f", {problem.weights.name}")


def _sequential_us(problem: Problem, config: FusedConfig, machine: Machine) -> tuple[float, float, float]:
    """Return the microseconds of the product, of the collective, and of both."""
    gemm, moving = library_us(problem, machine), _collective(problem)
    moved = collectives.plan(moving, Config(), machine.links).expected_us
    if moving.n % _VECTORS:
        moved *= _MOVED_APART
    return gemm, moved, gemm + moved + _BETWEEN_US


def _collective(problem: Problem) -> ccl.Problem:
    w, dtype = problem.world_size, problem.dtype
    width = problem.K if problem.op == GATHER_MATMUL else problem.N
    n, part = problem.M * width, problem.part_rows * width
    if problem.op == ALL_REDUCE:
        return ccl.Problem(ccl.ALL_REDUCE, n, 0, 0, dtype, w)
    if problem.op in (GATHER_MATMUL, MATMUL_GATHER):
        return ccl.Problem(ccl.ALL_GATHER, part, part, 0, dtype, w)
    return ccl.Problem(ccl.REDUCE_SCATTER, n, part, 0, dtype, w)


def sequential_elements(problem: Problem) -> int:
    """Return the elements between the two halves, where `out` cannot hold them."""
    if problem.op in (ALL_REDUCE, MATMUL_GATHER):
        return 0
    return problem.M * (problem.K if problem.op == GATHER_MATMUL else problem.N)
