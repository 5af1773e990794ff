"""GEMM + all-scatter, overlapped in the ways of `examples/all_scatter`: `python -m benchmarks.all_scatter`.

Every rank multiplies A (M, K) by its columns of B (K, N) and all need the whole product. On the same tensors: each
variant; `ctx.ops.matmul_all_gather`; torch's product, NCCL's all-gather and the copy that brings the parts into
columns. Each result is checked, into poisoned output, before it is timed, and a graph's once more by a replay. Beside
them what bounds them: the product alone (torch's and the variants' own), and the bytes over the link.

Prints the table and writes `all_scatter_<gpu>_x<ranks>.json`; `benchmarks.report` draws the bars.
"""

import argparse
from functools import partial
import importlib
import sys
import time

import iris  # before triton on a machine without a GPU
from iris import platform
from iris_tp.bench.rows import LINK_GB_S
from iris_tp.bench.team import Team, launch
import torch
import torch.distributed as dist

from benchmarks.cases.contenders import Contender, timed
from benchmarks.measuring import report
from benchmarks.tables.every_row import ALONE, render
from examples.all_scatter.common import SMALL, Blocks, Case

VARIANTS = ("bulk_synchronous", "producer_consumer", "fused_sequential", "fused_specialized")
ALLOWED = 2e-2  # of the largest value
SHAPES = ((8192, 8192, 7168), (8192, 8192, 2048), (4096, 4096, 3584), (2048, 8192, 7168), (512, 8192, 7168))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--rows", type=report.sizes, help='sizes M,N,K, as "8192,8192,7168;512,8192,2048"')
    parser.add_argument("--store-warp", action="store_true", help="also the variant with a store warp; Hopper only")
    parser.add_argument("--quick", action="store_true", help="two shapes, a third of the time each")
    parser.set_defaults(time_limit=50)
    args = parser.parse_args(argv)
    report.settle(args, argv, "all_scatter")
    default = (SHAPES[1:4:2] if args.quick else SHAPES) if args.device == "cuda" else ((64, 96, 64),)
    args.shapes = args.rows or default
    for M, N, K in args.shapes:
        if N % args.ranks or K % 8:
            parser.error(f"{M},{N},{K}: expected N a multiple of the {args.ranks} ranks and K of 8")
    if args.store_warp and not platform.has_warp_specialisation(torch.device(args.device)):
        parser.error(f"--store-warp on {args.device}: expected NVIDIA Hopper GPUs, whose warps can do different work")
    return args


def contenders_of(
    team: Team, ctx: iris.Iris, case: Case, variants: tuple[str, ...]
) -> tuple[dict[str, Contender], dict[str, Contender]]:
    """Return, by name, the contenders that leave the whole product on every rank, the variants first; and those that
    only multiply."""
    A, weight, world = case.A, case.weight, team.world
    whole = {}
    for name in variants:
        variant = importlib.import_module(f"examples.all_scatter.{name}").all_scatter
        whole[name] = Contender(partial(variant, case), case.out)
    out = ctx.empty(*case.out.shape, dtype=A.dtype)
    whole["ctx.ops"] = Contender(lambda: ctx.ops.matmul_all_gather(out, A, weight.T), out)
    local, parts = A.new_empty(case.M, case.N), A.new_empty(world * case.M, case.N)
    usual = torch.empty_like(out)

    def separate() -> None:
        torch.matmul(A, weight.T, out=local)
        dist.all_gather_into_tensor(parts, local)
        usual.view(case.M, world, case.N).copy_(parts.view(world, case.M, case.N).transpose(0, 1))

    whole[f"torch + {'NCCL' if team.cuda else 'gloo'}"] = Contender(separate, usual)
    kernel = importlib.import_module("examples.all_scatter.bulk_synchronous").product_kernel
    ours = case.out[:, team.rank * case.N : (team.rank + 1) * case.N]
    alone = A.new_empty(case.M, case.N)
    products = {
        "torch alone": Contender(lambda: torch.matmul(A, weight.T, out=alone), alone),
        "tiles alone": Contender(lambda: kernel[case.grid()](**case.args()), ours),
    }
    return whole, products


def run(team: Team, args: argparse.Namespace) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    begin = time.monotonic()
    ctx = iris.iris(int(args.heap_gib * 2**30))
    dtype = getattr(torch, args.dtype)
    variants = VARIANTS + (("fused_store_warp",) if args.store_warp else ())
    measured = {**report.describe_run(team, args), "link_gb_s": LINK_GB_S, "rows": [], "left_out": []}
    for shape in args.shapes:
        if team.slowest([time.monotonic() - begin])[0] > args.time_limit:
            measured["left_out"].append(",".join(map(str, shape)))
            continue
        measured["rows"].append(run_row(team, ctx, shape, dtype, variants))
        team.say(f"[{time.monotonic() - begin:4.0f} s] {shape}")
        if team.rank == 0:
            report.write(measured, args)
    team.say("\n" + render(report.rounded(measured)))
    wrong = [r for row in measured["rows"] for r in row["results"] if r["status"] != "ok"]
    ctx.close()
    if wrong:
        sys.exit(1)


def run_row(
    team: Team, ctx: iris.Iris, shape: tuple[int, int, int], dtype: torch.dtype, variants: tuple[str, ...]
) -> dict:
    M, N, K = shape
    generator = torch.Generator(team.device).manual_seed(M + N + K)  # all ranks draw all, alike
    A, weights = (torch.randn(*size, device=team.device, generator=generator).to(dtype) for size in ((M, K), (N, K)))
    own = weights.chunk(team.world)[team.rank].contiguous()
    case = Case(ctx, A, own, Blocks() if team.cuda else SMALL)
    results: list[dict] = []
    for kind, contenders in zip(("variant", ALONE), contenders_of(team, ctx, case, variants), strict=True):
        exact = A.double() @ (weights if kind != ALONE else own).double().T
        taken = timed(team, contenders, exact, ALLOWED)
        for name in contenders:
            figures = {"graph_us" if team.cuda else "eager_us": taken["us"][name]} if name in taken["us"] else {}
            status = taken["failed"].get(name, "ok")
            results.append({"name": name, "kind": kind, "status": status, "notes": [], **figures})
    link_us = (team.world - 1) * M * N // team.world * A.element_size() / LINK_GB_S / 1e3
    gemm_us = min((report.time_of(r) for r in results if r["kind"] == ALONE and report.time_of(r)), default=None)
    floor_us = max(gemm_us, link_us) if gemm_us else None
    sizes = {"M": M, "N": N, "K": K, "link_us": link_us, "gemm_us": gemm_us, "floor_us": floor_us}
    return sizes | {"results": results}


def main() -> None:
    args = parse()
    sys.exit(launch(run, args, limit_s=args.time_limit + 60))


if __name__ == "__main__":
    main()
