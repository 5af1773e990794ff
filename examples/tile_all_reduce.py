"""A matrix product and its all-reduce or reduce-scatter in one kernel of one's own: a tile is summed when it is done.

`iris.tiles` has the exchange: a tile goes to every rank, or to the one that owns its rows, theirs come back, and nobody
sees a flag.

    python -m examples.tile_all_reduce
"""

import iris
from iris import platform
from iris_tp import launch
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def tile_matmul_kernel(
    ctx_ptr, space, a, b, out, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WORLD_SIZE: tl.constexpr,
    SCATTER: tl.constexpr = False, TWO_SHOT: tl.constexpr = False, ONE_TILE: tl.constexpr = False,
):  # fmt: skip
    """Compute out [M,N] = sum over ranks of a [M,K] @ b [K,N]; a and b are tensor descriptors, out is contiguous.

    SCATTER: out [M/w,N] is this rank's rows of the sum; M is a multiple of w * BLOCK_M. TWO_SHOT: the sum takes two
    hops. ONE_TILE: each program has one tile, which stays in registers until its sum is complete.
    """
    ctx = iris.DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE)
    tiles = iris.tiles.open_tiles(ctx, space)
    kind: tl.constexpr = out.dtype.element_ty
    num_tiles, programs = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N), tl.num_programs(0)
    if ONE_TILE and not (SCATTER or TWO_SHOT):
        m, n, _owner = place_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, WORLD_SIZE, SCATTER)
        acc, there = multiply(a, b, m, n, K, BLOCK_M, BLOCK_N, BLOCK_K), m + tl.arange(0, BLOCK_M)[:, None] < M
        tiles.send(acc, tl.program_id(0), kind, kept=True, mask=there)
        tiles.close()
        store(out, tiles.sum(tl.program_id(0), acc, kind, kept=True, mask=there), m, n, M, N)
    else:
        for number in range(tl.program_id(0), num_tiles, programs):
            m, n, owner = place_of(number, M, N, BLOCK_M, BLOCK_N, WORLD_SIZE, SCATTER)
            acc = multiply(a, b, m, n, K, BLOCK_M, BLOCK_N, BLOCK_K)
            if TWO_SHOT:
                store(out, tiles.all_reduce(acc, number, kind, True), m, n, M, N)
            else:  # a program takes a tile's sum behind its next product: by then the peers' tiles have come
                tiles.send(acc, number, kind, owner if SCATTER else None)
                if number >= programs:
                    finish(ctx, tiles, out, number - programs, M, N, BLOCK_M, BLOCK_N, SCATTER)
        tiles.close()
        if not TWO_SHOT:
            last = (num_tiles - 1 - tl.program_id(0)) // programs * programs + tl.program_id(0)
            finish(ctx, tiles, out, last, M, N, BLOCK_M, BLOCK_N, SCATTER)


@triton.jit
def multiply(a, b, m, n, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Multiply one tile. With few rows, compute b.T @ a.T, because tensor cores take 64 rows at a time."""
    if BLOCK_M < 128 and BLOCK_N >= 64:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(b.load([k, n]).T, a.load([m, k]).T, acc, input_precision="ieee")
        return acc.T
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(a.load([m, k]), b.load([k, n]), acc, input_precision="ieee")
        return acc


@triton.jit
def place_of(number, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WORLD_SIZE: tl.constexpr, SCATTER):
    """Return (first row of a tile, its first column, the rank that owns its sum with SCATTER), eight rows of tiles at a
    time."""
    down, across = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    row, column = tl.swizzle2d(number // across, number % across, down, across, 8)
    if SCATTER:  # the ranks' rows in turn, so that all links are busy
        owner = row % WORLD_SIZE
        return owner * (M // WORLD_SIZE) + row // WORLD_SIZE * BLOCK_M, column * BLOCK_N, owner
    else:
        return row * BLOCK_M, column * BLOCK_N, 0


@triton.jit
def finish(ctx, tiles, out, number, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCATTER: tl.constexpr):
    """Store the sum of tile `number`, which was sent before, in parts, because the next product holds many
    registers."""
    m, n, owner = place_of(number, M, N, BLOCK_M, BLOCK_N, ctx.world_size, SCATTER)
    if SCATTER:
        m -= owner * (M // ctx.world_size)
        M = tl.where(owner == ctx.rank, M // ctx.world_size, 0)
    parts: tl.constexpr = 4 if BLOCK_M >= 64 else 1
    like = tl.zeros((BLOCK_M // parts, BLOCK_N), tl.float32)
    for part in tl.static_range(parts):
        total = tiles.sum(number, like, out.dtype.element_ty, owner if SCATTER else None, part, parts)
        store(out, total, m + part * like.shape[0], n, M, N)


@triton.jit
def store(out, tile, m, n, M, N):
    rows, columns = m + tl.arange(0, tile.shape[0])[:, None], n + tl.arange(0, tile.shape[1])[None, :]
    tl.store(out + rows * N + columns, tile.to(out.dtype.element_ty), (rows < M) & (columns < N))


def rank_main() -> None:
    with iris.iris(heap_size=1 << 26) as ctx:
        dtype = torch.bfloat16 if ctx.device.type == "cuda" else torch.float32
        K, w, rank, blocks = 96, ctx.num_ranks, ctx.cur_rank, (64, 64, 32)
        scattered = 2 * w * blocks[0]  # rows: whole tiles for every rank
        for M, N, options in (
            (100, 200, {}), (3, 64, {}), (100, 200, {"TWO_SHOT": True}), (scattered, 200, {"SCATTER": True}),
        ):  # fmt: skip
            generator = torch.Generator().manual_seed(0)
            A = torch.randn(w, M, K, generator=generator).to(ctx.device, dtype)
            B = torch.randn(w, K, N, generator=generator).to(ctx.device, dtype)
            exact = torch.bmm(A.double(), B.double()).sum(0)
            exact = exact.chunk(w)[rank] if "SCATTER" in options else exact
            out = torch.full(exact.shape, 7.0, dtype=dtype, device=ctx.device)
            number = triton.cdiv(M, blocks[0]) * triton.cdiv(N, blocks[1])
            space = ctx.ccl.tile_space(number, blocks[0] * blocks[1], dtype)
            grid = (min(number, ctx.get_cu_count()),)  # all programs of a grid that waits run at once
            a = TensorDescriptor.from_tensor(A[rank], [blocks[0], blocks[2]])
            b = TensorDescriptor.from_tensor(B[rank], [blocks[2], blocks[1]])
            tile_matmul_kernel[grid](
                ctx.get_device_context(), space, a, b, out, M, N, K, *blocks, w, **options,
                ONE_TILE=grid[0] == number, **platform.pdl_options(ctx.device),
            )  # fmt: skip
            error = (out - exact).abs().max() / exact.abs().max()
            ctx.barrier()
            ctx.info(f"{options or 'one shot'}: out {tuple(out.shape)} {dtype}; error {error:.1e} of the largest value")
            assert error < (1e-2 if dtype is torch.bfloat16 else 1e-5)


if __name__ == "__main__":
    launch.run(rank_main)
