"""AWQ (`version: gemm`): 4 bits in groups along K, packed along N.

packed  int32 [K, N / 8]: of eight columns of a word, the nibbles from the lowest on are columns 0, 2, 4, 6, 1, 3, 5, 7
zero    int32 [K / g, N / 8], packed alike
scale   [K / g, N]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from iris.errors import CheckpointError
import torch

from ..checkpoint.files import StoredTensor
from .bits import Span, fields
from .integers import GroupedIntegers, check_scales
from .weight_format import Index, QuantisedWeight

_BITS = 4
_NIBBLE_OF = (0, 4, 1, 5, 2, 6, 3, 7)  # of each column of a word


class Awq(GroupedIntegers):
    """Integers of 4 bits with zero points, stored as [K, N]."""

    name: ClassVar[str] = "awq"
    stored_by_columns: ClassVar[bool] = True

    def reads(self, rows: Span, columns: Span) -> dict[str, Index]:
        packed, groups = slice(*self.packed_span(rows)), slice(*self.groups(columns))
        return {"packed": (slice(*columns), packed), "zero": (groups, packed), "scale": (groups, slice(*rows))}

    def codes(self, held: Mapping[str, torch.Tensor], rows: Span, columns: Span) -> torch.Tensor:
        return self._unpacked(held["packed"], rows)

    def zeros(self, held: Mapping[str, torch.Tensor], rows: Span) -> torch.Tensor | int:
        return self._unpacked(held["zero"], rows)

    def scales(
        self, held: Mapping[str, torch.Tensor], rows: Span, columns: Span, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        return held["scale"].t().to(dtype)

    def _unpacked(self, packed: torch.Tensor, rows: Span) -> torch.Tensor:
        codes = fields(packed, _BITS).unflatten(1, (-1, 8))
        return self.within(codes[..., list(_NIBBLE_OF)].flatten(1).t(), rows, 0)


def awq_weight(tensors: Mapping[str, StoredTensor], group: int) -> QuantisedWeight:
    """Return the weight that the stored `tensors` by role are, with `group` entries to a scale, -1 for all of a row.

    Raises `CheckpointError` where they do not fit.
    """
    packed, zero, scale = (tensors[role] for role in ("packed", "zero", "scale"))
    if any(len(each.shape) != 2 for each in (packed, zero, scale)):
        raise CheckpointError(
            "has tensors that are not matrices: expected two dimensions in qweight, qzeros and scales"
        )
    columns, rows = packed.shape[0], packed.shape[1] * 8
    group = columns if group == -1 else group
    groups = -(-columns // group)
    if packed.dtype != torch.int32 or zero.dtype != torch.int32:
        raise CheckpointError(f"is packed as {packed.dtype}, zero points as {zero.dtype}: expected int32")
    check_scales(scale)
    if columns % group or scale.shape != (groups, rows) or zero.shape != (groups, rows // 8):
        raise CheckpointError(
            f"[{rows}, {columns}] has scales {list(scale.shape)} and zero points {list(zero.shape)}: expected"
            f" [{groups}, {rows}] and [{groups}, {rows // 8}], for groups of {group}"
        )
    return QuantisedWeight(Awq((rows, columns), _BITS, group), {"packed": packed, "zero": zero, "scale": scale})
