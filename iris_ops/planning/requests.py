"""Turn the arguments of `ctx.ops.plan` and `iris-tp plan` into a problem, of any op."""

from __future__ import annotations

from collections.abc import Sequence

from iris.errors import ArgumentError
import torch

from ..problem import Problem, requested_problem
from .moe_problem import MOE_OPS, MoeProblem, requested_moe_problem
from .needs import PLAIN, WeightFormat


def requested(
    op: str, M: int, N: int, K: int, world_size: int, dtype: torch.dtype, form: str | None = None,
    weights: WeightFormat = PLAIN, invariant: str | None = None, experts: int | None = None, top_k: int | None = None,
    k_per_rank: Sequence[int] | None = None,
) -> Problem | MoeProblem:  # fmt: skip
    """Return the problem that the arguments describe. Raises `ArgumentError` where they make no sense.

    `experts`, `top_k` (by default 1): for the ops of a mixture, whose `M` is the number of tokens. `k_per_rank`: each
    rank's K, for ops that add along it with `invariant="ranks"`.
    """
    if op in MOE_OPS:
        choices = 1 if top_k is None else top_k
        return requested_moe_problem(op, M, N, K, experts, choices, world_size, dtype, form, weights, invariant)
    problem = requested_problem(op, M, N, K, world_size, dtype, form, weights, invariant, k_per_rank)
    for name, value in (("experts", experts), ("top_k", top_k)):
        if value is not None:
            raise ArgumentError(f"{name} is {value!r} for {op}; expected none, or one of {', '.join(MOE_OPS)}")
    return problem
