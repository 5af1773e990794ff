"""Time one call by a CUDA graph of several, where each rank is a process of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
import statistics

from iris_tp.bench.timing import Captured
import torch
import torch.distributed as dist

_REPEATS = 5, 30  # replays, at least and at most


def graph_us(call: Callable[[int], object], calls: int = 8, seconds: float = 0.12) -> float:
    """Return the median microseconds of a call on the slowest rank.

    `call(i)` runs with the inputs of number i, below `calls`, all of which a graph holds. It is replayed for about
    `seconds`.
    """

    def work() -> None:
        for i in range(calls):
            call(i)

    work()
    graph = Captured(work)

    def replay_us() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / calls

    least, most = _REPEATS
    replay_us()
    repeats = int(seconds * 1e6 / (_slowest(replay_us()) * calls))
    return _slowest(statistics.median(replay_us() for _ in range(max(least, min(most, repeats)))))


def _slowest(us: float) -> float:
    tensor = torch.tensor([us], device="cuda", dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)
