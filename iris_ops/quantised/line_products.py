"""Operands of a line's products in registers, and sums of groups, for `weight_stream.py`.

Warps divide lines among themselves, or a tile's columns, or both: `ACROSS` warps share a line and its rows of A.

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
    """Split words of four numbers into four bf16 tensors, each times 2**64."""
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
    """Multiply bf16 numbers by 2**64."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 m; mov.b32 m, 0x5f805f80; mul.rn.bf16x2 $0, $1, m; }", "=r,r", [x], gl.bfloat16, is_pure=True,
        pack=2,
    )  # fmt: skip


@gluon.jit
def added_to(y, widen: gl.constexpr):
    """Add to the weights what their codes lack, exactly, because both are small integers."""
    result = ()
    for i in gl.static_range(len(y)):
        result = result + (gl.inline_asm_elementwise(widen.ADDING, "=r,r", [y[i]], gl.bfloat16, is_pure=True, pack=2),)
    return result


@gluon.jit
def begins_of(
    x, widen: gl.constexpr, GROUPS: gl.constexpr, COLUMNS: gl.constexpr, ACROSS: gl.constexpr, ADDS: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """Return the initial value of each group's sum: if it `ADDS` what codes lack, that times the sum of A."""
    EACH: gl.constexpr = widen.PRODUCTS // GROUPS
    LINES: gl.constexpr = x[0].shape[0]
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, MMA, widen.WORDS // 8)
    # as bits: the compiler takes the least of bf16's numbers for 0
    bits = gl.full((LINES, 16 * ACROSS, x[0].shape[1]), widen.LACKED_BITS, gl.int16, layout=WEIGHTS)
    added = bits.to(gl.bfloat16, bitcast=True)
    result = ()
    for g in gl.static_range(GROUPS):
        begin = gl.zeros((LINES, 16 * ACROSS, x[0].shape[2]), gl.float32, layout=MMA)
        if ADDS:
            for i in gl.static_range(EACH):
                begin = mma_v2(added, x[g * EACH + i], begin)
        result = result + (_repeated(begin, COLUMNS // (16 * ACROSS), MMA),)
    return result


@gluon.jit
def _repeated(x, TIMES: gl.constexpr, MMA: gl.constexpr):
    """Repeat x [lines, 16, rows] TIMES times along its columns."""
    if TIMES > 1:
        half = _repeated(x, TIMES // 2, MMA)
        both = gl.permute(gl.join(half, half), (0, 3, 1, 2))
        x = gl.convert_layout(gl.reshape(both, (x.shape[0], 2 * half.shape[1], x.shape[2])), MMA)
    return x


@gluon.jit
def add_groups(acc, y, x, begins, scales, SCALED: gl.constexpr, ZERO: gl.constexpr = 0.0):
    """Add a line's products to `acc`: sum each group anew, then add that sum, if `SCALED` times the group's scale.

    If ZERO is not 0, a zero point follows each scale; `begins` times ZERO are the sums that it scales.
    """
    GROUPS: gl.constexpr = len(begins)
    EACH: gl.constexpr = len(y) // GROUPS
    for g in gl.static_range(GROUPS):
        fresh = begins[g]
        for i in gl.static_range(EACH):
            fresh = mma_v2(y[g * EACH + i], x[g * EACH + i], fresh)
        if ZERO != 0.0:
            fresh += begins[g] * gl.expand_dims(scales[2 * g + 1] * ZERO, 2)
            acc += fresh * gl.expand_dims(scales[2 * g], 2)
        elif SCALED:
            acc += fresh * gl.expand_dims(scales[g], 2)
        else:
            acc += fresh
    return acc


@gluon.jit
def products_of_rows(rows, widen: gl.constexpr, BLOCK_M: gl.constexpr, ACROSS: gl.constexpr, MMA: gl.constexpr):
    """Return A's numbers of each line as operands of its dot products with the weights, in each of `ACROSS` warps.

    `rows` are transposed. Of runs, a single row stands for all `BLOCK_M`.
    """
    if widen.RUNS:
        x = rows.load(runs_layout(rows.shape[0] // 4, BLOCK_M, widen.WORDS // 8, ACROSS))
    else:
        x = rows.load(gl.DotOperandLayout(1, MMA, widen.WORDS // 8))
    PARTS: gl.constexpr = rows.shape[0]
    LOADED: gl.constexpr = x.type.layout
    if rows.shape[2] < BLOCK_M:  # one row, which the threads of all have: nothing moves
        x, _all = gl.broadcast(x, gl.zeros((PARTS, 32, BLOCK_M), x.dtype, layout=LOADED))
    return products_of(x, widen, MMA)


@gluon.jit
def products_of(x, widen: gl.constexpr, MMA: gl.constexpr):
    """Return these operands of numbers in registers: runs [4 * lines, 32, rows], or words of four [lines, 32, rows]."""
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
def scales_of(
    factors, step, turn: gl.constexpr, TURNS: gl.constexpr, GROUPS: gl.constexpr, LINES: gl.constexpr,
    ACROSS: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Return the scales of the lines whose turn it is in float32, for each group a tensor [lines, columns].

    `factors` hold those of one step along K, or of some: the hardware copies whole vectors of 16 bytes.
    """
    COLUMNS: gl.constexpr = factors.shape[0]
    LOADED: gl.constexpr = factors.shape[1] // (LINES * GROUPS)
    STEPS: gl.constexpr = LOADED // TURNS
    s = factors.load(scales_layout(LINES, GROUPS, LOADED, COLUMNS, ACROSS))
    s = gl.permute(gl.reshape(s, (COLUMNS, LOADED, LINES, GROUPS)), (2, 0, 1, 3))
    parts = _along(gl.reshape(s, (LINES, COLUMNS, LOADED * GROUPS)))
    result = ()
    for g in gl.static_range(GROUPS):
        part = parts[turn * GROUPS + g]
        for i in gl.static_range(1, STEPS):
            part = gl.where(step % STEPS == i, parts[(i * TURNS + turn) * GROUPS + g], part)
        if s.dtype == gl.uint8:  # of a power of two, its exponent
            scale = (part.to(gl.int32) << 23).to(gl.float32, bitcast=True)
        else:
            scale = part.to(gl.float32)
        result = result + (gl.convert_layout(scale, gl.SliceLayout(2, MMA)),)
    return result


@gluon.jit
def _along(x):
    """Split `x` along its last dimension, a power of two, into a tuple."""
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
    """Return the binary logarithm of a power of two."""
    return size.bit_length() - 1


@triton.constexpr_function
def runs_layout(lines, rows, k_width, across):
    """Return the layout of runs [4 * lines, 32, rows], in which each warp holds its line's four as dot operands."""
    k = [1 << i for i in range(5)]
    inner = {2: ([k[0], k[3], k[4]], [k[1], k[2]]), 4: ([k[0], k[1], k[4]], [k[2], k[3]])}[k_width]
    held = [[0, each, 0] for each in inner[0]] + [[0, 0, 8 << i] for i in range(_bits(rows // 8))]
    lanes = [[0, each, 0] for each in inner[1]] + [[0, 0, 1], [0, 0, 2], [0, 0, 4]]
    of_warps = [[0, 0, 0]] * _bits(across) + [[4 << i, 0, 0] for i in range(_bits(lines))]
    return gl.DistributedLinearLayout(held + [[1, 0, 0], [2, 0, 0]], lanes, of_warps, [], [4 * lines, 32, rows])


@triton.constexpr_function
def rows_layout(lines, rows, runs, k_width):
    """Return the layout of `products_of`'s numbers: of runs, or of words of four [lines, 32, rows], a line a warp."""
    if runs:
        return runs_layout(lines, rows, k_width, 1)
    held = [[0, 1, 0], [0, 2, 0], [0, 16, 0]] + [[0, 0, 8 << i] for i in range(_bits(rows // 8))]
    lanes = [[0, 4, 0], [0, 8, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    of_warps = [[1 << i, 0, 0] for i in range(_bits(lines))]
    return gl.DistributedLinearLayout(held, lanes, of_warps, [], [lines, 32, rows])


@triton.constexpr_function
def scales_layout(lines, groups, steps, columns, across):
    """Return the layout of scales [columns, steps * lines * groups]: each thread holds those of its own columns."""
    held = [[0, 1 << i] for i in range(_bits(groups))] + [[8, 0]]
    held += [[16 * across << i, 0] for i in range(_bits(columns // (16 * across)))]
    more = [[0, groups * lines << i] for i in range(_bits(steps))]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    of_warps = [[16 << i, 0] for i in range(_bits(across))] + [[0, groups << i] for i in range(_bits(lines))]
    return gl.DistributedLinearLayout(held + more, lanes, of_warps, [], [columns, steps * lines * groups])
