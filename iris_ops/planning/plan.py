"""Choose the configuration that computes a problem fastest, of all ways in the table (`ways/`).

It is arithmetic on shapes, dtype, world size and device rates, so every rank chooses the same without talking, and the
plan can explain itself. A problem that promises equal bits is served by tiles of one order only (`orders.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from iris.errors import ArgumentError
from iris.machines import Machine
from iris.planning import Comparison, compare_ways

from ..config import FusedConfig, Prediction
from . import orders, trace
from .needs import PLAIN
from .operations import ALL_REDUCE
from .orders import Order
from .way import Sizes, Way
from .ways import WAYS


def plan(problem: Any, machine: Machine, explained: bool = True, algorithm: str | None = None) -> FusedConfig:
    """Return the fastest configuration by the model, with its kernel, prediction and, if `explained`, the reasons.

    `algorithm`: among those only. Raises `ArgumentError` where none of them serves the problem.
    """
    return choose(WAYS, problem, machine, explained, algorithm)


@lru_cache(maxsize=4096)
def choose(
    ways: tuple[Way, ...], problem: Any, machine: Machine, explained: bool = True, algorithm: str | None = None
) -> FusedConfig:
    """Return what `plan` returns, chosen among the given ways."""
    if reason := problem.converted(machine):
        return _converted(ways, problem, machine, explained, algorithm, reason)
    comparison = compare_ways(ways, problem, machine)
    allowed = [candidate for candidate in comparison.candidates if algorithm in (None, candidate.config.algorithm)]
    serving, other_orders, required = allowed, [], None
    if problem.chooses_order:
        required = common_order(ways, replace(problem, M=0), machine)
        known = [(candidate, candidate.way.order(problem, candidate.config, machine)) for candidate in allowed]
        serving = [candidate for candidate, order in known if required and order == required]
        other_orders = [(candidate, order) for candidate, order in known if not required or order != required]
    if not serving:
        raise ArgumentError(_refusal(problem, comparison, algorithm, required))
    chosen = serving[0]
    reasons: tuple[str, ...] = ()
    if explained:
        free = choose(ways, problem.free, machine, False, algorithm).prediction if problem.sums.promised else None
        choice = trace.Choice(problem, machine, comparison, serving, other_orders, required, free)
        reasons = trace.reasons(choice)
    return replace(chosen.config, prediction=chosen.times, reasons=reasons)


def _converted(
    ways: tuple[Way, ...], problem: Any, machine: Machine, explained: bool, algorithm: str | None, reason: str
) -> FusedConfig:
    """Return the plan for B in A's dtype, with the time in which each call converts it."""
    planned = choose(ways, replace(problem, weights=PLAIN), machine, explained, algorithm)
    _, n, k = problem.gemm
    us, times = problem.weights.restoring_us(n, k, problem.dtype.itemsize, machine), planned.prediction
    if times:
        planned = replace(planned, prediction=replace(times, total_us=times.total_us + us))
    if not explained:
        return planned
    line = f"B is converted in each call, {us:.1f} us: {reason}"
    return replace(planned, reasons=(*planned.reasons[:1], line, *planned.reasons[1:]))


def _refusal(problem: Any, comparison: Comparison, algorithm: str | None, required: Order | None) -> str:
    if problem.chooses_order and not required and (reason := problem.sums.level.without_order(problem)):
        return f"{problem.called_op}: {reason}"
    algorithms = ", ".join(sorted({candidate.config.algorithm for candidate in comparison.candidates}))
    counts = trace.of_what(problem)
    same_order = f", and sum in the order that all numbers of {counts} have, {required}" if required else ""
    return (
        f"{problem.called_op}: algorithm is {algorithm!r}; expected one that serves these sizes, dtype and ranks"
        f"{same_order}, {algorithms}"
    )


def predict(problem: Any, config: FusedConfig, machine: Machine) -> Prediction:
    """Return the time that a user's `config` should take, by the way that it selects."""
    return way_for(problem, config).predicted(problem, config, machine)


def way_for(problem: Any, config: FusedConfig, ways: Sequence[Way] = WAYS) -> Way:
    """Return the way that a user's `config` selects. Raises `ArgumentError` where there is none for the op."""
    serving = [way for way in ways if problem.op in way.ops]
    for way in reversed(serving):
        if way.means(problem, config):
            return way
    for way in ways:
        if config.algorithm in way.algorithms and (reason := way.refuses(problem)):
            raise ArgumentError(
                f"{problem.op}: config.algorithm is {config.algorithm!r}; expected another, for {reason}"
            )
    known = ", ".join(sorted({repr(name) for way in serving for name in way.algorithms}))
    raise ArgumentError(f"{problem.op}: config.algorithm is {config.algorithm!r}; expected one of {known}")


def way_named(kernel: str, ways: Sequence[Way] = WAYS) -> Way:
    """Return the way whose kernel has this name."""
    return next(way for way in ways if way.kernel == kernel)


@lru_cache(maxsize=1024)
def common_order(ways: tuple[Way, ...], problem: Any, machine: Machine) -> Order | None:
    """Return the order of all tiles that serve `problem`, whose M is not looked at; None if no order serves all."""

    def offers(problem: Any) -> dict[Order, float]:
        """Return the orders of all that serve the problem, each with its least time."""
        fastest: dict[Order, float] = {}
        for candidate in compare_ways(ways, problem, machine).candidates:
            if order := candidate.way.order(problem, candidate.config, machine):
                fastest.setdefault(order, candidate.compared_us)
        return fastest

    return orders.chosen(problem, offers)


def check_config(op: str, problem: Any, config: FusedConfig, machine: Machine) -> None:
    """Raise `ArgumentError` for a user's configuration that cannot serve a call of `op`."""
    if not isinstance(config, FusedConfig):
        raise ArgumentError(f"{op}: config is {type(config).__name__}; expected an iris_ops.FusedConfig")
    way = way_for(problem, config)
    if config.algorithm == "two_shot" and problem.op != ALL_REDUCE:
        raise ArgumentError(f"{op}: config.algorithm is 'two_shot', which is for {ALL_REDUCE}; expected 'one_shot'")
    if reason := way.refuses(problem):
        raise ArgumentError(f"{op}: config.algorithm is {config.algorithm!r}; expected another, for {reason}")
    if reason := way.refuses_config(problem, config, machine):
        raise ArgumentError(f"{op}: {reason}")
    if not problem.sums.on_any_ranks:
        return
    expected = common_order(WAYS, replace(problem, M=0), machine)
    order = way.order(problem if problem.sums.kind in way.sums else problem.free, config, machine)
    cut = problem.tree and problem.tree.depth % config.block_k
    if cut or order is None or order != expected:
        raise ArgumentError(
            f"{op}: config sums by {order or 'another order'}{f', in blocks of {config.block_k}' if cut else ''}; with"
            f" {problem.sums.level.text} expected None, or one that sums by {expected}"
        )


def unaligned(problem: Any, config: FusedConfig) -> FusedConfig:
    """Return `config` for tensors whose rows do not all begin at multiples of 16 bytes, with a kernel that serves."""
    kernel = way_for(problem, config).fallback_for(problem)
    if not kernel or kernel == config.kernel:
        return config
    line = f"{kernel} runs instead, because rows do not begin at multiples of 16 bytes"
    return replace(config, kernel=kernel, reasons=(*config.reasons, line) if config.reasons else ())


def workspace_size(problem: Any, config: FusedConfig, programs: int, way: Way | None = None) -> Sizes:
    """Return what a call needs on a device on which `programs` run at once."""
    if problem.empty:
        return Sizes()
    way = way or way_for(problem, config)
    rows = min(problem.M, way.most_rows(problem, config))
    return way.workspace(replace(problem, M=rows), config, programs)
