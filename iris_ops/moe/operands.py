"""The tensors of a mixture's call, as one value: what the ops, the checks and the launchers pass on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..activation import activation_of
from ..operands import is_together, together
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

    @property
    def key(self) -> tuple[tuple, tuple]:
        """Return what decides the call, its tensors and the rest."""
        rest = self.activation, self.interleaved
        return (self.out, self.A, self.B, *parts_of(self.where), self.bias, self.scale), rest

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the tensors of `key`."""
        return "out", "A", "B", *names_of(self.where), "bias", "scale"

    @property
    def is_ready(self) -> bool:
        """Return whether kernels take all tensors where they are."""
        return is_together(self.bias)

    def ready(self) -> GateUp:
        """Return the tensors as kernels take them."""
        return self._replace(bias=together(self.bias), activation=activation_of(self.activation))


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

    @property
    def key(self) -> tuple[tuple, tuple]:
        """Return what decides the call, its tensors and the rest."""
        given = self.out, self.A, self.B, *parts_of(self.where), self.weights, self.bias, self.shared, self.scale
        return given, ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the tensors of `key`."""
        return "out", "A", "B", *names_of(self.where), "weights", "bias", "shared", "scale"

    @property
    def is_ready(self) -> bool:
        """Return whether kernels take all tensors where they are."""
        return is_together(self.weights) and is_together(self.bias)

    def ready(self) -> Down:
        """Return the tensors as kernels take them."""
        weights = together(self.weights)
        assert weights is not None
        return self._replace(weights=weights, bias=together(self.bias))

    def product(self, out: torch.Tensor, rank: int) -> GateUp:
        """Return the tensors of its grouped product to `out`. Rank 0 adds the bias."""
        return GateUp(out, self.A, self.B, self.where, self.bias if rank == 0 else None, scale=self.scale)


def parts_of(where: torch.Tensor | Routing) -> tuple[torch.Tensor, ...]:
    """Return the tensors that say which rows an expert has."""
    return (where.chosen, where.rows, where.offsets) if isinstance(where, Routing) else (where,)


def names_of(where: torch.Tensor | Routing) -> tuple[str, ...]:
    """Return the names of `parts_of(where)`."""
    return ("experts", "experts.rows", "experts.offsets") if isinstance(where, Routing) else ("experts",)
