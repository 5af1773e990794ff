"""How kernels are given the tensors that they read and write by tiles: which of them TMA can, and how B lies."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .problem import TMA_ALIGNMENT


def as_stored(B: torch.Tensor) -> torch.Tensor:
    """B as it lies in memory: [K, N], or [N, K] as `nn.Linear` has its weight."""
    return B.t() if B.stride(0) == 1 and B.stride(1) != 1 else B


def of_whole_vectors(t: torch.Tensor, step: int = 0) -> bool:
    """Whether TMA can read `t`: rows, and parts of rows, which begin at multiples of `step`, begin at whole vectors."""
    granule = TMA_ALIGNMENT // t.element_size()
    rows = t.stride(1) == 1 and t.stride(0) > 0 and t.stride(0) % granule == 0 and step % granule == 0
    return t.numel() > 0 and rows and t.data_ptr() % TMA_ALIGNMENT == 0


def in_whole_vectors(t: torch.Tensor) -> torch.Tensor:
    """`t`, or a copy that TMA can read."""
    return t if of_whole_vectors(t) else t.clone(memory_format=torch.contiguous_format)


def operand(t: torch.Tensor, block: tuple[int, int], step: int = 0) -> tuple[object, bool]:
    """`t` as a tensor descriptor with tiles of `block` where the hardware can, else as it is; and which of the two.

    Tiles begin in a row at multiples of `step`, the width of a part, plus multiples of the block.
    """
    fits = torch.version.hip is None and of_whole_vectors(t, step)
    return (TensorDescriptor(t, list(t.shape), list(t.stride()), list(block)), True) if fits else (t, False)
