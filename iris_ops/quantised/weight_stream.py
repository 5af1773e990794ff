"""The product of few rows with weights in eight bits, for NVIDIA Hopper: half as many bytes to stream as in bf16.

A product of few rows takes as long as its weights take from memory. torch's way rounds A to eight bits by a kernel of
its own first. A plain Triton kernel converts weights more slowly than memory gives them. Here the weights become bf16
in registers, and A stays as it is. Three things make that cheap:

    widening    A policy of the weight's format, for four weights in a word (`widening.py`). Its bf16 numbers may be
                off by a power of two. A is scaled by 2**64, which loses nothing of numbers between 2**-61 and 2**63,
                and the sum by the rest.
    K is cut    Each warp has a slice of K, in lines of 128 numbers, so no warp waits for another. Byte i of all 32-bit
                words of a line belongs to product number i of four, and A's columns are taken likewise. So nothing
                moves between threads: a dot product may add in any order.
    a ring      Lines of A and of the weights are always on their way to a ring in shared memory, across groups of
                tiles. T tiles of 16 columns each share what they load of A. Waits for the ring have no deadline: they
                are for loads of the program itself.
"""

from dataclasses import dataclass
from typing import Any

from iris import platform
from iris.triton_private import (
    GluonDescriptor,
    aggregate,
    async_load,
    base_value,
    mbarrier,
    mma_v2,
    program_barrier,
    word_descriptor,
)
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernels.arguments import StreamForm
from ..kernels.descriptors import of_whole_vectors
from ..kernels.tiles import known
from ..named import named
from ..planning.needs import LINE, MOST_ROWS
from ..planning.weights import dtypes, format_of
from .widening import E4M3, Widening

WARPS = 4
# Programs for which a multiprocessor has room at once: stages of their rings, by rows and T. Where there is but one for
# each, there must be room for one only: behind a kernel that is about to end, two would come to the first free place.
RINGS = {
    1: {(8, 1): 12, (8, 2): 8, (8, 3): 6, (16, 1): 8, (16, 2): 6, (16, 3): 5},
    2: {(8, 1): 6, (8, 2): 4, (8, 3): 3, (16, 1): 4, (16, 2): 3, (16, 3): 2},
    3: {(8, 1): 4, (16, 2): 2},
}
_SHARED, _RESERVED, _MOST_STAGES = 228 << 10, 1536, 12  # of a multiprocessor, of each program, of a ring
REGISTERS = 168  # of a thread of three programs, in eights
_COLUMNS = gl.constexpr(16)  # of a tile
_LINE = gl.constexpr(LINE)


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


@aggregate
class Stream:
    """A program's operands on their way: descriptors, and the places of the ring.

    a: A as words [K/128, rows, 32], or as runs of 32 numbers [K/32, rows, 32]. b: B as words [lines, columns, words].
    scales: of groups [columns, scales], or None. T tiles of weights at a time, which with `GATED` are T/2 of the first
    N columns and the T/2 that lie N further. WIDTH: columns that they make of the result. LATER: of a
    `widening.Widening`.
    """

    a: base_value
    b: base_value
    scales: base_value
    rows: base_value
    ring: base_value
    factors: base_value
    loaded: base_value
    sums: base_value
    N: base_value
    steps: base_value
    T: gl.constexpr
    GATED: gl.constexpr
    STAGES: gl.constexpr
    WIDTH: gl.constexpr
    LATER: gl.constexpr

    @triton.constexpr_function
    def __init__(
        self, a, b, scales, rows, ring, factors, loaded, sums, N, steps, T, GATED, STAGES, WIDTH, LATER
    ):  # fmt: skip
        self.a, self.b, self.rows, self.ring = a, b, rows, ring
        self.scales, self.factors = (gl.constexpr(None) if each is None else each for each in (scales, factors))
        self.loaded, self.sums, self.N, self.steps = loaded, sums, known(N), known(steps)
        self.T, self.GATED, self.STAGES, self.WIDTH = known(T), known(GATED), known(STAGES), known(WIDTH)
        self.LATER = gl.constexpr(LATER)

    @gluon.jit
    def load(self, stage, group, step):
        """Request a step's blocks of group number `group` of tiles; beyond the last one for nothing."""
        wanted = group * self.WIDTH < self.N
        loaded = self.loaded.index(stage)
        OF_SCALES: gl.constexpr = 0 if self.scales is None else self.scales.block_type.nbytes
        nbytes: gl.constexpr = self.a.block_type.nbytes + self.T * (self.b.block_type.nbytes + OF_SCALES)
        mbarrier.expect(loaded, nbytes, pred=wanted)
        async_load(self.a, [step * self.rows.shape[1], 0, 0], loaded, self.rows.index(stage), pred=wanted)
        for t in gl.static_range(self.T):
            col = group * self.WIDTH + (t * _COLUMNS) % self.WIDTH + (t * _COLUMNS) // self.WIDTH * self.N
            at = stage * self.T + t
            async_load(self.b, [step * self.ring.shape[1], col, 0], loaded, self.ring.index(at), pred=wanted)
            if self.scales is not None:
                first = step * self.factors.shape[2]
                async_load(self.scales, [col, first], loaded, self.factors.index(at), pred=wanted)


@gluon.jit
def begin(a, b, scales, N, K, form: gl.constexpr):
    """(the program's stream, where it stands), its first blocks on their way. `form`: a `StreamForm`."""
    BLOCK_M: gl.constexpr = form.BLOCK_M
    T: gl.constexpr = form.T
    GATED: gl.constexpr = form.GATED
    STAGES: gl.constexpr = form.STAGES
    SLICES: gl.constexpr = form.SLICES
    TILES: gl.constexpr = triton.next_power_of_2(T)
    WIDTH: gl.constexpr = _COLUMNS * (T // 2 if GATED else T)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 2, 0])  # columns follow each other
    rows = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    ring = gl.allocate_shared_memory(gl.int32, [STAGES * T] + b.block_type.shape, b.layout)
    factors = None
    if scales is not None:
        factors = gl.allocate_shared_memory(scales.dtype, [STAGES * T] + scales.block_type.shape, scales.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    sums = gl.allocate_shared_memory(gl.float32, [SLICES, TILES * _COLUMNS, BLOCK_M], PLAIN)
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
    steps = gl.cdiv(K, _LINE * SLICES)
    stream = Stream(
        a, b, scales, rows, ring, factors, loaded, sums, N, steps, T, GATED, STAGES, WIDTH, form.LATER
    )  # fmt: skip
    group, step = gl.program_id(0), 0
    for i in gl.static_range(STAGES):
        stream.load(i, group, step)
        group, step = _next(stream, group, step)
    return stream, (group, step, 0, 0)


@gluon.jit
def _next(stream, group, step):
    last = step == stream.steps - 1
    return gl.where(last, group + gl.num_programs(0), group), gl.where(last, 0, step + 1)


@gluon.jit
def multiply(stream, at, widen: gl.constexpr, BLOCK_M: gl.constexpr):
    """Leaves the slices' products in `stream.sums`, of the columns that come next; `total` adds them up.

    `widen`: the `Widening` of the weights. Returns where the stream stands then.
    """
    SLICES: gl.constexpr = stream.ring.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, 1, 1], [1, 16, 8])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, MMA, widen.WORDS // 8)
    PRODUCTS: gl.constexpr = widen.PRODUCTS
    SUMS: gl.constexpr = 2 if stream.scales is None else 1
    group, step, stage, phase = at
    accs = ()
    for _t in gl.static_range(SUMS * stream.T):
        accs = accs + (gl.zeros((SLICES, _COLUMNS, BLOCK_M), gl.float32, layout=MMA),)
    for _k in range(stream.steps):
        mbarrier.wait(stream.loaded.index(stage), phase)
        x = _products_of_rows(stream.rows.index(stage), widen, MMA)
        so_far = ()
        for t in gl.static_range(stream.T):
            y = widen.words(stream.ring.index(stage * stream.T + t).load(WEIGHTS))
            if stream.scales is None:  # two sums each: half as long a chain of products that wait for another
                even, odd = accs[2 * t], accs[2 * t + 1]
                for i in gl.static_range(0, PRODUCTS, 2):
                    even, odd = mma_v2(y[i], x[i], even), mma_v2(y[i + 1], x[i + 1], odd)
                so_far = so_far + (even, odd)
            else:
                factors = stream.factors.index(stage * stream.T + t)
                so_far = so_far + (_add_groups(accs[t], y, x, factors, SLICES, PRODUCTS, MMA),)
        accs = so_far
        program_barrier()  # all warps have read this stage
        stream.load(stage, group, step)
        group, step = _next(stream, group, step)
        last = stage == stream.STAGES - 1
        stage, phase = gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)
    for t in gl.static_range(stream.T):
        acc = accs[t] if SUMS == 1 else accs[2 * t] + accs[2 * t + 1]
        stream.sums.slice(t * _COLUMNS, _COLUMNS, dim=1).store(acc)
    program_barrier()
    return group, step, stage, phase


@gluon.jit
def _add_groups(acc, y, x, factors, SLICES: gl.constexpr, PRODUCTS: gl.constexpr, MMA: gl.constexpr):
    """`acc` and a line's products: each group's sum begins anew, and is added times the group's scale."""
    GROUPS: gl.constexpr = factors.shape[1] // SLICES
    EACH: gl.constexpr = PRODUCTS // GROUPS
    scales = _scales_of(factors, SLICES, MMA)
    for g in gl.static_range(GROUPS):
        fresh = gl.zeros_like(acc)
        for i in gl.static_range(EACH):
            fresh = mma_v2(y[g * EACH + i], x[g * EACH + i], fresh)
        acc += fresh * gl.expand_dims(scales[g], 2)
    return acc


@gluon.jit
def _products_of_rows(rows, widen: gl.constexpr, MMA: gl.constexpr):
    """A's numbers of each slice's line as the products of the weights take them."""
    ROWS: gl.constexpr = gl.DotOperandLayout(1, MMA, widen.WORDS // 8)
    result = ()
    if widen.RUNS:
        SLICES: gl.constexpr = rows.shape[0] // 4
        BLOCK_M: gl.constexpr = rows.shape[1]
        x = rows.permute((0, 2, 1)).load(runs_layout(SLICES, BLOCK_M, widen.WORDS // 8))
        if widen.SCALED:
            x = _scaled(x)
        PARTS: gl.constexpr = widen.PRODUCTS // 4  # of a run of 32
        x = gl.reshape(x, (SLICES, 4 * PARTS, 32 // PARTS, BLOCK_M))
        parts = _along(gl.permute(x, (0, 2, 3, 1)))
        for i in gl.static_range(4 * PARTS):
            result = result + (gl.convert_layout(parts[i], ROWS),)
    else:
        result = _apart(rows.permute((0, 2, 1)).load(ROWS))
    return result


@gluon.jit
def _scales_of(factors, SLICES: gl.constexpr, MMA: gl.constexpr):
    """The scales of each slice's line in float32: a tensor [slices, columns] for each group."""
    GROUPS: gl.constexpr = factors.shape[1] // SLICES
    s = factors.load(scales_layout(SLICES, GROUPS))
    s = gl.permute(gl.reshape(s, (_COLUMNS, SLICES, GROUPS)), (1, 0, 2))
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
def runs_layout(slices, rows, k_width):
    """The layout of runs [4 * slices, 32, rows]: each warp has its line's four, as operands of dot products."""
    k = [1 << i for i in range(5)]
    inner = {2: ([k[0], k[3], k[4]], [k[1], k[2]]), 4: ([k[0], k[1], k[4]], [k[2], k[3]])}[k_width]
    held = [[0, each, 0] for each in inner[0]] + [[0, 0, 8 << i] for i in range((rows // 8).bit_length() - 1)]
    lanes = [[0, each, 0] for each in inner[1]] + [[0, 0, 1], [0, 0, 2], [0, 0, 4]]
    warps = [[4 << i, 0, 0] for i in range(slices.bit_length() - 1)]
    return gl.DistributedLinearLayout(held + [[1, 0, 0], [2, 0, 0]], lanes, warps, [], [4 * slices, 32, rows])


@triton.constexpr_function
def scales_layout(slices, groups):
    """The layout of scales [columns, slices * groups]: each thread has those of its columns of sums."""
    bits = groups.bit_length() - 1
    held = [[0, 1 << i] for i in range(bits)] + [[8, 0]]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    warps = [[0, groups << i] for i in range(slices.bit_length() - 1)]
    return gl.DistributedLinearLayout(held, lanes, warps, [], [16, slices * groups])


@gluon.jit
def total(stream, scales, first, col, WHICH: gl.constexpr, SUMS: gl.constexpr):
    """Half number `WHICH` of what `multiply` left, or all: fp32 [columns, rows] by `columns_of`, times their scales.

    `scales`: of columns from `first` on; `col`: which of them these are.
    """
    WIDTH: gl.constexpr = triton.next_power_of_2(stream.WIDTH)
    slices = stream.sums.slice(WHICH * WIDTH, WIDTH, dim=1).load(SUMS)
    sums = gl.sum(slices, 0) * stream.LATER
    if scales is not None:  # else each group's are in the sums
        factors = gl.load(scales + first + col, mask=col < stream.N, other=0.0)
        sums = sums * factors[:, None]  # both factors together might be infinite
    return sums


@gluon.jit
def columns_of(stream, group, end, SUMS: gl.constexpr):
    """The columns of group number `group`, and which of them are, and come before `end`."""
    c = gl.arange(0, triton.next_power_of_2(stream.WIDTH), layout=gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))
    col = group * stream.WIDTH + c
    return col, (c < stream.WIDTH) & (col < end)


@triton.constexpr_function
def layout_of_sums(columns, slices):
    """The layout of sums [slices, columns, rows]: each thread holds all slices of some adjacent columns."""
    return gl.BlockedLayout([slices, columns // 8, 1], [1, 8, 4], [1, 1, slices], [1, 2, 0])


def tiles_at_once(columns: int, programs: int) -> int:
    """T: how many tiles a program takes at a time, so that multiprocessors end together and A is read rarely."""
    tiles = triton.cdiv(columns, _COLUMNS.value)

    def most(T: int) -> float:
        return triton.cdiv(triton.cdiv(tiles, T), programs) * T * (1 + 0.35 / T)  # A costs a third of a tile

    return min((3, 2, 1), key=most)


def rows_at_once(rows: int) -> int:
    """Return how many rows of A a program has: 8 or `MOST_ROWS`."""
    return 8 if rows <= 8 else MOST_ROWS


def grid_and_stages(
    columns: int, rows: int, T: int, programs: int, gated: bool = False, step_bytes: int | None = None
) -> tuple[int, int]:
    """Programs of a product of so many columns, which all run at once on so many multiprocessors, and their rings.

    `step_bytes`: of a stage of the ring (`stage_bytes`), where `RINGS` was not measured; None: fp8 with a scale a row.
    """
    groups, kind = triton.cdiv(columns, _COLUMNS.value * (T // 2 if gated else T)), (rows_at_once(rows), T)
    if step_bytes is None:
        resident = 1 if groups <= programs else 3 if kind in RINGS[3] else 2
        return min(groups, resident * programs), RINGS[resident][kind]
    resident = 1 if groups <= programs else 2
    room = _SHARED // resident - _RESERVED - _sums_bytes(*kind)
    return min(groups, resident * programs), max(2, min(_MOST_STAGES, room // step_bytes))


def options(grid: int, programs: int) -> dict[str, int]:
    """Launch options of a grid whose programs must all run at once on so many multiprocessors."""
    most = {"maxnreg": REGISTERS} if grid > 2 * programs else {}  # of two each, all that a thread can have fit
    return {"num_warps": WARPS, **most}


def shared_bytes(rows: int, T: int, stages: int, stage: int | None = None) -> int:
    """Shared memory of a program, but for its barriers: the ring, and the slices' sums."""
    block = stage_bytes(rows, T, 32) if stage is None else stage
    return stages * block + _sums_bytes(rows, T)


def stage_bytes(rows: int, T: int, words: int, scales: int = 0) -> int:
    """Bytes of a stage of the ring: of each slice's line of A, words of T tiles, and bytes of a column's scales."""
    return WARPS * (2 * LINE * rows + T * _COLUMNS.value * (4 * words + scales))


def _sums_bytes(rows: int, T: int) -> int:
    return WARPS * triton.next_power_of_2(T) * _COLUMNS.value * rows * 4


def supports(A: torch.Tensor, B: torch.Tensor, scale: torch.Tensor | None = None) -> str | None:
    """Return the reason why the product of A [M, K] and the stored B cannot be computed here, or None."""
    weights = format_of(B, scale)
    if not platform.has_warp_specialisation(A.device):
        return "it needs a Hopper GPU"
    if A.dtype != torch.bfloat16 or not weights.widening:
        return f"it multiplies bfloat16 by {dtypes()}, not {A.dtype} by {B.dtype}"
    if not weights.streamable(*A.shape):
        return f"it is for up to {MOST_ROWS} rows and for K a multiple of {weights.granule}, not for {tuple(A.shape)}"
    if not (of_whole_vectors(A) and of_whole_vectors(B.t())):
        return "rows of A or columns of B begin between vectors of 16 bytes"
    if scale is not None and scale.ndim == 2 and not of_whole_vectors(scale):
        return "rows of scales begin between vectors of 16 bytes"
    return None


@dataclass(frozen=True)
class Launch:
    """A product as kernels take it: `operands` are arguments, `form` has T tiles of `grid` programs."""

    grid: int
    form: StreamForm
    operands: dict


def prepared(
    A: torch.Tensor, B: torch.Tensor, scale: torch.Tensor, T: int, programs: int, **more: Any
) -> Launch:  # fmt: skip
    """Return the launch of A [M, K] times B, the transpose of a stored weight [N, ...], by so many programs at once.

    A as lines of words or runs, B as lines of words, in blocks of a line for each warp. `more`: of the form.
    """
    widen, gated = widening_of(B, scale), more.get("GATED", False)
    N, rows = B.shape[1] // (1 + gated), rows_at_once(A.shape[0])
    a = _described(A, 32, WARPS * LINE // 32, rows) if widen.RUNS else _described(A.view(torch.int64), 32, WARPS, rows)
    b = _described(B.t().view(torch.int32), widen.WORDS, WARPS, _COLUMNS.value)
    scales, step, nbytes = None, None, 0
    if scale.ndim == 2:
        per_line = scale.shape[1] // (-(-b.shape[0] // WARPS) * WARPS)
        block, nbytes = [_COLUMNS.value, WARPS * per_line], per_line * scale.itemsize
        scales = word_descriptor(scale, block, _layout(WARPS * nbytes, scale.itemsize, 2))
    if widen is not E4M3 or scales is not None:
        step = stage_bytes(rows, T, widen.WORDS, nbytes)
    grid, stages = grid_and_stages(N, A.shape[0], T, programs, gated, step)
    form = StreamForm(rows, T, stages, WARPS, LATER=widen.later, **more)
    return Launch(grid, form, dict(a=a, b=b, scales=scales, widen=widen))


def widening_of(B: torch.Tensor, scale: torch.Tensor | None) -> Widening:
    """Return the policy of a stored weight's format."""
    return named(format_of(B, scale).widening)


def _described(t: torch.Tensor, width: int, lines: int, rows: int) -> GluonDescriptor:
    """Return `t` [rows, n] as the hardware loads it: [n / width, rows, width], `rows` of so many `lines` at a time."""
    pieces = t.as_strided((t.shape[1] // width, t.shape[0], width), (width, t.stride(0), 1))
    # words of eight bytes in lines of 256: two lines of the widest swizzle
    return word_descriptor(pieces, [lines, rows, width], _layout(width * t.itemsize, t.itemsize, 3))


def _layout(line: int, itemsize: int, rank: int) -> gl.NVMMASharedLayout:
    """The layout of lines of so many bytes in shared memory."""
    swizzle = min(line, 128) if line >= 32 else 0
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * itemsize, rank=rank)
