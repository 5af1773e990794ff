"""Define the levels of equal bits that users request, and the sums that satisfy them.

A level is an object; `LEVELS` of `iris/invariance.py` names those that there are. It promises `Sums` of each problem,
whose `kind` ways list in `sums` where they keep it. To add one: an object, its line in `LEVELS`, and a way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pkgutil import resolve_name
from typing import Any

from iris import invariance
from iris.errors import ArgumentError

from .. import sum_tree
from .needs import PLAIN

ANY_ORDER = "in any order"
ROWS_ALIKE = "alike at any number of rows"
RANKS_ALIKE = "alike on any number of ranks"


@dataclass(frozen=True)
class Level:
    """A level of `iris.iris(invariant=...)`. This class keeps a row's bits at any number of rows."""

    name: str
    kind: str = ROWS_ALIKE
    portable: bool = False
    """Whether bits are the same on any number of ranks. Then all configurations, a user's too, sum in one order."""

    def refuses(self, problem: Any) -> str | None:
        """Return the reason why the level promises nothing of such a problem, or None."""
        return None

    def sums(self, problem: Any, k_per_rank: Sequence[int] | None, biased: bool) -> Sums:
        """Return what is promised of a problem. `k_per_rank`: each rank's K, None if all are equal."""
        return Sums(self.kind, self, biased=biased and problem.operation.sums)

    def counted(self, problem: Any) -> str:
        """Return the name of the counts on which a row's bits do not depend."""
        return problem.operation.counted

    def best(self, orders: Sequence[Any], us: Callable[[Any], float]) -> Any:
        """Return the order that all sums take, of those that serve any number of rows; None of none.

        `us`: the mean time of an order, relative to the fastest.
        """
        return min(orders, key=us, default=None)

    def without_order(self, problem: Any) -> str | None:
        """Return the reason why no order serves a problem, where the level knows one."""
        return None


class _Ranks(Level):
    """The level that keeps a row's bits on any number of ranks, too: sums over ranks are those of a tree
    (`sum_tree.py`)."""

    def refuses(self, problem: Any) -> str | None:
        if not problem.operation.portable:
            return (
                "the context has invariant='ranks', which mixtures of experts do not support; expected 'batch' or None"
            )
        if problem.weights is PLAIN or not problem.weights.by_rank:
            return None
        return (
            f"B is {problem.weights.name}, whose scales go by the rank; with invariant='ranks' expected weights in 16"
            " bits or float32"
        )

    def sums(self, problem: Any, k_per_rank: Sequence[int] | None, biased: bool) -> Sums:
        if not problem.operation.sums:
            return Sums(ROWS_ALIKE, self)
        shares = (problem.K,) * problem.world_size if k_per_rank is None else tuple(k_per_rank)
        sum_tree.tree_of(problem.called_op, shares)  # raises unless leaves are whole
        return Sums(RANKS_ALIKE, self, shares, biased)

    def counted(self, problem: Any) -> str:
        return "rows and ranks"

    def best(self, orders: Sequence[Any], us: Callable[[Any], float]) -> Any:
        """Return the preferred order: which one is fastest depends on the ranks, so times do not count."""
        return min(orders, key=lambda order: order.preference, default=None)

    def without_order(self, problem: Any) -> str | None:
        return (
            f"{problem.world_size} ranks' parts of K = {problem.K} begin within a block; with invariant='ranks'"
            " expected parts of whole blocks, or A gathered by rows"
        )


BATCH = Level("batch")
RANKS = _Ranks("ranks", RANKS_ALIKE, portable=True)


@lru_cache
def level_of(name: str | None) -> Level | None:
    """Return the level of a context's `invariant`; None without one."""
    return None if name is None else resolve_name(invariance.LEVELS[name])


@dataclass(frozen=True)
class Sums:
    """The promise which results of a row have the same bits; ways list its `kind`.

    `level`: that promises them. `k_per_rank`: each rank's K, of sums that are alike on any number of ranks; else empty.
    `biased`: whether a bias follows the ranks' sum, of which bits are promised.
    """

    kind: str = ANY_ORDER
    level: Level | None = None
    k_per_rank: tuple[int, ...] = ()
    biased: bool = False

    @property
    def promised(self) -> bool:
        """Return whether any bits are promised; then a plan takes tiles of one order only, which it finds first."""
        return self.level is not None

    @property
    def on_any_ranks(self) -> bool:
        """Return whether the bits are promised on any number of ranks."""
        return self.level is not None and self.level.portable

    @property
    def tree(self) -> sum_tree.Tree | None:
        """Return the tree in which the ranks add up products along K (`sum_tree.py`), or None."""
        return sum_tree.tree_of("", self.k_per_rank) if self.k_per_rank else None


FREE_SUMS = Sums()


def promised(problem: Any, invariant: str | None, k_per_rank: Sequence[int] | None, biased: bool = False) -> Any:
    """Return `problem` with what the level `invariant` promises of it.

    `k_per_rank`: each rank's K; None if all are equal. `biased`: whether the call has a bias.

    Raises `ArgumentError` or `ShapeError` where the promise cannot be kept.
    """
    level = level_of(invariant)
    if level and (reason := level.refuses(problem)):
        raise ArgumentError(f"{problem.called_op}: {reason}")
    if k_per_rank is not None:
        known = isinstance(k_per_rank, Sequence) and all(type(k) is int and k >= 0 for k in k_per_rank)
        if not known or len(k_per_rank) != problem.world_size:
            raise ArgumentError(
                f"{problem.called_op}: k_per_rank is {k_per_rank!r}; expected {problem.world_size} integers"
                " from 0, each rank's K"
            )
    return replace(problem, sums=level.sums(problem, k_per_rank, biased)) if level else problem
