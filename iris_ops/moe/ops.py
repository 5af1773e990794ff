"""The part of `ctx.ops` that mixtures of experts call: their arguments, and what the ops promise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..calls import Calls
from ..planning.operations import DOWN_ALL_REDUCE, DOWN_REDUCE_SCATTER, GATE_UP
from ..steps import Run
from . import checks, router
from .operands import Down, GateUp
from .routing import Routing
from .scoring import Scoring

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..activation import Activation
    from ..config import FusedConfig
    from ..workspace import Workspace


class MixtureOps:
    """Run the ops of mixtures of experts. `Ops` inherits these methods."""

    _ctx: Rank

    def __init__(self, ctx: Rank) -> None:
        self._ctx = ctx
        self._calls = Calls(ctx)
        self._routing = Run(ctx, self._calls.earlier.kernels)

    def _run(self) -> Run:
        """Return a run without a workspace, for launches that are not repeated."""
        self._ctx.check()
        self._routing.launches.clear()
        return self._routing

    def moe_route(self, experts: torch.Tensor, num_experts: int) -> Routing:
        """Return the tokens sorted by their experts, for `moe_gate_up` and the `moe_down_*` after it to share.

        No ranks are involved.

        Args:
            experts: [T, k], int32 or int64, contiguous: indices below `num_experts`. Those calls read it again, so it
                must not change before.
            num_experts: E, the number of experts.

        Raises:
            ArgumentError, ShapeError, DtypeError, DeviceError: for bad arguments.
            ExpertError: for an index out of range: with IRIS_DEBUG=1 here, otherwise in a later call.
        """
        run = self._run()
        checks.check_route(self._ctx, experts, num_experts)
        routing = Routing.of(experts, num_experts)
        routing.sort(run)
        return routing

    def moe_choose(
        self, logits: torch.Tensor, top_k: int, scoring: Scoring | None = None, bias: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32, sort: bool = True,
    ) -> tuple[Routing, torch.Tensor]:  # fmt: skip
        """Choose each token's `top_k` experts and compute their weights.

        A token's experts come by falling score, of equal scores the lowest index first; NaN counts as the highest
        score. Scores are computed in float32. No ranks are involved.

        Args:
            logits: [T, E] of the router in bfloat16, float16 or float32, rows contiguous.
            top_k: the number of experts of a token.
            scoring: how logits become weights, an `iris_ops.Scoring`. By default a softmax; the chosen weights are then
                divided by their sum.
            bias: [E], added to the scores for the choice alone.
            dtype: the dtype of the weights.
            sort: whether the tokens are sorted by expert, as `moe_route` does.

        Returns:
            The routing, for `moe_gate_up` and `moe_down_*`, and the weights [T, top_k].

        Raises:
            ArgumentError, ShapeError, DtypeError: for bad arguments.
        """
        return router.choose(self._run(), logits, top_k, scoring or Scoring(), bias, dtype, sort)

    def moe_gate_up(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, experts: torch.Tensor | Routing,
        bias: torch.Tensor | None = None, activation: str | Activation = "silu", interleaved: bool = False,
        config: FusedConfig | None = None, workspace: Workspace | None = None, scale: torch.Tensor | None = None,
    ) -> Workspace:  # fmt: skip
        """Compute the activations of all pairs of token and expert: row t * k + j is that of `A[t] @ B[e] + bias[e]`, e
        = experts[t, j].

        Sums, bias and activation are computed in float32 and rounded once. I, this rank's part, may differ between
        ranks.

        Args:
            out: [T * k, I].
            A: [T, H], the tokens.
            B: [E, H, 2 I] with gate columns, then up columns, or the transpose of a contiguous [E, 2 I, H]; [E, H, I]
                for experts without a gate.
            experts: [T, k] as in `moe_route`, or its result.
            bias: [E, 2 I].
            activation: an `iris_ops.Activation`, or "silu", "gelu", "gelu_tanh", "relu2" or "gpt_oss".
            interleaved: whether gate and up columns alternate.
            config: a `FusedConfig`, the same on all ranks; None plans one.
            workspace: the result of an earlier call; None for the context's own.
            scale: [E, 2 I], or [E, 2 I, slots] for groups along K, or [E, 2 I, slots, 2] with zero points. B then holds
                codes, which the product widens as it reads them. It is the transpose of [E, 2 I, K of codes], and both
                are as `iris_ops.quantised.packing` packs each expert's weight.

        Returns:
            The workspace of the call.
        """
        tensors = GateUp(out, A, B, experts, bias, activation, interleaved, scale)
        return self._calls.run(GATE_UP, tensors, config=config, workspace=workspace)

    def moe_down_all_reduce(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, experts: torch.Tensor | Routing,
        weights: torch.Tensor, bias: torch.Tensor | None = None, shared: torch.Tensor | None = None,
        config: FusedConfig | None = None, workspace: Workspace | None = None, scale: torch.Tensor | None = None,
    ) -> Workspace:  # fmt: skip
        """Compute, for each token, the weighted sum of its experts' down projections over all ranks.

        Row t is the sum over ranks and j of `weights[t, j] * (A[t * k + j] @ B[e] + bias[e])`, with e = experts[t, j].
        Products, and what ranks exchange, are rounded to the tensors' dtype. They are added in float32, experts in the
        order of j, then ranks in order.

        Args:
            out: [T, H].
            A: [T * k, I], the result of `moe_gate_up`; I may differ between ranks, and be 0.
            B: [E, I, H], or the transpose of a contiguous [E, H, I].
            experts: as in `moe_gate_up`.
            weights: [T, k], float32 or A's dtype.
            bias: [E, H], the same on all ranks; it is added once.
            shared: [T, H], this rank's part of a shared expert's result, which is added before the sum over ranks.
            config: a `FusedConfig`, the same on all ranks; None plans one.
            workspace: the result of an earlier call; None for the context's own.
            scale: [E, H], [E, H, slots] or [E, H, slots, 2], as in `moe_gate_up`.

        Returns:
            The workspace of the call.
        """
        tensors = Down(out, A, B, experts, weights, bias, shared, scale)
        return self._calls.run(DOWN_ALL_REDUCE, tensors, config=config, workspace=workspace)

    def moe_down_reduce_scatter(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, experts: torch.Tensor | Routing,
        weights: torch.Tensor, bias: torch.Tensor | None = None, shared: torch.Tensor | None = None,
        config: FusedConfig | None = None, workspace: Workspace | None = None, scale: torch.Tensor | None = None,
    ) -> Workspace:  # fmt: skip
        """Compute this rank's tokens of `moe_down_all_reduce`.

        Args:
            out: [T / w, H]: this rank's tokens, as `torch.chunk` splits them.
            A: as in `moe_down_all_reduce`.
            B: as in `moe_down_all_reduce`.
            experts: as in `moe_down_all_reduce`.
            weights: as in `moe_down_all_reduce`.
            bias, shared, config, workspace, scale: as in `moe_down_all_reduce`.

        Returns:
            The workspace of the call.
        """
        tensors = Down(out, A, B, experts, weights, bias, shared, scale)
        return self._calls.run(DOWN_REDUCE_SCATTER, tensors, config=config, workspace=workspace)
