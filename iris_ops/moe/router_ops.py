"""A router's choice as a torch operator: what layers call, compiled or not.

    torch.ops.iris_ops.moe_choose(logits, bias, top_k, scoring, wide, group)
                                  -> (experts [T,k], weights [T,k], rows [T*k], offsets [E+1])

`scoring`: as `Scoring.text` writes it. `wide`: weights in float32, else in the dtype of the logits. The operator is
functional and has no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

from iris import registry
import torch

from ..checks import check_gradients
from ..operators import OPERATORS
from ..planning.moe_ways import need_sorting
from ..recording import is_recording
from ..torch_ops import Context
from .scoring import Scoring, from_text


class Choice(NamedTuple):
    """The experts of each token with their weights, and, for many tokens, the tokens by expert as in `Routing`."""

    experts: torch.Tensor
    weights: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor


def choose_experts(
    ctx: Context, logits: torch.Tensor, top_k: int, scoring: Scoring, bias: torch.Tensor | None, wide: bool
) -> Choice:
    """Return what `ctx.ops.moe_choose` returns. Tokens are sorted if the experts' products read them in that order."""
    if is_recording():
        return Choice(*torch.ops.iris_ops.moe_choose(logits, bias, top_k, scoring.text, wide, ctx.group_name))
    sort = need_sorting(logits.shape[0] * top_k, logits.shape[1])
    dtype = torch.float32 if wide else logits.dtype
    routing, weights = ctx.ops.moe_choose(logits, top_k, scoring, bias, dtype, sort)
    return Choice(routing.chosen, weights, routing.rows, routing.offsets)


def _choose(
    logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, scoring: str, wide: bool, group: str
) -> Choice:
    return choose_experts(registry.find(group), logits, top_k, from_text(scoring), bias, wide)


def _fake_choose(
    logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, scoring: str, wide: bool, group: str
) -> Choice:
    check_gradients("moe_choose", logits=logits, bias=bias)
    tokens, experts = logits.shape
    return Choice(
        logits.new_empty(tokens, top_k, dtype=torch.int64),
        logits.new_empty(tokens, top_k, dtype=torch.float32 if wide else logits.dtype),
        logits.new_empty(tokens * top_k, dtype=torch.int32),
        logits.new_empty(experts + 1, dtype=torch.int32),
    )


OPERATORS.add(
    "moe_choose(Tensor logits, Tensor? bias, int top_k, str scoring, bool wide, str group) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _choose, _fake_choose,
)  # fmt: skip
