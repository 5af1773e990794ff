"""Compare contenders that compute the same: each is checked first, then all are timed in turns."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from .team import Team
from .timing import INTERPRETED, QUICK, Batch, Budget, eager_batch, estimate_us, graph_batch, interleave

Call = Callable[[int], torch.Tensor]


def budget_of(team: Team, quick: bool) -> Budget:
    return INTERPRETED if not team.cuda else QUICK if quick else Budget()


def compare(
    team: Team, calls: dict[str, Call], error: Callable[[str, Call], float], inputs: int, budget: Budget,
    captures: dict[str, Callable[[], AbstractContextManager]] | None = None,
) -> dict[str, dict]:  # fmt: skip
    """Return by name `us` a call over `inputs` that rotate, in CUDA graphs on GPUs, `errors`, and reasons of `failed`.

    `error` returns a call's difference from the exact result, relative to it; it runs before anything is timed.
    `captures`: the context manager for a call's capture, if it needs one.
    """
    errors, batches, failed = {}, {}, {}
    for name, call in calls.items():
        relative, reason = team.attempt(partial(error, name, call))
        if relative is None:
            failed[name] = str(reason)
            continue
        errors[name] = team.slowest([relative])[0]
        longest = team.slowest([estimate_us(team, call, inputs)])[0]  # every rank makes as many calls
        count = budget.calls_for(longest, inputs)
        if not team.cuda:
            batches[name] = eager_batch(call, count, inputs)
            continue
        captured, reason = team.attempt(
            partial(_captured, (captures or {}).get(name, nullcontext), call, count, inputs)
        )
        if captured is None:
            failed[name] = str(reason)
        else:
            batches[name] = captured
    repeats = budget.repeats_for(max(1.0, budget.batch_ms * 1e3 * len(calls)), len(calls))
    timings, late = interleave(team, batches, repeats)
    us = {name: timing.call_us for name, timing in timings.items()}
    return {"us": us, "errors": errors, "failed": failed | late}


def _captured(capture: Callable[[], AbstractContextManager], call: Call, count: int, inputs: int) -> Batch:
    with capture():
        return graph_batch(call, count, inputs)[0]


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of `result - exact` relative to that of `exact`; NaN where `result` has one."""
    return ((result.double() - exact).norm() / exact.norm()).item()
