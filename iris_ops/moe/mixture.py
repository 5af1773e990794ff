"""The ops of a mixture of experts, as one rank calls them: check -> plan -> room -> launches. Reached by `ctx.ops`.

Nothing waits for the device, and no shape depends on the routing, so a call can be captured in a CUDA graph once it
was made outside one.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from iris import platform
from iris.errors import ArgumentError
from iris.launch import relaunch
from iris.machines import machine_of
import torch

from ..launch import loading
from ..named import named
from ..planning.experts import least_k
from ..planning.moe_ways import need_sorting
from ..planning.operations import GATE_UP, ROUTE
from ..planning.plan import plan, way_for, workspace_size
from ..problem import Problem
from . import checks, router, routing
from .operands import Down, GateUp
from .router import CHOOSE
from .routing import Routing
from .scoring import Scoring
from .steps import Launches, Steps

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..calls import Calls
    from ..config import FusedConfig
    from ..workspace import Workspace


class Mixture:
    """The ops of mixtures of one context."""

    def __init__(self, ctx: Rank, calls: Calls) -> None:
        self._ctx, self._calls = ctx, calls
        self._steps = Steps(ctx, calls.earlier.kernels)

    def run(
        self, op: str, tensors: GateUp | Down, config: FusedConfig | None, workspace: Workspace | None
    ) -> Workspace:  # fmt: skip
        """Run a call: by its launches alone if it is known, else from its checks on."""
        ctx, calls = self._ctx, self._calls
        ctx.check()
        if workspace is not None:
            calls.check_workspace(op, workspace)
        workspace = workspace or calls.own_workspace()
        given, rest = tensors.key
        key = relaunch.key_of(given, (op, *rest, config), workspace)
        if calls.earlier.repeat(key, ctx) is None:
            ctx.side.join()
            if launches := self._first(op, tensors, config, workspace):
                calls.earlier.keep(key, (lambda: all(launch() for launch in launches), None, workspace))
        ctx.check()
        return workspace

    def _first(
        self, op: str, tensors: GateUp | Down, config: FusedConfig | None, workspace: Workspace
    ) -> Launches | None:  # fmt: skip
        """Run a call that `relaunch` cannot repeat. Return its launches, or None if they cannot be repeated."""
        ctx, collective = self._ctx, op != GATE_UP
        with ctx.reporting_refusals(op, None) if collective else nullcontext():
            problem = checks.describe(op, ctx, tensors)
            chosen = self._chosen(problem, config)
            self._look(op, tensors.where, problem.experts.count)
        if collective:
            ctx.compare(
                op, T=problem.M, k=problem.experts.top_k, E=problem.experts.count, H=problem.N, dtype=problem.dtype,
                algorithm=chosen.algorithm, bias="none" if tensors.bias is None else "given",
                weights=problem.weights.name,
            )  # fmt: skip
        if not problem.M or not problem.N:
            return None
        way, chosen = loading(ctx, problem, chosen, tensors)
        sizes = workspace_size(problem, chosen, machine_of(ctx.device).num_programs, way)
        if any(sizes):
            self._calls.reserve(workspace, sizes)
        self._steps.begin()
        tensors = tensors.ready(self._steps.together)
        tensors = tensors._replace(where=self._sorted(workspace, problem, chosen, tensors.where))
        named(way.launcher)(self._steps, workspace, problem, chosen, tensors)
        return self._steps.end()

    def route(self, chosen: torch.Tensor, experts: int) -> Routing:
        """Run `ctx.ops.moe_route`: return new tensors, filled on the device."""
        ctx = self._ctx
        checks.check_experts(ROUTE, chosen, ctx.device)
        checks.check_count(ROUTE, experts)
        self._look(ROUTE, chosen, experts)
        rows = torch.empty(chosen.numel(), dtype=torch.int32, device=ctx.device)
        routed = Routing(chosen, rows, torch.empty(experts + 1, dtype=torch.int32, device=ctx.device))
        routing.sort(self._steps, chosen, routed.rows, routed.offsets)
        return routed

    def choose(
        self, logits: torch.Tensor, top_k: int, scoring: Scoring, bias: torch.Tensor | None, dtype: torch.dtype,
        sort: bool,
    ) -> tuple[Routing, torch.Tensor]:  # fmt: skip
        """Run `ctx.ops.moe_choose`: return new tensors, filled on the device."""
        ctx = self._ctx
        router.check(CHOOSE, logits, top_k, scoring, bias, dtype, ctx.device)
        (tokens, experts), device = logits.shape, ctx.device
        chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=device)
        weights = torch.empty(tokens, top_k, dtype=dtype, device=device)
        rows = torch.empty(tokens * top_k, dtype=torch.int32, device=device)
        routed = Routing(chosen, rows, torch.empty(experts + 1, dtype=torch.int32, device=device))
        alike = ctx.level.rows_alike
        room = routed if sort and not alike else None
        is_sorted = router.choose(self._steps, logits, bias, scoring, chosen, weights, room, alike)
        if sort and not is_sorted:
            routing.sort(self._steps, chosen, rows, routed.offsets)
        return routed, weights

    def _chosen(self, problem: Problem, config: FusedConfig | None) -> FusedConfig:
        checks.check_config(problem.op, config)
        if config is None:
            return plan(problem, machine_of(self._ctx.device), explained=False)
        way = way_for(problem, config)
        if config.block_k < (least := least_k(problem.weights)):
            raise ArgumentError(
                f"{problem.op}: config.block_k is {config.block_k}; expected at least {least}: experts are"
                f" {problem.weights.name}"
            )
        if wide := way.refuses_tile(problem, config.block_n, machine_of(self._ctx.device)):
            raise ArgumentError(f"{problem.op}: config.block_n is {config.block_n}; expected more, for {wide}")
        return replace(config, kernel=way.kernel)

    def _look(self, op: str, experts: torch.Tensor | Routing, count: int) -> None:
        if self._ctx.agreement is not None and not platform.is_capturing(self._ctx.device):
            checks.check_range(op, experts.chosen if isinstance(experts, Routing) else experts, count)

    def _sorted(
        self, workspace: Workspace, problem: Problem, config: FusedConfig, experts: torch.Tensor | Routing
    ) -> torch.Tensor | Routing:
        """Return how the product finds its rows: the plain choice where pairs are few, else sorted."""
        chosen = experts.chosen if isinstance(experts, Routing) else experts
        if config.algorithm == "one_shot" and not need_sorting(problem.pairs, problem.experts.count):
            return chosen
        if isinstance(experts, Routing):
            return experts
        ends = problem.experts.count + 1
        room = workspace.local("moe routing", 4 * (problem.pairs + ends)).view(torch.int32)
        routed = Routing(chosen, room[ends:], room[:ends])
        routing.sort(self._steps, chosen, routed.rows, routed.offsets)
        return routed
