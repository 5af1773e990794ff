"""The tree in which products along K are added: the same sum, whoever has which leaves."""

from __future__ import annotations

from itertools import pairwise
import random

from iris.errors import ShapeError
from iris_ops import sum_tree
import pytest


def run(values: list, steps: tuple[sum_tree.Step, ...]) -> list:
    """What ends, of sums written as pairs, by steps as a kernel takes them."""
    waiting, ended = [], []
    for value, step in zip(values, steps, strict=True):
        assert step.waiting == len(waiting)
        while len(waiting) > step.place:
            value = waiting.pop(), value
        if step.ends:
            ended.append(value)
        else:
            waiting.append(value)
        assert len(waiting) <= sum_tree.places(steps)
    assert not waiting
    return ended


def spans_of(leaves: int, ranks: int, rng: random.Random) -> tuple[sum_tree.Span, ...]:
    cuts = sorted(rng.randint(0, leaves) for _ in range(ranks - 1))
    return tuple(pairwise([0, *cuts, leaves]))


def test_any_shares_of_any_ranks_are_joined_to_one_sum():
    rng = random.Random()
    for _ in range(500):
        leaves, ranks = rng.randint(1, 127), rng.randint(1, 8)
        (alone,) = run([*range(leaves)], sum_tree.leaf_steps(leaves, (0, leaves)))
        spans = spans_of(leaves, ranks, rng)
        roots = [root for span in spans for root in run([*range(*span)], sum_tree.leaf_steps(leaves, span))]
        assert run(roots, sum_tree.root_steps(leaves, spans)) == [alone], (leaves, spans)
        assert all(len(sum_tree.roots(leaves, span)) <= 5 + -(-leaves // 8) for span in spans)


def test_the_sum_halves_three_times_and_adds_eighths_leaf_by_leaf():
    def halved(first: int, last: int, depth: int = 0):
        middle = last - 1 if depth == 3 else first + (last - first + 1) // 2
        below = min(depth + 1, 3)
        return first if last - first == 1 else (halved(first, middle, below), halved(middle, last, below))

    for leaves in (1, 2, 3, 7, 24, 29, 32, 48, 112, 208):
        steps = sum_tree.leaf_steps(leaves, (0, leaves))
        assert run([*range(leaves)], steps) == [halved(0, leaves)]
        assert sum_tree.places(steps) <= 4 and sum_tree.places(sum_tree.leaf_steps(leaves, (0, leaves // 2))) <= 3


def test_leaves_depend_on_the_whole_depth_alone_and_are_few():
    for K in (1, 63, 64, 576, 1536, 4095, 4096, 5120, 8192, 11008, 14336, 18944, 25600, 28672, 53248):
        width, leaves = sum_tree.leaf_width(K), sum_tree.leaves_of(K)
        assert width % 64 == 0 and leaves <= 256 and (leaves - 1) * width < K <= leaves * width
        for ranks in range(1, 9):
            shares = sum_tree.shares(K, ranks)
            tree = sum_tree.tree_of("a test", shares)
            assert sum(shares) == K and tree.leaves == leaves
            held = [last - first for first, last in tree.spans]
            assert max(held) <= -(-leaves // ranks) + 1, f"{K} on {ranks} ranks: {held}"


@pytest.mark.parametrize("K", [4096, 5120, 8192, 11008, 14336, 18944, 25600, 28672])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_that_halve_as_the_tree_does_have_one_root_each(K, ranks):
    tree = sum_tree.tree_of("a test", sum_tree.shares(K, ranks))
    assert [len(each) for each in tree.roots] == [1] * ranks


def test_a_share_that_cuts_a_leaf_is_refused_with_those_that_do_not():
    with pytest.raises(ShapeError, match=r"a test: ranks have 100, 156 of K = 256.*multiples of 64, such as 128, 128"):
        sum_tree.checked_shares("a test", (100, 156))
    assert sum_tree.checked_shares("a test", (0, 192, 8)) == ((0, 0), (0, 3), (3, 4))
