"""Check that ranks see each other's accesses in the promised order: `python -m benchmarks.litmus --ranks 4`.

Each test is a few accesses by two to four ranks and an outcome. Whether the outcome may be seen depends on the order
that the accesses request, by the acquire-release model of C++ and PTX at system scope:

    relaxed           writes are relaxed exchanges, reads relaxed loads: only coherence holds, what is seen of a single
                      variable. These runs are the control: they must show that the machine does reorder.
    release-acquire   writes are release exchanges, reads acquire: a reader of a value sees all that came before it.
                      Two writes may still be seen in different orders by two ranks, and a read may pass a write.
    acq_rel           reads are read-modify-writes too, acq_rel all of them: all accesses of a variable have one order,
                      and each synchronises with the one before, which forbids those two as well.

Beside them messages of 4 bytes to 64 KiB by the library's `signal` and `wait`, with 1, 4 and 8 warps, straight and
passed on by a third rank; the device barrier, after which every peer's stamp must be there; both from numbers just
below 2^31 and 2^32. A forbidden outcome, a round that was not counted, or on GPUs a control that shows no reordering
at all, is a failure. Writes `litmus_<gpu>_x<ranks>.json`.
"""

import argparse
from dataclasses import asdict, dataclass
import sys
import time

import iris  # before triton on a machine without a GPU
from iris_tp.bench.team import Team, launch
from iris_tp.bench.timing import Captured
import torch

from benchmarks.cases.litmus_kernels import (
    ACQ_REL,
    INVALID,
    LANES,
    MOST_THREADS,
    ORDERS,
    OUTCOMES,
    RELAXED,
    RELEASE_ACQUIRE,
    SPACING,
    message_kernel,
    stamp_kernel,
    threads_kernel,
)
from benchmarks.measuring import report
from benchmarks.measuring.tables import markdown

BELOW_2_31, BELOW_2_32 = 2**31 - 1000, 2**32 - 1000
LARGEST = 64 << 10  # bytes of a message
BARRIERS_A_GRAPH = 100


@dataclass(frozen=True)
class Test:
    """A litmus test and the outcomes that `order` and all stronger ones forbid.

    An outcome is a digit a read, in the threads' order: 1 if it saw another thread's new value.
    """

    name: str
    threads: str
    forbidden: tuple[str, ...]
    order: int
    what: str


TESTS = [
    Test("message passing", "Wx Wy | Ry Rx", ("10",), RELEASE_ACQUIRE, "the flag y is seen, the data x is not"),
    Test("through a third rank", "Wx | Rx Wy | Ry Rx", ("110",), RELEASE_ACQUIRE, "x is known of, and not seen"),
    Test("passed on", "Wx Wy | Ry Wz | Rz Rx", ("110",), RELEASE_ACQUIRE, "a relayed flag is seen, the data is not"),
    Test("load buffering", "Rx Wy | Ry Wx", ("11",), RELEASE_ACQUIRE, "both see what the other writes later"),
    Test("store buffering", "Wx Ry | Wy Rx", ("00",), ACQ_REL, "neither sees what the other wrote before"),
    Test("IRIW", "Wx | Wy | Rx Ry | Ry Rx", ("1010",), ACQ_REL, "two readers see two writes in different orders"),
    Test("coherence, one writer", "Wx | Rx Rx", ("10",), RELAXED, "a variable goes back"),
    Test(
        "coherence, two writers",
        "Wx Rx Rx | Wx Rx Rx",
        tuple(f"{i:04b}" for i in range(16) if i >> 2 == 2 or i & 3 == 2 or (i >> 2 and i & 3)),
        RELAXED,
        "a variable goes back, or both find the other's write the later",
    ),
]


@dataclass(frozen=True)
class Result:
    """The outcomes that a run saw, with their numbers of rounds; there must be no `forbidden` one."""

    family: str
    name: str
    order: str
    what: str  # the outcome that a strong enough order forbids
    expected: int  # rounds that must have been counted
    outcomes: dict[str, int]
    reordered: int  # rounds with that outcome
    forbidden: int
    seconds: float

    @property
    def failed(self) -> bool:
        return self.forbidden > 0 or sum(self.outcomes.values()) != self.expected


def wrapped(number: int) -> int:
    """Wrap to int32."""
    return (number + 2**31) % 2**32 - 2**31


class Bench:
    """A context, and the heap memory that all cases share."""

    def __init__(self, ctx: iris.Iris, programs: int | None = None) -> None:
        """Allocate for `programs` of a grid: at most as many as are resident."""
        self.ctx, self.world = ctx, ctx.num_ranks
        resident = ctx.get_cu_count() if self.cuda else 2
        self.programs = min(programs or resident, resident)
        self.inbox = ctx.empty(self.programs, LARGEST // 4, dtype=torch.int32)
        self.variables = ctx.empty(self.programs, 3, LANES, SPACING.value, dtype=torch.int32)
        self.reported = ctx.empty(self.programs, 2, MOST_THREADS.value, LANES, dtype=torch.int32)
        self.flags = ctx.empty(self.programs, MOST_THREADS.value, dtype=torch.int32)
        self.stamps = ctx.empty(2, self.world, dtype=torch.int32)

    @property
    def cuda(self) -> bool:
        return self.ctx.device.type == "cuda"

    def counters(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int64, device=self.ctx.device)

    def total(self, counts: torch.Tensor) -> list[int]:
        """Sum over ranks."""
        counts = counts.clone()
        torch.distributed.all_reduce(counts)
        return counts.tolist()

    def rendezvous(self) -> None:
        """Wait until devices idle, then until all ranks are here; not by the barrier that is tested."""
        if self.cuda:
            torch.cuda.synchronize()
        torch.distributed.barrier()


class KernelCase:
    """A case that is one launch of a kernel."""

    first = BELOW_2_31
    warps = 1

    def call(self, bench: Bench, counts: torch.Tensor, rounds: int) -> tuple:
        """Return (kernel, arguments, constants)."""
        raise NotImplementedError

    def counters(self, bench: Bench) -> torch.Tensor:
        raise NotImplementedError

    def compile(self, bench: Bench) -> None:
        kernel, args, constants = self.call(bench, self.counters(bench), 1)
        kernel.warmup(*args, grid=(1,), num_warps=self.warps, **constants)

    def run(self, bench: Bench, rounds: int) -> Result:
        """Run at least `rounds` rounds, spread over all programs."""
        each = -(-rounds // bench.programs)
        counts = self.counters(bench)
        bench.flags.fill_(wrapped(self.first - 1))
        bench.variables.fill_(wrapped(4 * (self.first - 1)))
        bench.inbox.fill_(-1)
        bench.rendezvous()
        begin = time.perf_counter()
        kernel, args, constants = self.call(bench, counts, each)
        kernel[(bench.programs,)](*args, num_warps=self.warps, **constants)
        bench.ctx.barrier()
        seconds = time.perf_counter() - begin
        return self.result(bench, bench.total(counts.sum(0)), each * bench.programs, seconds)


@dataclass(frozen=True)
class Threads(KernelCase):
    test: Test
    order: int

    def counters(self, bench: Bench) -> torch.Tensor:
        return bench.counters(bench.programs, OUTCOMES.value)

    def call(self, bench: Bench, counts: torch.Tensor, rounds: int) -> tuple:
        context = bench.ctx.get_device_context()
        args = (context, bench.variables, bench.reported, bench.flags, counts, wrapped(self.first), rounds)
        return threads_kernel, args, dict(TEST=self.test.threads, ORDER=self.order, WORLD_SIZE=bench.world, LANES=LANES)

    def result(self, bench: Bench, counts: list[int], rounds: int, seconds: float) -> Result:
        test = self.test
        reads = test.threads.count("R")
        outcomes: dict[str, int] = {}
        for code, count in enumerate(counts):
            if count:
                name = "invalid" if code & INVALID.value else f"{code:0{reads}b}"[::-1]
                outcomes[name] = outcomes.get(name, 0) + count
        reordered = sum(outcomes.get(name, 0) for name in test.forbidden)
        forbidden = outcomes.get("invalid", 0) + (reordered if self.order >= test.order else 0)
        outcome = test.forbidden[0] if len(test.forbidden) == 1 else "see below"
        what = f"{test.threads.replace(' |', ';')}: {outcome}"
        order = ORDERS[self.order]
        return Result("threads", test.name, order, what, rounds * LANES, outcomes, reordered, forbidden, seconds)


@dataclass(frozen=True)
class Message(KernelCase):
    nbytes: int
    warps: int
    first: int
    hops: int = 1  # 2: a third rank passes the signal on
    ordered: bool = True

    def counters(self, bench: Bench) -> torch.Tensor:
        return bench.counters(bench.programs, 2)

    def call(self, bench: Bench, counts: torch.Tensor, rounds: int) -> tuple:
        n = self.nbytes // 4
        args = (bench.ctx.get_device_context(), bench.inbox, bench.flags, counts, n, wrapped(self.first), rounds)
        block = min(n, 128 * self.warps)
        return message_kernel, args, dict(HOPS=self.hops, ORDERED=self.ordered, WORLD_SIZE=bench.world, BLOCK=block)

    def result(self, bench: Bench, counts: list[int], rounds: int, seconds: float) -> Result:
        by = " by a third rank" if self.hops == 2 else ""
        name = f"{self.nbytes} B{by}, {self.warps} warps, from {self.first:#x}"
        outcomes = {name: count for name, count in zip(("complete", "stale"), counts, strict=True) if count}
        order = "signal, wait" if self.ordered else "relaxed"
        what = "stale: the signal is seen, the payload is not"
        stale = counts[1]
        forbidden = stale if self.ordered else 0
        return Result("messages", name, order, what, rounds * bench.world, outcomes, stale, forbidden, seconds)


@dataclass(frozen=True)
class Barrier:
    """After each device barrier every peer's stamp of the round must be here."""

    first: int

    def run(self, bench: Bench, rounds: int) -> Result:
        ctx = bench.ctx
        counts = bench.counters(2)
        number = torch.full((1,), wrapped(self.first), dtype=torch.int32, device=ctx.device)
        bench.stamps.fill_(wrapped(self.first))
        ctx.barrier()
        ctx._barrier.counts.fill_(wrapped(self.first))  # as if there had been as many
        bench.rendezvous()
        begin = time.perf_counter()

        def one() -> None:
            ctx.device_barrier()
            context = ctx.get_device_context()
            stamp_kernel[(1,)](context, bench.stamps, number, counts, WORLD_SIZE=bench.world, num_warps=1)

        done = 0
        if bench.cuda and rounds > BARRIERS_A_GRAPH:
            one()
            done = 1
            captured = Captured(lambda: [one() for _ in range(BARRIERS_A_GRAPH)])  # keeps what `one` refers to
            while done + BARRIERS_A_GRAPH <= rounds:
                captured.replay()
                done += BARRIERS_A_GRAPH
        for _ in range(rounds - done):
            one()
        bench.rendezvous()
        ctx.check()
        seconds = time.perf_counter() - begin
        right, wrong = bench.total(counts)
        outcomes = {name: count for name, count in (("all stamps", right), ("a stamp missing", wrong)) if count}
        what = "a peer's stamp from before the barrier is not seen after it"
        name, expected = f"from {self.first:#x}", rounds * bench.world
        return Result("barrier", name, "device_barrier", what, expected, outcomes, wrong, wrong, seconds)


FAMILIES = ("threads", "messages", "barrier")


def cases(family: str, world: int) -> list:
    """Return what a family runs among `world` ranks."""
    if family == "threads":
        tests = [test for test in TESTS if test.threads.count("|") < world]
        return [Threads(test, order) for test in tests for order in range(len(ORDERS))]
    if family == "barrier":
        return [Barrier(first) for first in (0, BELOW_2_31, BELOW_2_32)]
    sizes = (4, 1 << 10, LARGEST)
    messages = [Message(nbytes, warps, BELOW_2_31) for nbytes in sizes for warps in (1, 4, 8)]
    messages += [Message(nbytes, 8, BELOW_2_32) for nbytes in (4, LARGEST)]
    if world > 2:
        messages += [Message(nbytes, warps, BELOW_2_32, hops=2) for nbytes in sizes for warps in (1, 8)]
    return [*messages, Message(LARGEST, 8, 0, ordered=False)]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser, dtype="int32")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument(
        "--rounds", type=report.at_least(1), help="of each case, by all programs; default 10^7, CPUs 64"
    )
    parser.add_argument("--barriers", type=report.at_least(1), help="default 10^6, on CPUs 64")
    args = parser.parse_args(argv)
    report.settle(args, argv, "litmus")
    gpu = args.device == "cuda"
    args.rounds = args.rounds or (10_000_000 if gpu else 64)
    args.barriers = args.barriers or (1_000_000 if gpu else 64)
    args.families = args.families.split(",")
    if args.ranks < 2 or not set(args.families) <= set(FAMILIES):
        parser.error(f"expected two ranks or more, and families of {', '.join(FAMILIES)}")
    return args


def run(team: Team, args: argparse.Namespace) -> None:
    begin = time.monotonic()
    bench = Bench(iris.iris(int(args.heap_gib * 2**30)))
    plan = [(family, case) for family in args.families for case in cases(family, team.world)]
    if team.cuda:  # each rank compiles some kernels; after that all find all of them in the cache on disk
        mine = [case for _, case in plan if isinstance(case, KernelCase)][team.rank :: team.world]
        _, reason = team.attempt(lambda: [case.compile(bench) for case in mine])
        if reason:
            raise RuntimeError(f"kernels do not compile: {reason}")
    team.say(f"[{time.monotonic() - begin:4.0f} s] kernels are ready")
    measured = {**report.describe_run(team, args), "rounds": args.rounds, "results": [], "left_out": 0}
    failures = []
    for done, (family, case) in enumerate(plan):
        if team.slowest([time.monotonic() - begin])[0] > args.time_limit:
            measured["left_out"] = len(plan) - done
            failures.append(f"stopped after {args.time_limit:.0f} s: {len(plan) - done} cases left out")
            break
        rounds = args.barriers if family == "barrier" else args.rounds
        result, reason = team.attempt(lambda case=case, rounds=rounds: case.run(bench, rounds))
        if reason:
            failures.append(f"{case}: {reason}")
            break  # ranks may stand at different places
        team.say(f"[{time.monotonic() - begin:4.0f} s] {line(result)}")
        measured["results"].append({**asdict(result), "failed": result.failed})
        if result.failed:
            failures.append(line(result))
    controls = [r for r in measured["results"] if r["order"] == ORDERS[RELAXED]]
    if team.cuda and controls and not any(r["reordered"] for r in controls):
        failures.append("no relaxed run shows a reordering: these tests would not see one")
    measured["failures"] = failures
    if team.rank == 0:
        report.write(measured, args)
    team.say("\n" + render(report.rounded(measured)))
    if failures:
        sys.exit(1)
    bench.ctx.close()


def line(result: Result) -> str:
    verdict = "FAILED" if result.failed else "ok"
    return f"{verdict}: {result.family}, {result.name}, {result.order}: {result.outcomes} in {result.seconds:.2f} s"


def render(measured: dict) -> str:
    """Return Markdown: a table a family, the outcome in question, whether the order forbids it, how often it was."""
    parts = [f"{report.headline(measured)} `{measured['command']}`"]
    for family in dict.fromkeys(result["family"] for result in measured["results"]):
        lines = []
        for result in (r for r in measured["results"] if r["family"] == family):
            rule = "allowed" if is_allowed(result) else "forbidden"
            counted = f"{sum(result['outcomes'].values()):,}"
            seen = f"{result['reordered']:,}" + (" FAILED" if result["failed"] else "")
            lines.append([result["name"], result["what"], result["order"], counted, rule, seen])
        parts.append(markdown([family, "outcome", "order", "rounds", "it is", "seen"], lines))
        if family == "threads":
            meant = [f"- {test.name}: {test.what} ({', '.join(test.forbidden)})" for test in TESTS]
            digits = "W writes a variable, R reads; threads are ranks. An outcome: a digit a read, 1 for a new value."
            parts.append("\n".join([digits, "", *meant]))
    parts += [f"- {failure}" for failure in measured["failures"]]
    return "\n\n".join(parts)


def is_allowed(result: dict) -> bool:
    if result["order"] in ORDERS:
        tests = [test for test in TESTS if test.name == result["name"]]
        return not tests or ORDERS.index(result["order"]) < tests[0].order
    return False


def main() -> None:
    args = parse()
    sys.exit(launch(run, args, limit_s=args.time_limit + 100))


if __name__ == "__main__":
    main()
