"""Widen stored weights to bf16 in registers: a policy for each format, which `weight_stream.py` takes.

A line is 128 entries of a row along K. Words of a line become products: tensors of bf16, each with the entries that one
dot product takes. Every function here works on single words or numbers, so any kernel of Triton or Gluon may call it
on tensors in any layout, as long as a thread holds two neighbouring words.

Another format is another `Widening`, its packing (`packing.py`), and its name in the format (`planning/weights/`).
"""

from dataclasses import dataclass
from math import log2
import struct
from typing import Any

from iris.device.function import device_function
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
import triton.language as tl

_ROWS_SCALED = 2.0**64  # of A, in `weight_stream.py`


def _pair(number: float) -> str:
    """Return the bits of two equal bf16 numbers."""
    return f"0x{_bits(number):04x}{_bits(number):04x}"


def _bits(number: float) -> int:
    """Return the bits of a bf16 number."""
    return struct.unpack("<I", struct.pack("<f", number))[0] >> 16


@dataclass(frozen=True)
class Widening:
    """A format's policy.

    `words`: a device function from int32 words to a tuple of `PRODUCTS` bf16 tensors like them. `off`: by what factor
    these are too small; where that is not 1, A or scales must be scaled by 2**64. `ADDED`: what is then to be added to
    them; a kernel begins sums with `LACKED` times the sum of A, or adds that to each. `WORDS`: int32 words of a line.
    `RUNS`: whether product i has the run of 128 / PRODUCTS entries that is number i of a line; else it has each fourth
    entry from i on.
    """

    words: triton.JITFunction
    entry: Any
    """A device function of Triton: (a row's pointer, indices along K, mask) to numbers in float32, in any kernel."""
    off: float = 1.0
    ADDED: float = 0.0
    WORDS: int = 32
    PRODUCTS: int = 4
    RUNS: bool = False

    @property
    def SCALED(self) -> bool:
        """Return whether A must be scaled by 2**64, which keeps products away from float32's subnormal numbers."""
        return self.off != 1.0

    @property
    def later(self) -> float:
        """Return the factor that sums are multiplied by afterwards, where rows of A were scaled."""
        return self.off / _ROWS_SCALED if self.SCALED else 1.0

    @property
    def AFTER(self) -> float:
        """Return the factor that sums are multiplied by afterwards, where scales were multiplied by `later`."""
        return _ROWS_SCALED if self.SCALED else 1.0

    @property
    def SHIFT(self) -> int:
        """Return `later` as a power of two."""
        return int(log2(self.later))

    @property
    def LACKED(self) -> float:
        """Return what is to be added to widened numbers before they are multiplied by `off`."""
        return self.ADDED / self.off

    @property
    def LACKED_BITS(self) -> int:
        """Return the same as the bits of a bf16 number, a signed integer."""
        bits = _bits(self.LACKED)
        return bits - (bits >> 15 << 16)

    @property
    def ADDING_EACH(self) -> str:
        """Return the instructions that add the integers $2, as widened codes are, to two bf16 numbers, exactly."""
        return f"{{ .reg .b32 c; mov.b32 c, {_pair(1 / self.off)}; fma.rn.bf16x2 $0, $2, c, $1; }}"

    @property
    def ADDING(self) -> str:
        """Return the instructions that add `LACKED` to two bf16 numbers, exactly."""
        return f"{{ .reg .b32 c; mov.b32 c, {_pair(self.LACKED)}; add.rn.bf16x2 $0, $1, c; }}"

    @property
    def TIMES_LATER(self) -> str:
        """Return the instructions that multiply two bf16 numbers by `later`."""
        return f"{{ .reg .b32 c; mov.b32 c, {_pair(self.later)}; mul.rn.bf16x2 $0, $1, c; }}"

    @property
    def cache_key(self) -> str:
        """Return a string of all that a compiled kernel of the stream depends on."""
        return f"{self.words.cache_key}-{self.off}-{self.ADDED}-{self.WORDS}-{self.PRODUCTS}-{self.RUNS}"


@gluon.jit
def _e4m3(words):
    """Widen e4m3 codes to bf16 times 2**-120: shift their bits to where bf16 has them, in two instructions a weight."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, s, t, u, v;
        prmt.b32 a, $4, $5, 0x4000;
        prmt.b32 b, $4, $5, 0x5110;
        prmt.b32 c, $4, $5, 0x6220;
        prmt.b32 d, $4, $5, 0x7330;
        shr.u32 s, a, 4;
        shr.u32 t, b, 4;
        shr.u32 u, c, 4;
        shr.u32 v, d, 4;
        and.b32 s, s, 0x07f007f0;
        and.b32 t, t, 0x07f007f0;
        and.b32 u, u, 0x07f007f0;
        and.b32 v, v, 0x07f007f0;
        lop3.b32 $0, a, 0x80008000, s, 0xea;
        lop3.b32 $1, b, 0x80008000, t, 0xea;
        lop3.b32 $2, c, 0x80008000, u, 0xea;
        lop3.b32 $3, d, 0x80008000, v, 0xea;
        }""",
        "=r,=r,=r,=r,r,r", [words], (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _int4(words):
    """Widen nibbles to bf16 numbers 128 + code = 136 + weight, in the last bits of a bf16 128; 7 instructions for 8."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 m, e, s<6>;
        mov.b32 m, 0x000f000f;
        mov.b32 e, 0x43004300;
        shr.u32 s0, $8, 4;
        shr.u32 s1, $8, 8;
        shr.u32 s2, $8, 12;
        shr.u32 s3, $9, 4;
        shr.u32 s4, $9, 8;
        shr.u32 s5, $9, 12;
        lop3.b32 $0, $8, m, e, 0xea;
        lop3.b32 $1, s0, m, e, 0xea;
        lop3.b32 $2, s1, m, e, 0xea;
        lop3.b32 $3, s2, m, e, 0xea;
        lop3.b32 $4, $9, m, e, 0xea;
        lop3.b32 $5, s3, m, e, 0xea;
        lop3.b32 $6, s4, m, e, 0xea;
        lop3.b32 $7, s5, m, e, 0xea;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [words],
        (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _e2m1(words):
    """Widen e2m1 codes to bf16 times 2**-126: shift their bits to where bf16 has them, in 11 instructions for 8."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 m, n, s<5>, t<5>;
        mov.b32 m, 0x81c081c0;
        mov.b32 n, 0x01c001c0;
        shl.b32 s0, $8, 3;
        shl.b32 s1, $8, 6;
        shl.b32 s2, $8, 1;
        shr.u32 s3, $8, 3;
        shl.b32 s4, $8, 2;
        shl.b32 t0, $9, 3;
        shl.b32 t1, $9, 6;
        shl.b32 t2, $9, 1;
        shr.u32 t3, $9, 3;
        shl.b32 t4, $9, 2;
        and.b32 s1, s1, n;
        and.b32 s3, s3, n;
        and.b32 t1, t1, n;
        and.b32 t3, t3, n;
        and.b32 $0, $8, m;
        and.b32 $1, s0, m;
        lop3.b32 $2, s2, 0x80008000, s1, 0xea;
        lop3.b32 $3, s4, 0x80008000, s3, 0xea;
        and.b32 $4, $9, m;
        and.b32 $5, t0, m;
        lop3.b32 $6, t2, 0x80008000, t1, 0xea;
        lop3.b32 $7, t4, 0x80008000, t3, 0xea;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [words],
        (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _int8(words):
    """Widen bytes to bf16 times 2**-133: there they are the last bits, which are as linear as integers."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        prmt.b32 a, $4, $5, 0x4400;
        prmt.b32 b, $4, $5, 0x5511;
        prmt.b32 c, $4, $5, 0x6622;
        prmt.b32 d, $4, $5, 0x7733;
        and.b32 $0, a, 0x00ff00ff;
        and.b32 $1, b, 0x00ff00ff;
        and.b32 $2, c, 0x00ff00ff;
        and.b32 $3, d, 0x00ff00ff;
        }""",
        "=r,=r,=r,=r,r,r", [words], (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@device_function
def _e4m3_entry(row, k, mask):
    return tl.load(row + k, mask=mask, other=0.0).to(tl.float32)


@device_function
def _e4m3_runs_entry(row, k, mask):
    byte = k // 128 * 128 + k % 32 * 4 + k % 128 // 32
    return tl.load(row + byte, mask=mask, other=0.0).to(tl.float32)


@device_function
def _half(row, k, mask):
    """Return (which of the four products of its half word entry k belongs to, the half word)."""
    product, j = k % 128 // 16, k % 16
    word = tl.load(row + k // 128 * 16 + j // 2 * 2 + product // 4, mask=mask, other=0)
    return product % 4, word >> (j % 2 * 16)


@device_function
def _int4_entry(row, k, mask):
    product, half = _half(row, k, mask)
    return (((half >> (4 * product)) & 15) - 8).to(tl.float32)


@device_function
def _e2m1_entry(row, k, mask):
    product, half = _half(row, k, mask)
    size = (half >> tl.where(product == 3, 9, 6 - 3 * product)) & 7
    sign = (half >> tl.where(product == 0, 15, tl.where(product == 1, 12, 16 - product))) & 1
    exponent, mantissa = size >> 1, size & 1
    halves = tl.where(exponent == 0, mantissa, (mantissa + 2) << tl.maximum(exponent - 1, 0)).to(tl.float32)
    return tl.where(sign == 1, -halves, halves) * 0.5


@device_function
def _int8_entry(row, k, mask):
    word = tl.load(row + k // 128 * 32 + k % 32, mask=mask, other=0)
    return (((word >> (k % 128 // 32 * 8)) & 255) - 128).to(tl.float32)


E4M3 = Widening(_e4m3, _e4m3_entry, 2.0**120)
E4M3_RUNS = Widening(_e4m3, _e4m3_runs_entry, 2.0**120, RUNS=True)
INT4 = Widening(_int4, _int4_entry, ADDED=-136.0, WORDS=16, PRODUCTS=8, RUNS=True)
E2M1 = Widening(_e2m1, _e2m1_entry, 2.0**126, WORDS=16, PRODUCTS=8, RUNS=True)
INT8 = Widening(_int8, _int8_entry, 2.0**133, ADDED=-128.0, RUNS=True)
