"""Check and time all-reduces of many rows, quantised weights: `python -m benchmarks.quantised_many --ranks 2`.

Each variant is compared with float64 of the numbers that the codes represent.
"""

from __future__ import annotations

import argparse
from functools import partial
import json
import sys
import time

import iris
from iris_ops import FusedConfig
from iris_ops.local import skinny_matmul
from iris_ops.named import named as function
from iris_ops.planning.epilogues import GATE
from iris_ops.planning.ways.weight_stream import STREAM_CONFIG
from iris_ops.planning.weights import BY_NAME, format_of
from iris_ops.quantised import many_rows
from iris_ops.quantised.packing import PACKINGS
from iris_tp.bench.team import Team, launch
import torch
import torch.distributed as dist

from benchmarks.measuring import report
from benchmarks.measuring.ahead import compile_ahead
from benchmarks.measuring.graph_time import graph_us

N, K = 8192, 4096
FORMATS = [
    "bf16", "fp8", "fp8_block", "int4", "mxfp4", "fp8_block/32", "int4/128", "nvfp4", "int8", "int4_zeros",
    "int8_zeros/32",
]  # fmt: skip


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
    codes, scales = packing.quantise(exact, group)
    if packing.zeros:
        scales[..., 1] = torch.randint(-8, 9, scales.shape[:2], generator=draw, device="cuda")
    stored = packing.pack(codes, scales, group)
    return stored, packing.unpack(*stored, k)


HOPPER = partial(FusedConfig, warp_specialised=True)
TILES = {
    "64x64": (64, 64, 4),
    "64x128": (64, 128, 8),
    "128x64": (128, 64, 4),
    "128x128": (128, 128, 8),
    "256x128": (256, 128, 8),
}
KINDS = {"pair": "one_shot", "reduce": "overlapped", "local": "copy_gather"}


def widened(tile: str, kind: str) -> FusedConfig:
    """Return a configuration that widens codes in such tiles."""
    m, n, warps = TILES[tile]
    kernel = {"pair": "hopper.lamport_pair", "reduce": "hopper.matmul_reduce"}.get(kind, "")
    depth, stages = (64, 3) if m == 256 else (128, 2)
    return HOPPER(m, n, depth, num_warps=warps, num_stages=stages, algorithm=KINDS[kind], kernel=kernel)


def variants(m: int, world: int) -> dict[str, tuple]:
    """Return by name (format, configuration, how: None, "gated" or "local")."""
    named = {"bf16": ("bf16", None), "bf16 local": ("bf16", None, "local")}
    codes, others = ("int4", "mxfp4"), ("int4/128", "nvfp4", "int8", "int4_zeros", "int8_zeros/32", "fp8_block/32")
    if m <= 64:
        for form in (*codes, *others[:-1]) if m in (16, 64) else codes[:1]:
            named[f"{form} stream"] = (form, STREAM_CONFIG)
        tiles = ("64x64",)
    elif m == 128:
        tiles = ("64x128", "128x64", "128x128")
    else:
        tiles = ("64x128", "128x128", "256x128") if m <= 512 else ("128x128", "256x128")
    for tile in tiles:
        for form in (*codes, *others) if m == 2048 else codes[:1] if m in (40, 256) else codes:
            named[f"{form} local {tile}"] = (form, widened(tile, "local"), "local")
            if world == 2 and m <= 2048 and tile != "256x128":
                named[f"{form} pair {tile}"] = (form, widened(tile, "pair"))
            if m > 256:
                named[f"{form} reduce {tile}"] = (form, widened(tile, "reduce"))
    if m > 512:
        named |= {form: (form, None) for form in ("fp8", "fp8_block", *codes)}
        named |= {f"{form} local": (form, None, "local") for form in ("fp8", "fp8_block", "int4")}
    return named


def run(team: Team, args: argparse.Namespace) -> None:
    begin, rows = time.monotonic(), []
    ctx = iris.iris(heap_size=3 << 30)
    weights = {}
    for name in FORMATS:
        weight, exact = weight_of(name, N, K, 1 + team.rank)
        copies = [weight] + [tuple(None if t is None else t.clone() for t in weight) for _ in range(3)]
        weights[name] = copies, exact

    def multiply(out, x, name, config, how, i):
        weight, scale = weights[name][0][i % 4]
        if how == "gated":
            skinny_matmul.skinny_matmul(x, weight, None, scale, GATE.name, launch=skinny_matmul.Launch(out=out))
        elif how == "local" and scale is None:
            torch.mm(x, weight.t(), out=out)
        elif how == "local" and config is not None:
            many_rows.multiply(out, x, weight, scale, None, config)
        elif how == "local":
            function(format_of(weight.t(), scale).product)(x, weight, scale, None, out)
        else:
            ctx.ops.matmul_all_reduce(out, x, weight.t(), scale=scale, config=config)

    cases = []
    for m in (16, 64, 512, 2048, 128, 8192, 256, 40):
        draw = torch.Generator("cuda").manual_seed(m + team.rank)
        x = torch.randn(m, K, device="cuda", generator=draw).bfloat16()
        out = ctx.empty(m, N, dtype=x.dtype)
        for label, (name, *more) in variants(m, team.world).items():
            config, how = [*more, None, None][:2]
            alone = {"gated": N // 2, "local": N}
            to = torch.empty(m, alone[how], dtype=x.dtype, device=x.device) if how in alone else out
            cases.append((m, label, name, to, x, partial(multiply, to, x, name, config, how)))
    count, reason = team.attempt(lambda: compile_ahead(team, [ctx], lambda: [call(0) for *_, call in cases]))
    team.say(f"{count} kernels compiled after {time.monotonic() - begin:.0f} s{reason and f', but {reason}'}")
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
            us, reason = team.attempt(lambda call=call: graph_us(call))
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
