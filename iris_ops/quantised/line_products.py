"""Operands of a line's products in registers, and sums of groups, for `weight_stream.py`.

A scale of a group multiplies a sum: each group's products go onto fresh sums, which are added to the others times the
scale. That takes as many instructions as there are sums, and leaves the weights exact.

Nothing here moves between threads. A is read so that each product finds its numbers in the registers of the thread
that has the weights, and parts of a tensor are other registers of the same thread.
"""

from iris.triton_private import mma_v2
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _apart(ctx_ptr):
    """Four numbers in each word: four tensors of bf16, each times 2**64."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, m, p, q, r, s;
        mov.b64 {p, q}, $4;
        mov.b64 {r, s}, $5;
        mov.b32 m, 0x5f805f80;
        prmt.b32 a, p, r, 0x5410;
        prmt.b32 b, p, r, 0x7632;
        prmt.b32 c, q, s, 0x5410;
        prmt.b32 d, q, s, 0x7632;
        mul.rn.bf16x2 $0, a, m;
        mul.rn.bf16x2 $1, b, m;
        mul.rn.bf16x2 $2, c, m;
        mul.rn.bf16x2 $3, d, m;
        }""",
        "=r,=r,=r,=r,l,l", [ctx_ptr], (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _scaled(x):
    """Numbers of bf16 times 2**64."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 m; mov.b32 m, 0x5f805f80; mul.rn.bf16x2 $0, $1, m; }", "=r,r", [x], gl.bfloat16, is_pure=True,
        pack=2,
    )  # fmt: skip


@gluon.jit
def begins_of(
    x, widen: gl.constexpr, PRODUCTS: gl.constexpr, GROUPS: gl.constexpr, COLUMNS: gl.constexpr, MMA: gl.constexpr
):
    """With what each group's sum begins: of weights that are widened to `ADDED` less, that times the sum of A."""
    EACH: gl.constexpr = PRODUCTS // GROUPS
    LINES: gl.constexpr = x[0].shape[0]
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, MMA, widen.WORDS // 8)
    added = gl.full((LINES, 16, x[0].shape[1]), widen.ADDED, gl.bfloat16, layout=WEIGHTS)
    result = ()
    for g in gl.static_range(GROUPS):
        begin = gl.zeros((LINES, 16, x[0].shape[2]), gl.float32, layout=MMA)
        if widen.ADDED != 0:
            for i in gl.static_range(EACH):
                begin = mma_v2(added, x[g * EACH + i], begin)
        result = result + (_repeated(begin, COLUMNS // 16, MMA),)
    return result


@gluon.jit
def _repeated(x, TIMES: gl.constexpr, MMA: gl.constexpr):
    """x [lines, 16, rows] so often, along columns."""
    if TIMES > 1:
        half = _repeated(x, TIMES // 2, MMA)
        both = gl.permute(gl.join(half, half), (0, 3, 1, 2))
        x = gl.convert_layout(gl.reshape(both, (x.shape[0], TIMES * 16, x.shape[2])), MMA)
    return x


@gluon.jit
def add_groups(acc, y, x, begins, factors, LINES: gl.constexpr, PRODUCTS: gl.constexpr, MMA: gl.constexpr):
    """`acc` and a line's products: each group's sum begins anew, and is added times the group's scale."""
    GROUPS: gl.constexpr = len(begins)
    EACH: gl.constexpr = PRODUCTS // GROUPS
    if factors is not None:
        scales = _scales_of(factors, LINES, MMA)
    for g in gl.static_range(GROUPS):
        fresh = begins[g]
        for i in gl.static_range(EACH):
            fresh = mma_v2(y[g * EACH + i], x[g * EACH + i], fresh)
        if factors is not None:
            acc += fresh * gl.expand_dims(scales[g], 2)
        else:
            acc += fresh
    return acc


@gluon.jit
def products_of_rows(rows, widen: gl.constexpr, MMA: gl.constexpr):
    """A's numbers of each line, in shared memory, as the products of the weights take them."""
    if widen.RUNS:
        LOADED: gl.constexpr = runs_layout(rows.shape[0] // 4, rows.shape[1], widen.WORDS // 8, gl.num_warps())
    else:
        LOADED: gl.constexpr = gl.DotOperandLayout(1, MMA, widen.WORDS // 8)
    return products_of(rows.permute((0, 2, 1)).load(LOADED), widen, MMA)


@gluon.jit
def products_of(x, widen: gl.constexpr, MMA: gl.constexpr):
    """The same of numbers in registers: runs [4 * lines, 32, rows], or words of four numbers [lines, 32, rows]."""
    ROWS: gl.constexpr = gl.DotOperandLayout(1, MMA, widen.WORDS // 8)
    result = ()
    if widen.RUNS:
        LINES: gl.constexpr = x.shape[0] // 4
        BLOCK_M: gl.constexpr = x.shape[2]
        if widen.SCALED:
            x = _scaled(x)
        PARTS: gl.constexpr = widen.PRODUCTS // 4  # of a run of 32
        x = gl.reshape(x, (LINES, 4 * PARTS, 32 // PARTS, BLOCK_M))
        parts = _along(gl.permute(x, (0, 2, 3, 1)))
        for i in gl.static_range(4 * PARTS):
            result = result + (gl.convert_layout(parts[i], ROWS),)
    else:
        result = _apart(gl.convert_layout(x, ROWS))
    return result


@gluon.jit
def _scales_of(factors, LINES: gl.constexpr, MMA: gl.constexpr):
    """The scales of each line in float32: a tensor [lines, columns] for each group."""
    COLUMNS: gl.constexpr = factors.shape[0]
    GROUPS: gl.constexpr = factors.shape[1] // LINES
    s = factors.load(scales_layout(LINES, GROUPS, COLUMNS, gl.num_warps()))
    s = gl.permute(gl.reshape(s, (COLUMNS, LINES, GROUPS)), (1, 0, 2))
    parts = _along(s)
    result = ()
    for g in gl.static_range(GROUPS):
        if s.dtype == gl.uint8:  # of a power of two, its exponent
            scale = (parts[g].to(gl.int32) << 23).to(gl.float32, bitcast=True)
        else:
            scale = parts[g].to(gl.float32)
        result = result + (gl.convert_layout(scale, gl.SliceLayout(2, MMA)),)
    return result


@gluon.jit
def _along(x):
    """The parts of `x` along its last dimension, a power of two, as a tuple."""
    COUNT: gl.constexpr = x.shape[len(x.shape) - 1]
    result = ()
    if COUNT == 1:
        result = result + (gl.reshape(x, x.shape[:-1]),)
    else:
        even, odd = gl.split(gl.reshape(x, x.shape[:-1] + [COUNT // 2, 2]))
        evens, odds = _along(even), _along(odd)
        for i in gl.static_range(COUNT // 2):
            result = result + (evens[i], odds[i])
    return result


@triton.constexpr_function
def _bits(size):
    """The binary logarithm of a power of two."""
    return size.bit_length() - 1


@triton.constexpr_function
def runs_layout(lines, rows, k_width, warps):
    """The layout of runs [4 * lines, 32, rows]: each warp has its lines' four, as operands of dot products.

    A warp has line number `warp`, and each that lies `warps` further.
    """
    k = [1 << i for i in range(5)]
    inner = {2: ([k[0], k[3], k[4]], [k[1], k[2]]), 4: ([k[0], k[1], k[4]], [k[2], k[3]])}[k_width]
    held = [[0, each, 0] for each in inner[0]] + [[0, 0, 8 << i] for i in range(_bits(rows // 8))]
    more = [[4 * warps << i, 0, 0] for i in range(_bits(lines // warps))]
    lanes = [[0, each, 0] for each in inner[1]] + [[0, 0, 1], [0, 0, 2], [0, 0, 4]]
    of_warps = [[4 << i, 0, 0] for i in range(_bits(warps))]
    return gl.DistributedLinearLayout(
        held + [[1, 0, 0], [2, 0, 0]] + more, lanes, of_warps, [], [4 * lines, 32, rows]
    )  # fmt: skip


@triton.constexpr_function
def words_layout(lines, rows, warps):
    """The layout of words of four numbers [lines, 32, rows], as operands of dot products: each warp has its lines."""
    held = [[0, 1, 0], [0, 2, 0], [0, 16, 0]] + [[0, 0, 8 << i] for i in range(_bits(rows // 8))]
    more = [[warps << i, 0, 0] for i in range(_bits(lines // warps))]
    lanes = [[0, 4, 0], [0, 8, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    of_warps = [[1 << i, 0, 0] for i in range(_bits(warps))]
    return gl.DistributedLinearLayout(held + more, lanes, of_warps, [], [lines, 32, rows])


@triton.constexpr_function
def scales_layout(lines, groups, columns, warps):
    """The layout of scales [columns, lines * groups]: each thread has those of its columns of sums."""
    held = [[0, 1 << i] for i in range(_bits(groups))] + [[8 << i, 0] for i in range(_bits(columns // 8))]
    more = [[0, groups * warps << i] for i in range(_bits(lines // warps))]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    of_warps = [[0, groups << i] for i in range(_bits(warps))]
    return gl.DistributedLinearLayout(held + more, lanes, of_warps, [], [columns, lines * groups])
