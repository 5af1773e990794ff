"""Measure how much the planner's choice loses to the best way: `python -m benchmarks.regret --ranks 2 --shapes 40`.

Shapes are drawn at random: rows log-uniform in each of four classes, widths of models' layers and any others. For each
shape every way that accepts it is measured, by the configuration that the planner prefers for it, or by several with
`--each`, and torch's product alone. All of them are checked against float64 before they are timed, in turns, as CUDA
graphs. Kernels are compiled in the background, in the order of the shapes, while earlier shapes are measured.

A shape's regret is the time of the planner's choice over that of the fastest way measured. Prints regrets by op and
rows and writes `regret_<gpu>_x<ranks>.json` after every shape. `--other-rates FILE` judges the choices by another
table of rates, too, such as one that `iris-tp calibrate` wrote; its choices are measured in the same run.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
import math
import os
from pathlib import Path
import random
import sys
import time

from iris.machines import Machine, machine_of
from iris.planning import Candidate, compare_ways
from iris.rates import ENV_RATES
from iris_ops.planning.plan import WAYS, way_for
from iris_ops.problem import Problem, Request, requested_problem
from iris_tp.bench import separate
from iris_tp.bench.compare import compare
from iris_tp.bench.inputs import Inputs
from iris_tp.bench.rows import CALLS, Row
from iris_tp.bench.team import Team, launch
from iris_tp.bench.timing import INTERPRETED, Budget
import torch

from benchmarks.measuring import models, report
from benchmarks.measuring.ahead import Ahead
from benchmarks.rivals.everyone import Heap
from benchmarks.tables import regret_table

OPS = ("ar", "rs", "ag", "ga")
CLASSES = ((1, 64), (65, 256), (257, 2000), (2001, 8192))
"""Rows from and to: few to many."""
_TURNS = 1, 2, 0, 1, 2, 3
"""The classes in turn: 65 to 2000 rows, where ways differ most, are drawn twice as often as others."""
_WIDTHS = 256, 16384
_HIDDEN = 2880  # of gpt-oss, which no power of two divides far
_MOST_FLOPS, _MOST_ELEMENTS = 1.5e12, 1 << 27
_LONGEST = 2.0
_TINY = 48  # rows and columns at most, in the interpreter
PRODUCT = "product alone"
_SHORT = Budget(longest_ms=6.0, measure_ms=8.0, calls=(3, 60), repeats=(5, 5))


class Exact(Inputs):
    """Inputs whose results are compared with float64."""

    @property
    def reference(self) -> torch.dtype:
        return torch.float64


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--ops", type=report.some_of(OPS), default=list(OPS), help="some of ar,rs,ag,ga")
    parser.add_argument("--shapes", type=report.at_least(1), default=40, help="how many, over all ops (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="of the shapes (default 0)")
    parser.add_argument("--each", type=report.at_least(1), default=1, help="configurations a way (default 1)")
    parser.add_argument(
        "--budget-s", dest="time_limit", type=report.at_least(1), help="as --time-limit, from the start; default 90"
    )
    parser.add_argument("--without", type=lambda text: text.split(","), default=[], help="kernels not to measure")
    parser.add_argument("--other-rates", type=Path, help="another table of rates, whose choices are measured, too")
    parser.set_defaults(time_limit=90)
    args = parser.parse_args(argv)
    report.settle(args, argv, "regret")
    args.shapes, args.each, args.began = int(args.shapes), int(args.each), time.monotonic()
    return args


def draw(count: int, seed: int, world: int, ops: list[str], tiny: bool = False) -> list[Row]:
    """Return `count` random shapes, ops and classes of rows taking turns; the same for the same arguments."""
    rng, rows = random.Random(seed), []
    while len(rows) < count:
        number = len(rows)
        op = ops[number % len(ops)]
        least, most = (1, _TINY) if tiny else CLASSES[_TURNS[number // len(ops) % len(_TURNS)]]
        row = _drawn(rng, op, least, most, world, tiny)
        M, N, K = row.gemm(world)
        small_enough = M * N * K * 2 <= _MOST_FLOPS and max(row.M * row.N, row.M * row.K) <= _MOST_ELEMENTS
        if small_enough and row not in rows:
            rows.append(row)
    return rows


def _drawn(rng: random.Random, op: str, least: int, most: int, world: int, tiny: bool) -> Row:
    form = rng.choice(
        {"ar": ("rows",), "rs": ("rows", "rows", "cols"), "ag": ("rows", "rows", "k")}.get(op, ("cols", "rows"))
    )
    M = _log_uniform(rng, least, most)
    if M > 16 and rng.random() < 0.5:
        M = min(most, max(least, round(M / 16) * 16))
    if tiny or rng.random() < 0.5:
        low, high = (16, _TINY) if tiny else _WIDTHS
        multiple = 8 if tiny else rng.choice((8, 64, 128))
        N, K = (max(multiple, round(_log_uniform(rng, low, high) / multiple) * multiple) for _ in range(2))
    else:
        model = rng.choice(models.PREFILL)
        pairs = model.column_linears(world) or model.row_linears(world)
        N, K = rng.choice(model.row_linears(world) if op in ("ar", "rs") else pairs)
        if rng.random() < 0.15:
            N, K = (_HIDDEN, K) if op in ("ar", "rs") else (N, _HIDDEN)
    whole = 8 * world
    if form == "cols":
        N = max(whole, N // whole * whole)
    if form == "k":
        K = max(whole, K // whole * whole)
    return Row(op, M, N, K, form)


def _log_uniform(rng: random.Random, least: int, most: int) -> int:
    return min(most, int(math.exp(rng.uniform(math.log(least), math.log(most + 1)))))


def problem_of(row: Row, world: int, dtype: torch.dtype) -> Problem:
    form = None if row.op == "ar" else row.form
    return requested_problem(Request(CALLS[row.op], row.M, row.N, row.K, world, dtype, form))


@dataclass(frozen=True)
class Selection:
    """Which candidates are measured: of each way and algorithm the first `each` by each machine's rates.

    A way that should take more than `_LONGEST` times the fastest one's time is left out, and so are the kernels
    `without`.
    """

    machines: dict[str, Machine]
    each: int
    without: Sequence[str] = ()

    def compared(self, problem: Problem, machine: Machine) -> list[Candidate]:
        """Return what the planner compares, the best first."""
        candidates = compare_ways(WAYS, problem, machine).candidates
        return [candidate for candidate in candidates if candidate.config.kernel not in self.without]

    def chosen(self, problem: Problem) -> dict[str, Candidate]:
        """Return the planner's choice by each machine's rates."""
        return {by: self.compared(problem, machine)[0] for by, machine in self.machines.items()}


def ways_of(problem: Problem, selection: Selection) -> dict[str, Candidate]:
    """Return by its name each candidate to measure."""
    candidates_by_name: dict[str, Candidate] = {}
    for machine in selection.machines.values():
        counts: dict[tuple[str, str], int] = {}
        candidates = selection.compared(problem, machine)
        longest_us = _LONGEST * min(candidate.times.total_us for candidate in candidates)
        for candidate in candidates:
            key = candidate.config.kernel, candidate.config.algorithm
            counts[key] = counts.get(key, 0) + 1
            near = counts[key] <= selection.each and candidate.times.total_us <= longest_us
            if near and way_for(problem, candidate.config) is candidate.way:
                candidates_by_name.setdefault(_name_of(problem, candidate), candidate)
    return candidates_by_name


def _name_of(problem: Problem, candidate: Candidate) -> str:
    """Return the label of a candidate with the fields that labels leave out."""
    config = candidate.config
    more = f", {config.num_stages} stages, {config.num_programs or 'all'} programs, {config.stagger_us} us"
    return candidate.label(problem) + more


def run_row(row: Row, team: Team, heap: Heap, selection: Selection, dtype: torch.dtype) -> dict:
    problem = problem_of(row, team.world, dtype)
    inputs, reason = team.attempt(lambda: Exact(row, team, dtype))
    if reason:
        raise RuntimeError(f"{row}: no inputs: {reason}")
    ways = ways_of(problem, selection)
    calls = {name: _call(heap, inputs, candidate) for name, candidate in ways.items()}
    timed = compare(
        team, {PRODUCT: separate.product(inputs), **calls},
        lambda name, call: _checked(inputs, call, name == PRODUCT), inputs.copies, _SHORT if team.cuda else INTERPRETED,
    )  # fmt: skip
    key, results = "graph_us" if team.cuda else "eager_us", []
    for name, candidate in ways.items():
        times = candidate.times
        result = {"name": name, "kind": "ours", "status": "ok", "predicted_us": times.total_us, "notes": []}
        result["parts"] = {"product": times.gemm_us, "link": times.link_us, "compared": candidate.compared_us}
        result["plan"] = {k: v for k, v in asdict(candidate.config).items() if k not in ("reasons", "prediction")}
        if name in timed["us"]:
            result |= {"error": timed["errors"][name], key: timed["us"][name]}
        if name in timed["failed"]:
            report.drop(
                result, "WRONG" if "times the allowed" in timed["failed"][name] else "n/a", timed["failed"][name]
            )
        results.append(result)
    us = {result["name"]: result[key] for result in results if key in result}
    choices = selection.chosen(problem)
    chosen = {by: _name_of(problem, candidate) for by, candidate in choices.items()}
    judged = {by: us[name] / min(us.values()) for by, name in chosen.items() if name in us}
    predicted = {by: choices[by].times.total_us / us[name] for by, name in chosen.items() if name in us}
    fields = {name: value for name, value in asdict(row).items() if (name, value) != ("form", "rows")}
    alone = {"product_us": timed["us"].get(PRODUCT), "floor_us": None}
    if product_us := alone["product_us"]:
        alone["floor_us"] = row.floor_us(product_us, team.world, dtype.itemsize)
    return {**fields, **alone, "chosen": chosen, "regret": judged, "predicted": predicted, "results": results}


def make_calls(team: Team, heap: Heap, row: Row, selection: Selection, dtype: torch.dtype) -> None:
    """Call every way of a shape once, on tensors without values: while forms are recorded, which launches no kernel."""
    A, W = (
        torch.empty(shape, dtype=dtype, device=team.device)
        for shape in (row.a_shape(team.rank, team.world), row.w_shape(team.world))
    )
    out, op = heap.out(*row.out_shape(team.rank, team.world)), getattr(heap.ctx.ops, CALLS[row.op])
    for candidate in ways_of(problem_of(row, team.world, dtype), selection).values():
        op(out, A, W.t(), config=candidate.config)


def _call(heap: Heap, inputs: Inputs, candidate: Candidate) -> Callable[[int], torch.Tensor]:
    out, op = heap.out(*inputs.out_shape), getattr(heap.ctx.ops, CALLS[inputs.row.op])

    def call(i: int) -> torch.Tensor:
        op(out, inputs.A[i], inputs.B[i], config=candidate.config)
        return out

    return call


def _checked(inputs: Inputs, call: Callable[[int], torch.Tensor], alone: bool) -> float:
    if (error := inputs.check(call, alone)) > 1:
        raise ArithmeticError(f"wrong result: {error:.3g} times the allowed error")
    return error


def machines_of(device: torch.device, other_rates: Path | None) -> dict[str, Machine]:
    """Return the rates by which plans are made here and, with a table `other_rates`, those of that table."""
    machines = {"plan": machine_of(device)}
    if other_rates:
        before = os.environ.get(ENV_RATES)
        os.environ[ENV_RATES] = str(other_rates)
        try:
            machines["other"] = machine_of.__wrapped__(device)
        finally:
            os.environ.pop(ENV_RATES)
            os.environ.update({} if before is None else {ENV_RATES: before})
    return machines


def run(team: Team, args: argparse.Namespace) -> None:
    dtype = getattr(torch, args.dtype)
    rows = draw(args.shapes, args.seed, team.world, args.ops, tiny=not team.cuda)
    heap = Heap(team, rows, dtype, int(args.heap_gib * 2**30))
    selection = Selection(machines_of(team.device, args.other_rates), args.each, args.without)
    rates = {by: _published(machine.source) for by, machine in selection.machines.items()}
    measured = {**report.describe_run(team, args), "rates": rates, "drawn": len(rows), "rows": []}

    def elapsed() -> float:
        return team.slowest([time.monotonic() - args.began])[0]

    compiling = None
    if team.cuda:
        cases = [partial(make_calls, team, heap, row, selection, dtype) for row in rows]
        compiling, reason = team.attempt(partial(Ahead, team, [heap.ctx], cases))
        count = compiling.count if compiling else f"none ahead: {reason};"
        team.say(f"[{elapsed():4.0f} s] to compile: {count} kernels of {len(rows)} shapes")
    for number, row in enumerate(rows):
        left = args.time_limit - elapsed()
        if left < 0 or compiling and not compiling.wait_for(number, left):
            team.say(f"stopped after {elapsed():.0f} s: {len(rows) - number} shapes left out")
            break
        result = run_row(row, team, heap, selection, dtype)
        measured["rows"].append(result)
        measured["left_out"] = [str(skipped) for skipped in rows[number + 1 :]]
        if team.rank == 0:
            report.write(measured, args)
        team.say(f"[{elapsed():4.0f} s] {number + 1}/{len(rows)} {row}: {regret_table.in_short(result)}")
    for error in compiling.compilers.errors if compiling else ():
        team.say(f"not compiled: {error}")
    team.say("\n" + regret_table.summary(report.rounded(measured)))
    team.say("\n" + regret_table.worst(report.rounded(measured)))
    heap.close()


def _published(source: str) -> str:
    """Return a source of rates without this machine's folders."""
    return source.partition(", /")[0]


def main() -> None:
    args = parse()
    sys.exit(launch(partial(run), args, limit_s=args.time_limit + 120))


if __name__ == "__main__":
    main()
