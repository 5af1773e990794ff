"""Measure linears in fp8 against bf16, without an exchange: `python -m benchmarks.fp8 --ranks 1`.

Query, key and value, and gate and up, of 8B and 70B shapes split over four ranks, as a step and as a prompt. Weights
rotate, so that none is in the L2 cache. `torch` is torch's product of an input that is rounded too, whatever its
rows, `rounding` the part of it that rounds. Each is compared with float64 first.

With `--ranks` 2 or more the row-parallel ones instead, each rank with its part: bf16 and fp8 are `matmul_all_reduce`;
torch's product of rounded rows is followed by an all-reduce of NCCL or, on GPUs, of torch's symmetric memory.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
import json
import math
import sys
import time

import iris
from iris_ops.local import skinny_matmul
from iris_ops.quantised import scaled_matmul, weight_stream
from iris_tp.bench import compare
from iris_tp.bench.team import Team, launch
from iris_tp.bench.timing import Budget
import torch
import torch.distributed as dist
from torch.nn import functional as F

from benchmarks.measuring import report
from benchmarks.rivals.of_torch import symmetric_memory

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
ALLOWED = {"bf16": 0.01, "fp8": 0.05}  # relative, of the whole result; rivals as fp8
ROTATED_BYTES = 256 << 20


def run(team: Team, args: argparse.Namespace) -> None:
    begin, rows_out = time.monotonic(), []
    budget = compare.budget_of(team, args.quick)
    team.say(
        "| shape | M | bf16 µs | fp8 µs | factor | best rival | rounding µs |\n|---|---:|---:|---:|---:|---:|---:|"
    )
    ctx = iris.iris(int(args.heap_gib * 2**30)) if team.world > 1 else None
    shapes = TINY if not team.cuda else ROW_SHAPES if ctx else SHAPES
    largest = max(args.rows) * max(n for n, _ in shapes.values())
    outputs = ctx and ctx.empty(largest, dtype=torch.bfloat16)
    for name, (n, k) in shapes.items():
        k //= team.world
        copies = max(2, min(16, ROTATED_BYTES // (2 * n * k))) if team.cuda else 2
        weights = [torch.randn(n, k, device=team.device).to(torch.bfloat16) for _ in range(copies)]
        rounded = [scaled_matmul.quantised(weight) for weight in weights]
        for m in args.rows:
            if team.slowest([time.monotonic() - begin])[0] > args.time_limit:
                break
            x = torch.randn(m, k, device=team.device).to(torch.bfloat16)
            calls = calls_of(ctx, outputs, x, weights, rounded) | rivals_of(team, largest, x, rounded)
            row = {"shape": name, "M": m, "N": n, "K": k}
            if ctx:
                config = ctx.ops.plan("matmul_all_reduce", m, n, k, x.dtype, explained=False, fp8=True)
                row["plan"] = {key: value for key, value in asdict(config).items() if key != "reasons"}
            rows_out.append(row | measure(team, calls, x, weights, budget))
            team.say(line(rows_out[-1]))
    if ctx:
        ctx.close()
    if team.rank == 0:
        report.write(report.describe_run(team, args) | {"rows": rows_out}, args)
    wrong = [row for row in rows_out if row["wrong"]]
    if wrong:
        team.say(f"WRONG: {json.dumps(wrong)}")
        sys.exit(1)


def calls_of(
    ctx, outputs: torch.Tensor | None, x: torch.Tensor, weights: list[torch.Tensor], rounded: list[tuple]
) -> dict[str, Callable]:
    """Return the calls to measure, by the number of a weight. `outputs`: with a context, room for a result there."""
    size = len(x), len(weights[0])
    out = outputs[: math.prod(size)].view(size) if ctx else None

    def fused(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        ctx.ops.matmul_all_reduce(out, x, weight.t(), scale=scale)
        return out

    def local(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is not None:
            few = weight_stream.supports(x, weight.t(), scale) is None
        else:
            few = skinny_matmul.has_few_rows(x, skinny_matmul.most_rows(*size[1:], 1, True, x.device))
        if few:
            return skinny_matmul.skinny_matmul(x, weight, None, scale)
        return F.linear(x, weight) if scale is None else scaled_matmul.product(x, weight, scale, None)

    ours = fused if ctx else local
    return {
        "bf16": lambda i: ours(weights[i], None),
        "fp8": lambda i: ours(*rounded[i]),
        "rounding": lambda i: scaled_matmul.round_rows(x)[0],
    }


def rivals_of(team: Team, largest: int, x: torch.Tensor, rounded: list[tuple]) -> dict[str, Callable]:
    """Return torch's fp8 product, and whose all-reduce follows it. `largest`: elements of any row's result."""
    size = len(x), len(rounded[0][1])
    out = x.new_empty(size)

    def product(i: int, out: torch.Tensor) -> torch.Tensor:
        rows, scale_rows = scaled_matmul.round_rows(x)
        weight, scale = rounded[i]
        scales = dict(scale_a=scale_rows, scale_b=scale[None, :])
        return torch._scaled_mm(rows, weight.t(), **scales, out_dtype=x.dtype, out=out)

    if team.world == 1:
        return {"torch": lambda i: product(i, out)}

    def nccl(i: int) -> torch.Tensor:
        dist.all_reduce(product(i, out))
        return out

    if not team.cuda:
        return {"NCCL": nccl}
    shared = symmetric_memory(largest, x.dtype, x.device)[: math.prod(size)].view(size)
    group = dist.group.WORLD.group_name

    def one_shot(i: int) -> torch.Tensor:
        return torch.ops.symm_mem.one_shot_all_reduce(product(i, shared), "sum", group)

    def two_shot(i: int) -> torch.Tensor:
        return torch.ops.symm_mem.two_shot_all_reduce_(product(i, shared), "sum", group)

    return {"NCCL": nccl, "one-shot": one_shot, "two-shot": two_shot}


def measure(team: Team, calls: dict, x: torch.Tensor, weights: list[torch.Tensor], budget: Budget) -> dict:
    some = slice(0, 64)  # rows that are compared: float64 is slow
    exact = x[some].double() @ weights[0].double().t()
    dist.all_reduce(exact)

    def error(name: str, call: Callable) -> float:
        if name == "rounding":
            return 0.0
        call(0).fill_(float("nan"))  # on all ranks, before what counts
        team.barrier()
        team.synchronize()
        return compare.relative_error(call(0)[some], exact)

    result = compare.compare(team, calls, error, len(weights), budget)
    result["wrong"] = [name for name, e in result["errors"].items() if not e <= ALLOWED.get(name, ALLOWED["fp8"])]
    return result


def line(row: dict) -> str:
    us = {name: f"{value:.1f}" for name, value in row["us"].items()}
    factor = f"{row['us']['bf16'] / row['us']['fp8']:.2f}x" if {"bf16", "fp8"} <= us.keys() else "-"
    cells = [row["shape"], str(row["M"]), us.get("bf16", "-"), us.get("fp8", "-"), factor]
    rivals = [(value, name) for name, value in row["us"].items() if name not in ("bf16", "fp8", "rounding")]
    best = "-"
    if rivals and "fp8" in us:
        value, name = min(rivals)
        best = f"{name} {value:.1f} ({value / row['us']['fp8']:.2f}x)"
    return "| " + " | ".join([*cells, best, us.get("rounding", "-")]) + " |"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser, dtype="bfloat16")
    parser.add_argument("--rows", type=report.at_least(1), nargs="+", help=f"of the input; default {ROWS}")
    parser.add_argument("--quick", action="store_true", help="shorter measurements")
    args = parser.parse_args(argv)
    args.ranks = args.ranks or 1
    report.settle(args, argv, "fp8")
    args.rows = args.rows or (ROWS if args.device == "cuda" else [3])
    return launch(run, args, args.time_limit + 60)


if __name__ == "__main__":
    sys.exit(main())
