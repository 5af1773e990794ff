"""Kernels with collectives on tiles; `iris/test_tiles.py` runs them, `compile_kernels.py` compiles them."""

import iris
import triton
import triton.language as tl


@triton.jit
def tile_reduce_kernel(
    ctx_ptr, sync, inp, out, rank, num_tiles, M: tl.constexpr, N: tl.constexpr, FLAT: tl.constexpr,
    TWO_SHOT: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """out fp32 [num_tiles, M, N]: the sums of all ranks' tiles in inp."""
    ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE)
    tiles = iris.tiles.open_tiles(ctx, sync)
    if FLAT:
        at = tl.arange(0, M * N)
    else:
        at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    for number in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tile = tl.load(inp + number * M * N + at)
        tl.store(out + number * M * N + at, tiles.all_reduce(tile, number, two_shot=TWO_SHOT))
    tiles.close()


@triton.jit
def tile_scatter_kernel(
    ctx_ptr, sync, inp, out, rank, num_tiles, first_owner, owners, M: tl.constexpr, N: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """out fp32 [num_tiles, M, N]: sums of the tiles that are this rank's; tile i is first_owner + i % owners' own."""
    ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE)
    tiles = iris.tiles.open_tiles(ctx, sync)
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    for number in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        owner = first_owner + number % owners
        total = tiles.reduce_scatter(tl.load(inp + number * M * N + at), number, owner)
        tl.store(out + number * M * N + at, total, mask=(at >= 0) & (rank == owner))
    tiles.close()


@triton.jit
def tile_halves_kernel(
    ctx_ptr, sync, inp, out, rank, num_tiles, M: tl.constexpr, N: tl.constexpr, SCATTER: tl.constexpr,
    PARTS: tl.constexpr, KEPT: tl.constexpr, LOOK: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Compute out fp32 [num_tiles, M, N] as the two kernels above, each tile's sum after the next is sent.

    LOOK: load the values that have arrived before the next tile is sent; each part is then a separate tile.
    """
    ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE)
    tiles = iris.tiles.open_tiles(ctx, sync)
    rows: tl.constexpr = M // PARTS
    whole = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    at = tl.arange(0, rows)[:, None] * N + tl.arange(0, N)[None, :]
    programs = tl.num_programs(0)
    for number in range(tl.program_id(0), num_tiles + programs, programs):
        before = number - programs
        if LOOK:
            for part in tl.static_range(PARTS):
                looked, like = tl.maximum(before, 0) * PARTS + part, tl.zeros((rows, N), inp.dtype.element_ty)
                found = tiles.look(looked, like, kept=KEPT)
                if number < num_tiles:
                    tile = tl.load(inp + number * M * N + part * rows * N + at)
                    tiles.send(tile, number * PARTS + part, kept=KEPT)
                if before >= 0:
                    like = tl.load(inp + before * M * N + part * rows * N + at)
                    total = tiles.sum(before * PARTS + part, like, kept=KEPT, found=found)
                    tl.store(out + before * M * N + part * rows * N + at, total)
        elif number < num_tiles:
            owner = number % WORLD_SIZE if SCATTER else None
            tiles.send(tl.load(inp + number * M * N + whole), number, owner=owner, kept=KEPT)
        if before >= 0 and not LOOK:
            owner = before % WORLD_SIZE if SCATTER else None
            for part in tl.static_range(PARTS):
                like = tl.zeros((rows, N), inp.dtype.element_ty)
                if KEPT:
                    like = tl.load(inp + before * M * N + part * rows * N + at)
                total = tiles.sum(before, like, owner=owner, part=part, parts=PARTS, kept=KEPT)
                mask = (at >= 0) & (rank == owner) if SCATTER else at >= 0
                tl.store(out + before * M * N + part * rows * N + at, total, mask=mask)
    tiles.close()


@triton.jit
def tile_rows_kernel(
    ctx_ptr, sync, inp, out, rank, rows, M: tl.constexpr, N: tl.constexpr, HALVES: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """out fp32 [rows, N]: the sum of all ranks' inp [rows, N], a tile of M rows of which the others stay at home."""
    ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE)
    tiles = iris.tiles.open_tiles(ctx, sync)
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    tile = tl.load(inp + m * N + n, mask=m < rows, other=1.0)
    if HALVES:
        tiles.send(tile, 0, kept=True, mask=m < rows)
        tiles.close()
        total = tiles.sum(0, tile, kept=True, mask=m < rows)
    else:
        total = tiles.all_reduce(tile, 0, mask=m < rows)
        tiles.close()
    tl.store(out + m * N + n, total, mask=m < rows)


@triton.jit
def tile_gather_kernel(ctx_ptr, sync, inp, out, rank, rows, M: tl.constexpr, N: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """out [world * rows, N]: every rank's inp [rows, N], with rows <= M."""
    ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE)
    tiles = iris.tiles.open_tiles(ctx, sync)
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    tile = tl.load(inp + m * N + n, mask=m < rows, other=0.0)
    tiles.all_gather(tile, 0, out + m * N + n, rows * N, mask=m < rows)
    tiles.close()


@triton.jit
def tile_exchange_kernel(
    ctx_ptr, sync, inp, out, rank, num_tiles, rows, M: tl.constexpr, N: tl.constexpr, WORLD_SIZE: tl.constexpr
):
    """out [num_tiles, rows, world, N]: this rank's place in every rank's inp of that shape; rows <= M."""
    ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE)
    tiles = iris.tiles.open_tiles(ctx, sync)
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    for number in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        at = (number * rows + m) * WORLD_SIZE * N + n
        tiles.all_to_all(inp + at, N, number, out + at, N, mask=(m < rows) & (n >= 0))
    tiles.close()
