"""Contenders of one call, each checked and then timed: what `tiles.py` and `rooted.py` share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
import sys

from iris_tp.bench import timing
from iris_tp.bench.team import Team
import torch

CALLS, ROUNDS = 20, 9
POISON = 1e4  # far from every right value


@dataclass(frozen=True)
class Contender:
    call: Callable[[], object]
    out: torch.Tensor
    """Where a call leaves its result."""
    form: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
    """The result as it is compared."""


def timed(team: Team, contenders: dict[str, Contender], exact: torch.Tensor | None, allowed: float) -> dict:
    """Return microseconds of each call, as graphs on GPUs, and the reasons of those that failed, whose time is none.

    A result, into poisoned memory, may be off by `allowed` of the largest value of `exact`, before and after it is
    timed; it is not looked at on a rank where `exact` is None.
    """
    batches, failed = {}, {}
    for name, contender in contenders.items():
        progress(team, f"    {name}")
        reason = _refuted(team, contender, contender.call, exact, allowed)
        if not reason:
            batch, reason = team.attempt(partial(_batch, team, contender))
        if reason:
            failed[name] = reason
        else:
            batches[name] = batch
    timings, broken = timing.interleave(team, batches, ROUNDS if team.cuda else 1)
    failed |= broken
    for name in timings:
        if reason := _refuted(team, contenders[name], batches[name].run, exact, allowed):
            failed[name] = f"{reason}, when repeated"
    return {"us": {name: t.call_us for name, t in timings.items() if name not in failed}, "failed": failed}


def progress(team: Team, text: str) -> None:
    """Print one line on rank 0, where the results are not printed."""
    if team.rank == 0:
        print(text, file=sys.stderr, flush=True)


def _batch(team: Team, contender: Contender) -> timing.Batch:
    def call(i: int) -> torch.Tensor:
        contender.call()
        return contender.out

    return timing.graph_batch(call, CALLS, 1)[0] if team.cuda else timing.eager_batch(call, 2, 1)


def _refuted(team: Team, contender: Contender, act: Callable, exact: torch.Tensor | None, allowed: float) -> str | None:
    def error() -> float:
        contender.out.fill_(POISON)
        act()
        if exact is None:
            return 0.0
        result = contender.form(contender.out).double()
        return ((result - exact).abs().max() / exact.double().abs().max()).item()

    off, reason = team.attempt(error)
    if not reason:
        worst = team.slowest([off])[0]
        reason = None if worst <= allowed else f"wrong result, off by {worst:.3g} of the largest value"
    return reason
