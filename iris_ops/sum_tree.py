"""Define an order in which ranks add products along K: a tree that depends on K alone, on any number of ranks.

K is cut into eight *leaves*, each a multiple of 64 as even as they come. Where K is below 2048 and no multiple of 512 a
leaf is 64 products instead, so that heads of any number end where leaves do. The last leaf may be shorter. One
instruction sums a leaf from its first product to its last, in fp32. Leaves are halved until each half is one leaf, the
first half the larger one, and the sums of two halves are added in fp32. Every sum is rounded to the tensors' dtype, a
leaf's and that of two halves alike:

    leaves   0   1   2   3   4   5   6   7      2 ranks: leaves 0 to 3 and 4 to 7; each sends one sum
             '-+-'   '-+-'   '-+-'   '-+-'      3 ranks: leaves 0 to 2, 3 to 4 and 5 to 7; each sends two
               '---+---'       '---+---'
                   '-------+-------'

A rank has a range of leaves, its *share*. It adds up what it can: the *roots* of the largest subtrees that lie in its
share. That is one where two, four or eight ranks share K evenly. All ranks' roots, joined in the tree's order, give the
sum that one rank alone would have found. So bits do not depend on the ranks, and a root has no more bytes than what
ranks send each other anyway.

Shares end where leaves end. `share` says how layers cut K; `checked_shares` refuses what cuts a leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import gcd

from iris.errors import ShapeError

LEAVES = 8
# Products that a leaf is a multiple of. What torch computes on CPUs between two products comes in whole vectors, of up
# to 64 elements: none is one of a vector on one number of ranks and alone, by other code, on another.
BLOCK = 64
_SMALL = 32  # blocks, below which each is a leaf where eight leaves would not be of one width
Span = tuple[int, int]  # leaves from the first to before the second


@dataclass(frozen=True)
class Tree:
    """A sum along K in `leaves` leaves, and the `spans` of them that ranks have."""

    K: int
    leaves: int
    spans: tuple[Span, ...]

    @property
    def roots(self) -> tuple[tuple[Span, ...], ...]:
        """Return each rank's roots."""
        return tuple(roots(self.leaves, span) for span in self.spans)

    @property
    def num_roots(self) -> int:
        return sum(map(len, self.roots))

    @property
    def halved(self) -> bool:
        """Return whether there are two ranks, each of which has half of the leaves."""
        return [last - first for first, last in self.spans] == [LEAVES // 2] * 2

    @property
    def depth(self) -> int:
        """Return the number that divides the sizes of all leaves but a last one: the greatest depth of a kernel's
        blocks."""
        return gcd(*(border(self.K, leaf) for leaf in range(1, self.leaves))) or max(1, blocks_of(self.K)) * BLOCK


@lru_cache(maxsize=4096)
def tree_of(what: str, k_per_rank: tuple[int, ...]) -> Tree:
    """Return the tree of ranks with these products along K. Raises `ShapeError` where a leaf would be cut."""
    K = sum(k_per_rank)
    return Tree(K, leaves_of(K), checked_shares(what, k_per_rank))


def blocks_of(K: int) -> int:
    """Return how many blocks of 64 products there are, the last one maybe short."""
    return -(-K // BLOCK)


def leaves_of(K: int) -> int:
    """Return how many leaves there are."""
    blocks = blocks_of(K)
    return LEAVES if blocks >= _SMALL or blocks and blocks % LEAVES == 0 else blocks


def border(K: int, leaf: int) -> int:
    """Return where leaf number `leaf` begins, and the one before it ends."""
    return min(K, leaf * blocks_of(K) // max(1, leaves_of(K)) * BLOCK)


def share(K: int, world_size: int, rank: int) -> Span:
    """Return which of K's products layers give to a rank: whole leaves, as even as they come, cut as the tree is.

    Ranks are halved with the leaves, so that a power of two of them mostly has one root each.
    """
    first, last, ranks, begin = 0, leaves_of(K), world_size, 0
    while ranks > 1:
        lower = (ranks + 1) // 2
        middle = first + ((last - first) * lower + ranks // 2) // ranks
        if rank < begin + lower:
            last, ranks = middle, lower
        else:
            first, begin, ranks = middle, begin + lower, ranks - lower
    return border(K, first), border(K, last)


def shares(K: int, world_size: int) -> tuple[int, ...]:
    """Return how many of K's products each rank has by `share`."""
    return tuple(stop - start for start, stop in (share(K, world_size, rank) for rank in range(world_size)))


def checked_shares(what: str, k_per_rank: Sequence[int]) -> tuple[Span, ...]:
    """Return the leaves of each rank, from each rank's products along K. Raises `ShapeError` where a leaf would be
    cut."""
    K = sum(k_per_rank)
    borders = {border(K, leaf): leaf for leaf in range(leaves_of(K) + 1)}
    ends = [0, *accumulate(k_per_rank)]
    if not all(end in borders for end in ends):
        possible, shared = ", ".join(map(str, sorted(borders)[1:-1])), ", ".join(map(str, shares(K, len(k_per_rank))))
        raise ShapeError(
            f"{what}: ranks have {', '.join(map(str, k_per_rank))} of K = {K}, which cuts a leaf; expected"
            f" parts that end at {possible or 'all of K'}, such as {shared}"
        )
    return tuple(pairwise(borders[end] for end in ends))


@lru_cache(maxsize=4096)
def roots(leaves: int, span: Span) -> tuple[Span, ...]:
    """Return the largest subtrees that lie in `span`, from the first leaf on."""
    result: list[Span] = []

    def visit(node: Span) -> None:
        if node[1] <= span[0] or span[1] <= node[0]:
            return
        if span[0] <= node[0] and node[1] <= span[1]:
            result.append(node)
        else:
            middle = _middle(node)
            visit((node[0], middle))
            visit((middle, node[1]))

    if leaves:
        visit((0, leaves))
    return tuple(result)


@lru_cache(maxsize=4096)
def joins(leaves: int, parts: tuple[Span, ...]) -> tuple[int, ...]:
    """Return, for each of `parts`, with how many earlier sums it is joined, the latest of them first.

    `parts`: the subtrees into which a tree is cut, in order. Sums that wait for a later part form a stack. A part is
    the right one of the two that are added, and the last part leaves one sum on the stack.
    """
    counts, waiting = [], 0
    for part in parts:
        path = _path(leaves, part)
        count = 0
        while path[-1 - count] != (0, leaves) and path[-1 - count][1] == path[-2 - count][1]:
            count += 1
        assert count <= waiting, "parts follow each other from the first leaf on"
        counts.append(count)
        waiting += 1 - count
    return tuple(counts)


def _path(leaves: int, node: Span) -> list[Span]:
    """Return the path from the tree's root to a node."""
    path = [(0, leaves)]
    while path[-1] != node:
        first, last = path[-1]
        middle = _middle(path[-1])
        path.append((first, middle) if node[1] <= middle else (middle, last))
    return path


def _middle(node: Span) -> int:
    """Return where the second of a node's two halves begins; nodes of one size are halved alike, wherever they are."""
    return node[0] + (node[1] - node[0] + 1) // 2
