"""Products on Hopper by weights that are stored as codes, widened to bf16 in registers on the way to the tensor cores.

The codes of a line, 128 numbers along K, come to shared memory as they are stored, a quarter or half of bf16's bytes.
`wgmma` takes its left operand from registers. So the sums lie transposed, columns of B by rows of A. A thread finds the
numbers of its operand in the words that it loads (`quantised/packing.py`), so nothing moves between threads. A weight
is widened once for all rows of a tile, two at a time, by bf16's own instructions.

A line is two blocks along K, each of some products (`Widening.PRODUCTS`). A warp that issues a product waits until the
tensor cores take the operand from its registers. So a product's numbers are widened between two products, while the
tensor cores are busy, and not all of them before the first. The class has the names of `mma.Mma`.
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

BLOCKS = 2  # of a line


def accumulator(block_m: int, warps: int) -> gl.NVMMADistributedLayout:
    """Return which thread of `warps` warps has what of the sums, for blocks of `block_m` rows."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, block_m, 16])


# Two numbers of a row at a time, in bf16.


@gluon.jit
def _whole(numbers, zero, widen: gl.constexpr):
    """Add what widened numbers lack to be those of their codes, and subtract the zero point of each row, exactly."""
    if zero is not None:
        added = widen.ADDED - zero.to(gl.float32)  # an integer
        _, each = gl.broadcast(numbers, added.to(gl.bfloat16)[:, None])
        operands = [numbers, each]
        return gl.inline_asm_elementwise(widen.ADDING_EACH, "=r,r,r", operands, gl.bfloat16, is_pure=True, pack=2)
    elif widen.ADDED != 0.0:
        return gl.inline_asm_elementwise(widen.ADDING, "=r,r", [numbers], gl.bfloat16, is_pure=True, pack=2)
    else:
        return numbers


@gluon.jit
def _unscaled(numbers, widen: gl.constexpr):
    """Return the numbers that codes represent, divided by `AFTER`."""
    numbers = _whole(numbers, None, widen)
    if widen.SCALED:
        return gl.inline_asm_elementwise(widen.TIMES_LATER, "=r,r", [numbers], gl.bfloat16, is_pure=True, pack=2)
    else:
        return numbers


@gluon.jit
def _columns(words):
    """Return the columns of `words`, as many as a power of two."""
    if words.shape[1] == 1:
        return (gl.reshape(words, (words.shape[0],)),)
    else:
        even, odd = gl.split(gl.reshape(words, (words.shape[0], words.shape[1] // 2, 2)))
        even, odd = _columns(even), _columns(odd)
        both = ()
        for i in gl.static_range(len(even)):
            both = both + (even[i], odd[i])
        return both


@gluon.jit
def _number_in(words, NUMBER: gl.constexpr, EACH: gl.constexpr, dtype: gl.constexpr):
    """Return number NUMBER of those of `dtype` that lie in words, EACH in one."""
    word = words[NUMBER // EACH] >> NUMBER % EACH * (32 // EACH)
    if EACH == 1:
        return word.to(dtype, bitcast=True)
    elif EACH == 2:
        return word.to(gl.int16).to(dtype, bitcast=True)
    else:
        return word.to(gl.uint8)


@gluon.jit
def _scaled(numbers, factor, zero, widen: gl.constexpr):
    """Return the same times the scale of each row, rounded once.

    A scale that bf16 cannot hold is the sum of two that it can.
    """
    if factor.dtype == gl.uint8:  # an exponent + 127
        bits = gl.minimum(factor.to(gl.int32) + widen.SHIFT, 255) << 7  # beyond the largest number infinite
        factor = bits.to(gl.int16).to(gl.bfloat16, bitcast=True)
    elif widen.SCALED:
        exact = factor.to(gl.float32) * widen.later  # which float16 may not hold, and bf16 does
        factor = exact.to(gl.bfloat16) if factor.dtype == gl.bfloat16 else exact
    numbers = _whole(numbers, zero, widen)
    large = factor.to(gl.bfloat16)
    _, larges = gl.broadcast(numbers, large[:, None])
    if factor.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [numbers, larges], gl.bfloat16, is_pure=True, pack=2
        )
    else:
        rest = factor.to(gl.float32) - large.to(gl.float32)
        _, rests = gl.broadcast(numbers, rest.to(gl.bfloat16)[:, None])
        return gl.inline_asm_elementwise(
            "{ .reg .b32 t; mul.rn.bf16x2 t, $1, $3; fma.rn.bf16x2 $0, $1, $2, t; }", "=r,r,r,r",
            [numbers, larges, rests], gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip


@aggregate
class Codes:
    """A program's weights as codes.

    `scales`: those of each column of B, numbers of DTYPE in words, rows `stride` words apart, of GROUPS groups a line,
    WORDS words. None where they come with the codes (`take_scales`), or end a tile: then WORDS is 0. ZEROS: whether
    each is followed by its zero point. WIDEN: a
    `quantised.widening.Widening` of runs.
    """

    scales: base_value
    stride: base_value
    cols: base_value
    last: base_value
    GROUPS: gl.constexpr
    ZEROS: gl.constexpr
    WIDEN: gl.constexpr
    DTYPE: gl.constexpr
    WORDS: gl.constexpr

    @triton.constexpr_function
    def __init__(self, scales, stride, cols, last, GROUPS, ZEROS, WIDEN, DTYPE, WORDS):
        self.scales = gl.constexpr(None) if scales is None else scales
        self.stride = gl.constexpr(0) if stride is None else known(stride)
        self.cols, self.last = known(cols), known(last)
        self.GROUPS, self.ZEROS = known(GROUPS), known(ZEROS)
        self.WIDEN = gl.constexpr(getattr(WIDEN, "value", WIDEN))
        self.DTYPE, self.WORDS = gl.constexpr(getattr(DTYPE, "value", DTYPE)), known(WORDS)


@triton.constexpr_function
def _in_words(columns, warps, words):
    """Return the layout of [columns, words] in which a thread has whole rows, those of its operand."""
    if words == 0:
        return None
    powers = [1 << i for i in range(max(columns, words).bit_length())]
    rows = [[p, 0] for p in powers if p < columns]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, p] for p in powers if p < words] + [[8, 0]] + rows[4 + warps.bit_length() - 1 :],
        lane_bases=[[0, 0], [0, 0], *rows[:3]],
        warp_bases=rows[4 : 4 + warps.bit_length() - 1],
        block_bases=[],
        shape=[columns, words],
    )


@aggregate
class WidenedMma:
    """The products of one program, of B's columns as codes."""

    codes: Codes
    LAYOUT: gl.constexpr
    B_FORM: gl.constexpr
    LINE_FORM: gl.constexpr
    TOGETHER: gl.constexpr
    BLOCKS: gl.constexpr
    PRODUCTS: gl.constexpr
    SCALES: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    BLOCK_K: gl.constexpr
    MATRICES: gl.constexpr

    @triton.constexpr_function
    def __init__(self, codes, tile, pipeline):
        tile, pipeline = getattr(tile, "value", tile), getattr(pipeline, "value", pipeline)
        widen = getattr(codes.WIDEN, "value", codes.WIDEN)
        self.codes = codes
        self.LAYOUT, self.TOGETHER, self.BLOCKS = gl.constexpr(pipeline.ACC), known(1), known(BLOCKS)
        self.B_FORM = gl.constexpr(gl.NVMMASharedLayout.get_default_for([tile.BLOCK_N, widen.WORDS], gl.int32))
        self.LINE_FORM = gl.constexpr(gl.NVMMASharedLayout.get_default_for([1, tile.BLOCK_N, widen.WORDS], gl.int32))
        self.PRODUCTS = known(widen.PRODUCTS // BLOCKS)
        self.SCALES = gl.constexpr(
            _in_words(tile.BLOCK_N, pipeline.ACC.warps_per_cta[0], getattr(codes.WORDS, "value", codes.WORDS))
        )
        self.BLOCK_M, self.BLOCK_N, self.BLOCK_K = known(tile.BLOCK_M), known(tile.BLOCK_N), known(tile.BLOCK_K)
        self.MATRICES = known(1)

    @gluon.jit
    def begin(self, col, step):
        """Return the sums of a tile before its first product, that of B's columns from `col` on and block `step`."""
        sums = warpgroup_mma_init(gl.zeros((self.BLOCK_N, self.BLOCK_M), gl.float32, self.LAYOUT))
        place = 0
        if self.codes.scales is not None:
            place = col + gl.arange(0, self.BLOCK_N, layout=gl.SliceLayout(1, self.SCALES))
            place = gl.minimum(place, self.codes.cols - 1).to(gl.int64) * gl.multiple_of(self.codes.stride, 4)
            place += step * self.codes.WORDS
        words = self._load(place)
        return sums, place, words, words, step

    @gluon.jit
    def take_scales(self, acc, factors):
        """Return the sums with the scales of the step that follows, words [BLOCK_N, WORDS] in shared memory."""
        sums, place, _scales, _coming, step = acc
        words = ()
        if self.codes.WORDS > 0:
            words = self._apart(factors.load(self.SCALES))
        return sums, place, words, words, step

    @gluon.jit
    def _load(self, place):
        """Load the words with the scales of a step, and zero points after each."""
        words = ()
        if self.codes.scales is not None:
            w = gl.arange(0, self.codes.WORDS, layout=gl.SliceLayout(0, self.SCALES))
            words = self._apart(gl.load(self.codes.scales + (place[:, None] + w[None, :])))
        return words

    @gluon.jit
    def _apart(self, words):
        """Return the columns of `words` [BLOCK_N, WORDS], each word where its row of weights is."""
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, self.LAYOUT, 2)
        columns, result = _columns(words), ()
        for i in gl.static_range(self.codes.WORDS):
            result = result + (gl.convert_layout(columns[i], gl.SliceLayout(1, OPERAND), assert_trivial=True),)
        return result

    @gluon.jit
    def _scaled(self, numbers, words, NUMBER: gl.constexpr):
        """Return the numbers of codes that the scale number `NUMBER` of a step scales."""
        if self.codes.WORDS == 0:
            return _unscaled(numbers, self.codes.WIDEN)
        else:
            PARTS: gl.constexpr = 1 + self.codes.ZEROS
            EACH: gl.constexpr = self.codes.GROUPS * PARTS // self.codes.WORDS
            zero = None
            if self.codes.ZEROS:
                zero = _number_in(words, PARTS * NUMBER + 1, EACH, self.codes.DTYPE)
            return _scaled(numbers, _number_in(words, PARTS * NUMBER, EACH, self.codes.DTYPE), zero, self.codes.WIDEN)

    @gluon.jit
    def columns_at(self, col, k):
        """Return where B's descriptor has the columns from `col` on, of the step from `k` on along K."""
        return k // self.BLOCK_K, col, 0

    @gluon.jit
    def issue(self, rows, columns, acc, NUMBER: gl.constexpr = 0):
        """Begin to add the products of block number NUMBER of a line; those before the last block have ended then."""
        sums, place, scales, coming, step = acc
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, self.LAYOUT, 2)
        widen: gl.constexpr = self.codes.WIDEN
        WIDTH: gl.constexpr = rows.shape[1] // self.PRODUCTS
        words = reinterpret(columns, columns.dtype, [self.BLOCK_N, columns.shape[2]], self.B_FORM).load(OPERAND)
        numbers = widen.words(words)
        for i in gl.static_range(NUMBER * self.PRODUCTS, (NUMBER + 1) * self.PRODUCTS):
            weights = self._scaled(numbers[i % widen.PRODUCTS], scales, i * self.codes.GROUPS // widen.PRODUCTS)
            part = rows.slice(i % self.PRODUCTS * WIDTH, WIDTH, dim=1).permute((1, 0))
            sums = warpgroup_mma(gl.convert_layout(weights, OPERAND), part, sums, is_async=True)
        if NUMBER == 0 and self.codes.scales is not None:  # the scales of the next line
            place += gl.where(step < self.codes.last, self.codes.WORDS, 0)
            return sums, place, scales, self._load(place), step
        elif NUMBER == 0:
            return sums, place, scales, coming, step
        else:
            return sums, place, coming, coming, step + 1

    @gluon.jit
    def await_last_but_one(self, acc):
        """Wait until the registers of all but the last block are free."""
        sums, place, scales, coming, step = acc
        sums = warpgroup_mma_init(warpgroup_mma_wait(self.PRODUCTS, deps=(sums,)))
        return sums, place, scales, coming, step

    @gluon.jit
    def result(self, acc):
        """Return the finished sums [BLOCK_M, BLOCK_N], in registers."""
        sums, _place, _scales, _coming, _step = acc
        return gl.permute(warpgroup_mma_wait(0, deps=(sums,)) * self.codes.WIDEN.AFTER, (1, 0))
