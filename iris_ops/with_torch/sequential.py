"""torch's product, and then the collective of `iris.ccl`; for `all_gather_matmul` the collective first.

Nothing overlaps here, and each half is the fastest there is. With some hundred rows a library's product gains more on
ours than an overlap would hide, because its programs share operands between multiprocessors. As in the other
algorithms, what travels is rounded once to the tensors' dtype, and sums are kept in fp32 in rank order.

Weights with scales have the product of their format. The model assumes the time of torch's product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from iris.ccl import problem as ccl
from iris.ccl.collectives import Collectives

from ..planning.ways.sequential import sequential_elements
from ..problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, Problem
from .products import multiplier

if TYPE_CHECKING:
    import torch

    from ..config import FusedConfig
    from ..operands import Operands
    from ..workspace import Workspace


def prepare(workspace: Workspace, problem: Problem, config: FusedConfig, tensors: Operands) -> Callable[[], bool]:
    """Return a function that launches product and collectives on tensors at these addresses, in the current stream."""
    out, A, B, bias, scale = tensors
    ctx = workspace.ctx
    between = workspace.staging[: sequential_elements(problem) * problem.dtype.itemsize].view(problem.dtype)
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
    parts: list[Callable[[], object]] = [
        partial(multiplier(ctx, problem), *product),
        *(ctx.once(Collectives).ready(*each, workspace.collective) for each in moved),
    ]
    if problem.op == GATHER_MATMUL:
        parts.reverse()

    def again() -> bool:
        for part in parts:
            part()
        return True

    return again


def _pieces(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split `out` by rows into the largest pieces that a collective accepts."""
    return out.split(max(1, ccl.MAX_ELEMENTS // max(1, out.shape[1])))
