"""Cut linears between groups of quantised weights that share a scale.

A row-parallel linear multiplies what column-parallel ones of its module make: all of them are cut at the same places.
Attention is cut between heads instead, wherever its groups end.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..shard import even_unit
from ..sharded import unit_of
from . import styles as styles_of
from .linear_like import as_linear


def units_of(model: nn.Module, linears: dict[str, str], ctx: Any, group: int = 1) -> dict[tuple[str, int], int]:
    """Return, by module and size, the units in which its linears are cut, where groups along K share a scale.

    The files have such groups, or weights are rounded to a format with groups of `group`. The size is what a
    row-parallel linear multiplies and what a column-parallel one of the same module produces.
    """
    rows = [name for name, style in linears.items() if style in styles_of.ROW]
    units = {name: max(group, unit_of(model.get_submodule(name))) for name in rows}
    grouped = {name: unit for name, unit in units.items() if unit > 1}
    if not grouped:
        return {}
    sizes: dict[str, tuple[str, int]] = {}
    for name, style in linears.items():
        linear = as_linear(model.get_submodule(name))
        assert linear is not None, name
        sizes[name] = name.rpartition(".")[0], cut_size(linear[0], style)
    outputs = {sizes[name] for name, style in linears.items() if style in styles_of.COLUMN | styles_of.PACKED}
    return {
        sizes[name]: even_unit(sizes[name][1], ctx.num_ranks, unit)
        for name, unit in grouped.items()
        if sizes[name] in outputs
    }


def cut_size(linear: Any, style: str) -> int:
    """Return how many entries of a linear the ranks share: inputs, outputs, or one half of outputs that hold two
    halves."""
    if style in styles_of.ROW | styles_of.ROW_SPLIT:
        return linear.in_features
    return linear.out_features // 2 if style in styles_of.PACKED else linear.out_features
