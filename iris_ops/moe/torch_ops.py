"""The ops of a mixture as torch operators, so that torch.compile sees opaque nodes; `iris_ops/torch_ops.py` says why.

    torch.ops.iris_ops.moe_gate_up(A, B, experts, bias, activation, interleaved, width, group) -> Tensor [T*k,width]
    torch.ops.iris_ops.moe_down(A, B, experts, weights, bias, shared, scatter, group) -> Tensor [T,H] or [T/w,H]
    torch.ops.iris_ops.moe_experts(A, gate_up, down, experts, weights, gate_up_bias, down_bias, shared, activation,
                                   interleaved, scatter, group) -> Tensor [T,H] or [T/w,H]

The last one is both, with the tokens sorted once. `width`: this rank's part of the experts' intermediate size.
`activation`: as `as_text` writes it. `scatter`: each rank gets its tokens only. All are functional and have no
gradient. `mixture` is what layers call, compiled or not.
"""

from __future__ import annotations

from typing import Any

from iris import registry
import torch

from ..checks import check_gradients
from ..operators import OPERATORS
from ..planning.moe_ways import need_sorting
from ..problem import part_of
from ..recording import is_recording
from ..torch_ops import Context
from .activation import Activation, activation_of
from .routing import Routing


def mixture(
    ctx: Context, A: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, experts: torch.Tensor,
    weights: torch.Tensor, gate_up_bias: torch.Tensor | None = None, down_bias: torch.Tensor | None = None,
    shared: torch.Tensor | None = None, activation: str | Activation = "silu", interleaved: bool = False,
    scatter: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return what all experts together make of tokens A [T,H]: `moe_gate_up`, then `moe_down_all_reduce`; a new [T,H].

    gate_up [E,H,2I] and down [E,I,H], or transposes of contiguous tensors; experts, weights [T,k]; shared [T,H], as the
    ops have them. `scatter`: by `moe_down_reduce_scatter`, a new [T/w,H].
    """
    if is_recording():
        return torch.ops.iris_ops.moe_experts(
            A, gate_up, down, experts, weights, gate_up_bias, down_bias, shared, as_text(activation), interleaved,
            scatter, ctx.group_name,
        )  # fmt: skip
    return _experts(
        A, gate_up, down, experts, weights, gate_up_bias, down_bias, shared, activation, interleaved, scatter, ctx
    )


def as_text(activation: str | Activation) -> str:
    """Return an activation as operators take it."""
    known = activation_of(activation)
    return f"{known.kind} {known.alpha!r} {known.limit!r} {known.shift!r}"


def _from_text(text: str) -> Activation:
    kind, alpha, limit, shift = text.split()
    return Activation(kind, float(alpha), None if limit == "None" else float(limit), float(shift))


def _rows(ctx: Context, tokens: int, scatter: bool) -> int:
    return part_of(tokens, ctx.num_ranks, ctx.cur_rank) if scatter else tokens


def _gate_up(
    A: torch.Tensor, B: torch.Tensor, experts: torch.Tensor, bias: torch.Tensor | None, activation: str,
    interleaved: bool, width: int, group: str,
) -> torch.Tensor:  # fmt: skip
    out = A.new_empty(experts.numel(), width)
    ctx = registry.find(group)
    ctx.ops.moe_gate_up(out, A, B, experts, bias, _from_text(activation), interleaved)
    return out


def _down(
    A: torch.Tensor, B: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None,
    shared: torch.Tensor | None, scatter: bool, group: str,
) -> torch.Tensor:  # fmt: skip
    ctx = registry.find(group)
    out = A.new_empty(_rows(ctx, experts.shape[0], scatter), B.shape[2])
    down = ctx.ops.moe_down_reduce_scatter if scatter else ctx.ops.moe_down_all_reduce
    down(out, A, B, experts, weights, bias, shared)
    return out


def _experts(
    A: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, shared: torch.Tensor | None,
    activation: str | Activation, interleaved: bool, scatter: bool, ctx: Context,
) -> torch.Tensor:  # fmt: skip
    routing: torch.Tensor | Routing = experts
    if need_sorting(experts.numel(), gate_up.shape[0]):
        routing = ctx.ops.moe_route(experts, gate_up.shape[0])
    middle = A.new_empty(experts.numel(), down.shape[1])
    ctx.ops.moe_gate_up(middle, A, gate_up, routing, gate_up_bias, activation, interleaved)
    out = A.new_empty(_rows(ctx, A.shape[0], scatter), down.shape[2])
    reduce = ctx.ops.moe_down_reduce_scatter if scatter else ctx.ops.moe_down_all_reduce
    reduce(out, middle, down, routing, weights, down_bias, shared)
    return out


def _experts_of_group(
    A: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, shared: torch.Tensor | None, activation: str,
    interleaved: bool, scatter: bool, group: str,
) -> torch.Tensor:  # fmt: skip
    return _experts(
        A, gate_up, down, experts, weights, gate_up_bias, down_bias, shared, _from_text(activation), interleaved,
        scatter, registry.find(group),
    )  # fmt: skip


def _fake_gate_up(
    A: torch.Tensor, B: torch.Tensor, experts: torch.Tensor, bias: torch.Tensor | None, activation: str,
    interleaved: bool, width: int, group: str,
) -> torch.Tensor:  # fmt: skip
    check_gradients("moe_gate_up", A=A, B=B, bias=bias)
    return A.new_empty(experts.shape[0] * experts.shape[1], width)


def _fake_down(
    A: torch.Tensor, B: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None,
    shared: torch.Tensor | None, scatter: bool, group: str,
) -> torch.Tensor:  # fmt: skip
    check_gradients("moe_down", A=A, B=B, weights=weights, bias=bias, shared=shared)
    return A.new_empty(_rows(registry.find(group), experts.shape[0], scatter), B.shape[2])


def _fake_experts(
    A: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, shared: torch.Tensor | None, activation: str,
    interleaved: bool, scatter: bool, group: str,
) -> torch.Tensor:  # fmt: skip
    tensors = dict(A=A, gate_up=gate_up, down=down, weights=weights, shared=shared)
    check_gradients("moe_experts", **tensors, gate_up_bias=gate_up_bias, down_bias=down_bias)
    return A.new_empty(_rows(registry.find(group), experts.shape[0], scatter), down.shape[2])


_SCHEMAS: dict[str, tuple[str, Any, Any]] = {
    "moe_gate_up": (
        "(Tensor A, Tensor B, Tensor experts, Tensor? bias, str activation, bool interleaved, SymInt width, str group) "
        "-> Tensor",
        _gate_up, _fake_gate_up,
    ),
    "moe_down": (
        "(Tensor A, Tensor B, Tensor experts, Tensor weights, Tensor? bias, Tensor? shared, bool scatter, str group) "
        "-> Tensor",
        _down, _fake_down,
    ),
    "moe_experts": (
        "(Tensor A, Tensor gate_up, Tensor down, Tensor experts, Tensor weights, Tensor? gate_up_bias, "
        "Tensor? down_bias, Tensor? shared, str activation, bool interleaved, bool scatter, str group) -> Tensor",
        _experts_of_group, _fake_experts,
    ),
}  # fmt: skip
for _name, (_schema, _kernel, _fake) in _SCHEMAS.items():
    OPERATORS.add(_name + _schema, _kernel, _fake)
