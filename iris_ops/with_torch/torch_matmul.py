"""torch's own product, which is cuBLAS's or hipBLASLt's, into a tensor that exists."""

from __future__ import annotations

import torch

from ..named import named
from ..planning.epilogues import NO_EPILOGUE, Epilogue
from ..planning.weights import format_of


def multiply(
    out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None,
    epilogue: Epilogue = NO_EPILOGUE,
) -> None:  # fmt: skip
    """Store `A @ B + bias` in `out`, after `epilogue`; with `scale`, by the product of B's format."""
    if epilogue.matrices > 1:
        product = A.new_empty(A.shape[0], B.shape[1])
        multiply(product, A, B, bias, scale)
        named(epilogue.separate)(epilogue, out, product)
        return
    if A.device.type == "cpu":  # with AMX, torch 2.13 multiplies the memory after a row by zero: NaN, where that is
        A = A.contiguous()
    if scale is not None:
        named(format_of(B, scale).product)(A, B.t(), scale, bias, out)
    elif bias is None:
        torch.mm(A, B, out=out)
    else:
        torch.addmm(bias, A, B, out=out)
