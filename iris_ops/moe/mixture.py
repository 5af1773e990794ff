"""The ops of a mixture of experts: the step that sorts pairs and launches an op's kernels, and the ops of routers.

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
from ..planning.operations import ROUTE
from ..planning.way import Way
from ..problem import Problem
from ..steps import Run
from . import checks, router, routing
from .operands import Down, GateUp, parts_of
from .router import CHOOSE
from .routing import Routing
from .scoring import Scoring

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig


@dataclass(frozen=True)
class Grouped:
    """The launches of an op of a mixture."""

    way: Way
    problem: Problem
    config: FusedConfig
    repeatable = True

    def run(self, run: Run) -> None:
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
        routing.sort(run, chosen, routed.rows, routed.offsets)
        return routed


def steps_of(rank: Rank, problem: Problem, config: FusedConfig, tensors: GateUp | Down) -> tuple[Grouped, ...]:
    """Return the step of a call; none where this rank has no columns."""
    way, config = loading(rank, problem, config, tensors)
    return (Grouped(way, problem, config),) if problem.N else ()


def route(run: Run, chosen: torch.Tensor, experts: int) -> Routing:
    """Run `ctx.ops.moe_route`: return new tensors, filled on the device."""
    checks.check_experts(ROUTE, chosen, run.rank.device)
    checks.check_count(ROUTE, experts)
    if run.rank.agreement is not None:
        checks.check_range(ROUTE, chosen, experts)
    routed = _new_routing(chosen, experts)
    routing.sort(run, chosen, routed.rows, routed.offsets)
    return routed


def choose(
    run: Run, logits: torch.Tensor, top_k: int, scoring: Scoring, bias: torch.Tensor | None, dtype: torch.dtype,
    sort: bool,
) -> tuple[Routing, torch.Tensor]:  # fmt: skip
    """Run `ctx.ops.moe_choose`: return new tensors, filled on the device."""
    device, alike = run.rank.device, run.rank.level.rows_alike
    router.check(CHOOSE, logits, top_k, scoring, bias, dtype, device)
    tokens, experts = logits.shape
    routed = _new_routing(torch.empty(tokens, top_k, dtype=torch.int64, device=device), experts)
    weights = torch.empty(tokens, top_k, dtype=dtype, device=device)
    room = routed if sort and not alike else None
    is_sorted = router.choose(run, logits, bias, scoring, routed.chosen, weights, room, alike)
    if sort and not is_sorted:
        routing.sort(run, routed.chosen, routed.rows, routed.offsets)
    return routed, weights


def _new_routing(chosen: torch.Tensor, experts: int) -> Routing:
    rows = torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device)
    return Routing(chosen, rows, torch.empty(experts + 1, dtype=torch.int32, device=chosen.device))
