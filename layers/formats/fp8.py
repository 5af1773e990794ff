"""Weights in fp8 (e4m3) with a scale for each block: 128 x 128, a channel, the whole weight, or 1 x 32 as MXFP8.

    weight  e4m3 [N, K]
    scale   [ceil(N / rows of a block), ceil(K / columns of a block)], float32, bfloat16, float16, e8m0 or its bytes

The number is weight * scale. Blocks are counted in the whole weight; the last ones may be short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from iris.errors import CheckpointError
import torch

from ..checkpoint.files import StoredTensor
from .bits import Span, blocks, scales
from .weight_format import Coding, Index, QuantisedWeight, WeightFormat

SCALES = torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8


@dataclass(frozen=True)
class Fp8(WeightFormat):
    """`block` rows and columns share a scale. With `halves` 2, blocks begin anew at row N/2: gate, then up rows."""

    block: tuple[int, int]
    halves: int = 1

    name: ClassVar[str] = "fp8"

    @property
    def label(self) -> str:
        if self.block == self.shape:
            return "fp8 by tensor"
        return "fp8 by channel" if self.block == (1, self.shape[1]) else f"fp8 by {self.block[0]} x {self.block[1]}"

    @property
    def unit(self) -> int:
        return self.block[1] if self.block[1] < self.shape[1] else 1

    def reads(self, rows: Span, columns: Span) -> dict[str, Index]:
        first, last = self._row_block(rows[0]), self._row_block(rows[1] - 1) + 1
        return {
            "weight": (slice(*rows), slice(*columns)),
            "scale": (slice(first, last), slice(*blocks(columns, self.block[1]))),
        }

    def coding(self, tensors: Mapping[str, StoredTensor]) -> Coding:
        return Coding("e4m3", self.per_scale, tensors["scale"].dtype)

    @property
    def per_scale(self) -> int:
        return self.block[1]

    def codes(self, held: Mapping[str, torch.Tensor], rows: Span, columns: Span) -> torch.Tensor:
        return held["weight"]

    def scales(
        self, held: Mapping[str, torch.Tensor], rows: Span, columns: Span, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        scale = scales(held["scale"], dtype)
        return scale.index_select(0, self._row_blocks(rows, scale.device) - self._row_block(rows[0]))

    def _row_block(self, row: int) -> int:
        half = self.shape[0] // self.halves
        return row // half * -(-half // self.block[0]) + row % half // self.block[0]

    def _row_blocks(self, rows: Span, device: torch.device) -> torch.Tensor:
        row, half = torch.arange(*rows, device=device), self.shape[0] // self.halves
        return row // half * -(-half // self.block[0]) + row % half // self.block[0]


def fp8_weight(
    weight: StoredTensor, scale: StoredTensor, block: tuple[int, int] | None, fused: bool = False
) -> QuantisedWeight:
    """Return the weight of `weight` e4m3 [N, K] and `scale`, whose shape decides which entries share a scale.

    `block` is the configuration's. `fused`: gate rows, then up rows lie along N, each half with its own blocks.
    Raises `CheckpointError` for a scale of another shape or dtype.
    """
    if weight.dtype != torch.float8_e4m3fn or len(weight.shape) != 2:
        raise CheckpointError(f"is {weight.dtype} {list(weight.shape)}: expected float8_e4m3fn [N, K]")
    if scale.dtype not in SCALES:
        raise CheckpointError(f"has scales in {scale.dtype}: expected {', '.join(map(str, SCALES))}")
    rows, columns = weight.shape
    shape = scale.shape
    if len(shape) == 4 and shape[1] == shape[3] == 1:
        shape = (shape[0], shape[2])
    layout: Fp8 | None = None
    if shape in ((), (1,), (1, 1)):
        layout = Fp8((rows, columns), (rows, columns))
    elif block is not None and shape == (-(-rows // block[0]), -(-columns // block[1])):
        if fused and (rows // 2) % block[0] and shape[0] == 2 * -(-(rows // 2) // block[0]):
            raise CheckpointError(
                f"[{rows}, {columns}] has {shape[0]} rows of scales, which may belong to gates and ups by themselves"
                f" or to both: expected a size of experts that {block[0]} divides, or experts one by one"
            )
        layout = Fp8((rows, columns), block)
    elif block is not None and fused and shape == (2 * -(-(rows // 2) // block[0]), -(-columns // block[1])):
        layout = Fp8((rows, columns), block, 2)
    elif shape in ((rows,), (rows, 1)):
        layout = Fp8((rows, columns), (1, columns))
    if layout is None:
        blocked = f", or one for each block of {block[0]} x {block[1]}" if block else ""
        raise CheckpointError(
            f"[{rows}, {columns}] has scales of shape {list(scale.shape)}: expected one, one for each row{blocked}"
        )
    grid = (layout._row_block(rows - 1) + 1, -(-columns // layout.block[1]))
    return QuantisedWeight(layout, {"weight": weight, "scale": scale.reshaped(grid)})
