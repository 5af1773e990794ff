"""The leaves of a sum by tree (`iris_ops/sum_tree.py`), as the MMA warps of a program count them."""

from iris.triton_private import aggregate, base_value
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...sum_tree import LEAVES as TREE_LEAVES

_LEAVES = gl.constexpr(TREE_LEAVES)


@aggregate
class Leaves:
    """The leaves of a rank's share of K, from number `first` on, of LEAVES with `blocks` blocks of 64 in all."""

    first: base_value
    blocks: base_value

    @triton.constexpr_function
    def __init__(self, first, blocks):
        self.first, self.blocks = first, blocks

    @gluon.jit
    def steps(self, leaf):
        """Return the number of blocks along K of leaf number `leaf` of the share (`sum_tree.border`)."""
        number = self.first + leaf
        return (number + 1) * self.blocks // _LEAVES - number * self.blocks // _LEAVES
