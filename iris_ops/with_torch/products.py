"""Choose the function that multiplies where torch computes the product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..local import matmul
from ..planning.epilogues import NO_EPILOGUE, Epilogue
from . import torch_matmul

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..problem import Problem


def multiplier(rank: Rank, problem: Problem, epilogue: Epilogue = NO_EPILOGUE) -> Callable[..., None]:
    """Return a function of (out, A, B, bias, scale), which ends with `epilogue`.

    It is torch's product, or `local/matmul.py`, where a row's bits are promised.
    """
    multiply = partial(matmul.multiply, rank) if problem.sums.promised else torch_matmul.multiply
    return partial(multiply, epilogue=epilogue)
