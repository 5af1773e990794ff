"""Time a call on the slowest rank, with contenders taking turns.

A `Batch` is a number of calls in a row over rotating inputs, issued one by one (eager) or as one CUDA graph.
`interleave` runs one batch of each contender, then the next round in another order, so that drifting clocks and
temperature affect all of them alike; it gives each contender's median over the rounds, and of the ranks' medians the
largest.

Ranks synchronise on the device before each batch, and the host is ahead of it when the clock starts: a short device
sleep hides a graph's launch, an uncounted call that of an eager batch. So the time is that of a running
model: the device's, or the host's where issuing a call takes longer than running it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
import random
import statistics
import time
from typing import Any

import torch

from .team import Team

LEAD_CYCLES = 250_000  # about 130 µs on an H200: longer than the launch of a graph of some hundred nodes


@dataclass(frozen=True)
class Budget:
    """Duration of a contender's measurement: batches of about `batch_ms`, for about `measure_ms` in all.

    A batch has `calls` from..to, but no more than fit into `longest_ms`.
    """

    batch_ms: float = 1.5
    longest_ms: float = 20.0
    measure_ms: float = 80.0
    calls: tuple[int, int] = (10, 60)
    repeats: tuple[int, int] = (5, 25)

    def calls_for(self, call_us: float, inputs: int) -> int:
        """Return the calls of one batch: whole turns through the inputs."""
        calls = min(_clamp(self.batch_ms * 1e3 / call_us, self.calls), max(1, int(self.longest_ms * 1e3 / call_us)))
        return -(-calls // inputs) * inputs

    def repeats_for(self, round_us: float, contenders: int) -> int:
        return _clamp(self.measure_ms * 1e3 * contenders / round_us, self.repeats) if contenders else 0


QUICK = Budget(measure_ms=25.0, repeats=(3, 10))
INTERPRETED = Budget(batch_ms=0, measure_ms=0, calls=(1, 1), repeats=(1, 1))


class Captured:
    """The launches of `work` as a CUDA graph, and its result.

    A graph refers to memory by its addresses and keeps no tensor alive. So this object keeps `work`, and with it all
    that `work` refers to: hold on to it; `replay` does so, too.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        torch.cuda.synchronize()
        self.work, self.graph = work, torch.cuda.CUDAGraph()
        # Thread-local: NCCL's watchdog thread may query its events while this thread captures.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.result = work()

    def replay(self) -> None:
        self.graph.replay()


@dataclass(frozen=True)
class Batch:
    calls: int
    run: Callable[[], object]  # issues all calls
    lead: Callable[[], object]  # gives the host a head start


@dataclass(frozen=True)
class Timing:
    call_us: float  # median over the rounds, slowest rank
    host_us: float  # the host's share: how long issuing a call kept it busy


def eager_batch(call: Callable[[int], object], calls: int, inputs: int) -> Batch:
    def run() -> None:
        for i in range(calls):
            call(i % inputs)

    return Batch(calls, run, lambda: call(inputs - 1))


def graph_batch(call: Callable[[int], torch.Tensor], calls: int, inputs: int) -> tuple[Batch, torch.Tensor]:
    """Capture the calls as one graph; return it with the tensor in which its last call leaves its result."""

    def work() -> torch.Tensor:
        for i in range(calls):
            out = call(i % inputs)
        return out

    captured = Captured(work)
    return Batch(calls, captured.replay, lambda: torch.cuda._sleep(LEAD_CYCLES)), captured.result


def estimate_us(team: Team, call: Callable[[int], object], inputs: int) -> float:
    """Return a first estimate of a warm call's duration on this rank."""
    batch = eager_batch(call, inputs, inputs)
    return max(1.0, min(_measure(team, batch).call_us for _ in range(2 if team.cuda else 1)))


def interleave(team: Team, batches: dict[str, Batch], repeats: int) -> tuple[dict[str, Timing], dict[str, str]]:
    """Return timings by contender, and the reasons of those that failed on the way."""
    samples: dict[str, list[Timing]] = {name: [] for name in batches}
    failed: dict[str, str] = {}
    order, shuffled = list(batches), random.Random(0)  # the same on all ranks
    for _ in range(repeats + 1):
        shuffled.shuffle(order)
        for name in order:
            if name not in failed:
                sample, reason = team.attempt(partial(_measure, team, batches[name]))
                if sample is None:
                    failed[name] = str(reason)
                else:
                    samples[name].append(sample)
    timings = {}
    for name, taken in samples.items():
        if name not in failed:
            counted = taken[1:]  # the first round warms caches and clocks
            medians = [statistics.median(getattr(s, field) for s in counted) for field in ("call_us", "host_us")]
            timings[name] = Timing(*team.slowest(medians))
    return timings, failed


def _measure(team: Team, batch: Batch) -> Timing:
    if not team.cuda:
        team.barrier()
        begin = time.perf_counter()
        batch.run()
        call_us = (time.perf_counter() - begin) * 1e6 / batch.calls
        return Timing(call_us, call_us)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    batch.lead()
    team.barrier()
    start.record()
    begin = time.perf_counter()
    batch.run()
    host_us = (time.perf_counter() - begin) * 1e6 / batch.calls
    end.record()
    end.synchronize()
    return Timing(start.elapsed_time(end) * 1e3 / batch.calls, host_us)


def _clamp(value: float, bounds: tuple[int, int]) -> int:
    return max(bounds[0], min(bounds[1], round(value)))
