"""Define the levels of equal bits that users request, and the sums that satisfy them.

A level is an object; `LEVELS` of `iris/invariance.py` names those that there are, and `ctx.level` is a context's. It
decides all that depends on the promise: what it refuses, the `Sums` of each problem, whose `kind` ways list in `sums`
where they keep it, how layers cut what ranks sum, and whether functions without an exchange keep one order. Other
modules call its methods and do not ask which level it is. To add one: an object, its line in `LEVELS`, and a way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from iris.errors import ArgumentError

from .. import sum_tree
from .needs import PLAIN

ANY_ORDER = "in any order"
ROWS_ALIKE = "alike at any number of rows"
RANKS_ALIKE = "alike on any number of ranks"


@dataclass(frozen=True)
class Level:
    """A level of `iris.iris(invariant=...)`. This class keeps a row's bits at any number of rows."""

    name: str | None
    kind: str = ROWS_ALIKE
    portable: bool = False
    """Whether bits are the same on any number of ranks. Then all configurations, a user's too, sum in one order."""
    rows_alike: bool = True
    """Whether functions without an exchange add up a row in one order, among any number of rows."""

    @property
    def text(self) -> str:
        """Return the argument that requests the level, for messages."""
        return f"invariant={self.name!r}"

    @property
    def unrounded_parts(self) -> str:
        """Return why no rank may round its part of a sum in its own way, for messages; "" if it may."""
        return self.text if self.portable else ""

    def refuses(self, problem: Any) -> str | None:
        """Return the reason why the level promises nothing of such a problem, or None."""
        return None

    def promise(self, problem: Any, k_per_rank: Sequence[int] | None = None, biased: bool = False) -> Any:
        """Return `problem` with what the level promises of it.

        `k_per_rank`: each rank's K; None if all are equal. `biased`: whether the call has a bias.

        Raises `ArgumentError` or `ShapeError` where the promise cannot be kept.
        """
        if reason := self.refuses(problem):
            raise ArgumentError(f"{problem.called_op}: {reason}")
        if k_per_rank is not None:
            known = isinstance(k_per_rank, Sequence) and all(type(k) is int and k >= 0 for k in k_per_rank)
            if not known or len(k_per_rank) != problem.world_size:
                raise ArgumentError(
                    f"{problem.called_op}: k_per_rank is {k_per_rank!r}; expected {problem.world_size} integers"
                    " from 0, each rank's K"
                )
        return replace(problem, sums=self.sums(problem, k_per_rank, biased))

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

    def shares(self, K: int, world_size: int) -> tuple[int, ...] | None:
        """Return each rank's part of a dimension that ranks sum over; None where parts are those of torch.chunk."""
        return None

    def k_per_rank(self, what: str, shares: tuple[int, ...], world_size: int) -> tuple[int, ...] | None:
        """Return the K of each rank that the sums of a layer need, of its `shares`; None if they need none.

        Raises `ArgumentError` or `ShapeError` where the sums of such shares would differ by the number of ranks.
        """
        return None


class _Free(Level):
    """No level: sums have the order that is fastest."""

    def sums(self, problem: Any, k_per_rank: Sequence[int] | None, biased: bool) -> Sums:
        return FREE_SUMS


class _Ranks(Level):
    """The level that keeps a row's bits on any number of ranks, too: sums over ranks are those of a tree
    (`sum_tree.py`)."""

    def refuses(self, problem: Any) -> str | None:
        if not problem.operation.portable:
            return f"the context has {self.text}, which mixtures of experts do not support; expected 'batch' or None"
        if problem.weights is PLAIN or not problem.weights.by_rank:
            return None
        return (
            f"B is {problem.weights.name}, whose scales go by the rank; with {self.text} expected weights in 16"
            " bits or float32"
        )

    def sums(self, problem: Any, k_per_rank: Sequence[int] | None, biased: bool) -> Sums:
        if not problem.operation.sums:
            return Sums(ROWS_ALIKE, self)
        shares = (problem.K,) * problem.world_size if k_per_rank is None else tuple(k_per_rank)
        sum_tree.tree_of(f"{problem.called_op} with {self.text}", shares)  # raises unless leaves are whole
        return Sums(RANKS_ALIKE, self, shares, biased)

    def counted(self, problem: Any) -> str:
        return "rows and ranks"

    def best(self, orders: Sequence[Any], us: Callable[[Any], float]) -> Any:
        """Return the preferred order: which one is fastest depends on the ranks, so times do not count."""
        return min(orders, key=lambda order: order.preference, default=None)

    def without_order(self, problem: Any) -> str | None:
        return (
            f"{problem.world_size} ranks' parts of K = {problem.K} begin within a block; with {self.text}"
            " expected parts of whole blocks, or A gathered by rows"
        )

    def shares(self, K: int, world_size: int) -> tuple[int, ...] | None:
        return sum_tree.shares(K, world_size)

    def k_per_rank(self, what: str, shares: tuple[int, ...], world_size: int) -> tuple[int, ...] | None:
        if len(shares) != world_size:
            raise ArgumentError(
                f"parts of {what} do not give the size of each of the {world_size} ranks: with {self.text} expected "
                "None, or one Shard with rank_sizes"
            )
        sum_tree.checked_shares(f"{what} with {self.text}", shares)
        return shares


FREE = _Free(None, ANY_ORDER, rows_alike=False)
BATCH = Level("batch")
RANKS = _Ranks("ranks", RANKS_ALIKE, portable=True)


@dataclass(frozen=True)
class Sums:
    """The promise which results of a row have the same bits; ways list its `kind`.

    `level`: that promises them. `k_per_rank`: each rank's K, of sums that are alike on any number of ranks; else empty.
    `biased`: whether a bias follows the ranks' sum, of which bits are promised.
    """

    kind: str = ANY_ORDER
    level: Level = FREE
    k_per_rank: tuple[int, ...] = ()
    biased: bool = False

    @property
    def promised(self) -> bool:
        """Return whether any bits are promised; then a plan takes tiles of one order only, which it finds first."""
        return self.level.name is not None

    @property
    def on_any_ranks(self) -> bool:
        """Return whether the bits are promised on any number of ranks."""
        return self.level.portable

    @property
    def tree(self) -> sum_tree.Tree | None:
        """Return the tree in which the ranks add up products along K (`sum_tree.py`), or None."""
        return sum_tree.tree_of("", self.k_per_rank) if self.k_per_rank else None


FREE_SUMS = Sums()
