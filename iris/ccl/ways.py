"""The ways of a collective: a variant of the algorithm, and how a rank learns that data has arrived.

    lamport   values say themselves that they have arrived (`lamport.py`)
    flags     stores, then a signal (`flags.py`)

To add one: a class, which names its kernel's launcher, and one line in `WAYS`.
"""

from __future__ import annotations

from ..machines import LinkRates
from ..planning import Times, Way
from .config import Config
from .problem import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Problem

# Variants of all_reduce in which nobody owns a part.
WHOLE = ("one_shot", "atomic", "spinlock")


class Collective(Way):
    """A variant and a protocol: what they accept, and how long they take."""

    variant: str
    protocol: str
    launcher: str
    """`module:class` below `iris.ccl`, or in `tests`: a `launch.Launcher`, which has the kernel."""
    ops = frozenset((ALL_REDUCE,))
    slow = False
    """Whether it is never the fastest, and runs only where a config names it."""

    @property
    def name(self) -> str:
        return f"{self.variant}, {self.protocol}"

    def predicted(self, problem: Problem, config: None, machine: LinkRates) -> Times:
        exchange_us = 0.0 if problem.world_size == 1 else self.exchange_us(problem, machine)
        return Times(exchange_us, machine.launch_us + exchange_us)

    def exchange_us(self, problem: Problem, machine: LinkRates) -> float:
        """Return the microseconds among two or more ranks, without the launch."""
        raise NotImplementedError

    def sent(self, problem: Problem) -> float:
        """Return the bytes that a rank sends."""
        w, nbytes = problem.world_size, problem.nbytes
        if problem.op == ALL_REDUCE:
            return (w - 1) * nbytes if self.variant == "one_shot" else 2 * (w - 1) * nbytes / w
        return (w - 1) * (nbytes if problem.op == ALL_GATHER else nbytes / w)

    def hops(self, problem: Problem) -> int:
        """Return the number of transfers in a row until the result is complete."""
        return 2 if problem.op == ALL_REDUCE and self.variant != "one_shot" else 1


class TwoShotLamport(Collective):
    """Values go to the owners of parts, and an all-reduce's sums to everyone."""

    variant, protocol, launcher = "two_shot", "lamport", "launch:Lamport"
    ops = frozenset((ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL))

    def objection(self, problem: Problem, machine: LinkRates) -> str | None:
        if problem.dtype.itemsize > 4 and not problem.dtype.is_floating_point:
            return "no Lamport value is a wider integer"
        if problem.op == REDUCE_SCATTER and not _everyone_owns(problem):
            return "a rank without a part waits for nothing, and would run ahead"
        return None

    def exchange_us(self, problem: Problem, machine: LinkRates) -> float:
        hops = self.hops(problem)
        moved = self.sent(problem) * (1 if problem.reduces and problem.dtype.is_floating_point else 2)
        lamport_gbs = machine.lamport_gbs if hops == 1 else machine.two_hops_gbs
        if problem.world_size == 2:
            lamport_gbs = machine.pair_gbs
        else:
            moved *= 1 + moved / (machine.lamport_mb * 1e6)
        return hops * machine.hop_us + moved / (lamport_gbs * 1e3)


class OneShotLamport(TwoShotLamport):
    """Everyone's values go to everyone."""

    variant = "one_shot"
    ops = frozenset((ALL_REDUCE,))


class TwoShotFlags(Collective):
    """Ranks store to owners, and send a signal for each chunk of stores."""

    variant, protocol, launcher = "two_shot", "flags", "launch:Flags"
    ops = frozenset((ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL))

    def exchange_us(self, problem: Problem, machine: LinkRates) -> float:
        enter = 0.0 if problem.reduces else machine.enter_us
        # the sums of a reduce-scatter overlap less with the stores
        link_gbs = machine.link_gbs * (0.85 if problem.op == REDUCE_SCATTER else 1.0)
        return enter + self.hops(problem) * machine.signal_us + self.sent(problem) / (link_gbs * 1e3)


class Ring(Collective):
    """Parts go round from rank to rank, twice."""

    variant, protocol, launcher, slow = "ring", "flags", "launch:Ring", True

    def exchange_us(self, problem: Problem, machine: LinkRates) -> float:
        return 2 * (problem.world_size - 1) * machine.signal_us + 1.5 * self.sent(problem) / (machine.link_gbs * 1e3)


class Atomic(Collective):
    """Every rank adds to everyone's result."""

    variant, protocol, launcher, slow = "atomic", "flags", "launch:Adding", True

    def exchange_us(self, problem: Problem, machine: LinkRates) -> float:
        return machine.signal_us + (problem.world_size - 1) * problem.n * 4 / (machine.link_gbs * 1e3)


class Spinlock(Atomic):
    """The same, in turns."""

    variant, launcher = "spinlock", "launch:AddingInTurns"


# Where two are as fast, the one that stands first is taken.
WAYS: tuple[Collective, ...] = (OneShotLamport(), TwoShotLamport(), TwoShotFlags(), Ring(), Atomic(), Spinlock())


def allowed(problem: Problem, config: Config) -> tuple[Collective, ...]:
    """Return the ways that a user's config allows."""
    return tuple(way for way in WAYS if excluded(way, problem, config) is None)


def excluded(way: Collective, problem: Problem, config: Config) -> str | None:
    """Return the reason why a user's config excludes a way, or None."""
    variant = config.all_reduce_variant if problem.op == ALL_REDUCE else None
    if variant is None and way.slow:
        return "it is never the fastest, and runs where config.all_reduce_variant names it"
    if variant not in (None, way.variant):
        return f"config.all_reduce_variant is {variant!r}"
    if config.protocol not in (None, way.protocol):
        return f"config.protocol is {config.protocol!r}"
    return None


def _everyone_owns(problem: Problem) -> bool:
    """Return whether every rank has part of a reduce-scatter."""
    return not problem.cols and problem.part * (problem.world_size - 1) < problem.n
