"""Choose how each split linear stores its weight: as the files do, rounded to a format, or in the model's dtype.

`weights=`      a weight that the files have quantised                          another weight
None            in codes and scales of the file, where a form holds them        in the model's dtype
"widened"       in the model's dtype                                            in the model's dtype
a format        in codes and scales of the file, if they are of that kind       rounded to the format
                ("fp8" is the kind of "fp8_block"); else rounded to the format

A form holds codes of e4m3, e2m1, int4 and int8 with one scale for a row or for a group of it, and zero points of
integers. Cut along K, a group may become several smaller ones that repeat its scale. All ranks choose alike: by the
whole weight and by every rank's cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ..formats.weight_format import Coding, joint_coding
from ..shard import Shard
from ..sharded import ShardedLinear
from ..weight_storage import COLUMNS_ONLY, ELEMENTS, FORMS, REDUCED, Form, InDtype, form_of, unstorable
from .merge import Slice

WIDENED = "widened"
WEIGHTS = (None, WIDENED, *FORMS)


def group_made(weights: str | None) -> int:
    """Return how many entries along K have a scale in weights that are rounded to a format; 1: a whole row."""
    form = FORMS.get(weights or "")
    return 1 if form is None else form.group or 1


def store_weights(model: nn.Module, codings: Mapping[str, Coding | str], weights: str | None, ctx: Any) -> None:
    """Give each split linear of `model` its storage.

    `codings`: by the name of a linear that the files have quantised, its codes, or why they are widened.
    """
    modules = dict(model.named_modules())
    merged = {id(each.merged) for each in modules.values() if isinstance(each, Slice)}
    stored: dict[int, tuple[ShardedLinear, list[Coding | str]]] = {}
    for name, module in modules.items():
        layer: Any = module.merged if isinstance(module, Slice) else module
        if isinstance(layer, ShardedLinear) and (layer is not module or id(layer) not in merged):
            stored.setdefault(id(layer), (layer, []))[1].append(codings.get(name, ""))
    for layer, kinds in stored.values():
        form = _chosen(layer, kinds, weights, ctx)
        if isinstance(form, Form):
            layer.store_as(form, rounds=weights is not None)
        else:
            layer.storage = InDtype(form)


def _chosen(layer: Any, kinds: list[Coding | str], weights: str | None, ctx: Any) -> Form | str:
    """Return the form of a layer whose outputs have these codings in the files, or why it has none."""
    if weights == WIDENED:
        return "weights='widened'"
    refused = unstorable(layer, rounds=weights is not None)
    own = _own_form(layer, kinds, ctx)
    if weights is None:
        return refused or own
    if refused or (weights in COLUMNS_ONLY and layer.op == REDUCED):
        return refused or f"weights={weights!r} is for column-parallel linears"
    kind = ELEMENTS[FORMS[weights].packing.name]
    return own if isinstance(own, Form) and ELEMENTS[own.packing.name] == kind else FORMS[weights]


def _own_form(layer: Any, kinds: list[Coding | str], ctx: Any) -> Form | str:
    """Return the form that holds what the files have, or why there is none."""
    if reasons := [each for each in kinds if isinstance(each, str)]:
        several = any(isinstance(each, Coding) for each in kinds)
        return "it is one product with weights in another format" if several else reasons[0]
    codings = [each for each in kinds if isinstance(each, Coding)]
    coding = joint_coding(codings)
    if coding is None:
        alike = joint_coding(replace(each, order=None) for each in codings) is not None
        return f"it is one product with weights in another {'order' if alike else 'format'}"
    if layer.stored_transposed:
        return "it is stored transposed"
    starts = _starts(layer, ctx) if layer.dim == 1 else ()
    if starts is None and coding.group < layer.in_features:
        return "its inputs are not in even ranges"
    if (level := layer.ctx.level.unrounded_parts) and layer.dim == 1:
        if coding.order is not None:
            return f"its entries, sorted by group, would be added in an order that depends on the ranks; {level}"
        if 0 in layer.parts[0].rank_sizes:
            return f"a rank has none of its inputs; {level}"
    return form_of(coding, layer.in_features, starts or (), by_row=not level)


def _starts(layer: Any, ctx: Any) -> tuple[int, ...] | None:
    """Return where the inputs of every rank begin, as all ranks find it; None where one rank cannot know."""
    (part,) = layer.parts
    world, each = ctx.num_ranks, part.total // ctx.num_ranks
    if part.rank_sizes:
        return tuple(sum(part.rank_sizes[:rank]) for rank in range(world))
    evenly = part == Shard(each * world, ((ctx.cur_rank * each, (ctx.cur_rank + 1) * each),))
    return tuple(rank * each for rank in range(world)) if evenly else None
