"""`ctx.tracing`: record what programs do inside kernels, as a timeline of all ranks.

    ctx.tracing.enable()                      # fused kernels now are variants that record
    ctx.ops.matmul_reduce_scatter(out, A, B)
    ctx.tracing.export("trace.json", merge=True)  # for chrome://tracing or ui.perfetto.dev

Your own kernels record if they call `DeviceContext.initialize(ctx_ptr, rank, world_size, tracing=True)`
(`iris/device/tracing.py`).

Each GPU has a separate clock. Rank 0 measures the other clocks against its own by messages to and fro: a peer reads
its clock half-way, so the shortest of many round trips gives the difference within half of that trip. It is measured
when recording begins and at the export, and interpolated in between, because clocks also drift.
"""

from __future__ import annotations

from dataclasses import dataclass
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from . import platform
from .device import arch
from .device.context import TRACING_WORDS, own_context
from .device.sync import signal, wait
from .device.tracing import EVENT_WORDS, HEADER_WORDS, NAMES
from .errors import ArgumentError, CaptureError
from .triton_private import FUSED

if TYPE_CHECKING:
    from .rank import Rank

MOST_EVENTS = 1 << 28
_ROUND_TRIPS = 64
EVENT = np.dtype(
    [
        ("begin", "<i8"),  # ticks of the rank's own clock
        ("end", "<i8"),  # 0: the span was not ended
        ("event", "<i4"),
        ("multiprocessor", "<i4"),
        ("program", "<i4"),
        ("target_rank", "<i4"),
        ("address", "<i8"),
        ("pid_m", "<i4"),
        ("pid_n", "<i4"),
        ("bytes", "<i8"),
        ("thread", "<i4"),  # the first of the warps at work, where the warps of a program are specialised
        ("unused", "<i4"),
    ]
)
assert EVENT.itemsize == 8 * EVENT_WORDS.value


@triton.jit
def clock_offset_kernel(ctx_ptr, flags, times, count, step, results, rounds, WORLD_SIZE: tl.constexpr):
    """Measure round trips between rank 0 and each other rank. One program.

    flags: int32 [world], by source; times: int64 [world], where ranks store their reading at rank 0; count: int32, the
    round trips of earlier calls; step: int64, the smallest difference of two readings of this rank's clock; results:
    int64 [world, 3], at rank 0, for each other rank: its clock minus rank 0's, the round trip, when; in ticks.
    """
    ctx = own_context(ctx_ptr, WORLD_SIZE)
    first = tl.load(count) + 1
    if ctx.rank == 0:
        for peer in range(1, WORLD_SIZE):
            shortest = tl.cast(2**62, tl.int64)
            for i in range(rounds):
                begin = arch.clock()
                signal(ctx, flags, first + i, peer)
                ok = wait(ctx, flags + peer, first + i, peer)
                end = arch.clock()
                theirs = tl.load(times + peer, volatile=True)
                # No branch: threads read different times, and must not part before the next barrier.
                better = ok & (end - begin < shortest)
                shortest = tl.where(better, end - begin, shortest)
                tl.store(results + 3 * peer, theirs - (begin + shortest // 2), mask=better)
                tl.store(results + 3 * peer + 1, shortest, mask=better)
                tl.store(results + 3 * peer + 2, end, mask=better)
    else:
        for i in range(rounds):
            if wait(ctx, flags, first + i, 0):
                ctx.store(times + ctx.rank, arch.clock(), 0)
                signal(ctx, flags + ctx.rank, first + i, 0)
    tl.store(count, first - 1 + rounds)
    smallest = tl.cast(2**62, tl.int64)
    before = arch.clock()
    for _ in range(4 * rounds):
        now = arch.clock()
        smallest = tl.where(now > before, tl.minimum(smallest, now - before), smallest)
        before = now
    tl.store(step, smallest)


@dataclass(frozen=True)
class Offset:
    """The difference of a rank's clock from rank 0's, in ticks, at time `at` of rank 0; true within `error` ticks."""

    ticks: int
    error: int
    at: int


class Tracing:
    """Record events of kernels on this rank's device. All methods are collective.

    Args:
        ctx: the context.
    """

    def __init__(self, ctx: Rank) -> None:
        self._ctx = ctx
        self.names = dict(enumerate(NAMES))  # of event ids; add your own
        self._buffer: torch.Tensor | None = None
        self._clock: tuple[torch.Tensor, ...] = ()
        self._began: list[Offset] = []

    def enable(self, max_events: int = 1 << 20) -> None:
        """Begin to record, and discard earlier events.

        Until `disable()`, fused kernels are launched as variants that record; a captured graph is unchanged. Calls with
        a separate product record nothing: those of "sequential", on CPUs all-reduces with an fp8 B, and those of
        "copy_gather" with torch's product. `ctx.ccl` records nothing either.

        Args:
            max_events: the size of this rank's buffer, in events of 64 bytes.

        Raises:
            ArgumentError: for a number that is not positive.
            CaptureError: while a CUDA graph is captured.
        """
        self._check()
        sound = isinstance(max_events, int) and not isinstance(max_events, bool) and 0 < max_events <= MOST_EVENTS
        for given, fine in self._ctx.hosts.all_gather((repr(max_events), sound)):
            if not fine:
                raise ArgumentError(f"max_events is {given}; expected an integer from 1 to {MOST_EVENTS}")
        self._ctx.barrier()  # no kernel of this device still records
        if not self._clock:
            self._clock = self._clock_memory()
        if self._buffer is None or self._capacity != max_events:
            # not zeroed: only the records of counted events are read
            size = HEADER_WORDS.value + max_events * EVENT_WORDS.value
            self._buffer = torch.empty(size, dtype=torch.int64, device=self._ctx.device)
        self._announce(self._buffer.data_ptr(), max_events)
        self._ctx.recording = True
        self.reset()

    def disable(self) -> None:
        """Stop recording; the events can still be exported."""
        self._check()
        self._ctx.barrier()
        self._announce(0, 0)
        self._ctx.recording = False

    def reset(self) -> None:
        """Discard all events so far."""
        self._began = self._measure_clocks()  # after all earlier work of the device
        self._recorded()[: HEADER_WORDS.value].zero_()

    @property
    def enabled(self) -> bool:
        """Return whether fused kernels record."""
        return self._ctx.recording

    @property
    def trace_counter(self) -> torch.Tensor:
        """Return the counter of events, int64 [1] on the device: this rank's since the last reset, even beyond
        `max_events`."""
        return self._recorded()[:1]

    @property
    def max_events(self) -> int:
        """Return how many events can be recorded; 0 before `enable()`."""
        return self._capacity

    @property
    def dropped(self) -> int:
        """Return how many events of this rank exceeded `max_events` since the last reset. Waits for the device."""
        return max(0, self._count() - self._capacity)

    def events(self) -> np.ndarray:
        """Return this rank's events in no particular order. Waits for the device.

        Returns:
            A numpy array of `EVENT` records: begin and end in ticks of this rank's clock (end 0 for a span that was not
                ended), kind, multiprocessor, program, peer, address, tile, payload in bytes and first warp.
        """
        count = min(self._count(), self._capacity)
        first = HEADER_WORDS.value
        return self._recorded()[first : first + count * EVENT_WORDS.value].cpu().numpy().view(EVENT)

    def aligned(self) -> np.ndarray:
        """Return this rank's events with times on rank 0's clock.

        Returns:
            As `events`, with begin and end in nanoseconds.
        """
        return self._aligned(self._measure_clocks())

    def export(self, path: str | Path, merge: bool = False) -> Path:
        """Write Chrome's trace format, for ui.perfetto.dev: a process is a rank, a thread a multiprocessor.

        Args:
            path: the file. Each rank adds its number to the name: `trace_rank0.json` for "trace.json".
            merge: whether rank 0 writes one file for all ranks instead, under the name itself.

        Returns:
            The file's path.

        Raises:
            ArgumentError: on all ranks, if one cannot write.
        """
        clocks = self._measure_clocks()
        aligned, rank = self._aligned(clocks), self._ctx.cur_rank
        start = min(self._ctx.hosts.all_gather(int(aligned["begin"].min(initial=2**62))))
        step = _nanoseconds(int(self._clock[-2]))
        error = _nanoseconds(clocks[rank].error)
        part = _Part(rank, _device_name(self._ctx.device), aligned, self.dropped, error, step)
        parts = self._ctx.hosts.all_gather(part) if merge else [part]
        text = json.dumps(chrome_trace(parts, self.names, start)) if not merge or rank == 0 else None
        refusal = None
        try:
            path = Path(path)
            target = path if merge else path.with_name(f"{path.stem}_rank{rank}{path.suffix}")
            if text is not None:
                target.write_text(text)
        except (OSError, TypeError, ValueError) as error:  # the last two for an invalid name
            refusal = f"path is {str(path)!r}, which cannot be written: {getattr(error, 'strerror', error)}"
        for failure in filter(None, self._ctx.hosts.all_gather(refusal)):
            raise ArgumentError(f"{failure}; expected a file name in a folder that exists")
        return target

    @property
    def _capacity(self) -> int:
        return 0 if self._buffer is None else (self._buffer.numel() - HEADER_WORDS.value) // EVENT_WORDS.value

    def _check(self) -> None:
        self._ctx.check()
        if platform.is_capturing(self._ctx.device):
            raise CaptureError("tracing is set up and read by the host and cannot be captured; do it before or after")

    def _recorded(self) -> torch.Tensor:
        self._check()
        if self._buffer is None:
            raise ArgumentError("nothing was recorded: call ctx.tracing.enable() first")
        return self._buffer

    def _count(self) -> int:
        return int(self._recorded()[0])

    def _announce(self, address: int, capacity: int) -> None:
        self._ctx.forget_launches()
        entries = torch.tensor([address, capacity], dtype=torch.int64, device="cpu")
        self._ctx.get_device_context()[TRACING_WORDS].copy_(entries)

    def _clock_memory(self) -> tuple[torch.Tensor, ...]:
        world, device = self._ctx.num_ranks, self._ctx.device
        flags, times = (self._ctx.heap.reserve((world,), dtype).zero_() for dtype in (torch.int32, torch.int64))
        count, step = (torch.zeros(1, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64))
        results = torch.zeros(world, 3, dtype=torch.int64, device=device)
        self._ctx.device_barrier()  # no peer signals before the flags are zero
        return flags, times, count, step, results

    def _measure_clocks(self) -> list[Offset]:
        """Return every rank's clock against rank 0's, as rank 0 measured it."""
        self._recorded()
        ctx = self._ctx
        ctx.barrier()  # all events of earlier work are recorded
        clock_offset_kernel[(1,)](
            ctx.get_device_context(), *self._clock, _ROUND_TRIPS, WORLD_SIZE=ctx.num_ranks, num_warps=1, **FUSED
        )
        offsets = self._clock[-1].tolist()
        ctx.check()
        return ctx.hosts.all_gather([Offset(ticks, trip // 2, at) for ticks, trip, at in offsets])[0]

    def _aligned(self, clocks: list[Offset]) -> np.ndarray:
        rank = self._ctx.cur_rank
        return align(self.events(), self._began[rank], clocks[rank])


def align(events: np.ndarray, before: Offset, after: Offset) -> np.ndarray:
    """Return `events` in order of time, in ns on rank 0's clock, by the offsets measured before and after them."""
    aligned = events[np.lexsort((-events["end"], events["begin"]))]
    drift = (after.ticks - before.ticks) / max(1, after.at - before.at)
    begin = aligned["begin"] - before.ticks
    begin = begin - np.rint(drift * (begin - before.at)).astype(np.int64)
    lasted = aligned["end"] - aligned["begin"]  # by the rank's own clock
    aligned["end"] = np.where(aligned["end"] == 0, 0, _nanoseconds(begin + lasted))
    aligned["begin"] = _nanoseconds(begin)
    return aligned


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"


def _nanoseconds(ticks: Any) -> Any:
    return ticks * (10**9 // platform.ticks(1))


@dataclass(frozen=True)
class _Part:
    """The part of a trace that one rank contributes."""

    rank: int
    device: str
    events: np.ndarray
    dropped: int
    clock_error_ns: int
    clock_step_ns: int


def chrome_trace(parts: list[_Part], names: dict[int, str], start: int) -> dict[str, Any]:
    """Return Chrome's trace format of several ranks' aligned events; time 0 is `start` ns."""
    written: list[dict] = []
    for part in parts:
        label = {"name": f"rank {part.rank}: {part.device}"}
        written.append({"ph": "M", "name": "process_name", "pid": part.rank, "args": label})
        threads: dict[tuple[int, int], int] = {}
        for event, lane in zip(part.events, lanes(part.events), strict=True):
            line = int(event["multiprocessor"]), int(lane)
            if line not in threads:
                threads[line] = line[0] * 64 + line[1]
                text = f"multiprocessor {line[0]}" + (f", line {line[1] + 1}" if line[1] else "")
                title = {"ph": "M", "name": "thread_name", "pid": part.rank, "tid": threads[line]}
                written.append({**title, "args": {"name": text}})
            written.append(_span(event, part.rank, threads[line], names, start))
    other = {
        "events dropped": {f"rank {part.rank}": part.dropped for part in parts},
        "clock offset within us": {f"rank {part.rank}": part.clock_error_ns / 1e3 for part in parts},
        "clock step us": {f"rank {part.rank}": part.clock_step_ns / 1e3 for part in parts},
    }
    return {"traceEvents": written, "displayTimeUnit": "ns", "otherData": other}


def _span(event: np.void, rank: int, thread: int, names: dict[int, str], start: int) -> dict[str, Any]:
    args: dict[str, Any] = {name: int(event[name]) for name in ("program", "target_rank", "pid_m", "pid_n", "bytes")}
    args["address"] = hex(int(event["address"]))
    if not event["end"]:
        args["unfinished"] = True
    nanoseconds = int(event["end"] - event["begin"]) if event["end"] else 0
    return {
        "ph": "X",
        "name": names.get(int(event["event"]), f"event {event['event']}"),
        "pid": rank,
        "tid": thread,
        "ts": (int(event["begin"]) - start) / 1e3,
        "dur": nanoseconds / 1e3,
        "args": args,
    }


def lanes(events: np.ndarray) -> list[int]:
    """Return for each event, in order of time, a line of its multiprocessor; concurrent events get different lines.

    These are programs, or warps of a program with different work, which keep their lines.
    """
    busy: dict[int, list[tuple]] = {}  # for each line of a multiprocessor: the last event's program and end
    chosen = []
    for event in events:
        who, begin = (int(event["program"]), int(event["thread"])), int(event["begin"])
        lines = busy.setdefault(int(event["multiprocessor"]), [])
        own = (i for i, (owner, _) in enumerate(lines) if owner == who)
        free = (i for i, (_, until) in enumerate(lines) if until <= begin)
        line = next(own, next(free, len(lines)))
        until = max(begin, int(event["end"]), lines[line][1] if line < len(lines) else 0)
        lines[line : line + 1] = [(who, until)]
        chosen.append(line)
    return chosen
