"""Does fp8 pay? `python -m benchmarks.fp8 --ranks 1`: products of linears without an exchange, bf16 beside fp8.

Query, key and value, and gate and up, of 8B and 70B shapes split over four ranks, as a step and as a prompt. Weights
rotate, so that none is found in the L2 cache. `rounding` is the part of the fp8 call that rounds its input; `converted`
is what a GPU without fp8 tensor cores would run. Each is compared with float64 first.
"""

import argparse
import json
import sys
import time

from layers import fp8
import torch
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
TINY = {"tiny": (48, 64)}
ROWS = [1, 16, 64, 256, 1024, 4096, 8192]
ALLOWED = {"bf16": 0.01, "fp8": 0.05, "converted": 0.04}  # relative, of the whole result
ROTATED_BYTES = 256 << 20


def run(team: Team, args: argparse.Namespace) -> None:
    begin, rows_out = time.monotonic(), []
    budget = INTERPRETED if not team.cuda else QUICK if args.quick else Budget()
    team.say(
        "| shape | M | bf16 µs | fp8 µs | factor | rounding µs | converted µs |\n|---|---:|---:|---:|---:|---:|---:|"
    )
    for name, (n, k) in SHAPES.items() if team.cuda else TINY.items():
        copies = max(2, min(16, ROTATED_BYTES // (2 * n * k))) if team.cuda else 2
        weights = [torch.randn(n, k, device=team.device).to(torch.bfloat16) for _ in range(copies)]
        rounded = [fp8.quantised(weight) for weight in weights]
        for m in args.rows:
            if time.monotonic() - begin > args.time_limit:
                break
            x = torch.randn(m, k, device=team.device).to(torch.bfloat16)
            calls = {
                "bf16": lambda i, x=x, w=weights: F.linear(x, w[i]),
                "fp8": lambda i, x=x, w=rounded: fp8.product(x, *w[i], None, in_fp8=True),
                "rounding": lambda i, x=x: fp8.round_rows(x)[0],
                "converted": lambda i, x=x, w=rounded: fp8.product(x, *w[i], None, in_fp8=False),
            }
            rows_out.append({"shape": name, "M": m, "N": n, "K": k, **measure(team, calls, x, weights, budget)})
            team.say(line(rows_out[-1]))
    if team.rank == 0:
        report.write(report.describe_run(team, args) | {"rows": rows_out}, args)
    wrong = [row for row in rows_out if row["wrong"]]
    if wrong:
        team.say(f"WRONG: {json.dumps(wrong)}")
        sys.exit(1)


def measure(team: Team, calls: dict, x: torch.Tensor, weights: list[torch.Tensor], budget: Budget) -> dict:
    some = slice(0, 64)  # rows that are compared: float64 is slow
    exact = x[some].double() @ weights[0].double().t()
    errors = {name: ((calls[name](0)[some].double() - exact).norm() / exact.norm()).item() for name in ALLOWED}
    batches = {}
    for name, call in calls.items():
        count = budget.calls_for(estimate_us(team, call, len(weights)), len(weights))
        make = graph_batch if team.cuda else None
        batches[name] = make(call, count, len(weights))[0] if make else eager_batch(call, count, len(weights))
    repeats = budget.repeats_for(max(1.0, budget.batch_ms * 1e3 * len(calls)), len(calls))
    timings, failed = interleave(team, batches, repeats)
    us = {name: timing.call_us for name, timing in timings.items()}
    allowed = ALLOWED if team.cuda else ALLOWED | {"fp8": 0.12}  # the interpreter loses carries when it rounds to e4m3
    wrong = [name for name, error in errors.items() if not error <= allowed[name]]
    return {"us": us, "errors": errors, "wrong": wrong, "failed": failed}


def line(row: dict) -> str:
    us = {name: f"{value:.1f}" for name, value in row["us"].items()}
    factor = f"{row['us']['bf16'] / row['us']['fp8']:.2f}x" if {"bf16", "fp8"} <= us.keys() else "-"
    cells = [row["shape"], str(row["M"]), us.get("bf16", "-"), us.get("fp8", "-"), factor]
    return "| " + " | ".join([*cells, us.get("rounding", "-"), us.get("converted", "-")]) + " |"


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
