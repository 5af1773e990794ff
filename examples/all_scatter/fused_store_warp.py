"""Product and scatter in one kernel, by different warps of each program: eight multiply, four store and push.

A finished tile goes through shared memory to the storing warps, and the others begin the next product at once: no
multiprocessor is taken from the product, and no tile is read back from memory. Only Gluon, Triton's language with
explicit layouts, can give warps different work, and it has no interpreter: this needs Hopper GPUs, and says so.

    python -m examples.all_scatter.fused_store_warp
"""

from iris import platform
from iris.device import sync
from iris.device.context import own_context
from iris.triton_private import (
    GluonDescriptor,
    async_load,
    mbarrier,
    program_barrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from examples.all_scatter import common
from examples.all_scatter.common import USER, Case, place

WARPS, STORE_WARPS, STORE_REGISTERS, STAGES = 8, 4, 128, 3
TILE_M, TILE_N, TILE_K = 128, 256, 64
ROWS = gl.constexpr(32)  # of a tile that the storing warps hold at a time


@gluon.jit
def _fetch(a, b, a_parts, b_parts, loaded, number, total, num_k, M, N, GROUP_M: gl.constexpr, STAGES: gl.constexpr):
    """Start the loads of this program's step `number`; a step is one part of the depth of one tile."""
    if number < total:
        tile = gl.program_id(0) + number // num_k * gl.num_programs(0)
        row, col = place(tile, M, N, a.block_shape[0], b.block_shape[0], GROUP_M)
        k = number % num_k * a.block_shape[1]
        stage = number % STAGES
        mbarrier.expect(loaded.index(stage), a.block_type.nbytes + b.block_type.nbytes)
        async_load(a, [row, k], loaded.index(stage), a_parts.index(stage))
        async_load(b, [col, k], loaded.index(stage), b_parts.index(stage))


@gluon.jit
def _multiply(
    a, b, a_parts, b_parts, loaded, tile, ready, free, mine, num_k, M, N, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    ACC: gl.constexpr,
):  # fmt: skip
    """Run the eight MMA warps: leave each tile's product in shared memory. Loads are STAGES - 1 steps ahead, across
    tiles."""
    BLOCK_M: gl.constexpr = a.block_shape[0]
    BLOCK_N: gl.constexpr = b.block_shape[0]
    total = mine * num_k
    for i in gl.static_range(STAGES - 1):
        _fetch(a, b, a_parts, b_parts, loaded, i, total, num_k, M, N, GROUP_M, STAGES)
    for t in range(mine):
        acc = warpgroup_mma_init(gl.zeros((BLOCK_M, BLOCK_N), gl.float32, ACC))
        for k in range(num_k):
            step = t * num_k + k
            stage = step % STAGES
            mbarrier.wait(loaded.index(stage), step // STAGES & 1)
            acc = warpgroup_mma(a_parts.index(stage), b_parts.index(stage).permute((1, 0)), acc, is_async=True)
            # the step before has read its operands: load there
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
            _fetch(a, b, a_parts, b_parts, loaded, step + STAGES - 1, total, num_k, M, N, GROUP_M, STAGES)
        product = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.wait(free, t & 1 ^ 1)
        tile.store(product.to(a.dtype))
        program_barrier()
        mbarrier.arrive(ready, count=1)


@gluon.jit
def _store_and_push(
    ctx, out, tile, ready, free, mine, M, N, entered, WORLD_SIZE: gl.constexpr, GROUP_M: gl.constexpr,
    MOVE: gl.constexpr,
):  # fmt: skip
    """Run the four store warps: store each tile from shared memory in this rank's columns of every rank's out."""
    BLOCK_M: gl.constexpr = tile.shape[0]
    BLOCK_N: gl.constexpr = tile.shape[1]
    columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, MOVE))
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, MOVE))
    for t in range(mine):
        row, col = place(gl.program_id(0) + t * gl.num_programs(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
        mbarrier.wait(ready, t & 1)
        for part in gl.static_range(BLOCK_M // ROWS):
            values = tile.slice(part * ROWS, ROWS, 0).load(MOVE)
            if part == BLOCK_M // ROWS - 1:
                program_barrier()
                mbarrier.arrive(free, count=1)
            r, c = row + part * ROWS + rows, col + columns
            mask = (r < M)[:, None] & (c < N)[None, :]
            start = out + ctx.rank.to(gl.int64) * N
            pointers = start + r.to(gl.int64)[:, None] * (WORLD_SIZE * N) + c[None, :]
            gl.store(pointers, values, mask=mask)
            if entered:
                for i in gl.static_range(1, WORLD_SIZE):
                    ctx.store(pointers, values, (ctx.rank + i) % WORLD_SIZE, mask=mask)


@gluon.jit
def store_warp_kernel(
    a, b, out, sync_words, ctx_ptr, M, N, K, WORLD_SIZE: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    STORE_WARPS: gl.constexpr, STORE_REGISTERS: gl.constexpr, ACC: gl.constexpr, MOVE: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Compute this rank's columns of every rank's out [M, world * N]: eight warps multiply, four store.

    a, b: descriptors of A [M, K] and of the weight [N, K].
    """
    ctx = own_context(ctx_ptr, WORLD_SIZE)
    BLOCK_M: gl.constexpr = a.block_shape[0]
    BLOCK_N: gl.constexpr = b.block_shape[0]
    epoch = sync.enter(ctx, sync_words, LANES=False)
    entered = sync.await_entered(
        ctx, sync_words, epoch, USER, LANES=False
    )  # before that, a peer may still read its out
    a_parts = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    b_parts = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    tile = gl.allocate_shared_memory(a.dtype, [BLOCK_M, BLOCK_N], TILE)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
    mbarrier.init(ready, count=1)
    mbarrier.init(free, count=1)
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    mine = gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))
    num_k = gl.cdiv(K, a.block_shape[1])
    gl.warp_specialize(
        [
            (_multiply, (a, b, a_parts, b_parts, loaded, tile, ready, free, mine, num_k, M, N, GROUP_M, STAGES, ACC)),
            (_store_and_push, (ctx, out, tile, ready, free, mine, M, N, entered, WORLD_SIZE, GROUP_M, MOVE)),
        ],
        [STORE_WARPS],
        [STORE_REGISTERS],
    )
    sync.leave(ctx, sync_words, epoch, entered, USER, TOGETHER=True, LANES=False)


def constants(world_size: int, group_m: int) -> dict:
    """Return the constants of the kernel: sizes and, as layouts, which thread holds what."""
    return dict(
        WORLD_SIZE=world_size,
        GROUP_M=group_m,
        STAGES=STAGES,
        STORE_WARPS=STORE_WARPS,
        STORE_REGISTERS=STORE_REGISTERS,
        ACC=gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, TILE_N, 16]),
        MOVE=gl.BlockedLayout([1, 8], [1, 32], [STORE_WARPS, 1], [1, 0]),  # a warp has a row, 16 bytes a thread
        TILE=gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0]),
    )


def _described(t: torch.Tensor, rows: int) -> GluonDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([rows, TILE_K], gl.bfloat16)
    return GluonDescriptor.from_tensor(t, [rows, TILE_K], layout)


def all_scatter(case: Case) -> None:
    tiles = -(-case.M // TILE_M) * -(-case.N // TILE_N)
    store_warp_kernel[(min(tiles, case.programs),)](
        _described(case.A, TILE_M),
        _described(case.weight, TILE_N),
        case.out,
        case.sync,
        case.ctx.get_device_context(),
        case.M,
        case.N,
        case.K,
        **constants(case.ctx.num_ranks, case.blocks.group_m),
        num_warps=WARPS,
    )


def main() -> None:
    if not torch.cuda.is_available() or not platform.has_warp_specialisation(torch.device("cuda", 0)):
        print("skipped: warps with different work need a Hopper GPU; the other variants run anywhere")
        return
    common.run(all_scatter)


if __name__ == "__main__":
    main()
