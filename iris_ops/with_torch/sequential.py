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
from iris.ccl import problem as ccl

from ..problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, Problem
from . import torch_matmul

if TYPE_CHECKING:
    import torch

    from ..config import FusedConfig
    from ..planning.machine import Machine
    from ..workspace import Workspace


# Microseconds from one kernel to the next that reads what it wrote.
_BETWEEN_US = 2.3


def objection(problem: Problem) -> str | None:
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


def predict(problem: Problem, config: FusedConfig, machine: Machine) -> tuple[float, float, float]:
    """Microseconds of the product, of the collective, and of both."""
    link = collectives.Machine(machine.num_programs, resident=2)
    share = machine.link_gbs / 380.0  # of an H200's
    link = replace(
        link, **{name: share * getattr(link, name) for name in ("link_gbs", "words_gbs", "pair_gbs", "two_hops_gbs")}
    )
    gemm = torch_matmul.expected_us(*problem.gemm, machine, in_fp8=problem.fp8)
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


def staged_elements(problem: Problem) -> int:
    """Elements between the two halves, where `out` cannot hold them."""
    if problem.op in (ALL_REDUCE, MATMUL_GATHER):
        return 0
    return problem.M * (problem.K if problem.op == GATHER_MATMUL else problem.N)


def prepare(
    workspace: Workspace, problem: Problem, config: FusedConfig,
    out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None,
) -> Callable[[], bool]:  # fmt: skip
    """A function that launches product and collectives on tensors at these addresses, in the current stream."""
    ctx = workspace.ctx
    between = workspace.staging[: staged_elements(problem) * problem.dtype.itemsize].view(problem.dtype)
    product: tuple[torch.Tensor | None, ...]
    moved: list[tuple[str, torch.Tensor, torch.Tensor]]
    once = bias if ctx.cur_rank == 0 else None
    if problem.op == ALL_REDUCE:
        product, moved = (out, A, B, once, scale), [(ccl.ALL_REDUCE, rows, rows) for rows in _pieces(out)]
    elif problem.op == GATHER_MATMUL:
        gathered = between.view(problem.M, problem.K)
        product, moved = (out, gathered, B, bias, scale), [(ccl.ALL_GATHER, gathered, A)]
    elif problem.op == MATMUL_GATHER:
        part = out[ctx.cur_rank * problem.part_rows : (ctx.cur_rank + 1) * problem.part_rows]
        product, moved = (part, A, B, bias), [(ccl.ALL_GATHER, out, part)]
    else:
        partial_sums = between.view(problem.M, problem.N)
        product, moved = (partial_sums, A, B, once, scale), [(ccl.REDUCE_SCATTER, out, partial_sums)]
    multiply = partial(torch_matmul.multiply, *product)
    parts: list[Callable[[], object]] = [multiply, *(ctx.ccl._ready(*each, workspace.collective) for each in moved)]
    if problem.op == GATHER_MATMUL:
        parts.reverse()

    def again() -> bool:
        for part in parts:
            part()
        return True

    return again


def _pieces(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`out` by rows, as many together as a collective takes."""
    return out.split(max(1, ccl.MAX_ELEMENTS // max(1, out.shape[1])))
