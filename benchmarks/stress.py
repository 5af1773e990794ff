"""Right under stress, too: `python -m benchmarks.stress --ranks 4 --calls 100000 --replays 10000`.

Calls of random ops, collectives and sizes follow each other without a pause, each on other data than the call before it
of the same shapes, while one rank after the other is held up for 0 to 10 ms, on its device or on its host. Every output
is poisoned first and compared bit by bit, on the device, with what the same input gave when nothing disturbed it
(`stress_case.py`). Then the same inside a CUDA graph: each replay takes other data, and the ranks' graphs pause at
different places.

The host waits for the device only at some twenty places, where rank 0 tells how far it is and writes the file, so that
a run that is cut off leaves its figures too. Exits with 1 on a mismatch.
"""

import argparse
from collections.abc import Callable
import random
import sys
import time

from iris_tp.bench.rows import Row
from iris_tp.bench.team import Team, launch
from iris_tp.bench.timing import Captured
import torch

from benchmarks.cases.stress_case import COLLECTIVES, VARIANTS, Case, Placed, of_collective, of_row
from benchmarks.measuring import report, shapes
from benchmarks.rivals import everyone

LONGEST_DELAY_S = 0.010
PAUSE_S = 200e-6  # inside a graph, once on each rank
CYCLES_A_SECOND = 1.8e9
REPORTS = 20
PROGRESS_EVERY = 8  # cases between two reports of progress


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
    parser.add_argument("--bytes", type=report.numbers, help="of collectives; default: 2 KiB to 4 MiB")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    report.settle(args, argv, "stress")
    args.shapes = args.shapes or ("stress" if args.device == "cuda" else "tiny,tiny-forms")
    args.bytes = args.bytes or ([2 << 10, 300 << 10, 4 << 20] if args.device == "cuda" else [1 << 10])
    if not args.calls and not args.replays:
        parser.error("--calls and --replays are 0: expected one of them from 1 on")
    try:
        rows = shapes.select(args.shapes, args.ops, args.ranks)
    except ValueError as error:
        parser.error(str(error))
    if unserved := [str(row) for row in rows if not row.supports(args.ranks)]:
        parser.error(f"--shapes {args.shapes}: {args.ranks} ranks do not divide the columns of {unserved[0]}")
    return args


class Delays:
    """Delays of one rank after the other, on its device or on its host; each rank draws the same numbers."""

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


class Record:
    """The run's results, written anew whenever there is more of it."""

    def __init__(self, team: Team, args: argparse.Namespace, cases: list[Case]) -> None:
        self.team, self.args, self.cases = team, args, cases
        self.written = report.describe_run(team, args)
        self.written |= {"cases": [case.name for case in cases], "longest_delay_ms": LONGEST_DELAY_S * 1e3}

    def add(self, **figures: object) -> dict[str, int]:
        """Add the figures of one step, and return which cases have deviated so far. Collective."""
        deviating = deviations(self.team, self.cases)
        self.written |= {**figures, "deviating": deviating}
        if self.team.rank == 0:
            report.write(self.written, self.args)
        return deviating

    def repeat(self, step: Callable[[int], object], number: int, what: str, **more: int) -> None:
        """Make `number` steps, and stop for a mismatch or after the time limit; report progress now and then.

        `more`: what else each step counts for.
        """
        team, limit_s = self.team, self.args.time_limit
        begin, done, elapsed = time.monotonic(), 0, 0.0
        chunk = max(1, -(-number // REPORTS))
        while done < number and elapsed < limit_s:
            end = min(number, done + chunk)
            _, reason = team.attempt(lambda end=end: [step(i) for i in range(done, end)])  # noqa: B023  called at once
            if reason:
                raise RuntimeError(f"after {done} {what}: {reason}")
            done = end
            elapsed = team.slowest([time.monotonic() - begin])[0]
            figures = {"asked": number, "done": done, "seconds": elapsed, "us_each": elapsed * 1e6 / done}
            deviating = self.add(**{what: figures | {name: each * done for name, each in more.items()}})
            team.say(f"[{elapsed:4.0f} s] {done}/{number} {what}, {sum(deviating.values())} mismatches")
            if deviating:
                break


def run(team: Team, args: argparse.Namespace) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    dtype = getattr(torch, args.dtype)
    rows = shapes.select(args.shapes, args.ops, team.world)
    heap = everyone.Heap(team, rows, dtype, int(args.heap_gib * 2**30))
    cases = record(team, rows, args.bytes, dtype, heap.ctx)
    team.say(f"{len(cases)} cases recorded, up to {VARIANTS} inputs each")
    written = Record(team, args, cases)
    drawn = random.Random(args.seed)
    delays = Delays(team, args.seed + 1, args.delay_every)

    def one_call(step: int) -> None:
        delays.maybe(step)
        drawn.choice(cases).call()

    if args.calls:
        written.repeat(one_call, args.calls, "calls")
    if args.replays:
        replay = in_graph(team, cases, args, drawn)

        def one_replay(step: int) -> None:
            delays.maybe(step)
            replay()

        written.repeat(one_replay, args.replays, "replays", calls=args.graph_calls)
    deviating = written.add()
    heap.close()
    if deviating:
        team.say(f"MISMATCH: {deviating}")
        sys.exit(1)
    team.say("no mismatch")


def record(team: Team, rows: list[Row], sizes: list[int], dtype: torch.dtype, ctx) -> list[Case]:
    """Record the cases; most of the time goes to compiling their kernels, so report progress now and then."""
    makers = [lambda row=row: of_row(row, team, dtype, ctx) for row in rows]
    makers += [lambda op=op, n=n: of_collective(op, n, team, dtype, ctx) for n in sizes for op in COLLECTIVES]
    cases = []
    for make in makers:
        if len(cases) % PROGRESS_EVERY == 0:
            team.say(f"{len(cases)}/{len(makers)} cases recorded, whose kernels are compiled first")
        case, reason = team.attempt(make)
        if reason:
            raise RuntimeError(reason)
        cases.append(case)
    return cases


def in_graph(team: Team, cases: list[Case], args: argparse.Namespace, drawn: random.Random) -> Callable[[], object]:
    """Return a sequence of calls on data that changes each time, as a graph where there are GPUs."""
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
    return Captured(sequence).replay  # which keeps `placed` and `counter`


def deviations(team: Team, cases: list[Case]) -> dict[str, int]:
    """Return how many calls of each case deviated, on the rank where most did; wait for the device."""
    counts = team.slowest(torch.stack([case.wrong for case in cases]).tolist())
    return {case.name: int(count) for case, count in zip(cases, counts, strict=True) if count}


def main() -> None:
    args = parse()
    sys.exit(launch(run, args, limit_s=2 * args.time_limit + 150))


if __name__ == "__main__":
    main()
