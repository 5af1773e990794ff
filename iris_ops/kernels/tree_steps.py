"""The tree of `iris_ops/sum_tree.py` as a kernel follows it: what is known when it is compiled, leaves, and roots.

A program sums leaf after leaf of a tile in one loop over K. Sums that wait do so in memory (`tree_matmul.py` says why),
so that what is added to what is unrolled behind the loop.
"""

from __future__ import annotations

from collections.abc import Iterable

from iris.device import arch
from iris.device.function import device_function
import triton
import triton.language as tl

from .. import sum_tree

_BLOCK = tl.constexpr(sum_tree.BLOCK)


# What is known of the tree when a kernel is compiled: lists as "0,1,0,2" of how many sums each is added to as it comes.


@triton.constexpr_function
def length(text):
    """How many numbers a list has."""
    text = getattr(text, "value", text)
    return text.count(",") + 1 if text else 0


@triton.constexpr_function
def number_at(text, i):
    return int(getattr(text, "value", text).split(",")[getattr(i, "value", i)])


@triton.constexpr_function
def num_lists(text):
    """How many lists there are, one for each root of a rank, as "0,1;0"."""
    text = getattr(text, "value", text)
    return text.count(";") + 1 if text else 0


@triton.constexpr_function
def list_at(text, i):
    return getattr(text, "value", text).split(";")[getattr(i, "value", i)]


@device_function
def joined(value, waiting, JOINS: tl.constexpr):
    """What waits once `value` has come, the last one first: it is added to JOINS of those that wait, each rounded."""
    for _ in tl.static_range(JOINS):
        value = arch.round_to(waiting[0].to(tl.float32) + value.to(tl.float32), value.dtype)
        waiting = waiting[1:]
    return (value,) + waiting


@device_function
def multiply_leaves(
    A, B, sums, row, col, first_leaf, blocks, leaves, OWN: tl.constexpr, dtype: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sum of this rank's last leaf, rounded. Those of the OWN - 1 before it go to `sums`, one tile after the other.

    As [BLOCK_N, BLOCK_M]: the tensor cores' rows are full however few rows A has. Columns that do not fill them are not
    their rows (`tiles.multiply_transposed`): then as [BLOCK_M, BLOCK_N].
    """
    ACROSS: tl.constexpr = BLOCK_N >= 64
    HIGH: tl.constexpr = BLOCK_N if ACROSS else BLOCK_M
    WIDE: tl.constexpr = BLOCK_M if ACROSS else BLOCK_N
    begin = first_leaf * blocks // leaves
    leaf, end = 0, _leaf_end(0, begin, first_leaf, blocks, leaves, OWN)
    total = tl.zeros((HIGH, WIDE), dtype=tl.float32)
    for k in range(0, A.cols, BLOCK_K):
        x = A.load(row, k, BLOCK_M, BLOCK_K)
        y = B.load(k, col, BLOCK_K, BLOCK_N)
        total = arch.dot(y.T, x.T, total) if ACROSS else arch.dot(x, y, total)
        ends = k + BLOCK_K == end
        if ends:
            tl.store(_places(sums, leaf, HIGH, WIDE), arch.round_to(total, dtype))
            leaf += 1
            end = _leaf_end(leaf, begin, first_leaf, blocks, leaves, OWN)
        # a select or a branch would have Triton take the sums out of the instruction's hands, or fail on sm_100
        total = (total.to(tl.int32, bitcast=True) & tl.where(ends, 0, -1)).to(tl.float32, bitcast=True)
    return arch.round_to(total, dtype)


@device_function
def _leaf_end(leaf, begin, first_leaf, blocks, leaves, OWN: tl.constexpr):
    """Where along this rank's K its leaf number `leaf` ends: nowhere if it is the last one (`sum_tree.border`)."""
    end = ((first_leaf + leaf + 1) * blocks // leaves - begin) * _BLOCK
    return tl.where(leaf < OWN - 1, end, -1)


@device_function
def _places(sums, leaf, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """Where the sum of a leaf stands."""
    return sums + leaf * (HIGH * WIDE) + tl.arange(0, HIGH)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]


@device_function
def root_of(sums, last, before, JOINS: tl.constexpr, IS_LAST: tl.constexpr, ACROSS: tl.constexpr):
    """A root, [BLOCK_M, BLOCK_N], of leaves from number `before` on. `last`: the sum of this rank's last leaf."""
    waiting = ()
    for i in tl.static_range(length(JOINS)):
        if IS_LAST and i == length(JOINS) - 1:
            value = last
        else:
            value = tl.load(_places(sums, before + i, last.shape[0], last.shape[1]))
        waiting = joined(value, waiting, number_at(JOINS, i))
    return waiting[0].T if ACROSS else waiting[0]


def tree_constants(tree: sum_tree.Tree, rank: int) -> dict:
    """What a kernel knows of the tree: OWN leaves and roots of a rank, and how all ranks' roots are joined."""
    first, last = tree.spans[rank]
    alone = [sum_tree.joins(size, tuple((i, i + 1) for i in range(size))) for size in _sizes(tree.roots[rank])]
    nodes = tuple(root for found in tree.roots for root in found)
    return dict(
        OWN=last - first,
        OWN_ROOTS=";".join(_text(each) for each in alone),
        JOINS=_text(sum_tree.joins(tree.leaves, nodes)),
        SOURCES=_text(source for source, found in enumerate(tree.roots) for _ in found),
        PAIR=len(tree.spans) <= 2 and all(len(found) == 1 for found in tree.roots),
    )


def _sizes(roots: tuple[sum_tree.Span, ...]) -> list[int]:
    return [last - first for first, last in roots]


def _text(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
