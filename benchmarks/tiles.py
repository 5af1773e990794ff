"""Tile collectives beside the fused op, and collectives with a root beside torch.distributed's.

    python -m benchmarks.tiles --ranks 2

The kernel of `examples/tile_all_reduce.py` sums each finished tile over the ranks. It is timed beside
`ctx.ops.matmul_all_reduce` and torch's product with an all-reduce of torch.distributed. Then broadcast, gather, scatter
and reduce, from 2 KiB on. Every contender's result is compared with float64 before it is timed.
"""

import argparse
from collections.abc import Callable
import sys

import iris
from iris_tp.bench import timing
from iris_tp.bench.team import Team, launch
import torch
import torch.distributed as dist
import triton

from benchmarks import report
from benchmarks.table import markdown
from examples.tile_all_reduce import matmul_all_reduce_kernel

CALLS, ROUNDS = 20, 9
ROOTED = ("broadcast", "gather", "scatter", "reduce")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--rows", type=report.sizes, help="default: 1, 64 and 2048 by 8192 by 2048, on CPUs 20,64,32")
    parser.add_argument("--sizes", type=report.numbers, help="bytes; default: 2 KiB to 64 MiB, on CPUs 2 KiB")
    args = parser.parse_args(argv)
    report.settle(args, argv, "tiles")
    on_gpu = args.device == "cuda"
    args.rows = args.rows or ([(m, 8192, 2048) for m in (1, 64, 2048)] if on_gpu else [(20, 64, 32)])
    args.sizes = args.sizes or ([2048 << (3 * i) for i in range(6)] if on_gpu else [2048])
    return args


def blocks(M: int) -> tuple[int, int, int, int]:
    """Rows, columns and depth of a tile, and warps."""
    return (16, 64, 128, 4) if M <= 16 else (64, 64, 64, 4) if M <= 64 else (128, 128, 64, 8)


def run(team: Team, args: argparse.Namespace) -> None:
    dtype = getattr(torch, args.dtype)
    ctx = iris.iris(int(args.heap_gib * 2**30))
    written = {**report.describe_run(team, args), "rows": []}
    for M, N, K in args.rows:
        written["rows"].append(products(team, ctx, dtype, M, N, K))
    for nbytes in args.sizes:
        written["rows"] += [rooted(team, ctx, dtype, op, nbytes) for op in ROOTED]
    if team.rank == 0:
        report.write(written, args)
    team.say("\n" + render(report.rounded(written)))
    ctx.close()


def products(team: Team, ctx: iris.Iris, dtype: torch.dtype, M: int, N: int, K: int) -> dict:
    generator = torch.Generator().manual_seed(M)
    A = torch.randn(team.world, M, K, generator=generator).to(dtype)
    B = (torch.randn(team.world, K, N, generator=generator) / K**0.5).to(dtype)
    exact = torch.bmm(A.double().to(ctx.device), B.double().to(ctx.device)).sum(0)
    a, b, out = A[team.rank].to(ctx.device), B[team.rank].to(ctx.device), ctx.empty(M, N, dtype=dtype)
    bm, bn, bk, warps = blocks(M)
    number = triton.cdiv(M, bm) * triton.cdiv(N, bn)
    space, grid = ctx.ccl.tile_space(number, bm * bn, dtype), (min(number, ctx.get_cu_count()),)

    def tiles(i: int) -> torch.Tensor:
        matmul_all_reduce_kernel[grid](
            ctx.get_device_context(), space, a, b, out, M, N, K, bm, bn, bk, team.world, num_warps=warps
        )
        return out

    def op(i: int) -> torch.Tensor:
        ctx.ops.matmul_all_reduce(out, a, b)
        return out

    def torchs(i: int) -> torch.Tensor:
        made = torch.mm(a, b)
        dist.all_reduce(made)
        return made

    calls = {"tiles": tiles, "ctx.ops": op, "torch": torchs}
    found = timed(team, calls, exact, dtype)
    return {"what": "matmul_all_reduce", "size": f"{M} x {N} x {K}", **found}


def rooted(team: Team, ctx: iris.Iris, dtype: torch.dtype, op: str, nbytes: int) -> dict:
    """`nbytes`: of the whole tensor that a root has, or that is reduced."""
    n, root, w = nbytes // dtype.itemsize // team.world * team.world, team.world - 1, team.world
    whole = torch.randn(w, n, generator=torch.Generator().manual_seed(nbytes)).to(dtype).to(ctx.device)
    given = whole[team.rank].clone() if op != "gather" else whole[team.rank, : n // w].clone()
    out = torch.zeros(n if op != "scatter" else n // w, dtype=dtype, device=ctx.device)
    parts = list(out.chunk(w)) if op == "gather" else list(given.chunk(w))

    def ours(i: int) -> torch.Tensor:
        if op == "broadcast":
            out.copy_(given)
            ctx.ccl.broadcast(out, root)
        elif op == "gather":
            ctx.ccl.gather(out, given, root)
        elif op == "scatter":
            ctx.ccl.scatter(out, given, root)
        else:
            ctx.ccl.reduce(out, given, root)
        return out

    def theirs(i: int) -> torch.Tensor:
        if op in ("broadcast", "reduce"):
            out.copy_(given)
            dist.broadcast(out, root) if op == "broadcast" else dist.reduce(out, root)
        elif op == "gather":
            dist.gather(given, parts if team.rank == root else None, root)
        else:
            dist.scatter(out, parts if team.rank == root else None, root)
        return out

    exact = None
    if op == "broadcast":
        exact = whole[root]
    elif op == "scatter":
        exact = whole[root].view(w, -1)[team.rank]
    elif team.rank == root:
        exact = whole[:, : n // w].reshape(-1) if op == "gather" else whole.double().sum(0)
    found = timed(team, {"ours": ours, "torch": theirs}, exact, dtype)
    return {"what": op, "size": f"{nbytes} bytes", **found}


def timed(team: Team, calls: dict[str, Callable], exact: torch.Tensor | None, dtype: torch.dtype) -> dict:
    """Microseconds of each call, as graphs on GPUs; raises where a result is wrong."""
    for name, call in calls.items():
        error = 0.0
        for _ in range(3):
            got = call(0).double()
            if exact is not None:
                error = max(error, ((got - exact).abs().max() / exact.double().abs().max()).item())
        if team.slowest([error])[0] > 8 * torch.finfo(dtype).eps * team.world:
            raise RuntimeError(f"{name}: wrong result, off by {error:.3g} of the largest value")
    batches = {
        name: timing.graph_batch(call, CALLS, 1)[0] if team.cuda else timing.eager_batch(call, 2, 1)
        for name, call in calls.items()
    }
    timings, failed = timing.interleave(team, batches, ROUNDS if team.cuda else 1)
    return {"us": {name: t.call_us for name, t in timings.items()}, "failed": failed}


def render(written: dict) -> str:
    lines = []
    for row in written["rows"]:
        us = row["us"]
        best = us.get("ctx.ops", us.get("torch"))
        own = us.get("tiles", us.get("ours"))
        ratio = f"{best / own:.2f}" if best and own else ""
        lines.append([row["what"], row["size"], *(f"{us[k]:.1f}" if k in us else "" for k in NAMES), ratio])
    head = ["what", "size", *(f"{name}, µs" for name in NAMES), "ctx.ops or torch / ours"]
    return f"{report.headline(written)} `{written['command']}`\n\n{markdown(head, lines)}"


NAMES = ("tiles", "ours", "ctx.ops", "torch")


def main() -> None:
    args = parse()
    sys.exit(launch(run, args, limit_s=args.time_limit))


if __name__ == "__main__":
    main()
