"""Check and time all-reduces of many rows, quantised weights: `python -m benchmarks.quantised_many --ranks 2`.

Each variant is compared with float64 of the numbers that the codes represent.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
import json
import sys
import time

import iris
from iris_ops import FusedConfig
from iris_ops.kernels.hopper import operands, scaled_mma
from iris_ops.local import skinny_matmul
from iris_ops.named import named as function
from iris_ops.planning.ways.fp8_stream import FP8_STREAM
from iris_ops.planning.weights import BY_NAME, format_of
from iris_ops.quantised import many_rows
from iris_ops.quantised.packing import PACKINGS
from iris_tp.bench.team import Team, launch
import torch
import torch.distributed as dist

from benchmarks.measuring import report
from benchmarks.measuring.ahead import compile_ahead

N, K = 8192, 4096
FORMATS = ["bf16", "fp8", "fp8_block", "int4", "mxfp4", "fp8_block/32", "int4/128"]


def weight_of(name: str, n: int, k: int, seed: int):
    draw = torch.Generator("cuda").manual_seed(seed)
    exact = torch.randn(n, k, generator=draw, device="cuda") * 0.03
    exact *= 2.0 ** torch.randint(-3, 4, (n, 1), generator=draw, device="cuda")
    blocks = 2.0 ** torch.randint(-2, 3, (1, k // 128), generator=draw, device="cuda")
    exact *= blocks.repeat_interleave(128, 1)
    if name == "bf16":
        exact = exact.to(torch.bfloat16)
        return (exact, None), exact
    form = BY_NAME[name]
    packing, group = PACKINGS[form.packing], form.group or None
    stored = packing.pack(*packing.quantise(exact, group), group)
    return stored, packing.unpack(*stored, k)


def timed(call, graph_calls: int = 8, seconds: float = 0.12) -> float:
    """Median microseconds of a call, of graphs of several, on the slowest rank."""
    for i in range(3):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(graph_calls):
            call(i)
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    times = []
    count = None
    while count is None or len(times) < count:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / graph_calls)
        if count is None:
            tensor = torch.tensor([times[0]], device="cuda")
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
            count = max(5, min(30, int(seconds * 1e6 / (float(tensor) * graph_calls))))
    value = torch.tensor([sorted(times)[len(times) // 2]], device="cuda")
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


HOPPER = partial(FusedConfig, warp_specialised=True)
ONE = partial(HOPPER, algorithm="one_shot")
LOW = partial(FusedConfig, algorithm="one_shot", kernel="lamport_matmul", num_warps=4)
LOCAL = partial(HOPPER, algorithm="copy_gather")
TILES = {
    "reduce 128x256": HOPPER(128, 256, 64, num_stages=3),
    "reduce 128x128 w4": HOPPER(128, 128, 64, num_warps=4, num_stages=5),
    "pair 128x128 w4": ONE(128, 128, 64, num_warps=4, num_stages=5),
    "lamport 32x64": LOW(32, 64, 64, num_stages=12),
    "lamport 64x64": LOW(64, 64, 64, num_stages=10),
    "lamport 128x64": LOW(128, 64, 64, num_stages=8),
    "stream": FP8_STREAM,
}
# Of codes, by lines a step.
WIDENED = {
    "64x64": (64, 64, 4), "64x128": (64, 128, 8), "128x64": (128, 64, 4), "128x128": (128, 128, 8),
    "256x128": (256, 128, 8),
}  # fmt: skip


def widened(tile: str, lines: int, kind=HOPPER) -> FusedConfig:
    m, n, warps = WIDENED[tile]
    kernel = "hopper.lamport_pair" if kind is ONE else ""
    return kind(m, n, 64 * lines, num_warps=warps, num_stages=2, kernel=kernel)


def variants(m: int) -> dict[str, tuple]:
    """Return by name (format, configuration, how: None, "gated" or "local", registers of movers or None, steps of
    scaled blocks together)."""
    named = {"bf16": ("bf16", None)}
    codes = ("int4", "mxfp4")
    if m <= 64:
        for form in codes:
            named[f"{form} stream"] = (form, TILES["stream"])
            for lines in (1, 2):
                named[f"{form} pair 64x64 by {lines}"] = (form, widened("64x64", lines, ONE))
    elif m <= 512:
        for tile in ("64x128", "128x64", "128x128") if m == 128 else ("64x128", "128x128"):
            for lines in (1, 2):
                for form in codes if lines == 2 else codes[:1]:
                    named[f"{form} pair {tile} by {lines}"] = (form, widened(tile, lines, ONE))
        if m == 512:
            named["int4 reduce 128x128 by 2"] = ("int4", widened("128x128", 2))
            named["int4 reduce 256x128 by 1"] = ("int4", widened("256x128", 1))
    else:
        for tile, lines in (("128x128", 1), ("128x128", 2), ("256x128", 1)):
            for form in (*codes, "int4/128", "fp8_block/32") if m == 2048 else codes:
                named[f"{form} reduce {tile} by {lines}"] = (form, widened(tile, lines))
        for tile, lines in (("128x128", 2), ("256x128", 1)):
            named[f"int4 local {tile} by {lines}"] = ("int4", widened(tile, lines, LOCAL), "local")
        named["bf16 local"] = ("bf16", None, "local")
        wide, number = TILES["reduce 128x256"], 20
        for count, movers in ((1, None), (1, 120), (4, 120)):
            config = replace(wide, comm_programs=number)  # a call of its own
            named[f"fp8_block reduce 128x256 by {count}, {movers}"] = ("fp8_block", config, None, movers, count)
            number += 1
        config = replace(TILES["reduce 128x128 w4"], comm_programs=number)
        named["fp8_block reduce 128x128 w4 by 4"] = ("fp8_block", config, None, None, 4)
        named["fp8"] = ("fp8", None)
        for form in ("fp8", "bf16"):
            number += 1
            named[f"{form} reduce 128x256, 120"] = (form, replace(wide, comm_programs=number), None, 120)
    return named


def run(team: Team, args: argparse.Namespace) -> None:
    begin, rows, together = time.monotonic(), [], scaled_mma.together
    ctx = iris.iris(heap_size=3 << 30)
    weights = {}
    for name in FORMATS:
        weight, exact = weight_of(name, N, K, 1 + team.rank)
        copies = [weight] + [tuple(None if t is None else t.clone() for t in weight) for _ in range(3)]
        weights[name] = copies, exact

    def multiply(out, x, name, config, how, movers, count, i):
        weight, scale = weights[name][0][i % 4]
        if how == "gated":
            skinny_matmul.skinny_matmul(x, weight, None, scale, True, launch=skinny_matmul.Launch(out=out))
        elif how == "local" and scale is None:
            torch.mm(x, weight.t(), out=out)
        elif how == "local" and config is not None:
            many_rows.multiply(out, x, weight, scale, None, config)
        elif how == "local":
            function(format_of(weight.t(), scale).product)(x, weight, scale, None, out)
        else:
            operands.MOVER_REGISTERS = {8: movers or 168, 4: 232}
            operands._HELD = 16 if movers else 32
            scaled_mma.together = together if count is None else lambda warps: count
            ctx.ops.matmul_all_reduce(out, x, weight.t(), scale=scale, config=config)

    cases = []
    for m in (2048, 64, 128, 512, 8192, 40, 256):
        draw = torch.Generator("cuda").manual_seed(m + team.rank)
        x = torch.randn(m, K, device="cuda", generator=draw).bfloat16()
        out = ctx.empty(m, N, dtype=x.dtype)
        for label, (name, *more) in variants(m).items():
            config, how, movers, count = [*more, None, None, None, None][:4]
            alone = {"gated": N // 2, "local": N}
            to = torch.empty(m, alone[how], dtype=x.dtype, device=x.device) if how in alone else out
            cases.append((m, label, name, to, x, partial(multiply, to, x, name, config, how, movers, count)))
    count = compile_ahead(team, [ctx], lambda: [call(0) for *_, call in cases])
    team.say(f"{count} kernels compiled after {time.monotonic() - begin:.0f} s")
    sums: dict = {}
    for m, label, name, out, x, call in cases:
        if team.slowest([time.monotonic() - begin])[0] > args.time_limit:
            break
        alone = not ctx.heap.holds(out.data_ptr(), out.data_ptr() + out.nbytes)
        key = m, name, out.shape[1], alone
        if key not in sums:
            exact = x[:512].double() @ weights[name][1].double().t()
            if not alone:
                dist.all_reduce(exact)
            elif out.shape[1] < N:
                gate, up = exact.to(x.dtype).double().chunk(2, 1)
                exact = torch.nn.functional.silu(gate) * up
            sums = {other: value for other, value in sums.items() if other[0] == m} | {key: exact}
        exact, row = sums[key], {"rows": m, "label": label}

        def check(out=out, call=call, exact=exact):
            out.fill_(float("nan"))
            team.barrier()
            call(0)
            call(0)
            torch.cuda.synchronize()
            got = out[: exact.shape[0]].double()
            difference = (got - exact).abs()
            errors = [(difference.norm() / exact.norm()).item(), (difference.max() / exact.abs().max()).item()]
            return [1e9 if each != each else each for each in errors]

        errors, reason = team.attempt(check)
        if errors is not None:
            row["error"], row["largest"] = team.slowest(errors)
            us, reason = team.attempt(lambda call=call: timed(call))
            if us is not None:
                row["us"] = us
        if reason:
            row["failed"] = str(reason)[:300]
        rows.append(row)
        team.say(json.dumps(row))
    if team.rank == 0:
        report.write(report.describe_run(team, args) | {"N": N, "K": K, "rows": rows}, args)
    ctx.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser, dtype="bfloat16")
    args = parser.parse_args(argv)
    report.settle(args, argv, "quantised_many")
    return launch(run, args, args.time_limit + 60)


if __name__ == "__main__":
    sys.exit(main())
