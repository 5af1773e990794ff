"""Products with weights in eight bits, as numbers: which sizes have kernels, and how long these take."""

from __future__ import annotations

from ..problem import Problem
from .machine import Machine

MULTIPLE = 16  # of sizes of weights that tensor cores multiply in eight bits
# Of the stream of weights (`fp8/weight_stream.py`): rows of A at most, and elements along K that four warps share.
MOST_ROWS, LINE = 16, 128
# What rounding adds: for its kernel, for each element of a row, for each of what is read and written.
_ROUNDING_US = 1.0, 1e-4, 3.4
# Of torch's product of rounded rows, its time over that in bf16, and what comes on top; measured on an H200.
_TORCH_SHARE, _TORCH_US = 0.62, 8.0


def fits(rows: int, K: int) -> bool:
    """Whether products of such shapes the stream of weights serves, on Hopper."""
    return 0 < rows <= MOST_ROWS and K % LINE == 0 and K > 0


def stream_us(problem: Problem, machine: Machine) -> float:
    """Microseconds of the stream: memory gives four fifths of its rate to one with rests between its groups."""
    m, n, k = problem.gemm
    return (2 * m * k + k * n) / (0.8 * machine.hbm_gbs * 1e3)


def rounding_us(rows: int, cols: int, machine: Machine) -> float:
    """Microseconds of `round_rows`."""
    kernel, entry, moved = _ROUNDING_US
    return kernel + cols * entry + rows * cols * moved / (machine.hbm_gbs * 1e3)


def torch_us(bf16_us: float) -> float:
    """Microseconds of torch's product of rounded rows, given those of its product in bf16."""
    return _TORCH_SHARE * bf16_us + _TORCH_US
