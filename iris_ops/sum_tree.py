"""In which order the products along K are added with `invariant="ranks"`: a tree that depends on K alone.

K is cut into *leaves* of one width, a multiple of 64 up to 256: the widest of which an eighth of K is a multiple and
there are at least 24. Where those are more than 64, an eighth may cut a leaf. The last leaf may be shorter. A leaf is
summed from its first product to its last by one instruction. The leaves' sums are added in fp32. The leaves are halved
three times, the first half the larger one, and each eighth adds its own from the first to the last:

    leaves   0   1   2   3   4   5   6   7   8   9 ...      32 leaves, 2 ranks: rank 0 has 16, rank 1 has 16
             '-+-'   |   |   '-+-'   |   |   '-+-'
               '--+--'   |     '--+--'   |     '--
                  '---+--'        '---+--'
                      '-------+-------'                     rank 0 sends one sum, rank 1 sends one

A rank has a range of leaves, its *share*. It adds up what it can: the *roots* of the largest subtrees that lie in its
share. That is one where a power of two of ranks share K evenly. Where a share begins within an eighth, its leaves there
are roots each. All ranks' roots, joined in the tree's order, give the sum that one rank alone would have found. So bits
do not depend on the ranks.

Few sums wait for others so, and those of a tile that wait need registers: of a whole K four at most, of a half three.

Shares end where leaves end. `share` says how layers cut K; `checked_shares` refuses what cuts a leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from iris.errors import ShapeError

_WIDTHS = 256, 192, 128, 64  # of a leaf, all of whose blocks are on their way to a kernel at a time
_FEWEST, _MOST = 24, 64  # leaves, where an eighth of K is a whole number of them
_MOST_AT_ALL = 256
_HALVES = 3  # how often leaves are halved
# What torch computes on CPUs between two products comes in whole vectors, of up to 64 elements: none is one of a vector
# on one number of ranks and alone, by other code, on another.
_NARROWEST = 64
Span = tuple[int, int]  # leaves from the first to before the second


class Step(NamedTuple):
    """What becomes of a sum behind which `waiting` others wait, as a stack.

    Those from number `place` on are added before it, the last one first, each as the left one of two. What comes out
    `ends` as a root, or waits at `place` for the sum to its right.
    """

    waiting: int
    place: int
    ends: bool


@dataclass(frozen=True)
class Tree:
    """A sum along K: `width` products a leaf, so many `leaves`, and the `spans` of them that ranks have."""

    width: int
    leaves: int
    spans: tuple[Span, ...]

    @property
    def roots(self) -> tuple[tuple[Span, ...], ...]:
        """Each rank's roots."""
        return tuple(roots(self.leaves, span) for span in self.spans)

    @property
    def num_roots(self) -> int:
        return sum(map(len, self.roots))


@lru_cache(maxsize=4096)
def tree_of(what: str, depths: tuple[int, ...]) -> Tree:
    """The tree of ranks that have so many products along K. Raises `ShapeError` where a leaf would be cut."""
    K = sum(depths)
    return Tree(leaf_width(K), leaves_of(K), checked_shares(what, depths))


@lru_cache(maxsize=4096)
def leaf_width(K: int) -> int:
    """How many products a leaf has."""
    for width in _WIDTHS:
        if K % (8 * width) == 0 and _FEWEST * width <= K <= _MOST * width:
            return width
    width = next((each for each in _WIDTHS if _FEWEST * each <= K), _WIDTHS[-1])
    return max(width, -(-K // (_NARROWEST * _MOST_AT_ALL)) * _NARROWEST)


def leaves_of(K: int) -> int:
    """How many leaves there are."""
    return -(-K // leaf_width(K))


def share(K: int, world_size: int, rank: int) -> Span:
    """Which of K's products layers give to a rank: whole leaves, as even as they come, cut as the tree is.

    Ranks are halved with the leaves, so that a power of two of them mostly has one root each.
    """
    first, last, ranks, begin = 0, leaves_of(K), world_size, 0
    while ranks > 1:
        left = (ranks + 1) // 2
        middle = first + ((last - first) * left + ranks // 2) // ranks
        if rank < begin + left:
            last, ranks = middle, left
        else:
            first, begin, ranks = middle, begin + left, ranks - left
    width = leaf_width(K)
    return min(K, first * width), min(K, last * width)


def shares(K: int, world_size: int) -> tuple[int, ...]:
    """How many of K's products each rank has by `share`."""
    return tuple(stop - start for start, stop in (share(K, world_size, rank) for rank in range(world_size)))


def checked_shares(what: str, depths: Sequence[int]) -> tuple[Span, ...]:
    """The leaves of each rank that has so many products along K. Raises `ShapeError` where a leaf would be cut."""
    K = sum(depths)
    width = leaf_width(K)
    ends = [0, *accumulate(depths)]
    if any(end % width and end != K for end in ends):
        raise ShapeError(
            f"{what}: ranks have {', '.join(map(str, depths))} of K = {K}, which cuts a leaf; with invariant='ranks' "
            f"expected parts that end at multiples of {width}, such as {', '.join(map(str, shares(K, len(depths))))}"
        )
    borders = [-(-end // width) for end in ends]
    return tuple(zip(borders[:-1], borders[1:], strict=True))


@lru_cache(maxsize=4096)
def roots(leaves: int, span: Span) -> tuple[Span, ...]:
    """The largest subtrees that lie in `span`, from the first leaf on."""
    found: list[Span] = []

    def visit(node: Span, depth: int) -> None:
        if node[1] <= span[0] or span[1] <= node[0]:
            return
        if span[0] <= node[0] and node[1] <= span[1]:
            found.append(node)
        else:
            middle = _middle(node, depth)
            visit((node[0], middle), depth + 1)
            visit((middle, node[1]), depth + 1)

    if leaves:
        visit((0, leaves), 0)
    return tuple(found)


@lru_cache(maxsize=4096)
def leaf_steps(leaves: int, span: Span) -> tuple[Step, ...]:
    """What becomes of each leaf of a share: its roots end."""
    return _steps(leaves, tuple((i, i + 1) for i in range(*span)), span)


@lru_cache(maxsize=4096)
def root_steps(leaves: int, spans: tuple[Span, ...]) -> tuple[Step, ...]:
    """What becomes of each root of the ranks that have these shares, in order: the last one's end is the sum."""
    nodes = tuple(root for span in spans for root in roots(leaves, span))
    return _steps(leaves, nodes, (0, leaves))


def places(steps: Sequence[Step]) -> int:
    """How many sums wait at most."""
    return max((step.place + 1 for step in steps if not step.ends), default=0)


def _steps(leaves: int, nodes: tuple[Span, ...], span: Span) -> tuple[Step, ...]:
    found, waiting = [], 0
    for node in nodes:
        path = _path(leaves, node)
        depth = until = len(path) - 1
        while until and path[until][1] == path[until - 1][1] and span[0] <= path[until - 1][0]:
            until -= 1
        parent = path[until - 1]
        ends = not until or parent[0] < span[0] or span[1] < parent[1]
        place = waiting - (depth - until)
        found.append(Step(waiting, place, ends))
        waiting = place + (not ends)
    return tuple(found)


def _path(leaves: int, node: Span) -> list[Span]:
    """From the tree's root to a node."""
    path = [(0, leaves)]
    while path[-1] != node:
        first, last = path[-1]
        middle = _middle(path[-1], len(path) - 1)
        path.append((first, middle) if node[1] <= middle else (middle, last))
    return path


def _middle(node: Span, depth: int) -> int:
    """Where the second of a node's two sums begins. An eighth's is its last leaf."""
    if depth >= _HALVES:
        return node[1] - 1
    return node[0] + (node[1] - node[0] + 1) // 2
