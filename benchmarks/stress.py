"""Right under stress, too: `python -m benchmarks.stress --ranks 4 --calls 100000 --replays 10000`.

Calls of random ops and sizes follow each other without a pause, each on other data than the call before it of the
same shapes, while one rank after the other is held up for 0 to 10 ms, on its device or on its host. Every output is
compared bit by bit, on the device, with what the same input gave when nothing disturbed it; those results were
compared with the reference, and between ranks where all must hold the same. Then the same inside a CUDA graph: each
replay takes other data, and the ranks' graphs pause at different places.

The host waits for the device only at some twenty places, where rank 0 tells how far it is. Exits with 1 on a mismatch.
"""

import argparse
from collections.abc import Callable
import random
import sys
import time

import torch
import torch.distributed as dist

from benchmarks import report, rivals, shapes
from benchmarks.inputs import Inputs
from benchmarks.launch import Team, launch
from benchmarks.shapes import CALLS, Row

VARIANTS = 3  # inputs of each case; two calls in a row of the same shapes never have the same
PLACES = 2  # of each case in a graph: its calls take turns between them
LONGEST_DELAY_S = 0.010
PAUSE_S = 200e-6  # inside a graph, once on each rank
CYCLES_A_SECOND = 1.8e9
REPORTS = 20
TOLD = 8  # cases between two words about how far they are


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--calls", type=report.at_least(0), default=100_000, help="one by one")
    parser.add_argument("--replays", type=report.at_least(0), default=10_000, help="of a graph")
    parser.add_argument("--graph-calls", type=report.at_least(1), default=100, help="calls in the graph")
    parser.add_argument(
        "--delay-every", type=report.at_least(1), default=50, help="calls, or replays, between two delays"
    )
    parser.add_argument("--shapes", help="default: stress, on CPUs tiny,tiny-forms")
    parser.add_argument("--ops", type=report.some_of(shapes.CALLS), default="ar,rs,ag,ga")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    report.settle(args, argv, "stress")
    args.shapes = args.shapes or ("stress" if args.device == "cuda" else "tiny,tiny-forms")
    if not args.calls and not args.replays:
        parser.error("--calls and --replays are 0: expected one of them from 1 on")
    try:
        rows = shapes.select(args.shapes, args.ops, args.ranks)
    except ValueError as error:
        parser.error(str(error))
    if unserved := [str(row) for row in rows if not row.serves(args.ranks)]:
        parser.error(f"--shapes {args.shapes}: {args.ranks} ranks do not divide the columns of {unserved[0]}")
    return args


class Case:
    """One op on fixed shapes: several inputs, their undisturbed results, and how many calls deviated from them."""

    def __init__(self, row: Row, team: Team, dtype: torch.dtype, ctx) -> None:
        self.row, self.team = row, team
        self.inputs = Inputs(row, team, dtype, copies=VARIANTS)
        self.A, self.B = self.inputs.A, self.inputs.B
        self.out = ctx.empty(*self.inputs.out_shape, dtype=dtype)
        self.op = getattr(ctx.ops, CALLS[row.op])
        self.wrong = torch.zeros((), dtype=torch.int64, device=team.device)
        self.recorded = [self._undisturbed(i) for i in range(VARIANTS)]
        self.turn = 0

    def _undisturbed(self, i: int) -> torch.Tensor:
        results = []
        for _ in range(2):
            self.inputs.poison(self.out)
            self.op(self.out, self.A[i], self.B[i])
            self.team.synchronize()
            self.team.barrier()
            results.append(bits(self.out).clone())
        error = self.inputs.error(self.out, i)
        self.inputs._expected.clear()
        first = results[0].clone()
        if self.row.op in ("ar", "ga"):  # else each rank has an output of its own
            dist.broadcast(first.view(torch.uint8), src=0)
        differences = (not torch.equal(*results), not torch.equal(first, results[0]))
        # All ranks raise, or none: one alone would leave the others waiting.
        error, runs_differ, ranks_differ = self.team.slowest([error, *map(float, differences)])
        if error > 1:
            raise RuntimeError(f"{self.row}: wrong without any disturbance: {error:.3g} times the allowed error")
        if runs_differ or ranks_differ:
            raise RuntimeError(f"{self.row}: {'two undisturbed calls' if runs_differ else 'ranks'} differ")
        return results[0]

    def call(self) -> None:
        self.turn += 1
        i = self.turn % VARIANTS
        self.op(self.out, self.A[i], self.B[i])
        self.wrong += (bits(self.out) != self.recorded[i]).any()


class Placed:
    """A case inside a graph: its inputs lie at fixed places, which each replay fills with other data."""

    def __init__(self, case: Case) -> None:
        self.case, self.turn = case, 0
        self.stacks = [torch.stack(list(tensors)) for tensors in (case.A, case.inputs.W, case.recorded)]
        self.places = [[torch.empty_like(stack[0]) for stack in self.stacks] for _ in range(PLACES)]

    def refill(self, counter: torch.Tensor) -> None:
        for i, tensors in enumerate(self.places):
            index = (counter + i) % VARIANTS
            for tensor, stack in zip(tensors, self.stacks, strict=True):
                tensor.copy_(stack.index_select(0, index)[0])

    def call(self) -> None:
        case = self.case
        self.turn += 1
        A, W, recorded = self.places[self.turn % PLACES]
        case.op(case.out, A, W.t())
        case.wrong += (bits(case.out) != recorded).any()


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32 if values.element_size() == 4 else torch.int16)


class Delays:
    """Holds up one rank after the other, on its device or on its host; each rank draws the same numbers."""

    def __init__(self, team: Team, seed: int, every: int) -> None:
        self.team, self.every, self.drawn = team, every, random.Random(seed)
        self.number = 0

    def maybe(self, step: int) -> None:
        if step % self.every:
            return
        seconds, on_device = self.drawn.uniform(0, LONGEST_DELAY_S), self.drawn.random() < 0.5
        self.number += 1
        if self.number % self.team.world != self.team.rank:
            return
        if on_device and self.team.cuda:
            torch.cuda._sleep(int(seconds * CYCLES_A_SECOND))
        else:
            time.sleep(seconds)


def run(team: Team, args: argparse.Namespace) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    dtype = getattr(torch, args.dtype)
    rows = shapes.select(args.shapes, args.ops, team.world)
    heap = rivals.Heap(team, rows, dtype, int(args.heap_gib * 2**30))
    cases, reason = team.attempt(lambda: record(team, rows, dtype, heap.ctx))
    if reason:
        raise RuntimeError(reason)
    team.say(f"{len(cases)} cases recorded, {VARIANTS} inputs each")
    written = report.describe_run(team, args)
    written |= {"cases": [str(row) for row in rows], "longest_delay_ms": LONGEST_DELAY_S * 1e3}
    drawn = random.Random(args.seed)
    delays = Delays(team, args.seed + 1, args.delay_every)

    def one_call(step: int) -> None:
        delays.maybe(step)
        drawn.choice(cases).call()

    written["calls"] = repeat(team, cases, one_call, args.calls, "calls", args.time_limit)
    if args.replays:
        replay = in_graph(team, cases, args, drawn)

        def one_replay(step: int) -> None:
            delays.maybe(step)
            replay()

        written["replays"] = repeat(team, cases, one_replay, args.replays, "replays", args.time_limit)
        written["replays"]["calls"] = written["replays"]["done"] * args.graph_calls
    deviating = deviations(team, cases)
    written["deviating"] = deviating
    if team.rank == 0:
        report.write(written, args)
    heap.close()
    if deviating:
        team.say(f"MISMATCH: {deviating}")
        sys.exit(1)
    team.say("no mismatch")


def record(team: Team, rows: list[Row], dtype: torch.dtype, ctx) -> list[Case]:
    """The cases of `rows`; most of the time goes to compiling their kernels, so tells about it now and then."""
    cases = []
    for row in rows:
        if len(cases) % TOLD == 0:
            team.say(f"{len(cases)}/{len(rows)} cases recorded, whose kernels are compiled first")
        cases.append(Case(row, team, dtype, ctx))
    return cases


def repeat(team: Team, cases: list[Case], step: Callable[[int], None], number: int, what: str, limit_s: float) -> dict:
    """Makes `number` steps, and stops for a mismatch or after `limit_s`; tells about it now and then."""
    begin, done, elapsed = time.monotonic(), 0, 0.0
    chunk = max(1, -(-number // REPORTS))
    while done < number and elapsed < limit_s:
        end = min(number, done + chunk)
        _, reason = team.attempt(lambda end=end: [step(i) for i in range(done, end)])  # noqa: B023  called at once
        if reason:
            raise RuntimeError(f"after {done} {what}: {reason}")
        done = end
        wrong = sum(deviations(team, cases).values())
        elapsed = team.slowest([time.monotonic() - begin])[0]
        team.say(f"[{elapsed:4.0f} s] {done}/{number} {what}, {wrong} mismatches")
        if wrong:
            break
    return {"asked": number, "done": done, "seconds": elapsed, "us_each": elapsed * 1e6 / max(1, done)}


def in_graph(team: Team, cases: list[Case], args: argparse.Namespace, drawn: random.Random) -> Callable[[], object]:
    """A sequence of calls on data that changes each time, as a graph where there are GPUs."""
    placed = [Placed(case) for case in cases]
    order = [drawn.choice(placed) for _ in range(args.graph_calls)]
    counter = torch.zeros(1, dtype=torch.int64, device=team.device)
    pause_at = random.Random(args.seed + team.rank).randrange(args.graph_calls)

    def sequence() -> None:
        counter.add_(1)
        for place in placed:
            place.refill(counter)
        for i, place in enumerate(order):
            if i == pause_at and team.cuda:
                torch.cuda._sleep(int(PAUSE_S * CYCLES_A_SECOND))
            place.call()

    if not team.cuda:
        return sequence
    for _ in range(2):  # nothing is allocated or compiled while capturing
        sequence()
    torch.cuda.synchronize()
    team.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        sequence()
    return graph.replay


def deviations(team: Team, cases: list[Case]) -> dict[str, int]:
    """How many calls of each case deviated, on the rank where most did; waits for the device."""
    counts = team.slowest(torch.stack([case.wrong for case in cases]).tolist())
    return {str(case.row): int(count) for case, count in zip(cases, counts, strict=True) if count}


def main() -> None:
    args = parse()
    sys.exit(launch(run, args, limit_s=2 * args.time_limit + 150))


if __name__ == "__main__":
    main()
