"""Grouped products of many tokens by experts that are stored as codes, for NVIDIA Hopper.

It computes what `grouped_matmul.py` computes of sorted pairs. A program takes tiles in turn: a block of an expert's
pairs, and some of its columns. Codes come to shared memory as they are stored, and become bf16 in the registers from
which the tensor cores take them (`kernels/hopper/widened_mma.py`). So a weight is widened once for all rows of a block.

    loader       Four warps load lines of codes, and of rows, into a ring: codes by TMA, and rows, which lie
                 apart, by copies of 16 bytes.
    MMA warps    multiply the lines, and store the block with the activation.

Where an expert has two matrices, a tile holds as many columns of each, the gates' first. Then a thread has both sums of
a result. Waits for the ring have no deadline, because they are for loads and products of the program itself.
"""

from typing import TYPE_CHECKING

from iris import platform
from iris.device import arch
from iris.triton_private import (
    aggregate,
    arrive_copied,
    async_load,
    base_value,
    copy_async,
    fence_async_shared,
    mbarrier,
    program_barrier,
    reinterpret,
    warp_specialize,
)  # fmt: skip
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernels.activations import activated, joined
from ..kernels.arguments import Pipeline, Tile
from ..kernels.hopper import widened_mma
from ..kernels.hopper.loading import after, before
from ..kernels.hopper.operands import SCALE_TYPES, described
from ..kernels.hopper.widened_mma import Codes, WidenedMma
from ..kernels.tiles import known
from ..named import named
from ..planning.moe_ways import WIDENED_TILES
from ..planning.needs import LINE
from .arguments import bias_of

if TYPE_CHECKING:
    from ..config import FusedConfig
    from ..problem import Problem
    from ..steps import Run
    from ..workspace import Workspace
    from .operands import GateUp

_HALF = gl.constexpr(LINE // widened_mma.BLOCKS)
_WARPS, _LOADER_WARPS, _LOADER_REGISTERS = 4, 4, 80
_RESIDENT = 2  # programs on a multiprocessor at once
_SHARED, _RESERVED, _MOST_STAGES = 226 << 10, 4 << 10, 8


@gluon.jit
def _add(a, b):
    return a + b


@triton.constexpr_function
def _in_each_warp(experts, warps):
    """Return the layout of numbers of all experts, of which each warp has all."""
    held = [[32 << i] for i in range(experts.bit_length() - 6)]
    lanes = [[1 << i] for i in range(5)]
    return gl.DistributedLinearLayout(held, lanes, [[0]] * (warps.bit_length() - 1), [], [experts])


@aggregate
class Blocks:
    """The blocks of rows of all experts, in shared memory: where each expert's pairs begin and end in the order, and
    how many blocks there are up to its last one.

    across: tiles beside each other, of COLUMNS columns of the result. N: columns of an expert's weight.
    """

    begins: base_value
    ends: base_value
    upto: base_value
    across: base_value
    N: base_value
    COLUMNS: gl.constexpr
    BLOCK_M: gl.constexpr
    GROUP_M: gl.constexpr

    @triton.constexpr_function
    def __init__(self, begins, ends, upto, across, N, COLUMNS, BLOCK_M, GROUP_M):
        self.begins, self.ends, self.upto, self.across, self.N = begins, ends, upto, across, known(N)
        self.COLUMNS, self.BLOCK_M, self.GROUP_M = known(COLUMNS), known(BLOCK_M), known(GROUP_M)

    @gluon.jit
    def read(self):
        """Return what all threads of a warp need to find tiles, and the number of tiles."""
        EXPERTS: gl.constexpr = self.upto.shape[0]
        EACH: gl.constexpr = _in_each_warp(EXPERTS, gl.num_warps())
        upto = self.upto.load(EACH)
        blocks = gl.max(upto, 0)
        return (self.begins.load(EACH), self.ends.load(EACH), upto, blocks), blocks * self.across

    @gluon.jit
    def at(self, known_blocks, tile):
        """Return (expert, its first pair in the order, where its pairs end, first column) of tile number `tile`."""
        begins, ends, upto, blocks = known_blocks
        EXPERTS: gl.constexpr = self.upto.shape[0]
        e = gl.arange(0, EXPERTS, layout=_in_each_warp(EXPERTS, gl.num_warps()))
        # neighbours share columns of the weight, GROUP_M blocks of rows at a time
        group = tile // (self.GROUP_M * self.across)
        high = gl.minimum(blocks - group * self.GROUP_M, self.GROUP_M)
        within = tile % (self.GROUP_M * self.across)
        number, col = group * self.GROUP_M + within % high, within // high * self.COLUMNS
        expert = gl.sum((upto <= number).to(gl.int32), 0)
        end = gl.sum(gl.where(e == expert, ends, 0), 0)
        earlier = gl.max(gl.where(e < expert, upto, 0), 0)
        begin = gl.sum(gl.where(e == expert, begins, 0), 0)
        return expert, begin + (number - earlier) * self.BLOCK_M, end, col


@gluon.jit
def _blocks_of(offsets, experts, across, N, COLUMNS: gl.constexpr, tile: gl.constexpr, EXPERTS: gl.constexpr):
    """Return the `Blocks` of sorted pairs."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    e = gl.arange(0, EXPERTS, layout=EACH)
    begins = gl.load(offsets + e, mask=e < experts, other=0)
    ends = gl.load(offsets + e + 1, mask=e < experts, other=0)
    upto = gl.associative_scan((ends - begins + tile.BLOCK_M - 1) // tile.BLOCK_M, 0, _add)
    blocks = Blocks(
        gl.allocate_shared_memory(gl.int32, [EXPERTS], PLAIN), gl.allocate_shared_memory(gl.int32, [EXPERTS], PLAIN),
        gl.allocate_shared_memory(gl.int32, [EXPERTS], PLAIN), across, N, COLUMNS, tile.BLOCK_M, tile.GROUP_M,
    )  # fmt: skip
    blocks.begins.store(begins)
    blocks.ends.store(ends)
    blocks.upto.store(upto)
    program_barrier()
    return blocks


@aggregate
class Ring:
    """The ring of a program: lines of rows, in halves, of codes, and of the scales of groups, or None."""

    rows: base_value
    codes: base_value
    scales: base_value
    loaded: base_value
    freed: base_value
    STAGES: gl.constexpr

    @triton.constexpr_function
    def __init__(self, rows, codes, scales, loaded, freed):
        self.rows, self.codes, self.loaded, self.freed = rows, codes, loaded, freed
        self.scales = gl.constexpr(None) if scales is None else scales
        self.STAGES = known(codes.shape[0])


@gluon.jit(do_not_specialize=["experts", "divisor"])
def moe_widened_matmul_kernel(
    a, b, scales, stride_scale, factors, bias, order, offsets, out, experts, divisor, N, K, stride_am, stride_om,
    stride_on, tile: gl.constexpr, pipeline: gl.constexpr, EXPERTS: gl.constexpr, INTERLEAVED: gl.constexpr,
    activation: gl.constexpr,
):  # fmt: skip
    """Compute what `moe_matmul_kernel` computes of sorted pairs.

    b: a descriptor of the codes [lines, matrices, columns of all experts, words]. scales: those of groups, in words, or
    None where `factors` are those of columns. N: columns of an expert's weight.
    """
    arch.follow()
    MATRICES: gl.constexpr = b.block_type.shape[1]
    COLUMNS: gl.constexpr = tile.BLOCK_N // MATRICES  # of the result
    STAGES: gl.constexpr = pipeline.STAGES
    blocks = _blocks_of(offsets, experts, gl.cdiv(N // MATRICES, COLUMNS), N, COLUMNS, tile, EXPERTS)
    ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([tile.BLOCK_M, _HALF], a.dtype.element_ty)
    rows = gl.allocate_shared_memory(a.dtype.element_ty, [2 * STAGES, tile.BLOCK_M, _HALF], ROWS)
    codes = gl.allocate_shared_memory(gl.int32, [STAGES] + b.block_type.shape, b.layout)
    of_groups = None
    if scales is not None:
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        of_groups = gl.allocate_shared_memory(gl.int32, [STAGES, tile.BLOCK_N, pipeline.WORDS], PLAIN)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1 + 32 * pipeline.LOADER_WARPS)
        mbarrier.init(freed.index(i), count=1)
    ring = Ring(rows, codes, of_groups, loaded, freed)
    mma = WidenedMma(
        Codes(
            None, None, experts * N, 0, pipeline.GROUPS, pipeline.ZEROS, pipeline.WIDENING, pipeline.SCALES,
            pipeline.WORDS,
        ), tile, pipeline
    )  # fmt: skip
    warp_specialize(
        [
            (
                _multiply,
                (mma, blocks, ring, factors, bias, order, out, K, stride_om, stride_on, MATRICES, INTERLEAVED,
                 activation),
            ),
            (
                _load,
                (a, b, scales, stride_scale, blocks, ring, order, divisor, K, stride_am, tile.BLOCK_N, MATRICES,
                 INTERLEAVED),
            ),
        ],
        [pipeline.LOADER_WARPS],
        [pipeline.LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _load(
    a, b, scales, stride_scale, blocks, ring, order, divisor, K, stride, BLOCK_N: gl.constexpr, MATRICES: gl.constexpr,
    INTERLEAVED: gl.constexpr,
):  # fmt: skip
    """Run the loader: load all lines of all tiles in turn, each once its place is free."""
    BLOCK_M: gl.constexpr = ring.rows.shape[1]
    COLUMNS: gl.constexpr = BLOCK_N // MATRICES
    VECTORS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    N = blocks.N
    k = gl.arange(0, _HALF, layout=gl.SliceLayout(0, VECTORS))
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, VECTORS))
    if scales is not None:
        WORDS: gl.constexpr = ring.scales.shape[2]
        OF_COLUMNS: gl.constexpr = gl.BlockedLayout([1, WORDS], [32, 1], [gl.num_warps(), 1], [1, 0])
        n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, OF_COLUMNS))
        w = gl.arange(0, WORDS, layout=gl.SliceLayout(0, OF_COLUMNS))
    known_blocks, tiles = blocks.read()
    stage = 0
    phase = 1  # the first places are free
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, first, end, col = blocks.at(known_blocks, tile)
        own = first + m < end
        pair = gl.load(order + first + m, mask=own, other=0)
        places = a + ((pair // divisor).to(gl.int64) * stride)[:, None] + k[None, :]
        column = expert * (N // 2 if INTERLEAVED else N) + col
        if scales is not None:
            c = col + n % COLUMNS
            there = c < N // MATRICES
            c = expert * N + _column(n // COLUMNS, c, N, MATRICES, INTERLEAVED)
            factors = scales + (c.to(gl.int64) * gl.multiple_of(stride_scale, 4))[:, None] + w[None, :]
        for line in range(gl.cdiv(K, 2 * _HALF)):
            mbarrier.wait(ring.freed.index(stage), phase)
            loaded = ring.loaded.index(stage)
            mbarrier.expect(loaded, b.block_type.nbytes)
            async_load(b, [line, 0, column, 0], loaded, ring.codes.index(stage))
            for half in gl.static_range(2):
                begin = (2 * line + half) * _HALF
                inside = own[:, None] & (begin + k < K)[None, :]
                copy_async(ring.rows.index(2 * stage + half), places + begin, mask=inside)
            if scales is not None:
                copy_async(ring.scales.index(stage), factors + line * WORDS, mask=there[:, None])
            arrive_copied(loaded, increment_count=False)
            stage, phase = after(stage, phase, ring.STAGES)


@gluon.jit
def _multiply(
    mma, blocks, ring, factors, bias, order, out, K, stride_om, stride_on, MATRICES: gl.constexpr,
    INTERLEAVED: gl.constexpr, activation: gl.constexpr,
):  # fmt: skip
    """Run the MMA warps: multiply all lines, and store the blocks."""
    N = blocks.N
    COLUMNS: gl.constexpr = mma.BLOCK_N // MATRICES
    WORDS: gl.constexpr = ring.codes.shape[4]
    WIDE: gl.constexpr = min(32, COLUMNS // 8)
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [WIDE, 32 // WIDE], [1, gl.num_warps()], [0, 1])
    known_blocks, tiles = blocks.read()
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        if tile + gl.num_programs(0) >= tiles:
            arch.lead()
        expert, first, end, col = blocks.at(known_blocks, tile)
        acc = mma.take_scales(mma.begin(0, 0), ring.scales if ring.scales is None else ring.scales.index(0))
        for line in range(gl.cdiv(K, 2 * _HALF)):
            mbarrier.wait(ring.loaded.index(stage), phase)
            fence_async_shared()  # a thread's copies are no part of what the tensor cores read
            acc = mma.take_scales(acc, ring.scales if ring.scales is None else ring.scales.index(stage))
            columns = reinterpret(ring.codes.index(stage), gl.int32, [1, mma.BLOCK_N, WORDS], mma.LINE_FORM)
            acc = mma.issue(ring.rows.index(2 * stage), columns, acc, 0)
            acc = mma.await_last_but_one(acc)
            program_barrier()  # all warps have multiplied the line before
            mbarrier.arrive(ring.freed.index(before(stage, ring.STAGES)), count=1, pred=line > 0)
            acc = mma.issue(ring.rows.index(2 * stage + 1), columns, acc, 1)
            acc = mma.await_last_but_one(acc)
            stage, phase = after(stage, phase, ring.STAGES)
        sums = gl.permute(mma.result(acc), (1, 0))
        program_barrier()  # all warps have multiplied the last line
        mbarrier.arrive(ring.freed.index(before(stage, ring.STAGES)), count=1)
        if MATRICES == 2:
            both = gl.permute(gl.reshape(sums, (2, COLUMNS, mma.BLOCK_M)), (1, 2, 0))
            gates, ups = gl.split(both)
            gates = _finished(gates, factors, bias, expert, 0, col, N, MATRICES, INTERLEAVED)
            ups = _finished(ups, factors, bias, expert, 1, col, N, MATRICES, INTERLEAVED)
            value = joined(gates, ups, activation)
        else:
            value = _finished(sums, factors, bias, expert, 0, col, N, MATRICES, INTERLEAVED)
            if activation is not None:
                value = activated(value, activation)
        value = gl.convert_layout(value.to(out.dtype.element_ty), STORED)
        i = first + gl.arange(0, mma.BLOCK_M, layout=gl.SliceLayout(0, STORED))
        pair = gl.load(order + i, mask=i < end, other=0)
        c = col + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, STORED))
        places = out + (pair.to(gl.int64) * stride_om)[None, :] + (c.to(gl.int64) * stride_on)[:, None]
        gl.store(places, value, mask=(c < N // MATRICES)[:, None] & (i < end)[None, :])


@gluon.jit
def _column(matrix, c, N, MATRICES: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Return the columns of an expert's weight that columns `c` of the result have in a matrix."""
    if INTERLEAVED:
        return 2 * c + matrix
    else:
        return c + matrix * (N // MATRICES)


@gluon.jit
def _finished(
    sums, factors, bias, expert, MATRIX: gl.constexpr, col, N, MATRICES: gl.constexpr, INTERLEAVED: gl.constexpr
):
    """Return sums [columns, rows] of one matrix times the scales of their columns, plus the bias."""
    COLUMNS: gl.constexpr = sums.shape[0]
    LAYOUT: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    c = col + gl.arange(0, COLUMNS, layout=LAYOUT)
    inside, c = c < N // MATRICES, _column(MATRIX, c, N, MATRICES, INTERLEAVED)
    if factors is not None:
        sums = sums * gl.load(factors + expert.to(gl.int64) * N + c, mask=inside, other=0.0)[:, None]
    if bias.data is not None:
        places = bias.data + expert.to(gl.int64) * bias.stride + c
        sums = sums + gl.load(places, mask=inside, other=0.0).to(gl.float32)[:, None]
    return sums


def supports(problem: "Problem", config: "FusedConfig", rank: int, tensors: "GateUp") -> str | None:
    """Return the reason why the kernel cannot load rows of A [rows, K] and the stored B [E, K, N], or None."""
    A, B, scale = tensors.A, tensors.B, tensors.scale
    assert scale is not None
    weights = B.transpose(1, 2)
    if (config.block_m, config.block_n) not in {tile[:2] for tile in WIDENED_TILES}:
        return f"it has no tiles of {config.block_m} x {config.block_n}"
    if not problem.K:
        return "there is nothing to multiply"
    if not weights.is_contiguous() or not scale.is_contiguous():
        return "experts or their scales do not follow each other in memory"
    if problem.K % 8 or A.stride(1) != 1 or A.stride(0) * A.itemsize % 16 or A.data_ptr() % 16:
        return "rows of A begin between vectors of 16 bytes"
    if weights.data_ptr() % 16 or weights.shape[2] * weights.itemsize % 16 or scale.data_ptr() % 16:
        return "columns of B or their scales begin between vectors of 16 bytes"
    return None


def launch(
    run: "Run", workspace: "Workspace", problem: "Problem", config: "FusedConfig", tensors: "GateUp"
) -> None:  # fmt: skip
    """Launch `moe_widened_matmul_kernel`, which needs no workspace."""
    out, A, B, routing, bias, activation, interleaved, scale = tensors
    assert scale is not None and not isinstance(routing, torch.Tensor)
    weights, matrices, N = problem.weights, problem.epilogue.matrices, B.shape[2]
    widening = named(weights.widening)
    words = widening.WORDS
    codes = B.transpose(1, 2).reshape(-1, B.shape[1]).view(torch.int32)
    row = codes.stride(0)
    if interleaved:
        shape, apart = [2, len(codes) // 2], [row, 2 * row]
    elif matrices == 2:
        shape, apart = [2, len(codes) - N // 2], [N // 2 * row, row]
    else:
        shape, apart = [1, len(codes)], [row, row]
    b = described(
        codes, (1, matrices, config.block_n // matrices, words),
        ([codes.shape[1] // words, *shape, words], [words, *apart, 1]),
    )  # fmt: skip
    groups, in_words, factors = LINE // weights.group if weights.group else 0, None, None
    if groups:
        in_words = scale.reshape(len(codes), -1).view(torch.int32)
    else:
        factors = scale.flatten()
    scale_words = groups * (1 + weights.zeros) * scale.itemsize // 4
    stage = config.block_n * 4 * (words + scale_words) + config.block_m * LINE * A.itemsize
    finished = config.block_n // matrices * config.block_m * out.itemsize
    stages = min(_MOST_STAGES, (_SHARED // _RESIDENT - _RESERVED - finished) // stage)
    pipeline = Pipeline(
        stages, widened_mma.accumulator(config.block_m, _WARPS), None, None, 0, 0, 0, LOADER_WARPS=_LOADER_WARPS,
        LOADER_REGISTERS=_LOADER_REGISTERS, WIDENING=widening, GROUPS=groups, ZEROS=weights.zeros,
        SCALES=SCALE_TYPES[scale.dtype], WORDS=scale_words,
    )  # fmt: skip
    blocks = problem.experts.blocks(problem.pairs, config.block_m)
    args = dict(
        a=A, b=b, scales=in_words, stride_scale=0 if in_words is None else in_words.stride(0), factors=factors,
        bias=bias_of(bias), order=routing.rows, offsets=routing.offsets, out=out, experts=problem.experts.count,
        divisor=1 if problem.operation.sums else problem.experts.top_k, N=N, K=problem.K,
        stride_am=A.stride(0), stride_om=out.stride(0), stride_on=out.stride(1),
        tile=Tile(config.block_m, config.block_n, LINE, config.group_m, True), pipeline=pipeline,
        EXPERTS=max(32, triton.next_power_of_2(problem.experts.count)), INTERLEAVED=interleaved, activation=activation,
    )  # fmt: skip
    tiles = blocks * triton.cdiv(N // matrices, config.block_n // matrices)
    grid = (min(tiles, _RESIDENT * platform.num_programs(A.device)), 1, 1)
    registers = 65536 // (32 * (_WARPS + _LOADER_WARPS) * _RESIDENT) // 8 * 8
    run.launch(moe_widened_matmul_kernel, grid, args, num_warps=_WARPS, maxnreg=registers)
