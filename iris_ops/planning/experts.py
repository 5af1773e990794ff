"""The experts of a mixture, as a part of a problem: how many there are, and which rows of a product each has."""

from __future__ import annotations

from dataclasses import dataclass

from ..quantised.packing import LINE, PACKINGS
from .needs import PLAIN, WeightFormat

MOST_EXPERTS = 4096
MOST_CHOSEN = 64  # experts of a token


@dataclass(frozen=True)
class Experts:
    """`count` experts, of which each row has `top_k`. A product without a mixture has one, which all rows share."""

    count: int = 1
    top_k: int = 1
    in_rows: bool = False
    """Whether an expert's weight lies [K, N] in memory; else its transpose does, as transformers stores most."""

    def touched(self, pairs: int) -> float:
        """Return how many experts have rows, if each were as likely as the next one."""
        return self.count * (1 - (1 - 1 / max(1, self.count)) ** pairs)

    def blocks(self, pairs: int, block_m: int) -> int:
        """Return the blocks of rows at most, each of one expert's, whatever the routing."""
        return pairs // block_m + min(self.count, pairs)


ONE_EXPERT = Experts()


def lies_by_lines(weights: WeightFormat) -> bool:
    """Return whether an element of a stored weight has entries of a whole line of 128, not only of one place."""
    return weights is not PLAIN and PACKINGS[weights.packing].by_lines(weights.group or None)


def least_k(weights: WeightFormat) -> int:
    """Return the least depth of a tile: codes that lie by lines are widened by lines."""
    return LINE if lies_by_lines(weights) else 1
