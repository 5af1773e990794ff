"""Modules that compute a weight as a view of another module's parameter, which a forward may read through them."""

from __future__ import annotations


class WeightView:
    """A module with properties that view a parameter of another module.

    A run on meta must not take such a property for a forward that reads a split weight itself.
    """

    def views_in(self, function: str) -> bool:
        """Return whether the method or property named `function` computes the view."""
        raise NotImplementedError
