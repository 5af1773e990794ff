"""Of all ways in the table (`ways/`), `choose` takes the configuration that serves a problem fastest.

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
from iris.planning import Weighed, weigh

from ..config import FusedConfig, Prediction
from . import orders, trace
from .needs import PLAIN
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
    """`plan`, among the given ways."""
    if converted := problem.weights.converted(problem, machine):
        found = choose(ways, replace(problem, weights=PLAIN), machine, explained, algorithm)
        why = f"B is converted in each call: {converted}"
        return replace(found, reasons=(*found.reasons[:1], why, *found.reasons[1:])) if explained else found
    weighed = weigh(ways, problem, machine)
    allowed = [each for each in weighed.candidates if algorithm in (None, each.config.algorithm)]
    alike, left_out, wanted = allowed, [], None
    if problem.chooses_order:
        wanted = wanted_order(ways, replace(problem, M=0), machine)
        known = [(each, each.way.order(problem, each.config, machine)) for each in allowed]
        alike = [each for each, order in known if wanted and order == wanted]
        left_out = [(each, order) for each, order in known if not wanted or order != wanted]
    if not alike:
        raise ArgumentError(_refusal(problem, weighed, algorithm, wanted))
    chosen = alike[0]
    reasons: tuple[str, ...] = ()
    if explained:
        free = choose(ways, problem.free, machine, False, algorithm).prediction if problem.sums.promised else None
        told = trace.Told(problem, machine, alike, weighed.rejected, left_out, wanted, free)
        reasons = trace.reasons(told)
    return replace(chosen.config, prediction=chosen.times, reasons=reasons)


def _refusal(problem: Any, weighed: Weighed, algorithm: str | None, wanted: Order | None) -> str:
    if problem.sums.on_any_ranks and problem.chooses_order and not wanted:
        return (
            f"{problem.asked}: {problem.world_size} ranks' parts of K = {problem.K} begin within a block; with"
            " invariant='ranks' expected parts of whole blocks, or A gathered by rows"
        )
    others = ", ".join(sorted({each.config.algorithm for each in weighed.candidates}))
    alike = f", and sum in the order that all numbers of {trace.of_what(problem)} have, {wanted}" if wanted else ""
    return (
        f"{problem.asked}: algorithm is {algorithm!r}; expected one that serves these sizes, dtype and ranks"
        f"{alike}, {others}"
    )


def predict(problem: Any, config: FusedConfig, machine: Machine) -> Prediction:
    """Return the time that a user's `config` should take, by the way that it stands for."""
    return way_for(problem, config).predicted(problem, config, machine)


def way_for(problem: Any, config: FusedConfig, ways: Sequence[Way] = WAYS) -> Way:
    """Return the way that a user's `config` stands for. Raises `ArgumentError` where there is none for the op."""
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
def wanted_order(ways: tuple[Way, ...], problem: Any, machine: Machine) -> Order | None:
    """Return the order of all tiles that serve `problem`, whose M is not looked at; None if no order serves all."""

    def offers(problem: Any) -> dict[Order, float]:
        """The orders of all that serve the problem, each with its least time."""
        found: dict[Order, float] = {}
        for each in weigh(ways, problem, machine).candidates:
            if order := each.way.order(problem, each.config, machine):
                found.setdefault(order, each.weighed_us)
        return found

    return orders.chosen(problem, offers)


def check_order(problem: Any, config: FusedConfig, machine: Machine) -> None:
    """Raise `ArgumentError` for a user's configuration in which a row would be summed in an order of its own."""
    wanted, way = wanted_order(WAYS, replace(problem, M=0), machine), way_for(problem, config)
    served = problem.sums.kind in way.sums
    order = way.order(problem if served else problem.free, config, machine)
    cut = problem.tree and problem.tree.depth % config.block_k
    portable = problem.tree and served and not way.warp_specialised
    if portable and config.warp_specialised:
        raise ArgumentError(
            f"{problem.asked}: config.warp_specialised is True; with invariant='ranks' expected False, but for two"
            " ranks of which each has half of the leaves of K"
        )
    if portable and config.algorithm == "two_shot" and problem.M < problem.world_size**2:
        raise ArgumentError(
            f"{problem.asked}: config.algorithm is 'two_shot' for {problem.M} rows; with invariant='ranks' expected"
            f" 'one_shot' below {problem.world_size**2}"
        )
    if cut or order is None or order != wanted:
        raise ArgumentError(
            f"{problem.asked}: config sums by {order or 'an order of its own'}"
            f"{f', in blocks of {config.block_k}' if cut else ''}; with invariant={problem.sums.level!r} expected None,"
            f" or one that sums by {wanted}"
        )


def unaligned(problem: Any, config: FusedConfig) -> FusedConfig:
    """Return `config` for tensors whose rows do not all begin at multiples of 16 bytes, with a kernel that serves."""
    kernel = way_for(problem, config).standing(problem)
    if not kernel or kernel == config.kernel:
        return config
    said = f"{kernel} runs in its place, for rows that do not begin at multiples of 16 bytes"
    return replace(config, kernel=kernel, reasons=(*config.reasons, said) if config.reasons else ())


def workspace_size(problem: Any, config: FusedConfig, programs: int, way: Way | None = None) -> Sizes:
    """Return what a call needs on a device on which `programs` run at once."""
    if problem.empty:
        return Sizes()
    way = way or way_for(problem, config)
    rows = min(problem.M, way.most_rows(problem, config))
    return way.workspace(replace(problem, M=rows), config, programs)
