"""NVFP4: e2m1 in groups of 16 along K, each with an e4m3 scale, and one global scale.

packed  uint8 [N, K / 2], the low nibble is the even entry
scale   e4m3 [N, K / 16]
global  float32, one: compressed-tensors divides by `weight_global_scale`, ModelOpt multiplies by `weight_scale_2`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from iris.errors import CheckpointError
import torch

from ..checkpoint.files import StoredTensor
from .bits import Span
from .e2m1 import E2m1
from .weight_format import Coding, Index, QuantisedWeight

GROUP = 16


@dataclass(frozen=True)
class Nvfp4(E2m1):
    """Two e2m1 numbers to a byte, 16 to a scale. `divides`: whether the global scale divides."""

    divides: bool

    name: ClassVar[str] = "nvfp4"
    group: ClassVar[int] = GROUP

    def reads(self, rows: Span, columns: Span) -> dict[str, Index]:
        return super().reads(rows, columns) | {"global": ()}

    def coding(self, tensors: Mapping[str, StoredTensor]) -> Coding:
        return Coding("e2m1", GROUP, tensors["scale"].dtype)

    def scales(
        self, held: Mapping[str, torch.Tensor], rows: Span, columns: Span, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        scale, overall = held["scale"].to(dtype), held["global"].to(dtype)
        return scale / overall if self.divides else scale * overall


def nvfp4_weight(packed: StoredTensor, scale: StoredTensor, overall: StoredTensor, divides: bool) -> QuantisedWeight:
    """Return the weight of the stored tensors. Raises `CheckpointError` where they do not fit."""
    if packed.dtype != torch.uint8 or len(packed.shape) != 2:
        raise CheckpointError(f"is packed as {packed.dtype} {list(packed.shape)}: expected uint8 [N, K/2]")
    if scale.dtype != torch.float8_e4m3fn or overall.dtype != torch.float32:
        raise CheckpointError(
            f"has scales in {scale.dtype} and a global one in {overall.dtype}: expected float8_e4m3fn and float32"
        )
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    if columns % GROUP or scale.shape != (rows, columns // GROUP) or overall.shape not in ((), (1,), (1, 1)):
        raise CheckpointError(
            f"[{rows}, {columns}] has scales of shape {list(scale.shape)} and a global one of {list(overall.shape)}:"
            f" expected one for each {GROUP} entries of a row, and one in all"
        )
    by_groups = packed.reshaped((rows, columns // GROUP, GROUP // 2))
    tensors = {"packed": by_groups, "scale": scale, "global": overall.reshaped(())}
    return QuantisedWeight(Nvfp4((rows, columns), divides), tensors)
