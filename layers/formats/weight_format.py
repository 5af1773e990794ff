"""The interface of a weight format, and a quantised weight as the source of a parameter.

    reads(rows, columns)        which part of each stored tensor these rows and columns of the weight need
    widen(held, rows, columns)  their numbers, from those parts

Rows, columns, blocks and groups are counted in the unsplit weight [N, K]. So a rank may cut inside a block: two
ranks that share a block both read its scale. A quantised weight is read a few rows at a time, so that loading holds
one piece of float32 numbers besides the parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..checkpoint.files import StoredTensor

Span = tuple[int, int]  # [start, stop)
Index = tuple[slice, ...]
_PIECE = 1 << 21  # numbers that are widened at a time


@dataclass(frozen=True)
class WeightFormat(ABC):
    """How one weight of `shape` [N, K] lies in a checkpoint."""

    shape: tuple[int, int]

    name: ClassVar[str]  # of the layout
    stored_by_columns: ClassVar[bool] = False  # whether the files hold [K, N]

    @property
    def label(self) -> str:
        """Return the layout and which entries share a scale, for reports."""
        return self.name

    @property
    def unit(self) -> int:
        """Return how many entries along K share a scale, at which shards should end; 1 where that does not matter."""
        return 1

    @abstractmethod
    def reads(self, rows: Span, columns: Span) -> dict[str, Index]:
        """Return the index of the part of each stored tensor that `rows` and `columns` of the weight need."""

    @abstractmethod
    def widen(
        self, held: Mapping[str, torch.Tensor], rows: Span, columns: Span, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return the numbers [rows, columns] of the weight, computed in `dtype` from the parts that `reads` names."""


class QuantisedWeight:
    """A weight [N, K] in `format`, filled from stored `tensors` by role. It is read by parts, as a stored tensor is."""

    dtype = torch.float32  # of the numbers that it gives

    def __init__(self, format: WeightFormat, tensors: Mapping[str, StoredTensor]) -> None:
        self.format, self.tensors, self.shape = format, dict(tensors), format.shape

    @property
    def nbytes(self) -> int:
        """Return the bytes in the files."""
        return sum(each.nbytes for each in self.tensors.values())

    @property
    def place(self) -> tuple[int, int]:
        """Return file and byte of the tensor that comes first."""
        return min(each.place for each in self.tensors.values())

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def copy_to(self, local: torch.Tensor, index: Index = ()) -> None:
        """Fill `local` with the numbers of `self[index]`, computed in float32, or float64 if that is its dtype."""
        precision = torch.float64 if local.dtype == torch.float64 else torch.float32
        rows, columns = self._spans(index)
        for some_rows, some_columns in self._pieces(rows, columns):
            piece = local[slice(*_from(rows, some_rows)), slice(*_from(columns, some_columns))]
            piece.copy_(self.values(some_rows, some_columns, precision))

    def values(self, rows: Span, columns: Span, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the numbers [rows, columns], computed in `dtype`."""
        held = {role: self.tensors[role][index] for role, index in self.format.reads(rows, columns).items()}
        return self.format.widen(held, rows, columns, dtype)

    def _spans(self, index: Index) -> tuple[Span, Span]:
        padded = (*index, *[slice(None)] * (2 - len(index)))
        (first, last, _), (start, stop, _) = (each.indices(size) for each, size in zip(padded, self.shape, strict=True))
        return (first, last), (start, stop)

    def _pieces(self, rows: Span, columns: Span) -> Iterator[tuple[Span, Span]]:
        """Yield spans of about 2 million numbers, cut between blocks, in the order of the files."""
        along, across = (columns, rows) if self.format.stored_by_columns else (rows, columns)
        step = max(1, _PIECE // max(1, across[1] - across[0]) // 128) * 128
        start = along[0]
        while start < along[1] and across[0] < across[1]:
            stop = min((start // step + 1) * step, along[1])
            yield (across, (start, stop)) if self.format.stored_by_columns else ((start, stop), across)
            start = stop


class Turned:
    """The transpose of a quantised weight, for a module that stores its weights as [K, N]."""

    dtype = torch.float32

    def __init__(self, inside: QuantisedWeight) -> None:
        self.inside, self.shape = inside, inside.shape[::-1]

    @property
    def nbytes(self) -> int:
        return self.inside.nbytes

    @property
    def place(self) -> tuple[int, int]:
        return self.inside.place

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def copy_to(self, local: torch.Tensor, index: Index = ()) -> None:
        self.inside.copy_to(local.t(), (*index, *[slice(None)] * (2 - len(index)))[::-1])


def quantised_weights(source: Any) -> list[QuantisedWeight]:
    """Return the quantised weights that `source` is composed of: none for a stored tensor."""
    if isinstance(source, QuantisedWeight):
        return [source]
    inside = getattr(source, "inside", [])
    return [each for one in (inside if isinstance(inside, list) else [inside]) for each in quantised_weights(one)]


def _from(origin: Span, span: Span) -> Span:
    return span[0] - origin[0], span[1] - origin[0]
