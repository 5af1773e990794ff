"""A mixture of experts' two ops against what people run otherwise: `python -m benchmarks.moe --ranks 2`.

For each shape and number of tokens: `ours` is `moe_gate_up`, then `moe_down_all_reduce`; each rival is a grouped
product and an all-reduce (`moe_rivals.py`). Everything is compared with float64 first, then timed in turns in CUDA
graphs, over weights and routings that rotate (`moe_layer.py`). The floor is the bytes of the experts that have tokens
over the rate of a copy, as measured in the same run. `alone`: without an all-reduce.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import json
import sys
import time

import iris
from iris_ops.planning.moe_ways import need_sorting
from iris_ops.planning.operations import DOWN_ALL_REDUCE, GATE_UP
from iris_tp.bench import compare
from iris_tp.bench.team import Team, launch
import torch
import torch.distributed as dist

from benchmarks.cases import moe_layer
from benchmarks.cases.moe_layer import CHECKED, Layer
from benchmarks.cases.moe_rivals import has_vllm, rivals_of, vllm_tiles
from benchmarks.measuring import report

TOKENS = [1, 4, 16, 64, 256, 512, 2048, 8192]
ALLOWED = 0.02  # relative, of the checked tokens together


def run(team: Team, args: argparse.Namespace) -> None:
    begin = time.monotonic()
    torch.manual_seed(team.rank)
    ctx = iris.iris(int(args.heap_gib * 2**30))
    budget = compare.budget_of(team, True)
    with_vllm = has_vllm(team)
    copy_gbs = copied(team) if team.cuda else 1.0
    record = report.describe_run(team, args) | {"copy_gbs": copy_gbs, "skew": moe_layer.SKEW, "rows": []}
    team.say(f"copy {copy_gbs:.0f} GB/s\n| shape | T | experts | ours us | floor us | best rival | factor | alone us |")
    shapes = {name: shape for name, shape in (moe_layer.SHAPES | moe_layer.TINY).items() if name in args.shapes}
    for name, shape in shapes.items():
        if late(team, begin, args):
            record.setdefault("left_out", []).append(name)
            continue
        layer = Layer(shape, team.world, team.rank, team.device, team.cuda)
        for tokens in args.tokens:
            if late(team, begin, args):
                record.setdefault("left_out", []).append(f"{name} T={tokens}")
                continue
            layer.tokens(tokens)
            row = {"shape": name, "T": tokens, **layer.described()}
            row["floor_us"] = row["nbytes"] / (copy_gbs * 1e3)
            row |= measured(team, ctx, layer, budget, args, with_vllm)
            team.say(line(row))
            record["rows"].append(row)
            if team.rank == 0:
                report.write(record, args)
        del layer
        torch.cuda.empty_cache() if team.cuda else None
    ctx.close()
    wrong = [row for row in record["rows"] if row.get("wrong")]
    if wrong:
        team.say(f"WRONG: {json.dumps(report.rounded(wrong))}")
        sys.exit(1)


def late(team: Team, begin: float, args: argparse.Namespace) -> bool:
    return team.slowest([time.monotonic() - begin])[0] > args.time_limit


def copied(team: Team) -> float:
    """Return the GB/s that a copy reads and writes."""
    source = torch.empty(256 << 20, dtype=torch.uint8, device=team.device)
    target = torch.empty_like(source)
    result = compare.compare(team, {"copy": lambda i: target.copy_(source)}, lambda *_: 0.0, 1, compare.QUICK)
    return 2 * source.numel() / result["us"]["copy"] / 1e3


def ours(
    ctx: iris.Iris, layer: Layer
) -> tuple[Callable[[int], torch.Tensor], Callable[[int], torch.Tensor], Callable[[int], torch.Tensor]]:
    """Return both ops, the first alone, and the second alone on the first's result."""
    shape, tokens = layer.shape, len(layer.A)
    middle = layer.A.new_empty(tokens * shape.top_k, layer.width)
    out = layer.A.new_empty(tokens, shape.hidden)

    def gate_up(i: int, experts: object = None) -> torch.Tensor:
        experts = layer.chosen[i] if experts is None else experts
        weight = layer.weights_of(i)[0]
        ctx.ops.moe_gate_up(middle, layer.A, weight, experts, layer.gate_up_bias, shape.activation, shape.gpt_oss)
        return middle

    def down(i: int, experts: object = None) -> torch.Tensor:
        experts = layer.chosen[i] if experts is None else experts
        weight = layer.weights_of(i)[1]
        ctx.ops.moe_down_all_reduce(out, middle, weight, experts, layer.weights[i], layer.down_bias)
        return out

    def both(i: int) -> torch.Tensor:
        chosen = layer.chosen[i]
        sorts = need_sorting(chosen.numel(), shape.experts)
        experts = ctx.ops.moe_route(chosen, shape.experts) if sorts else chosen
        gate_up(i, experts)
        return down(i, experts)

    return both, gate_up, down


def measured(
    team: Team, ctx: iris.Iris, layer: Layer, budget: compare.Budget, args: argparse.Namespace, with_vllm: bool
) -> dict:  # fmt: skip
    both, gate_up, down = ours(ctx, layer)
    largest = max(args.tokens) * max(shape.hidden for shape in moe_layer.SHAPES.values())
    calls = {"ours": both, "ours gate_up": gate_up, "ours down": down}
    rivals, captures = rivals_of(team, layer, largest, args.compiled, with_vllm)
    calls |= rivals
    exact = layer.exact()
    dist.all_reduce(exact)

    def error(name: str, call: Callable[[int], torch.Tensor]) -> float:
        if name in ("ours gate_up", "ours down") or name.endswith("alone"):
            call(0)
            return 0.0
        call(0).fill_(float("nan"))
        team.barrier()
        return compare.relative_error(call(0)[:CHECKED], exact)

    result = compare.compare(team, calls, error, layer.calls, budget, captures)
    result["wrong"] = {name: error for name, error in result["errors"].items() if not error <= ALLOWED}
    shape, form = layer.shape, "rows" if layer.shape.gpt_oss else None
    sizes = (GATE_UP, layer.width, shape.hidden), (DOWN_ALL_REDUCE, shape.hidden, layer.width)
    plans = [
        ctx.ops.plan(op, len(layer.A), N, K, layer.A.dtype, form, experts=shape.experts, top_k=shape.top_k)
        for op, N, K in sizes
    ]
    result["plans"] = [plan.reasons[-1] for plan in plans]
    if "vLLM alone" in rivals:
        result["vLLM tiles"] = vllm_tiles(layer)
    return result


def line(row: dict) -> str:
    us = row["us"]
    rivals = {name: value for name, value in us.items() if "+" in name}
    best = min(rivals, key=lambda name: rivals[name]) if rivals else "-"
    factor = f"{rivals[best] / us['ours']:.2f}x" if rivals and "ours" in us else "-"
    parts = f"{us.get('ours gate_up', 0):.1f} + {us.get('ours down', 0):.1f}"
    alone = ", ".join(f"{value:.1f}" for name, value in us.items() if name.endswith("alone"))
    cells = [row["shape"], str(row["T"]), f"{row['touched']:.0f}", f"{us.get('ours', 0):.1f} ({parts})"]
    cells += [f"{row['floor_us']:.1f}", f"{best} {rivals.get(best, 0):.1f}", factor, alone]
    failed = "".join(f" {name}: {reason}" for name, reason in row["failed"].items())
    return "| " + " | ".join(cells) + " |" + failed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser, dtype="bfloat16")
    known = list(moe_layer.SHAPES | moe_layer.TINY)
    parser.add_argument(
        "--shapes", type=report.some_of(known), help=f"some of {','.join(known)}; default: not the tiny"
    )
    parser.add_argument("--tokens", type=report.numbers, help=f"default {','.join(map(str, TOKENS))}")
    parser.add_argument("--eager", dest="compiled", action="store_false", help="no torch.compile in rivals")
    args = parser.parse_args(argv)
    report.settle(args, argv, "moe")
    gpu = args.device == "cuda"
    args.shapes = args.shapes or list(moe_layer.SHAPES if gpu else moe_layer.TINY)
    args.tokens = args.tokens or (TOKENS if gpu else [3])
    args.compiled = args.compiled and gpu
    return launch(run, args, args.time_limit + 120)


if __name__ == "__main__":
    sys.exit(main())
