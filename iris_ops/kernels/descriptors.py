"""Describe tensors that TMA can load by tiles, and pass the others as pointers with strides.

TMA loads a tile by one instruction of one thread, but needs rows that begin at multiples of 16 bytes. A tensor whose
rows do not is given as a pointer with strides, and the kernel masks its edges.
"""

from __future__ import annotations

from iris.triton_private import TensorDescriptor
import torch

from ..problem import TMA_ALIGNMENT

# Rows of a tile beyond a matrix's end that cost little to load.
_BEYOND = 16


def as_stored(B: torch.Tensor) -> torch.Tensor:
    """Return B as it lies in memory: [K, N], or [N, K] as `nn.Linear` stores its weight."""
    return B.t() if B.stride(0) == 1 and B.stride(1) != 1 else B


def of_whole_vectors(t: torch.Tensor, step: int = 0) -> bool:
    """Return whether TMA can read `t`: rows, and parts of rows at multiples of `step`, must begin at whole vectors."""
    granule = TMA_ALIGNMENT // t.element_size()
    rows = t.stride(1) == 1 and t.stride(0) > 0 and t.stride(0) % granule == 0 and step % granule == 0
    return t.numel() > 0 and rows and t.data_ptr() % TMA_ALIGNMENT == 0


def in_whole_vectors(t: torch.Tensor) -> torch.Tensor:
    """Return `t`, or a copy that TMA can read."""
    return t if of_whole_vectors(t) else t.clone(memory_format=torch.contiguous_format)


def operand(t: torch.Tensor, block: tuple[int, int], step: int = 0) -> tuple[object, bool]:
    """Return `t` as a tensor descriptor with tiles of `block` where the hardware can read it so, else `t`; and which.

    Tiles begin in a row at multiples of `step`, the width of a part, plus multiples of the block.
    """
    readable = torch.version.hip is None and of_whole_vectors(t, step)
    return (TensorDescriptor(t, list(t.shape), list(t.stride()), list(block)), True) if readable else (t, False)


def rows_operand(A: torch.Tensor, block: tuple[int, int], folds: bool = True) -> tuple[object, bool]:
    """Return A [M, K] as `operand` does, where a tile may have rows beyond the last (`tiles.first_row`).

    `folds` says whether the kernel supports folded rows. If A has too few rows to fold, it is returned unchanged.
    """
    rows, high = A.shape[0], block[0]
    described, tma = operand(A, block)
    if not (tma and folds) or rows >= high or high - rows <= _BEYOND:
        return described, tma
    if 2 * rows < high:
        return A, False
    return TensorDescriptor(A, *folded(A, high), [2, high // 2, block[1]]), True


def folded(A: torch.Tensor, high: int) -> tuple[list[int], list[int]]:
    """Return (shape, strides) of A as two halves of a tile of `high` rows: A's first rows, and its last."""
    half, stride = high // 2, A.stride(0)
    return [2, half, A.shape[1]], [(A.shape[0] - half) * stride, stride, 1]
