"""The tree in which products along K are added gives the same sum for any distribution of leaves over ranks."""

from __future__ import annotations

from itertools import pairwise
import random

from iris.errors import ShapeError
from iris_ops import sum_tree
import pytest

SIZES = 1, 63, 64, 576, 896, 960, 1536, 2880, 4095, 4096, 5120, 8192, 11008, 14336, 18944, 25600, 28672, 53248


def run(values: list, leaves: int, parts: tuple[sum_tree.Span, ...]):
    """The sum of parts of a tree, written as pairs, as a kernel adds them."""
    waiting: list = []
    for value, count in zip(values, sum_tree.joins(leaves, parts), strict=True):
        for _ in range(count):
            value = waiting.pop(), value
        waiting.append(value)
    (total,) = waiting
    return total


def alone(first: int, last: int):
    """What a subtree of leaves `first` to before `last` is, as pairs."""
    singles = tuple((i, i + 1) for i in range(last - first))
    return run([*range(first, last)], last - first, singles)


def spans_of(leaves: int, ranks: int, rng: random.Random) -> tuple[sum_tree.Span, ...]:
    cuts = sorted(rng.randint(0, leaves) for _ in range(ranks - 1))
    return tuple(pairwise([0, *cuts, leaves]))


def test_any_shares_of_any_ranks_are_joined_to_one_sum():
    rng = random.Random()
    for _ in range(500):
        leaves, ranks = rng.randint(1, 31), rng.randint(1, 8)
        spans = spans_of(leaves, ranks, rng)
        roots = tuple(root for span in spans for root in sum_tree.roots(leaves, span))
        assert [leaf for first, last in roots for leaf in range(first, last)] == [*range(leaves)]
        assert run([alone(*root) for root in roots], leaves, roots) == alone(0, leaves), (leaves, spans)


@pytest.mark.parametrize("K", SIZES)
def test_leaves_depend_on_the_whole_depth_alone_are_even_and_few(K):
    leaves = sum_tree.leaves_of(K)
    borders = [sum_tree.border(K, leaf) for leaf in range(leaves + 1)]
    widths = [after - before for before, after in pairwise(borders)]
    assert borders[0] == 0 and borders[-1] == K and min(widths) > 0
    assert leaves == 8 or (leaves < 32 and max(widths) <= 64)
    assert all(edge % 64 == 0 for edge in borders[:-1]) and max(widths[:-1] or [0]) - min(widths[:-1] or [0]) <= 64
    for ranks in range(1, 9):
        shares = sum_tree.shares(K, ranks)
        tree = sum_tree.tree_of("a test", shares)
        assert sum(shares) == K and tree.leaves == leaves
        held = [last - first for first, last in tree.spans]
        assert max(held) <= -(-leaves // ranks) + 1, f"{K} on {ranks} ranks: {held}"
        assert all(edge % tree.depth == 0 for edge in borders[:-1])


# query heads, heads of keys, a head's width: Llama-3, Qwen, SmolLM2
HEADS = [(32, 8, 128), (64, 8, 128), (32, 8, 64), (28, 4, 128), (14, 2, 64), (9, 3, 64), (15, 5, 64), (40, 8, 128)]


@pytest.mark.parametrize(("heads", "groups", "width"), HEADS)
def test_whole_heads_end_where_leaves_do(heads, groups, width):
    from layers.shard import split_heads

    for ranks in (1, 2, 3, 4):
        counts = split_heads(heads, groups, ranks, 0).counts
        sum_tree.checked_shares(f"{heads} heads on {ranks} ranks", [count * width for count in counts])


def test_a_share_that_cuts_a_leaf_is_refused_with_those_that_do_not():
    with pytest.raises(ShapeError, match=r"a test: ranks have 100, 156 of K = 256.*end at 64, 128, 192, such as 128, "):
        sum_tree.checked_shares("a test", (100, 156))
    assert sum_tree.checked_shares("a test", (0, 192, 8)) == ((0, 0), (0, 3), (3, 4))
