"""The formats of experts that kernels read as codes with scales (`iris_ops/quantised/packing.py`), for planning.

To add one: its packing, a line here, and a device function in `iris_ops/moe/coded.py` that widens its codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..quantised.packing import FP8, FP8_BLOCK, INT4, LINE, MXFP4, Packing
from .needs import WeightFormat


@dataclass(frozen=True)
class CodedFormat(WeightFormat):
    """Weights stored as a packing says, of which a kernel widens a tile at a time."""

    packing: Packing = FP8
    widen: str = ""
    """`module:function` below `iris_ops` that makes numbers of codes in a kernel."""
    widen_parts: str = ""
    """The same where a line is cut into products; empty where that is no other order."""

    @property
    def bytes(self) -> float:
        """Bytes of a number, without its part of a scale."""
        return self.packing.dtype.itemsize / self.packing.per_element

    def is_cut(self, group: int | None) -> bool:
        """Return whether an element holds entries of a whole line, where so many entries share a scale."""
        return self.packing.per_element > 1 or (bool(self.widen_parts) and group != LINE)

    @property
    def least_k(self) -> int:
        """The least depth of a tile."""
        return LINE if self.packing.per_element > 1 or self.widen_parts else 1


CODED = (
    CodedFormat("in fp8", "fp8", packing=FP8, widen="moe.coded:widen_e4m3"),
    CodedFormat(
        "in fp8 by blocks", "fp8_block", packing=FP8_BLOCK, widen="moe.coded:widen_e4m3",
        widen_parts="moe.coded:widen_turned_e4m3",
    ),
    CodedFormat("in int4", "int4", packing=INT4, widen="moe.coded:widen_int4"),
    CodedFormat("in mxfp4", "mxfp4", packing=MXFP4, widen="moe.coded:widen_e2m1"),
)  # fmt: skip


def coded_format(dtype: torch.dtype, by_groups: bool) -> CodedFormat | None:
    """Return the format of elements of `dtype`, with scales of groups or else of columns; None if there is none."""
    for each in CODED:
        groups = any(group is not None for group in each.packing.groups)
        columns = None in each.packing.groups
        if each.packing.dtype == dtype and (groups if by_groups else columns):
            return each
    return None
