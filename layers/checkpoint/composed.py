"""Tensors that a model has as one and a checkpoint as several: stacked experts, gate and up side by side.

    experts.3.gate_proj.weight [I, H]  \\
    experts.3.up_proj.weight   [I, H]   Stack of Concatenations: experts.gate_up_proj [E, 2I, H]

They are read as a stored tensor is, by parts: `copy_to(local, index)` asks each tensor inside for its share of the
part, and nothing is put together in memory. transformers says which tensors make one (`WeightConverter`); `compose`
does what its operations would, and answers None for those that are more than an order of whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Source(Protocol):
    """What a parameter is filled from: a stored tensor, or one that is composed of several."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def place(self) -> tuple[int, int]: ...

    def get_shape(self) -> list[int]: ...

    def copy_to(self, local: torch.Tensor, index: tuple[slice, ...] = ()) -> None: ...


class _Composed:
    """Several sources as one."""

    shape: tuple[int, ...]

    def __init__(self, inside: Sequence[Source]) -> None:
        self.inside = inside

    @property
    def dtype(self) -> torch.dtype:
        return self.inside[0].dtype

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.inside)

    @property
    def place(self) -> tuple[int, int]:
        """File and byte of what comes first."""
        return min(each.place for each in self.inside)

    def get_shape(self) -> list[int]:
        return list(self.shape)


class Stack(_Composed):
    """`[n, ...]` of n sources of one shape."""

    def __init__(self, inside: Sequence[Source]) -> None:
        super().__init__(inside)
        self.shape = (len(inside), *inside[0].shape)

    def copy_to(self, local: torch.Tensor, index: tuple[slice, ...] = ()) -> None:
        chosen = range(len(self.inside))[index[0] if index else slice(None)]
        for at, which in enumerate(chosen):
            self.inside[which].copy_to(local[at], index[1:])


class Concatenation(_Composed):
    """Sources one after the other along `dim`, alike in all other dimensions."""

    def __init__(self, inside: Sequence[Source], dim: int) -> None:
        super().__init__(inside)
        first, self.dim = inside[0].shape, dim
        self.shape = (*first[:dim], sum(each.shape[dim] for each in inside), *first[dim + 1 :])

    def copy_to(self, local: torch.Tensor, index: tuple[slice, ...] = ()) -> None:
        index = (*index, *[slice(None)] * (self.dim + 1 - len(index)))
        start, stop, _ = index[self.dim].indices(self.shape[self.dim])
        begin = at = 0
        for each in self.inside:
            end = begin + each.shape[self.dim]
            first, last = max(start, begin), min(stop, end)
            if first < last:
                own = (*index[: self.dim], slice(first - begin, last - begin), *index[self.dim + 1 :])
                each.copy_to(local.narrow(self.dim, at, last - first), own)
                at += last - first
            begin = end


def compose(operations: Sequence[Any], by_pattern: Sequence[Sequence[Source]]) -> Source | None:
    """What transformers' `operations` make of the tensors of each source pattern; None if that is not served here."""
    kinds = [type(each).__name__ for each in operations]
    dims = [getattr(each, "dim", None) for each in operations]
    columns: list[Source]
    if kinds[:1] == ["MergeModulelist"] and dims[0] == 0:
        if any(each.shape != tensors[0].shape for tensors in by_pattern for each in tensors):
            return None
        columns, kinds, dims = [Stack(tensors) for tensors in by_pattern], kinds[1:], dims[1:]
    else:
        columns = [each for tensors in by_pattern for each in tensors]
    if not kinds and len(columns) == 1:
        return columns[0]
    if kinds != ["Concatenate"] or not isinstance(dims[0], int) or not 0 <= dims[0] < len(columns[0].shape):
        return None
    rest = [(*each.shape[: dims[0]], *each.shape[dims[0] + 1 :]) for each in columns]
    return Concatenation(columns, dims[0]) if rest == rest[:1] * len(rest) else None
