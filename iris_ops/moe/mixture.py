"""The step of a mixture's op: it sorts pairs of token and expert, and launches the op's kernels.

Nothing waits for the device, and no shape depends on the routing, so a call can be captured in a CUDA graph once it
was made outside one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..launch import loading
from ..named import named
from ..planning.moe_ways import need_sorting
from ..planning.way import Way
from ..problem import Problem
from ..steps import Run, Step, ready
from .operands import Down, GateUp, parts_of
from .routing import Routing

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig


@dataclass(frozen=True)
class Grouped:
    """The launches of an op of a mixture."""

    way: Way
    problem: Problem
    config: FusedConfig
    def __call__(self, run: Run) -> None:
        tensors = run.tensors._replace(where=self._sorted(run, run.tensors.where))
        named(self.way.launcher)(run, run.workspace, self.problem, self.config, tensors)

    def _sorted(self, run: Run, experts: torch.Tensor | Routing) -> torch.Tensor | Routing:
        """Return how the product finds its rows: the plain choice where pairs are few, else sorted."""
        problem, (chosen, *_) = self.problem, parts_of(experts)
        if self.config.algorithm == "one_shot" and not need_sorting(problem.pairs, problem.experts.count):
            return chosen
        if isinstance(experts, Routing):
            return experts
        ends = problem.experts.count + 1
        room = run.workspace.local("moe routing", 4 * (problem.pairs + ends)).view(torch.int32)
        routed = Routing(chosen, room[ends:], room[:ends])
        routed.sort(run)
        return routed


def steps_of(rank: Rank, problem: Problem, config: FusedConfig, tensors: GateUp | Down) -> tuple[Step, ...]:
    """Return the steps of a call; none where this rank has no columns."""
    way, config = loading(rank, problem, config, tensors)
    return (ready, Grouped(way, problem, config)) if problem.N else ()
