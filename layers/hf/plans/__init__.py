"""Built-in plans: for families whose own plan is missing, splits the head only, or leaves attention whole.

    dense        decoders of the plain kind under many names, and those with one fused projection
    bert         encoders that are run as decoders
    mixtures     experts, latent attention
    completed    mixtures whose own plan leaves attention or shared experts whole
    recurrent    state spaces, linear attentions, convolutions, and hybrids of them with attention

A plan is data: patterns of module names, in which `*` represents one name, to the names of styles (see `styles`). One
plan may cover several families, so patterns that match nothing in a model are ignored. Where a forward mixes what a
split would separate, a plan gathers: `colwise_gather_output` and `rowwise_split_input` split any product's weight and
are right whatever comes between, at the price of one more exchange.

A plan that the user gives comes first; a family without an entry here is split by its model's own plan.
"""

from __future__ import annotations

from typing import Any

from . import bert, completed, dense, mixtures, recurrent

PLANS: dict[str, dict[str, str]] = {
    **dense.PLANS, **bert.PLANS, **mixtures.PLANS, **completed.PLANS, **recurrent.PLANS
}  # fmt: skip


def built_in(model: Any) -> tuple[str, dict[str, str]] | None:
    """Return the name and the rules of the plan for `model`'s family; None where its own is used."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return (kind, PLANS[kind]) if kind in PLANS else None
