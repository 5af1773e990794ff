"""The weights of all experts as codes with scales, which a kernel widens a tile at a time on the way into the product.

`iris_ops/quantised/packing.py` has the layouts, `widen_*` here are the policies: how codes become numbers in K's order.

A scale of a column multiplies the sum at the end, in fp32. A scale of a group multiplies the tile, which is then
rounded once to the tokens' dtype. So the product is the one of the widened weights in the tokens' dtype. Why not
separate sums for each group, which would be exact: a group of 32 is two instructions long, and its sums would take as
many registers again.
"""

from iris.device import arch
from iris.device.function import device_function
from iris.triton_private import aggregate, base_value
import triton
import triton.language as tl

from ..kernels.tiles import known
from .grouped import Experts

LINE = tl.constexpr(128)  # of `packing.LINE`
_WORDS = tl.constexpr(16)  # of a line, of eight codes each


@device_function
def widen_e4m3(codes, dtype: tl.constexpr):
    """Widen e4m3 bytes to numbers of `dtype`."""
    if arch.is_hip():  # whose e4m3 is another one: the bits go where fp32 has them, but for the exponent's bias
        bits = codes.to(tl.int32)
        return ((((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120).to(dtype)
    else:
        return codes.to(tl.float8e4nv, bitcast=True).to(dtype)


@device_function
def widen_turned_e4m3(codes, dtype: tl.constexpr):
    """Widen e4m3 bytes to numbers of `dtype`, where byte i of word j of a line is entry 32 i + j."""
    return widen_e4m3(_by_words(codes), dtype)


@device_function
def _by_words(codes):
    """Return bytes in K's order, where byte i of word j of a line is entry 32 i + j."""
    ROWS: tl.constexpr = codes.shape[0]
    COLS: tl.constexpr = codes.shape[1]
    lines = tl.reshape(codes, (ROWS, COLS // LINE, 32, 4))
    return tl.reshape(tl.permute(lines, (0, 1, 3, 2)), (ROWS, COLS))


@device_function
def widen_int4(words, dtype: tl.constexpr):
    """Widen the eight codes of a word to integers from -8 to 7."""
    if arch.is_cuda() and dtype == tl.bfloat16:
        # a nibble in the last bits of the bf16 128 makes 128 + code; less 136 that is the weight
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            """{
            .reg .b32 m, o, l, s, t, u, v, w;
            mov.b32 m, 0x43004300;
            mov.b32 o, 0x3f803f80;
            mov.b32 l, 0xc308c308;
            shr.u32 t, $8, 4;
            shr.u32 u, $8, 8;
            shr.u32 v, $8, 12;
            lop3.b32 s, $8, 0x000f000f, m, 0xea;
            lop3.b32 t, t, 0x000f000f, m, 0xea;
            lop3.b32 u, u, 0x000f000f, m, 0xea;
            lop3.b32 v, v, 0x000f000f, m, 0xea;
            fma.rn.bf16x2 s, s, o, l;
            fma.rn.bf16x2 t, t, o, l;
            fma.rn.bf16x2 u, u, o, l;
            fma.rn.bf16x2 v, v, o, l;
            mov.b32 {$0, $1}, s;
            mov.b32 {$2, $3}, t;
            mov.b32 {$4, $5}, u;
            mov.b32 {$6, $7}, v;
            }""",
            "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], (tl.bfloat16,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
        return _in_order(tl.join(a, b), tl.join(c, d), tl.join(e, f), tl.join(g, h))
    else:
        return _in_order(
            _int4(words, 0, dtype), _int4(words, 4, dtype), _int4(words, 8, dtype), _int4(words, 12, dtype)
        )


@device_function
def _int4(words, place: tl.constexpr, dtype: tl.constexpr):
    """Widen two codes of a word, which begin at bit `place` of each half, to integers."""
    return tl.join((((words >> place) & 15) - 8).to(dtype), (((words >> (place + 16)) & 15) - 8).to(dtype))


@device_function
def widen_int8(codes, dtype: tl.constexpr):
    """Widen bytes to integers from -128 to 127, where byte i of word j of a line is entry 32 i + j."""
    return (_by_words(codes).to(tl.float32) - 128.0).to(dtype)


@device_function
def widen_e2m1(words, dtype: tl.constexpr):
    """Widen the eight e2m1 codes of a word: shift their bits to where bf16 or fp32 has them, without the bias."""
    if arch.is_cuda() and dtype == tl.bfloat16:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            """{
            .reg .b32 o, z, s, t, u, v, x, y;
            mov.b32 o, 0x7e807e80;
            mov.b32 z, 0x80008000;
            and.b32 s, $8, 0x81c081c0;
            shl.b32 t, $8, 3;
            and.b32 t, t, 0x81c081c0;
            shl.b32 u, $8, 1;
            shl.b32 x, $8, 6;
            and.b32 x, x, 0x01c001c0;
            lop3.b32 u, u, z, x, 0xea;
            shl.b32 v, $8, 2;
            shr.u32 y, $8, 3;
            and.b32 y, y, 0x01c001c0;
            lop3.b32 v, v, z, y, 0xea;
            fma.rn.bf16x2 s, s, o, z;
            fma.rn.bf16x2 t, t, o, z;
            fma.rn.bf16x2 u, u, o, z;
            fma.rn.bf16x2 v, v, o, z;
            mov.b32 {$0, $1}, s;
            mov.b32 {$2, $3}, t;
            mov.b32 {$4, $5}, u;
            mov.b32 {$6, $7}, v;
            }""",
            "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], (tl.bfloat16,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
        return _in_order(tl.join(a, b), tl.join(c, d), tl.join(e, f), tl.join(g, h))
    else:
        return _in_order(
            _e2m1(words, 6, 15, dtype), _e2m1(words, 3, 12, dtype), _e2m1(words, 0, 14, dtype),
            _e2m1(words, 9, 13, dtype),
        )  # fmt: skip


@device_function
def _e2m1(words, place: tl.constexpr, sign: tl.constexpr, dtype: tl.constexpr):
    """Widen two codes of a word: exponent and mantissa at bit `place` of each half, the sign at bit `sign`."""
    low = (((words >> sign) & 1) << 31) | (((words >> place) & 7) << 22)
    high = (((words >> (sign + 16)) & 1) << 31) | (((words >> (place + 16)) & 7) << 22)
    low, high = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    return tl.join((low * 2.0**126).to(dtype), (high * 2.0**126).to(dtype))


@device_function
def _in_order(first, second, third, fourth):
    """Return the entries of four products in K's order, [rows, 8 words].

    Each product is [rows, words, 2]: the low and the high halves. Word 2 m + h of a line holds entries 2 m and 2 m + 1
    of products 4 h to 4 h + 3, which have 16 entries each.
    """
    ROWS: tl.constexpr = first.shape[0]
    LINES: tl.constexpr = first.shape[1] // _WORDS
    both = tl.join(tl.join(first, third), tl.join(second, fourth))  # [rows, words, half, product // 2, product % 2]
    apart = tl.reshape(both, (ROWS, LINES, 8, 2, 2, 2, 2))
    return tl.reshape(tl.permute(apart, (0, 1, 3, 5, 6, 2, 4)), (ROWS, LINES * LINE))


@device_function
def scales_as_numbers(scales):
    """Return scales in fp32; a byte is the exponent of a power of two."""
    if scales.dtype.is_int():
        exponent = scales.to(tl.int32)
        return tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)  # 2**-127 is subnormal
    else:
        return scales.to(tl.float32)


@device_function
def _scales_in_bf16(scales):
    """Return scales in bf16, which represents them exactly: they are bf16 already, or powers of two."""
    if scales.dtype.is_int():
        exponent = scales.to(tl.int16)
        return tl.where(exponent == 0, 0x40, exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return scales.to(tl.bfloat16)


@aggregate
class CodedExperts:
    """Weights as `Experts`, stored as codes: tiles are loaded as numbers of DTYPE. In memory they are [experts, N, K /
    PACKED].

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
    LINES: tl.constexpr
    GROUP: tl.constexpr
    ZEROS: tl.constexpr
    WIDEN: tl.constexpr
    DTYPE: tl.constexpr

    @triton.constexpr_function
    def __init__(self, data, K, N, stride_e, stride_n, scale, scale_e, scale_n, codes, WIDEN, DTYPE):
        self.data = data
        self.K, self.N = known(K), known(N)
        self.stride_e, self.stride_n = known(stride_e), known(stride_n)
        self.scale, self.scale_e, self.scale_n = scale, known(scale_e), known(scale_n)
        self.TMA = known(hasattr(data, "block_shape"))
        codes = getattr(codes, "value", codes)
        self.PACKED, self.LINES, self.GROUP = known(codes.PACKED), known(codes.LINES), known(codes.GROUP)
        self.ZEROS, self.WIDEN, self.DTYPE = known(codes.ZEROS), tl.constexpr(WIDEN), tl.constexpr(DTYPE)

    @device_function
    def load(self, expert, k, n, ROWS: tl.constexpr, COLS: tl.constexpr):
        """Load the tile [ROWS, COLS] at (k, n) of one expert's weight."""
        c = n + tl.arange(0, COLS)
        if self.TMA:
            codes = tl.reshape(self.data.load([expert, n, k // self.PACKED]), (COLS, ROWS // self.PACKED))
        else:
            codes = self._codes(expert, k, c, c < self.N, ROWS)
        return self._widened(codes, expert, k, c, c < self.N, ROWS).T

    @device_function
    def halves(self, expert, k, n, ROWS: tl.constexpr, COLS: tl.constexpr):
        """Load [ROWS, 2 COLS] of one expert's weight, two matrices side by side: the tile at (k, n) of each."""
        i, width = tl.arange(0, 2 * COLS), self.N // 2
        c, inside = n + i % COLS + i // COLS * width, n + i % COLS < width
        if self.TMA:
            codes = tl.reshape(self.data.load([expert, 0, n, k // self.PACKED]), (2 * COLS, ROWS // self.PACKED))
        else:
            codes = self._codes(expert, k, c, inside, ROWS)
        return self._widened(codes, expert, k, c, inside, ROWS).T

    @device_function
    def finished(self, product, expert, c):
        """Multiply a product [rows, columns c] in fp32 by the columns' scales."""
        if self.GROUP:
            return product
        else:
            places = self.scale + expert.to(tl.int64) * self.scale_e + c.to(tl.int64) * self.scale_n
            return product * scales_as_numbers(tl.load(places, mask=c < self.N, other=0.0))[None, :]

    @device_function
    def _codes(self, expert, k, c, inside, ROWS: tl.constexpr):
        """Load the codes of columns c from k on. If an element holds entries of whole lines, the last line is
        padded."""
        w = k // self.PACKED + tl.arange(0, ROWS // self.PACKED)
        held = tl.cdiv(self.K, LINE) * LINE // self.PACKED if self.LINES else self.K
        first = self.data + expert.to(tl.int64) * self.stride_e
        places = first + (c.to(tl.int64) * self.stride_n)[:, None] + w[None, :]
        return tl.load(places, mask=inside[:, None] & (w < held)[None, :], other=0)

    @device_function
    def _widened(self, codes, expert, k, c, inside, ROWS: tl.constexpr):
        """Return columns c from k on, [columns, ROWS], less the zero points of their groups, times the scales."""
        if self.GROUP:
            GROUPS: tl.constexpr = max(1, ROWS // self.GROUP)
            first = self.scale + expert.to(tl.int64) * self.scale_e
            g = k // self.GROUP + tl.arange(0, GROUPS)
            places = first + (c.to(tl.int64) * self.scale_n)[:, None] + (g * (1 + self.ZEROS))[None, :]
            mask = inside[:, None] & (g * self.GROUP < self.K)[None, :]
            scales = tl.load(places, mask=mask, other=0)
            apart: tl.constexpr = (c.shape[0], GROUPS, ROWS // GROUPS)
            if (
                arch.is_cuda()
                and self.DTYPE == tl.bfloat16
                and scales.dtype != tl.float32
                and scales.dtype != tl.float16
            ):
                # both factors are numbers of bf16, so this too is rounded once
                numbers = tl.reshape(self.WIDEN(codes, tl.bfloat16), apart)
                if self.ZEROS:  # the difference of integers is exact
                    numbers -= tl.load(places + 1, mask=mask, other=0).to(tl.bfloat16)[:, :, None]
                numbers, factors = tl.broadcast(numbers, _scales_in_bf16(scales)[:, :, None])
                scaled = tl.inline_asm_elementwise(
                    "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }",
                    "=r,r,r", [numbers, factors], tl.bfloat16, is_pure=True, pack=2,
                )  # fmt: skip
                return tl.reshape(scaled, (c.shape[0], ROWS))
            else:
                numbers = tl.reshape(self.WIDEN(codes, tl.float32), apart)
                if self.ZEROS:
                    numbers -= tl.load(places + 1, mask=mask, other=0).to(tl.float32)[:, :, None]
                scaled = numbers * scales_as_numbers(scales)[:, :, None]
                return tl.reshape(scaled, (c.shape[0], ROWS)).to(self.DTYPE)
        else:
            return self.WIDEN(codes, self.DTYPE)


@device_function
def experts_of(b, scale, K, N, strides, TRANSPOSED: tl.constexpr, codes: tl.constexpr, widen: tl.constexpr,
               dtype: tl.constexpr):  # fmt: skip
    """Return the weights b, to be read by tiles.

    `scale` is an `ExpertScales` and `codes` a `Codes`; both are None for weights in `dtype`.
    """
    if scale is None:
        return Experts(b, K, N, strides.be, strides.bk, strides.bn, TRANSPOSED)
    else:
        return CodedExperts(b, K, N, strides.be, strides.bn, scale.data, scale.e, scale.n, codes, widen, dtype)
