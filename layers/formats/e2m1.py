"""Code that formats of e2m1 codes share: two to a byte, the low nibble first, and a scale for each group along K.

packed  [N, K / 2] bytes, or [N, K / group, group / 2]
scale   [N, K / group]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from .bits import Span, blocks, e2m1, nibbles, window
from .weight_format import Index, WeightFormat


class E2m1(WeightFormat):
    """Two e2m1 numbers to a byte, `group` to a scale; a format adds what its scales are."""

    group: ClassVar[int]

    @property
    def unit(self) -> int:
        return self.group

    def reads(self, rows: Span, columns: Span) -> dict[str, Index]:
        index = slice(*rows), slice(*blocks(columns, self.group))
        return {"packed": index, "scale": index}

    @property
    def per_scale(self) -> int:
        return self.group

    def codes(self, held: Mapping[str, torch.Tensor], rows: Span, columns: Span) -> torch.Tensor:
        return window(nibbles(held["packed"].flatten(1)), columns, self.group)

    def numbers(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return e2m1(codes, dtype)
