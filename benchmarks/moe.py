"""A mixture of experts' two ops against what people run otherwise: `python -m benchmarks.moe --ranks 2`.

For each shape and number of tokens: `ours` is `moe_gate_up`, then `moe_down_all_reduce`; each rival is a grouped
product and an all-reduce (`moe_rivals.py`). Everything is compared with float64 first, then timed in turns in CUDA
graphs, over weights and routings that rotate (`moe_layer.py`). The floor is the bytes of the experts that have tokens
over the rate of a copy, as measured in the same run. `alone`: without an all-reduce.

`--tune` has ours compete with all configurations that the planner knows and with other tiles, each op by itself;
`--tiles 16x64x128s5w4,down16:16x128x64s3w4` with these tiles only, the latter for moe_down of 16 tokens, and what is
planned.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
import contextlib
from dataclasses import replace
import json
import re
import sys
import time

import iris
from iris import platform
from iris.machines import Machine, machine_of
from iris_ops import FusedConfig
from iris_ops.planning.moe_problem import DOWN_ALL_REDUCE, GATE_UP, MoeProblem
from iris_ops.planning.moe_ways import need_sorting
from iris_ops.planning.plan import WAYS, compare_ways, plan
from iris_tp.bench import compare
from iris_tp.bench.team import Team, launch
import torch
import torch.distributed as dist
import triton

from benchmarks.cases import moe_layer
from benchmarks.cases.moe_layer import CHECKED, Layer
from benchmarks.cases.moe_rivals import has_vllm, rivals_of, vllm_tiles
from benchmarks.measuring import report

TOKENS = [1, 4, 16, 64, 256, 512, 2048, 8192]
# Beside the planner's, with --tune: block_m, block_n, block_k, warps, stages.
TILES = [
    (16, 32, 256, 4, 4), (16, 64, 128, 4, 3), (16, 64, 256, 4, 3), (16, 64, 256, 4, 5), (16, 128, 64, 4, 8),
    (16, 128, 128, 4, 3), (16, 128, 128, 4, 5), (16, 128, 128, 8, 3), (32, 128, 64, 4, 3), (32, 128, 128, 4, 3),
    (32, 256, 64, 8, 4), (64, 128, 64, 4, 3), (64, 128, 128, 8, 3), (64, 256, 64, 4, 3), (64, 256, 64, 8, 4),
    (128, 128, 64, 4, 3), (128, 128, 64, 8, 3), (128, 256, 64, 8, 4),
]  # fmt: skip
_TILE = re.compile(r"(?:(up|down)?(\d+)?:)?(\d+)x(\d+)x(\d+)s(\d+)w(\d+)")
ALLOWED = 0.02  # relative, of the checked tokens together


def run(team: Team, args: argparse.Namespace) -> None:
    begin = time.monotonic()
    torch.manual_seed(team.rank)
    ctx = iris.iris(int(args.heap_gib * 2**30))
    budget = compare.budget_of(team, True)
    with_vllm = not args.tune and has_vllm(team)
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
            if args.tune:
                row["tuned"] = tuned(team, ctx, layer, budget, args.tiles)
                team.say(json.dumps(report.rounded({"shape": name, "T": tokens} | row["tuned"])))
            else:
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
    ctx: iris.Iris, layer: Layer, first: FusedConfig | None = None, second: FusedConfig | None = None
) -> tuple[Callable[[int], torch.Tensor], Callable[[int], torch.Tensor], Callable[[int], torch.Tensor]]:
    """Return both ops, the first alone, and the second alone on the first's result."""
    shape, tokens = layer.shape, len(layer.A)
    middle = layer.A.new_empty(tokens * shape.top_k, layer.width)
    out = layer.A.new_empty(tokens, shape.hidden)

    def gate_up(i: int, experts: object = None) -> torch.Tensor:
        experts = layer.chosen[i] if experts is None else experts
        weight = layer.weights_of(i)[0]
        ctx.ops.moe_gate_up(
            middle, layer.A, weight, experts, layer.gate_up_bias, shape.activation, shape.gpt_oss, config=first
        )
        return middle

    def down(i: int, experts: object = None) -> torch.Tensor:
        experts = layer.chosen[i] if experts is None else experts
        weight = layer.weights_of(i)[1]
        ctx.ops.moe_down_all_reduce(out, middle, weight, experts, layer.weights[i], layer.down_bias, config=second)
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
    problems = problems_of(ctx, layer)
    form = "rows" if layer.shape.gpt_oss else None
    plans = [
        ctx.ops.plan(p.op, p.tokens, p.N, p.K, p.dtype, form, experts=p.experts, top_k=p.top_k) for p in problems
    ]  # fmt: skip
    result["plans"] = [plan.reasons[-1] for plan in plans]
    if "vLLM alone" in rivals:
        result["vLLM tiles"] = vllm_tiles(layer)
    return result


def problems_of(ctx: iris.Iris, layer: Layer) -> tuple[MoeProblem, MoeProblem]:
    shape, tokens, dtype = layer.shape, len(layer.A), layer.A.dtype
    common = tokens, shape.top_k, shape.experts
    return (
        MoeProblem(GATE_UP, *common, layer.width, shape.hidden, ctx.num_ranks, dtype, True, in_rows=shape.gpt_oss),
        MoeProblem(DOWN_ALL_REDUCE, *common, shape.hidden, layer.width, ctx.num_ranks, dtype, in_rows=shape.gpt_oss),
    )


def tuned(team: Team, ctx: iris.Iris, layer: Layer, budget: compare.Budget, tiles: list[tuple] | None) -> dict:
    """Return microseconds of each configuration, by op; of `tiles` only, as `tile` gives them, where there are such."""
    rows = {}
    exact = layer.exact()
    dist.all_reduce(exact)
    every: dict[str, dict] = {}
    for problem in problems_of(ctx, layer):
        configs = tried(problem, machine_of(ctx.device), layer, tiles)
        every[problem.op] = {
            named(c): ours(ctx, layer, c if problem.op == GATE_UP else None, None if problem.op == GATE_UP else c)
            for c in configs
        }
    if team.cuda:
        compile_ahead(ctx, [both for result in every.values() for both, *_ in result.values()])
    for problem in problems_of(ctx, layer):
        calls = {}
        for label, (both, gate_up, down) in every[problem.op].items():
            if compare_error(team, both, exact) <= ALLOWED:
                calls[label] = gate_up if problem.op == GATE_UP else down
        result = compare.compare(team, calls, lambda name, call: 0.0 * call(0).numel(), layer.calls, budget)
        rows[problem.op] = dict(sorted(result["us"].items(), key=lambda item: item[1])) | result["failed"]
    return rows


def compile_ahead(ctx: iris.Iris, calls: list[Callable[[int], torch.Tensor]]) -> None:
    """Compile what `calls` launch, many kernels at a time, and launch nothing."""
    mixture, options = ctx.ops._mixture, platform.launch_options(ctx.device)
    launch = mixture._steps.launch

    def compiled(kernel: triton.JITFunction, grid: tuple, args: dict, **given: int) -> None:
        kernel.warmup(**args, grid=grid, **(given | options))

    mixture._steps.launch = compiled  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor(12) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for call in calls:
                with contextlib.suppress(Exception):  # one that cannot be launched fails again when timed
                    call(0)
    finally:
        mixture._steps.launch = launch  # type: ignore[method-assign]
        ctx.ops.forget_launches()


def tried(problem: MoeProblem, machine: Machine, layer: Layer, given: list[tuple] | None) -> list[FusedConfig]:
    """Return what the planner knows, and other tiles in the same ways; or the plan and the tiles that are `given`."""
    known = [each.config for each in compare_ways(WAYS, problem, machine).candidates]
    mean = problem.pairs / layer.described()["touched"]
    tiles = [tile for tile in TILES if tile[0] <= max(16, 4 * mean) and 8 * tile[0] >= mean]
    if given is not None:
        known = [plan(problem, machine, False, way) for way in sorted({c.algorithm for c in known})]
        known_ways = [plan(problem, machine, False)]
        name = "up" if problem.op == GATE_UP else "down"
        accepted = {None, name}, {None, str(problem.tokens)}
        tiles = [tile for op, tokens, *tile in given if op in accepted[0] and tokens in accepted[1]]
    else:
        known_ways = known = [c for c in known if c.block_m <= max(16, 4 * mean) and 8 * c.block_m >= mean]
    configs = {named(c): c for c in known}
    ways = {c.algorithm: c for c in known_ways}
    for m, n, k, warps, stages in tiles:
        if machine.stages((m + n) * k * 2) >= stages:
            for like in ways.values():
                each = replace(like, block_m=m, block_n=n, block_k=k, num_warps=warps, num_stages=stages)
                configs[named(each)] = each
    return list(configs.values())


def named(config: FusedConfig) -> str:
    tile = f"{config.block_m}x{config.block_n}x{config.block_k}"
    return f"{tile} s{config.num_stages} w{config.num_warps} {config.algorithm}"


def tile(text: str) -> tuple:
    """Return (op, tokens, block_m, block_n, block_k, warps, stages) of `down16:16x64x128s5w4`.

    The first two are None where omitted.

    Raises `ValueError`.
    """
    match = _TILE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r}; expected a tile like 16x64x128s5w4, or up:, 16: or down16: before it")
    m, n, k, stages, warps = (int(each) for each in match.groups()[2:])
    return match[1], match[2], m, n, k, warps, stages


def compare_error(team: Team, call: Callable[[int], torch.Tensor], exact: torch.Tensor) -> float:
    """Return a call's distance from the truth on any rank; infinite where it raises."""
    error, _ = team.attempt(lambda: compare.relative_error(call(0)[:CHECKED], exact))
    return team.slowest([float("inf") if error is None else error])[0]


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
    parser.add_argument("--tune", action="store_true", help="every configuration of ours in place of the rivals")
    parser.add_argument(
        "--tiles", type=lambda text: [tile(each) for each in text.split(",")], help="with --tune: these only"
    )
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
