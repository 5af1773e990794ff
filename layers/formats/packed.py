"""Integers as compressed-tensors stores them, in 4 or 8 bits: packed (`pack-quantized`), or in int8 (`int-quantized`).

packed  int32 [N, ceil(K * bits / 32)], lowest bits first along K: the integer + 2^(bits - 1); or int8 [N, K], in which
        4 bits may be, too
scale   [N, groups]; one group for a channel
zero    int32 [ceil(N * bits / 32), groups], packed along N as the integers are; or int8 [N, groups]
order   int32 [K], the group of each entry, where older files order entries by activation
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from iris.errors import CheckpointError
import torch

from ..checkpoint.files import StoredTensor
from .bits import Span, fields
from .integers import GroupedIntegers, check_scales, stored_order
from .weight_format import Index, QuantisedWeight


@dataclass(frozen=True)
class Packed(GroupedIntegers):
    """`asymmetric`: whether there are zero points. `loose`: one int8 to an entry."""

    asymmetric: bool = False
    loose: bool = False

    name: ClassVar[str] = "packed"

    def reads(self, rows: Span, columns: Span) -> dict[str, Index]:
        groups = slice(*self.groups(columns))
        index: dict[str, Index] = {
            "packed": (slice(*rows), slice(*(columns if self.loose else self.packed_span(columns)))),
            "scale": (slice(*rows), groups),
        }
        if self.asymmetric:
            index["zero"] = (slice(*(rows if self.loose else self.packed_span(rows))), groups)
        return index

    def codes(self, held: Mapping[str, torch.Tensor], rows: Span, columns: Span) -> torch.Tensor:
        packed = held["packed"]
        return self._unsigned(packed) if self.loose else self.within(fields(packed, self.bits), columns, 1)

    def zeros(self, held: Mapping[str, torch.Tensor], rows: Span) -> torch.Tensor | int:
        if not self.asymmetric:
            return 1 << (self.bits - 1)
        zero = held["zero"]
        return self._unsigned(zero) if self.loose else self.within(fields(zero.t(), self.bits).t(), rows, 0)

    def scales(
        self, held: Mapping[str, torch.Tensor], rows: Span, columns: Span, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        return held["scale"].to(dtype)

    def _unsigned(self, integers: torch.Tensor) -> torch.Tensor:
        """Return int8 numbers + 2^(bits - 1), as packed ones are."""
        return integers.view(torch.uint8) + (1 << (self.bits - 1))

    def fault(self, held: Mapping[str, torch.Tensor], rows: Span, columns: Span) -> str:
        if self.loose and self.bits < 8 and (self._unsigned(held["packed"]) >> self.bits).any():
            return f"has integers of more than {self.bits} bits: expected {self.bits} as the configuration says"
        return super().fault(held, rows, columns)


def packed_weight(
    tensors: Mapping[str, StoredTensor], bits: int, shape: tuple[int, ...], group: int | None
) -> QuantisedWeight:
    """Return the weight of `shape` [N, K] that the stored `tensors` by role are, with `group` entries to a scale, None
    for all of a row.

    Raises `CheckpointError` where they do not fit.
    """
    packed, scale, zero, order = (tensors.get(role) for role in ("packed", "scale", "zero", "order"))
    assert packed is not None and scale is not None
    if len(shape) != 2 or len(packed.shape) != 2:
        raise CheckpointError(f"has shape {list(shape)}, packed {list(packed.shape)}: expected matrices")
    rows, columns = shape
    loose = packed.dtype == torch.int8
    width = columns if loose else -(-columns * bits // 32)
    if packed.dtype not in (torch.int8, torch.int32) or packed.shape != (rows, width):
        raise CheckpointError(
            f"is packed as {packed.dtype} {list(packed.shape)}: expected int32 [{rows}, {-(-columns * bits // 32)}],"
            f" of {bits} bits each, or int8 [{rows}, {columns}]"
        )
    check_scales(scale)
    if scale.nbytes == scale.dtype.itemsize and rows > 1:
        raise CheckpointError("has one scale: expected one for each row, or one for each group of a row")
    group = columns if group is None else group
    groups = -(-columns // group)
    if scale.shape != (rows, groups) and (groups > 1 or scale.shape != (rows,)):
        raise CheckpointError(
            f"[{rows}, {columns}] has scales of shape {list(scale.shape)}: expected {[rows, groups]}, for groups of"
            f" {group}"
        )
    if zero is not None:
        expected = (rows if loose else -(-rows * bits // 32), groups)
        if zero.dtype != packed.dtype or zero.shape != expected:
            raise CheckpointError(
                f"has zero points {zero.dtype} {list(zero.shape)}: expected {packed.dtype} {list(expected)}"
            )
    held = {"packed": packed, "scale": scale.reshaped((rows, groups)), "zero": zero}
    format = Packed((rows, columns), bits, group, stored_order(order, columns, group), zero is not None, loose)
    return QuantisedWeight(format, {role: each for role, each in held.items() if each is not None})
