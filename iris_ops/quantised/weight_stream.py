"""The product of few rows with quantised weights, for NVIDIA Hopper: fewer bytes to stream than in bf16.

A product of few rows takes as long as its weights take from memory. torch's way rounds A to fp8 by a kernel of
its own first. A plain Triton kernel converts weights more slowly than memory gives them. Here the weights become bf16
in registers, and A stays as it is. Four things make that cheap:

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
from ..planning.needs import LINE, MOST_ROWS
from ..planning.weights import dtypes, format_of
from .line_products import add_groups, begins_of, products_of_rows
from .widening import E4M3, Widening

WARPS = 4
# Programs for which a multiprocessor has room at once: stages of their rings, by rows and T. Where there is but one for
# each, there must be room for one only: behind a kernel that is about to end, two would come to the first free place.
RINGS = {
    1: {(8, 1): 12, (8, 2): 8, (8, 3): 6, (16, 1): 8, (16, 2): 6, (16, 3): 5},
    2: {(8, 1): 6, (8, 2): 4, (8, 3): 3, (16, 1): 4, (16, 2): 3, (16, 3): 2},
    3: {(8, 1): 4, (16, 2): 2},
}
SHARED, RESERVED = 228 << 10, 1536  # bytes of a multiprocessor, and of each program beside ring and sums
REGISTERS = {3: 168, 4: 128}  # of a thread, by the programs at once, in eights
_COLUMNS = gl.constexpr(16)  # of a tile of fp8 with a scale for each column
_LINE = gl.constexpr(LINE)


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
    BRANCHES: gl.constexpr

    @triton.constexpr_function
    def __init__(
        self, a, b, scales, rows, ring, factors, loaded, sums, N, steps, T, GATED, STAGES, WIDTH, LATER, BRANCHES
    ):  # fmt: skip
        self.a, self.b, self.rows, self.ring = a, b, rows, ring
        self.scales, self.factors = (gl.constexpr(None) if each is None else each for each in (scales, factors))
        self.loaded, self.sums, self.N, self.steps = loaded, sums, known(N), known(steps)
        self.T, self.GATED, self.STAGES, self.WIDTH = known(T), known(GATED), known(STAGES), known(WIDTH)
        self.LATER, self.BRANCHES = gl.constexpr(LATER), known(BRANCHES)

    @gluon.jit
    def load(self, stage, group, step):
        """Request a step's blocks of group number `group` of tiles; beyond the last one for nothing."""
        wanted = group * self.WIDTH < self.N
        if self.BRANCHES:
            if wanted:
                self._request(stage, group, step, True)
        else:
            self._request(stage, group, step, wanted)

    @gluon.jit
    def _request(self, stage, group, step, wanted):
        COLUMNS: gl.constexpr = self.b.block_type.shape[1]
        loaded = self.loaded.index(stage)
        OF_SCALES: gl.constexpr = 0 if self.scales is None else self.scales.block_type.nbytes
        nbytes: gl.constexpr = self.a.block_type.nbytes + self.T * (self.b.block_type.nbytes + OF_SCALES)
        mbarrier.expect(loaded, nbytes, pred=wanted)
        async_load(self.a, [step * self.rows.shape[1], 0, 0], loaded, self.rows.index(stage), pred=wanted)
        for t in gl.static_range(self.T):
            col = group * self.WIDTH + (t * COLUMNS) % self.WIDTH + (t * COLUMNS) // self.WIDTH * self.N
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
    LINES: gl.constexpr = b.block_type.shape[0]
    COLUMNS: gl.constexpr = b.block_type.shape[1]
    TILES: gl.constexpr = triton.next_power_of_2(T)
    WIDTH: gl.constexpr = COLUMNS * (T // 2 if GATED else T)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 2, 0])  # columns follow each other
    rows = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    ring = gl.allocate_shared_memory(gl.int32, [STAGES * T] + b.block_type.shape, b.layout)
    factors = None
    if scales is not None:
        factors = gl.allocate_shared_memory(scales.dtype, [STAGES * T] + scales.block_type.shape, scales.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    sums = gl.allocate_shared_memory(gl.float32, [LINES, TILES * COLUMNS, BLOCK_M], PLAIN)
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
    steps = gl.cdiv(K, _LINE * LINES)
    stream = Stream(
        a, b, scales, rows, ring, factors, loaded, sums, N, steps, T, GATED, STAGES, WIDTH, form.LATER, form.BRANCHES
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
    """Leaves the lines' products in `stream.sums`, of the columns that come next; `total` adds them up.

    `widen`: the `Widening` of the weights. Returns where the stream stands then.
    """
    LINES: gl.constexpr = stream.ring.shape[1]
    COLUMNS: gl.constexpr = stream.ring.shape[2]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1, 1], [1, 16, 8])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, MMA, widen.WORDS // 8)
    PRODUCTS: gl.constexpr = widen.PRODUCTS
    BY_GROUPS: gl.constexpr = stream.scales is not None or widen.ADDED != 0
    SUMS: gl.constexpr = 1 if BY_GROUPS else 2
    group, step, stage, phase = at
    accs = ()
    for _t in gl.static_range(SUMS * stream.T):
        accs = accs + (gl.zeros((LINES, COLUMNS, BLOCK_M), gl.float32, layout=MMA),)
    for _k in range(stream.steps):
        mbarrier.wait(stream.loaded.index(stage), phase)
        x = products_of_rows(stream.rows.index(stage), widen, MMA)
        begins = ()
        if BY_GROUPS:
            GROUPS: gl.constexpr = 1 if stream.scales is None else stream.factors.shape[2] // LINES
            begins = begins_of(x, widen, PRODUCTS, GROUPS, COLUMNS, MMA)
        so_far = ()
        for t in gl.static_range(stream.T):
            y = widen.words(stream.ring.index(stage * stream.T + t).load(WEIGHTS))
            if BY_GROUPS:
                factors = None
                if stream.scales is not None:
                    factors = stream.factors.index(stage * stream.T + t)
                so_far = so_far + (add_groups(accs[t], y, x, begins, factors, LINES, PRODUCTS, MMA),)
            else:  # two sums each: half as long a chain of products that wait for another
                even, odd = accs[2 * t], accs[2 * t + 1]
                for i in gl.static_range(0, PRODUCTS, 2):
                    even, odd = mma_v2(y[i], x[i], even), mma_v2(y[i + 1], x[i + 1], odd)
                so_far = so_far + (even, odd)
        accs = so_far
        program_barrier()  # all warps have read this stage
        stream.load(stage, group, step)
        group, step = _next(stream, group, step)
        last = stage == stream.STAGES - 1
        stage, phase = gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)
    for t in gl.static_range(stream.T):
        acc = accs[t] if SUMS == 1 else accs[2 * t] + accs[2 * t + 1]
        stream.sums.slice(t * COLUMNS, COLUMNS, dim=1).store(acc)
    program_barrier()
    return group, step, stage, phase


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
def layout_of_sums(columns, lines):
    """The layout of sums [lines, columns, rows]: each thread holds all lines of some adjacent columns."""
    return gl.BlockedLayout([lines, columns // 8, 1], [1, 8, 4], [1, 1, WARPS], [1, 2, 0])


def tiles_at_once(columns: int, programs: int) -> int:
    """T: how many tiles a program takes at a time, so that multiprocessors end together and A is read rarely."""
    tiles = triton.cdiv(columns, _COLUMNS.value)

    def most(T: int) -> float:
        return triton.cdiv(triton.cdiv(tiles, T), programs) * T * (1 + 0.35 / T)  # A costs a third of a tile

    return min((3, 2, 1), key=most)


def rows_at_once(rows: int) -> int:
    """Return how many rows of A a program has: 8 or `MOST_ROWS`."""
    return 8 if rows <= 8 else MOST_ROWS


def grid_and_stages(columns: int, rows: int, T: int, programs: int, gated: bool = False) -> tuple[int, int]:
    """Programs of a product of so many columns, which all run at once on so many multiprocessors, and their rings.

    Of fp8 with a scale for each column.
    """
    groups, kind = triton.cdiv(columns, _COLUMNS.value * (T // 2 if gated else T)), (rows_at_once(rows), T)
    resident = 1 if groups <= programs else 3 if kind in RINGS[3] else 2
    return min(groups, resident * programs), RINGS[resident][kind]


@dataclass(frozen=True)
class Choice:
    """How programs of a format with scales of groups divide the work.

    COLUMNS: of a tile, of which a program takes one at a time, or of a gated product two. LINES: of a step, of all
    warps. RESIDENT: programs on a multiprocessor at once. BRANCHES: whether a branch skips loads beyond the last.
    """

    COLUMNS: int = 32
    LINES: int = 4
    RESIDENT: int = 2
    STAGES: int = 12
    BRANCHES: bool = True


def choice() -> Choice:
    """Return the choice whose results were compared with float64 on GPUs.

    Instructions limit these formats more than memory does, so wide tiles, where more columns share A and what a step
    costs, should win: `Choice(64, 8, 1)` took 12.1 us for 15.8 of one row by 8192 x 4096 int4 weights on an H200.
    `benchmarks/quantised.py --variants` compares its results before it may be chosen.
    """
    return Choice()


def options(grid: int, programs: int) -> dict[str, int]:
    """Launch options of a grid whose programs must all run at once on so many multiprocessors."""
    resident = triton.cdiv(grid, programs)
    most = {"maxnreg": REGISTERS[resident]} if resident in REGISTERS else {}  # of two, all that a thread can have fit
    return {"num_warps": WARPS, **most}


def shared_bytes(rows: int, T: int, stages: int) -> int:
    """Shared memory of a program of fp8 with a scale for each column, but for its barriers."""
    return stages * stage_bytes(rows, T * _COLUMNS.value, 32) + sums_bytes(rows, T * _COLUMNS.value)


def stage_bytes(rows: int, columns: int, words: int, scales: int = 0, lines: int = WARPS) -> int:
    """Bytes of a stage of the ring: lines of A, their words for so many columns, and bytes of a column's scales."""
    return lines * (2 * LINE * rows + columns * (4 * words + scales))


def sums_bytes(rows: int, columns: int, lines: int = WARPS) -> int:
    return lines * triton.next_power_of_2(columns) * rows * 4


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


def prepared(A: torch.Tensor, B: torch.Tensor, scale: torch.Tensor, programs: int, **more: Any) -> Launch:
    """Return the launch of A [M, K] times B, the transpose of a stored weight [N, ...], by so many programs at once.

    A as lines of words or runs, B as lines of words, in blocks of some lines for all warps. `more`: of the form.
    """
    widen, gated = widening_of(B, scale), more.get("GATED", False)
    N, rows = B.shape[1] // (1 + gated), rows_at_once(A.shape[0])
    plain = widen is E4M3 and scale.ndim == 1
    T = (2 if gated else tiles_at_once(N, programs)) if plain else 1 + gated
    if plain:
        chosen = Choice(_COLUMNS.value, BRANCHES=False)
    else:
        chosen = choice()
    lines = chosen.LINES
    if widen.RUNS:
        a = described(A, 32, lines * LINE // 32, rows)
    else:
        a = described(A.view(torch.int64), 32, lines, rows)
    b = described(B.t().view(torch.int32), widen.WORDS, lines, chosen.COLUMNS)
    scales, nbytes = None, 0
    if scale.ndim == 2:
        per_line = scale.shape[1] // (triton.cdiv(b.shape[0], 4) * 4)  # as packed
        block, nbytes = [chosen.COLUMNS, lines * per_line], per_line * scale.itemsize
        scales = word_descriptor(scale, block, block_layout(lines * nbytes, scale.itemsize, 2))
    if plain:
        grid, stages = grid_and_stages(N, A.shape[0], T, programs, gated)
    else:
        groups = triton.cdiv(N, chosen.COLUMNS)
        resident = min(chosen.RESIDENT, triton.cdiv(groups, programs))
        others = RESERVED + sums_bytes(rows, T * chosen.COLUMNS, lines)
        stage = stage_bytes(rows, T * chosen.COLUMNS, widen.WORDS, nbytes, lines)
        resident = 1 if SHARED // resident < others + 2 * stage else resident
        room = SHARED // resident - others
        grid, stages = min(groups, resident * programs), max(2, min(chosen.STAGES, room // stage))
    form = StreamForm(rows, T, stages, LATER=widen.later, BRANCHES=chosen.BRANCHES, **more)
    return Launch(grid, form, dict(a=a, b=b, scales=scales, widen=widen))


def widening_of(B: torch.Tensor, scale: torch.Tensor | None) -> Widening:
    """Return the policy of a stored weight's format."""
    return named(format_of(B, scale).widening)


def described(t: torch.Tensor, width: int, lines: int, rows: int) -> GluonDescriptor:
    """Return `t` [rows, n] as the hardware loads it: [n / width, rows, width], `rows` of so many `lines` at a time."""
    pieces = t.as_strided((t.shape[1] // width, t.shape[0], width), (width, t.stride(0), 1))
    # words of eight bytes in lines of 256: two lines of the widest swizzle
    return word_descriptor(pieces, [lines, rows, width], block_layout(width * t.itemsize, t.itemsize, 3))


def block_layout(line: int, itemsize: int, rank: int) -> gl.NVMMASharedLayout:
    """The layout of lines of so many bytes in shared memory."""
    swizzle = min(line, 128) if line >= 32 else 0
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * itemsize, rank=rank)
