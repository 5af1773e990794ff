"""The product of few rows with quantised weights, for NVIDIA Hopper: fewer bytes to stream than in bf16.

A product of few rows takes as long as its weights take from memory. torch first rounds A to fp8 in a separate
kernel. A plain Triton kernel converts weights more slowly than memory gives them. Here the weights become bf16
in registers, and A stays unrounded. Four things make that cheap:

    widening    A policy of the weight's format, for the weights in a word (`widening.py`). Its bf16 numbers may be off
                by a power of two. A is then scaled by 2**64, which loses nothing of numbers between 2**-61 and 2**63,
                and the sum by the rest.
    K is cut    Each warp has lines of 128 numbers along K, so no warp waits for another. A line becomes 4 or 8
                products. A's numbers are read as each product needs them, so nothing moves between threads.
    groups      A scale of a group multiplies the sum of the group's products (`line_products.py`). A scale of a column
                multiplies the result.
    a ring      Lines of A, of the weights and their scales are always on their way to a ring in shared memory, across
                groups of tiles. T tiles of some columns share what they load of A. Waits for the ring have no
                deadline: they are for loads of the program itself.
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
from ..planning.needs import LINE
from ..planning.weights import dtypes, format_of
from .line_products import add_groups, added_to, begins_of, products_of_rows, scales_of
from .stream_form import (
    COLUMN_SCALES,
    MULTIPLIED_ROWS,
    choice,
    grid_and_stages,
    loaded_rows,
    options,
    scale_bytes,
    tiles_at_once,
)
from .widening import E4M3, Widening

_LINE = gl.constexpr(LINE)


@aggregate
class Stream:
    """A program's operands on their way: descriptors, and the places of the ring.

    a: A as words [K/128, rows, 32], or as runs of 32 numbers [K/32, rows, 32]. b: B as words [lines, columns, words].
    scales: of groups [columns, scales], or None. T tiles of weights at a time, as many of each of MATRICES matrices,
    which lie N columns apart. WIDTH: columns that they make of the result. LATER: of a `widening.Widening`. BLOCKS of
    ROWS rows each are multiplied by what a warp has widened once; `ACROSS` warps divide the columns. GROUPS: scales of
    a line; ZEROS: whether each is followed by its zero point.
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
    MATRICES: gl.constexpr
    STAGES: gl.constexpr
    WIDTH: gl.constexpr
    LATER: gl.constexpr
    BRANCHES: gl.constexpr
    ROWS: gl.constexpr
    BLOCKS: gl.constexpr
    GROUPS: gl.constexpr
    ZEROS: gl.constexpr
    ACROSS: gl.constexpr

    @triton.constexpr_function
    def __init__(
        self, a, b, scales, rows, ring, factors, loaded, sums, N, steps, T, MATRICES, STAGES, WIDTH, LATER, BRANCHES,
        ROWS, BLOCKS, GROUPS, ZEROS, ACROSS,
    ):  # fmt: skip
        self.a, self.b, self.rows, self.ring = a, b, rows, ring
        self.scales, self.factors = (gl.constexpr(None) if each is None else each for each in (scales, factors))
        self.loaded, self.sums, self.N, self.steps = loaded, sums, known(N), known(steps)
        self.T, self.MATRICES, self.STAGES, self.WIDTH = known(T), known(MATRICES), known(STAGES), known(WIDTH)
        self.LATER, self.BRANCHES = gl.constexpr(LATER), known(BRANCHES)
        self.ROWS, self.BLOCKS, self.ACROSS = known(ROWS), known(BLOCKS), known(ACROSS)
        self.GROUPS, self.ZEROS = known(GROUPS), known(ZEROS)

    @gluon.jit
    def load(self, stage, group, step):
        """Request a step's blocks of group number `group` of tiles; beyond the last one for nothing."""
        exists = group * self.WIDTH < self.N
        if self.BRANCHES:
            if exists:
                self._request(stage, group, step, True)
        else:
            self._request(stage, group, step, exists)

    @gluon.jit
    def _request(self, stage, group, step, exists):
        COLUMNS: gl.constexpr = self.b.block_type.shape[1]
        loaded = self.loaded.index(stage)
        OF_SCALES: gl.constexpr = 0 if self.scales is None else self.scales.block_type.nbytes
        nbytes: gl.constexpr = self.a.block_type.nbytes + self.T * (self.b.block_type.nbytes + OF_SCALES)
        mbarrier.expect(loaded, nbytes, pred=exists)
        async_load(self.a, [step * self.rows.shape[1], 0, 0], loaded, self.rows.index(stage), pred=exists)
        vector = 0
        if self.scales is not None:  # from a whole vector of 16 bytes on: the hardware faults between two
            EACH: gl.constexpr = 2 if self.ZEROS else 1
            STEPS: gl.constexpr = self.factors.shape[2] // (self.ring.shape[1] * self.GROUPS * EACH)
            vector = step // STEPS * self.factors.shape[2]
        for t in gl.static_range(self.T):
            col = group * self.WIDTH + (t * COLUMNS) % self.WIDTH + (t * COLUMNS) // self.WIDTH * self.N
            at = stage * self.T + t
            async_load(self.b, [step * self.ring.shape[1], col, 0], loaded, self.ring.index(at), pred=exists)
            if self.scales is not None:
                async_load(self.scales, [col, vector], loaded, self.factors.index(at), pred=exists)


@gluon.jit
def begin(a, b, scales, N, K, form: gl.constexpr):
    """Start a program's stream by issuing its first loads; return (the stream, its position). `form` is a
    `StreamForm`."""
    BLOCK_M: gl.constexpr = form.BLOCK_M
    T: gl.constexpr = form.T
    MATRICES: gl.constexpr = form.MATRICES
    STAGES: gl.constexpr = form.STAGES
    LINES: gl.constexpr = b.block_type.shape[0]
    COLUMNS: gl.constexpr = b.block_type.shape[1]
    TILES: gl.constexpr = triton.next_power_of_2(T)
    WIDTH: gl.constexpr = COLUMNS * (T // MATRICES)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 2, 0])  # columns follow each other
    rows = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    ring = gl.allocate_shared_memory(gl.int32, [STAGES * T] + b.block_type.shape, b.layout)
    factors = None
    if scales is not None:
        factors = gl.allocate_shared_memory(scales.dtype, [STAGES * T] + scales.block_type.shape, scales.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    SLICES: gl.constexpr = gl.num_warps() // form.COLUMN_WARPS
    sums = gl.allocate_shared_memory(gl.float32, [SLICES, TILES * COLUMNS, BLOCK_M], PLAIN)
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
    steps = gl.cdiv(K, _LINE * LINES)
    stream = Stream(
        a, b, scales, rows, ring, factors, loaded, sums, N, steps, T, MATRICES, STAGES, WIDTH, form.LATER,
        form.BRANCHES, form.ROWS, form.BLOCKS, form.GROUPS, form.ZEROS, form.COLUMN_WARPS,
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
    """Multiply the next columns, leave the products of each warp's lines in `stream.sums`, and return the stream's new
    position.

    `total` adds the lines up. `widen` is the `Widening` of the weights.
    """
    COLUMNS: gl.constexpr = stream.ring.shape[2]
    SLICES: gl.constexpr = gl.num_warps() // stream.ACROSS
    TURNS: gl.constexpr = stream.ring.shape[1] // SLICES
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, stream.ACROSS, 1], [1, 16, 8])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, MMA, widen.WORDS // 8)
    BY_GROUPS: gl.constexpr = stream.scales is not None or widen.ADDED != 0
    SUMS: gl.constexpr = 1 if BY_GROUPS else 2
    group, step, stage, phase = at
    accs = ()
    for _i in gl.static_range(SUMS * stream.T * stream.BLOCKS):
        accs = accs + (gl.zeros((SLICES, COLUMNS, stream.ROWS), gl.float32, layout=MMA),)
    for k in range(stream.steps):
        mbarrier.wait(stream.loaded.index(stage), phase)
        for turn in gl.static_range(TURNS):
            accs = _add_lines(stream, accs, stage, k, turn, SLICES, COLUMNS, SUMS, widen, WEIGHTS, MMA)
        program_barrier()  # all warps have read this stage
        stream.load(stage, group, step)
        group, step = _next(stream, group, step)
        last = stage == stream.STAGES - 1
        stage, phase = gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)
    for t in gl.static_range(stream.T):
        for i in gl.static_range(stream.BLOCKS):
            if SUMS == 1:
                acc = accs[t * stream.BLOCKS + i]
            else:
                acc = accs[2 * (t * stream.BLOCKS + i)] + accs[2 * (t * stream.BLOCKS + i) + 1]
            tile = stream.sums.slice(t * COLUMNS, COLUMNS, dim=1)
            if stream.BLOCKS > 1:
                tile = tile.slice(i * stream.ROWS, stream.ROWS, dim=2)
            tile.store(acc)
    program_barrier()
    return group, step, stage, phase


@gluon.jit
def _add_lines(
    stream, accs, stage, step, turn: gl.constexpr, SLICES: gl.constexpr, COLUMNS: gl.constexpr, SUMS: gl.constexpr,
    widen: gl.constexpr, WEIGHTS: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Add the products of a line of each warp, the `turn`-th of a stage, to the sums. Weights are widened once for all
    rows."""
    LINES: gl.constexpr = stream.ring.shape[1]
    BLOCKS: gl.constexpr = stream.BLOCKS
    PRODUCTS: gl.constexpr = widen.PRODUCTS
    SCALED: gl.constexpr = stream.scales is not None
    GROUPS: gl.constexpr = stream.GROUPS if SCALED else 1
    # for more rows, adding to each weight takes less; zero points take the sums of A in any case
    ADDS: gl.constexpr = widen.ADDED != 0 and (BLOCKS == 1 or stream.ZEROS)
    EACH: gl.constexpr = 2 if stream.ZEROS else 1
    if BLOCKS == 1:
        x = products_of_rows(_lines_of_rows(stream, stage, turn, 0, SLICES), widen, stream.ROWS, stream.ACROSS, MMA)
        if SUMS == 1:
            begins = begins_of(x, widen, GROUPS, COLUMNS, stream.ACROSS, ADDS, MMA)
    ZERO: gl.constexpr = -1.0 / widen.ADDED if stream.ZEROS else 0.0
    so_far = ()
    for t in gl.static_range(stream.T):
        words = stream.ring.index(stage * stream.T + t)
        if LINES > SLICES:
            words = words.slice(turn * SLICES, SLICES, dim=0)
        y = widen.words(words.load(WEIGHTS))
        if widen.ADDED != 0 and not ADDS:
            y = added_to(y, widen)
        scales = ()
        if SCALED:
            factors = stream.factors.index(stage * stream.T + t)
            scales = scales_of(factors, step, turn, LINES // SLICES, GROUPS * EACH, SLICES, stream.ACROSS, MMA)
        for i in gl.static_range(BLOCKS):
            if BLOCKS > 1:
                rows = _lines_of_rows(stream, stage, turn, i, SLICES)
                x = products_of_rows(rows, widen, stream.ROWS, stream.ACROSS, MMA)
                if SUMS == 1:
                    begins = begins_of(x, widen, GROUPS, COLUMNS, stream.ACROSS, ADDS, MMA)
            if SUMS == 1:
                so_far = so_far + (add_groups(accs[len(so_far)], y, x, begins, scales, SCALED, ZERO),)
            else:  # two sums each: half as long a chain of products that wait for another
                even, odd = accs[len(so_far)], accs[len(so_far) + 1]
                for p in gl.static_range(0, PRODUCTS, 2):
                    even, odd = mma_v2(y[p], x[p], even), mma_v2(y[p + 1], x[p + 1], odd)
                so_far = so_far + (even, odd)
    return so_far


@gluon.jit
def _lines_of_rows(stream, stage, turn: gl.constexpr, block: gl.constexpr, SLICES: gl.constexpr):
    """Return a block of rows of A, transposed, of the lines of this turn."""
    EACH: gl.constexpr = stream.rows.shape[1] // stream.ring.shape[1]  # parts of a line
    rows = stream.rows.index(stage).permute((0, 2, 1))
    if stream.ring.shape[1] > SLICES:
        rows = rows.slice(turn * SLICES * EACH, SLICES * EACH, dim=0)
    if stream.BLOCKS > 1:
        rows = rows.slice(block * stream.ROWS, stream.ROWS, dim=2)
    return rows


@gluon.jit
def total(stream, scales, first, col, WHICH: gl.constexpr, SUMS: gl.constexpr):
    """Return the products that `multiply` left, or those by matrix number `WHICH`, scaled: fp32 [columns, rows] by
    `columns_of`.

    `scales` are those of the columns from `first` on, which are columns `col`.
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
    """Return the columns of group number `group`, and which of them exist and come before `end`."""
    c = gl.arange(0, triton.next_power_of_2(stream.WIDTH), layout=gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))
    col = group * stream.WIDTH + c
    return col, (c < stream.WIDTH) & (col < end)


@triton.constexpr_function
def layout_of_sums(columns, lines, warps):
    """Return the layout of sums [lines, columns, rows], in which each thread holds all lines of a few adjacent
    columns."""
    return gl.BlockedLayout([lines, columns // 8, 1], [1, 8, 4], [1, 1, warps], [1, 2, 0])


def supports(A: torch.Tensor, B: torch.Tensor, scale: torch.Tensor | None = None) -> str | None:
    """Return the reason why the product of A [M, K] and the stored B cannot be computed here, or None."""
    weights = format_of(B, scale)
    if not platform.has_warp_specialisation(A.device):
        return "it needs a Hopper GPU"
    if A.dtype != torch.bfloat16 or not weights.widening:
        return f"it multiplies bfloat16 by {dtypes()}, not {A.dtype} by {B.dtype}"
    most, granule = weights.local_rows, weights.granule
    if not weights.streamable(A.shape[0], A.shape[1], most):
        return f"it is for up to {most} rows and for K a multiple of {granule}, not for {tuple(A.shape)}"
    if not (of_whole_vectors(A) and of_whole_vectors(B.t())):
        return "rows of A or columns of B begin between vectors of 16 bytes"
    if scale is not None and scale.ndim > 1 and not of_whole_vectors(scale.flatten(1)):
        return "rows of scales begin between vectors of 16 bytes"
    return None


@dataclass(frozen=True)
class Launch:
    """A product as kernels take it: `operands` are arguments, `form` has T tiles of `grid` programs."""

    grid: int
    form: StreamForm
    operands: dict

    def options(self, programs: int) -> dict[str, int]:
        """Return the launch's options for programs that run at once on `programs` multiprocessors."""
        return options(self.grid, programs, self.form.WARPS)


def prepared(A: torch.Tensor, B: torch.Tensor, scale: torch.Tensor, programs: int, **more: Any) -> Launch:
    """Return the launch of A [M, K] times B, the transpose of a stored weight [N, ...], by `programs` programs at once.

    A as lines of words or runs, B as lines of words, in blocks of some lines for all warps. `more`: of the form.
    """
    widen, matrices = widening_of(B, scale), more.get("MATRICES", 1)
    N, M = B.shape[1] // matrices, A.shape[0]
    rows = loaded_rows(M, widen.RUNS)
    multiplied = max(8, rows)
    groups, nbytes, zeros = 0, 0, scale.ndim == 3
    if scale.ndim > 1:
        groups = scale.shape[1] // (triton.cdiv(B.shape[0] * B.element_size(), 16 * widen.WORDS) * 4)  # as packed
        scale = scale.flatten(1)
        nbytes = groups * scale.itemsize * (1 + zeros)
    if widen is E4M3 and not groups:
        T = matrices if matrices > 1 else tiles_at_once(N, programs)
        grid, stages = grid_and_stages(N, M, T, programs, matrices)
        chosen = COLUMN_SCALES
    else:
        T = matrices
        chosen = choice(widen.WORDS, nbytes, M, N, programs, matrices)
        grid, stages = chosen.grid_and_stages(rows, N, T, widen.WORDS, nbytes, programs)
    lines = chosen.LINES
    if widen.RUNS:
        a = described(A, 32, lines * LINE // 32, rows)
    else:
        a = described(A.view(torch.int64), 32, lines, rows)
    b = described(B.t().view(torch.int32), widen.WORDS, lines, chosen.COLUMNS)
    scales = None
    if groups:
        row = scale_bytes(lines, nbytes)
        block = [chosen.COLUMNS, row // scale.itemsize]
        scales = word_descriptor(scale, block, block_layout(row, scale.itemsize, 2))
    blocks = triton.cdiv(M, MULTIPLIED_ROWS) if rows > MULTIPLIED_ROWS else 1
    form = StreamForm(
        multiplied, T, stages, min(multiplied, MULTIPLIED_ROWS), blocks, chosen.WARPS, chosen.COLUMN_WARPS, groups,
        zeros, LATER=widen.later, BRANCHES=chosen.BRANCHES, **more,
    )  # fmt: skip
    return Launch(grid, form, dict(a=a, b=b, scales=scales, widen=widen))


def widening_of(B: torch.Tensor, scale: torch.Tensor | None) -> Widening:
    """Return the policy of a stored weight's format."""
    return named(format_of(B, scale).widening)


def described(t: torch.Tensor, width: int, lines: int, rows: int) -> GluonDescriptor:
    """Return `t` [rows, n] as the hardware loads it: [n / width, rows, width], `rows` rows of `lines` lines at a
    time."""
    pieces = t.as_strided((t.shape[1] // width, t.shape[0], width), (width, t.stride(0), 1))
    # words of eight bytes in lines of 256: two lines of the widest swizzle
    return word_descriptor(pieces, [lines, rows, width], block_layout(width * t.itemsize, t.itemsize, 3))


def block_layout(line: int, itemsize: int, rank: int) -> gl.NVMMASharedLayout:
    """Return the layout of lines of `line` bytes in shared memory."""
    swizzle = min(line, 128) if line >= 32 else 0
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * itemsize, rank=rank)
