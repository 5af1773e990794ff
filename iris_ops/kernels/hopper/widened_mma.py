"""Products on Hopper by weights that are stored as codes, widened to bf16 in registers on the way to the tensor cores.

The codes of a step's 128 numbers along K come to shared memory as they are stored, a quarter or half of bf16's bytes.
`wgmma` takes its left operand from registers. So the sums lie transposed, columns of B by rows of A. A thread finds the
numbers of its operand in the words that it loads (`quantised/packing.py`), so nothing moves between threads. A weight
is widened once for all rows of a tile, to the same number that `quantised/restoring.py` makes.

Registers of an operand are free once its product has ended. A step has two halves along K: one is widened while the
tensor cores multiply the other. The class has the names of `mma.Mma`.
"""

from iris.triton_private import (
    aggregate,
    base_value,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..tiles import known

_STEP = gl.constexpr(128)  # numbers along K whose codes make up a line


def accumulator(block_m: int, warps: int) -> gl.NVMMADistributedLayout:
    """Return which thread of `warps` warps has what of the sums, for blocks of `block_m` rows."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, block_m, 16])


@gluon.jit
def _side_by_side(parts):
    """Return the tensors [rows, n], a power of two of them, side by side."""
    if len(parts) == 1:
        return parts[0]
    else:
        HALF: gl.constexpr = len(parts) // 2
        both = gl.join(_side_by_side(parts[:HALF]), _side_by_side(parts[HALF:]))
        return gl.reshape(gl.permute(both, (0, 2, 1)), (both.shape[0], 2 * both.shape[1]))


@aggregate
class Codes:
    """A program's weights as codes.

    `scales` [columns of B, groups along K], rows `stride` apart, of GROUPS groups a step, or None where they end a
    tile. WIDEN: a `quantised.widening.Widening` of runs.
    """

    scales: base_value
    stride: base_value
    cols: base_value
    last: base_value
    GROUPS: gl.constexpr
    WIDEN: gl.constexpr

    @triton.constexpr_function
    def __init__(self, scales, stride, cols, last, GROUPS, WIDEN):
        self.scales = gl.constexpr(None) if scales is None else scales
        self.stride = gl.constexpr(0) if stride is None else known(stride)
        self.cols, self.last = known(cols), last
        self.GROUPS, self.WIDEN = known(GROUPS), gl.constexpr(getattr(WIDEN, "value", WIDEN))


@aggregate
class WidenedMma:
    """The products of one program, of B's columns as codes."""

    codes: Codes
    LAYOUT: gl.constexpr
    A_FORM: gl.constexpr
    TOGETHER: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    BLOCK_K: gl.constexpr
    MATRICES: gl.constexpr
    B_TRANSPOSED: gl.constexpr

    @triton.constexpr_function
    def __init__(self, a, codes, tile, pipeline):
        tile, pipeline = getattr(tile, "value", tile), getattr(pipeline, "value", pipeline)
        self.codes = codes
        self.LAYOUT, self.TOGETHER = gl.constexpr(pipeline.ACC), known(1)
        self.A_FORM = gl.constexpr(gl.NVMMASharedLayout.get_default_for([tile.BLOCK_M, tile.BLOCK_K // 2], a.dtype))
        self.BLOCK_M, self.BLOCK_N, self.BLOCK_K = known(tile.BLOCK_M), known(tile.BLOCK_N), known(tile.BLOCK_K)
        self.MATRICES, self.B_TRANSPOSED = known(1), known(True)

    @gluon.jit
    def begin(self, col, step):
        """Return the sums of a tile before its first product, that of B's columns from `col` on and block `step`."""
        sums = warpgroup_mma_init(gl.zeros((self.BLOCK_N, self.BLOCK_M), gl.float32, self.LAYOUT))
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, self.LAYOUT, 2)
        place = gl.minimum(col + gl.arange(0, self.BLOCK_N, layout=gl.SliceLayout(1, OPERAND)), self.codes.cols - 1)
        if self.codes.scales is not None:
            place = self.codes.scales + (place.to(gl.int64) * self.codes.stride + step * self.codes.GROUPS)
        return sums, place, self._factors(place), step

    @gluon.jit
    def _factors(self, place):
        """Load the scales of a step, one tensor for each group."""
        factors = ()
        if self.codes.scales is not None:
            for g in gl.static_range(self.codes.GROUPS):
                factors = factors + (gl.load(place + g),)
        return factors

    @gluon.jit
    def _widened(self, columns, factors, HALF: gl.constexpr):
        """Return the operand [BLOCK_N, 64] of half number `HALF` of a step."""
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, self.LAYOUT, 2)
        widen: gl.constexpr = self.codes.WIDEN
        COUNT: gl.constexpr = widen.PRODUCTS // 2
        words = widen.words(columns.load(OPERAND))
        parts = ()
        for p in gl.static_range(HALF * COUNT, (HALF + 1) * COUNT):
            numbers = words[p].to(gl.float32)
            if widen.off != 1.0:
                numbers = numbers * widen.off
            if widen.ADDED != 0.0:
                numbers = numbers + widen.ADDED
            if self.codes.scales is not None:
                factor = factors[p * self.codes.GROUPS // widen.PRODUCTS]
                if factor.dtype == gl.uint8:  # an exponent; 2**-127 is subnormal
                    bits = factor.to(gl.int32)
                    factor = gl.where(bits == 0, 1 << 22, bits << 23).to(gl.float32, bitcast=True)
                else:
                    factor = factor.to(gl.float32)
                numbers = numbers * factor[:, None]
            parts = parts + (numbers.to(gl.bfloat16),)
        return gl.convert_layout(_side_by_side(parts), OPERAND)

    @gluon.jit
    def issue(self, rows, columns, acc, NUMBER: gl.constexpr = 0):
        """Begin to add the product of two blocks; those of the blocks before have ended afterwards."""
        sums, place, factors, step = acc
        place += gl.where(step < self.codes.last, self.codes.GROUPS, 0)
        coming = self._factors(place)
        halves = reinterpret(rows, rows.dtype, [2, self.BLOCK_M, self.BLOCK_K // 2], self.A_FORM)
        first = self._widened(columns, factors, 0)
        sums = warpgroup_mma(first, halves.index(0).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(sums,)))
        second = self._widened(columns, factors, 1)
        sums = warpgroup_mma(second, halves.index(1).permute((1, 0)), sums, is_async=True)
        return sums, place, coming, step + 1

    @gluon.jit
    def await_last_but_one(self, acc):
        """Wait until the first half's registers are free."""
        sums, place, factors, step = acc
        return warpgroup_mma_init(warpgroup_mma_wait(1, deps=(sums,))), place, factors, step

    @gluon.jit
    def result(self, acc):
        """Return the finished sums [BLOCK_M, BLOCK_N], in registers."""
        sums, _place, _factors, _step = acc
        return gl.permute(warpgroup_mma_wait(0, deps=(sums,)), (1, 0))
