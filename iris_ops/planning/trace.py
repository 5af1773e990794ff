"""The lines of `explain()`: each candidate with its times side by side, or the reason why it was left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from iris.machines import Machine
from iris.planning import Candidate, Comparison

from ..config import Prediction
from . import tritonblas
from .orders import Order


@dataclass(frozen=True)
class Choice:
    """The facts of a choice. `free`: the times without a promise of equal bits, if there is one."""

    problem: Any
    machine: Machine
    comparison: Comparison
    serving: Sequence[Candidate]
    other_orders: Sequence[tuple[Candidate, Order | None]]
    required: Order | None
    free: Prediction | None


def reasons(choice: Choice) -> tuple[str, ...]:
    """Return the lines, the chosen one last but for what follows from it."""
    problem, chosen = choice.problem, choice.serving[0]
    lines = [f"{problem.text} on {choice.machine.name}", f"rates {choice.machine.source}"]
    lines += tritonblas.reasons(problem, choice.machine.name)
    lines += [candidate.row(problem) for candidate in choice.serving]
    lines += choice.comparison.rejections()
    for candidate, order in choice.other_orders:
        reason = f"it sums by {order}" if order else f"its order of sums depends on the number of {of_what(problem)}"
        lines.append(candidate.left_out(problem, reason))
    if choice.free:
        least = chosen.times.total_us
        cost = max(0.0, least - choice.free.total_us)
        share = 100 * cost / least if least else 0.0
        order = choice.required or problem.operation.one_order
        lines.append(
            f"all sum by {order}: the same bits at every number of {of_what(problem)} cost {cost:.1f} us, {share:.1f} %"
        )
    lines.append(f"chosen {chosen.label(problem)}")
    if chosen.way.writes_to_peers(problem):
        lines.append(
            "peers write out directly if it is on the heap, as outputs of layers are if they fit; "
            "otherwise it is staged and copied once more"
        )
    return tuple(lines)


def of_what(problem: Any) -> str:
    """Return the name of the counts on which a row's bits do not depend."""
    return problem.sums.level.counted(problem)
