"""Choose the function that multiplies where torch computes the product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..local import gating, matmul
from . import torch_matmul

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..planning.needs import Epilogue
    from ..problem import Problem


def multiplier(rank: Rank, problem: Problem, epilogue: Epilogue | None = None) -> Callable[..., None]:
    """Return a function of (out, A, B, bias, scale). `epilogue`: of the same call, None or a gate.

    It is torch's product, or `local/matmul.py`, where a row's bits are promised.
    """
    if problem.sums.promised:
        return partial(matmul.gated if epilogue else matmul.multiply, rank)
    return gating.multiply if epilogue else torch_matmul.multiply
