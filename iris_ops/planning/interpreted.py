"""Tiles in Triton's interpreter, where few large blocks are best: each costs Python's time, whatever its size."""

from __future__ import annotations

from itertools import product

from iris import platform

from ..problem import Problem
from ..sum_tree import BLOCK

_MOST = 1 << 19  # elements of a block

Tile = tuple[int, int, int, int, int]
"""(rows, columns, depth, warps, stages)"""


def tiles(problem: Problem) -> tuple[Tile, ...]:
    M, N, K = problem.gemm
    blocks = product(_powers(M, _least_rows()), _powers(N, most=8192), _powers(K))
    return tuple((m, n, k, 4, 1) for m, n, k in blocks if max(m * n, m * k, n * k) <= _MOST)


def tree_tiles(problem: Problem) -> tuple[Tile, ...]:
    """Return the tiles of `tree_matmul`, all of one depth, because its bits depend on the depth."""
    assert problem.tree is not None
    multiple = problem.tree.depth
    depth = next(depth for depth in (128, BLOCK) if multiple % depth == 0)
    sides = product(_powers(problem.M, _least_rows()), _powers(problem.N, most=8192))
    return tuple((m, n, depth, 4, 1) for m, n in sides if m * n <= _MOST)


def _least_rows() -> int:
    """Return the fewest rows of a tile that `FusedConfig` accepts in this process, which has GPUs only in tests."""
    return 1 if platform.interpreting() else 16


def _powers(size: int, least: int = 16, most: int = 1024) -> list[int]:
    """Return the powers of two worth trying for a dimension."""
    largest = min(most, max(least, 1 << max(0, size - 1).bit_length()))
    return [largest >> i for i in range(4) if largest >> i >= least]
