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

from ..kernels.descriptors import of_whole_vectors
from ..kernels.tiles import known
from ..named import named
from ..planning.weights import format_of
from ..planning.weights.fp8 import FP8, LINE, MOST_ROWS, streamable
from .widening import Widening

WARPS = 4
# Programs for which a multiprocessor has room at once: stages of their rings, by rows and T. Where there is but one for
# each, there must be room for one only: behind a kernel that is about to end, two would come to the first free place.
RINGS = {
    1: {(8, 1): 12, (8, 2): 8, (8, 3): 6, (16, 1): 8, (16, 2): 6, (16, 3): 5},
    2: {(8, 1): 6, (8, 2): 4, (8, 3): 3, (16, 1): 4, (16, 2): 3, (16, 3): 2},
    3: {(8, 1): 4, (16, 2): 2},
}
REGISTERS = 168  # of a thread of three programs, in eights
_COLUMNS = gl.constexpr(16)  # of a tile
_WORDS = gl.constexpr(32)  # of a slice's block, of four weights each
assert 4 * _WORDS.value == LINE


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


@aggregate
class Stream:
    """A program's operands on their way. a, b: descriptors of A and of B as words [K/128, rows or columns, 32].

    T tiles of weights at a time, which with `GATED` are T/2 of the first N columns and the T/2 that lie N further.
    WIDTH: columns that they make of the result. LATER: of a `widening.Widening`.
    """

    a: base_value
    b: base_value
    rows: base_value
    ring: base_value
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
    def __init__(self, a, b, rows, ring, loaded, sums, N, steps, T, GATED, STAGES, WIDTH, LATER):
        self.a, self.b, self.rows, self.ring, self.loaded, self.sums = a, b, rows, ring, loaded, sums
        self.N, self.steps = known(N), known(steps)
        self.T, self.GATED, self.STAGES, self.WIDTH = known(T), known(GATED), known(STAGES), known(WIDTH)
        self.LATER = gl.constexpr(LATER)

    @gluon.jit
    def load(self, stage, group, step):
        """Request a step's blocks of group number `group` of tiles; beyond the last one for nothing."""
        wanted = group * self.WIDTH < self.N
        loaded = self.loaded.index(stage)
        mbarrier.expect(loaded, self.a.block_type.nbytes + self.T * self.b.block_type.nbytes, pred=wanted)
        first = step * self.ring.shape[1]
        async_load(self.a, [first, 0, 0], loaded, self.rows.index(stage), pred=wanted)
        for t in gl.static_range(self.T):
            col = group * self.WIDTH + (t * _COLUMNS) % self.WIDTH + (t * _COLUMNS) // self.WIDTH * self.N
            place = self.ring.index(stage * self.T + t)
            async_load(self.b, [first, col, 0], loaded, place, pred=wanted)


@gluon.jit
def begin(a, b, N, K, form: gl.constexpr):
    """(the program's stream, where it stands), its first blocks on their way. `form`: a `StreamForm`."""
    BLOCK_M: gl.constexpr = form.BLOCK_M
    T: gl.constexpr = form.T
    GATED: gl.constexpr = form.GATED
    STAGES: gl.constexpr = form.STAGES
    SLICES: gl.constexpr = form.SLICES
    TILES: gl.constexpr = triton.next_power_of_2(T)
    WIDTH: gl.constexpr = _COLUMNS * (T // 2 if GATED else T)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 2, 0])  # columns follow each other
    rows = gl.allocate_shared_memory(gl.int64, [STAGES, SLICES, BLOCK_M, _WORDS], a.layout)
    ring = gl.allocate_shared_memory(gl.int32, [STAGES * T, SLICES, _COLUMNS, _WORDS], b.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    sums = gl.allocate_shared_memory(gl.float32, [SLICES, TILES * _COLUMNS, BLOCK_M], PLAIN)
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
    steps = gl.cdiv(K, 4 * _WORDS * SLICES)
    stream = Stream(a, b, rows, ring, loaded, sums, N, steps, T, GATED, STAGES, WIDTH, form.LATER)
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

    `widen`: `Widening.words` of the weights. Returns where the stream stands then.
    """
    SLICES: gl.constexpr = stream.ring.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, 1, 1], [1, 16, 8])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    ROWS: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    group, step, stage, phase = at
    accs = ()
    for _t in gl.static_range(2 * stream.T):
        accs = accs + (gl.zeros((SLICES, _COLUMNS, BLOCK_M), gl.float32, layout=MMA),)
    for _k in range(stream.steps):
        mbarrier.wait(stream.loaded.index(stage), phase)
        x = _apart(stream.rows.index(stage).permute((0, 2, 1)).load(ROWS))
        so_far = ()
        for t in gl.static_range(stream.T):  # two sums each: half as long a chain of products that wait for another
            y = widen(stream.ring.index(stage * stream.T + t).load(WEIGHTS))
            even, odd = mma_v2(y[0], x[0], accs[2 * t]), mma_v2(y[1], x[1], accs[2 * t + 1])
            so_far = so_far + (mma_v2(y[2], x[2], even), mma_v2(y[3], x[3], odd))
        accs = so_far
        program_barrier()  # all warps have read this stage
        stream.load(stage, group, step)
        group, step = _next(stream, group, step)
        last = stage == stream.STAGES - 1
        stage, phase = gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)
    for t in gl.static_range(stream.T):
        stream.sums.slice(t * _COLUMNS, _COLUMNS, dim=1).store(accs[2 * t] + accs[2 * t + 1])
    program_barrier()
    return group, step, stage, phase


@gluon.jit
def total(stream, scales, first, col, WHICH: gl.constexpr, SUMS: gl.constexpr):
    """Half number `WHICH` of what `multiply` left, or all: fp32 [columns, rows] by `columns_of`, times their scales.

    `scales`: of columns from `first` on; `col`: which of them these are.
    """
    WIDTH: gl.constexpr = triton.next_power_of_2(stream.WIDTH)
    slices = stream.sums.slice(WHICH * WIDTH, WIDTH, dim=1).load(SUMS)
    factors = gl.load(scales + first + col, mask=col < stream.N, other=0.0)
    return gl.sum(slices, 0) * stream.LATER * factors[:, None]  # both factors together might be infinite


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


def grid_and_stages(columns: int, rows: int, T: int, programs: int, gated: bool = False) -> tuple[int, int]:
    """Programs of a product of so many columns, which all run at once on so many multiprocessors, and their rings."""
    groups, kind = triton.cdiv(columns, _COLUMNS.value * (T // 2 if gated else T)), (rows_at_once(rows), T)
    resident = 1 if groups <= programs else 3 if kind in RINGS[3] else 2
    return min(groups, resident * programs), RINGS[resident][kind]


def options(grid: int, programs: int) -> dict[str, int]:
    """Launch options of a grid whose programs must all run at once on so many multiprocessors."""
    most = {"maxnreg": REGISTERS} if grid > 2 * programs else {}  # of two each, all that a thread can have fit
    return {"num_warps": WARPS, **most}


def shared_bytes(rows: int, T: int, stages: int) -> int:
    """Shared memory of a program, but for its barriers: the ring, and the slices' sums."""
    block = WARPS * _WORDS.value * (8 * rows + 4 * T * _COLUMNS.value)
    return stages * block + WARPS * triton.next_power_of_2(T) * _COLUMNS.value * rows * 4


def supports(A: torch.Tensor, B: torch.Tensor) -> str | None:
    """Return the reason why the product of A [M, K] and B [K, N] in fp8 cannot be computed here, or None."""
    if not platform.has_warp_specialisation(A.device):
        return "it needs a Hopper GPU"
    if A.dtype != torch.bfloat16 or B.dtype != FP8:
        return f"it multiplies bfloat16 by {FP8}, not {A.dtype} by {B.dtype}"
    if not streamable(*A.shape):
        return f"it is for up to {MOST_ROWS} rows and for K a multiple of {LINE}, not for {tuple(A.shape)}"
    if not (of_whole_vectors(A) and of_whole_vectors(B.t())):
        return "rows of A or columns of B begin between vectors of 16 bytes"
    return None


def widening_of(dtype: torch.dtype) -> Widening:
    """Return the policy of a weight's format, by its dtype."""
    return named(format_of(dtype).widening)


def operands(A: torch.Tensor, B: torch.Tensor) -> dict:
    """A and B as the kernels take them: lines of 128 numbers, as words of four, in blocks of a line for each warp.

    And how B's format is widened.
    """
    words = (A.view(torch.int64), rows_at_once(A.shape[0])), (B.t().view(torch.int32), _COLUMNS.value)
    a, b = (_described(*each) for each in words)
    return dict(a=a, b=b, widen=widening_of(B.dtype).words)


def _described(words: torch.Tensor, rows: int) -> GluonDescriptor:
    """Return [rows, words] as the hardware loads it: [lines, rows, 32], of which `rows` of four lines at a time."""
    lines = words.as_strided(
        (words.shape[1] // _WORDS.value, words.shape[0], _WORDS.value), (_WORDS.value, words.stride(0), 1)
    )
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * words.itemsize, rank=3)
    block = [WARPS, rows, _WORDS.value]
    return word_descriptor(lines, block, layout)
