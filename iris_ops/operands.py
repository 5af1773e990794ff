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
    def key(self) -> tuple[tuple, tuple]:
        """Return what decides the call, its tensors and the rest."""
        return self, ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the tensors of `key`."""
        return self._fields

    @property
    def is_ready(self) -> bool:
        """Return whether kernels take all tensors where they are."""
        return is_together(self.bias)

    def ready(self) -> Operands:
        """Return the tensors as kernels take them."""
        return self if self.is_ready else self._replace(bias=together(self.bias))


def is_together(t: torch.Tensor | None) -> bool:
    """Return whether elements of a row follow each other."""
    return t is None or t.stride(-1) == 1


def together(t: torch.Tensor | None) -> torch.Tensor | None:
    """Return `t`, or a copy if elements of its rows lie apart."""
    return t if t is None or is_together(t) else t.contiguous()
