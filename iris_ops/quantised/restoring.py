"""Products with a weight that is first made in the dtype of the rows: for any format, on any device."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..planning.weights import format_of
from .packing import PACKINGS


def restored(weight: torch.Tensor, scale: torch.Tensor, K: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [N, K] that a stored weight and its scale stand for."""
    return PACKINGS[format_of(weight.t(), scale).packing].unpack(weight, scale, K, dtype)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x [M, K] times the transpose of the weight, plus the bias, in x's dtype; to `out`, if there is one."""
    result = F.linear(x, restored(weight, scale, x.shape[1], x.dtype), bias)
    return result if out is None else out.copy_(result)


def fixed_product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Return the weight, whose product in a fixed order is that of any weight; `out` is left alone."""
    return restored(weight, scale, x.shape[1], x.dtype)
