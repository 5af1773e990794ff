"""Verification of a split before weights move, on copies of the model without weights.

    skeleton       the model's modules with every tensor on meta
    weight_reads   forwards whose source reads a split weight itself
    proof          the unsplit and the split skeleton run side by side
    op_semantics   ops that mean something else on a rank's shard than on the whole
    views          modules whose weight is a view of another's

`verify` is the way in; nothing here knows how a model is split.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

from torch import nn

from . import proof, weight_reads
from .skeleton import skeleton

__all__ = ["Split", "verify"]


_S = TypeVar("_S", bound="Split")


class Split(Protocol):
    """The modules to split, by name."""

    @property
    def linears(self) -> Collection[str]:
        """Return the linears that are split."""

    def within(self: _S, skeleton: nn.Module) -> _S:
        """Return the split of a skeleton, in which one layer represents all that are alike."""

    def joined(self) -> list[str]:
        """Return the modules that return whole tensors: they sum or gather what is split inside."""

    def cutting(self, model: nn.Module) -> list[str]:
        """Return the modules that cut a rank's outputs as they would cut all."""


def verify(model: nn.Module, split: _S, apply: Callable[[nn.Module, _S, bool], None]) -> list[str]:
    """Run `model` without weights, unsplit and split, and return the split linears that could not be tried.

    Args:
        apply: called with a skeleton, its split, and whether it is split over a single rank; it swaps the modules and
            leaves no kernel to launch.

    Raises `StyleError` with the module's name where the split skeleton fails, returns another shape, or takes a shard
    for the whole tensor, and where a forward reads a split weight itself.
    """
    single, shard = skeleton(model), skeleton(model)
    inside = split.within(single)
    weight_reads.check(single, inside.linears)
    apply(single, inside, True)
    apply(shard, inside, False)
    return proof.prove(single, shard, inside.joined(), inside.cutting(single))
