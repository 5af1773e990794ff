"""Matrix products on the host whose rows have the same bits whatever stands beside them.

A BLAS chooses among kernels by the sizes: for one row, for products that are small as a whole, for the rows and columns
at the edge of a block. They add along K in different orders, so a row's bits depend on how many others there are. Here
every product is made large enough, and even enough, for the one kernel that large products get: rows and columns are
filled up with zeros. Then the order along K depends on K alone.

That is so of OpenBLAS, which numpy brings along for x86 and Arm; `tests/iris/test_fixed_order.py` tries it. Another
BLAS may have other kernels.
"""

from __future__ import annotations

import numpy as np

# OpenBLAS has another kernel for products of fewer multiplications than these (`sgemm_small_kernel_permit`).
_SMALL = 100**3
# No kernel has edges within so many rows, or columns.
_ROWS, _COLUMNS = 16, 64


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float32 a [M, K] @ b [K, N], both of any float dtype up to float32; the order of each sum depends on K only.

    So it is the same for the transposed product, which is taken where less is filled up, and for operands of either
    layout in memory.
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
    """`x` in float32, row after row or column after column in memory, with zeros behind."""
    by_columns = x.flags.f_contiguous and not x.flags.c_contiguous
    if x.shape == (rows, columns) and (by_columns or x.flags.c_contiguous) and x.dtype == np.float32:
        return x
    whole = np.zeros((rows, columns), np.float32, "F" if by_columns else "C")
    whole[: x.shape[0], : x.shape[1]] = x
    return whole
