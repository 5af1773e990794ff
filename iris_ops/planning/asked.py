"""Questions to the planner, of every op: `ctx.ops.plan` and `iris-tp plan` ask here, and are refused here alike."""

from __future__ import annotations

from collections.abc import Sequence

from iris.errors import ArgumentError
import torch

from ..problem import Problem, problem_asked
from .moe_problem import MOE_OPS, MoeProblem, moe_problem_asked
from .needs import PLAIN, WeightFormat


def asked(
    op: str, M: int, N: int, K: int, world_size: int, dtype: torch.dtype, form: str | None = None,
    weights: WeightFormat = PLAIN, invariant: str | None = None, experts: int | None = None, top_k: int | None = None,
    depths: Sequence[int] | None = None,
) -> Problem | MoeProblem:  # fmt: skip
    """The problem that a question describes. Raises `ArgumentError` where it makes no sense.

    `experts`, `top_k` (by default 1): of the ops of a mixture, whose `M` is the number of tokens. `depths`: each rank's
    K, of ops that add along it with `invariant="ranks"`.
    """
    if op in MOE_OPS:
        chosen = 1 if top_k is None else top_k
        return moe_problem_asked(op, M, N, K, experts, chosen, world_size, dtype, form, weights, invariant)
    problem = problem_asked(op, M, N, K, world_size, dtype, form, weights, invariant, depths)
    for name, value in (("experts", experts), ("top_k", top_k)):
        if value is not None:
            raise ArgumentError(f"{name} is {value!r} for {op}; expected none, or one of {', '.join(MOE_OPS)}")
    return problem
