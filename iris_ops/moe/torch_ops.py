"""The ops of a mixture as torch operators, so that torch.compile sees opaque nodes; `iris_ops/torch_ops.py` says why.

    torch.ops.iris_ops.moe_gate_up(A, B, experts, bias, activation, interleaved, width, group, scale)
                                   -> Tensor [T*k,width]
    torch.ops.iris_ops.moe_down(A, B, experts, weights, bias, shared, scatter, group, scale)
                                -> Tensor [T,H] or [T/w,H]
    torch.ops.iris_ops.moe_experts(A, gate_up, down, experts, weights, gate_up_bias, down_bias, shared, activation,
                                   interleaved, scatter, gate_up_scale, down_scale, width, rows, offsets, group)
                                   -> Tensor [T,H] or [T/w,H]

The last one is both, with the tokens sorted once. `width`: this rank's part of the experts' intermediate size.
`activation`: as `as_text` writes it. `scatter`: each rank gets its tokens only. All are functional and have no
gradient. `mixture` is what layers call, compiled or not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from iris import registry
import torch

from ..activation import Activation, activation_of
from ..checks import check_gradients
from ..operators import OPERATORS
from ..planning.moe_ways import need_sorting
from ..problem import part_of
from ..recording import is_recording
from ..torch_ops import Context
from .routing import Routing


class MixtureCall(NamedTuple):
    """Tokens A [T,H], the experts of each with their weights [T,k], and what the experts multiply by.

    gate_up [E,H,2I] and down [E,I,H], or transposes of contiguous tensors; shared [T,H]; biases and scales as the ops
    take them. `scatter`: by `moe_down_reduce_scatter`. `width`: I, which down has with padding where it holds codes.
    """

    A: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    shared: torch.Tensor | None = None
    activation: str | Activation = "silu"
    interleaved: bool = False
    scatter: bool = False
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None
    width: int | None = None
    rows: torch.Tensor | None = None
    """With `offsets`, the tokens by expert as in `Routing`, where the router has sorted them (`router_ops.py`)."""
    offsets: torch.Tensor | None = None


class _GateUp(NamedTuple):
    A: torch.Tensor
    B: torch.Tensor
    experts: torch.Tensor
    bias: torch.Tensor | None
    activation: str
    interleaved: bool
    width: int
    group: str
    scale: torch.Tensor | None = None


class _Down(NamedTuple):
    A: torch.Tensor
    B: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    bias: torch.Tensor | None
    shared: torch.Tensor | None
    scatter: bool
    group: str
    scale: torch.Tensor | None = None


def mixture(ctx: Context, call: MixtureCall) -> torch.Tensor:
    """Return the sum over each token's experts, by `moe_gate_up` and a `moe_down_*`: a new [T,H] or [T/w,H].

    Args:
        ctx: the context.
        call: the tensors and options of the mixture, a `MixtureCall`.
    """
    if is_recording():
        return torch.ops.iris_ops.moe_experts(*call._replace(activation=as_text(call.activation)), ctx.group_name)
    A, experts, count = call.A, call.experts, call.gate_up.shape[0]
    routing: torch.Tensor | Routing = experts
    if need_sorting(experts.numel(), count):
        if call.rows is not None and call.offsets is not None:
            routing = Routing(experts, call.rows, call.offsets)
        else:
            routing = ctx.ops.moe_route(experts, count)
    middle = A.new_empty(experts.numel(), call.down.shape[1] if call.width is None else call.width)
    given = call.gate_up_bias, call.activation, call.interleaved
    ctx.ops.moe_gate_up(middle, A, call.gate_up, routing, *given, scale=call.gate_up_scale)
    out = _new_result(ctx, A, call.down, experts, call.scatter)
    reduce = ctx.ops.moe_down_reduce_scatter if call.scatter else ctx.ops.moe_down_all_reduce
    reduce(out, middle, call.down, routing, call.weights, call.down_bias, call.shared, scale=call.down_scale)
    return out


def as_text(activation: str | Activation) -> str:
    """Return an activation as operators take it."""
    known = activation_of(activation)
    return f"{known.kind} {known.alpha!r} {known.limit!r} {known.shift!r}"


def _from_text(text: str) -> Activation:
    kind, alpha, limit, shift = text.split()
    return Activation(kind, float(alpha), None if limit == "None" else float(limit), float(shift))


def _new_result(
    ctx: Context, like: torch.Tensor, down: torch.Tensor, experts: torch.Tensor, scatter: bool
) -> torch.Tensor:  # fmt: skip
    tokens = experts.shape[0]
    rows = part_of(tokens, ctx.num_ranks, ctx.cur_rank) if scatter else tokens
    return like.new_empty(rows, down.shape[2])


def _gate_up(*given: Any, **named: Any) -> torch.Tensor:
    call = _GateUp(*given, **named)
    out, activation = call.A.new_empty(call.experts.numel(), call.width), _from_text(call.activation)
    ctx = registry.find(call.group)
    ctx.ops.moe_gate_up(
        out, call.A, call.B, call.experts, call.bias, activation, call.interleaved, scale=call.scale
    )  # fmt: skip
    return out


def _fake_gate_up(*given: Any, **named: Any) -> torch.Tensor:
    call = _GateUp(*given, **named)
    check_gradients("moe_gate_up", A=call.A, B=call.B, bias=call.bias)
    return call.A.new_empty(call.experts.shape[0] * call.experts.shape[1], call.width)


def _down(*given: Any, **named: Any) -> torch.Tensor:
    call = _Down(*given, **named)
    ctx = registry.find(call.group)
    out = _new_result(ctx, call.A, call.B, call.experts, call.scatter)
    reduce = ctx.ops.moe_down_reduce_scatter if call.scatter else ctx.ops.moe_down_all_reduce
    reduce(out, call.A, call.B, call.experts, call.weights, call.bias, call.shared, scale=call.scale)
    return out


def _fake_down(*given: Any, **named: Any) -> torch.Tensor:
    call = _Down(*given, **named)
    check_gradients("moe_down", A=call.A, B=call.B, weights=call.weights, bias=call.bias, shared=call.shared)
    return _new_result(registry.find(call.group), call.A, call.B, call.experts, call.scatter)


def _experts(*given: Any) -> torch.Tensor:
    *rest, group = given
    call = MixtureCall(*rest)
    return mixture(registry.find(group), call._replace(activation=_from_text(str(call.activation))))


def _fake_experts(*given: Any) -> torch.Tensor:
    *rest, group = given
    call = MixtureCall(*rest)
    tensors = dict(A=call.A, gate_up=call.gate_up, down=call.down, weights=call.weights, shared=call.shared)
    check_gradients("moe_experts", **tensors, gate_up_bias=call.gate_up_bias, down_bias=call.down_bias)
    return _new_result(registry.find(group), call.A, call.down, call.experts, call.scatter)


OPERATORS.add(
    "moe_gate_up(Tensor A, Tensor B, Tensor experts, Tensor? bias, str activation, bool interleaved, SymInt width, "
    "str group, Tensor? scale=None) -> Tensor",
    _gate_up, _fake_gate_up,
)  # fmt: skip
OPERATORS.add(
    "moe_down(Tensor A, Tensor B, Tensor experts, Tensor weights, Tensor? bias, Tensor? shared, bool scatter, "
    "str group, Tensor? scale=None) -> Tensor",
    _down, _fake_down,
)  # fmt: skip
OPERATORS.add(
    "moe_experts(Tensor A, Tensor gate_up, Tensor down, Tensor experts, Tensor weights, Tensor? gate_up_bias, "
    "Tensor? down_bias, Tensor? shared, str activation, bool interleaved, bool scatter, Tensor? gate_up_scale, "
    "Tensor? down_scale, SymInt? width, Tensor? rows, Tensor? offsets, str group) -> Tensor",
    _experts, _fake_experts,
)  # fmt: skip
