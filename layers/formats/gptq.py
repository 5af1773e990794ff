"""GPTQ: 4 or 8 bits in groups along K, packed along K, entries ordered by activation or not.

    packed  int32 [K * bits / 32, N], lowest bits first along K
    zero    int32 [groups, N * bits / 32], lowest bits first along N; `checkpoint_format: gptq` stores the zero - 1
    scale   [groups, N]
    order   int32 [K], the group of each entry (`g_idx`): k // g, or with `desc_act` any

Writers of the first format subtract 1 from each field of a word as one subtraction of integers, so adding it back is
one addition, whatever was borrowed.
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

_ONES = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class Gptq(GroupedIntegers):
    """Integers with zero points, stored as [K, N]. `less_one`: whether files hold zeros less one."""

    less_one: bool = True

    name: ClassVar[str] = "gptq"
    stored_by_columns: ClassVar[bool] = True

    def reads(self, rows: Span, columns: Span) -> dict[str, Index]:
        groups = slice(*self.groups(columns))
        return {
            "packed": (slice(*self.packed_span(columns)), slice(*rows)),
            "zero": (groups, slice(*self.packed_span(rows))),
            "scale": (groups, slice(*rows)),
        }

    def codes(self, held: Mapping[str, torch.Tensor], rows: Span, columns: Span) -> torch.Tensor:
        return self.within(fields(held["packed"].t(), self.bits), columns, 1)

    def zeros(self, held: Mapping[str, torch.Tensor], rows: Span) -> torch.Tensor | int:
        packed = held["zero"] + _ONES[self.bits] if self.less_one else held["zero"]
        return self.within(fields(packed, self.bits).t(), rows, 0)

    def scales(
        self, held: Mapping[str, torch.Tensor], rows: Span, columns: Span, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        return held["scale"].t().to(dtype)


def gptq_weight(tensors: Mapping[str, StoredTensor], bits: int, group: int, less_one: bool) -> QuantisedWeight:
    """Return the weight that the stored `tensors` by role are, with `group` entries to a scale, -1 for all of a row.

    A stored index is read here, whatever the configuration says of it.
    Raises `CheckpointError` where they do not fit.
    """
    packed, zero, scale, order = (tensors.get(role) for role in ("packed", "zero", "scale", "order"))
    assert packed is not None and zero is not None and scale is not None
    if any(len(each.shape) != 2 for each in (packed, zero, scale)):
        raise CheckpointError(
            "has tensors that are not matrices: expected two dimensions in qweight, qzeros and scales"
        )
    columns, rows = packed.shape[0] * 32 // bits, packed.shape[1]
    group = columns if group == -1 else group
    groups = -(-columns // group)
    if packed.dtype != torch.int32 or zero.dtype != torch.int32:
        raise CheckpointError(f"is packed as {packed.dtype}, zero points as {zero.dtype}: expected int32")
    check_scales(scale)
    if scale.shape != (groups, rows) or zero.shape != (groups, -(-rows * bits // 32)):
        raise CheckpointError(
            f"[{rows}, {columns}] has scales {list(scale.shape)} and zero points {list(zero.shape)}: expected"
            f" [{groups}, {rows}] and [{groups}, {-(-rows * bits // 32)}], for {bits} bits in groups of {group}"
        )
    format = Gptq((rows, columns), bits, group, stored_order(order, columns, group), less_one)
    return QuantisedWeight(format, {"packed": packed, "zero": zero, "scale": scale})
