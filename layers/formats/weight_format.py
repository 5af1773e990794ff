"""The interface of a weight format, and a quantised weight as the source of a parameter.

    reads(rows, columns)                which part of each stored tensor these rows and columns of the weight need
    codes(held, rows, columns)          their codes, from those parts
    scales(held, rows, columns, dtype)  the scales of their groups along K
    widen(held, rows, columns)          their numbers: what a code means, times the scale of its group

Rows, columns, blocks and groups are counted in the unsplit weight [N, K]. So a rank may cut inside a block: two
ranks that share a block both read its scale. A quantised weight is read a few rows at a time, so that loading holds
one piece of float32 numbers besides the parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from iris.errors import CheckpointError
import torch

from ..checkpoint.files import StoredTensor
from ..together import shown
from .bits import Span, block_of, grouped
from .order import Order

Index = tuple[slice, ...]
_PIECE = 1 << 21  # numbers that are widened at a time


@dataclass(frozen=True)
class Coding:
    """The meaning of a weight's codes, independent of the layout of its file.

    `element`: "e4m3"; "e2m1", codes 0 to 15; "int4", codes 0 to 15 that mean -8 to 7; or "int8", codes 0 to 255 that
    mean -128 to 127. `group` consecutive entries of a row have one scale, the last group maybe fewer; `scales` is the
    dtype in which files have them. `zeros`: whether a zero point comes with each scale, which is subtracted before.
    `order`: the group of each entry, where those of a group do not follow each other; groups are then of multiples of
    `group` entries.
    """

    element: str
    group: int
    scales: torch.dtype
    zeros: bool = False
    order: Order | None = None


def joint_coding(codings: Iterable[Coding]) -> Coding | None:
    """Return the coding that holds codes of all `codings`, of which some may have zero points; None if none does."""
    kinds = set(codings)
    zeros = any(each.zeros for each in kinds)
    kinds = {replace(each, zeros=zeros) for each in kinds}
    return kinds.pop() if len(kinds) == 1 else None


@dataclass(frozen=True)
class WeightFormat(ABC):
    """The layout of one weight of `shape` [N, K] in a checkpoint."""

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
    def coding(self, tensors: Mapping[str, StoredTensor]) -> Coding | str:
        """Return what the codes mean, or, where a code and one scale do not make the number, why not.

        Zero points among `tensors` may be read.
        """

    @property
    def per_scale(self) -> int:
        """Return how many consecutive entries of a row have one scale."""
        raise NotImplementedError

    @abstractmethod
    def codes(self, held: Mapping[str, torch.Tensor], rows: Span, columns: Span) -> torch.Tensor:
        """Return the codes [rows, columns] from the parts that `reads` names."""

    @abstractmethod
    def scales(
        self, held: Mapping[str, torch.Tensor], rows: Span, columns: Span, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return the scales [rows, groups that `columns` touch] from the parts that `reads` names, in `dtype`."""

    def pairs(self, held: Mapping[str, torch.Tensor], rows: Span, columns: Span) -> torch.Tensor:
        """Return scales and zero points, as a `Coding` counts, in float32 [rows, groups that `columns` touch, 2]."""
        raise NotImplementedError

    def numbers(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return what `codes` mean before they are scaled."""
        return codes.to(dtype)

    def fault(self, held: Mapping[str, torch.Tensor], rows: Span, columns: Span) -> str:
        """Return what is wrong with values that were read, empty for nothing."""
        finite = self.scales(held, rows, columns).isfinite().all()
        return "" if finite else "has scales that are NaN or infinite: expected finite ones"

    def widen(
        self, held: Mapping[str, torch.Tensor], rows: Span, columns: Span, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return the numbers [rows, columns] of the weight, computed in `dtype` from the parts that `reads` names."""
        codes, scales = self.codes(held, rows, columns), self.scales(held, rows, columns, dtype)
        return self.numbers(codes, dtype) * grouped(scales, columns, self.per_scale)


class QuantisedWeight:
    """A weight [N, K] in `format`, filled from stored `tensors` by role. It is read by parts, as a stored tensor is."""

    dtype = torch.float32  # of the numbers that it gives

    def __init__(self, format: WeightFormat, tensors: Mapping[str, StoredTensor]) -> None:
        self.format, self.tensors, self.shape = format, dict(tensors), format.shape
        self.name = ""  # in the files, for messages

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
        return self.format.widen(self._read(rows, columns), rows, columns, dtype)

    @cached_property
    def coding(self) -> Coding | str:
        """Return what the codes mean, or why a code and one scale do not make the number. May read zero points."""
        coding = self.format.coding(self.tensors)
        return coding if isinstance(coding, str) else replace(coding, group=min(coding.group, self.shape[1]))

    def coded(
        self, index: Index, group: int, zeros: bool = False
    ) -> Iterator[tuple[Span, Span, torch.Tensor, torch.Tensor]]:
        """Yield `self[index]` by pieces: their rows and columns, counted in it, codes [n, k] and scales [n, k / group],
        or, if `zeros`, pairs of scales and zero points [n, k / group, 2].

        Scales are exact in float32; those of two factors are rounded to it. Entry j of a row of `self[index]` has scale
        j // group. A stored group may have several of these. A piece starts at a multiple of 128. Raises `ValueError`
        where a stored group does not have whole ones.
        """
        (first, last), (start, stop) = self._spans(index)
        own = self.format.per_scale
        if start % own + stop - start > own and (own % group or start % group):
            raise ValueError(f"groups of {group} from column {start} on: the stored groups are of {own}")
        by_columns = self.format.stored_by_columns
        along, across = ((start, stop), last - first) if by_columns else ((first, last), stop - start)
        step = max(1, _PIECE // max(1, across) // 128) * 128
        for at in range(*along, step):
            some = at, min(at + step, along[1])
            rows, columns = ((first, last), some) if by_columns else (some, (start, stop))
            held = self._read(rows, columns)
            if zeros:
                scales = self.format.pairs(held, rows, columns)
            else:
                scales = self.format.scales(held, rows, columns, torch.float32)
            of = block_of(columns, own, scales.device, group)
            codes = self.format.codes(held, rows, columns)
            yield _from((first, last), rows), _from((start, stop), columns), codes, scales.index_select(1, of)

    def rows_of(
        self, rows: Span, columns: Iterable[Span], zeros: bool
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield the codes of `columns`, side by side, and all scales of some rows at a time, with the number of the
        first of these in `rows`.

        For weights with an order; scales are [n, groups], or pairs with zero points [n, groups, 2].
        """
        columns = list(columns)
        step = max(1, _PIECE // max(1, sum(stop - start for start, stop in columns)) // 8) * 8
        for at in range(*rows, step):
            some = at, min(at + step, rows[1])
            parts = []
            for span in columns:
                held = self._read(some, span)
                parts.append(self.format.codes(held, some, span))
            scales = self.format.pairs(held, some, span) if zeros else self.format.scales(held, some, span)
            yield at - rows[0], torch.cat(parts, 1), scales

    def _read(self, rows: Span, columns: Span) -> dict[str, torch.Tensor]:
        held = {role: self.tensors[role][index] for role, index in self.format.reads(rows, columns).items()}
        if fault := self.format.fault(held, rows, columns):
            raise CheckpointError(f"{shown(self.name)} {fault}")
        return held

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
