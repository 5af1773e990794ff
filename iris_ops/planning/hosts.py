"""Predict transfers between hosts, and plan the ops that add over the ranks of several hosts: arithmetic.

Each rank has its own network link. An all-reduce across hosts is a ring for large data, which sends all but a part
of it twice, and a tree for small data, which sends it whole in few hops.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from iris.machines import Machine

from ..config import FusedConfig

SCATTER, WHOLE = "share by share", "whole"


@dataclass(frozen=True)
class Network:
    """The network between `hosts`: GB/s that each rank sends (`gbs`), and the time of a message (`hop_us`)."""

    hosts: int
    gbs: float
    hop_us: float

    def all_reduce_us(self, nbytes: float) -> float:
        """Return the microseconds to add `nbytes` of each rank over all hosts, and have the sum everywhere."""
        n = self.hosts
        ring = 2 * (n - 1) * self.hop_us + self._us(2 * (n - 1) / n * nbytes)
        tree = 2 * ceil(log2(n)) * self.hop_us + self._us(2 * nbytes) if n > 1 else 0.0
        return min(ring, tree)

    def reduce_scatter_us(self, nbytes: float) -> float:
        """Return the same where each host keeps its part of the sum of `nbytes` only."""
        n = self.hosts
        return (n - 1) * self.hop_us + self._us((n - 1) / n * nbytes)

    def _us(self, nbytes: float) -> float:
        return nbytes / (self.gbs * 1e3)


@dataclass(frozen=True)
class HostsPlan:
    """The plan of an op over the ranks of several hosts: `way`, the plan inside a host, and times in us."""

    way: str
    inside: FusedConfig
    inside_us: float
    across_us: float
    gather_us: float
    reasons: tuple[str, ...]

    @property
    def total_us(self) -> float:
        """Return the predicted time, in microseconds."""
        return self.inside_us + self.across_us + self.gather_us

    def explain(self) -> str:
        """Return the reasons for this choice, one a line, those of the plan inside a host last."""
        return "\n".join((*self.reasons, *self.inside.reasons))


def gather_us(nbytes: float, ranks: int, machine: Machine) -> float:
    """Return the microseconds for the ranks of a host to gather `nbytes`, of which each has its share."""
    if ranks == 1:
        return 0.0
    return machine.launch_us + machine.exchange_us + (ranks - 1) / ranks * nbytes / (machine.link_gbs * 1e3)


def plan_all_reduce(
    nbytes: int, ranks: int, network: Network, machine: Machine, scattered: FusedConfig, reduced: FusedConfig
) -> HostsPlan:
    """Return the faster way to add `nbytes` over `ranks` of each host and over the hosts.

    `scattered` and `reduced`: the plans inside a host of matmul_reduce_scatter and matmul_all_reduce. Share by share,
    each rank adds its share of the rows across hosts, and the host gathers them. Whole, each rank adds all rows across
    hosts: more data, but no gather.
    """
    shared = (
        _us(scattered),
        network.all_reduce_us(nbytes / ranks),
        gather_us(nbytes, ranks, machine),
    )
    full = _us(reduced), network.all_reduce_us(nbytes), 0.0
    by_share = sum(shared) <= sum(full)
    times, inside = (shared, scattered) if by_share else (full, reduced)
    lines = [
        _head("matmul_all_reduce", network, ranks),
        _line(SCATTER, "matmul_reduce_scatter", shared),
        _line(WHOLE, "matmul_all_reduce", full),
        f"chosen {SCATTER if by_share else WHOLE}; inside each host:",
    ]
    return HostsPlan(SCATTER if by_share else WHOLE, inside, *times, tuple(lines))


def faster_sum(nbytes: int, ranks: int, network: Network, machine: Machine) -> str:
    """Return the faster way to add `nbytes` over the hosts, for an op whose times inside a host are not compared.

    Its reduce-scatter and all-reduce inside differ by the gathered data, and by the launch and the exchange of a gather
    of its own.
    """
    gather = gather_us(nbytes, ranks, machine)
    shared = network.all_reduce_us(nbytes / ranks) + gather
    full = network.all_reduce_us(nbytes) + gather - gather_us(0, ranks, machine)
    return SCATTER if shared <= full else WHOLE


def plan_reduce_scatter(nbytes: int, ranks: int, network: Network, inside: FusedConfig) -> HostsPlan:
    """Return the plan of one matmul_reduce_scatter inside each host for each host's rows, then a reduce-scatter across
    hosts."""
    times = network.hosts * _us(inside), network.reduce_scatter_us(nbytes / ranks), 0.0
    lines = [
        _head("matmul_reduce_scatter", network, ranks),
        _line(SCATTER, f"{network.hosts} times matmul_reduce_scatter", times),
        f"chosen {SCATTER}; inside each host, for the part of each:",
    ]
    return HostsPlan(SCATTER, inside, *times, tuple(lines))


def _us(config: FusedConfig) -> float:
    return config.prediction.total_us if config.prediction else 0.0


def _head(op: str, network: Network, ranks: int) -> str:
    return (
        f"{op} over {network.hosts} hosts of {ranks} ranks: between hosts {network.gbs:.3g} GB/s a rank and "
        f"{network.hop_us:.3g} us a message, measured when the context was created"
    )


def _line(way: str, op: str, times: tuple[float, float, float]) -> str:
    inside, across, gather = times
    return (
        f"{way:<14} {op} inside {inside:9.1f} us, across hosts {across:9.1f} us, gather {gather:9.1f} us, "
        f"together {sum(times):9.1f} us"
    )
