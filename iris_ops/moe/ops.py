"""The part of `ctx.ops` that mixtures of experts call: their arguments, and what the ops promise.

`Mixture` does the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..calls import Calls
from ..planning.operations import DOWN_ALL_REDUCE, DOWN_REDUCE_SCATTER, GATE_UP
from .mixture import Mixture
from .operands import Down, GateUp
from .routing import Routing

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig
    from ..workspace import Workspace
    from .activation import Activation


class MixtureOps:
    """The ops of mixtures, which `Ops` inherits."""

    _ctx: Rank

    def __init__(self, ctx: Rank) -> None:
        self._ctx = ctx
        self._calls = Calls(ctx)
        self._mixture = Mixture(ctx, self._calls)

    def moe_route(self, experts: torch.Tensor, num_experts: int) -> Routing:
        """Return the tokens sorted by their experts, for `moe_gate_up` and the `moe_down_*` after it to share.

        `experts` [T,k], int32 or int64, contiguous: indices below `num_experts`. It is read again by those calls, so it
        must not change before. One that is out of range is found on the device: a later call raises `ExpertError`,
        with IRIS_DEBUG=1 this one. No ranks are involved.
        """
        self._ctx.check()
        return self._mixture.route(experts, num_experts)

    def moe_gate_up(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, experts: torch.Tensor | Routing,
        bias: torch.Tensor | None = None, activation: str | Activation = "silu", interleaved: bool = False,
        config: FusedConfig | None = None, workspace: Workspace | None = None, scale: torch.Tensor | None = None,
    ) -> Workspace:  # fmt: skip
        """Compute `out [T*k,I]`: row t*k+j is the activation of `A[t] @ B[e] + bias[e]`, with e = experts[t,j] and
        tokens A [T,H].

        B [E,H,2I] has gate columns, then up columns, or both in turn (`interleaved`), and may be the transpose of a
        contiguous [E,2I,H]. Experts without a gate have B [E,H,I]. bias is [E,2I]. `experts` is [T,k] as in
        `moe_route`, or its result. `activation` is an `iris_ops.Activation`, or "silu", "gelu", "gelu_tanh", "relu2" or
        "gpt_oss". Sums, bias and activation are computed in fp32 and rounded once. I, this rank's part, may differ by
        rank.

        With `scale` [E,2I], or [E,2I,ceil(H/g)] for groups of g, a power of two, B holds codes (`iris_ops.moe`), which
        the product widens as it reads them. B is then the transpose of a contiguous [E,2I,H] in `torch.float8_e4m3fn`,
        or [E,2I,H/2] in `torch.uint8`.
        """
        tensors = GateUp(out, A, B, experts, bias, activation, interleaved, scale)
        return self._mixture.run(GATE_UP, tensors, config, workspace)

    def moe_down_all_reduce(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, experts: torch.Tensor | Routing,
        weights: torch.Tensor, bias: torch.Tensor | None = None, shared: torch.Tensor | None = None,
        config: FusedConfig | None = None, workspace: Workspace | None = None, scale: torch.Tensor | None = None,
    ) -> Workspace:  # fmt: skip
        """Compute `out [T,H]`: for each token, `weights [T,k] * (A @ B[e] + bias[e])`, summed over its k experts and
        all ranks.

        A [T*k,I] is the result of `moe_gate_up`; B is [E,I,H] or the transpose of a contiguous [E,H,I]; weights are
        float32 or of A's dtype. bias [E,H], the same on all ranks, is added once. shared [T,H] is this rank's part of a
        shared expert's result and is added before the sum over ranks. `experts` is as in `moe_gate_up`. I may differ by
        rank, and be 0.

        Products, and what ranks exchange, are rounded to the tensors' dtype; they are added in fp32, experts in the
        order of j, then ranks in order. `scale` [E,H], or [E,H,ceil(I/g)], is as in `moe_gate_up`.
        """
        tensors = Down(out, A, B, experts, weights, bias, shared, scale)
        return self._mixture.run(DOWN_ALL_REDUCE, tensors, config, workspace)

    def moe_down_reduce_scatter(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, experts: torch.Tensor | Routing,
        weights: torch.Tensor, bias: torch.Tensor | None = None, shared: torch.Tensor | None = None,
        config: FusedConfig | None = None, workspace: Workspace | None = None, scale: torch.Tensor | None = None,
    ) -> Workspace:  # fmt: skip
        """Return this rank's tokens of `moe_down_all_reduce`: out is [T/w,H], rows as torch.chunk splits them."""
        tensors = Down(out, A, B, experts, weights, bias, shared, scale)
        return self._mixture.run(DOWN_REDUCE_SCATTER, tensors, config, workspace)
