"""Plan a product of one rank whose rows do not depend on each other, and predict its time.

The kernels are those of `local/`: `skinny_matmul.py`, a stream of weights, and, warp-specialised, the local form of
`kernels/hopper/gather_matmul.py`. Both sum a tile by the same instruction from the first step along K to the last.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from iris.machines import Machine
import torch

from ..config import FusedConfig
from ..problem import GATHER_MATMUL, Problem
from .candidates import copy_gather_configs
from .epilogues import NO_EPILOGUE, Epilogue
from .needs import WeightFormat
from .tile_model import gemm_us
from .torch_model import expected_in_turn, expected_us
from .weights.grouped import LEAST_WIDENED
from .weights.streams import launch_us

_VECTOR = 16  # numbers of which rows of A, rounded or not, are whole vectors
# Blocks of `skinny_matmul`, as tiles that the model knows: (rows, columns, depth, warps, stages).
_SKINNY = tuple(
    FusedConfig(m, n, k, num_warps=4, num_stages=s, algorithm="one_shot")
    for m, n, k, s in ((16, 64, 256, 5), (32, 64, 256, 4), (64, 64, 128, 7))
)


def local_problem(M: int, N: int, K: int, dtype: torch.dtype, epilogue: Epilogue = NO_EPILOGUE) -> Problem:
    """Return the problem of x [M, K] times a weight of N columns on one rank."""
    return Problem(GATHER_MATMUL, "rows", M, N, K, 1, dtype, epilogue=epilogue)


@lru_cache(maxsize=4096)
def specialised(problem: Problem, machine: Machine) -> FusedConfig | None:
    """Return the tile of warp-specialised programs, where they are faster than a stream of weights; else None."""
    if not machine.warp_specialised or problem.dtype.itemsize != 2:
        return None
    best = min(copy_gather_configs(machine), key=lambda config: gemm_us(problem, config, machine))
    return best if gemm_us(problem, best, machine) < _skinny_us(problem, machine) else None


def product_us(M: int, N: int, K: int, problem: Problem, machine: Machine) -> float:
    """Return the microseconds of a product of these sizes, with operands as those of `problem`."""
    local = local_problem(M, N, K, problem.dtype)
    config = specialised(local, machine)
    us = _skinny_us(local, machine) if config is None else gemm_us(local, config, machine)
    return problem.weights.product_us(us, M, K, machine) + machine.launch_us


@lru_cache(maxsize=4096)
def stream_launches(weights: WeightFormat, rows: int, k: int, n: int, machine: Machine) -> int:
    """Return in how many launches of the stream a product without ranks is faster than by B in A's dtype; 0 if not.

    Machines and dtypes that have no stream are not considered.
    """
    if not weights.streamable(rows, k, weights.local_launches * weights.local_rows):
        return 0
    count = -(-rows // weights.local_rows)
    streamed_us = count * (launch_us(weights, -(-rows // count), n, k, machine) + machine.launch_us)
    converted_us = weights.restoring_us(n, k, 2, machine) + expected_us(rows, n, k, machine)
    return count if streamed_us < converted_us else 0


@lru_cache(maxsize=4096)
def quantised_tile(weights: WeightFormat, rows: int, k: int, n: int, machine: Machine) -> FusedConfig | None:
    """Return the tile by which many rows of bf16 are multiplied without ranks; None where B is converted instead."""
    problem = replace(local_problem(rows, n, k, torch.bfloat16), weights=weights)
    if weights.scales_blocks:
        many = weights.local_rows < rows
    else:
        many = weights.widened_in_tiles and LEAST_WIDENED <= rows <= weights.most_widened
    if not many or not machine.warp_specialised or k % _VECTOR or n % _VECTOR:
        return None
    configs = copy_gather_configs(machine, weights)
    return min(configs, key=lambda config: gemm_us(problem, config, machine))


def _skinny_us(problem: Problem, machine: Machine) -> float:
    return min(gemm_us(problem, config, machine) for config in _SKINNY)


def library_us(problem: Problem, machine: Machine) -> float:
    """Return the microseconds of a rank's product by `with_torch/products.py`."""
    if problem.sums.promised:
        return product_us(*problem.gemm, problem, machine)
    return expected_us(*problem.gemm, machine, weights=problem.weights)


def library_us_in_turn(rows: list[int], problem: Problem, machine: Machine) -> list[float]:
    """Return the microseconds of each of several such products in turn, with the given rows."""
    if problem.sums.promised:
        return [product_us(m, problem.N, problem.K, problem, machine) for m in rows]
    return expected_in_turn(rows, problem.N, problem.K, machine, weights=problem.weights)
