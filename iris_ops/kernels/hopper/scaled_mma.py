"""Products on Hopper by fp8 weights that have a scale for each column of B and 128 numbers along K.

Block of K number i adds `scale[n, i] * (A[:, i] @ B[i, n])` to column n. The sums lie transposed, columns of B by rows
of A: there a thread holds a few columns, so it loads a few scales a step. A scale multiplies sums in registers, which
`wgmma` must have left. So a tile has two parts: while one is scaled, the tensor cores multiply the other.

The sums are kept in units of the current block's scale: from block to block they are multiplied by the quotient of the
scales, and the tensor cores go on adding. Sums of each block apart, which DeepGEMM adds to a tile's, would take half as
many registers again, so that tiles would be smaller. The class has the names of `mma.Mma`.
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
import triton.language as tl

from ..tiles import known

# Scales below this share of the largest one so far count as this share: sums in their units would be infinite.
_LEAST_SHARE = gl.constexpr(2.0**-80)
_LEAST = gl.constexpr(2.0**-126)


def accumulator(block_m: int, block_n: int, warps: int) -> gl.NVMMADistributedLayout:
    """Return which thread of `warps` warps has what of a part's sums, for blocks of `block_m` rows."""
    rows = block_m if block_n > 16 * warps else block_m // 2
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, rows, 32])


def together(block_n: int, warps: int) -> int:
    """Return how many steps have no drain between, by measurement: two warp groups with small tiles fill each other's
    drains."""
    return 4 if warps == 4 or block_n == 256 else 1


# In assembly that keeps its place: compilers move other arithmetic between instructions of products under way, and then
# let these run one after the other.
@gluon.jit
def _times(sums, factors):
    """Return `sums` times the factor of each row."""
    _, both = gl.broadcast(sums, factors[:, None])
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [sums, both], gl.float32, is_pure=False, pack=1
    )


@aggregate
class Part:
    """The sums of a part of a tile, and the scales of its columns.

    `place`: the scales of the first block. `applied`: those of the sums; `coming`: of the block after; `largest`: of
    all so far.
    """

    sums: base_value
    place: base_value
    applied: base_value
    coming: base_value
    largest: base_value

    @triton.constexpr_function
    def __init__(self, sums, place, applied, coming, largest):
        self.sums, self.place = sums, place
        self.applied, self.coming, self.largest = applied, coming, largest


@gluon.jit
def _unit(part):
    """Return the unit of a part's sums, which is 0 where all scales were 0."""
    return gl.where(part.largest == _LEAST, 0.0, part.applied)


@aggregate
class ScaledMma:
    """The products of one program, with `scales` [N, ...] of B's columns, `stride` elements apart.

    HIGH, WIDE: columns of B and rows of A of a part. `last`: the last block along K.
    """

    scales: base_value
    stride: base_value
    cols: base_value
    last: base_value
    LAYOUT: gl.constexpr
    A_FORM: gl.constexpr
    B_FORM: gl.constexpr
    TOGETHER: gl.constexpr
    BLOCKS: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    BLOCK_K: gl.constexpr
    HIGH: gl.constexpr
    WIDE: gl.constexpr
    MATRICES: gl.constexpr

    @triton.constexpr_function
    def __init__(self, a, b, scales, stride, cols, last, tile, pipeline):
        tile, pipeline = getattr(tile, "value", tile), getattr(pipeline, "value", pipeline)
        m, n, k = tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_K
        high = min(n, 16 * pipeline.ACC.warps_per_cta[0])
        wide = m if n > high else m // 2
        self.scales, self.stride, self.cols, self.last = scales, known(stride), known(cols), last
        self.LAYOUT = gl.constexpr(pipeline.ACC)
        self.A_FORM = gl.constexpr(gl.NVMMASharedLayout.get_default_for([wide, k], a.dtype))
        self.B_FORM = gl.constexpr(gl.NVMMASharedLayout.get_default_for([high, k], b.dtype))
        self.BLOCK_M, self.BLOCK_N, self.BLOCK_K = known(m), known(n), known(k)
        self.HIGH, self.WIDE = known(high), known(wide)
        self.MATRICES = known(1)
        self.TOGETHER, self.BLOCKS = known(pipeline.TOGETHER), known(1)

    @gluon.jit
    def columns_at(self, col, k):
        """Return where B's descriptor has the block from column `col` and from `k` along K on."""
        return col, k

    @gluon.jit
    def _part(self, col, step):
        ROWS: gl.constexpr = gl.SliceLayout(1, self.LAYOUT)
        c = gl.minimum(col + gl.arange(0, self.HIGH, layout=ROWS), self.cols - 1)
        place = self.scales + c.to(gl.int64) * self.stride + step
        zeros = gl.zeros((self.HIGH, self.WIDE), gl.float32, self.LAYOUT)
        none = gl.zeros((self.HIGH,), gl.float32, ROWS)
        return Part(warpgroup_mma_init(zeros), place, none + _LEAST, gl.load(place), none + _LEAST)

    @gluon.jit
    def begin(self, col, step):
        """Return the parts of a tile of B's columns from `col` on, before the block number `step` along K."""
        if self.WIDE < self.BLOCK_M:
            second = self._part(col, step)
        else:
            second = self._part(col + self.HIGH, step)
        return self._scaled(self._ended(self._part(col, step), 0), step), second, step

    @gluon.jit
    def _scaled(self, part, step):
        """Scale what a part has, whose last product has ended, for the block number `step`."""
        place = part.place + (step < self.last).to(gl.int32)
        after = gl.load(place)
        largest = gl.maximum(part.largest, part.coming, propagate_nan=tl.PropagateNan.ALL)
        least = gl.maximum(largest * _LEAST_SHARE, _LEAST, propagate_nan=tl.PropagateNan.ALL)
        applied = gl.maximum(part.coming, least, propagate_nan=tl.PropagateNan.ALL)
        sums = _times(part.sums, part.applied / applied)
        return Part(warpgroup_mma_init(sums), place, applied, after, largest)

    @gluon.jit
    def _ended(self, part, LEFT: gl.constexpr):
        """Wait until all but `LEFT` products have ended, the part's among them."""
        sums = warpgroup_mma_wait(LEFT, deps=(part.sums,))
        return Part(sums, part.place, part.applied, part.coming, part.largest)

    @gluon.jit
    def _add(self, part, rows, columns):
        """Begin to add the product of two blocks."""
        sums = warpgroup_mma(columns, rows.permute((1, 0)), part.sums, is_async=True)
        return Part(sums, part.place, part.applied, part.coming, part.largest)

    @gluon.jit
    def issue(self, rows, columns, acc, NUMBER: gl.constexpr = 0):
        """Begin to add the product of two blocks; those of the blocks before have ended afterwards."""
        first, second, step = acc
        if NUMBER == 0:  # a product that is under way across a branch must end before any sums are touched
            second = self._ended(second, 0)
        if self.WIDE < self.BLOCK_M:
            halves = reinterpret(rows, rows.dtype, [2, self.WIDE, self.BLOCK_K], self.A_FORM)
            columns = reinterpret(columns, columns.dtype, [self.HIGH, self.BLOCK_K], self.B_FORM)
            first = self._add(first, halves.index(0), columns)
            if NUMBER > 0:
                second = self._ended(second, 1)
            second = self._add(self._scaled(second, step), halves.index(1), columns)
        else:
            rows = reinterpret(rows, rows.dtype, [self.WIDE, self.BLOCK_K], self.A_FORM)
            halves = reinterpret(columns, columns.dtype, [2, self.HIGH, self.BLOCK_K], self.B_FORM)
            first = self._add(first, rows, halves.index(0))
            if NUMBER > 0:
                second = self._ended(second, 1)
            second = self._add(self._scaled(second, step), rows, halves.index(1))
        return first, second, step + 1

    @gluon.jit
    def await_last_but_one(self, acc):
        """Scale the first part for the next block, while the tensor cores multiply the second."""
        first, second, step = acc
        return self._scaled(self._ended(first, 1), step), second, step

    @gluon.jit
    def result(self, acc):
        """Return the finished sums [BLOCK_M, BLOCK_N], in registers."""
        first, second, _step = acc
        last = warpgroup_mma_wait(0, deps=(second.sums,))
        begin = warpgroup_mma_wait(0, deps=(first.sums,))
        both = gl.join(begin * _unit(first)[:, None], last * _unit(second)[:, None])  # [HIGH, WIDE, 2]
        if self.WIDE < self.BLOCK_M:
            both = gl.permute(both, (2, 1, 0))
        else:
            both = gl.permute(both, (1, 2, 0))
        return gl.reshape(both, (self.BLOCK_M, self.BLOCK_N))
