"""The tensors of a mixture's call, as one value: what the ops, the checks and the launchers pass on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from .routing import Routing


class GateUp(NamedTuple):
    """Operands of `moe_gate_up`. `where`: experts as they were chosen, or sorted.

    `activation`: an `Activation` or its name; None of a plain product.
    """

    out: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    where: torch.Tensor | Routing
    bias: torch.Tensor | None
    activation: Any = None
    interleaved: bool = False
    scale: torch.Tensor | None = None


class Down(NamedTuple):
    """Operands of `moe_down_*`. `where`: experts as they were chosen, or sorted."""

    out: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    where: torch.Tensor | Routing
    weights: torch.Tensor
    bias: torch.Tensor | None = None
    shared: torch.Tensor | None = None
    scale: torch.Tensor | None = None

    def product(self, out: torch.Tensor, rank: int) -> GateUp:
        """Return the tensors of its grouped product to `out`. Rank 0 adds the bias."""
        return GateUp(out, self.A, self.B, self.where, self.bias if rank == 0 else None, scale=self.scale)
