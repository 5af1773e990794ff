"""The two products of a mixture's experts, as layers call them: `ctx.ops.moe_gate_up`, `ctx.ops.moe_down_all_reduce`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris_ops import torch_ops
from iris_ops.moe.activation import Activation
import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from iris.context import Iris


def gate_up(
    ctx: Iris, A: torch.Tensor, B: torch.Tensor, experts: torch.Tensor, bias: torch.Tensor | None,
    activation: Activation, gated: bool, interleaved: bool,
) -> torch.Tensor:  # fmt: skip
    """[T*k, I]: what the experts [T, k] make of the tokens `A` [T, H]; `B` [E, H, 2I], or [E, H, I] without gates."""
    return plain_gate_up(A, B, experts, bias, activation, gated, interleaved)


def down_all_reduce(
    ctx: Iris, A: torch.Tensor, B: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor,
    bias: torch.Tensor | None, shared: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """[T, H]: the sum over ranks of what `A` [T*k, I] and `B` [E, I, H] give, weighted by `weights` [T, k]."""
    once = bias if ctx.cur_rank == 0 else None
    return torch_ops.sum_over_ranks(ctx, plain_down(A, B, experts, weights, once, shared))


def plain_gate_up(
    A: torch.Tensor, B: torch.Tensor, experts: torch.Tensor, bias: torch.Tensor | None, activation: Activation,
    gated: bool, interleaved: bool,
) -> torch.Tensor:  # fmt: skip
    """`gate_up` in plain torch."""
    rows, chosen = A.repeat_interleave(experts.shape[1], 0), experts.reshape(-1)
    y = torch.bmm(rows.unsqueeze(1).float(), B[chosen].float()).squeeze(1)
    if bias is not None:
        y = y + bias[chosen].float()
    gate: torch.Tensor = y
    up: torch.Tensor | None = None
    if gated and interleaved:
        gate, up = y[:, ::2], y[:, 1::2]
    elif gated:
        gate, up = y.chunk(2, -1)
    return _activated(activation, gate, up).to(A.dtype)


def _activated(activation: Activation, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = None if up is None else up.clamp(-activation.limit, activation.limit)
    if activation.kind == "silu":
        y = gate * torch.sigmoid(activation.alpha * gate)
    elif activation.kind == "relu2":
        y = F.relu(gate).square()
    else:
        y = F.gelu(gate, approximate="tanh" if activation.kind == "gelu_tanh" else "none")
    return y if up is None else y * (up + activation.shift)


def plain_down(
    A: torch.Tensor, B: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None,
    shared: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """This rank's part of `down_all_reduce` in plain torch."""
    chosen = experts.reshape(-1)
    y = torch.bmm(A.unsqueeze(1).float(), B[chosen].float()).squeeze(1)
    if bias is not None:
        y = y + bias[chosen].float()
    y = (y.view(*experts.shape, -1) * weights.unsqueeze(-1).float()).sum(1)
    if shared is not None:
        y = y + shared.float()
    return y.to(A.dtype)
