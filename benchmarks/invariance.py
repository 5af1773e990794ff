"""What the same bits at every number of rows are worth: `python -m benchmarks.invariance --ranks 2`.

Two halves, both with a context that promises them and one that promises nothing (`iris.iris(invariant=...)`):

    bits    of each product at ten numbers of rows, a few rows among others that are random or NaN, in other places,
            `out` on the heap or not: how many numbers differ from those of the first call
    times   the ops of a sample of rows, and layers' products without an exchange beside torch's, in CUDA graphs

Writes what was found, case by case, to a JSON file. Exits with 1 where a bit differs that must not. With `--model` it
asks the planner alone for what the promise should cost, over all rows of the benchmarks; that needs no GPU.
"""

import argparse
import json
import math
from pathlib import Path
import random
import sys
import time

import iris
from iris_ops.local import matmul
from iris_ops.planning.machine import machine_named
from iris_ops.planning.plan import plan
from iris_ops.problem import part_of, part_size, problem_asked
from iris_tp.bench.rows import CALLS, Row
from iris_tp.bench.team import Team, launch
from iris_tp.bench.timing import QUICK, graph_batch, interleave
import torch
from torch.nn import functional as F

from benchmarks import models, report, shapes

LEVELS = (None, "batch")
NUMBERS = (1, 3, 16, 17, 64, 100, 128, 200, 512, 1000)
PROBES = 4
# Of random products, N and K.
SIZES = {
    "cuda": (512, 1024, 2048, 2880, 3584, 4096, 5120, 6400, 7168, 8192, 9472),
    "cpu": (64, 80, 144, 256),
}
SETS = "facts,prefill,decode,between"
SAMPLE = "prefill-sample,decode-sample,between"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--seconds", type=report.at_least(1), default=80, help="for the bits of products")
    parser.add_argument("--time-seconds", type=report.at_least(0), default=60, help="for the times")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", metavar="GPU", help="what the planner expects, for a GPU by name; needs none")
    parser.add_argument("--table", type=Path, metavar="FILE", help="prints what a file holds, as rows of a table")
    args = parser.parse_args(argv)
    report.settle(args, argv, "invariance")
    return args


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / max(1, len(values)))


def asked(row: Row, world: int, dtype: torch.dtype, level: str | None):
    form = None if row.op == "ar" else row.form
    return problem_asked(CALLS[row.op], row.M, row.N, row.K, world, dtype, form, invariant=level)


def expected(gpu: str, world: int) -> list[dict]:
    """What the planner expects of each row, with the promise and without."""
    machine = machine_named(gpu, 132)
    found = []
    for row in shapes.select(SETS, list(CALLS), world):
        free, alike = (plan(asked(row, world, torch.bfloat16, level), machine, explained=False) for level in LEVELS)
        assert free.prediction is not None and alike.prediction is not None
        us = free.prediction.total_us, alike.prediction.total_us
        found.append(
            {"row": str(row), "op": row.op, "kernels": [free.kernel, alike.kernel], "us": us, "cost": us[1] / us[0]}
        )
    return found


def print_expected(gpu: str, world: int) -> None:
    found = expected(gpu, world)
    for op in CALLS:
        costs = [each["cost"] for each in found if each["op"] == op]
        print(f"{op}: {len(costs)} rows, {geometric_mean(costs):.4f} in the geometric mean, {max(costs):.3f} at most")
    costs = [each["cost"] for each in found]
    over = sum(cost > 1.05 for cost in costs)
    print(f"all: {len(costs)} rows, {geometric_mean(costs):.4f}, {max(costs):.3f} at most, {over} above 1.05")
    for each in sorted(found, key=lambda each: -each["cost"])[:10]:
        print(f"  {each['cost']:.3f}  {each['row']}  {' -> '.join(each['kernels'])}")


def print_table(found: dict) -> None:
    """The rows of `docs/concepts/determinism.md`: what was measured, and what the promise cost."""
    versions = ", ".join(
        f"{name} {version}" for name, version in found["versions"].items() if name in ("torch", "triton")
    )
    print(f"{found['world']} {found['gpu']}, {found['date']}, {versions}: {found['products']} products at")
    print(f"{len(found['numbers_of_rows'])} numbers of rows each, numbers that differ: {found['differing']}\n")
    print("| call | None, us | batch, us | cost |\n|---|---:|---:|---:|")
    for each in found.get("times", []):
        free, alike = float(each["us"]["None"]), float(each["us"]["batch"])
        print(f"| {each['row']} | {free:.1f} | {alike:.1f} | {alike / free:.3f} |")


class Product:
    """One product: probe rows, and what they are multiplied by, of this rank."""

    def __init__(self, team: Team, ctx: iris.Iris, row: Row, dtype: torch.dtype, bias: bool, seed: int) -> None:
        self.team, self.ctx, self.row, self.dtype = team, ctx, row, dtype
        reduces = row.op in ("ar", "rs")
        self.random = torch.Generator(team.device).manual_seed(seed + (team.rank if reduces else 0))
        columns = part_of(row.N, team.world, team.rank) if (row.op, row.form) == ("ga", "cols") else row.N
        self.x = self.drawn(PROBES, row.K)
        alike = (row.op, row.form) == ("ga", "rows")  # a row may be any rank's
        weights = torch.Generator(team.device).manual_seed(seed + 1 + (0 if alike else team.rank))
        self.B = torch.randn(columns, row.K, generator=weights, device=team.device).to(dtype).t()
        shared = torch.Generator(team.device).manual_seed(seed + 2)
        self.bias = torch.randn(columns, generator=shared, device=team.device).to(dtype) if bias else None
        self.first: torch.Tensor | None = None  # the probes' rows of the result, NaN where another rank has them
        self.differing = torch.zeros(1, dtype=torch.int64, device=team.device)

    def drawn(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.random, device=self.team.device).to(self.dtype)

    def call(self, M: int, rng: random.Random) -> None:
        """The probes among M rows: counts numbers that differ from those of the first call."""
        row, world, rank = self.row, self.team.world, self.team.rank
        places = [rng.randrange(M) for _ in range(PROBES)]
        nan, on_heap = rng.random() < 0.5, rng.random() < 0.5
        A = torch.full((M, row.K), math.nan, dtype=self.dtype, device=self.team.device) if nan else self.drawn(M, row.K)
        probes = dict(zip(places, range(PROBES), strict=True))  # of two in one place the last
        A[[*probes]] = self.x[[*probes.values()]]
        begin, size = rank * part_size(M, world), part_of(M, world, rank)
        if row.op in ("ag", "ga") and row.form == "rows":
            A = A[begin : begin + size]
        elif row.form == "k":
            k = rank * part_size(row.K, world)
            A = A[:, k : k + part_of(row.K, world, rank)].contiguous()
        rows, columns = M, row.N
        if row.op == "rs":
            rows, columns = (part_size(M, world), row.N) if row.form == "rows" else (M, part_size(row.N, world))
        out = (self.ctx if on_heap else torch).empty(rows, columns, dtype=self.dtype, device=self.team.device)
        if row.op == "rs":
            out = out[:size] if row.form == "rows" else out[:, : part_of(row.N, world, rank)]
        out.fill_(math.nan)
        getattr(self.ctx.ops, CALLS[row.op])(out, A, self.B, self.bias)
        here = begin if (row.op, row.form) == ("rs", "rows") else 0
        for place, number in probes.items():
            if here <= place < here + out.shape[0]:
                self.compare(number, out[place - here])

    def compare(self, number: int, found: torch.Tensor) -> None:
        if self.first is None:
            self.first = torch.full((PROBES, found.shape[0]), math.nan, dtype=self.dtype, device=self.team.device)
        known = ~self.first[number].isnan().any()
        unlike = found.view(torch.int16 if found.element_size() == 2 else torch.int32) != self.first[number].view(
            torch.int16 if found.element_size() == 2 else torch.int32
        )
        self.differing += torch.where(known, unlike.sum(), found.isnan().sum())
        self.first[number] = torch.where(known, self.first[number], found)


def random_row(rng: random.Random, world: int, sizes: tuple[int, ...]) -> Row:
    op, form = rng.choice([("ar", "rows"), ("ar", "rows"), ("rs", "rows"), ("rs", "cols"), ("ag", "rows"), ("ag", "k"),
                           ("ga", "rows"), ("ga", "cols")])  # fmt: skip
    N, K = (rng.choice(sizes) for _ in range(2))
    return Row(op, 0, N // world * world, K // world * world, form)


def differing_bits(team: Team, args: argparse.Namespace, contexts: dict) -> list[dict]:
    """Case by case, as many as there is time for: first the layers of models, then random sizes."""
    known = {(row.op, row.N, row.K, row.form) for row in shapes.select("prefill,decode", list(CALLS), team.world)}
    rng = random.Random(args.seed)
    layers = sorted(known)
    rng.shuffle(layers)
    rows = [Row(op, 0, N, K, form) for op, N, K, form in layers if team.cuda]
    rows = [row for row in rows if row.serves(team.world)]
    found: list[dict] = []
    begin, number = time.monotonic(), 0
    while team.slowest([time.monotonic() - begin])[0] < args.seconds:
        row = rows[number] if number < len(rows) else random_row(rng, team.world, SIZES[team.device.type])
        dtype = torch.bfloat16 if rng.random() < 0.7 else torch.float16
        bias, seed = rng.random() < 0.3, rng.randrange(1 << 30)
        counted = {}
        for level, ctx in contexts.items():
            product, places = Product(team, ctx, row, dtype, bias, seed), random.Random(seed)
            _, reason = team.attempt(lambda p=product, r=places: [p.call(M, r) for M in NUMBERS])
            if reason:
                raise RuntimeError(f"{row}, invariant={level!r}: {reason}")
            counted[str(level)] = int(team.slowest([float(product.differing)])[0])
        found.append({"row": str(row), "dtype": str(dtype), "bias": bias, "rows": NUMBERS, "differing": counted})
        number += 1
        if number % 10 == 0:
            team.say(f"[{time.monotonic() - begin:4.0f} s] {number} products, {total(found)} numbers differ")
    return found


def total(found: list[dict]) -> dict[str, int]:
    return {str(level): sum(each["differing"][str(level)] for each in found) for level in LEVELS}


def timed(team: Team, args: argparse.Namespace, contexts: dict) -> list[dict]:
    """Microseconds of each op in a graph: with the promise and without."""
    rows = [row for row in shapes.select(SAMPLE, list(CALLS), team.world) if row.serves(team.world) and row.M <= 4096]
    machine = machine_named(torch.cuda.get_device_name(), 132) if team.cuda else machine_named("interpreter", 1)
    other = [plan(asked(row, team.world, torch.bfloat16, level), machine, False) for row in rows for level in LEVELS]
    differ = [a.prediction.total_us < b.prediction.total_us for a, b in zip(other[::2], other[1::2], strict=True)]  # type: ignore[union-attr]
    rows = [row for row, unlike in zip(rows, differ, strict=True) if unlike][:24] + rows[:8]
    found = []
    begin = time.monotonic()
    for row in dict.fromkeys(rows):
        if team.slowest([time.monotonic() - begin])[0] > 0.6 * args.time_seconds:
            break
        batches = {}
        for level, ctx in contexts.items():
            call = op_call(team, ctx, row)
            batches[str(level)] = (call, 2)
        found.append({"row": str(row), "us": times_of(team, batches)})
    for N, K in column_shapes(team.world):
        own = contexts["batch"]
        for M in (1, 16, 64, 128, 256, 512, 2048):
            if team.slowest([time.monotonic() - begin])[0] > args.time_seconds:
                return found
            x = torch.randn(M, K, device=team.device).to(torch.bfloat16)
            weights = [
                torch.randn(N, K, device=team.device).to(torch.bfloat16) for _ in range(max(2, (1 << 27) // (N * K)))
            ]
            batches = {
                "None": (lambda i, x=x, w=weights: F.linear(x, w[i]), len(weights)),
                "batch": (lambda i, x=x, w=weights, ctx=own: matmul.linear(ctx, x, w[i], None), len(weights)),
            }
            found.append({"row": f"linear {M}, {N}, {K}", "us": times_of(team, batches)})
    return found


def column_shapes(world: int) -> list[tuple[int, int]]:
    return [(N, K) for model in (models.LLAMA_8B, models.LLAMA_70B) for N, K in model.column_linears(world)]


def op_call(team: Team, ctx: iris.Iris, row: Row):
    """A call of `ctx.ops` on one of two inputs."""
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
    heap = int(args.heap_gib * 2**30)
    contexts = {level: iris.iris(heap, invariant=level) for level in LEVELS}
    written = report.describe_run(team, args)
    bits = differing_bits(team, args, contexts)
    written |= {"bits": bits, "differing": total(bits), "products": len(bits), "numbers_of_rows": NUMBERS}
    if team.rank == 0:
        report.write(written, args)
    if team.cuda and args.time_seconds:
        times = timed(team, args, contexts)
        costs = [each["us"]["batch"] / each["us"]["None"] for each in times]
        written |= {"times": times, "cost": geometric_mean(costs) if costs else None, "worst": max(costs, default=None)}
        if team.rank == 0:
            report.write(written, args)
    team.say(f"{len(bits)} products at {len(NUMBERS)} numbers of rows each: {total(bits)} numbers differ")
    if "cost" in written:
        team.say(f"cost {written['cost']:.4f} in the geometric mean, {written['worst']:.3f} at most")
    for ctx in contexts.values():
        ctx.close()
    if total(bits)["batch"]:
        sys.exit(1)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.table:
        print_table(json.loads(args.table.read_text()))
        return 0
    if args.model:
        print_expected(args.model, args.ranks)
        return 0
    return launch(run, args, limit_s=args.seconds + args.time_seconds + 60)


if __name__ == "__main__":
    sys.exit(main())
