"""Choose the function that multiplies where torch computes the product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..local import gating, matmul
from . import torch_matmul

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..problem import Problem


def multiplier(rank: Rank, problem: Problem, gated: bool = False) -> Callable[..., None]:
    """Return a function of (out, A, B, bias, scale). `gated`: silu of half of the columns, times the other half.

    It is torch's product, or `local/matmul.py`, where a row's bits are promised.
    """
    if problem.sums.promised:
        return partial(matmul.gated if gated else matmul.multiply, rank)
    return gating.multiply if gated else torch_matmul.multiply
