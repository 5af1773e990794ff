"""The lines of `explain()`: each candidate with its times side by side, or the reason why it was left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from iris.machines import Machine
from iris.planning import Candidate

from ..config import Prediction
from . import tritonblas
from .orders import Order
from .way import Way


@dataclass(frozen=True)
class Choice:
    """What a choice was made from. `free`: the times without a promise of equal bits, where there is one."""

    problem: Any
    machine: Machine
    serving: Sequence[Candidate]
    rejected: Sequence[tuple[Way, str]]
    other_orders: Sequence[tuple[Candidate, Order | None]]
    required: Order | None
    free: Prediction | None


def reasons(choice: Choice) -> tuple[str, ...]:
    """Return the lines, the chosen one last but for what follows from it."""
    problem, chosen = choice.problem, choice.serving[0]
    lines = [f"{problem.text} on {choice.machine.name}", *tritonblas.reasons(problem, choice.machine.name)]
    lines += [row(problem, candidate) for candidate in choice.serving]
    lines += [f"rejected {way.name}: {reason}" for way, reason in choice.rejected]
    for candidate, order in choice.other_orders:
        reason = f"it sums by {order}" if order else f"its order of sums depends on the number of {of_what(problem)}"
        lines.append(f"left out {label(problem, candidate)}, {candidate.times.total_us:.1f} us: {reason}")
    if choice.free:
        least = chosen.times.total_us
        cost = max(0.0, least - choice.free.total_us)
        share = 100 * cost / least if least else 0.0
        lines.append(
            f"all sum by {choice.required or problem.order_text}: the same bits at every number of {of_what(problem)}"
            f" cost {cost:.1f} us, {share:.1f} %"
        )
    lines.append(f"chosen {label(problem, chosen)}")
    if chosen.way.writes_to_peers(problem):
        lines.append(
            "peers write out directly when it lies on the heap, as outputs of layers do where they find room; "
            "otherwise it is staged and copied once more"
        )
    return tuple(lines)


def of_what(problem: Any) -> str:
    """Return the name of the counts on which a row's bits do not depend."""
    return "rows and ranks" if problem.sums.on_any_ranks else problem.counted


def label(problem: Any, candidate: Candidate) -> str:
    """Return the kernel's name and its form."""
    return candidate.way.label(problem, candidate.config)


def row(problem: Any, candidate: Candidate) -> str:
    """Return a candidate, its product's time, its exchange's, and both together."""
    times = candidate.times
    return (
        f"{label(problem, candidate):<56} product {times.gemm_us:9.1f} us, link {times.link_us:9.1f} us, "
        f"together {times.total_us:9.1f} us"
    )
