"""What the same bits at every number of rows are worth: `python -m benchmarks.invariance --ranks 2`.

Two halves, both with a context that promises them and one that promises nothing (`iris.iris(invariant=...)`):

    bits    of each product at ten numbers of rows, a few rows among others that are random or NaN, in other places,
            `out` on the heap or not: how many numbers differ from those of the first call (`invariance_case.py`)
    times   the ops of a sample of rows, and layers' products without an exchange against torch's, in CUDA graphs

Writes the results, case by case, to a JSON file. Exits with 1 where a bit differs that must not.
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import islice
import random
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
from torch import distributed
from torch.nn import functional as F

from benchmarks.cases.invariance_case import Case, describe_random, product_of, random_case
from benchmarks.measuring import models, report, shapes
from benchmarks.measuring.ahead import compile_ahead
from benchmarks.measuring.tables import geometric_mean

LEVELS = (None, "batch")
NUMBERS = (1, 3, 16, 17, 64, 100, 128, 200, 512, 1000)
# Of which each random product has ten.
ANY = {
    "cuda": (1, 2, 3, 8, 15, 16, 17, 33, 64, 65, 100, 128, 129, 200, 300, 512, 777, 1000),
    "cpu": (1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 40, 64, 65),
}
BATCH = {"cuda": 50, "cpu": 1}  # products for which the host waits at once
SAMPLE = "prefill-sample,decode-sample,between"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--seconds", type=report.at_least(1), default=80, help="for the bits of products")
    parser.add_argument("--time-seconds", type=report.at_least(0), default=60, help="for the times")
    parser.add_argument("--products", type=report.at_least(1), default=1 << 30, help="at most; default: any number")
    parser.add_argument("--beside", type=report.at_least(0), default=12, help="of which so many with nothing promised")
    parser.add_argument(
        "--random", action="store_true", help="random sizes from the first on, at random numbers of rows"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    report.settle(args, argv, "invariance_random" if args.random else "invariance", module="invariance")
    return args


def drawn(args: argparse.Namespace, team: Team) -> Iterator[Case]:
    """Yield one product after the other: first the layers of models."""
    known = {(row.op, row.N, row.K, row.form) for row in shapes.select("prefill,decode", list(CALLS), team.world)}
    rng = random.Random(args.seed)
    layers = sorted(known) if team.cuda and not args.random else []
    rng.shuffle(layers)
    for op, N, K, form in layers:
        if Row(op, 0, N, K, form).supports(team.world):
            dtype = torch.bfloat16 if rng.random() < 0.7 else torch.float16
            form = "" if op == "ar" else form
            yield Case(CALLS[op], form, N, K, dtype, rng.random() < 0.3, rng.randrange(1 << 30), NUMBERS)
    while True:
        yield random_case(rng, team.world, team.device.type, ANY[team.device.type] if args.random else NUMBERS)


def differing_bits(team: Team, args: argparse.Namespace, contexts: dict, record: dict, write: Callable) -> None:
    """Compare `args.products` products, or as many as there is time for, and count them in `record`.

    The first of them are computed with nothing promised, too, so that it is seen that the comparison finds something.
    The kernels of all random products are compiled before the first.
    """
    begin, done = time.monotonic(), record["products"]
    products = islice(drawn(args, team), done, args.products)
    if args.random and team.cuda:
        cases = list(products)

        def calls() -> None:
            for number in range(0, len(cases), BATCH["cuda"]):
                results(team, contexts, cases[number : number + BATCH["cuda"]], args.beside - done - number)
                if number % 500 == 0:
                    team.say(f"[{time.monotonic() - begin:4.0f} s] {number} products planned")

        record["kernels"] = compile_ahead(team, contexts.values(), calls)
        record["compiled_s"] = round(time.monotonic() - begin, 1)
        team.say(f"[{time.monotonic() - begin:4.0f} s] {record['kernels']} kernels compiled")
        products, begin = iter(cases), time.monotonic()
    while some := list(islice(products, BATCH[team.device.type])):
        count_differing(team, contexts, some, args.beside - record["products"], record)
        team.say(f"[{time.monotonic() - begin:4.0f} s] {record['products']} products, differ: {record['differing']}")
        write()
        if team.slowest([time.monotonic() - begin])[0] > args.seconds:
            break
    record["compared_s"] = round(time.monotonic() - begin, 1)


def results(team: Team, contexts: dict, cases: list[Case], unpromised: int) -> list[tuple[str, Case, torch.Tensor]]:
    """Compute cases with the promise, the first `unpromised` also without: (level, case, differences on the device)."""
    lent: dict[str | None, list[torch.Tensor]] = {level: [] for level in contexts}

    def compute() -> list[tuple[str, Case, torch.Tensor]]:
        outcomes = []
        for number, case in enumerate(cases):
            for level, ctx in contexts.items():
                if level or number < unpromised:
                    product = product_of(team, ctx, case)
                    product.run()
                    lent[level] += product.lent
                    outcomes.append((str(level), case, product.differing))
        return outcomes

    outcomes, reason = team.attempt(compute)
    if outcomes is None:
        raise RuntimeError(f"among {'; '.join(map(str, cases))}: {reason}")
    for level, ctx in contexts.items():  # all ranks are here
        ctx.free(*lent[level])
    return outcomes


def count_differing(team: Team, contexts: dict, cases: list[Case], unpromised: int, record: dict) -> None:
    """Compute some cases and count them in `record`. The host waits once for all of them."""
    every = results(team, contexts, cases, unpromised)
    counts = torch.stack([differing for *_, differing in every])
    distributed.all_reduce(counts, op=distributed.ReduceOp.MAX)
    for (level, case, _), differing in zip(every, counts.tolist(), strict=True):
        record["differing"][level] += sum(differing)
        if any(differing):
            rows = {str(M): count for M, count in zip(case.numbers, differing, strict=True) if count}
            record["bits"].append({"case": str(case), "level": level, "first": case.numbers[0], "differing": rows})
    for case in cases:
        record["counted"][case.kind] = record["counted"].get(case.kind, 0) + 1
    record["products"] += len(cases)
    record["beside"] += max(0, min(len(cases), unpromised))


def problem(row: Row, world: int, dtype: torch.dtype, level: str | None) -> Problem:
    form = None if row.op == "ar" else row.form
    return requested_problem(Request(CALLS[row.op], row.M, row.N, row.K, world, dtype, form, invariant=level))


def timed(team: Team, args: argparse.Namespace, contexts: dict) -> list[dict]:
    """Return microseconds of each op in a graph: with the promise and without."""
    rows = [row for row in shapes.select(SAMPLE, list(CALLS), team.world) if row.supports(team.world) and row.M <= 4096]
    machine = machine_named(torch.cuda.get_device_name(), 132) if team.cuda else machine_named("interpreter", 1)
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
    heap = int(args.heap_gib * 2**30)
    contexts = {level: iris.iris(heap, invariant=level) for level in LEVELS}
    written = report.describe_run(team, args)
    written |= {"products": 0, "beside": 0, "differing": dict.fromkeys(map(str, LEVELS), 0), "counted": {}, "bits": []}
    written["numbers_of_rows"] = ANY[team.device.type] if args.random else NUMBERS
    written["drawn"] = describe_random(team.world, team.device.type, args.random)

    def write() -> None:
        if team.rank == 0:
            report.write(written, args)

    differing_bits(team, args, contexts, written, write)
    write()
    if team.cuda and args.time_seconds:
        times = timed(team, args, contexts)
        costs = [each["us"]["batch"] / each["us"]["None"] for each in times]
        written |= {"times": times, "cost": geometric_mean(costs) if costs else None, "worst": max(costs, default=None)}
        write()
    differing = written["differing"]
    team.say(
        f"{written['products']} products at {len(NUMBERS)} numbers of rows each: {differing['batch']} numbers differ;"
        f" of the first {written['beside']} with nothing promised {differing['None']}"
    )
    if "cost" in written:
        team.say(f"cost {written['cost']:.4f} in the geometric mean, {written['worst']:.3f} at most")
    for ctx in contexts.values():
        ctx.close()
    if written["differing"]["batch"]:
        sys.exit(1)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return launch(run, args, limit_s=args.seconds + args.time_seconds + 120)


if __name__ == "__main__":
    sys.exit(main())
