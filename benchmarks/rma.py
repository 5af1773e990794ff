"""Measure remote memory access: `python -m benchmarks.rma --ranks 4`.

Every operation between each pair of ranks alone and by all ranks at once (each with the next one), by size and by the
number of programs; atomics as operations a second; a signal and its answer between each pair. Before a case is timed
it runs once into poisoned memory, and the receiver compares every word and what follows the last.

Timed are CUDA graphs of launches, so that small sizes show what a kernel costs that does nothing else. Prints tables,
the link's known rates, and writes `rma_<gpu>_x<ranks>.json`; `benchmarks.report` draws it.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
import sys
import time

import iris  # before triton on a machine without a GPU
from iris import platform
from iris_tp.bench import timing
from iris_tp.bench.team import Team, launch
import torch

from benchmarks.cases.rma_kernels import (
    ATOMICS,
    RANK_STEP,
    STEP,
    TRANSFERS,
    WORD_BYTES,
    move_kernel,
    options,
    round_trip_kernel,
)
from benchmarks.measuring import report
from benchmarks.tables import rma_table

POISON = -0x35014542
GUARD = 4096  # words after the last that must stay poisoned
READS = ("load", "get")  # data arrives at the caller; else at the peer
PAIR_BYTES = 64 << 20  # at which pairs are timed by programs
ATOMIC_BYTES = 4 << 20  # at which atomics are timed between pairs and by programs
ROUND_TRIPS = 2000


@dataclass(frozen=True)
class Case:
    """`op` on `nbytes` by `programs` programs of `caller` with `peer`; without a caller, of all, each with the next."""

    op: str
    nbytes: int
    programs: int
    caller: int | None = None
    peer: int | None = None

    @property
    def words(self) -> int:
        return self.nbytes // WORD_BYTES

    def partner(self, rank: int, world: int) -> int | None:
        """Return the rank with which `rank` works, if it does."""
        if self.caller is None:
            return (rank + 1) % world
        return self.peer if rank == self.caller else None

    def sender(self, rank: int, world: int) -> int | None:
        """Return the caller whose work ends in `rank`'s memory, if any does."""
        if self.op in READS:
            return rank if self.caller in (None, rank) else None
        if self.caller is None:
            return (rank - 1) % world
        return self.caller if rank == self.peer else None

    def calls(self) -> int:
        """Return the launches of a batch: about 0.4 ms of them."""
        guess_us = 2.5 + self.nbytes / (1e3 * min(300, 25 * self.programs))
        return max(1, min(50, int(400 / guess_us)))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser, dtype="int32")
    parser.add_argument("--ops", default=",".join(TRANSFERS + ATOMICS))
    parser.add_argument("--quick", action="store_true", help="no pairs but at the largest size, fewer sizes")
    parser.set_defaults(time_limit=50)
    args = parser.parse_args(argv)
    report.settle(args, argv, "rma")
    args.ops = args.ops.split(",")
    unknown = set(args.ops) - set(TRANSFERS + ATOMICS)
    if unknown:
        parser.error(f"--ops names {sorted(unknown)}; there are {', '.join(TRANSFERS + ATOMICS)}")
    return args


def sizes(args: argparse.Namespace) -> list[int]:
    """Return bytes: 4 KiB to 1 GiB, each four times the one before."""
    nbytes = [4 << (10 + 2 * i) for i in range(10)]
    if args.device == "cpu":
        return nbytes[:3:2]
    return nbytes[::3] if args.quick else nbytes


def program_counts(most: int) -> list[int]:
    """Return 1, 2, 4 ... and all."""
    return sorted({most, *(1 << i for i in range(most.bit_length()))})


def cases(args: argparse.Namespace, world: int, most: int) -> list[list[Case]]:
    """Return what is timed in turns, group by group; those that all ranks take part in first."""
    everything, counts = sizes(args), program_counts(most)
    largest = everything[-1]
    pairs = [(a, b) for a in range(world) for b in range(world) if a != b]
    transfers = [op for op in args.ops if op in TRANSFERS]
    atomics = [op for op in args.ops if op in ATOMICS]
    atomic_bytes = min(ATOMIC_BYTES, largest)
    groups = [[Case(op, n, p) for p in counts] for n in everything for op in transfers]
    groups += [[Case(op, n, most) for op in atomics] for n in everything if n <= 16 * ATOMIC_BYTES]
    groups += [[Case(op, atomic_bytes, p) for p in counts] for op in atomics]
    pair_sizes = [largest] if args.quick else everything
    groups += [[Case(op, n, most, *pair) for op in transfers for n in pair_sizes] for pair in pairs]
    if not args.quick:
        groups += [[Case(op, min(PAIR_BYTES, largest), p, *pair) for op in transfers for p in counts] for pair in pairs]
    groups += [[Case(op, atomic_bytes, most, *pair) for op in atomics] for pair in pairs]
    done: set[Case] = set()
    fresh = []
    for group in groups:
        fresh.append([case for case in dict.fromkeys(group) if case not in done])
        done.update(group)
    return [group for group in fresh if group]


def pattern(words: int, rank: int, device: torch.device) -> torch.Tensor:
    return torch.arange(words, dtype=torch.int32, device=device) * STEP.value + rank * RANK_STEP.value


ATOMIC_RESULTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "atomic_add": torch.add,
    "atomic_xchg": lambda old, new: new,
    "atomic_xor": torch.bitwise_xor,
    "atomic_and": torch.bitwise_and,
    "atomic_or": torch.bitwise_or,
    "atomic_min": torch.minimum,
    "atomic_max": torch.maximum,
    "atomic_cas": lambda old, new: new,
}


class Memory:
    """This rank's heap and what the kernels work on."""

    def __init__(self, team: Team, args: argparse.Namespace, ctx: iris.Iris) -> None:
        self.team, self.ctx = team, ctx
        self.most = self.ctx.get_cu_count() if team.cuda else 2
        largest = sizes(args)[-1] // WORD_BYTES
        self.src = self.ctx.empty(largest, dtype=torch.int32)
        self.dst = self.ctx.empty(largest + GUARD, dtype=torch.int32)
        self.flag = self.ctx.zeros(1, dtype=torch.int32)
        self.sums = torch.zeros(self.most, dtype=torch.int64, device=team.device)
        self.ticks = torch.zeros(1, dtype=torch.int64, device=team.device)
        self.src.copy_(pattern(largest, team.rank, team.device))
        self.ctx.barrier()

    def start(self, case: Case, warmup: bool = False) -> None:
        """Launch the kernel, or compile it."""
        partner = case.partner(self.team.rank, self.team.world)
        context = self.ctx.get_device_context()
        args = (context, self.src, self.dst, self.sums, case.words, 0 if partner is None else partner)
        how = dict(WORLD_SIZE=self.team.world, **options(case.op, self.team.device))
        if warmup:
            move_kernel.warmup(*args, grid=(1,), **how)
        elif partner is not None:
            move_kernel[(case.programs,)](*args, **how)

    def compile(self, ops: list[str], words: int) -> None:
        """Compile some of the kernels on each rank; after that all find all of them in the cache on disk."""
        for op in ops[self.team.rank :: self.team.world] if self.team.cuda else []:
            self.start(Case(op, words * WORD_BYTES, 1), warmup=True)

    def wrong_words(self, case: Case) -> int:
        """Run `case` once into poisoned memory; return how many words are not what they must be."""
        n, rank, device = case.words, self.team.rank, self.team.device
        self.dst[: n + GUARD].fill_(POISON)
        self.sums.zero_()
        if case.op in ATOMICS:
            self.dst[:n].copy_(pattern(n, self.team.world, device))
        self.ctx.barrier()
        self.start(case)
        self.ctx.barrier()
        sender = case.sender(rank, self.team.world)
        if sender is None:
            return 0
        if case.op == "load":
            expected = pattern(n, case.partner(rank, self.team.world), device).sum(dtype=torch.int64)
            return int((self.sums.sum() - expected) % 2**32 != 0)
        if case.op == "get":
            expected = pattern(n, case.partner(rank, self.team.world), device)
        elif case.op == "copy":
            expected = pattern(n, rank, device)
        else:
            expected = pattern(n, sender, device)
        if case.op in ATOMICS:
            expected = ATOMIC_RESULTS[case.op](pattern(n, self.team.world, device), expected)
        wrong = (self.dst[:n] != expected).sum() + (self.dst[n : n + GUARD] != POISON).sum()
        return int(wrong)

    def batch(self, case: Case) -> timing.Batch:
        if case.partner(self.team.rank, self.team.world) is None:
            return timing.Batch(case.calls(), lambda: None, lambda: None)
        if not self.team.cuda:
            return timing.eager_batch(lambda i: self.start(case), 1, 1)

        def call(i: int) -> torch.Tensor:
            self.start(case)
            return self.dst

        return timing.graph_batch(call, case.calls(), 1)[0]

    def round_trips(self) -> list[dict]:
        """Time a signal and its answer, between every two ranks, by whoever begins."""
        rounds = ROUND_TRIPS if self.team.cuda else 5
        trips, first = [], 1
        for a in range(self.team.world):
            for b in range(self.team.world):
                if a == b:
                    continue
                best = float("inf")
                for _ in range(3):
                    self.ctx.barrier()
                    if self.team.rank in (a, b):
                        peer, begins = (b, 1) if self.team.rank == a else (a, 0)
                        args = (self.ctx.get_device_context(), self.flag, self.ticks, first, rounds, peer, begins)
                        round_trip_kernel[(1,)](*args, WORLD_SIZE=self.team.world, num_warps=1)
                    self.ctx.barrier()
                    best = min(best, int(self.ticks[0]) / platform.ticks(1e-6) / rounds)
                    first += rounds
                us = self.team.slowest([best if self.team.rank == a else 0.0])[0]
                trips.append({"caller": a, "peer": b, "us": us})
        return trips


def run(team: Team, args: argparse.Namespace) -> None:
    begin = time.monotonic()
    memory = Memory(team, args, iris.iris(int(args.heap_gib * 2**30)))
    _, reason = team.attempt(lambda: memory.compile(args.ops, sizes(args)[-1] // WORD_BYTES))
    if reason:
        raise RuntimeError(f"kernels do not compile: {reason}")
    team.say(f"[{time.monotonic() - begin:4.0f} s] heap and kernels are ready")
    measured = {**report.describe_run(team, args), "programs": memory.most, "cases": [], "left_out": 0}
    measured["round_trips"], reason = team.attempt(memory.round_trips)
    if reason:
        raise RuntimeError(f"no round trip: {reason}")
    groups = cases(args, team.world, memory.most)
    for number, group in enumerate(groups):
        if team.slowest([time.monotonic() - begin])[0] > args.time_limit:
            measured["left_out"] = sum(map(len, groups[number:]))
            team.say(f"stopped after {args.time_limit:.0f} s: {measured['left_out']} cases left out")
            break
        measured["cases"] += run_group(team, memory, group)
    wrong = [case for case in measured["cases"] if case["status"] != "ok"]
    team.say(f"[{time.monotonic() - begin:4.0f} s] {len(measured['cases'])} cases, {len(wrong)} wrong or failed\n")
    if team.rank == 0:
        report.write(measured, args)
    team.say(rma_table.render(report.rounded(measured)))
    memory.ctx.close()
    if wrong:
        team.say("\n".join(str(case) for case in wrong[:20]))
        sys.exit(1)


def run_group(team: Team, memory: Memory, group: list[Case]) -> list[dict]:
    """Return each case's result: its time on the slowest rank that took part, or what is wrong with it."""
    results: dict[Case, dict] = {}
    batches: dict[Case, timing.Batch] = {}
    for case in group:
        results[case] = result = {**asdict(case), "status": "ok"}
        wrong, reason = team.attempt(lambda case=case: memory.wrong_words(case))
        wrong = int(team.slowest([wrong or 0])[0])
        if reason or wrong:
            result["status"] = reason or f"{wrong} wrong words"
            continue
        batches[case], reason = team.attempt(lambda case=case: memory.batch(case))
        if reason:
            result["status"] = reason
            del batches[case]
    repeats = (3 if max(case.nbytes for case in group) > 64 << 20 else 5) if team.cuda else 1
    timings, failed = timing.interleave(team, batches, repeats)
    for case, reason in failed.items():
        results[case]["status"] = reason
    for case, taken in timings.items():
        results[case] |= {"us": taken.call_us, "gb_s": case.nbytes / taken.call_us / 1e3}
    return list(results.values())


def main() -> None:
    args = parse()
    sys.exit(launch(run, args, limit_s=args.time_limit + 60))


if __name__ == "__main__":
    main()
