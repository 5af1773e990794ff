"""Check and time all-reduces of many rows, quantised weights: `python -m benchmarks.quantised_many --ranks 2`.

Each variant is compared with float64 of the numbers that the codes represent. `converted` is the way before: a weight
in bf16 is made in each call.
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
from iris_ops.kernels.hopper import scaled_mma
from iris_ops.local import skinny_matmul
from iris_ops.named import named as function
from iris_ops.planning.epilogues import GATE
from iris_ops.planning.ways.fp8_stream import FP8_STREAM
from iris_ops.planning.weights import BY_NAME, format_of
from iris_ops.quantised.packing import PACKINGS
from iris_ops.quantised.restoring import restored
from iris_tp.bench.team import Team, launch
import torch
import torch.distributed as dist

from benchmarks.measuring import report
from benchmarks.measuring.ahead import compile_ahead

N, K = 8192, 4096
FORMATS = ["bf16", "fp8", "fp8_block", "int4", "mxfp4", "fp8_block/32"]


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
LOW = partial(FusedConfig, algorithm="one_shot", kernel="lamport_matmul", num_warps=4)
TILES = {
    "reduce 128x256": HOPPER(128, 256, 64, num_stages=3),
    "reduce 128x128 w4": HOPPER(128, 128, 64, num_warps=4, num_stages=5),
    "pair 128x128 w4": HOPPER(128, 128, 64, num_warps=4, num_stages=5, algorithm="one_shot"),
    "widened lowest pair": HOPPER(64, 64, 128, 8, 4, 5, algorithm="one_shot", kernel="hopper.lamport_pair"),
    "widened reduce": HOPPER(128, 128, 128, num_stages=3),
    "widened pair": HOPPER(128, 128, 128, num_stages=2, algorithm="one_shot"),
    "widened low pair": HOPPER(64, 128, 128, num_stages=3, algorithm="one_shot"),
    "lamport 32x64": LOW(32, 64, 64, num_stages=12),
    "lamport 64x64": LOW(64, 64, 64, num_stages=10),
    "lamport 128x64": LOW(128, 64, 64, num_stages=8),
    "stream": FP8_STREAM,
}


def variants(m: int) -> dict[str, tuple]:
    """Return by name (format, configuration, whether B is converted, steps of scaled blocks together)."""
    named = {"bf16": ("bf16", None), "fp8": ("fp8", None)}
    if m <= 64:
        named["fp8_block lamport"] = ("fp8_block", TILES["lamport 32x64" if m <= 32 else "lamport 64x64"])
        for form in ("int4", "mxfp4"):
            named[f"{form} stream"] = (form, TILES["stream"])
            named[f"{form} pair 64x64"] = (form, TILES["widened lowest pair"])
        for form in ("bf16", "fp8_block", "int4", "mxfp4") if m <= 32 else ():
            named[f"{form} gated"] = (form, None, False, "gated")
    elif m == 128:
        named["fp8_block lamport"] = ("fp8_block", TILES["lamport 128x64"])
        for form in ("int4", "mxfp4"):
            named[f"{form} pair 64x128"] = (form, TILES["widened low pair"])
            named[f"{form} pair 64x64"] = (form, TILES["widened lowest pair"])
    else:
        for count in (1, 2, 4):
            for tile in ("reduce 128x256", "reduce 128x128 w4") + (("pair 128x128 w4",) if m <= 2048 else ()):
                if count == 4 or m == 2048:
                    config = replace(TILES[tile], comm_programs=20 + count)  # calls of their own
                    named[f"fp8_block {tile} by {count}"] = ("fp8_block", config, False, count)
        for form in ("bf16", "fp8", "fp8_block", "int4", "mxfp4") if m > 512 else ():
            named[f"{form} local"] = (form, None, False, "local")
        for form in ("int4", "mxfp4", "fp8_block/32"):
            named[f"{form} reduce 128x128"] = (form, TILES["widened reduce"])
            if m <= 2048:
                named[f"{form} pair 128x128"] = (form, TILES["widened pair"])
    return named


def run(team: Team, args: argparse.Namespace) -> None:
    begin, rows, together = time.monotonic(), [], scaled_mma.together
    ctx = iris.iris(heap_size=3 << 30)
    weights = {}
    for name in FORMATS:
        weight, exact = weight_of(name, N, K, 1 + team.rank)
        copies = [weight] + [tuple(None if t is None else t.clone() for t in weight) for _ in range(3)]
        weights[name] = copies, exact

    def multiply(out, x, name, config, converted, count, i):
        if count == "gated":
            weight, scale = weights[name][0][i % 4]
            skinny_matmul.skinny_matmul(x, weight, None, scale, GATE.name, launch=skinny_matmul.Launch(out=out))
            return
        if count == "local":
            weight, scale = weights[name][0][i % 4]
            if scale is None:
                torch.mm(x, weight.t(), out=out)
            else:
                function(format_of(weight.t(), scale).product)(x, weight, scale, None, out)
            return
        scaled_mma.together = together if count is None else lambda warps: count
        weight, scale = weights[name][0][i % 4]
        if converted:
            weight, scale = restored(weight, scale, K, x.dtype), None
        ctx.ops.matmul_all_reduce(out, x, weight.t(), scale=scale, config=config)

    cases = []
    for m in (2048, 64, 24, 8192, 128, 512, 48, 32):
        draw = torch.Generator("cuda").manual_seed(m + team.rank)
        x = torch.randn(m, K, device="cuda", generator=draw).bfloat16()
        out = ctx.empty(m, N, dtype=x.dtype)
        for label, (name, *more) in variants(m).items():
            config, converted, count = [*more, None, None, None][:3]
            alone = {"gated": N // 2, "local": N}
            to = torch.empty(m, alone[count], dtype=x.dtype, device=x.device) if count in alone else out
            cases.append((m, label, name, to, x, partial(multiply, to, x, name, config, converted, count)))
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
