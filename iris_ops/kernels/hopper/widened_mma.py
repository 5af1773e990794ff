"""Products on Hopper by weights that are stored as codes, widened to bf16 by warps of their own.

The codes of a step's line, 128 numbers along K, come to shared memory as they are stored, a quarter or half of bf16's
bytes. Four widening warps read them and store bf16 numbers where the tensor cores read them, two halves of a line in
turn, each once for all rows of a tile. So the MMA warps do what they do for a weight in bf16. MMA warps that widen for
themselves, with `wgmma`'s left operand in registers, were measured to multiply and widen one after the other.

    free    the MMA warps have multiplied what a half held
    ready   a half holds the numbers of the next step

The order in a line (`quantised/packing.py`) gives a thread that loads eight words runs of eight numbers, which it
stores at once. Numbers are widened two at a time, by bf16's own instructions. The class has the names of `mma.Mma`.
"""

from iris.triton_private import (
    aggregate,
    base_value,
    fence_async_shared,
    mbarrier,
    program_barrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..tiles import known

WIDENING_WARPS = 4
HALF_LINE = 64  # numbers along K
_HALF = gl.constexpr(HALF_LINE)
_ROWS = gl.constexpr(64)  # columns of B that the widening warps take at a time
# Which thread has which words of them.
_WORDS = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [WIDENING_WARPS, 1], [1, 0]))
_LONG_WORDS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [WIDENING_WARPS, 1], [1, 0]))


@gluon.jit
def _side_by_side(parts):
    """Return the tensors [rows, n], a power of two of them, side by side."""
    if len(parts) == 1:
        return parts[0]
    else:
        HALF: gl.constexpr = len(parts) // 2
        both = gl.join(_side_by_side(parts[:HALF]), _side_by_side(parts[HALF:]))
        return gl.reshape(gl.permute(both, (0, 2, 1)), (both.shape[0], 2 * both.shape[1]))


# Two numbers of a row at a time, in bf16.


@gluon.jit
def _whole(numbers, zero, widen: gl.constexpr):
    """Add what widened numbers lack to be those of their codes, and subtract the zero point of each row, exactly."""
    if zero is not None:
        lacked = widen.LACKED - zero.to(gl.float32) * widen.UNIT
        _, each = gl.broadcast(numbers, lacked.to(gl.bfloat16)[:, None])
        return gl.inline_asm_elementwise(
            "add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [numbers, each], gl.bfloat16, is_pure=True, pack=2
        )
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
def _scaled(numbers, factor, zero, widen: gl.constexpr):
    """Return the same times the scale of each row, rounded once.

    A scale that bf16 cannot hold is the sum of two that it can.
    """
    if factor.dtype == gl.uint8:  # an exponent + 127
        bits = gl.minimum(factor.to(gl.int32) + widen.SHIFT, 255) << 7  # beyond the largest number infinite
        factor = bits.to(gl.int16).to(gl.bfloat16, bitcast=True)
    elif widen.SCALED:
        factor = (factor.to(gl.float32) * widen.later).to(factor.dtype)  # a power of two, which is exact
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

    `scales` [columns of B, groups along K], rows `stride` apart, of GROUPS groups a line, or None where they end a
    tile. ZEROS: whether each is followed by its zero point. WIDEN: a `quantised.widening.Widening` of runs.
    """

    scales: base_value
    stride: base_value
    cols: base_value
    last: base_value
    GROUPS: gl.constexpr
    ZEROS: gl.constexpr
    WIDEN: gl.constexpr

    @triton.constexpr_function
    def __init__(self, scales, stride, cols, last, GROUPS, ZEROS, WIDEN):
        self.scales = gl.constexpr(None) if scales is None else scales
        self.stride = gl.constexpr(0) if stride is None else known(stride)
        self.cols, self.last = known(cols), last
        self.GROUPS, self.ZEROS = known(GROUPS), known(ZEROS)
        self.WIDEN = gl.constexpr(getattr(WIDEN, "value", WIDEN))


@aggregate
class WidenedMma:
    """The products of one program, of B's columns as codes, which become numbers in `wide` [2, BLOCK_N, 64]."""

    codes: Codes
    wide: base_value
    ready: base_value
    free: base_value
    LAYOUT: gl.constexpr
    A_FORM: gl.constexpr
    WORDS: gl.constexpr
    TOGETHER: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    BLOCK_K: gl.constexpr
    OF_STEP: gl.constexpr
    GATED: gl.constexpr

    @triton.constexpr_function
    def __init__(self, a, codes, wide, ready, free, tile, pipeline):
        tile, pipeline = getattr(tile, "value", tile), getattr(pipeline, "value", pipeline)
        self.codes, self.wide, self.ready, self.free = codes, wide, ready, free
        self.LAYOUT, self.TOGETHER, self.GATED = gl.constexpr(pipeline.ACC), known(1), known(False)
        self.A_FORM = gl.constexpr(gl.NVMMASharedLayout.get_default_for([tile.BLOCK_M, HALF_LINE], a.dtype))
        self.BLOCK_M, self.BLOCK_N, self.BLOCK_K = known(tile.BLOCK_M), known(tile.BLOCK_N), known(tile.BLOCK_K)
        widen, groups, zeros = (getattr(each, "value", each) for each in (codes.WIDEN, codes.GROUPS, codes.ZEROS))
        self.WORDS, self.OF_STEP = known(widen.WORDS), known(groups * (1 + zeros))

    @gluon.jit
    def columns_at(self, col, k):
        """Return where B's descriptor has the columns from `col` on, of the line from `k` on along K."""
        return col, k // self.BLOCK_K * self.WORDS

    # by the MMA warps

    @gluon.jit
    def begin(self, col, step):
        """Return the sums of a tile before its first product, that of B's columns from `col` on and block `step`."""
        return warpgroup_mma_init(gl.zeros((self.BLOCK_M, self.BLOCK_N), gl.float32, self.LAYOUT))

    @gluon.jit
    def issue(self, rows, columns, acc, turn, NUMBER: gl.constexpr = 0):
        """Add the product of two blocks; the one of the last half is under way afterwards."""
        halves = reinterpret(rows, rows.dtype, [2, self.BLOCK_M, _HALF], self.A_FORM)
        for i in gl.static_range(2):
            mbarrier.wait(self.ready.index(i), turn)
            acc = warpgroup_mma(halves.index(i), self.wide.index(i).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
            program_barrier()  # in all warps the product of the other half has ended
            mbarrier.arrive(self.free.index(1 - i), count=1)
        return acc

    @gluon.jit
    def await_last_but_one(self, acc):
        """Return the sums, whose products of the steps before have ended."""
        return acc

    @gluon.jit
    def result(self, acc):
        """Return the finished sums [BLOCK_M, BLOCK_N], in registers."""
        return warpgroup_mma_wait(0, deps=(acc,)) * self.codes.WIDEN.AFTER

    # by the widening warps

    @gluon.jit
    def scales_at(self, col, step):
        """Return where the scales of the columns from `col` on are, of 64 columns each, for the block `step`."""
        WORDS: gl.constexpr = _LONG_WORDS if self.WORDS == 32 else _WORDS
        places = ()
        if self.codes.scales is not None:
            for r in gl.static_range(self.BLOCK_N // _ROWS):
                c = col + r * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, WORDS))
                c = gl.minimum(c, self.codes.cols - 1).to(gl.int64)
                places = places + (self.codes.scales + (c * self.codes.stride + step * self.OF_STEP),)
        return places

    @gluon.jit
    def load_scales(self, places):
        """Load the scales of a step, and zero points after each, one tensor for each 64 columns and group."""
        factors = ()
        for r in gl.static_range(len(places)):
            for g in gl.static_range(self.OF_STEP):
                factors = factors + (gl.load(places[r] + g),)
        return factors

    @gluon.jit
    def after(self, places, step):
        """Return where the scales of the step after `step` are, or those of the last."""
        moved = ()
        for r in gl.static_range(len(places)):
            moved = moved + (places[r] + gl.where(step < self.codes.last, self.OF_STEP, 0),)
        return moved

    @gluon.jit
    def widen(self, columns, factors, turn):
        """Widen the codes of a line [BLOCK_N, words]."""
        WORDS: gl.constexpr = _LONG_WORDS if self.WORDS == 32 else _WORDS
        widen: gl.constexpr = self.codes.WIDEN
        COUNT: gl.constexpr = widen.PRODUCTS // 2
        for i in gl.static_range(2):
            mbarrier.wait(self.free.index(i), turn ^ (1 - i))
            for r in gl.static_range(self.BLOCK_N // _ROWS):
                words = widen.words(columns.slice(r * _ROWS, _ROWS, dim=0).load(WORDS))
                parts = ()
                for p in gl.static_range(i * COUNT, (i + 1) * COUNT):
                    parts = parts + (self._scaled(words[p], factors, r, p * self.codes.GROUPS // widen.PRODUCTS),)
                self.wide.index(i).slice(r * _ROWS, _ROWS, dim=0).store(_side_by_side(parts))
            fence_async_shared()
            program_barrier()
            mbarrier.arrive(self.ready.index(i), count=1)

    @gluon.jit
    def _scaled(self, numbers, factors, R: gl.constexpr, NUMBER: gl.constexpr):
        """Return the numbers of codes of 64 columns that the scale number `NUMBER` of a step scales."""
        if self.codes.scales is None:
            return _unscaled(numbers, self.codes.WIDEN)
        elif self.codes.ZEROS:
            zero = factors[R * self.OF_STEP + 2 * NUMBER + 1]
            return _scaled(numbers, factors[R * self.OF_STEP + 2 * NUMBER], zero, self.codes.WIDEN)
        else:
            return _scaled(numbers, factors[R * self.OF_STEP + NUMBER], None, self.codes.WIDEN)


@gluon.jit
def widened_mma(a, codes, tile: gl.constexpr, pipeline: gl.constexpr):
    """Return the products of a program by `codes`, with shared memory for the numbers of a line."""
    wide = gl.allocate_shared_memory(a.dtype, [2, tile.BLOCK_N, _HALF], pipeline.WIDE)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    return WidenedMma(a, codes, wide, ready, free, tile, pipeline)


@gluon.jit
def widen_tiles(work, shared):
    """Run the widening warps: widen the lines of each tile that the MMA warps multiply."""
    mma, units = work.mma, work.units
    programs = gl.num_programs(0)
    stage = 0
    phase = 0
    for u in range(gl.program_id(0), units.count(programs), programs):
        tile, first, steps, _complete = units.at(u, programs)
        _row, col, _bias = work.tiles.place(tile)
        places = mma.scales_at(col, first)
        factors = mma.load_scales(places)
        for step in range(first, first + steps):
            places = mma.after(places, step)
            coming = mma.load_scales(places)
            mbarrier.wait(shared.loaded.index(stage), phase)
            mma.widen(shared.b_parts.index(stage), factors, (stage + phase * shared.STAGES) & 1)
            factors = coming
            last = stage == shared.STAGES - 1
            stage, phase = gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)
