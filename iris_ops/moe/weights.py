"""Pass the weights of all experts to grouped kernels: as a tensor descriptor where the hardware can read them so."""

from __future__ import annotations

from typing import Any, NamedTuple

from iris.triton_private import TensorDescriptor
import torch

from ..planning.experts import lies_by_lines
from ..planning.weights import format_of
from ..problem import TMA_ALIGNMENT
from ..quantised.packing import PACKINGS
from . import coded
from .arguments import Codes, ExpertScales


def can_be_described(B: torch.Tensor, n_step: int = 0) -> bool:
    """Return whether a tensor descriptor can read B [E,K,N], including tiles that begin `n_step` columns further on."""
    transposed = is_transposed(B)
    *strides, last = (B.transpose(1, 2) if transposed else B).stride()
    granule = TMA_ALIGNMENT // B.element_size()
    whole = last == 1 and all(s > 0 and s % granule == 0 for s in strides) and B.data_ptr() % TMA_ALIGNMENT == 0
    return torch.version.hip is None and B.numel() > 0 and whole and (transposed or n_step % granule == 0)


def is_transposed(B: torch.Tensor) -> bool:
    """Return whether the K entries of an expert's column are adjacent in memory."""
    return B.stride(1) == 1 and B.stride(2) != 1


# What widens a packing's codes, by whether elements hold entries of whole lines.
_WIDEN = {
    ("fp8", False): coded.widen_e4m3, ("fp8_block", False): coded.widen_e4m3,
    ("fp8_block", True): coded.widen_turned_e4m3, ("int4", True): coded.widen_int4, ("mxfp4", True): coded.widen_e2m1,
    ("nvfp4", True): coded.widen_e2m1, ("int8", True): coded.widen_int8, ("int4_zeros", True): coded.widen_int4,
    ("int8_zeros", True): coded.widen_int8,
}  # fmt: skip


class Stored(NamedTuple):
    """A weight B [E,K,N] as kernels take it: its elements, which are bytes where they are codes, and how to widen them.

    `scale`, `codes`, `widen` are None of a weight in the tokens' dtype; see `coded.py`.
    """

    B: torch.Tensor
    packed: int = 1
    scale: ExpertScales | None = None
    codes: Codes | None = None
    widen: Any = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of kernels that tell how codes are widened."""
        return dict(scale=self.scale, codes=self.codes, widen=self.widen)


def stored(B: torch.Tensor, scale: torch.Tensor | None) -> Stored:
    """Return the weight B [E,K,N], or, with `scale`, B as a packing has it, transposed; they are checked."""
    if scale is None:
        return Stored(B)
    format = format_of(B[0], scale[0])
    packing = PACKINGS[format.packing]
    word = torch.uint8 if packing.per_element == 1 else torch.int32
    rows = B.transpose(1, 2)
    # A weight without elements may have strides of which no words are made. Its own are constants here: where both of a
    # matrix are 1, Triton 3.6 fails to compile.
    empty = (*rows.shape[:2], 0), (0, 0, 1)
    words = rows.view(word) if rows.numel() else rows.new_empty(0, dtype=word).as_strided(*empty)
    elements = words.transpose(1, 2)
    packed = packing.per_element * word.itemsize // packing.dtype.itemsize
    cut = lies_by_lines(format)
    scales, codes = ExpertScales(scale, *scale.stride()[:2]), Codes(packed, cut, format.group, format.zeros)
    return Stored(elements, packed, scales, codes, _WIDEN[format.packing, cut])


def weights_operand(
    B: torch.Tensor, block_n: int, block_k: int, n_step: int = 0, together: bool = False
) -> tuple[object, bool, bool]:
    """Return B [E,K,N] for tiles of block_k by block_n: (a descriptor or B, whether it is one, whether B is
    transposed).

    `n_step` is where in a row a second half begins, if there is one; tiles begin at whole vectors. With `together`, a
    tile has block_n columns of each half, and the descriptor has one more dimension to select the half.
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
