"""`Rank`: the interface to one rank for all modules below the context.

It has the rank's number, device, heap and the context tensor that kernels read, and checks whether the rank may
continue. `Iris` (`context.py`) is a `Rank` that a user makes and closes. Launchers, collectives and fused ops hold a
`Rank`, so no module below imports the context, and the context can import each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from . import failures, nvtx, platform
from .agreement import REFUSAL
from .barrier import DeviceBarrier
from .device import waits
from .device.arch import has_ended
from .errors import (
    ArgumentError,
    CaptureError,
    ClosedError,
    ExpertError,
    IrisError,
    NotSymmetricError,
    PeerLostError,
    ThreadError,
)
from .heap import span
from .invariance import Promising
from .launch import relaunch

if TYPE_CHECKING:
    from .across import Across, Rate
    from .agreement import Agreement
    from .group import Members, Ranks
    from .heap import Heap
    from .launch.streams import SideStream
    from .memory.base import Segment

T = TypeVar("T")

_THREAD_ENDS_S = 1.0  # for a thread that has made its last call, before the context is closed in another


class Rank(Promising):
    """One rank of a symmetric heap.

    `hosts`: the processes of all ranks and their exchanges. `heap`: the memory of this rank's tensors and workspaces.
    `side`: the stream of calls with `async_op=True`. `agreement`: with IRIS_DEBUG=1, compares the ranks' calls.
    `recording`: whether fused kernels record events (`tracing.py`). `level`: for which results equal bits are
    promised.
    `across`: the rank's counterparts on other hosts, where the context was made with them.
    """

    cur_rank: int
    num_ranks: int
    device: torch.device
    gpu_id: int
    group_name: str
    hosts: Ranks
    heap: Heap
    heap_bases: torch.Tensor
    side: SideStream
    agreement: Agreement | None
    log: logging.LoggerAdapter
    recording: bool = False
    across: Across | None = None
    across_rate: Rate | None = None
    _segment: Segment
    _context_tensor: torch.Tensor
    _record_view: memoryview
    _status: torch.Tensor
    _barrier: DeviceBarrier
    _closed: bool
    _thread: int
    _closed_because = "this context was closed; make a new one with iris.iris()"
    _difference: str  # message about heaps that differ, or a peer that left, once known
    _departure: PeerLostError | None = None  # why this rank makes no further call
    _handed_out: int  # the lowest offset of memory that the library allocates for results

    def __init__(self) -> None:
        self._components: dict[Callable[..., Any], Any] = {}
        self.on_change: list[Callable[[], None]] = []
        self.on_close: list[Callable[[], None]] = []  # called when all ranks have come, and nothing runs
        self.on_leave: list[Callable[[BaseException], None]] = []  # called with the error that ends this rank's calls
        self._visitor: int | None = None  # the thread inside `in_this_thread`
        self._visiting = threading.Lock()

    def once(self, make: Callable[..., T]) -> T:
        """Return `make(self)`, cached from the first call on: the rank's collectives, fused ops and tracing."""
        component = self._components.get(make)
        if component is None:
            self.check()
            component = self._components[make] = nvtx.with_ranges(make(self))
        return component

    def forget_launches(self) -> None:
        """Drop cached launches, for a kernel or memory that they use has changed."""
        for forget in self.on_change:
            forget()

    # --- arguments of kernels ----------------------------------------------------------------------------------------

    def get_heap_bases(self) -> torch.Tensor:
        """Return uint64 [num_ranks] on the device: the address of each rank's heap in this process."""
        self.check()
        return self.heap_bases

    def get_device_context(self) -> torch.Tensor:
        """Return the int64 tensor for `DeviceContext.initialize`. Its layout is not part of the API."""
        self.check()
        return self._context_tensor

    def view_at(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Return `rank`'s counterpart of `tensor` on the heap. `Iris.peer_view` checks its arguments first."""
        return relaunch.alias(tensor, self._segment.bases[rank] - self._segment.bases[self.cur_rank])

    def hand_out_from(self, offset: int) -> None:
        """Mark the heap from `offset` on as the library's, where an `out` may lie at different offsets on each rank.

        Below it, in the users' part, kernels expect the same offset on all ranks (`await_entered`).
        """
        if offset < self._handed_out:
            self._handed_out = offset
            self._context_tensor[-1] = offset
            platform.synchronize(self.device)  # before a call in any stream

    def hands_out(self, offset: int) -> bool:
        """Return whether this offset of the heap is in the library's part, where offsets may differ by rank."""
        return self._handed_out <= offset < self.heap.size  # imported memory follows

    def place_of(self, tensor: torch.Tensor) -> str:
        """Return where `tensor` lies, in the words by which ranks compare it: its offset in the users' part, if any."""
        begin, heap = tensor.data_ptr(), self.heap
        inside = heap.holds(begin, begin + span(tensor)) and not self.hands_out(begin - heap.base)
        return f"at {begin - heap.base} of the heap" if inside else "outside the heap"

    # --- ranks that wait for each other ------------------------------------------------------------------------------

    def new_barrier(self) -> DeviceBarrier:
        """Return a barrier with its own counts, for another stream than that of `device_barrier`. Collective."""
        memory = self.heap.reserve((DeviceBarrier.WORDS * self.num_ranks,), torch.int32).zero_()
        return DeviceBarrier(self.device, self._context_tensor, self.num_ranks, memory)

    def barrier(self, stream: torch.cuda.Stream | None = None, group: Members | Sequence[int] = None) -> None:
        """Wait for the device, or for `stream`, then until every rank (of `group`) has called this.

        `group`: a process group, one dimension of a DeviceMesh or a list of ranks of this context, with this one in it.
        Raises `PeerLostError` naming a rank that did not come in time, `CaptureError` while a graph is captured,
        `ArgumentError` for bad arguments.
        """
        if stream is not None and not isinstance(stream, torch.cuda.Stream):
            raise ArgumentError(f"stream is {stream!r}; expected None or a torch.cuda.Stream")
        if platform.is_capturing(self.device):
            raise CaptureError("barrier() waits on the host and cannot be captured; use device_barrier()")
        platform.synchronize(self.device, stream)
        self.device_barrier(group)
        platform.synchronize(self.device)
        self.check()

    def device_barrier(self, group: Members | Sequence[int] = None) -> None:
        """Enqueue a barrier of the ranks (of `group`, as in `barrier`) in the current stream.

        Can be captured and replayed. Raises `PeerLostError` in a later call where a rank did not come in time.
        """
        self.check()
        members = tuple(self.hosts.members(group))
        self.compare("a barrier", members)
        self.side.join()
        self._barrier(members, self.heap.digest)
        self.check()

    def compare(self, call: str, members: Sequence[int] | None = None, **facts: Any) -> None:
        """Raise on all `members`, by default all ranks, where their collective calls differ, with IRIS_DEBUG=1.

        `ArgumentError` names the `facts` that differ, `PeerLostError` a rank that makes no such call in time
        (`iris/agreement.py`). A library of collective calls may use it for its own.
        """
        if self.agreement is None or platform.is_capturing(self.device):
            return
        with self.exchanging():
            self.agreement.compare(range(self.num_ranks) if members is None else members, call, **facts)

    def report_refusal(self, call: str, members: Sequence[int] | None, error: IrisError) -> None:
        """Keep the `error` by which this rank refuses a `call`, for the message of heaps that differ afterwards.

        With IRIS_DEBUG=1 this rank also sends it to the ranks that compare the call. They raise, too, in place of
        using what an earlier or a later call of this rank sends.
        """
        self._refused = str(error)
        if self.agreement is not None:
            with suppress(ArgumentError, PeerLostError):  # this rank raises its own
                self.compare(call, members, **{REFUSAL: error})

    @contextmanager
    def reporting_refusals(self, call: str, members: Sequence[int] | None) -> Iterator[None]:
        """Call `report_refusal` where the checks of a `call` inside the block raise."""
        try:
            yield
        except IrisError as error:
            self.report_refusal(call, members, error)
            raise

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Enclose an exchange of the hosts: a lost rank makes the context void, as after a wait in a kernel."""
        try:
            yield
        except PeerLostError:
            waiter = waits.WAITERS.index("an exchange of the hosts")
            lost = self.hosts.lost
            assert lost is not None  # known where the error is raised
            for at, word in enumerate((waiter, self.cur_rank, lost, 0, 0), 1):
                self._record_view[at] = word
            self._record_view[0] = waits.LOST.value
            raise

    # --- whether this rank may continue ------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise where the context cannot be used, or not in this thread. Costs no device synchronisation.

        `ClosedError` after `close()`; `ThreadError` in another thread than the context's; `PeerLostError` once a wait
        in a kernel has failed; `NotSymmetricError` once kernels have found that the ranks' heaps differ; `ExpertError`
        once they have found a routing index out of range.
        """
        if self._closed or self._record_view[0] or threading.get_ident() != self._thread:
            self._refuse()

    def take_over(self) -> None:
        """Make the calling thread the one that uses the context, after the previous one has ended its last call.

        Ranks make the same calls in the same order, which two threads of a rank would not. So a context belongs to one
        thread, at first to the one that made it, and calls from any other raise `ThreadError`. The thread's current GPU
        becomes the context's, because torch starts each new thread on the first GPU.
        """
        if self._closed:
            self._refuse()
        with self._visiting:
            self._check_no_visitor()
            self._thread = threading.get_ident()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """Let the calling thread use the context inside the block; after it, return it to the previous thread.

        For one call, such as a `generate` whose tokens another thread reads. The thread's current GPU becomes the
        context's. Raises `ThreadError` while another thread is inside such a block, `ClosedError` after `close()`.
        """
        if self._closed:
            self._refuse()
        with self._visiting:
            self._check_no_visitor()
            before = self._visitor, self._thread
            self._visitor = self._thread = threading.get_ident()
        if before[1] != self._thread and self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        try:
            yield
        finally:
            with self._visiting:
                self._visitor, self._thread = before

    def _check_no_visitor(self) -> None:
        if self._visitor not in (None, threading.get_ident()):
            raise self._other_thread()

    def _await_thread(self) -> None:
        """Wait for the end of another thread's `in_this_thread`, and of the thread that took the context over.

        The context can be closed here afterwards. Raises `ThreadError` where that thread does not end.
        """
        deadline = time.monotonic() + _THREAD_ENDS_S
        while threading.get_ident() != self._thread:
            if self._visitor is not None:
                deadline = time.monotonic() + _THREAD_ENDS_S
            elif all(each.ident != self._thread for each in threading.enumerate()):
                self._thread = threading.get_ident()
            elif time.monotonic() > deadline:
                raise self._other_thread()
            time.sleep(0.005)

    def _refuse(self) -> None:
        if self._closed:
            raise ClosedError(self._closed_because)
        self._check_thread()
        self.check_failure()

    def check_failure(self) -> None:
        """Raise the error of the first wait in a kernel that failed, if one has; from any thread, unlike `check`."""
        kind, waiter, rank, peer, expected, seen = self._record_view
        if not kind:
            return
        if kind in (waits.OUT_DIFFERS.value, waits.HEAPS_DIFFER.value):
            if not self._difference:
                self._difference = failures.heaps_differ_message(
                    self.hosts, self.heap, self._refused, kind, waiter, peer, expected
                )
            raise NotSymmetricError(self._difference)
        if kind == waits.LEFT.value and peer == self.cur_rank and self._departure is not None:
            raise PeerLostError(str(self._departure))
        if kind == waits.LEFT.value and not self._difference and threading.get_ident() == self._thread:
            self._difference = failures.left_message(self.hosts, waiter, peer)
        if kind == waits.LEFT.value and self._difference:
            raise PeerLostError(self._difference)
        if kind == waits.BAD_EXPERT.value:
            raise ExpertError(failures.bad_expert_message(waiter, expected, seen))
        if kind == waits.OUTSIDE_HEAP.value:
            raise ArgumentError(failures.outside_heap_message(waiter, rank, expected, seen))
        raise PeerLostError(failures.lost_message(kind, waiter, rank, peer, expected, seen))

    def leave_for(self, error: PeerLostError) -> None:
        """End this rank's calls: later ones raise `error` again, and ranks that wait for this one raise an error.

        Args:
            error: the error that later calls of this rank raise.
        """
        if self._closed or self._record_view[0]:
            return
        self._announce_departure(error)
        self._departure = error
        waiter = waits.WAITERS.index("an exchange of the hosts")
        for at, word in enumerate((waiter, self.cur_rank, self.cur_rank, 0, 0), 1):
            self._record_view[at] = word
        self._record_view[0] = waits.LEFT.value

    def _announce_departure(self, error: BaseException) -> None:
        """End the other ranks' waits for this one, which makes no further call because of `error`.

        The mark that ends them follows this rank's launches in stream order, so earlier data still reaches the peers.
        """
        for leave in self.on_leave:
            leave(error)
        if self._record_view[0]:
            return  # they have lost this context, too
        self.hosts.leave(error)
        mark = torch.full((1,), waits.departure_mark(self.cur_rank), dtype=torch.int32, device="cpu")
        mark = mark.pin_memory() if self.device.type == "cuda" else mark
        bases = self._segment.bases
        for rank in range(self.num_ranks):
            if rank != self.cur_rank:
                theirs = relaunch.alias(self._status, bases[rank] - bases[self.cur_rank])
                theirs.copy_(mark, non_blocking=True)
        platform.synchronize(self.device)

    def lost_inside(self) -> str:
        """Return which other rank of the context has left or ended, and how; empty where none has, as far as is known.

        From any thread. On GPUs it sees only processes that ended: a mark in device memory could be read only after the
        work in front of it.
        """
        if self._closed:  # or not made yet
            return ""
        mark = int(self._status[0]) if self.device.type == "cpu" else 0
        for peer in range(self.num_ranks):
            if mark and mark == waits.departure_mark(peer):
                call = waits.WAITERS.index("an exchange of the hosts")
                return failures.left_message(self.hosts, call, peer) or f"rank {peer} left by an exception"
        for peer, pid in enumerate(self.hosts.pids):
            if peer != self.cur_rank and has_ended(pid):
                return f"the process of rank {peer} ended"
        return ""

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise self._other_thread()

    def _other_thread(self) -> ThreadError:
        return ThreadError(
            f"thread {threading.current_thread().name!r} uses a context that belongs to another thread; expected "
            f"calls from one thread, so that all ranks make them in the same order. To hand the context over, call "
            f"ctx.take_over() in the thread that goes on, when the other has ended its last call."
        )
