"""Explain which tensors a kernel cannot load, by their alignment, strides and sizes: functions return the reason, or
None.

A way names its function (`Way.supports`). Each rank looks at its own tensors, when a call is prepared: ranks may differ
in the kernel that loads them, because a fallback sends the same values to the same places.
"""

from __future__ import annotations

from .config import FusedConfig
from .kernels.descriptors import as_stored
from .kernels.hopper import operands
from .kernels.matmul_reduce import column_step
from .operands import Operands
from .planning.needs import PLAIN
from .problem import Problem, part_of


def brought(problem: Problem, config: FusedConfig, rank: int, tensors: Operands) -> str | None:
    """Return why `kernels/hopper/gather_matmul.py` cannot load the tensors after copy engines, or None."""
    out, A, B, _, _ = tensors
    if problem.weights is not PLAIN:
        return f"it multiplies no weights {problem.weights.name}"
    if not A.is_contiguous():  # a kernel would copy A's rows, and may find no room beside one that waits for copies
        return "rows of A are not contiguous"
    if problem.epilogue.matrices > 1 and as_stored(B) is B:
        return "B is not the transpose of a contiguous tensor"
    if not problem.whole_vectors(problem.K):
        return "rows of A begin between vectors of 16 bytes"
    return operands.supports(A, B, out)


def pushes_sums(problem: Problem, config: FusedConfig, rank: int, tensors: Operands) -> str | None:
    """Return why `kernels/hopper/matmul_reduce.py` cannot load the tensors, or None."""
    return operands.supports(tensors.A, tensors.B, tensors.out, column_step(problem, config))


def pushes_products(problem: Problem, config: FusedConfig, rank: int, tensors: Operands) -> str | None:
    """Return why `kernels/hopper/matmul_gather.py` cannot load the tensors, or None."""
    by_cols = problem.form == "cols"
    if not part_of(problem.N if by_cols else problem.M, problem.world_size, rank):
        return "this rank has nothing to multiply"
    return operands.supports(tensors.A, tensors.B, tensors.out, problem.part_cols if by_cols else 0)


def specialised(problem: Problem, config: FusedConfig, rank: int, tensors: Operands) -> str | None:
    """Return why the warp-specialised Lamport kernels cannot load the tensors, or None."""
    return operands.supports(tensors.A, tensors.B, tensors.out)
