"""Heads whose weight is an embedding's: one parameter in a split model, as in the unsplit one.

The embedding is replicated, for it looks any word up. The head multiplies by this rank's rows of it. The head registers
the embedding's own parameter, so `parameters()` yields the matrix once, `state_dict()` lists it under both names, and
`weight` is the whole matrix, too: whoever changes it in place changes the same numbers on all ranks. `local_weight` is
the view of this rank's rows. A second parameter over those rows would change twice when a caller changes all parameters
in place, and every rank would change other rows twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from iris.errors import ArgumentError, ShapeError
import torch
from torch import nn

from ..linear import ColumnParallelLinear
from ..shard import Shard, fill
from ..verify.views import WeightView
from ..weight_storage import Form

if TYPE_CHECKING:
    from iris.context import Iris


class TiedColumnParallelLinear(WeightView, ColumnParallelLinear):
    """A head that multiplies by its rows of `embedding`, the name of a parameter that `retie` registers here."""

    def __init__(
        self, linear: nn.Linear, embedding: str, gather_output: bool, *, ctx: Iris, parts: tuple[Shard, ...] | None
    ):
        sizes = (linear.in_features, linear.out_features)
        super().__init__(*sizes, linear.bias is not None, gather_output, ctx=ctx, parts=parts,
                         dtype=linear.weight.dtype, device="meta")  # fmt: skip
        self.tied_to = embedding
        if linear.bias is not None and not linear.bias.is_meta:
            self.load_shard("bias", linear.bias)

    @property
    def local_weight(self) -> torch.Tensor:
        """Return this rank's rows of the embedding; an empty tensor of their size until `retie` has registered it."""
        registered = self.weight
        return registered if len(registered) != self.out_features else self.parts[0].view(registered, dim=0)

    def views_in(self, function: str) -> bool:
        """Return whether `local_weight` is a view of the embedding."""
        return function == "local_weight"

    @torch.no_grad()
    def load_shard(self, name: str, source: Any, part: int | None = None) -> None:
        """Fill a tensor as any layer does; the weight's `source` fills the whole embedding, unless not yet loaded."""
        if name != "weight":
            return super().load_shard(name, source, part)
        registered = self._parameters["weight"]
        assert registered is not None
        given = list(source.shape if isinstance(source, torch.Tensor) else source.get_shape())
        if part not in (None, 0):
            raise ArgumentError(f"part is {part!r}: expected None or 0, because the head has one output")
        if given != [self.out_features, self.in_features]:
            raise ShapeError(
                f"source of weight has shape {given}: expected {[self.out_features, self.in_features]}, the unsplit"
                " tensor"
            )
        if not registered.is_meta:
            fill(registered, source)

    def store_as(self, form: Form, rounds: bool = True) -> None:
        raise ArgumentError(f"the layer's weight is {self.tied_to}: expected an untied weight, for {form.name}")


def retie(model: nn.Module) -> None:
    """Register with each tied head the parameter that its embedding holds now: a load or a move may replace it."""
    for module in model.modules():
        if isinstance(module, TiedColumnParallelLinear):
            module._parameters["weight"] = model.get_parameter(module.tied_to)
