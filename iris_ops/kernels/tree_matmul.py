"""Products whose sums over ranks have the same bits on any number of ranks: `matmul_all_reduce` and
`matmul_reduce_scatter`.

`iris_ops/sum_tree.py` says in which order products along K are added, whoever has them. The kernel is that of
`lamport_matmul.py`, with `sum_orders.TreeOrder` in place of the ranks' order. A program multiplies a tile from the
first product of its rank's K to the last. Where a leaf ends, it puts the leaf's sum by, rounded, and begins the next
from zero. After the last leaf it takes them back and adds them in the tree's order. A sum whose other half another rank
has is a root. Roots travel as Lamport values, each in a separate block. The receiver joins all ranks' roots. Then
comes the bias.

A rank without leaves sends no root, so there peers tell each other that they have begun.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .. import sum_tree
from ..problem import Problem
from . import lamport_matmul
from .arguments import Tree
from .sum_orders import tree_sums

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig
    from ..operands import Operands
    from ..workspace import Workspace
    from .launching import Launch


def launcher(rank: Rank, workspace: Workspace, problem: Problem, config: FusedConfig, tensors: Operands) -> Launch:
    me, tree = rank.cur_rank, problem.tree
    assert tree is not None
    kernel, grid, args = lamport_matmul.launcher(rank, workspace, problem, config, tensors)
    sums = tree_sums(tree, me)
    room = grid[0] * max(1, sums.OWN) * config.block_m * config.block_n * problem.dtype.itemsize
    args |= dict(
        tree=Tree(
            sums=workspace.local("leaves", room).view(problem.dtype),
            blocks=sum_tree.blocks_of(tree.K),
            leaves=max(1, tree.leaves),
        ),
        first_leaf=tree.spans[me][0],
        first_root=sum(map(len, tree.roots[:me])),
        form=replace(args["form"], SUMS=sums),
    )
    return kernel, grid, args
