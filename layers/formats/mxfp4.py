"""MXFP4: e2m1 in groups of 32 along K, each with a power of two.

packed  uint8 or int8 [N, K / 2], or [N, K / 32, 16] as gpt-oss has it; the low nibble is the even entry
scale   e8m0 or its bytes [N, K / 32]: 2^(byte - 127)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from iris.errors import CheckpointError
import torch

from ..checkpoint.files import StoredTensor
from .bits import Span, scales
from .e2m1 import E2m1
from .weight_format import Coding, QuantisedWeight

GROUP = 32


class Mxfp4(E2m1):
    """Two e2m1 numbers to a byte, 32 to a scale."""

    name: ClassVar[str] = "mxfp4"
    group: ClassVar[int] = GROUP

    def coding(self, tensors: Mapping[str, StoredTensor]) -> Coding:
        return Coding("e2m1", GROUP, tensors["scale"].dtype)

    def scales(
        self, held: Mapping[str, torch.Tensor], rows: Span, columns: Span, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        return scales(held["scale"], dtype)


def mxfp4_weight(packed: StoredTensor, scale: StoredTensor) -> QuantisedWeight:
    """Return the weight that `packed` and `scale` of one matrix are. Raises `CheckpointError` where they do not fit."""
    if packed.dtype not in (torch.uint8, torch.int8) or len(packed.shape) not in (2, 3):
        raise CheckpointError(f"is packed as {packed.dtype} {list(packed.shape)}: expected bytes [N, K/2]")
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise CheckpointError(f"has scales in {scale.dtype}: expected float8_e8m0fnu or uint8")
    rows, columns = packed.shape[0], 2 * packed.nbytes // max(1, packed.shape[0])
    if columns % GROUP or scale.shape != (rows, columns // GROUP):
        raise CheckpointError(
            f"[{rows}, {columns}] has scales of shape {list(scale.shape)}: expected one for each {GROUP} of a row"
        )
    by_groups = packed.reshaped((rows, columns // GROUP, GROUP // 2))
    return QuantisedWeight(Mxfp4((rows, columns)), {"packed": by_groups, "scale": scale})
