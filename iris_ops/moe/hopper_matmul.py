"""Grouped products of many rows by warp-specialised programs for Hopper: what `grouped_matmul.py` computes, bit by bit.

    MMA warps     copy the rows of a block, which stand anywhere, into a ring in shared memory, and let the hardware
                  load the expert's weight beside them, STAGES - 1 steps ahead and across tiles; multiply; add biases
                  and apply the activation; round the tile into shared memory, once that is free
    mover warps   store each finished tile, row by row where its pair's result stands, while the next is multiplied

So neither a tile's first loads nor its stores hold up a product, as they do in the portable kernel, where a tile is a
program. Programs are as many as multiprocessors, and each takes every so many tiles one. How many tiles there are only
the device knows: `moe_blocks_kernel` writes down where each block of rows begins, and their number.

The hardware loads tiles of rows that stand side by side, on Hopper. These do not, and to copy them in order first takes
a tenth of the time where K is short. So each MMA thread copies some vectors of a step itself, and says by the stage's
barrier when they are there. That hides behind the product of the step before.
"""

from typing import TYPE_CHECKING

from iris import platform
from iris.device import arch
from iris.device.function import device_function
from iris.triton_private import (
    aggregate,
    async_arrive,
    async_gather,
    async_load,
    base_value,
    fence_async_shared,
    mbarrier,
    program_barrier,
    reinterpret,
)
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
import triton.language as tl

from ..kernels.hopper import operands
from ..kernels.hopper.mma import Mma
from ..kernels.hopper.pipeline import allocate, await_tile, rows_of
from ..kernels.tiles import known
from .grouped import gated, ungated
from .weights import can_be_described, is_transposed

if TYPE_CHECKING:
    from ..config import FusedConfig
    from ..planning.moe_problem import MoeProblem
    from .activation import Activation
    from .routing import Routing
    from .steps import Steps

_BLOCKS = 32  # that a program of `moe_blocks_kernel` finds
_LINE = tl.constexpr(4)  # numbers for each block: expert, first, end, none
_GRANULE = 16  # of which sizes are multiples here
_SHARED_BYTES = 226 << 10  # of a ring and a tile


@triton.jit(do_not_specialize=["experts", "bound"])
def moe_blocks_kernel(
    offsets, lines, experts, bound, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """lines [bound + 1, 4]: of each block its expert, and where it begins in `Routing.rows` and ends; then how many.

    `bound`: blocks at most, whatever the routing.
    """
    arch.follow()
    e, b = tl.arange(0, EXPERTS), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begins = tl.load(offsets + e, mask=e < experts, other=0)
    ends = tl.load(offsets + e + 1, mask=e < experts, other=0)
    blocks = (ends - begins + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(blocks)
    arch.lead()
    expert = tl.sum((upto[None, :] <= b[:, None]).to(tl.int32), 1)
    own = e[None, :] == expert[:, None]
    first = tl.sum(tl.where(own, begins[None, :] + (b[:, None] - (upto - blocks)[None, :]) * BLOCK_M, 0), 1)
    end = tl.minimum(tl.sum(tl.where(own, ends[None, :], 0), 1), first + BLOCK_M)
    line = lines + b * _LINE
    tl.store(line, expert, mask=b < bound)
    tl.store(line + 1, first, mask=b < bound)
    tl.store(line + 2, end, mask=b < bound)
    if tl.program_id(0) == 0:
        tl.store(lines + bound * _LINE, tl.sum(blocks))


@aggregate
class _Blocks:
    """Tiles of blocks of rows by WIDTH columns of the result; GROUP_M blocks share a weight's columns in turn."""

    lines: base_value
    order: base_value
    blocks: base_value
    across: base_value
    BLOCK_M: tl.constexpr
    WIDTH: tl.constexpr
    GROUP_M: tl.constexpr

    @triton.constexpr_function
    def __init__(self, lines, order, blocks, across, BLOCK_M, WIDTH, GROUP_M):
        self.lines, self.order, self.blocks, self.across = lines, order, known(blocks), known(across)
        self.BLOCK_M, self.WIDTH, self.GROUP_M = known(BLOCK_M), known(WIDTH), known(GROUP_M)

    @device_function
    def count(self):
        return self.blocks * self.across

    @device_function
    def at(self, tile):
        """(expert, where the tile's rows begin and end in the order, its first column)."""
        tile = tl.minimum(tile, tl.maximum(self.count() - 1, 0))
        group = tile // (self.GROUP_M * self.across)
        high = tl.maximum(tl.minimum(self.blocks - group * self.GROUP_M, self.GROUP_M), 1)
        within = tile % (self.GROUP_M * self.across)
        line = self.lines + (group * self.GROUP_M + within % high) * _LINE
        return tl.load(line), tl.load(line + 1), tl.load(line + 2), within // high * self.WIDTH


@gluon.jit
def _begin(tiles, tile, divisor, LOAD: gl.constexpr):
    """(expert, first column, the rows of A) of a tile. Of rows beyond a block's last that one stands in."""
    expert, first, end, col = tiles.at(tile)
    i = gl.arange(0, tiles.BLOCK_M, layout=gl.SliceLayout(1, LOAD))
    pair = gl.load(tiles.order + gl.maximum(gl.minimum(first + i, end - 1), 0))
    return expert, col, pair // divisor


@gluon.jit
def _load(
    rows, b, shared, stage, r, expert, col, k, K, stride_am, BLOCK_K: gl.constexpr, HALVES: gl.constexpr,
    LOAD: gl.constexpr,
):  # fmt: skip
    """Begins to load the step at k of a tile. The stage's barrier counts the weight's bytes and the threads' copies."""
    loaded = shared.loaded.index(stage)
    mbarrier.expect(loaded, b.block_type.nbytes)
    async_load(b, [expert * HALVES, col, k], loaded, shared.b_parts.index(stage))
    c = k + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LOAD))
    places = rows + (r.to(gl.int64) * stride_am)[:, None] + c[None, :]
    async_gather(shared.a_parts.index(stage), places, mask=(c < K)[None, :])
    async_arrive(loaded, increment_count=False)


@gluon.jit
def _finished(
    product, bias, expert, col, N, stride_bias, KIND: gl.constexpr, GATED: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr, SHIFT: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """What becomes of a tile's sums, as in `grouped_matmul.py`."""
    if GATED:
        WIDTH: gl.constexpr = product.shape[1] // 2
        gate, up = product.reshape([product.shape[0], 2, WIDTH]).permute([0, 2, 1]).split()
        if HAS_BIAS:
            gate += _bias_of(gate, bias, expert, col, N, stride_bias)
            up += _bias_of(up, bias + N, expert, col, N, stride_bias)
        value = gated(gate, up, KIND, ALPHA, LIMIT, SHIFT)
    else:
        value = product
        if HAS_BIAS:
            value += _bias_of(value, bias, expert, col, N, stride_bias)
        if KIND is not None:
            value = ungated(value, KIND, ALPHA, LIMIT)
    return value


@gluon.jit
def _bias_of(value, bias, expert, col, N, stride_bias):
    c = col + gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, value.type.layout))
    return gl.load(bias + expert.to(gl.int64) * stride_bias + c, mask=c < N, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _pairs(tiles, first, end, part, ROWS: gl.constexpr, MOVE: gl.constexpr):
    """(the pairs of a part of a tile, which of these there are)."""
    i = first + part * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MOVE))
    return gl.load(tiles.order + i, mask=i < end, other=0), i < end


@gluon.jit
def _store(shared, tiles, out, pair, own, col, done, part, N, stride_om, MOVE: gl.constexpr):
    """Stores a part of the finished tile number `done`."""
    await_tile(shared, done)
    values = rows_of(shared, done, part, MOVE)
    c = col + gl.arange(0, tiles.WIDTH, layout=gl.SliceLayout(0, MOVE))
    gl.store(out + (pair.to(gl.int64) * stride_om)[:, None] + c[None, :], values, mask=own[:, None] & (c < N)[None, :])


@gluon.jit
def _move(
    rows, b, out, shared, empty, tiles, divisor, N, K, stride_am, stride_om, BLOCK_K: gl.constexpr,
    HALVES: gl.constexpr, LOAD: gl.constexpr, MOVE: gl.constexpr,
):  # fmt: skip
    """What the mover warps do: load each step as soon as there is room, and between steps store the tile before.

    A step that finds room STAGES after a tile's first says that this has been read, so the tile before is finished.
    """
    PARTS: gl.constexpr = shared.PARTS
    ROWS: gl.constexpr = shared.BLOCK_M // PARTS
    programs, count = gl.num_programs(0), tiles.count()
    stage, phase, done = 0, 1, -1
    part, before, before_end, before_col = PARTS, 0, 0, 0  # of the tile before, what is to be stored
    expert, col, r = _begin(tiles, gl.program_id(0), divisor, LOAD)
    for t in range(gl.program_id(0), count, programs):
        next_expert, next_col, next_r = _begin(tiles, t + programs, divisor, LOAD)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase)
            stores = (k >= shared.STAGES * BLOCK_K) & (part < PARTS)
            pair, own = _pairs(tiles, before, gl.where(stores, before_end, 0), part, ROWS, MOVE)
            _load(rows, b, shared, stage, r, expert, col, k, K, stride_am, BLOCK_K, HALVES, LOAD)
            if stores:
                _store(shared, tiles, out, pair, own, before_col, done, part, N, stride_om, MOVE)
                part += 1
            last = stage == shared.STAGES - 1
            stage, phase = gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)
        for rest in range(part, PARTS):  # where K is short
            pair, own = _pairs(tiles, before, before_end, rest, ROWS, MOVE)
            _store(shared, tiles, out, pair, own, before_col, done, rest, N, stride_om, MOVE)
        _expert, before, before_end, before_col = tiles.at(t)
        expert, col, r = next_expert, next_col, next_r
        part = 0
        done += 1
    for rest in range(part, PARTS):
        pair, own = _pairs(tiles, before, before_end, rest, ROWS, MOVE)
        _store(shared, tiles, out, pair, own, before_col, done, rest, N, stride_om, MOVE)


@gluon.jit
def _multiply(
    bias, mma, shared, empty, tiles, N, K, stride_bias, KIND: gl.constexpr, GATED: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr, SHIFT: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """What the MMA warps do."""
    STAGES: gl.constexpr = shared.STAGES
    finished = reinterpret(
        shared.product, shared.product.dtype, [1, shared.BLOCK_M, shared.BLOCK_N], shared.product.layout
    )
    programs, steps = gl.num_programs(0), gl.cdiv(K, mma.BLOCK_K)
    stage, phase, done = 0, 0, 0
    for t in range(gl.program_id(0), tiles.count(), programs):
        own_expert, _first, _end, own_col = tiles.at(t)
        acc = mma.begin(mma.zeros())
        for i in range(steps):
            mbarrier.wait(shared.loaded.index(stage), phase)
            fence_async_shared()  # rows were copied by threads, and the product reads them as the hardware loads
            acc = mma.issue(shared.a_parts.index(stage), shared.b_parts.index(stage), acc)
            acc = mma.await_last_but_one(acc)
            if i > 0:
                program_barrier()  # all warps have multiplied the step before
                mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1)
            last = stage == STAGES - 1
            stage, phase = gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)
        product = mma.result(acc)
        program_barrier()
        mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1)
        value = _finished(
            product, bias, own_expert, own_col, N, stride_bias, KIND, GATED, ALPHA, LIMIT, SHIFT, HAS_BIAS
        )  # fmt: skip
        mbarrier.wait(shared.free.index(0), done & 1 ^ 1)
        finished.index(0).store(arch.round_to(value, finished.dtype))
        program_barrier()
        mbarrier.arrive(shared.ready.index(0), count=1)
        done += 1


@gluon.jit(do_not_specialize=["bound", "divisor"])
def hopper_moe_matmul_kernel(
    a, b, inp, bias, out, order, lines, bound, divisor, N, K, stride_am, stride_bias, stride_om, KIND: gl.constexpr,
    GATED: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, SHIFT: gl.constexpr, HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    ACC: gl.constexpr, PRODUCT: gl.constexpr, MOVE: gl.constexpr, LOAD: gl.constexpr, ROWS: gl.constexpr,
    MOVER_WARPS: gl.constexpr, MOVER_REGISTERS: gl.constexpr, B_TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """out [pairs, N] = the activation of inp [pairs // divisor, K] @ an expert's weight, for each pair.

    a: a descriptor of `inp`, for how a block lies in shared memory; b: of the weights [experts, N, K], or, `GATED`, of
    gates and of what is gated, [2 experts, N, K]. order [pairs]: `Routing.rows`; lines: what `moe_blocks_kernel` has
    left, of `bound` blocks at most.
    """
    arch.follow()
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    tiles = _Blocks(lines, order, gl.load(lines + bound * _LINE), gl.cdiv(N, WIDTH), BLOCK_M, WIDTH, GROUP_M)
    mma = Mma(a, b, ACC, BLOCK_M, BLOCK_N, B_TRANSPOSED)
    shared = allocate(
        a, b, out.dtype.element_ty, STAGES, BLOCK_M, WIDTH, ROWS, PRODUCT, LOADERS=32 * MOVER_WARPS
    )  # fmt: skip
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    bias, mma, shared, empty, tiles, N, K, stride_bias, KIND, GATED, ALPHA, LIMIT, SHIFT, HAS_BIAS,
                ),
            ),
            (
                _move,
                (
                    inp, b, out, shared, empty, tiles, divisor, N, K, stride_am, stride_om, BLOCK_K,
                    2 if GATED else 1, LOAD, MOVE,
                ),
            ),
        ],
        [MOVER_WARPS],
        [MOVER_REGISTERS],
    )  # fmt: skip
    arch.lead()


def layouts(block_m: int, block_n: int, block_k: int, gated: bool, warps: int) -> dict:
    """As `operands.layouts`, of tiles half as wide where they are gated; and which thread copies what of the rows."""
    of_product, width = operands.layouts(block_m, block_n, warps=warps), block_n // 2 if gated else block_n
    of_tile = {key: operands.layouts(block_m, width, warps=warps)[key] for key in ("MOVE", "ROWS")}
    across = min(32, block_k // 8)
    load = gl.BlockedLayout([1, 8], [32 // across, across], [operands.MOVER_WARPS, 1], [1, 0])
    return of_product | of_tile | dict(LOAD=load, B_TRANSPOSED=True)


def supports(
    problem: "MoeProblem", config: "FusedConfig", out: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
    routing: object, interleaved: bool,
) -> str | None:  # fmt: skip
    """Why this kernel cannot compute a call, or None. Ranks may differ in this: the portable kernel does the same."""
    if not config.warp_specialised:
        return "its configuration asks for no specialised warps"
    if isinstance(routing, torch.Tensor):
        return "pairs are not sorted"
    if not platform.has_warp_specialisation(A.device):
        return "it needs a Hopper GPU"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"it does not multiply {problem.dtype}"
    if problem.gated and interleaved:
        return "gate and up stand in turn"
    if not is_transposed(B) or not can_be_described(B):
        return "experts' weights do not stand along K, at whole vectors"
    if problem.gated and B.stride(0) != 2 * problem.N * B.stride(2):
        return "experts' weights stand apart"
    if problem.N % _GRANULE or problem.K % _GRANULE:
        return f"its sizes are not multiples of {_GRANULE}"
    width = config.block_n // 2 if problem.gated else config.block_n
    ring = config.num_stages * (config.block_m + config.block_n) * config.block_k
    if 2 * (ring + config.block_m * width) > _SHARED_BYTES:
        return f"{config.num_stages} stages and a tile have no room"
    rows = (t.stride(1) == 1 and t.stride(0) % _GRANULE == 0 and t.data_ptr() % 16 == 0 for t in (A, out))
    return None if all(rows) else "rows begin between vectors"


def launch(
    steps: "Steps", problem: "MoeProblem", config: "FusedConfig", out: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
    routing: "Routing", bias: torch.Tensor | None, activation: "Activation | None",
) -> None:  # fmt: skip
    """Launches both kernels."""
    bound, experts = problem.blocks(config.block_m), problem.experts
    lines = steps.room(4 * _LINE.value * (bound + 1)).view(torch.int32)
    args = dict(
        offsets=routing.offsets, lines=lines, experts=experts, bound=bound, BLOCK_M=config.block_m,
        EXPERTS=max(16, triton.next_power_of_2(experts)), BLOCK=_BLOCKS,
    )  # fmt: skip
    steps.launch(moe_blocks_kernel, (triton.cdiv(bound, _BLOCKS), 1, 1), args, num_warps=4, num_stages=1)
    halves = 2 if problem.gated else 1
    stored = B.transpose(1, 2)
    weights = [halves * experts, problem.N, problem.K], [stored.stride(0) // halves, stored.stride(1), 1]
    width = config.block_n // halves
    args = dict(
        a=operands.described(A, (config.block_m, config.block_k)),
        b=operands.described(stored, (halves, width, config.block_k), weights),
        inp=A, bias=bias, out=out, order=routing.rows, lines=lines, bound=bound,
        divisor=1 if problem.reduces else problem.top_k, N=problem.N, K=problem.K, stride_am=A.stride(0),
        stride_bias=0 if bias is None else bias.stride(0), stride_om=out.stride(0), KIND=activation and activation.kind,
        GATED=problem.gated, ALPHA=activation.alpha if activation else 1.0, LIMIT=activation and activation.limit,
        SHIFT=activation.shift if activation else 0.0, HAS_BIAS=bias is not None, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m, STAGES=config.num_stages,
        **layouts(config.block_m, config.block_n, config.block_k, problem.gated, config.num_warps),
    )  # fmt: skip
    programs = platform.num_programs(steps.ctx.device)
    grid = (min(programs, bound * triton.cdiv(problem.N, width)), 1, 1)
    steps.launch(hopper_moe_matmul_kernel, grid, args, num_warps=config.num_warps)
