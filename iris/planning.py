"""The engine of all planners: of the ways that accept a problem, the candidates with their times, the fastest first.

It is arithmetic, so every rank chooses the same without talking. `iris/ccl/ways.py` and `iris_ops/planning/ways/` are
the tables of ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class Times(NamedTuple):
    """Microseconds that a candidate should take: the exchange alone, and with a launch."""

    link_us: float
    total_us: float

    @property
    def columns(self) -> tuple[tuple[str, float], ...]:
        return ("link", self.link_us), ("together", self.total_us)


class Way:
    """One way to serve a problem, as numbers. All ranks compute the same from equal arguments."""

    ops: frozenset[str]
    lead: tuple[float, float] = (0.0, 0.0)
    """By how much it must be faster than others to be chosen: a share of its time, and microseconds at most."""

    @property
    def name(self) -> str:
        """Return the name that a trace shows where this candidate is not supported."""
        raise NotImplementedError

    def label(self, problem: Any, config: Any) -> str:
        """Return what a trace calls a candidate."""
        return self.name

    def objection(self, problem: Any, machine: Any) -> str | None:
        """Return the reason why `problem` is not supported on `machine`; None if it is."""
        return None

    def tiles(self, problem: Any, machine: Any) -> Sequence[Any]:
        """Return the configurations to compare."""
        return (None,)

    def predicted(self, problem: Any, config: Any, machine: Any) -> Predicted:
        """Return the predicted time of a configuration."""
        raise NotImplementedError


class Predicted(Protocol):
    """A prediction: microseconds of the whole, and whatever else a trace shows."""

    @property
    def total_us(self) -> float: ...

    @property
    def columns(self) -> tuple[tuple[str, float], ...]:
        """Return the times that a trace shows, with their names."""


class Candidate(NamedTuple):
    """A way's configuration with its times. `compared_us`: what it is compared by."""

    way: Any
    config: Any
    times: Any
    compared_us: float

    def label(self, problem: Any) -> str:
        """Return the kernel's name and its form."""
        return self.way.label(problem, self.config)

    def row(self, problem: Any) -> str:
        """Return the line of a trace: the label, and the times side by side."""
        times = ", ".join(f"{name} {us:9.1f} us" for name, us in self.times.columns)
        return f"{self.label(problem):<56} {times}"

    def left_out(self, problem: Any, reason: str) -> str:
        """Return the line of a trace for a candidate that is not compared."""
        return f"left out {self.label(problem)}, {self.times.total_us:.1f} us: {reason}"


class Comparison(NamedTuple):
    """All that was compared for a problem: the candidates, the fastest first, and the reasons against other ways."""

    candidates: Sequence[Candidate]
    rejected: Sequence[tuple[Any, str]]

    def rejections(self) -> list[str]:
        """Return the lines of a trace for the ways that cannot serve."""
        return [f"rejected {way.name}: {reason}" for way, reason in self.rejected]


def compare_ways(ways: Sequence[Way], problem: Any, machine: Any) -> Comparison:
    """Return every candidate of every way with its times, and each way that cannot serve, with the reason.

    Of candidates that are as fast, the one whose way stands first comes first.
    """
    candidates: list[Candidate] = []
    rejected: list[tuple[Way, str]] = []
    for way in (way for way in ways if problem.op in way.ops):
        if reason := way.objection(problem, machine):
            rejected.append((way, reason))
            continue
        for config in way.tiles(problem, machine):
            times = way.predicted(problem, config, machine)
            share, most = way.lead
            candidates.append(Candidate(way, config, times, times.total_us + min(share * times.total_us, most)))
    return Comparison(sorted(candidates, key=lambda candidate: candidate.compared_us), rejected)
