"""The product of `tile_all_reduce.py` in warp-specialised programs: some warps multiply, others exchange tiles.

The MMA warps are the library's own (`iris_ops/kernels/hopper/pipeline.py`). They hand a finished tile over through
shared memory. The mover warps send it by `iris.tiles`, and take the sum of the tile before, which has come meanwhile.
For Hopper GPUs, in Gluon, which has no interpreter:

    torchrun --nproc-per-node 2 -m examples.tile_all_reduce_hopper
"""

import iris
from iris import platform
from iris.device import arch
from iris.machines import machine_of
from iris_ops.kernels.arguments import Pipeline, Tile, TileEpilogue
from iris_ops.kernels.hopper.loading import NOWHERE, Work
from iris_ops.kernels.hopper.mma import MMA_WARPS, Mma
from iris_ops.kernels.hopper.operands import described, layouts
from iris_ops.kernels.hopper.pipeline import (
    allocate,
    await_tile,
    multiply_tiles,
    pace,
    part_of,
    places_of,
    rows_of,
)
from iris_ops.kernels.hopper.tile_sums import Unshared
from iris_ops.kernels.stream_k import Units
from iris_ops.kernels.tile_orders import PartTiles
from iris_ops.kernels.tiles import Matrix, start_in_turn
from iris_tp import launch
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCKS = (128, 128, 64)
STAGES, PLACES = 5, 2  # loads under way; finished tiles that a program has room for


@gluon.jit
def exchange_tiles(ctx, space, shared, order, out, M, N, spread, MOVE: gl.constexpr):
    """Run the mover warps: send each tile, and receive the sum of the one before, which stays in shared memory.

    A part of a tile, a few rows of it, travels as a separate tile. A tile is sent over `spread` ticks: all programs'
    tiles take the links as long, and stores that queue would delay the loads of the next product. Peers' parts that
    have arrived are loaded before a part is sent, because loads wait behind stores, and are summed afterwards.
    """
    tiles = iris.tiles.open_tiles(ctx, space)
    programs, parts = gl.num_programs(0), shared.PARTS
    count = gl.cdiv(gl.maximum(order.num_m * order.num_n - gl.program_id(0), 0), programs)
    like = gl.zeros([shared.BLOCK_M // shared.PARTS, shared.BLOCK_N], out.dtype.element_ty, MOVE)
    for i in range(count + 1):
        number, before = gl.program_id(0) + i * programs, gl.program_id(0) + gl.maximum(i - 1, 0) * programs
        row, col, _bias = order.place(before)
        if i < count:
            await_tile(shared, i)
        begin = arch.clock()
        for part in range(parts):
            pace(begin, gl.where(i + 1 < count, spread, 0), part, parts)  # nothing is loaded after the last
            arrived = tiles.look(before * parts + part, like, kept=True)
            if i < count:
                tiles.send(part_of(shared, i, part).load(MOVE), number * parts + part, kept=True)
            if i > 0:
                own = rows_of(shared, i - 1, part, MOVE)
                total = tiles.sum(before * parts + part, own, kept=True, found=arrived)
                r, c, _own = places_of(shared, part, row, M, MOVE)
                target = out + (r.to(gl.int64) * N)[:, None] + (col + c)[None, :]
                gl.store(target, total.to(out.dtype.element_ty), mask=(r < M)[:, None] & (col + c < N)[None, :])
    tiles.close()


@gluon.jit
def tile_matmul_hopper_kernel(
    ctx_ptr, space, a, b, epilogue, out, M, N, K, spread, stagger, tile: gl.constexpr, pipeline: gl.constexpr,
    WORLD_SIZE: gl.constexpr,
):  # fmt: skip
    """Compute out [M,N] = sum over ranks of a [M,K] @ b [K,N]; a and b are tensor descriptors, out is contiguous.

    Programs start over `stagger` ticks, so that they do not all send their last tile at once.
    """
    MOVE: gl.constexpr = pipeline.MOVE
    start_in_turn(stagger)
    ctx = iris.DeviceContext.initialize(ctx_ptr, gl.load(ctx_ptr).to(gl.int32), WORLD_SIZE)
    order = PartTiles(gl.cdiv(M, tile.BLOCK_M), gl.cdiv(N, tile.BLOCK_N), tile.BLOCK_M, tile.BLOCK_N, tile.GROUP_M)
    units = Units(order.num_m * order.num_n, gl.cdiv(K, tile.BLOCK_K), 0, 0, 0, False)
    work = Work(a, b, NOWHERE, Mma(a, b, tile, pipeline), units, order)
    shared = allocate(a, b, out.dtype.element_ty, tile, pipeline)
    C = Matrix(out, M, N, N, 1)
    gl.warp_specialize(
        [
            (multiply_tiles, (ctx, work, shared, Unshared(out), epilogue, C, 0, False, 0)),
            (exchange_tiles, (ctx, space, shared, order, out, M, N, spread, MOVE)),
        ],
        [pipeline.MOVER_WARPS],
        [pipeline.MOVER_REGISTERS],
    )


def space_for(ctx: iris.Iris, M: int, N: int, dtype: torch.dtype) -> torch.Tensor:
    """Reserve memory for the tiles of a result [M, N]. Collective."""
    number = -(-M // BLOCKS[0]) * -(-N // BLOCKS[1])
    return ctx.ccl.tile_space(number, BLOCKS[0] * BLOCKS[1], dtype)


def tile_matmul_hopper(
    ctx: iris.Iris, space: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> None:
    """Compute out [M,N] = sum over ranks of a [M,K] @ b [K,N]; bfloat16 or float16, rows of multiples of 16 bytes."""
    (M, K), N = a.shape, b.shape[1]
    number = -(-M // BLOCKS[0]) * -(-N // BLOCKS[1])
    programs = min(number, ctx.get_cu_count())
    sent = programs * BLOCKS[0] * BLOCKS[1] * out.element_size() * (ctx.num_ranks - 1)
    spread = platform.ticks(sent / (machine_of(ctx.device).link_gbs * 1e9))
    tile_matmul_hopper_kernel[(programs,)](
        ctx.get_device_context(), space, described(a, (BLOCKS[0], BLOCKS[2])), described(b, (BLOCKS[2], BLOCKS[1])),
        TileEpilogue(), out, M, N, K, spread, platform.ticks(4e-6), Tile(*BLOCKS, GROUP_M=8),
        Pipeline(STAGES, PLACES=PLACES, **layouts(*BLOCKS[:2])), ctx.num_ranks, num_warps=MMA_WARPS,
    )  # fmt: skip


def rank_main(M: int = 400, N: int = 1032, K: int = 520) -> None:
    with iris.iris(heap_size=1 << 28) as ctx:
        if not platform.has_warp_specialisation(ctx.device):
            ctx.info("needs a Hopper GPU; tile_all_reduce runs everywhere")
            return
        w, rank, generator = ctx.num_ranks, ctx.cur_rank, torch.Generator().manual_seed(0)
        space = space_for(ctx, M, N, torch.bfloat16)
        for _ in range(3):
            A = torch.randn(w, M, K, generator=generator).to(ctx.device, torch.bfloat16)
            B = torch.randn(w, K, N, generator=generator).to(ctx.device, torch.bfloat16)
            exact = torch.bmm(A.double(), B.double()).sum(0)
            out = torch.full((M, N), 7.0, dtype=torch.bfloat16, device=ctx.device)
            tile_matmul_hopper(ctx, space, A[rank], B[rank], out)
            error = (out - exact).abs().max() / exact.abs().max()
            ctx.barrier()
            ctx.info(f"out {tuple(out.shape)} {out.dtype}; error {error:.1e} of the largest value")
            assert error < 1e-2


if __name__ == "__main__":
    launch.run(rank_main)
