"""Parameters that a checkpoint stores as several tensors: stacked experts, gate and up side by side.

    experts.3.gate_proj.weight [I, H]  \\
    experts.3.up_proj.weight   [I, H]   Stack of Concatenations: experts.gate_up_proj [E, 2I, H]

`copy_to(local, index)` reads a part of one as of a stored tensor: each tensor inside copies its share, and no full
tensor is assembled in memory. transformers' `WeightConverter` lists the tensors of a parameter. `compose` follows its
operations, and returns None for those that do more than order whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Source(Protocol):
    """The values of a parameter: a stored tensor, or one that is composed of several."""

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
    """Several sources that are read as one."""

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
        """Return file and byte of the source that comes first."""
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
    """Return the source that transformers' `operations` make of each pattern's tensors, None if not supported here."""
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
