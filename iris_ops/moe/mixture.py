"""The ops of a mixture of experts, as one rank calls them: check -> plan -> room -> launches. Reached by `ctx.ops`.

Nothing waits for the device, and no shape depends on the routing, so a call can be captured in a CUDA graph once it
was made outside one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from iris import platform
from iris.errors import ArgumentError
from iris.launch import relaunch
from iris.machines import machine_of
import torch

from ..launch import loading
from ..named import named
from ..planning.moe_problem import GATE_UP, ROUTE, MoeProblem
from ..planning.moe_ways import need_sorting
from ..planning.plan import plan, way_for
from . import checks, routing
from .activation import activation_of
from .operands import Down, GateUp
from .routing import Routing
from .steps import Steps

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig
    from ..workspace import Workspace


class Mixture:
    """Made once for a context. Its methods take a workspace that `Ops` has checked or made."""

    def __init__(self, ctx: Rank, calls: relaunch.Calls) -> None:
        self._ctx, self._calls = ctx, calls
        self._steps = Steps(ctx, calls.kernels)

    def _again(self, key: tuple | None) -> bool:
        """Make a call that is known once more. Return whether it was."""
        known = self._calls.known.get(key) if key is not None and self._ctx.agreement is None else None
        # a launch refuses, of its own accord, while somebody listens: then the first of them does
        return known is not None and all(step() for step in known)

    def _keep(self, key: tuple | None) -> None:
        """Remember the launches of a call."""
        if launches := self._steps.end():
            self._calls.keep(key, launches, None)

    def route(self, chosen: torch.Tensor, experts: int) -> Routing:
        """`ctx.ops.moe_route`: new tensors, filled on the device."""
        ctx = self._ctx
        checks.check_experts(ROUTE, chosen, ctx.device)
        checks.check_count(ROUTE, experts)
        self._look(ROUTE, chosen, experts)
        rows = torch.empty(chosen.numel(), dtype=torch.int32, device=ctx.device)
        routed = Routing(chosen, rows, torch.empty(experts + 1, dtype=torch.int32, device=ctx.device))
        routing.sort(self._steps, chosen, routed.rows, routed.offsets)
        return routed

    def gate_up(self, workspace: Workspace, tensors: GateUp, config: FusedConfig | None) -> None:
        """`ctx.ops.moe_gate_up`."""
        ctx, (out, A, B, experts, bias, activation, interleaved, scale) = self._ctx, tensors
        parts = (*_tensors_of(experts), out, A, B, bias, scale, activation, interleaved, config, workspace)
        key = relaunch.key_of(GATE_UP, *parts)
        if self._again(key):
            return
        problem = checks.describe_gate_up(ctx, tensors)
        function = activation_of(activation)
        if type(interleaved) is not bool or interleaved and not problem.gated and problem.N:
            raise ArgumentError(f"{problem.op}: interleaved is {interleaved!r}; expected a bool, False without gates")
        chosen = self._chosen(problem, config)
        self._look(problem.op, experts, problem.experts)
        if out.numel() == 0:
            return
        self._steps.begin()
        bias = self._steps.together(bias)
        where = self._sorted(workspace, problem, chosen, experts)
        tensors = tensors._replace(where=where, bias=bias, activation=function)
        way, chosen = loading(ctx, problem, chosen, tensors)
        named(way.launcher)(self._steps, problem, chosen, tensors)
        self._keep(key)

    def down(self, op: str, workspace: Workspace, tensors: Down, config: FusedConfig | None) -> None:
        """`ctx.ops.moe_down_all_reduce` or `..._reduce_scatter`."""
        ctx, (out, A, B, experts, weights, bias, shared, scale) = self._ctx, tensors
        parts = (*_tensors_of(experts), out, A, B, weights, bias, shared, scale, config, workspace)
        key = relaunch.key_of(op, *parts)
        if self._again(key):
            return
        with ctx.reporting_refusals(op, None):
            problem = checks.describe_down(op, ctx, tensors)
            chosen = self._chosen(problem, config)
            self._look(op, experts, problem.experts)
        ctx.compare(
            op, T=problem.tokens, k=problem.top_k, E=problem.experts, H=problem.N, dtype=problem.dtype,
            algorithm=chosen.algorithm, bias="given" if bias is not None else "none", weights=problem.weights.name,
        )  # fmt: skip
        if problem.tokens == 0 or problem.N == 0:
            return
        way = way_for(problem, chosen)
        if nbytes := way.workspace(problem, chosen, machine_of(ctx.device).num_programs).exchange:
            grown = True
            try:
                grown = workspace.reserve(0, 0, nbytes)
            finally:  # where there was no room for all of it, some has grown all the same
                if grown:
                    ctx.forget_launches()
        self._steps.begin()
        weights, bias = self._steps.together(weights), self._steps.together(bias)
        where = self._sorted(workspace, problem, chosen, experts)
        assert weights is not None
        tensors = tensors._replace(where=where, weights=weights, bias=bias)
        way, chosen = loading(ctx, problem, chosen, tensors)
        named(way.launcher)(self._steps, workspace, problem, chosen, tensors)
        self._keep(key)

    def _chosen(self, problem: MoeProblem, config: FusedConfig | None) -> FusedConfig:
        checks.check_config(problem.op, config)
        if config is None:
            return plan(problem, machine_of(self._ctx.device), explained=False)
        way = way_for(problem, config)
        if config.block_k < problem.least_k:
            raise ArgumentError(
                f"{problem.op}: config.block_k is {config.block_k}; expected at least {problem.least_k}: experts are"
                f" {problem.weights.name}"
            )
        if wide := way.refuses_tile(problem, config.block_n, machine_of(self._ctx.device)):
            raise ArgumentError(f"{problem.op}: config.block_n is {config.block_n}; expected more, for {wide}")
        return replace(config, kernel=way.kernel)

    def _look(self, op: str, experts: torch.Tensor | Routing, count: int) -> None:
        if self._ctx.agreement is not None and not platform.is_capturing(self._ctx.device):
            checks.check_range(op, experts.chosen if isinstance(experts, Routing) else experts, count)

    def _sorted(
        self, workspace: Workspace, problem: MoeProblem, config: FusedConfig, experts: torch.Tensor | Routing
    ) -> torch.Tensor | Routing:
        """Return how the product finds its rows: the plain choice where pairs are few, else sorted."""
        chosen = experts.chosen if isinstance(experts, Routing) else experts
        if config.algorithm == "one_shot" and not need_sorting(problem.pairs, problem.experts):
            return chosen
        if isinstance(experts, Routing):
            return experts
        room = workspace.local("moe routing", 4 * (problem.pairs + problem.experts + 1)).view(torch.int32)
        routed = Routing(chosen, room[problem.experts + 1 :], room[: problem.experts + 1])
        routing.sort(self._steps, chosen, routed.rows, routed.offsets)
        return routed


def _tensors_of(experts: torch.Tensor | Routing) -> tuple[object, ...]:
    return (experts.chosen, experts.rows, experts.offsets) if isinstance(experts, Routing) else (experts,)
