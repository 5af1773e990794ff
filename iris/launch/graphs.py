"""Launch repeated calls of several kernels as one CUDA graph each.

A launch, an event or a copy costs the host microseconds, and an op that overlaps a library's products with copies is a
dozen of them. Such a call, once repeated, is captured into a separate graph. From then on, an eager call replays it in
the current stream. Launches and replays may alternate: all counters live on the device, and both begin after all work
of the current stream and end with all lanes joined. So a rank need not know which of the two its peers do, and a
capture concerns this rank alone. While the user captures, the launches go into the user's graph one by one.

What a graph refers to must outlive it. The tensors of a call do, for it is repeated only with tensors at the same
addresses. cuBLAS's workspace (32 MiB on an H200, another for products with a bias) is torch's: kept by handle and
stream, allocated by the first product there, freed whenever somebody clears such workspaces. Hence a stream of our own
and a pool of memory that is never freed while this object lives: whatever becomes of the workspace, its memory stays,
and calls that follow each other in a stream may share it. An executable graph that is dropped while it runs is freed by
the driver at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
import ctypes
import os
import time
from typing import TYPE_CHECKING, Any
import weakref

import torch

from .. import platform
from ..errors import PlatformError
from ..triton_private import launch_listeners

if TYPE_CHECKING:
    from ..rank import Rank

# Runs before a call is captured: calls that come once or twice pay nothing. Runs until the next try, where
# there was no room or no graph.
_RUNS_BEFORE, _RUNS_BETWEEN = 2, 64
# After a capture, none begins for this many times its duration: a prompt whose hundreds of calls were all repeated
# would take twice as long. So captures take a tenth of the host's time at most.
_REST = 9
ENV_GRAPHS = "IRIS_OP_GRAPHS"
_MOST = 512  # graphs that are stored; further calls get none, for no graph is known to be used less often


def enabled() -> bool:
    """Return whether the environment lets calls become graphs. Raise `PlatformError` for a value other than 0 or 1."""
    text = os.environ.get(ENV_GRAPHS) or "1"
    if text not in ("0", "1"):
        raise PlatformError(f"{ENV_GRAPHS} is {text!r}; expected 0, or 1 or nothing")
    return text == "1"


class Graphs:
    """The graphs of calls that follow each other in stream order. `capturer` makes a graph of a call's launches."""

    def __init__(self, ctx: Rank, capturer: Any = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.ctx, self.device = ctx, ctx.device
        self._clock, self._rests_until = clock, -float("inf")
        self.most = _MOST if enabled() else 0
        self._capturer = capturer or Capturer(ctx.device)
        self._graphed: weakref.WeakSet[Graphed] = weakref.WeakSet()
        self.listeners = launch_listeners()

    def __len__(self) -> int:
        return len(self._graphed)

    def of(self, again: Callable[[], bool]) -> Callable[[], bool]:
        """Return a `Graphed` around `again`, a function that repeats the same launches; `again` itself without CUDA."""
        return Graphed(self, again) if self.device.type == "cuda" and torch.version.hip is None else again

    def resting(self) -> bool:
        """Return whether the last capture was too recent for another."""
        return self._clock() < self._rests_until

    def capture(self, call: Graphed, again: Callable[[], bool]) -> torch.cuda.CUDAGraph | None:
        """Return the graph of `call`, or None where there is none for now. After one failure no other is tried."""
        if len(self._graphed) >= self.most:
            return None
        begin = self._clock()
        try:
            graph = self._capturer.capture(again)
        except Exception as error:  # what is wrong with the call itself shows when it is run
            self.most = 0
            reason = str(error).strip().partition("\n")[0]
            self.ctx.log.info(f"calls of several launches get no CUDA graphs and cost the host more: {reason}")
            return None
        end = self._clock()
        self._rests_until = end + _REST * (end - begin)
        if graph is not None:
            self._graphed.add(call)
        return graph


class Graphed:
    """A call that is launched kernel by kernel at first, then as a graph."""

    def __init__(self, graphs: Graphs, again: Callable[[], bool]) -> None:
        self._graphs, self._again = graphs, again
        self._graph: torch.cuda.CUDAGraph | None = None
        self._runs_before_capture = _RUNS_BEFORE

    def __call__(self) -> bool:
        graphs = self._graphs
        enter, leave = graphs.listeners
        if enter or leave or platform.is_capturing(graphs.device):
            return self._again()
        if self._graph is None:
            if self._runs_before_capture > 0:
                self._runs_before_capture -= 1
            elif not graphs.resting():
                self._graph = graphs.capture(self, self._again)
                self._runs_before_capture = _RUNS_BETWEEN - 1
            if self._graph is None:
                return self._again()
        self._graph.replay()
        graphs.ctx.check()
        return True


class Capturer:
    """The capture of a call, in a separate stream and into separate memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._first: torch.cuda.CUDAGraph | None = None  # as long as it lives, so does the pool

    def capture(self, again: Callable[[], bool]) -> torch.cuda.CUDAGraph | None:
        """Return a graph of what `again` launches; None if it cannot repeat, or if the thread uses another pool."""
        if self._stream is None:
            self._stream, self._pool = _own_stream(self._device), torch.cuda.graph_pool_handle()
        torch.cuda.current_blas_handle()  # a thread's first allocates more than a capture may
        stream = torch.cuda.current_stream(self._device.index)
        self._stream.wait_stream(stream)  # torch prepares the generator of random numbers, which may be in use there
        try:
            with torch.cuda.stream(self._stream):
                return self._captured(again)[0] if self._has_pool() else None
        finally:
            stream.wait_stream(self._stream)

    def _has_pool(self) -> bool:
        """Return whether a capture allocates in the pool; inside `torch.cuda.use_mem_pool` it would not."""
        graph, probe = self._captured(lambda: torch.zeros(1, device=self._device), keep_graph=True)
        self._first = self._first or graph
        segments = torch.cuda.memory_snapshot(self._pool)
        return any(0 <= probe.data_ptr() - segment["address"] < segment["total_size"] for segment in segments)

    def _captured(self, work: Callable[[], Any], keep_graph: bool = False) -> tuple[torch.cuda.CUDAGraph | None, Any]:
        """Return the graph, None if `work` returns False, and that result. `keep_graph`: leave it uninstantiated."""
        graph = torch.cuda.CUDAGraph(keep_graph)
        try:
            # thread-local: other threads (NCCL's watchdog) may use the device meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            result = work()
        finally:
            self._end(graph)
        return graph if result is not False else None, result

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            abandon(self._device, self._pool)
            raise


def abandon(device: torch.device, pool: Any, random: torch.Generator | None = None) -> None:
    """Reset torch's state after a capture that has become invalid.

    Release `pool`, and end the capture for generators, torch's own and `random`, which would refuse to draw; the end of
    another capture resets them.
    """
    with suppress(RuntimeError):  # torch has ended it already
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
    with suppress(RuntimeError):
        graph, anything = torch.cuda.CUDAGraph(), torch.zeros(1, device=device)
        if random is not None:
            graph.register_generator_state(random)
        with torch.cuda.stream(torch.cuda.Stream(device)):
            graph.capture_begin(capture_error_mode="thread_local")
            anything.zero_()
            graph.capture_end()


def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """Create a stream that lives as long as the process: torch reuses its own, with their workspaces, after 32."""
    handle = ctypes.c_void_p()
    non_blocking = 1
    with torch.cuda.device(device):
        error = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), non_blocking)
    if error:
        raise RuntimeError(f"cuStreamCreate: error {error}")
    return torch.cuda.ExternalStream(handle.value, device=device)
