"""The codes and scales of a weight that a checkpoint stores in one or in several tensors, without widening them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..checkpoint.composed import Concatenation
from .bits import Span
from .weight_format import Coding, Index, QuantisedWeight, Turned, joint_coding

Piece = tuple[Span, Span, torch.Tensor, torch.Tensor]


def coding_of(source: Any) -> Coding | str:
    """Return what the codes of `source` mean, or why it has none that could be kept."""
    if isinstance(source, QuantisedWeight):
        return source.coding
    if isinstance(source, Concatenation) and source.dim == 0:
        kinds = [coding_of(each) for each in source.inside]
        if reasons := [each for each in kinds if isinstance(each, str)]:
            return reasons[0]
        codings = [each for each in kinds if isinstance(each, Coding)]
        return joint_coding(codings) or "its outputs are in several formats"
    return "it is stored transposed" if isinstance(source, Turned) else "it is not quantised"


def coded(source: Any, index: Index, group: int, zeros: bool = False) -> Iterator[Piece]:
    """Yield `source[index]` by pieces, as `QuantisedWeight.coded` does, where `coding_of` gives a coding."""
    if isinstance(source, QuantisedWeight):
        yield from source.coded(index, group, zeros)
        return
    for each, own, at in _inside(source, index[0] if index else slice(None)):
        for rows, columns, codes, scales in coded(each, (slice(*own), *index[1:]), group, zeros):
            yield (rows[0] + at, rows[1] + at), columns, codes, scales


def rows_of(
    source: Any, rows: Span, columns: Sequence[Span], zeros: bool
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield codes and all scales of some rows at a time, as `QuantisedWeight.rows_of` does."""
    if isinstance(source, QuantisedWeight):
        yield from source.rows_of(rows, columns, zeros)
        return
    for each, own, at in _inside(source, slice(*rows)):
        for row, codes, scales in rows_of(each, own, columns, zeros):
            yield row + at, codes, scales


def _inside(source: Any, rows: slice) -> Iterator[tuple[Any, Span, int]]:
    """Yield the sources that have `rows` of a concatenation, which of their rows, and where these are in `rows`."""
    assert isinstance(source, Concatenation) and source.dim == 0, source
    start, stop, _ = rows.indices(source.shape[0])
    begin = at = 0
    for each in source.inside:
        end = begin + each.shape[0]
        first, last = max(start, begin), min(stop, end)
        if first < last:
            yield each, (first - begin, last - begin), at
            at += last - first
        begin = end
