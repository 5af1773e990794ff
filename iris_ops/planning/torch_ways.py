"""The ways whose product is torch's, as numbers: what each serves, how long it takes, what it stages.

With `Problem.invariant` the product is `local/matmul.py`'s in place of torch's.

`with_torch/` has what they launch: a collective after the product or before it (`sequential`), and copy engines that
carry gathered rows while other rows are multiplied (`copy_gather`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from iris.ccl import Config
from iris.ccl import plan as collectives
from iris.ccl import problem as ccl

from ..config import FusedConfig
from ..problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, Problem, part_of
from .machine import Machine
from .product_model import product_us
from .torch_model import expected_in_turn, expected_us


@dataclass(frozen=True)
class TorchWay:
    """`supports`: why a problem cannot be served so, if it cannot. `times`: microseconds of the product, of what
    travels, and of both together. `elements`: of staging memory that a call takes.
    """

    supports: Callable[[Problem], str | None]
    times: Callable[[Problem, FusedConfig, Machine], tuple[float, float, float]]
    elements: Callable[[Problem], int]


# --- sequential ------------------------------------------------------------------------------------------------------

# Microseconds from one kernel to the next that reads what it wrote.
_BETWEEN_US = 2.3


def _sequential_supports(problem: Problem) -> str | None:
    """Why this problem cannot be served so."""
    if problem.form not in ("", "rows"):
        return f"the collectives of whole tensors gather and scatter rows, not {problem.form}"
    if problem.op in (GATHER_MATMUL, MATMUL_GATHER) and problem.M % problem.world_size:
        return f"{problem.M} rows to gather do not split evenly over {problem.world_size} ranks"
    width = problem.K if problem.op == GATHER_MATMUL else problem.N
    elements, most = (1 if problem.op == ALL_REDUCE else problem.M) * width, ccl.MAX_ELEMENTS
    if elements > most:
        return f"a collective moves at most {most} elements in a call, not {elements}"
    return None


def _sequential_us(problem: Problem, config: FusedConfig, machine: Machine) -> tuple[float, float, float]:
    """Microseconds of the product, of the collective, and of both."""
    link = collectives.Machine(machine.num_programs, resident=2)
    share = machine.link_gbs / 380.0  # of an H200's
    link = replace(
        link, **{name: share * getattr(link, name) for name in ("link_gbs", "lamport_gbs", "pair_gbs", "two_hops_gbs")}
    )
    if problem.invariant:
        gemm = product_us(*problem.gemm, problem, machine)
    else:
        gemm = expected_us(*problem.gemm, machine, in_fp8=problem.fp8)
    moved = collectives.plan(_collective(problem), Config(), link).expected_us
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
    """Elements between the two halves, where `out` cannot hold them."""
    if problem.op in (ALL_REDUCE, MATMUL_GATHER):
        return 0
    return problem.M * (problem.K if problem.op == GATHER_MATMUL else problem.N)


# --- copy_gather -----------------------------------------------------------------------------------------------------

# Microseconds, by fit: of a barrier and the wait for room to run it, for each rank; what a copy takes beside its bytes.
BARRIER_US = 1.5
COPY_US = 8.0
# Rows from which on a product is worth reading B for.
_LEAST_ROWS = 512


def _copy_gather_supports(problem: Problem) -> str | None:
    """Why this problem cannot be served so."""
    if problem.op != GATHER_MATMUL or problem.form != "rows":
        return "copy engines serve all_gather_matmul by rows"
    return None


def steps_of(problem: Problem, config: FusedConfig) -> list[range]:
    """The ranks whose rows are multiplied together, counted from the rank itself on; the same on all ranks."""
    others = problem.world_size - 1
    together = min(others, max(config.ranks_together, -(-_LEAST_ROWS // max(1, problem.part_rows))))
    if others == 0:
        return []
    first = others % together or together  # the smallest group, which the fewest rows hide
    begins = [1, *range(1 + first, others + 1, together)]
    return [range(begin, end) for begin, end in zip(begins, [*begins[1:], others + 1], strict=True)]


def rows_of(problem: Problem, rank: int, step: range) -> list[tuple[int, int]]:
    """The rows [begin, end) that arrive at `rank` in a step: neighbours but where they begin anew at 0."""
    w, part, M = problem.world_size, problem.part_rows, problem.M
    first, last = (rank + step[0]) % w, (rank + step[-1]) % w
    ranks = [(first, last)] if first <= last else [(first, w - 1), (0, last)]
    spans = [(min(M, low * part), min(M, (high + 1) * part)) for low, high in ranks]
    return [(begin, end) for begin, end in spans if begin < end]


def _copy_gather_us(problem: Problem, config: FusedConfig, machine: Machine) -> tuple[float, float, float]:
    """Microseconds of the products, of the copies, and of all, on the rank that takes longest."""
    w = problem.world_size
    copy = problem.part_rows * problem.K * problem.dtype.itemsize / (machine.link_gbs * 1e3) + COPY_US
    barrier = BARRIER_US * w
    found = []
    for rank in range(w):
        steps = [rows_of(problem, rank, step) for step in steps_of(problem, config)]
        rows = [part_of(problem.M, w, rank), *(end - begin for step in steps for begin, end in step)]
        if problem.invariant:
            products = [product_us(each, problem.N, problem.K, problem, machine) for each in rows]
        else:
            products = expected_in_turn(rows, problem.N, problem.K, machine, in_fp8=problem.fp8)
        us, sent, done = barrier + products[0], barrier, 1
        for step, there in zip(steps_of(problem, config), steps, strict=True):
            sent += len(step) * copy
            # a barrier beside a product that fills the chip waits for its end
            us = max(us, sent) + barrier + sum(products[done : done + len(there)])
            done += len(there)
        found.append((us, sum(products)))
    total, gemm = max(found)
    return gemm, copy * (w - 1), total


def copy_gather_elements(problem: Problem) -> int:
    """Elements of the gathered rows; one at least, so that they have a place."""
    return max(1, problem.M * problem.K)


TORCH_WAYS = {
    "sequential": TorchWay(_sequential_supports, _sequential_us, sequential_elements),
    "copy_gather": TorchWay(_copy_gather_supports, _copy_gather_us, copy_gather_elements),
}
