"""Policies of `lamport_matmul.py`: the order in which a rank's products along K, and all ranks' sums, are added.

A kernel creates one of these policies, which decides all that depends on the order:

    RankOrder    a rank sums its K at once; then all ranks' sums are added in rank order
    TreeOrder    a rank sums leaves of `iris_ops/sum_tree.py`; then all ranks' roots are joined in the tree's order

    multiply     the sums that this rank has of a tile, as [BLOCK_M, BLOCK_N] or transposed
    BLOCKS       how many blocks of values this rank sends
    block        the values of one of them
    exchange     the `Exchange` in which it is sent
    sum          what all ranks have sent to a place, added up

A program of `TreeOrder` sums leaf after leaf of a tile in one loop over K, whose loads never pause. Sums that wait do
so in memory of the program's own, which L2 holds. In registers they would take a tile each, and the compiler would
exchange them through shared memory at each leaf's end. So what is added to what is unrolled after the loop.
"""

from collections.abc import Iterable

from iris.device import arch
from iris.device.function import device_function
from iris.device.lamport import take
from iris.triton_private import aggregate, base_value
import triton
import triton.language as tl

from .. import sum_tree
from .arguments import TreeSums
from .lamport_steps import block_exchange, exchange_of
from .tiles import known, multiply_blocks, multiply_transposed

_BLOCK = tl.constexpr(sum_tree.BLOCK)


# What is known of the tree when a kernel is compiled: lists as "0,1,0,2" of how many sums each is added to as it comes.


@triton.constexpr_function
def length(text):
    """Return the number of items in a list."""
    text = getattr(text, "value", text)
    return text.count(",") + 1 if text else 0


@triton.constexpr_function
def number_at(text, i):
    return int(getattr(text, "value", text).split(",")[getattr(i, "value", i)])


@triton.constexpr_function
def list_at(text, i):
    """List number i of those of a rank's roots, as "0,1;0"."""
    return getattr(text, "value", text).split(";")[getattr(i, "value", i)]


@triton.constexpr_function
def leaves_before(text, i):
    """Return the number of leaves of the roots before number i."""
    text, i = getattr(text, "value", text), getattr(i, "value", i)
    return sum(each.count(",") + 1 for each in text.split(";")[:i])


@device_function
def joined(value, waiting, JOINS: tl.constexpr):
    """Add `value` to JOINS of the waiting sums, the last one first, rounding each; return those that still wait."""
    for _ in tl.static_range(JOINS):
        value = arch.round_to(waiting[0].to(tl.float32) + value.to(tl.float32), value.dtype)
        waiting = waiting[1:]
    return (value,) + waiting


@device_function
def _places(sums, leaf, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """Return pointers to the sum of a leaf."""
    return sums + leaf * (HIGH * WIDE) + tl.arange(0, HIGH)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]


@aggregate
class RankOrder:
    """A rank sends one block, the product of its K; sums begin with rank 0's.

    `scales`: of B's columns and blocks along K, rows `stride` apart; None where B has none.
    """

    scales: base_value
    stride: base_value
    SCALED: tl.constexpr
    BLOCKS: tl.constexpr

    @triton.constexpr_function
    def __init__(self, scales, stride):
        self.SCALED = known(scales is not None)
        self.scales = tl.constexpr(None) if scales is None else scales
        self.stride = tl.constexpr(None) if stride is None else known(stride)
        self.BLOCKS = tl.constexpr(1)

    @device_function
    def multiply(self, A, B, row, col, dtype: tl.constexpr, tile: tl.constexpr):
        """Return the tile of `A @ B` at (row, col), transposed, in fp32."""
        if self.SCALED:
            return multiply_blocks(A, B, self.scales, self.stride, row, col, A.cols, tile)
        else:
            return multiply_transposed(A, B, row, col, A.cols, tile)

    @device_function
    def block(self, product, number: tl.constexpr, tile: tl.constexpr):
        return product.T

    @device_function
    def exchange(self, ctx, bases, epoch, lamport, part_rows, number: tl.constexpr, WAITER: tl.constexpr):
        return exchange_of(ctx, bases, epoch, lamport, part_rows, WAITER)

    @device_function
    def sum(self, exchange, place, mask, dtype: tl.constexpr, own=None):
        """Return (the sum in fp32, whether all values came in time).

        `own` holds this rank's values, if it has not sent them to itself.
        """
        return exchange.sum_all(place, mask, dtype, own)


@aggregate
class TreeOrder:
    """A rank sends a block for each of its roots, from number `first_root` of all ranks' on.

    `sums`: where the program puts those of its OWN leaves, from number `first_leaf` on, of `leaves` in `blocks` blocks.
    """

    sums: base_value
    first_leaf: base_value
    first_root: base_value
    blocks: base_value
    leaves: base_value
    OWN: tl.constexpr
    OWN_ROOTS: tl.constexpr
    JOINS: tl.constexpr
    SOURCES: tl.constexpr
    PAIR: tl.constexpr
    BLOCKS: tl.constexpr

    @triton.constexpr_function
    def __init__(self, sums, first_leaf, first_root, blocks, leaves, SUMS):
        known_sums = getattr(SUMS, "value", SUMS)
        self.sums, self.first_leaf, self.first_root = sums, first_leaf, first_root
        self.blocks, self.leaves = known(blocks), known(leaves)
        self.OWN, self.OWN_ROOTS = tl.constexpr(known_sums.OWN), tl.constexpr(known_sums.OWN_ROOTS)
        self.JOINS, self.SOURCES = tl.constexpr(known_sums.JOINS), tl.constexpr(known_sums.SOURCES)
        self.PAIR = tl.constexpr(known_sums.PAIR)
        self.BLOCKS = tl.constexpr(known_sums.OWN_ROOTS.count(";") + 1 if known_sums.OWN_ROOTS else 0)

    @device_function
    def multiply(self, A, B, row, col, dtype: tl.constexpr, tile: tl.constexpr):
        """Return the sum of this rank's last leaf, rounded, and store those of the OWN - 1 leaves before it in `sums`.

        The sum is [BLOCK_N, BLOCK_M], which fills the tensor cores' rows however few rows A has. If the columns do not
        fill them (`tiles.multiply_transposed`), it is [BLOCK_M, BLOCK_N].
        """
        ACROSS: tl.constexpr = tile.BLOCK_N >= 64
        HIGH: tl.constexpr = tile.BLOCK_N if ACROSS else tile.BLOCK_M
        WIDE: tl.constexpr = tile.BLOCK_M if ACROSS else tile.BLOCK_N
        begin = self.first_leaf * self.blocks // self.leaves
        leaf, end = 0, self.leaf_end(0, begin)
        total = tl.zeros((HIGH, WIDE), dtype=tl.float32)
        for k in range(0, A.cols, tile.BLOCK_K):
            x = A.load(row, k, tile.BLOCK_M, tile.BLOCK_K)
            y = B.load(k, col, tile.BLOCK_K, tile.BLOCK_N)
            total = arch.dot(y.T, x.T, total) if ACROSS else arch.dot(x, y, total)
            ends = k + tile.BLOCK_K == end
            if ends:
                tl.store(_places(self.sums, leaf, HIGH, WIDE), arch.round_to(total, dtype))
                leaf += 1
                end = self.leaf_end(leaf, begin)
            # a select or a branch would have Triton take the sums out of the instruction's hands, or fail on sm_100
            total = (total.to(tl.int32, bitcast=True) & tl.where(ends, 0, -1)).to(tl.float32, bitcast=True)
        if self.OWN > 1:
            tl.debug_barrier()  # all threads have put by what they had
        return arch.round_to(total, dtype)

    @device_function
    def leaf_end(self, leaf, begin):
        """Return where leaf number `leaf` ends along this rank's K; the last leaf has no end (`sum_tree.border`)."""
        end = ((self.first_leaf + leaf + 1) * self.blocks // self.leaves - begin) * _BLOCK
        return tl.where(leaf < self.OWN - 1, end, -1)

    @device_function
    def block(self, last, number: tl.constexpr, tile: tl.constexpr):
        """Return root number `number` of this rank, in fp32. `last` is the sum of its last leaf."""
        JOINS: tl.constexpr = list_at(self.OWN_ROOTS, number)
        FIRST: tl.constexpr = leaves_before(self.OWN_ROOTS, number)
        waiting = ()
        for i in tl.static_range(length(JOINS)):
            if number == self.BLOCKS - 1 and i == length(JOINS) - 1:
                value = last
            else:
                value = tl.load(_places(self.sums, FIRST + i, last.shape[0], last.shape[1]))
            waiting = joined(value, waiting, number_at(JOINS, i))
        root = waiting[0].T if tile.BLOCK_N >= 64 else waiting[0]
        return root.to(tl.float32)

    @device_function
    def exchange(self, ctx, bases, epoch, lamport, part_rows, number: tl.constexpr, WAITER: tl.constexpr):
        count: tl.constexpr = length(self.JOINS)
        return block_exchange(ctx, bases, epoch, lamport, part_rows, self.first_root + number, count, WAITER)

    @device_function
    def sum(self, exchange, place, mask, dtype: tl.constexpr, own=None):
        """Return (the sum of all ranks' roots, rounded, in fp32, whether all came in time).

        `own` holds this rank's root, if it has not sent it to itself. If one or two ranks have a root each (`PAIR`),
        both are polled together.
        """
        if self.PAIR:
            total, ok = exchange.sum_all(place, mask, dtype, own)
            total = arch.round_to(total, dtype)
        else:
            waiting, ok = (), True
            for i in tl.static_range(length(self.JOINS)):
                value, came = take(
                    exchange.ctx, exchange.buffer + i * exchange.step + place, 0, mask, number_at(self.SOURCES, i),
                    exchange.epoch, exchange.WAITER, dtype, 1,
                )  # fmt: skip
                waiting = joined(arch.round_to(value, dtype), waiting, number_at(self.JOINS, i))
                ok = ok & came
            total = waiting[0]
        return total.to(tl.float32), ok


def tree_sums(tree: sum_tree.Tree, rank: int) -> TreeSums:
    """Return what a kernel knows of the tree when it is compiled for `rank`."""
    first, last = tree.spans[rank]
    alone = [sum_tree.joins(size, tuple((i, i + 1) for i in range(size))) for size in _sizes(tree.roots[rank])]
    nodes = tuple(root for nodes_of_rank in tree.roots for root in nodes_of_rank)
    return TreeSums(
        OWN=last - first,
        OWN_ROOTS=";".join(_text(each) for each in alone),
        JOINS=_text(sum_tree.joins(tree.leaves, nodes)),
        SOURCES=_text(source for source, nodes_of_rank in enumerate(tree.roots) for _ in nodes_of_rank),
        PAIR=len(tree.spans) <= 2 and all(len(nodes_of_rank) == 1 for nodes_of_rank in tree.roots),
        ROOTLESS=not all(tree.roots),
    )


def _sizes(roots: tuple[sum_tree.Span, ...]) -> list[int]:
    return [last - first for first, last in roots]


def _text(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
