"""`moe_down_all_reduce` and `moe_down_reduce_scatter` one step after the other: the grouped product, each token's sum,
and the collective of `iris.ccl`. For many tokens, and wherever `lamport_down.py` does not serve.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris.ccl import problem as ccl
from iris.ccl.collectives import Collectives

from ..planning.operations import DOWN_REDUCE_SCATTER
from . import combine, grouped_matmul

if TYPE_CHECKING:
    from ..config import FusedConfig
    from ..problem import Problem
    from ..steps import Run
    from ..workspace import Workspace
    from .operands import Down


def launch(run: Run, workspace: Workspace, problem: Problem, config: FusedConfig, tensors: Down) -> None:
    """Launch the product, the sums over experts and the collective."""
    ctx, dtype = workspace.ctx, problem.dtype
    size = problem.pairs * problem.N * dtype.itemsize
    products = workspace.local("moe products", size).view(dtype).view(problem.pairs, problem.N)
    grouped_matmul.launch_down(run, workspace, problem, config, tensors.product(products, run.rank.cur_rank))
    sums = out = tensors.out
    if problem.op == DOWN_REDUCE_SCATTER:
        between = workspace.local("moe sums", problem.M * problem.N * dtype.itemsize)
        sums = between.view(dtype).view(problem.M, problem.N)
    combine.launch(run, problem, sums, products, tensors.weights, tensors.shared)
    collectives = ctx.once(Collectives)
    if problem.op == DOWN_REDUCE_SCATTER:
        run.call(collectives.ready(ccl.REDUCE_SCATTER, out, sums, workspace.collective))
        return
    for rows in out.split(max(1, ccl.MAX_ELEMENTS // problem.N)):
        run.call(collectives.ready(ccl.ALL_REDUCE, rows, rows, workspace.collective))
