"""The weights of all experts as codes with scales, which a kernel widens a tile at a time on the way into the product.

    weight  bytes [experts, N, K / PACKED]: e4m3, or two codes of four bits, the one of the lower K in the low bits
    scale   [experts, N], or [experts, N, ceil(K / GROUP)]: floating-point numbers, or exponents in bytes (e8m0)

`widen_*` are the policies: how codes become numbers. A scale of a column multiplies the sum at the end, in fp32. A
scale of a group multiplies the tile, which is then rounded once to the tokens' dtype. So the product is the one of the
widened weights in the tokens' dtype. Why not sums of their own for each group, which would be exact: a group of 32 is
two instructions long, and their sums would take as many registers again.
"""

from iris.device import arch
from iris.device.function import device_function
from iris.triton_private import aggregate, base_value
import triton
import triton.language as tl

from ..kernels.tiles import known
from .grouped import Experts


@device_function
def _nibbles(codes):
    """The codes of four bits in bytes [..., n], as int32 [..., 2 n]."""
    return tl.interleave(codes & 15, codes >> 4).to(tl.int32)


@device_function
def widen_e4m3(codes, dtype: tl.constexpr):
    """The numbers of bytes e4m3."""
    if arch.is_hip():  # whose e4m3 is another one: the bits go where fp32 has them, but for the exponent's bias
        bits = codes.to(tl.int32)
        return ((((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120).to(dtype)
    else:
        return codes.to(tl.float8e4nv, bitcast=True).to(dtype)


@device_function
def widen_int4(codes, dtype: tl.constexpr):
    """The integers, from -8 on, of two codes in a byte."""
    return (_nibbles(codes) - 8).to(dtype)


@device_function
def widen_e2m1(codes, dtype: tl.constexpr):
    """The numbers of two codes e2m1 in a byte: their bits go where fp32 has them, but for the exponent's bias."""
    bits = _nibbles(codes)
    return ((((bits & 8) << 28) | ((bits & 7) << 22)).to(tl.float32, bitcast=True) * 2.0**126).to(dtype)


@device_function
def scales_as_numbers(scales):
    """Scales in fp32; a byte is the exponent of a power of two."""
    if scales.dtype.is_int():
        exponent = scales.to(tl.int32)
        return tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)  # 2**-127 is subnormal
    else:
        return scales.to(tl.float32)


@aggregate
class CodedExperts:
    """As `Experts`, of codes: tiles come as numbers of DTYPE. Weights lie [experts, N, K / PACKED] in memory.

    `data` is a tensor descriptor of blocks [1, N, K / PACKED], of `halves` [1, 2, N, K / PACKED], or a pointer.
    """

    data: base_value
    K: base_value
    N: base_value
    stride_e: base_value
    stride_n: base_value
    scale: base_value
    scale_e: base_value
    scale_n: base_value
    TMA: tl.constexpr
    PACKED: tl.constexpr
    GROUP: tl.constexpr
    WIDEN: tl.constexpr
    DTYPE: tl.constexpr

    @triton.constexpr_function
    def __init__(self, data, K, N, stride_e, stride_n, scale, scale_e, scale_n, PACKED, GROUP, WIDEN, DTYPE):
        self.data = data
        self.K, self.N = known(K), known(N)
        self.stride_e, self.stride_n = known(stride_e), known(stride_n)
        self.scale, self.scale_e, self.scale_n = scale, known(scale_e), known(scale_n)
        self.TMA = known(hasattr(data, "block_shape"))
        self.PACKED, self.GROUP = known(PACKED), known(GROUP)
        self.WIDEN, self.DTYPE = tl.constexpr(WIDEN), tl.constexpr(DTYPE)

    @device_function
    def load(self, expert, k, n, ROWS: tl.constexpr, COLS: tl.constexpr):
        """The tile [ROWS, COLS] at (k, n) of one expert's weight."""
        c = n + tl.arange(0, COLS)
        if self.TMA:
            codes = tl.reshape(self.data.load([expert, n, k // self.PACKED]), (COLS, ROWS // self.PACKED))
        else:
            codes = self._codes(expert, k, c, c < self.N, ROWS)
        return self._widened(codes, expert, k, c, c < self.N, ROWS).T

    @device_function
    def halves(self, expert, k, n, ROWS: tl.constexpr, COLS: tl.constexpr):
        """[ROWS, 2 COLS]: the gate's tile at (k, n) of one expert's weight, and beside it the one of up."""
        i, width = tl.arange(0, 2 * COLS), self.N // 2
        c, inside = n + i % COLS + i // COLS * width, n + i % COLS < width
        if self.TMA:
            codes = tl.reshape(self.data.load([expert, 0, n, k // self.PACKED]), (2 * COLS, ROWS // self.PACKED))
        else:
            codes = self._codes(expert, k, c, inside, ROWS)
        return self._widened(codes, expert, k, c, inside, ROWS).T

    @device_function
    def finished(self, product, expert, c):
        """A product [rows, columns c] in fp32, times the columns' scales."""
        if self.GROUP:
            return product
        else:
            places = self.scale + expert.to(tl.int64) * self.scale_e + c.to(tl.int64) * self.scale_n
            return product * scales_as_numbers(tl.load(places, mask=c < self.N, other=0.0))[None, :]

    @device_function
    def _codes(self, expert, k, c, inside, ROWS: tl.constexpr):
        w = k // self.PACKED + tl.arange(0, ROWS // self.PACKED)
        first = self.data + expert.to(tl.int64) * self.stride_e
        places = first + (c.to(tl.int64) * self.stride_n)[:, None] + w[None, :]
        return tl.load(places, mask=inside[:, None] & (w * self.PACKED < self.K)[None, :], other=0)

    @device_function
    def _widened(self, codes, expert, k, c, inside, ROWS: tl.constexpr):
        """Columns c from k on, [columns, ROWS], times the scales of their groups."""
        if self.GROUP:
            GROUPS: tl.constexpr = max(1, ROWS // self.GROUP)
            first = self.scale + expert.to(tl.int64) * self.scale_e
            g = k // self.GROUP + tl.arange(0, GROUPS)
            places = first + (c.to(tl.int64) * self.scale_n)[:, None] + g[None, :]
            mask = inside[:, None] & (g * self.GROUP < self.K)[None, :]
            scales = scales_as_numbers(tl.load(places, mask=mask, other=0))
            numbers = tl.reshape(self.WIDEN(codes, tl.float32), (c.shape[0], GROUPS, ROWS // GROUPS))
            return tl.reshape(numbers * scales[:, :, None], (c.shape[0], ROWS)).to(self.DTYPE)
        else:
            return self.WIDEN(codes, self.DTYPE)

    @device_function
    def columns(self, expert, valid, c):
        """(experts [n], which there are, columns) as `along` takes them."""
        return expert, valid, c

    @device_function
    def along(self, columns, k, BLOCK_K: tl.constexpr):
        """Numbers in fp32 from k on of some columns of some experts' weights, [experts, columns, BLOCK_K]."""
        expert, valid, c = columns
        inside = valid[:, None] & (c < self.N)[None, :]
        w = k // self.PACKED + tl.arange(0, BLOCK_K // self.PACKED)
        own = (expert.to(tl.int64) * self.stride_e)[:, None] + (c.to(tl.int64) * self.stride_n)[None, :]
        mask = inside[:, :, None] & (w * self.PACKED < self.K)[None, None, :]
        numbers = self.WIDEN(tl.load(self.data + own[:, :, None] + w[None, None, :], mask=mask, other=0), tl.float32)
        if self.GROUP:
            GROUPS: tl.constexpr = max(1, BLOCK_K // self.GROUP)
            g = k // self.GROUP + tl.arange(0, GROUPS)
            own = (expert.to(tl.int64) * self.scale_e)[:, None] + (c.to(tl.int64) * self.scale_n)[None, :]
            mask = inside[:, :, None] & (g * self.GROUP < self.K)[None, None, :]
            scales = scales_as_numbers(tl.load(self.scale + own[:, :, None] + g[None, None, :], mask=mask, other=0))
            grouped = tl.reshape(numbers, (expert.shape[0], c.shape[0], GROUPS, BLOCK_K // GROUPS))
            numbers = tl.reshape(grouped * scales[:, :, :, None], (expert.shape[0], c.shape[0], BLOCK_K))
        return numbers

    @device_function
    def finished_of(self, products, columns):
        """Products [experts, columns] in fp32, times the columns' scales."""
        if self.GROUP:
            return products
        else:
            expert, valid, c = columns
            own = (expert.to(tl.int64) * self.scale_e)[:, None] + (c.to(tl.int64) * self.scale_n)[None, :]
            mask = valid[:, None] & (c < self.N)[None, :]
            return products * scales_as_numbers(tl.load(self.scale + own, mask=mask, other=0))


@device_function
def experts_of(
    b, scale, K, N, strides, TRANSPOSED: tl.constexpr, codes: tl.constexpr, WIDEN: tl.constexpr, dtype: tl.constexpr
):
    """The weights b, read by tiles. scale: `ExpertScales`, codes: `Codes`; None of weights in `dtype`."""
    if scale is None:
        return Experts(b, K, N, strides.be, strides.bk, strides.bn, TRANSPOSED)
    else:
        return CodedExperts(
            b, K, N, strides.be, strides.bn, scale.data, scale.e, scale.n, codes.PACKED, codes.GROUP, WIDEN, dtype
        )
