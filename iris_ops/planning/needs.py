"""What a problem needs of a way, beside its sizes: the format of weights, the order of sums, the epilogue.

Each is an object of a small table. A problem has one of each kind, a way lists those that it serves, and the engine
intersects. To add one: an object here, and its name in the ways that serve it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightFormat:
    """How B is stored. `itemsize`: bytes of an element; 0: as A's."""

    name: str
    itemsize: int = 0
    rounds_rows: bool = False
    """Whether rows of A are rounded to the same format before they are multiplied."""

    @property
    def rounding(self) -> str:
        """What a trace says of a way that multiplies rounded rows."""
        return f"rows rounded to {self.name.removeprefix('in ')}"


PLAIN = WeightFormat("in A's dtype")
EIGHT_BITS = WeightFormat("in eight bits", 1, rounds_rows=True)


@dataclass(frozen=True)
class Sums:
    """Which results of a row have the same bits."""

    name: str


ANY_ORDER = Sums("in any order")
ROWS_ALIKE = Sums("alike at any number of rows")
RANKS_ALIKE = Sums("alike on any number of ranks")


@dataclass(frozen=True)
class Epilogue:
    """What follows the sum of a call."""

    name: str


GATE = Epilogue("gate")
NORM = Epilogue("norm")
