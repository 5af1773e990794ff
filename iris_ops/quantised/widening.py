"""How weights of a word become bf16 in registers: the policies that `weight_stream.py` takes, one for each format.

Another format of one byte is another `Widening`, and its name in the format (`planning/weights/`).
"""

from dataclasses import dataclass

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_ROWS_SCALED = 2.0**64  # of A, in `weight_stream.py`


@dataclass(frozen=True)
class Widening:
    """`words`: a device function from int32 words to four bf16 tensors, byte i of each word to tensor i.

    `off`: by what factor these are too small.
    """

    words: triton.JITFunction
    off: float

    @property
    def later(self) -> float:
        """What sums are multiplied by, of rows of A that were scaled before."""
        return self.off / _ROWS_SCALED


@gluon.jit
def _e4m3(words):
    """The bits of an e4m3 go to where bf16 has them, two instructions a weight. Each is then times 2**-120."""
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


E4M3 = Widening(_e4m3, 2.0**120)
