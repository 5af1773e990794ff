"""Measure the cost of equal bits at every number of rows: `python -m benchmarks.invariance --ranks 2`.

The ops of a sample of rows, by a context that promises them and by one that promises nothing
(`iris.iris(invariant=...)`), and layers' products without an exchange against torch's, in CUDA graphs. Tests compare
the bits (`tests/iris_ops/test_invariance.py`).
"""

import argparse
import sys
import time

import iris
from iris.machines import machine_named
from iris_ops.local import matmul
from iris_ops.planning.plan import plan
from iris_ops.problem import Problem, Request, part_of, requested_problem
from iris_tp.bench.rows import CALLS, Row
from iris_tp.bench.team import Team, launch
from iris_tp.bench.timing import QUICK, graph_batch, interleave
import torch
from torch.nn import functional as F

from benchmarks.measuring import models, report, shapes
from benchmarks.measuring.tables import geometric_mean

LEVELS = (None, "batch")
SAMPLE = "prefill-sample,decode-sample,between"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--time-seconds", type=report.at_least(0), default=60, help="for all rows together")
    args = parser.parse_args(argv)
    report.settle(args, argv, "invariance")
    if args.device == "cpu":
        parser.error("--device cpu: expected GPUs, for times are those of CUDA graphs")
    return args


def problem(row: Row, world: int, dtype: torch.dtype, level: str | None) -> Problem:
    form = None if row.op == "ar" else row.form
    return requested_problem(Request(CALLS[row.op], row.M, row.N, row.K, world, dtype, form, invariant=level))


def timed(team: Team, args: argparse.Namespace, contexts: dict) -> list[dict]:
    """Return microseconds of each op in a graph: with the promise and without."""
    rows = [row for row in shapes.select(SAMPLE, list(CALLS), team.world) if row.supports(team.world) and row.M <= 4096]
    machine = machine_named(torch.cuda.get_device_name(), 132)
    other = [plan(problem(row, team.world, torch.bfloat16, level), machine, False) for row in rows for level in LEVELS]
    differ = [a.prediction.total_us < b.prediction.total_us for a, b in zip(other[::2], other[1::2], strict=True)]  # type: ignore[union-attr]
    rows = [row for row, unlike in zip(rows, differ, strict=True) if unlike][:24] + rows[:8]
    measurements = []
    begin = time.monotonic()
    for row in dict.fromkeys(rows):
        if team.slowest([time.monotonic() - begin])[0] > 0.6 * args.time_seconds:
            break
        batches = {}
        for level, ctx in contexts.items():
            call = op_call(team, ctx, row)
            batches[str(level)] = (call, 2)
        measurements.append({"row": str(row), "us": times_of(team, batches)})
    for N, K in column_shapes(team.world):
        own = contexts["batch"]
        for M in (1, 16, 64, 128, 256, 512, 2048):
            if team.slowest([time.monotonic() - begin])[0] > args.time_seconds:
                return measurements
            x = torch.randn(M, K, device=team.device).to(torch.bfloat16)
            weights = [
                torch.randn(N, K, device=team.device).to(torch.bfloat16) for _ in range(max(2, (1 << 27) // (N * K)))
            ]
            batches = {
                "None": (lambda i, x=x, w=weights: F.linear(x, w[i]), len(weights)),
                "batch": (lambda i, x=x, w=weights, ctx=own: matmul.linear(ctx, x, w[i], None), len(weights)),
            }
            measurements.append({"row": f"linear {M}, {N}, {K}", "us": times_of(team, batches)})
    return measurements


def column_shapes(world: int) -> list[tuple[int, int]]:
    return [(N, K) for model in (models.LLAMA_8B, models.LLAMA_70B) for N, K in model.column_linears(world)]


def op_call(team: Team, ctx: iris.Iris, row: Row):
    """Return a call of `ctx.ops` on one of two inputs."""
    a, w = row.a_shape(team.rank, team.world), row.w_shape(team.world)
    As, Ws = ([torch.randn(*s, device=team.device).to(torch.bfloat16) for _ in range(2)] for s in (a, w))
    rows, columns = row.M, row.N
    if row.op == "rs":
        rows = part_of(row.M, team.world, team.rank) if row.form == "rows" else row.M
        columns = row.N // team.world if row.form == "cols" else row.N
    outs = [ctx.empty(rows, columns, dtype=torch.bfloat16) for _ in range(2)]

    def call(i: int) -> torch.Tensor:
        getattr(ctx.ops, CALLS[row.op])(outs[i], As[i], Ws[i].t())
        return outs[i]

    return call


def times_of(team: Team, calls: dict) -> dict[str, float]:
    batches = {}
    for name, (call, inputs) in calls.items():
        for i in [*range(inputs), *range(inputs)]:
            call(i)
        team.synchronize()
        batches[name] = graph_batch(call, -(-20 // inputs) * inputs, inputs)[0]
    timings, failed = interleave(team, batches, QUICK.repeats[0] + 2)
    if failed:
        raise RuntimeError(str(failed))
    return {name: timing.call_us for name, timing in timings.items()}


def run(team: Team, args: argparse.Namespace) -> None:
    contexts = {level: iris.iris(int(args.heap_gib * 2**30), invariant=level) for level in LEVELS}
    times = timed(team, args, contexts)
    costs = [each["us"]["batch"] / each["us"]["None"] for each in times]
    written = report.describe_run(team, args) | {"times": times, "cost": geometric_mean(costs), "worst": max(costs)}
    if team.rank == 0:
        report.write(written, args)
    team.say(f"cost {written['cost']:.4f} in the geometric mean, {written['worst']:.3f} at most")
    for ctx in contexts.values():
        ctx.close()


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return launch(run, args, limit_s=args.time_seconds + 120)


if __name__ == "__main__":
    sys.exit(main())
