"""The tensors of one call of a fused op."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Operands(NamedTuple):
    """`out = A @ B + bias`, spread over ranks; shapes as the op's docstring has them.

    `scale`: float32, one for each column of a B in another format; None where B is in A's dtype.
    """

    out: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None

    @property
    def by_name(self) -> dict[str, torch.Tensor | None]:
        return self._asdict()
