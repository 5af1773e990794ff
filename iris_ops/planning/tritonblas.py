"""The tile of the product as tritonBLAS's analytical model selects it: on AMD, where that package can be imported.

It is on no package index; `pip install git+https://github.com/ROCm/tritonBLAS.git` builds it on a machine with ROCm.
Its `OrigamiMatmulSelector` is arithmetic on sizes, dtypes and what the device says of itself, so ranks with equal
devices select alike without talking. Only the tile is taken, for the kernels that overlap product and transfer; how
programs, staging and signals are arranged stays the decision of `plan.py`, and so do the tiles of the kernels for few
rows, which stream weights rather than multiply.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ..problem import Problem

# What tritonBLAS itself launches its kernels with.
_WARPS = 8

Tile = tuple[int, int, int, int, int]


def tiles(problem: Problem, machine: str) -> list[Tile]:
    """Return [(block_m, block_n, block_k, warps, stages)] if this device is a `machine`; an empty list if none is
    selected."""
    tile, _ = _selected(problem, machine)
    return [tile] if tile else []


def reasons(problem: Problem, machine: str) -> list[str]:
    """Return where the tile comes from, or why the installed selector did not provide it, for `FusedConfig.explain`."""
    _, reason = _selected(problem, machine)
    return [reason] if reason else []


@lru_cache(maxsize=4096)
def _selected(problem: Problem, machine: str) -> tuple[Tile | None, str]:
    # the selector queries the device itself, so it cannot plan for another one
    if torch.version.hip is None or not all(problem.gemm) or machine != torch.cuda.get_device_name():
        return None, ""
    try:
        from tritonblas import OrigamiMatmulSelector
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "tritonblas"
        return None, "" if missing else f"tritonblas cannot be imported ({error}); tiles by our own model"
    dtype, device = problem.dtype, torch.device("cuda", torch.cuda.current_device())
    try:
        selector = OrigamiMatmulSelector(*problem.gemm, dtype, dtype, dtype, device)
    except (RuntimeError, ValueError) as error:  # an architecture or a dtype that it does not know
        return None, f"tritonblas selects no tile ({error}); tiles by our own model"
    tile = (selector.block_m, selector.block_n, selector.block_k, _WARPS, selector.num_stages)
    if any(block < 16 or block & (block - 1) for block in tile[:3]):
        return None, f"tritonblas selects blocks {tile[:3]}, expected powers of two from 16; tiles by our own model"
    return tile, f"tritonblas selects blocks {tile[0]}x{tile[1]}x{tile[2]}, {tile[4]} stages"
