"""The tree of `iris_ops/sum_tree.py` as kernels follow it: steps are data, sums that wait are registers.

A program holds a stack of sums that wait for the one to their right. A step says how many wait, from which number on
they are added, and whether what comes out ends as a root. So one loop follows any tree, for leaves and for roots alike.
"""

from iris.device.function import device_function
from iris.triton_private import aggregate, base_value
import triton
import triton.language as tl

from .tiles import known

# A step in 32 bits (`packed`): how many wait, where, whether it ends, and the rank that a root comes from.
PLACE, ENDS, SOURCE = tl.constexpr(8), tl.constexpr(16), tl.constexpr(24)
_BYTE = tl.constexpr(255)


@aggregate
class Steps:
    """Steps of the tree, one for each of `count` sums: pointers to int32. At most PLACES sums wait."""

    table: base_value
    count: base_value
    PLACES: tl.constexpr

    @triton.constexpr_function
    def __init__(self, table, count, PLACES):
        self.table, self.count, self.PLACES = table, known(count), known(PLACES)

    @device_function
    def nothing(self, like):
        """What waits at first: something in each place that is never looked at. The last that waits comes first."""
        waiting = ()
        for _ in tl.static_range(self.PLACES):
            waiting += (like,)
        return waiting

    @device_function
    def add(self, step, total, waiting):
        """(`total` with what waited for it, what waits then): a sum's step. Where it ends, it does not wait.

        Mostly a sum is added to the last that waits, and waits in its place. For all else there is one branch.
        """
        if self.PLACES == 0:
            return total, waiting
        else:
            count, place = step & _BYTE, (step >> PLACE) & _BYTE
            last, below = waiting[0], waiting[1:]
            total = tl.where(place < count, last + total, total)
            if self.PLACES > 1:
                if (place + 1 < count) | ((place == count) & (count > 0)):
                    total, below = self._change(count, place, total, last, below)
            return total, (total,) + below

    @device_function
    def _change(self, count, place, total, last, below):
        """The same for those below the last, `below[i]` number `PLACES - 2 - i`: some are added, or the last joins."""
        after = ()
        for i in tl.static_range(self.PLACES - 1):
            if (self.PLACES - 2 - i < count - 1) & (self.PLACES - 2 - i >= place):
                total = below[i] + total
        for i in tl.static_range(self.PLACES - 1):
            joins = (place == count) & (self.PLACES - 2 - i == count - 1)
            after += (tl.where(joins, last, below[i]),)
        return total, after


def packed(waiting: int, place: int, ends: bool, source: int) -> int:
    """A step of a sum that comes from rank `source`, as `Steps` reads it."""
    return waiting | place << PLACE.value | ends << ENDS.value | source << SOURCE.value
