"""Weights in fp8 as a format: dtype, layout of scales, which sizes have kernels, and how long these take.

B is e4m3 with a float32 scale for each column (`quantised/scaled_matmul.py`). Few rows of A are not rounded:
`quantised/weight_stream.py` widens the weights in registers. More are rounded to e4m3, with a scale for each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..needs import LINE, WeightFormat
from ..operations import ALL_REDUCE
from .streams import on_hopper, streamed

if TYPE_CHECKING:
    from iris.machines import Machine

FP8 = torch.float8_e4m3fn
MULTIPLE = 16  # of sizes of weights that tensor cores multiply in fp8
# What rounding adds: for its kernel, for each element of a row, for each of what is read and written.
_ROUNDING_US = 1.0, 1e-4, 3.4
# Of torch's product of rounded rows, its time over that in bf16, and what comes on top; measured on an H200.
_TORCH_SHARE, _TORCH_US = 0.62, 8.0
_FASTER = 1.85  # how much faster our products of rounded rows are


@dataclass(frozen=True)
class Rounded(WeightFormat):
    """A format in e4m3: of more than a few rows of A, each is rounded, with a float32 scale."""

    @property
    def rounding(self) -> str:
        return "rows rounded to fp8"

    @property
    def row_text(self) -> str:
        return "rows in fp8"

    def unrounded(self, problem: Any) -> str:
        if problem.M <= self.unrounded_rows and not problem.sums.promised:
            return f"up to {self.unrounded_rows} rows are not rounded"
        return ""

    def refused(self, problem: Any, machine: Machine) -> str | None:
        if not on_hopper(problem, machine):
            return "it multiplies rows rounded to fp8 on Hopper only, of bf16"
        if reason := self.unrounded(problem):
            return reason
        if problem.K % MULTIPLE or problem.N % MULTIPLE:
            return f"K and N are not multiples of {MULTIPLE}"
        return None

    def rounding_us(self, rows: int, cols: int, machine: Machine) -> float:
        kernel, entry, moved = _ROUNDING_US
        return kernel + cols * entry + rows * cols * moved / (machine.hbm_gbs * 1e3)

    def product_us(self, us: float, rows: int, K: int, machine: Machine) -> float:
        return us / _FASTER + self.rounding_us(rows, K, machine)


@dataclass(frozen=True)
class _Fp8(Rounded):
    """A float32 scale for each column of B."""

    def converted(self, problem: Any, machine: Machine) -> str:
        if problem.op == ALL_REDUCE:  # `sequential` serves it everywhere
            return ""
        if not on_hopper(problem, machine):
            return f"{problem.dtype} times fp8 is not multiplied on {machine.name}"
        if problem.form != "rows" or problem.K % MULTIPLE or problem.N % MULTIPLE:
            return f"only by rows, with K and N multiples of {MULTIPLE}, are rows rounded instead"
        return ""

    def streams(self, problem: Any, machine: Machine | None = None) -> bool:
        return streamed(problem, machine)

    def library_us(self, us: float, rows: int, K: int, machine: Machine) -> float:
        return _TORCH_SHARE * us + _TORCH_US + self.rounding_us(rows, K, machine)


FP8_FORMAT = _Fp8(
    "in fp8",
    "fp8 is True",
    "False",
    FP8,
    packing="fp8",
    granule=LINE,
    operand_bytes=1,
    operands="quantised.steps:operands",
    product="quantised.scaled_matmul:product",
    fixed_product="quantised.scaled_matmul:fixed_product",
    widening="quantised.widening:E4M3",
)
