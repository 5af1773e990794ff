"""The product by torch, which is cuBLAS's or hipBLASLt's, and the collective of `iris.ccl` after it, or, for
`all_gather_matmul`, before it. In eight bits whichever product `fp8.py` takes; the model reckons with torch's.

Nothing overlaps here, and each half is the fastest there is: with some hundred rows a library's product, whose programs
share operands between multiprocessors, gains more on ours than an overlap would hide. As in the other algorithms, what
travels is rounded once to the tensors' dtype, and sums are kept in fp32 in rank order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from iris.ccl import Config
from iris.ccl import plan as collectives
from iris.ccl.problem import ALL_GATHER
from iris.ccl.problem import ALL_REDUCE as REDUCE
from iris.ccl.problem import REDUCE_SCATTER as SCATTER
from iris.ccl.problem import Problem as Collective

from . import torch_product
from .problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, Problem

if TYPE_CHECKING:
    from .config import FusedConfig
    from .machine import Machine
    from .workspace import Workspace


# Microseconds from one kernel to the next that reads what it wrote.
_BETWEEN_US = 2.5


def objection(problem: Problem) -> str | None:
    """Why this problem cannot be served so."""
    if problem.form not in ("", "rows"):
        return f"the collectives of whole tensors gather and scatter rows, not {problem.form}"
    if problem.op in (GATHER_MATMUL, MATMUL_GATHER) and problem.M % problem.world_size:
        return f"{problem.M} rows to gather do not split evenly over {problem.world_size} ranks"
    return None


def predict(problem: Problem, config: FusedConfig, machine: Machine) -> tuple[float, float, float]:
    """Microseconds of the product, of the collective, and of both."""
    link = collectives.Machine(machine.num_programs, resident=2)
    share = machine.link_gbs / 380.0  # of an H200's
    link = replace(link, **{name: share * getattr(link, name) for name in ("link_gbs", "words_gbs", "two_hops_gbs")})
    gemm = torch_product.expected_us(*problem.gemm, machine, in_fp8=problem.fp8)
    moved = collectives.plan(_collective(problem), Config(), link).expected_us
    return gemm, moved, gemm + moved + _BETWEEN_US


def _collective(problem: Problem) -> Collective:
    w, dtype = problem.world_size, problem.dtype
    width = problem.K if problem.op == GATHER_MATMUL else problem.N
    n, part = problem.M * width, problem.part_rows * width
    if problem.op == ALL_REDUCE:
        return Collective(REDUCE, n, 0, 0, dtype, w)
    if problem.op in (GATHER_MATMUL, MATMUL_GATHER):
        return Collective(ALL_GATHER, part, part, 0, dtype, w)
    return Collective(SCATTER, n, part, 0, dtype, w)


def staged_elements(problem: Problem) -> int:
    """Elements between the two halves, where `out` cannot hold them."""
    if problem.op in (ALL_REDUCE, MATMUL_GATHER):
        return 0
    return problem.M * (problem.K if problem.op == GATHER_MATMUL else problem.N)


def prepare(workspace: Workspace, problem: Problem, config: FusedConfig, out, A, B, bias, scale=None) -> Callable:
    """A function that launches both halves on tensors at these addresses, in the current stream."""
    ctx = workspace.ctx
    between = workspace.staging[: staged_elements(problem) * problem.dtype.itemsize].view(problem.dtype)
    once = bias if ctx.cur_rank == 0 else None
    if problem.op == ALL_REDUCE:
        product, collective = (out, A, B, once, scale), (REDUCE, out, out)
    elif problem.op == GATHER_MATMUL:
        gathered = between.view(problem.M, problem.K)
        product, collective = (out, gathered, B, bias, scale), (ALL_GATHER, gathered, A)
    elif problem.op == MATMUL_GATHER:
        part = out[ctx.cur_rank * problem.part_rows : (ctx.cur_rank + 1) * problem.part_rows]
        product, collective = (part, A, B, bias), (ALL_GATHER, out, part)
    else:
        partial_sums = between.view(problem.M, problem.N)
        product, collective = (partial_sums, A, B, once, scale), (SCATTER, out, partial_sums)
    halves = [partial(torch_product.multiply, *product), ctx.ccl._ready(*collective, workspace.collective)]
    if problem.op == GATHER_MATMUL:
        halves.reverse()

    def again() -> bool:
        for half in halves:
            half()
        return True

    return again
