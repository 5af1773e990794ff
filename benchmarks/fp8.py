"""Does fp8 pay? `python -m benchmarks.fp8 --ranks 1`: products of linears without an exchange, bf16 beside fp8.

Query, key and value, and gate and up, of 8B and 70B shapes split over four ranks, as a step and as a prompt. Weights
rotate, so that none is found in the L2 cache. `rounded` is torch's product of an input that is rounded too, whatever
its rows, `rounding` the part of it that rounds. Each is compared with float64 first.

With `--ranks` 2 or more the row-parallel ones instead, each rank with its part: bf16 and fp8 are `matmul_all_reduce`,
`rounded` is followed by `ctx.ccl.all_reduce`.
"""

import argparse
from collections.abc import Callable
import json
import sys
import time

import iris
from iris_ops import fp8
from layers import step_product
import torch
import torch.distributed as dist
from torch.nn import functional as F

from benchmarks import report
from benchmarks.launch import Team, launch
from benchmarks.timing import INTERPRETED, QUICK, Budget, eager_batch, estimate_us, graph_batch, interleave

SHAPES = {  # name: (outputs on one of four ranks, inputs)
    "8B qkv": (1536, 4096),
    "8B gate_up": (7168, 4096),
    "70B qkv": (2560, 8192),
    "70B gate_up": (14336, 8192),
}
ROW_SHAPES = {  # name: (outputs, inputs of all ranks)
    "8B o": (4096, 4096),
    "8B down": (4096, 14336),
    "70B o": (8192, 8192),
    "70B down": (8192, 28672),
}
TINY = {"tiny": (48, 64)}
ROWS = [1, 16, 64, 256, 1024, 4096, 8192]
ALLOWED = {"bf16": 0.01, "fp8": 0.05, "rounded": 0.05}  # relative, of the whole result
ROTATED_BYTES = 256 << 20


def run(team: Team, args: argparse.Namespace) -> None:
    begin, rows_out = time.monotonic(), []
    budget = INTERPRETED if not team.cuda else QUICK if args.quick else Budget()
    team.say(
        "| shape | M | bf16 µs | fp8 µs | factor | rounded µs | rounding µs |\n|---|---:|---:|---:|---:|---:|---:|"
    )
    ctx = iris.iris(int(args.heap_gib * 2**30)) if team.world > 1 else None
    shapes = TINY if not team.cuda else ROW_SHAPES if ctx else SHAPES
    for name, (n, k) in shapes.items():
        k //= team.world
        copies = max(2, min(16, ROTATED_BYTES // (2 * n * k))) if team.cuda else 2
        weights = [torch.randn(n, k, device=team.device).to(torch.bfloat16) for _ in range(copies)]
        rounded = [fp8.quantised(weight) for weight in weights]
        for m in args.rows:
            if team.slowest([time.monotonic() - begin])[0] > args.time_limit:
                break
            x = torch.randn(m, k, device=team.device).to(torch.bfloat16)
            calls = calls_of(ctx, x, weights, rounded)
            rows_out.append({"shape": name, "M": m, "N": n, "K": k, **measure(team, calls, x, weights, budget)})
            team.say(line(rows_out[-1]))
    if ctx:
        ctx.close()
    if team.rank == 0:
        report.write(report.describe_run(team, args) | {"rows": rows_out}, args)
    wrong = [row for row in rows_out if row["wrong"]]
    if wrong:
        team.say(f"WRONG: {json.dumps(wrong)}")
        sys.exit(1)


def calls_of(ctx, x: torch.Tensor, weights: list[torch.Tensor], rounded: list[tuple]) -> dict[str, Callable]:
    """What is measured; the argument says which weight."""

    def fused(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(len(x), len(weight))
        ctx.ops.matmul_all_reduce(out, x, weight.t(), scale=scale)
        return out

    def local(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        streamed = scale is None or step_product.streams(weight.shape, x.device)
        if x.is_cuda and step_product.has_few_rows(x) and streamed:
            return step_product.step_product(x, weight, None, scale)
        return F.linear(x, weight) if scale is None else fp8.product(x, weight, scale, None)

    def rounded_too(i: int) -> torch.Tensor:
        out = fp8.rounded_product(x, *rounded[i])
        if ctx:
            ctx.ccl.all_reduce(out, out)
        return out

    ours = fused if ctx else local
    return {
        "bf16": lambda i: ours(weights[i], None),
        "fp8": lambda i: ours(*rounded[i]),
        "rounded": rounded_too,
        "rounding": lambda i: fp8.round_rows(x)[0],
    }


def measure(team: Team, calls: dict, x: torch.Tensor, weights: list[torch.Tensor], budget: Budget) -> dict:
    some = slice(0, 64)  # rows that are compared: float64 is slow
    exact = x[some].double() @ weights[0].double().t()
    dist.all_reduce(exact)
    errors = {name: ((calls[name](0)[some].double() - exact).norm() / exact.norm()).item() for name in ALLOWED}
    batches = {}
    for name, call in calls.items():
        longest = team.slowest([estimate_us(team, call, len(weights))])[0]  # every rank makes as many calls
        count = budget.calls_for(longest, len(weights))
        make = graph_batch if team.cuda else None
        batches[name] = make(call, count, len(weights))[0] if make else eager_batch(call, count, len(weights))
    repeats = budget.repeats_for(max(1.0, budget.batch_ms * 1e3 * len(calls)), len(calls))
    timings, failed = interleave(team, batches, repeats)
    us = {name: timing.call_us for name, timing in timings.items()}
    allowed = ALLOWED if team.cuda else ALLOWED | {"rounded": 0.12}  # the interpreter loses carries when it rounds
    wrong = [name for name, error in errors.items() if not error <= allowed[name]]
    return {"us": us, "errors": errors, "wrong": wrong, "failed": failed}


def line(row: dict) -> str:
    us = {name: f"{value:.1f}" for name, value in row["us"].items()}
    factor = f"{row['us']['bf16'] / row['us']['fp8']:.2f}x" if {"bf16", "fp8"} <= us.keys() else "-"
    cells = [row["shape"], str(row["M"]), us.get("bf16", "-"), us.get("fp8", "-"), factor]
    return "| " + " | ".join([*cells, us.get("rounded", "-"), us.get("rounding", "-")]) + " |"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--rows", type=int, nargs="+", help=f"of the input; default {ROWS}")
    parser.add_argument("--quick", action="store_true", help="shorter measurements")
    args = parser.parse_args(argv)
    args.ranks = args.ranks or 1
    report.settle(args, argv, "fp8")
    args.rows = args.rows or (ROWS if args.device == "cuda" else [3])
    return launch(run, args, args.time_limit + 60)


if __name__ == "__main__":
    sys.exit(main())
