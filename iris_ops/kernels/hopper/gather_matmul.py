"""`all_gather_matmul` by warp-specialised programs (`pipeline.py`), of rows that copy engines bring.

Tiles of this rank's rows come first, then those of each rank in the order in which they arrive
(`with_torch/copy_gather.py`). The MMA warps look for a rank's flag before they load its first rows, two steps before
they need them. The mover warps store finished tiles. Where B is two matrices side by side, they store the columns
joined by an activation. With one rank it is a product without an exchange.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from iris import platform
from iris.device import arch
from iris.device.context import own_context
from iris.device.function import device_function
from iris.device.sync import wait
from iris.device.waits import waiter_number
from iris.launch import relaunch
from iris.triton_private import aggregate, async_load, base_value, warp_specialize
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
import triton.language as tl

from ...config import FusedConfig
from ...operands import Operands
from ...planning.waves import gemm_tiles
from ...problem import Problem
from ..activations import joined_tiles
from ..arguments import World
from ..descriptors import as_stored
from ..stream_k import Units
from ..tile_orders import SourceTiles
from ..tiles import Matrix, first_row, known
from . import operands
from .loading import Work, load_ahead
from .pipeline import allocate, await_tile, give_back, multiply_tiles, part_of
from .policies import mma_of
from .tile_sums import Unshared

if TYPE_CHECKING:
    from iris.rank import Rank


@device_function
def _of_source(row, part_rows, M, BLOCK_M: tl.constexpr):
    """Return (where the rows of the rank that owns `row` end, the first row to load for a tile from `row` on)."""
    begin = row // part_rows * part_rows
    end = min(M, begin + part_rows)
    return end, begin + first_row(row - begin, end - begin, BLOCK_M)


@aggregate
class _Gathered:
    """The rows of all ranks but `rank`: they have arrived in `rows` [M, K] once their rank's flag is `expected`."""

    rank: base_value
    rows: base_value
    flags: base_value
    expected: base_value
    part_rows: base_value
    M: base_value
    BLOCK_M: tl.constexpr

    @triton.constexpr_function
    def __init__(self, rank, rows, flags, expected, part_rows, M, BLOCK_M):
        self.rank, self.rows, self.flags, self.expected = rank, rows, flags, expected
        self.part_rows, self.M, self.BLOCK_M = known(part_rows), known(M), known(BLOCK_M)

    @gluon.jit
    def load(self, ctx, own, row, k, loaded, place):
        """Load rows from `row` on; this rank's own come from `own`."""
        first = self.rank * self.part_rows
        if (ctx.world_size == 1) | (row >= first) & (row < first + self.part_rows):
            async_load(own, [row - first, k], loaded, place)
        else:
            async_load(self.rows, [row, k], loaded, place)

    @gluon.jit
    def first(self, row):
        """Return the first row to load for a tile from `row` on; all rows of a tile belong to one rank."""
        return _of_source(row, self.part_rows, self.M, self.BLOCK_M)[1]

    @gluon.jit
    def await_rows(self, ctx, row, ready, needed, WAITER: gl.constexpr):
        """Wait until `row` has arrived. Returns how many ranks' rows are here then, from the next rank's on.

        `ready`: how many were here before; `needed`: whether any work needs the row.
        """
        order = (row // self.part_rows - self.rank + ctx.world_size) % ctx.world_size
        if needed & (order > ready):
            for i in range(ready + 1, order + 1):
                source = (self.rank + i) % ctx.world_size
                if source * self.part_rows < self.M:
                    wait(ctx, self.flags + source, self.expected, source, WAITER, exact=True)
            arch.fence_async_proxy()
            ready = order
        return ready


@gluon.jit
def _store_tiles(shared, work, C, activation: gl.constexpr, MOVE: gl.constexpr):
    """Run the mover warps: store each tile to `C`, half as many columns where an activation joins them."""
    units, tiles, out, M = work.units, work.tiles, C.data, C.rows
    PARTS: gl.constexpr = shared.PARTS
    ROWS: gl.constexpr = shared.BLOCK_M // PARTS
    done = 0
    programs = gl.num_programs(0)
    for unit in range(gl.program_id(0), units.count(programs), programs):
        tile, _, _, complete = units.at(unit, programs)
        if complete:
            row, col, _bias = tiles.place(tile)
            end, first = _of_source(row, tiles.part_rows, M, PARTS * ROWS)
            c = col + gl.arange(0, tiles.BLOCK_N, layout=gl.SliceLayout(0, MOVE))
            await_tile(shared, done)
            for part in range(PARTS):
                rows = part_of(shared, done, part)
                if activation is not None:
                    values = rows.slice(0, tiles.BLOCK_N, dim=1).load(MOVE)
                    second = rows.slice(tiles.BLOCK_N, tiles.BLOCK_N, dim=1).load(MOVE)
                else:
                    values = rows.load(MOVE)
                give_back(shared, done, part)
                if activation is not None:
                    values = joined_tiles(values, second, activation)
                r = first + part * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MOVE))
                place = (r.to(gl.int64) * C.stride_row)[:, None] + c[None, :]
                gl.store(out + place, values, mask=((r >= row) & (r < end))[:, None] & (c < C.cols)[None, :])
            done += 1


@gluon.jit(do_not_specialize=["M", "part_rows"])
def hopper_gather_matmul_kernel(
    a, gathered, b, epilogue, out, flags, passed, ctx_ptr, M, N, K, stride_om, part_rows, tile: gl.constexpr,
    pipeline: gl.constexpr, world: gl.constexpr, activation: gl.constexpr,
):  # fmt: skip
    """Multiply gathered rows by B as they arrive; MMA warps multiply, mover warps store.

    a, gathered, b: descriptors of this rank's rows, of all ranks' rows [M, K], and of B [K, N] or [N, K]. With an
    `activation`, b describes two matrices, [2, N, K], whose columns it joins, and out is still [M, N]. flags: [rank];
    passed: the value of a rank's flag once its rows have arrived.
    """
    ctx = own_context(ctx_ptr, world.WORLD_SIZE, world.TRACING)
    width: gl.constexpr = tile.BLOCK_N if activation is None else tile.BLOCK_N // 2
    num_m, num_n = gl.cdiv(part_rows, tile.BLOCK_M), gl.cdiv(N, width)
    rank = ctx.rank % world.WORLD_SIZE  # alone, any is the first
    tiles = SourceTiles(rank, part_rows, num_m, num_n, tile.BLOCK_M, width, tile.GROUP_M, world.WORLD_SIZE)
    units = Units(tiles.count(), gl.cdiv(K, tile.BLOCK_K), 0, 0, 0, False)
    others = _Gathered(rank, gathered, flags, gl.load(passed), part_rows, M, tile.BLOCK_M)
    work = Work(a, b, others, mma_of(a, b, epilogue, tile, pipeline, N, K), units, tiles)
    shared = allocate(a, b, out.dtype.element_ty, tile, pipeline)
    C = Matrix(out, M, N, stride_om, 1)
    warp_specialize(
        [
            (multiply_tiles, (ctx, work, shared, Unshared(out), epilogue, C, 0, True, world.WAITER)),
            (_store_tiles, (shared, work, C, activation, pipeline.MOVE)),
            (load_ahead, (ctx, work, shared, world.WAITER)),
        ],
        [pipeline.MOVER_WARPS, pipeline.LOADER_WARPS],
        [pipeline.MOVER_REGISTERS, pipeline.LOADER_REGISTERS],
    )


class Rows(NamedTuple):
    """The gathered rows of A, and the flags by which they arrive: `flags` of each rank, equal to `passed`."""

    gathered: torch.Tensor
    flags: torch.Tensor
    passed: torch.Tensor


def product(
    rank: "Rank", calls: relaunch.EarlierCalls, problem: Problem, config: FusedConfig, tensors: Operands, rows: Rows
) -> Callable[[], None]:
    """Return a function that launches the kernel on tensors at these addresses; `A` is this rank's rows.

    Where B is two matrices, it is [K, 2 N], the transpose of a contiguous tensor, and `out` [M, N].
    """
    out, A, B, bias, _ = tensors
    addresses = tuple(0 if t is None else t.data_ptr() for t in (out, A, B, bias))
    traced = rank.recording
    kind = problem, config, bias is None, out.stride(), A.stride(), B.stride(), traced
    key = relaunch.Key(addresses, kind, None)
    again = calls.moved(key)

    def launch() -> None:
        nonlocal again
        if again is not None and again():
            return
        args = dict(
            flags=rows.flags, passed=rows.passed, ctx_ptr=rank.get_device_context(), part_rows=problem.part_rows,
            world=World(problem.world_size, waiter_number(problem.called_op), traced),
            **_arguments(problem, config, tensors, rows.gathered),
        )  # fmt: skip
        programs = platform.num_programs(rank.device)
        grid = min(gemm_tiles(problem, config), config.num_programs or programs, programs), 1, 1
        options = dict(num_warps=config.num_warps)
        kernel = hopper_gather_matmul_kernel
        launched = relaunch.launch(calls.kernels, rank.device, kernel, grid, args, addresses, **options)
        calls.keep(key, None, launched)
        again = launched and launched.again

    return launch


def multiply_alone(rank: "Rank", problem: Problem, config: FusedConfig, tensors: Operands) -> None:
    """Launch the kernel for a product without an exchange."""
    alone = rank.once(_Alone)
    product(rank, alone.calls, problem, config, tensors, Rows(tensors.A, alone.nothing, alone.nothing))()


def multiply_without_rank(
    problem: Problem, config: FusedConfig, tensors: Operands, scales: dict[str, torch.Tensor | int]
) -> None:  # fmt: skip
    """Launch the kernel for a product without an exchange in a process that may have no context.

    `scales`: of the operands, as fields of `TileEpilogue`.
    """
    args = _arguments(problem, config, tensors, tensors.A)
    args["epilogue"] = args["epilogue"]._replace(**scales)
    nothing = _zeros(tensors.A.device)
    world = World(1, waiter_number(problem.called_op))
    args |= dict(flags=nothing, passed=nothing, ctx_ptr=nothing, part_rows=problem.M, world=world)
    programs = platform.num_programs(tensors.A.device)
    grid = min(gemm_tiles(problem, config), programs), 1, 1
    kernel = hopper_gather_matmul_kernel
    relaunch.launch({}, tensors.A.device, kernel, grid, args, (), num_warps=config.num_warps)


@cache
def _zeros(device: torch.device) -> torch.Tensor:
    """Return what such a launch reads in place of flags and a context tensor: rank 0, and that its rows are there."""
    return torch.zeros(16, dtype=torch.int64, device=device)


class _Alone:
    """Earlier launches for products without an exchange, and flags that no program awaits."""

    def __init__(self, rank: "Rank") -> None:
        self.calls = relaunch.EarlierCalls()
        self.nothing = torch.zeros(1, dtype=torch.int32, device=rank.device)
        rank.on_change.append(self.calls.forget)


def _arguments(problem: Problem, config: FusedConfig, tensors: Operands, gathered: torch.Tensor) -> dict:
    out, A, B, bias, scale = tensors
    args = operands.arguments(A, B, bias, config, False, problem.weights, scale, operands.FEWER_MOVER_WARPS)
    if (matrices := problem.epilogue.matrices) > 1:
        width = config.block_n // matrices
        args |= dict(
            b=operands.described(as_stored(B).view(matrices, -1, B.shape[0]), (matrices, width, config.block_k)),
            pipeline=replace(args["pipeline"], MOVE=operands.in_rows(args["pipeline"].MOVER_WARPS, width)),
        )
    rows = args["a"] if gathered is A else operands.described(gathered, (config.block_m, config.block_k))
    return args | dict(
        gathered=rows,
        out=out,
        M=out.shape[0],
        N=out.shape[1],
        K=A.shape[1],
        stride_om=out.stride(0),
        activation=problem.epilogue.activation,
    )
