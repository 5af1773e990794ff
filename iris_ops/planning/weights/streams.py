"""Decide which products of few rows the stream of weights computes, and predict its time
(`quantised/weight_stream.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..needs import PLAIN, WeightFormat
from ..operations import ALL_REDUCE

if TYPE_CHECKING:
    from iris.machines import Machine


_LEAST_COLUMNS = 32  # of a tile
_PRODUCTS = 650e3  # of a program in a microsecond, measured with 32 and 64 rows on an H200


def on_hopper(problem: Any, machine: Machine) -> bool:
    """Return whether a machine has the instructions, and A the dtype, that streams and rounded rows need."""
    return machine.warp_specialised and problem.dtype == torch.bfloat16


def streamed(problem: Any, machine: Machine | None) -> bool:
    """Return whether the stream serves an all-reduce; None: on a machine that has one."""
    free = problem.op == ALL_REDUCE and not problem.sums.promised
    served = free and _streamable(problem)
    return served and (machine is None or on_hopper(problem, machine))


def _streamable(problem: Any) -> bool:
    return problem.weights.streamable(problem.M, problem.K)


def stream_refused(problem: Any, machine: Machine) -> str | None:
    """Return why the stream of weights cannot serve a problem, or None."""
    if problem.weights is PLAIN:
        return "it is for few rows and quantised weights"
    if not _streamable(problem):
        granule, most = problem.weights.granule, problem.weights.streamed_rows
        return f"it is for weights {problem.weights.name} and up to {most} rows, K a multiple of {granule}"
    return None if on_hopper(problem, machine) else "it needs a Hopper GPU and bf16"


def stream_us(problem: Any, machine: Machine) -> float:
    """Return the microseconds of a launch of the stream."""
    m, n, k = problem.gemm
    return launch_us(problem.weights, m, n, k, machine)


def launch_us(weights: WeightFormat, m: int, n: int, k: int, machine: Machine) -> float:
    """Return the microseconds of a launch that multiplies m rows by a weight [n, k].

    Memory gives four fifths of its rate to a stream with pauses between its groups. Of more rows products take longer
    than bytes; all programs take as long as the one with the most tiles.
    """
    memory = (2 * m * k + weights.nbytes(n, k)) / (0.8 * machine.hbm_gbs * 1e3)
    at_once = _LEAST_COLUMNS * machine.num_programs
    products = m * k * -(-n // at_once) * at_once / (_PRODUCTS * machine.num_programs)
    return max(memory, products)
