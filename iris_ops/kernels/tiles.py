"""Code that all fused kernels share: matrices read by tiles, the product of one tile, and packed tiles in staging
memory.

There is one K loop for all portable kernels. A matrix is a tensor descriptor where the hardware can load it so, else a
pointer with two strides; a kernel does not see which.
"""

from iris.device import arch
from iris.device.function import device_function
from iris.triton_private import aggregate, base_value
import triton
import triton.language as tl


@triton.constexpr_function
def known(x):
    """Return `x` as a constexpr if the compiler knows it, so that it stays known in an aggregate.

    Sizes, flags and a stride of 1 are such values.
    """
    x = getattr(x, "value", x)
    return tl.constexpr(x) if isinstance(x, int) else x


@aggregate
class Matrix:
    """A matrix [rows, cols] in memory, read by tiles; what lies beyond its edges reads as zero.

    `data` is a tensor descriptor (`TMA`) or a pointer with two strides. With `TRANSPOSED` a descriptor describes
    [cols, rows], the way `nn.Linear` stores its weight. One of three dimensions is of folded rows (`FOLDED`), see
    `first_row`.
    """

    data: base_value
    rows: base_value
    cols: base_value
    stride_row: base_value
    stride_col: base_value
    TMA: tl.constexpr
    TRANSPOSED: tl.constexpr
    FOLDED: tl.constexpr

    @triton.constexpr_function
    def __init__(self, data, rows, cols, stride_row, stride_col, TRANSPOSED=False):
        self.data = data
        self.rows = known(rows)
        self.cols = known(cols)
        self.stride_row = known(stride_row)
        self.stride_col = known(stride_col)
        block = getattr(data, "block_shape", None)
        self.TMA = known(block is not None)
        self.TRANSPOSED = known(TRANSPOSED)
        self.FOLDED = known(block is not None and len(block) == 3)

    @device_function
    def load(self, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
        """Load the tile [ROWS, COLS] at (row, col)."""
        if self.TMA:
            if self.FOLDED:
                return tl.reshape(self.data.load([0, 0, col]), (ROWS, COLS))
            elif self.TRANSPOSED:
                return self.data.load([col, row]).T
            else:
                return self.data.load([row, col])
        else:
            r = row + tl.arange(0, ROWS)
            c = col + tl.arange(0, COLS)
            pointers = self.data + (r.to(tl.int64) * self.stride_row)[:, None] + (c.to(tl.int64) * self.stride_col)
            return tl.load(pointers, mask=(r < self.rows)[:, None] & (c < self.cols)[None, :], other=0.0)

    @device_function
    def pointers(self, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
        """Return pointers to the tile at (row, col), and which of them lie inside; not for descriptors."""
        return self.places(row + tl.arange(0, ROWS), col + tl.arange(0, COLS))

    @device_function
    def places(self, r, c):
        """Return pointers to rows r and columns c, and which of them lie inside."""
        addresses = self.data + (r.to(tl.int64) * self.stride_row)[:, None] + (c.to(tl.int64) * self.stride_col)
        return addresses, (r < self.rows)[:, None] & (c < self.cols)[None, :]

    @device_function
    def until(self, rows, cols):
        """Return the same matrix with other edges; not for descriptors."""
        return Matrix(self.data, rows, cols, self.stride_row, self.stride_col)


# What a descriptor reads beyond the last row is zero, but slow, as if all programs asked one place for it. So a tile
# that would end there is loaded from an earlier row on, and rows before its first are nobody's. A matrix lower than a
# tile, but at least half as high, is described as two halves of one that overlap, *folded*
# (`descriptors.rows_operand`).


@device_function
def first_row(row, rows, BLOCK_M: tl.constexpr):
    """Return the first row to load for a tile from `row` on, in a matrix of `rows` rows."""
    return tl.minimum(row, tl.maximum(rows - BLOCK_M, 0))


@device_function
def rows_from(first, row, rows, i, BLOCK_M: tl.constexpr, FOLDED: tl.constexpr):
    """Return (rows of the matrix, whether they belong to the tile) for the rows `i` of a loaded tile; see
    `first_row`."""
    if FOLDED:
        half: tl.constexpr = BLOCK_M // 2
        r = i + (i >= half).to(tl.int32) * (rows - BLOCK_M)
        return r, (r >= row) & ((i < half) | (r >= half))
    else:
        r = first + i
        return r, r >= row


@device_function
def multiply(a, b, row, col, a_first, b_first, depth, acc, tile: tl.constexpr):
    """Return `acc + a[row:, a_first:a_first+depth] @ b[b_first:b_first+depth, col:]` for one tile, in fp32."""
    for k in range(0, depth, tile.BLOCK_K):
        x = a.load(row, a_first + k, tile.BLOCK_M, tile.BLOCK_K)
        y = b.load(b_first + k, col, tile.BLOCK_K, tile.BLOCK_N)
        acc = arch.dot(x, y, acc)
    return acc


@device_function
def multiply_transposed(a, b, row, col, K, tile: tl.constexpr):
    """Return `(a[row:] @ b[:, col:]).T` for one tile, in fp32, which fills the tensor cores' rows however few A has.

    If the columns do not fill those rows, A's rows take their place.
    """
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    if BLOCK_N < 64:
        start = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        return multiply(a, b, row, col, 0, 0, K, start, tile).T
    else:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            x = a.load(row, k, BLOCK_M, BLOCK_K)
            y = b.load(k, col, BLOCK_K, BLOCK_N)
            acc = arch.dot(y.T, x.T, acc)
        return acc


@device_function
def multiply_blocks(a, b, scales, stride, row, col, K, tile: tl.constexpr):
    """Return the same where each column of B has a scale for each block along K, which multiplies the block's products.

    `scales` are [columns, blocks], rows `stride` apart.
    """
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    c = tl.minimum(col + tl.arange(0, BLOCK_N), b.cols - 1)
    place = scales + c.to(tl.int64) * stride
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    last = (K - 1) // BLOCK_K
    coming = tl.load(place)
    for k in range(0, K, BLOCK_K):
        factors = coming
        coming = tl.load(place + tl.minimum(k // BLOCK_K + 1, last))  # a step ahead: it waits for no block
        x = a.load(row, k, BLOCK_M, BLOCK_K)
        y = b.load(k, col, BLOCK_K, BLOCK_N)
        fresh = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        acc += arch.dot(y.T, x.T, fresh) * factors[:, None]
    return acc


@device_function
def scale_transposed(acc, a_scales, b_scales, r, col, M, N):
    """Multiply the result of `multiply_transposed` by the scales of A's rows `r` and of B's columns.

    A's come first, as in `hopper/pipeline.py`: each of the two products is rounded, so their order affects bits. B has
    none where they multiplied blocks.
    """
    acc *= tl.load(a_scales + r, mask=r < M, other=0.0)[None, :]
    if b_scales is None:
        return acc
    else:
        c = col + tl.arange(0, acc.shape[0])
        return acc * tl.load(b_scales + c, mask=c < N, other=0.0)[:, None]


@device_function
def start_in_turn(stagger):
    """Wait so that the grid's programs start one after the other, over `stagger` ticks: so they end in turn."""
    if not arch.INTERPRET:
        begin = arch.clock()
        while arch.clock() - begin < stagger * tl.program_id(0) // tl.num_programs(0):
            pass


@device_function
def add_bias(acc, bias, col, cols, BLOCK_N: tl.constexpr):
    """Return `acc + bias[col:]`, with zero for columns from `cols` on."""
    c = col + tl.arange(0, BLOCK_N)
    return acc + tl.load(bias + c, mask=c < cols, other=0.0).to(tl.float32)[None, :]


@device_function
def packed_rows(staging, index, r, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return pointers to rows r of staged tile number `index`.

    A staged tile is [ROWS, COLS], contiguous, hence aligned whatever the shape of the matrix.
    """
    start = staging + index.to(tl.int64) * (ROWS * COLS)
    return start + (r * COLS)[:, None] + tl.arange(0, COLS)[None, :]
