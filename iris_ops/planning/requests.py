"""Turn a request to the planner into a problem, of any op."""

from __future__ import annotations

from iris.errors import ArgumentError

from ..problem import Problem, Request, requested_problem
from .moe_problem import MOE_OPS, MoeProblem, requested_moe_problem


def requested(request: Request) -> Problem | MoeProblem:
    """Return the problem that a request describes. Raises `ArgumentError` where it makes no sense."""
    if request.op in MOE_OPS:
        return requested_moe_problem(request)
    problem = requested_problem(request)
    for name, value in (("experts", request.experts), ("top_k", request.top_k)):
        if value is not None:
            raise ArgumentError(f"{name} is {value!r} for {request.op}; expected none, or one of {', '.join(MOE_OPS)}")
    return problem
