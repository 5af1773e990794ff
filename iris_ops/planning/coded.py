"""The formats in which experts may be stored: codes with scales, which kernels widen on the way into a product.

Codes lie [experts, N, K / packed] in memory. Their dtype and that of the scales tell the format. To add one: a line
here, and a device function in `iris_ops/moe/coded.py` that widens its codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .needs import WeightFormat

_NUMBERS = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class CodedFormat(WeightFormat):
    """`packed` numbers along K in each element of `dtype`, with a scale for each column, or for each group along K."""

    scales: tuple[torch.dtype, ...] = ()
    """Dtypes of scales; those of one format share none with another format of the same `dtype`."""
    widen: str = ""
    """`module:function` below `iris_ops` that makes numbers of codes in a kernel."""

    @property
    def bytes(self) -> float:
        """Bytes of a number, without its part of a scale."""
        assert self.dtype is not None
        return self.dtype.itemsize / self.packed


FP8 = CodedFormat(
    "in fp8", "fp8", torch.float8_e4m3fn, scales=(*_NUMBERS, torch.float8_e8m0fnu), widen="moe.coded:widen_e4m3"
)
INT4 = CodedFormat("in int4", "int4", torch.uint8, packed=2, scales=_NUMBERS, widen="moe.coded:widen_int4")
MXFP4 = CodedFormat(
    "in mxfp4", "mxfp4", torch.uint8, packed=2, scales=(torch.float8_e8m0fnu,), widen="moe.coded:widen_e2m1"
)
CODED = FP8, INT4, MXFP4


def coded_format(codes: torch.dtype, scales: torch.dtype) -> CodedFormat | None:
    """Return the format of codes and scales of these dtypes, or None."""
    return next((each for each in CODED if each.dtype == codes and scales in each.scales), None)


def group_of(K: int, groups: int) -> int | None:
    """Return how many numbers along K share a scale if there are so many groups: a power of two, or None."""
    if groups <= 1:
        return 1 << max(3, (K - 1).bit_length()) if groups == (K > 0) else None
    return next((size for size in (1 << n for n in range(1, 31)) if -(-K // size) == groups), None)
