"""The steps of a grouped product: which rows a program multiplies, with which expert's weight, and what becomes of it.

A *pair* is a token and one of its experts, number t * top_k + j. A program takes a block of one expert's pairs and some
of the expert's columns. It finds the pairs in one of two ways:

    sorted_block    by what `routing.py` has sorted, for many pairs
    pair_block      for few, without a kernel ahead: a program for each pair looks through all of them, and takes all
                    that have its expert if it is the first of these; else it has nothing to do

Rows of A are gathered by pointers, weights are read by tensor descriptor where rows begin at whole vectors.
"""

from iris.device import arch
from iris.device.context import DeviceContext
from iris.device.function import device_function
from iris.triton_private import aggregate, base_value
import triton
import triton.language as tl

from ..kernels.tiles import known
from .routing import report_experts

# Experts of one token, at most: `planning/experts.py`.
LEAST_PAIRS = tl.constexpr(64)


@aggregate
class Experts:
    """The weights of all experts, [experts, K, N], read by tiles; what lies beyond an expert's edges reads as zero.

    `data` is a tensor descriptor of blocks [1, K, N], or with `TRANSPOSED` [1, N, K], or a pointer with three strides.
    Of `halves`, where N is that of two matrices together, blocks are [1, K, 2, N] or [1, 2, N, K].
    """

    data: base_value
    K: base_value
    N: base_value
    stride_e: base_value
    stride_k: base_value
    stride_n: base_value
    TMA: tl.constexpr
    TRANSPOSED: tl.constexpr

    @triton.constexpr_function
    def __init__(self, data, K, N, stride_e, stride_k, stride_n, TRANSPOSED):
        self.data = data
        self.K, self.N = known(K), known(N)
        self.stride_e, self.stride_k, self.stride_n = known(stride_e), known(stride_k), known(stride_n)
        self.TMA, self.TRANSPOSED = known(hasattr(data, "block_shape")), known(TRANSPOSED)

    @device_function
    def load(self, expert, k, n, ROWS: tl.constexpr, COLS: tl.constexpr):
        """Load the tile [ROWS, COLS] at (k, n) of one expert's weight."""
        if self.TMA:
            if self.TRANSPOSED:
                return tl.reshape(self.data.load([expert, n, k]), (COLS, ROWS)).T
            else:
                return tl.reshape(self.data.load([expert, k, n]), (ROWS, COLS))
        else:
            r, c = k + tl.arange(0, ROWS), n + tl.arange(0, COLS)
            first = self.data + expert.to(tl.int64) * self.stride_e
            places = first + (r.to(tl.int64) * self.stride_k)[:, None] + (c.to(tl.int64) * self.stride_n)[None, :]
            return tl.load(places, mask=(r < self.K)[:, None] & (c < self.N)[None, :], other=0.0)

    @device_function
    def halves(self, expert, k, n, ROWS: tl.constexpr, COLS: tl.constexpr):
        """Load [ROWS, 2 COLS] of one expert's weight, two matrices side by side: the tile at (k, n) of each."""
        if self.TMA:
            if self.TRANSPOSED:
                return tl.reshape(self.data.load([expert, 0, n, k]), (2 * COLS, ROWS)).T
            else:
                return tl.reshape(self.data.load([expert, k, 0, n]), (ROWS, 2 * COLS))
        else:
            i = tl.arange(0, 2 * COLS)
            r, c, width = k + tl.arange(0, ROWS), n + i % COLS, self.N // 2
            first = self.data + expert.to(tl.int64) * self.stride_e
            across = ((c + i // COLS * width).to(tl.int64) * self.stride_n)[None, :]
            places = first + (r.to(tl.int64) * self.stride_k)[:, None] + across
            return tl.load(places, mask=(r < self.K)[:, None] & (c < width)[None, :], other=0.0)

    @device_function
    def finished(self, product, expert, c):
        """Return a product [rows, columns c] unchanged, because there are no scales."""
        return product


@device_function
def sorted_block(order, offsets, block, experts, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """Return (expert, pairs [BLOCK_M], which pairs exist) of a block; the block does not exist if `expert >=
    experts`."""
    e = tl.arange(0, EXPERTS)
    begins = tl.load(offsets + e, mask=e < experts, other=0)
    ends = tl.load(offsets + e + 1, mask=e < experts, other=0)
    blocks = (ends - begins + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(blocks)
    expert = tl.sum((upto <= block).to(tl.int32))
    own = e == expert
    first = tl.sum(tl.where(own, begins + (block - (upto - blocks)) * BLOCK_M, 0))
    end = tl.sum(tl.where(own, ends, 0))
    i = first + tl.arange(0, BLOCK_M)
    return expert, tl.load(order + i, mask=i < end, other=0), i < end


@device_function
def same_expert(chosen, pair, pairs, experts, PAIRS: tl.constexpr):
    """Return (the expert of `pair`, how many pairs have it, which pairs have it).

    The number is 0 where a program has nothing to multiply: an earlier pair has the expert, or there is no such expert.
    PAIRS is 1 for a single token, whose pairs are taken one by one.
    """
    expert = tl.load(chosen + pair)
    valid = (expert >= 0) & (expert < experts)
    if PAIRS == 1:
        return expert.to(tl.int32), valid.to(tl.int32), valid
    else:
        q = tl.arange(0, PAIRS)
        same = (tl.load(chosen + q, mask=q < pairs, other=-1) == expert) & (q < pairs)
        first = tl.sum((same & (q < pair)).to(tl.int32)) == 0
        return expert.to(tl.int32), tl.where(valid & first, tl.sum(same.to(tl.int32)), 0), same


@device_function
def check_pairs(ctx_ptr, chosen, pairs, experts, PAIRS: tl.constexpr, WORLD_SIZE: tl.constexpr, WAITER: tl.constexpr):
    """Report experts that are out of range, in the first program."""
    if tl.program_id(0) == 0:
        q = tl.arange(0, PAIRS if PAIRS > 1 else LEAST_PAIRS)
        expert = tl.load(chosen + q, mask=q < pairs, other=0)
        ctx = DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr).to(tl.int32), WORLD_SIZE)
        report_experts(ctx, expert, (expert < 0) | (expert >= experts), experts, WAITER)


@device_function
def pair_block(same, pair, first, BLOCK_M: tl.constexpr, PAIRS: tl.constexpr):
    """Return (pairs [BLOCK_M], which pairs exist) of the pairs where `same` holds, from number `first` on.

    `pair` is the one that determined the expert.
    """
    i = first + tl.arange(0, BLOCK_M)
    if PAIRS == 1:
        return i * 0 + pair, i == 0
    else:
        q = tl.arange(0, PAIRS)
        count = tl.cumsum(same.to(tl.int32))
        selected = same[None, :] & (count[None, :] == i[:, None] + 1)
        return tl.sum(tl.where(selected, q[None, :], 0), 1), i < tl.sum(same.to(tl.int32))


@aggregate
class PairRows:
    """The rows `r` of A that a program multiplies, those of them that are its `own`."""

    data: base_value
    r: tl.tensor
    own: tl.tensor
    stride_row: base_value
    stride_col: base_value

    @triton.constexpr_function
    def __init__(self, data, r, own, stride_row, stride_col):
        self.data, self.r, self.own = data, r, own
        self.stride_row, self.stride_col = known(stride_row), known(stride_col)

    @device_function
    def load(self, k, K, BLOCK_K: tl.constexpr):
        """Load columns from k on; rows that are not the program's own and columns beyond K read as zero."""
        c = k + tl.arange(0, BLOCK_K)
        across = (c.to(tl.int64) * self.stride_col)[None, :]
        places = self.data + (self.r.to(tl.int64) * self.stride_row)[:, None] + across
        return tl.load(places, mask=self.own[:, None] & (c < K)[None, :], other=0.0)


@device_function
def product(rows, B, expert, col, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Multiply `rows` by columns from `col` on of an expert's weight: [BLOCK_M, BLOCK_N] in fp32."""
    BLOCK_M: tl.constexpr = rows.r.shape[0]
    if BLOCK_M < 64 and BLOCK_N >= 64:  # the tensor cores' rows are full however few rows A has
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for k in range(0, B.K, BLOCK_K):
            x = rows.load(k, B.K, BLOCK_K)
            acc = arch.dot(B.load(expert, k, col, BLOCK_K, BLOCK_N).T, x.T, acc)
        return B.finished(acc.T, expert, col + tl.arange(0, BLOCK_N))
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, B.K, BLOCK_K):
            x = rows.load(k, B.K, BLOCK_K)
            acc = arch.dot(x, B.load(expert, k, col, BLOCK_K, BLOCK_N), acc)
        return B.finished(acc, expert, col + tl.arange(0, BLOCK_N))


@device_function
def halves_product(rows, B, expert, col, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the products by both matrices, of columns from `col` on; one instruction multiplies both."""
    BLOCK_M: tl.constexpr = rows.r.shape[0]
    if BLOCK_M < 64:
        acc = tl.zeros((2 * BLOCK_N, BLOCK_M), dtype=tl.float32)
        for k in range(0, B.K, BLOCK_K):
            x = rows.load(k, B.K, BLOCK_K)
            acc = arch.dot(B.halves(expert, k, col, BLOCK_K, BLOCK_N).T, x.T, acc)
        first, second = tl.split(tl.permute(tl.reshape(acc, (2, BLOCK_N, BLOCK_M)), (2, 1, 0)))
    else:
        acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), dtype=tl.float32)
        for k in range(0, B.K, BLOCK_K):
            x = rows.load(k, B.K, BLOCK_K)
            acc = arch.dot(x, B.halves(expert, k, col, BLOCK_K, BLOCK_N), acc)
        first, second = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
    c = col + tl.arange(0, BLOCK_N)
    return B.finished(first, expert, c), B.finished(second, expert, B.N // 2 + c)


@device_function
def two_products(rows, B, expert, col, second_col, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return two results of `product`, for columns from `col` on and from `second_col` on, reading each block of rows
    once."""
    BLOCK_M: tl.constexpr = rows.r.shape[0]
    if BLOCK_M < 64 and BLOCK_N >= 64:
        first, second = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32), tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for k in range(0, B.K, BLOCK_K):
            x = rows.load(k, B.K, BLOCK_K).T
            first = arch.dot(B.load(expert, k, col, BLOCK_K, BLOCK_N).T, x, first)
            second = arch.dot(B.load(expert, k, second_col, BLOCK_K, BLOCK_N).T, x, second)
        first, second = first.T, second.T
    else:
        first, second = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32), tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, B.K, BLOCK_K):
            x = rows.load(k, B.K, BLOCK_K)
            first = arch.dot(x, B.load(expert, k, col, BLOCK_K, BLOCK_N), first)
            second = arch.dot(x, B.load(expert, k, second_col, BLOCK_K, BLOCK_N), second)
    c = tl.arange(0, BLOCK_N)
    return B.finished(first, expert, col + c), B.finished(second, expert, second_col + c)


@device_function
def bias_of(bias, expert, c, cols, first=0):
    """Load an expert's bias of columns c from `first` on, in fp32; zero beyond `cols`."""
    return tl.load(bias.data + first + expert.to(tl.int64) * bias.stride + c, mask=c < cols, other=0.0).to(tl.float32)
