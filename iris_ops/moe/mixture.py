"""The ops of a mixture of experts, as one rank calls them: check -> plan -> room -> launches. Reached by `ctx.ops`.

Nothing waits for the device, and no shape depends on the routing, so a call can be captured in a CUDA graph once it
was made outside one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from iris import platform
from iris.ccl import problem as ccl
from iris.ccl.collectives import Collectives
from iris.errors import ArgumentError
import torch

from ..planning.machine import machine_of
from ..planning.moe_problem import ROUTE, MoeProblem
from ..planning.moe_ways import FEW_PAIRS, kernel_for, moe_plan
from . import checks, combine, grouped_matmul, routing
from .activation import Activation, activation_of
from .routing import Routing

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig
    from ..workspace import Workspace


class Mixture:
    """Made once for a context. Its methods take a workspace that `Ops` has checked or made."""

    def __init__(self, ctx: Rank) -> None:
        self._ctx = ctx
        self._kernels: dict[tuple, object] = {}

    def route(self, chosen: torch.Tensor, experts: int) -> Routing:
        """`ctx.ops.moe_route`: new tensors, filled on the device."""
        ctx = self._ctx
        checks.check_experts(ROUTE, chosen, ctx.device)
        checks.check_count(ROUTE, experts)
        self._look(ROUTE, chosen, experts)
        rows = torch.empty(chosen.numel(), dtype=torch.int32, device=ctx.device)
        found = Routing(chosen, rows, torch.empty(experts + 1, dtype=torch.int32, device=ctx.device))
        routing.sort(self._kernels, ctx, chosen, found.rows, found.offsets)
        return found

    def gate_up(
        self, workspace: Workspace, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
        experts: torch.Tensor | Routing, bias: torch.Tensor | None, activation: str | Activation, interleaved: bool,
        config: FusedConfig | None,
    ) -> None:  # fmt: skip
        """`ctx.ops.moe_gate_up`."""
        ctx = self._ctx
        problem = checks.describe_gate_up(ctx, out, A, B, experts, bias)
        function = activation_of(activation)
        if type(interleaved) is not bool or interleaved and not problem.gated and problem.N:
            raise ArgumentError(f"{problem.op}: interleaved is {interleaved!r}; expected a bool, False without gates")
        chosen = self._chosen(problem, config)
        self._look(problem.op, experts, problem.experts)
        if out.numel() == 0:
            return
        bias = bias if bias is None or bias.stride(1) == 1 else bias.contiguous()
        where = self._sorted(workspace, problem, chosen, experts)
        grouped_matmul.launch(self._kernels, ctx, problem, chosen, out, A, B, where, bias, function, interleaved)

    def down(
        self, op: str, workspace: Workspace, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
        experts: torch.Tensor | Routing, weights: torch.Tensor, bias: torch.Tensor | None,
        shared: torch.Tensor | None, config: FusedConfig | None,
    ) -> None:  # fmt: skip
        """`ctx.ops.moe_down_all_reduce` or `..._reduce_scatter`."""
        ctx = self._ctx
        problem = checks.describe_down(op, ctx, out, A, B, experts, weights, bias, shared)
        chosen = self._chosen(problem, config)
        self._look(op, experts, problem.experts)
        ctx.compare(
            op, T=problem.tokens, k=problem.top_k, E=problem.experts, H=problem.N, dtype=problem.dtype,
            config=replace(chosen, prediction=None), bias="given" if bias is not None else "none",
        )  # fmt: skip
        if problem.tokens == 0 or problem.N == 0:
            return
        weights = weights if weights.stride(1) == 1 else weights.contiguous()
        bias = bias if bias is None or bias.stride(1) == 1 else bias.contiguous()
        where = self._sorted(workspace, problem, chosen, experts)
        self._sequential(workspace, problem, chosen, out, A, B, where, weights, bias, shared)

    def _sequential(
        self, workspace: Workspace, problem: MoeProblem, config: FusedConfig, out: torch.Tensor, A: torch.Tensor,
        B: torch.Tensor, where: torch.Tensor | Routing, weights: torch.Tensor, bias: torch.Tensor | None,
        shared: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """The grouped product, each token's sum, and a collective of `iris.ccl`."""
        ctx, dtype = self._ctx, problem.dtype
        size = problem.pairs * problem.N * dtype.itemsize
        products = workspace.local("moe products", size).view(dtype).view(problem.pairs, problem.N)
        once = bias if ctx.cur_rank == 0 else None
        grouped_matmul.launch(self._kernels, ctx, problem, config, products, A, B, where, once, None, False)
        sums = out
        if problem.scatters:
            between = workspace.local("moe sums", problem.tokens * problem.N * dtype.itemsize)
            sums = between.view(dtype).view(problem.tokens, problem.N)
        combine.launch(self._kernels, ctx, problem, sums, products, weights, shared)
        collectives = ctx.once(Collectives)
        if problem.scatters:
            collectives.ready(ccl.REDUCE_SCATTER, out, sums, workspace.collective)()
            return
        for rows in out.split(max(1, ccl.MAX_ELEMENTS // problem.N)):
            collectives.ready(ccl.ALL_REDUCE, rows, rows, workspace.collective)()

    def _chosen(self, problem: MoeProblem, config: FusedConfig | None) -> FusedConfig:
        checks.check_config(problem.op, config)
        if config is None:
            return moe_plan(problem, machine_of(self._ctx.device), explained=False)
        return replace(config, kernel=kernel_for(problem, config))

    def _look(self, op: str, experts: torch.Tensor | Routing, count: int) -> None:
        if self._ctx.agreement is not None and not platform.is_capturing(self._ctx.device):
            checks.check_range(op, experts.chosen if isinstance(experts, Routing) else experts, count)

    def _sorted(
        self, workspace: Workspace, problem: MoeProblem, config: FusedConfig, experts: torch.Tensor | Routing
    ) -> torch.Tensor | Routing:
        """How the product finds its rows: the plain choice where pairs are few, else sorted."""
        chosen = experts.chosen if isinstance(experts, Routing) else experts
        if problem.pairs <= FEW_PAIRS and config.algorithm == "one_shot":
            return chosen
        if isinstance(experts, Routing):
            return experts
        room = workspace.local("moe routing", 4 * (problem.pairs + problem.experts + 1)).view(torch.int32)
        found = Routing(chosen, room[problem.experts + 1 :], room[: problem.experts + 1])
        routing.sort(self._kernels, self._ctx, chosen, found.rows, found.offsets)
        return found
