"""Products with weights in eight bits, as numbers: which sizes have kernels, and how long these take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..problem import ALL_REDUCE, Problem
from .machine import Machine
from .needs import EIGHT_BITS

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


def stream_refused(problem: Problem, machine: Machine) -> str | None:
    """Why the stream of weights cannot serve a problem, or None."""
    if not fits(problem.M, problem.K):
        return f"it is for weights in eight bits and up to {MOST_ROWS} rows, K a multiple of 128"
    return None if machine.warp_specialised and problem.dtype == torch.bfloat16 else "it needs a Hopper GPU and bf16"


def restored(problem: Any, machine: Machine) -> tuple[Any, str]:
    """(the problem of the weight that one in eight bits stands for, why it is made in each call), or (problem, "").

    Of an all-reduce it never is: there `sequential` serves everywhere.
    """
    if problem.weights is not EIGHT_BITS or problem.op == ALL_REDUCE:
        return problem, ""
    if not machine.warp_specialised or problem.dtype != torch.bfloat16:
        why = f"{problem.dtype} by eight bits is not multiplied on {machine.name}"
    elif problem.form != "rows" or problem.K % MULTIPLE or problem.N % MULTIPLE:
        why = f"by rows, K and N multiples of {MULTIPLE}, it would be multiplied"
    else:
        return problem, ""
    return replace(problem, fp8=False), f"B is converted in each call: {why}"


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
