"""Multiply matrices on the host so that a row's bits do not depend on the other rows.

A BLAS chooses among kernels by the sizes: for one row, for small products, for the rows and columns at the edge of a
block. They add along K in different orders, so a row's bits depend on the number of rows. Here every product is made
large enough, and even enough, for the one kernel that large products get: zeros pad rows and columns. Then the order
along K depends on K alone.

That holds for OpenBLAS, which numpy ships for x86 and Arm; `tests/iris/test_fixed_order.py` checks it. Another BLAS may
have other kernels.
"""

from __future__ import annotations

import numpy as np

# OpenBLAS has another kernel for products of fewer multiplications than these (`sgemm_small_kernel_permit`).
_SMALL = 100**3
# No kernel has edges within this number of rows, or columns.
_ROWS, _COLUMNS = 16, 64


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return float32 a [M, K] @ b [K, N], both of any float dtype up to float32; each sum's order depends on K only.

    So the order is the same for the transposed product, which is taken where it needs less padding, and for operands of
    either layout in memory.
    """
    (rows, depth), columns = a.shape, b.shape[1]
    if rows > columns:
        return product(b.T, a.T).T
    wide, deep = _up(columns, _COLUMNS), _up(depth, _COLUMNS)
    high = _up(rows, _up(_SMALL // (wide * deep) + 1, _ROWS))
    return np.matmul(_filled(a, high, deep), _filled(b, deep, wide))[:rows, :columns]


def _up(size: int, multiple: int) -> int:
    return max(1, -(-size // multiple)) * multiple


def _filled(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Return `x` in float32, row-major or column-major, padded with zeros."""
    by_columns = x.flags.f_contiguous and not x.flags.c_contiguous
    if x.shape == (rows, columns) and (by_columns or x.flags.c_contiguous) and x.dtype == np.float32:
        return x
    whole = np.zeros((rows, columns), np.float32, "F" if by_columns else "C")
    whole[: x.shape[0], : x.shape[1]] = x
    return whole
