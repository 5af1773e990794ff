"""Collectives on tiles, inside a kernel, against fused ops, collectives of whole tensors and torch.distributed's.

    python -m benchmarks.tiles --ranks 2

The kernel of `examples/tile_all_reduce.py` sums each finished tile over the ranks, or for the rank that owns its rows.
That of `examples/tile_all_reduce_hopper.py` does so in separate warps, for more rows than a tile has. Both are
timed against the fused op of `ctx.ops`, and torch's product with a collective of torch.distributed. A kernel that does
nothing but gather or exchange tiles is timed against `ctx.ccl`. Every contender's result, into poisoned memory, is
compared with float64 before and after it is timed. Takes less than a minute; writes tiles_<gpu>_x<ranks>.json after
every row.
"""

import argparse
from collections.abc import Callable
from functools import partial
import sys
import time
from typing import NamedTuple

import iris
from iris import platform
from iris_tp.bench.team import Team, launch
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.cases import contenders
from benchmarks.cases.contenders import Contender
from benchmarks.measuring import report
from benchmarks.tables import every_row
from examples import tile_all_reduce_hopper
from examples.tile_all_reduce import tile_matmul_kernel

NAMES = ("tiles", "tiles, two shots", "tiles, specialised warps", "ctx.ops", "ctx.ccl", "torch")
ROWS = 8  # of a tile that is only gathered or exchanged


@triton.jit
def move_tiles_kernel(
    ctx_ptr, space, x, out, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXCHANGE: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Gather x. out [w * M, N]: all ranks' x [M, N]; with EXCHANGE, [M, w * N], as by `ctx.ccl.all_to_all`."""
    ctx = iris.DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE)
    tiles = iris.tiles.open_tiles(ctx, space)
    across = tl.cdiv(N, COLUMNS)
    for number in range(tl.program_id(0), tl.cdiv(M, ROWS) * across, tl.num_programs(0)):
        m, n = number // across * ROWS + tl.arange(0, ROWS), number % across * COLUMNS + tl.arange(0, COLUMNS)
        there = (m < M)[:, None] & (n < N)[None, :]
        if EXCHANGE:
            at = m[:, None] * WORLD_SIZE * N + n[None, :]
            tiles.all_to_all(x + at, N, number, out + at, N, there)
        else:
            at = m[:, None] * N + n[None, :]
            tiles.all_gather(tl.load(x + at, there, 0.0), number, out + at, M * N, there)
    tiles.close()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.set_defaults(time_limit=60)
    parser.add_argument("--rows", type=report.sizes, help="default: 1, 64 and 2048 by 8192 by 2048, on CPUs 20 and 64")
    parser.add_argument("--blocks", type=list_of_blocks, help="rows,columns,depth,warps,stages,programs of every tile")
    parser.add_argument("--sizes", type=report.numbers, help="bytes; default: 64 KiB, 1 MiB, 16 MiB, on CPUs 2 KiB")
    args = parser.parse_args(argv)
    report.settle(args, argv, "tiles")
    on_gpu = args.device == "cuda"
    args.rows = args.rows or (
        [(m, 8192, 2048) for m in (1, 64, 2048)] if on_gpu else [(m, 64, 32) for m in (20, 64 * args.ranks)]
    )
    args.sizes = args.sizes or ([1 << 16, 1 << 20, 1 << 24] if on_gpu else [2048])
    return args


class Blocks(NamedTuple):
    """Sizes of a product's tile (rows, columns, depth), warps, pipeline stages, and programs on each multiprocessor."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    programs: int


def blocks(M: int, dtype: torch.dtype) -> Blocks:
    """Return block sizes. Few rows: many loads under way. Many: of two programs a multiprocessor, one multiplies."""
    if dtype.itemsize == 4:
        return Blocks(16, 64, 64, 4, 3, 1) if M <= 16 else Blocks(64, 64, 32, 4, 3, 1)
    if M <= 64:
        return Blocks(16, 64, 256, 4, 4, 1) if M <= 16 else Blocks(64, 64, 128, 8, 4, 1)
    return Blocks(128, 128, 64, 8, 3, 2)


def list_of_blocks(text: str) -> Blocks:
    """Parse --blocks."""
    rows, columns, depth, warps, stages, programs = report.numbers(text)
    return Blocks(rows, columns, depth, warps, stages, programs)


list_of_blocks.__name__ = "list of six numbers"


def run(team: Team, args: argparse.Namespace) -> None:
    dtype, begin = getattr(torch, args.dtype), time.monotonic()
    ctx = iris.iris(int(args.heap_gib * 2**30))
    written = {**report.describe_run(team, args), "rows": [], "left_out": []}
    rows: list[tuple[str, Callable[[], dict]]] = []
    for M, N, K in args.rows:
        tile, part = args.blocks or blocks(M, dtype), args.blocks or blocks(M // team.world, dtype)
        rows.append((f"matmul_all_reduce {M}", partial(products, team, ctx, dtype, (M, N, K), tile, False)))
        if M % (team.world * part.m) == 0:
            rows.append((f"matmul_reduce_scatter {M}", partial(products, team, ctx, dtype, (M, N, K), part, True)))
    for nbytes in args.sizes:
        for op in ("all_gather", "all_to_all"):
            rows.append((f"{op} {nbytes}", partial(moves, team, ctx, dtype, nbytes, op)))
    for name, row in rows:
        if team.slowest([time.monotonic() - begin])[0] > args.time_limit:
            written["left_out"].append(name)
            continue
        contenders.progress(team, name)
        written["rows"].append(row())
        if team.rank == 0:
            report.write(written, args)
    team.say("\n" + every_row.render(report.rounded(written)))
    ctx.close()


def products(
    team: Team, ctx: iris.Iris, dtype: torch.dtype, sizes: tuple[int, int, int], tile: Blocks, scatter: bool
) -> dict:
    M, N, K = sizes
    w, rank, generator = team.world, team.rank, torch.Generator().manual_seed(M)
    A = torch.randn(w, M, K, generator=generator).to(ctx.device, dtype)
    B = (torch.randn(w, K, N, generator=generator) / K**0.5).to(ctx.device, dtype)
    exact = torch.zeros(M, N, dtype=torch.float64, device=ctx.device)
    for left, right in zip(A, B, strict=True):
        exact += left.double() @ right.double()
    exact = exact.chunk(w)[rank] if scatter else exact
    a, b = A[rank].contiguous(), B[rank].contiguous()
    described = [TensorDescriptor.from_tensor(*each) for each in ((a, [tile.m, tile.k]), (b, [tile.k, tile.n]))]
    outs = {name: ctx.empty(exact.shape, dtype=dtype) for name in NAMES} | {
        "torch": torch.empty_like(exact, dtype=dtype)
    }
    number = triton.cdiv(M, tile.m) * triton.cdiv(N, tile.n)
    space, grid = ctx.ccl.tile_space(number, tile.m * tile.n, dtype), (min(number, tile.programs * ctx.get_cu_count()),)

    def tiles(out: torch.Tensor, **options: bool) -> None:
        tile_matmul_kernel[grid](
            ctx.get_device_context(), space, *described, out, M, N, K, *tile[:3], w, ONE_TILE=number == grid[0],
            **options, num_warps=tile.warps, num_stages=tile.stages, **platform.pdl_options(ctx.device),
        )  # fmt: skip

    def torchs() -> None:
        if scatter:
            dist.reduce_scatter_tensor(outs["torch"], torch.mm(a, b, out=whole))
        else:
            dist.all_reduce(torch.mm(a, b, out=outs["torch"]))

    whole = torch.empty(M, N, dtype=dtype, device=ctx.device)
    op = "matmul_reduce_scatter" if scatter else "matmul_all_reduce"
    calls = {
        "tiles": partial(tiles, outs["tiles"], SCATTER=scatter),
        "tiles, two shots": partial(tiles, outs["tiles, two shots"], TWO_SHOT=True),
        "ctx.ops": partial(getattr(ctx.ops, op), outs["ctx.ops"], a, b),
        "torch": torchs,
    }
    if scatter:
        del calls["tiles, two shots"]
    elif platform.has_warp_specialisation(ctx.device) and dtype.itemsize == 2 and M > tile_all_reduce_hopper.BLOCKS[0]:
        specialised = outs["tiles, specialised warps"]
        room = tile_all_reduce_hopper.space_for(ctx, M, N, dtype)
        calls["tiles, specialised warps"] = partial(
            tile_all_reduce_hopper.tile_matmul_hopper, ctx, room, a, b, specialised
        )
    entries = {name: Contender(call, outs[name]) for name, call in calls.items()}
    return {
        "what": op,
        "size": f"{M} x {N} x {K}",
        "blocks": list(tile),
        **contenders.timed(team, entries, exact, 8 * torch.finfo(dtype).eps * w),
    }


def moves(team: Team, ctx: iris.Iris, dtype: torch.dtype, nbytes: int, op: str) -> dict:
    """Time the moves; `nbytes`: of what a rank has after it."""
    w, rank, exchange = team.world, team.rank, op == "all_to_all"
    N = 1024 if team.cuda else 32
    M = max(1, nbytes // (w * N * dtype.itemsize))
    generator = torch.Generator().manual_seed(nbytes)
    x = torch.randn(w, M, w * N if exchange else N, generator=generator).to(ctx.device, dtype)
    exact = torch.cat([x[r, :, rank * N : (rank + 1) * N] for r in range(w)], 1) if exchange else x.view(w * M, N)
    given = x[rank].contiguous()
    in_parts = given.view(M, w, N).movedim(1, 0).contiguous() if exchange else given
    outs = {name: ctx.empty(exact.shape, dtype=dtype) for name in NAMES} | {
        "torch": torch.empty_like(exact, dtype=dtype)
    }
    number = triton.cdiv(M, ROWS)
    space, grid = ctx.ccl.tile_space(number, ROWS * N, dtype), (min(number, ctx.get_cu_count()),)

    def tiles() -> None:
        move_tiles_kernel[grid](
            ctx.get_device_context(), space, given, outs["tiles"], M, N, ROWS, N, exchange, w, num_warps=4,
            **platform.pdl_options(ctx.device),
        )  # fmt: skip

    def ours() -> None:
        (ctx.ccl.all_to_all if exchange else ctx.ccl.all_gather)(outs["ctx.ccl"], given)

    def torchs() -> None:
        if exchange:
            dist.all_to_all_single(outs["torch"].view(w, M, N), in_parts)
        else:
            dist.all_gather_into_tensor(outs["torch"], given)

    def side_by_side(out: torch.Tensor) -> torch.Tensor:
        return out.view(w, M, N).movedim(0, 1).reshape(M, w * N)

    entries = {"tiles": Contender(tiles, outs["tiles"]), "ctx.ccl": Contender(ours, outs["ctx.ccl"])}
    entries["torch"] = Contender(torchs, outs["torch"], side_by_side if exchange else torch.Tensor.detach)
    return {"what": op, "size": f"{nbytes} bytes", **contenders.timed(team, entries, exact, 0.0)}


def main() -> None:
    args = parse()
    sys.exit(launch(run, args, limit_s=args.time_limit + 120))


if __name__ == "__main__":
    main()
