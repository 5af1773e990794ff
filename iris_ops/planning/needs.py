"""Describe how weights are stored.

A problem has one format, a way lists those that it serves, and the engine intersects. To add one: an object, and its
name in the ways that serve it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from iris.machines import INTERPRETER
import torch

if TYPE_CHECKING:
    from iris.machines import Machine


# Of the stream of weights (`quantised/weight_stream.py`): elements along K that a warp takes.
LINE = 128
# Of the memory's rate, what a kernel that converts B gets; and what it takes beside that. Estimated.
_RESTORED, _RESTORE_US = 0.55, 3.0


@dataclass(frozen=True)
class WeightFormat:
    """How B is stored, and what that changes. This class is B in A's dtype; `planning/weights/` has the others.

    A format has a separate module in `planning/weights/` with a subclass that overrides what differs.
    """

    name: str = "in A's dtype"
    """As messages and traces call it."""
    request: str = ""
    """What an error reports of the argument of `ctx.ops.plan` that requests it."""
    no_request: str = ""
    """The argument that requests none."""
    dtype: torch.dtype | None = None
    """Of B's elements as they lie in memory, packed or not. None: A's."""
    packing: str = ""
    """Its name in `quantised/packing.py`."""
    group: int = 0
    """How many numbers along K share a scale in each column. 0: all of them, where there are scales."""
    granule: int = 0
    """Of which K is a multiple where few rows are multiplied by a stream of weights; 0: none serves the format."""
    streamed_rows: int = 16
    """Rows of A at most that a launch between ranks multiplies by a stream of weights."""
    local_rows: int = 16
    """The same without ranks, where B is one matrix."""
    joined_rows: int = 16
    """The same without ranks, where columns of two matrices in B are joined (`Epilogue.matrices`)."""
    unrounded_rows: int = 16
    """Rows of A at most that are not rounded, where more are."""
    local_launches: int = 1
    """Launches at most, one after the other, that multiply more rows without ranks."""
    by_rank: bool = True
    """Whether a weight's scales depend on how many ranks share its K."""
    operand_bytes: int = 0
    """Bytes of a number as tensor cores multiply it, where rows of A are rounded to the same. 0: as A's."""
    operands: str = ""
    """`module:function` below `iris_ops` that makes the steps before a product (`launch.py`)."""
    product: str = ""
    """`module:function` of a library's product: (A, B transposed, scale, bias, out)."""
    fixed_product: str = ""
    """The same of one that gives a row the same bits at any number of rows."""
    tile_share: float = 1.0
    """Where kernels widen codes a tile at a time, their rate: that of int4 in groups of 32 is 1."""
    widening: str = ""
    """`module:object` of the policy by which kernels widen B in registers (`quantised/widening.py`)."""

    @property
    def rounds_rows(self) -> bool:
        """Return whether rows of A are rounded to the same format before they are multiplied."""
        return self.operand_bytes > 0

    @property
    def zeros(self) -> bool:
        """Return whether a scale comes with a zero point."""
        return False

    @property
    def scales_blocks(self) -> bool:
        """Return whether scales of groups along K multiply sums of rounded rows."""
        return self.rounds_rows and self.group > 0

    @property
    def widened_in_tiles(self) -> bool:
        """Return whether many rows are multiplied by codes that kernels widen a tile at a time."""
        return False

    @property
    def most_widened(self) -> int:
        """Return how many rows at most are multiplied so."""
        return 0

    @property
    def rounding(self) -> str:
        """Return how a trace describes a way that multiplies rounded rows."""
        return ""

    @property
    def scale_text(self) -> str:
        """Return what the scales belong to, for messages."""
        return self.name if self.group else "one for each column of B"

    @property
    def row_text(self) -> str:
        """Return how an order of sums describes rows of A; "" if they are not rounded."""
        return ""

    @property
    def line_bytes(self) -> int:
        """Return the bytes of 128 numbers along K of a column, without scales, where they are widened in tiles."""
        return 0

    def unrounded(self, problem: Any) -> str:
        """Return the reason why rows of A are multiplied as they are, or "" where they are rounded if the GPU can."""
        return f"no rows are rounded by a weight {self.name}"

    def matches(self, B: torch.Tensor, scale: torch.Tensor | None) -> bool:
        """Return whether B [K, N], the transpose of a stored weight, is in this format."""
        return B.dtype == self.dtype and (scale is None or scale.ndim == 1)

    def depth(self, stored: int, K: int) -> int:
        """Return how many numbers a stored row of `stored` elements holds; K if they are K and padding."""
        return stored

    def scale_of(self, N: int, stored: int) -> tuple[tuple[int, ...], tuple[torch.dtype, ...]]:
        """Return the shape of a weight's scale, and which dtypes it may have, of N rows of `stored` elements."""
        return (N,), (torch.float32,)

    def nbytes(self, N: int, K: int) -> int:
        """Return the bytes of a stored weight and its scales."""
        return N * K

    def streamable(self, rows: int, K: int, most: int | None = None) -> bool:
        """Return whether the stream of weights serves products of up to `most` (`streamed_rows`) rows, on Hopper."""
        few = 0 < rows <= (self.streamed_rows if most is None else most)
        return few and self.granule > 0 and K > 0 and K % self.granule == 0

    def few_rows(self, matrices: int) -> int:
        """Return the rows at most of a product without ranks by so many matrices, whose sums share the registers."""
        return self.joined_rows if matrices > 1 else self.local_rows

    def refused(self, problem: Any, machine: Machine) -> str | None:
        """Return the reason why rows of A are not rounded, if the format has them rounded."""
        return None

    def converted(self, problem: Any, machine: Machine) -> str:
        """Return the reason why B is converted to A's dtype in each call; "" if it is not."""
        return ""

    def restoring_us(self, n: int, k: int, itemsize: int, machine: Machine) -> float:
        """Return the microseconds in which B [k, n] becomes numbers of `itemsize` bytes: read, written, a launch."""
        if machine.name == INTERPRETER:
            return 0.0
        return (self.nbytes(n, k) + n * k * itemsize) / (_RESTORED * machine.hbm_gbs * 1e3) + _RESTORE_US

    def streams(self, problem: Any, machine: Machine | None = None) -> bool:
        """Return whether the format's own stream of weights serves so few rows; None: on a machine that has one."""
        return False

    def rounding_us(self, rows: int, cols: int, machine: Machine) -> float:
        """Return the microseconds that rounding the rows of A takes."""
        return 0.0

    def library_us(self, us: float, rows: int, K: int, machine: Machine) -> float:
        """Return the microseconds of a library's product, given those in A's dtype."""
        return us

    def product_us(self, us: float, rows: int, K: int, machine: Machine) -> float:
        """Return the microseconds of one of our products without ranks, given those in A's dtype."""
        return us


PLAIN = WeightFormat()
