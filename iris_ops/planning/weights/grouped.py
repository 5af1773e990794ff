"""Weights with scales of groups along K: fp8 in blocks, int4, int8, MXFP4, NVFP4 (`quantised/packing.py`).

The stream of weights, which applies a group's scale to the sum of its products, multiplies up to 64 rows. On Hopper,
all-reduces, reduce-scatters and products without ranks multiply more rows by the codes, too: rounded to fp8 by blocks
of 128 (`Blocks`), and as they are by other codes, which are widened a tile at a time. For thousands of rows by some of
those, other ops, other GPUs and sums of a fixed order, each call first makes the weight in A's dtype. Groups are those
of the unsplit weight, so scales do not depend on the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ...quantised.packing import LINE, PACKINGS
from ..needs import WeightFormat
from ..operations import ALL_REDUCE, REDUCE_SCATTER
from .fp8 import MULTIPLE, Rounded
from .streams import on_hopper, streamed

if TYPE_CHECKING:
    from iris.machines import Machine


LEAST_WIDENED = 33  # rows that are multiplied by codes which a kernel widens a tile at a time; fewer by the stream
# Codes that take more instructions than products hide: this rate and less, for up to as many rows. More are faster by a
# converted weight. Measured on an H200 with 64 to 8192 rows.
_SLOW_SHARE, _MOST_SLOW = 0.85, 2048


@dataclass(frozen=True)
class Grouped(WeightFormat):
    """A packing and a size of groups."""

    @property
    def _packing(self) -> Any:
        return PACKINGS[self.packing]

    def matches(self, B: torch.Tensor, scale: torch.Tensor | None) -> bool:
        if B.dtype != self.dtype or scale is None:
            return False
        if not self.group or scale.ndim != 2 + self.zeros:
            return scale.ndim == 1 and not self.group
        stored = B.shape[0] if B.ndim == 2 else 0
        (_, slots, *_), dtypes = self.scale_of(0, stored)
        return scale.shape[1] == slots and scale.dtype in dtypes

    @property
    def widened_in_tiles(self) -> bool:
        return not self.rounds_rows

    @property
    def most_widened(self) -> int:
        """Return how many rows at most are multiplied by codes which a kernel widens a tile at a time."""
        return 1 << 31 if self.tile_share > _SLOW_SHARE else _MOST_SLOW

    @property
    def zeros(self) -> bool:
        return self._packing.zeros

    @property
    def line_bytes(self) -> int:
        return LINE * self._packing.dtype.itemsize // self._packing.per_element

    def depth(self, stored: int, K: int) -> int:
        room = stored * self._packing.per_element
        return K if self._packing.padded(K, self.group or None) == room else room

    def scale_of(self, N: int, stored: int) -> tuple[tuple[int, ...], tuple[torch.dtype, ...]]:
        (_, _), (shape, _) = self._packing.stored(N, stored * self._packing.per_element, self.group or None)
        return shape, self._packing.scales_in(self.group or None)

    def nbytes(self, N: int, K: int) -> int:
        stored = self._packing.stored(N, K, self.group or None)
        return sum(prod(shape) * dtype.itemsize for shape, dtype in stored)

    def converted(self, problem: Any, machine: Machine) -> str:
        if streamed(problem, machine) or self._tiled(problem, machine):
            return ""
        if problem.op != ALL_REDUCE:
            return f"{problem.called_op} multiplies no weights {self.name}"
        if problem.sums.promised:
            return f"the stream of weights {self.name} has another order of sums than the product of many rows"
        if not on_hopper(problem, machine):
            return f"{problem.dtype} by weights {self.name} is not multiplied on {machine.name}"
        most, granule = self.streamed_rows, self.granule
        if problem.M > self.most_widened:
            return f"more than {self.most_widened} rows take less time so than by weights {self.name}"
        return f"the stream of weights {self.name} serves up to {most} rows, K a multiple of {granule}"

    def _tiled(self, problem: Any, machine: Machine) -> bool:
        """Return whether many rows are multiplied by codes that kernels widen."""
        served = problem.op in (ALL_REDUCE, REDUCE_SCATTER) and not problem.sums.promised
        vectors = problem.whole_vectors(problem.K) and problem.whole_vectors(problem.N)
        return (
            self.widened_in_tiles
            and served
            and vectors
            and LEAST_WIDENED <= problem.M <= self.most_widened
            and on_hopper(problem, machine)
        )

    def streams(self, problem: Any, machine: Machine | None = None) -> bool:
        return streamed(problem, machine)


@dataclass(frozen=True)
class Blocks(Rounded, Grouped):
    """fp8 in blocks of 128 along K, which many rows multiply rounded: a block's scale multiplies its products."""

    def unrounded(self, problem: Any) -> str:
        return "sums of a fixed order are of rows as they are" if problem.sums.promised else super().unrounded(problem)

    def converted(self, problem: Any, machine: Machine) -> str:
        served = problem.op in (ALL_REDUCE, REDUCE_SCATTER) and on_hopper(problem, machine)
        if not served or self.unrounded(problem):
            return Grouped.converted(self, problem, machine)
        if problem.K % MULTIPLE or problem.N % MULTIPLE:
            return f"rows are rounded instead only with K and N multiples of {MULTIPLE}"
        return ""


# `WeightFormat.tile_share`: scales in float32 take three instructions for two numbers, not one.
_TILE_SHARES = {
    "fp8_block/64": 0.75, "fp8_block/32": 0.7, "int4/64": 1.05, "int4/16": 0.92, "int4/channel": 1.2, "mxfp4": 1.05,
    "nvfp4": 0.78, "int8": 0.89, "int8/64": 0.89, "int8/32": 0.87, "int4_zeros": 1.1, "int4_zeros/64": 1.05,
    "int4_zeros/32": 0.95, "int4_zeros/16": 0.9, "int8_zeros": 0.9, "int8_zeros/64": 0.8, "int8_zeros/32": 0.74,
}  # fmt: skip


def _format(
    name: str, packing: str, key: str, group: int, widening: str, granule: int, kind: type[Grouped] = Grouped,
    operands: str = "quantised.steps:restored_operands", **more: Any,
) -> Grouped:  # fmt: skip
    return kind(
        name, f"weights is {key!r}", "None", PACKINGS[packing].dtype, packing, group, granule, by_rank=False,
        operands=operands, product="quantised.restoring:product",
        fixed_product="quantised.restoring:fixed_product", widening=f"quantised.widening:{widening}",
        streamed_rows=64, joined_rows=32, local_rows=64, local_launches=2, tile_share=_TILE_SHARES.get(key, 1.0),
        **more,
    )  # fmt: skip


def _blocks(group: int, key: str) -> Grouped:
    name = f"in fp8, a scale for {group} along K"
    if group < LINE:
        return _format(name, "fp8_block", key, group, "E4M3_RUNS", 32)
    rounded: dict[str, Any] = dict(kind=Blocks, operands="quantised.steps:operands", operand_bytes=1)
    return _format(name, "fp8_block", key, group, "E4M3", LINE, **rounded)


def _integers(packing: str, group: int, key: str) -> Grouped:
    kind, *zeros = packing.split("_")
    shared = (f"groups of {group}" if group else "a scale for each channel") + (", zero points" if zeros else "")
    return _format(f"in {kind}, {shared}", packing, key, group, kind.upper(), 32)


# The first of a packing is what its name alone requests.
GROUPED = {
    "fp8_block": _blocks(128, "fp8_block"),
    "fp8_block/64": _blocks(64, "fp8_block/64"),
    "fp8_block/32": _blocks(32, "fp8_block/32"),
    "int4": _integers("int4", 32, "int4"),
    "int4/64": _integers("int4", 64, "int4/64"),
    "int4/128": _integers("int4", 128, "int4/128"),
    "int4/16": _integers("int4", 16, "int4/16"),
    "int4/channel": _integers("int4", 0, "int4/channel"),
    "mxfp4": _format("in MXFP4", "mxfp4", "mxfp4", 32, "E2M1", 32),
    "mxfp4/16": _format("in MXFP4, groups of 16", "mxfp4", "mxfp4/16", 16, "E2M1", 32),
    "nvfp4": _format("in NVFP4", "nvfp4", "nvfp4", 16, "E2M1", 32),
    "int8": _integers("int8", 128, "int8"),
    "int8/64": _integers("int8", 64, "int8/64"),
    "int8/32": _integers("int8", 32, "int8/32"),
    "int8/channel": _integers("int8", 0, "int8/channel"),
    **{
        key: _integers(packing, group, key)
        for packing in ("int4_zeros", "int8_zeros")
        for key, group in ((packing, 128), (f"{packing}/64", 64), (f"{packing}/32", 32))
    },
    "int4_zeros/16": _integers("int4_zeros", 16, "int4_zeros/16"),
}
