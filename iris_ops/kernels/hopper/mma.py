"""The product of two blocks in shared memory on Hopper: `wgmma`, by the MMA warps of a warp-specialised program.

`pipeline.py` loads blocks, walks over tiles and hands finished ones over. This class defines all that depends
on the hardware's product:

    warps        how many warps multiply
    registers    how many registers a thread of the mover warps has, beside `warps` MMA warps
    layout       which thread of the MMA warps holds what of the fp32 sums [BLOCK_M, BLOCK_N]
    forms        what a block in shared memory looks like to the product: A [BLOCK_M, BLOCK_K], B [BLOCK_K, BLOCK_N]
    columns_at   where B's descriptor has a block
    steps        start a tile's sums, issue a product, wait until the one before has read its blocks, take the result

So another architecture is another class with these names, in a folder beside this one. Blackwell's tcgen05 keeps the
sums in tensor memory: its `begin` would store them there, its `issue` would commit to a barrier, and its `result` would
load them into registers. The kernels and the pipeline would not change. The classes cannot inherit from a common
one, because Triton from 3.8 on refuses that.

`wgmma` runs beside the warps that issue it. It reads its blocks until it is waited for, so one product stays under way
while the blocks of the product before it are loaded anew. For as long, its sums must not be touched: they are in the
registers of the threads that issued it.
"""

from iris.triton_private import (
    aggregate,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..tiles import known

MMA_WARPS = 8  # of a program; four can multiply, too
# Registers that a thread of the mover warps has, by the number of MMA warps. All warps share 64 Ki of them, and the MMA
# warps take what is left.
MOVER_REGISTERS = {8: 168, 4: 232}
# The same, and those of a loader, by the numbers of mover and MMA warps. Four warps have the same number.
LOADER_REGISTERS = {2: {8: (120, 120), 4: (232, 232)}, 4: {8: (168, 40), 4: (168, 40)}}
_SUM_ROWS = 16  # of a warp, in one product


def accumulator(block_m: int, block_n: int, itemsize: int, warps: int) -> gl.NVMMADistributedLayout:
    """Return which thread of `warps` warps holds what of the sums [block_m, block_n].

    `itemsize`: bytes of an operand's element. The warps share the rows; where they are more than blocks of 16 rows,
    they share the columns, too.
    """
    high = min(warps, block_m // _SUM_ROWS)
    wide = warps // high
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[high, wide], instr_shape=[16, block_n // wide, 32 // itemsize]
    )


@aggregate
class Mma:
    """The products of one program: blocks of A, which may be folded, by blocks of B, which may be two matrices'.

    FOLDED: A's block comes as [2, BLOCK_M / 2, BLOCK_K] (`tiles.first_row`). MATRICES: of two, B's comes as
    [2, BLOCK_N / 2, BLOCK_K], a half of each. B_TRANSPOSED: B's comes as [BLOCK_N, BLOCK_K].
    """

    LAYOUT: gl.constexpr
    A_FORM: gl.constexpr
    B_FORM: gl.constexpr
    TOGETHER: gl.constexpr
    BLOCKS: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    BLOCK_K: gl.constexpr
    FOLDED: gl.constexpr
    MATRICES: gl.constexpr
    B_TRANSPOSED: gl.constexpr

    @triton.constexpr_function
    def __init__(self, a, b, tile, pipeline):
        tile, pipeline = getattr(tile, "value", tile), getattr(pipeline, "value", pipeline)
        m, n, k = tile.BLOCK_M, tile.BLOCK_N, int(known(a.block_shape[-1]).value)
        self.LAYOUT, self.TOGETHER, self.BLOCKS = gl.constexpr(pipeline.ACC), known(1), known(1)
        # A block of two parts lies in memory as a whole one does.
        self.A_FORM = gl.constexpr(gl.NVMMASharedLayout.get_default_for([m, k], a.dtype))
        self.B_FORM = gl.constexpr(gl.NVMMASharedLayout.get_default_for([n, k], b.dtype))
        self.BLOCK_M, self.BLOCK_N, self.BLOCK_K = known(m), known(n), known(k)
        self.FOLDED, self.MATRICES = known(len(a.block_shape) == 3), known(len(b.block_shape) - 1)
        self.B_TRANSPOSED = known(tile.B_TRANSPOSED)

    @gluon.jit
    def begin(self, col, step):
        """Return the sums of a tile before its first product, that of B's columns from `col` on and block `step`."""
        return warpgroup_mma_init(gl.zeros((self.BLOCK_M, self.BLOCK_N), gl.float32, self.LAYOUT))

    @gluon.jit
    def columns_at(self, col, k):
        """Return where B's descriptor has the block from column `col` and from `k` along K on."""
        if self.MATRICES > 1:
            return 0, col, k
        elif self.B_TRANSPOSED:
            return col, k
        else:
            return k, col

    @gluon.jit
    def issue(self, rows, columns, acc, NUMBER: gl.constexpr = 0):
        """Begin to add the product of two blocks, which lie in shared memory as they were loaded."""
        if self.FOLDED:
            rows = reinterpret(rows, rows.dtype, [self.BLOCK_M, self.BLOCK_K], self.A_FORM)
        if self.MATRICES > 1:
            columns = reinterpret(columns, columns.dtype, [self.BLOCK_N, self.BLOCK_K], self.B_FORM)
        if self.B_TRANSPOSED:
            columns = columns.permute((1, 0))
        return warpgroup_mma(rows, columns, acc, is_async=True)

    @gluon.jit
    def await_last_but_one(self, acc):
        """Wait until this warp's product before the one just issued has read its blocks."""
        return warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))

    @gluon.jit
    def result(self, acc):
        """Return the finished sums, in registers."""
        return warpgroup_mma_wait(0, deps=(acc,))
