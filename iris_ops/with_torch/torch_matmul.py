"""torch's own product, which is cuBLAS's or hipBLASLt's, into a tensor that exists."""

from __future__ import annotations

import torch

from ..named import named
from ..planning.weights import format_of


def multiply(
    out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None
) -> None:
    """Store `A @ B + bias` in `out`; with `scale`, by the product of B's format."""
    if A.device.type == "cpu":  # with AMX, torch 2.13 multiplies the memory after a row by zero: NaN, where that is
        A = A.contiguous()
    if scale is not None:
        named(format_of(B, scale).product)(A, B.t(), scale, bias, out)
    elif bias is None:
        torch.mm(A, B, out=out)
    else:
        torch.addmm(bias, A, B, out=out)
