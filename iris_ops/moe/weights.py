"""How grouped kernels are given the weights of all experts: by a tensor descriptor where the hardware can, or not."""

from __future__ import annotations

from iris.triton_private import TensorDescriptor
import torch

from ..problem import TMA_ALIGNMENT


def can_be_described(B: torch.Tensor, n_step: int = 0) -> bool:
    """Whether a tensor descriptor can read B [E,K,N], and so can tiles that begin `n_step` columns further on."""
    transposed = is_transposed(B)
    *strides, last = (B.transpose(1, 2) if transposed else B).stride()
    granule = TMA_ALIGNMENT // B.element_size()
    whole = last == 1 and all(s > 0 and s % granule == 0 for s in strides) and B.data_ptr() % TMA_ALIGNMENT == 0
    return torch.version.hip is None and B.numel() > 0 and whole and (transposed or n_step % granule == 0)


def is_transposed(B: torch.Tensor) -> bool:
    """Return whether the K of an expert's column stand side by side in memory."""
    return B.stride(1) == 1 and B.stride(2) != 1


def weights_operand(
    B: torch.Tensor, block_n: int, block_k: int, n_step: int = 0, together: bool = False
) -> tuple[object, bool, bool]:
    """B [E,K,N] for tiles of block_k by block_n: (a descriptor or B, whether it is one, whether B is transposed).

    `n_step`: where in a row a second half begins, if one does; tiles begin at whole vectors. `together`: a tile has
    block_n columns of each half, and the descriptor one more dimension, which tells them apart.
    """
    transposed = is_transposed(B)
    if not can_be_described(B, n_step):
        return B, False, transposed
    stored = B.transpose(1, 2) if transposed else B
    shape, strides = list(stored.shape), list(stored.stride())
    block = [1, block_n, block_k] if transposed else [1, block_k, block_n]
    if together:
        at = 1 if transposed else 2
        shape[at : at + 1], strides[at : at + 1] = [2, n_step], [n_step * strides[at], strides[at]]
        block[at : at + 1] = [2, block_n]
    return TensorDescriptor(stored, shape, strides, block), True, transposed
