"""The memory that calls of the fused ops share: staging memory, flags and the epoch.

One workspace serves problems of every shape. A rank only stores into a peer that has entered the same call
(`iris/device/sync.py`), and by then the peer has finished all earlier ones. The workspace grows to the largest problem,
in powers of two, and never gives memory back, because a captured graph may still refer to what it used before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris import platform
from iris.ccl.collectives import Collectives
from iris.device.sync import sync_words
from iris.errors import CaptureError
from iris.launch import relaunch
from iris.launch.graphs import Graphs
from iris.launch.streams import Lane, Mark
import torch

if TYPE_CHECKING:
    from iris.rank import Rank

_VIEWS_KEPT = 1024


class Workspace:
    """Staging memory for calls that follow each other in stream order. Making one is collective."""

    def __init__(self, ctx: Rank) -> None:
        refuse_capture(ctx)
        self.ctx = ctx
        self.sync = ctx.heap.reserve((sync_words(ctx.num_ranks),), torch.int32)
        self.sync.zero_()
        self.flags = self.staging = self.exchange = torch.empty(0, dtype=torch.int32, device=ctx.device)
        # [epoch, programs that came so far, flag] of the calls that use the exchange area (`iris/device/lamport.py`)
        self.exchange_sync = torch.zeros(4, dtype=torch.int32, device=ctx.device)
        self.collective = ctx.once(Collectives).new_workspace()  # of the collectives that follow a product
        self.views: dict[object, tuple] = {}  # of `staging`, by problem, and waits for it; gone when it moves
        # of ops that overlap in several streams: two beside the current one, and what orders them
        self.lanes = Lane(ctx.device), Lane(ctx.device)
        self.marks = [Mark(ctx.device) for _ in range(ctx.num_ranks + 1)]  # two, and one a peer
        # what copy engines set after a rank's rows: the number of barriers that it had passed
        self.arrivals = ctx.heap.reserve((ctx.num_ranks,), torch.int32).zero_()
        self._results: list[torch.Tensor] = []
        self._local: dict[str, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []
        self._done: torch.cuda.Event | None = None
        self.barrier = ctx.new_barrier()  # the ops' own, in their lanes
        self.products = relaunch.EarlierCalls()  # of rows that copy engines bring
        self.graphs = Graphs(ctx)  # of calls that are several launches
        ctx.barrier()  # no peer signals here before this rank's flags are zero, and heaps are alike
        self.rendezvous()  # so that it is compiled before it is captured

    def reserve(self, num_flags: int, nbytes: int, exchange: int = 0) -> None:
        """Make room for a problem: int32 flags, bytes of staging, bytes of exchange. The same on all ranks."""
        grown = False
        if num_flags > self.flags.numel():
            # Epochs start at 1. Peers signal only once this rank has entered the call, in stream order after this.
            self.flags, grown = self._new_room(num_flags, torch.int32).zero_(), True
        if nbytes > self.staging.nbytes:
            self.staging, grown = self._new_room(nbytes, torch.uint8), True
            self.views.clear()
            self.products.forget()
        if exchange > self.exchange.nbytes:
            self.exchange, grown = self._new_room(exchange, torch.uint8).fill_(255), True  # the sentinel everywhere
        if grown:
            self.ctx.barrier()  # before a peer's values arrive, the memory holds the sentinel, where peers expect it

    def _new_room(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the heap in place of what is too small. Graphs may still use that; known calls no longer."""
        refuse_capture(self.ctx)
        self.ctx.forget_launches()
        return self.ctx.heap.reserve((room_for(size),), dtype)

    def results(self, nbytes: int) -> torch.Tensor:
        """Return memory in place of an `out` that peers write and that does not lie on the heap.

        Ranks do not wait for each other if it grows: before kernels write, they compare where it lies, as for any
        `out`.
        """
        if not self._results or nbytes > self._results[-1].nbytes:
            self._results.append(self._new_room(nbytes, torch.uint8))
            self.ctx.hand_out_from(self.ctx.heap.offset(self._results[-1]))
        return self._results[-1][:nbytes]

    def local(self, name: str, nbytes: int) -> torch.Tensor:
        """Return this rank's own memory `name`, initially zero, for calls that follow each other. It never shrinks."""
        room = self._local.get(name)
        if room is None or nbytes > room.nbytes:
            refuse_capture(self.ctx)
            if room is not None:
                self._outgrown.append(room)  # a captured graph may still refer to it
            room = self._local[name] = torch.zeros(room_for(nbytes), dtype=torch.uint8, device=self.ctx.device)
        return room[:nbytes]

    def remember(self, problem: object, views: tuple) -> tuple:
        """Keep `views` of the staging memory for `problem`, for a limited number of problems, because prompts have ever
        new lengths."""
        if len(self.views) >= _VIEWS_KEPT:
            self.views.clear()
        self.views[problem] = views
        return views

    def rendezvous(self) -> None:
        """Wait for all ranks in the current stream, by a barrier that is independent of the user's barriers."""
        self.barrier(tuple(range(self.ctx.num_ranks)))
        self.ctx.check()

    def wait(self) -> None:
        """Make the current stream wait for the last call that ran with `async_op=True`."""
        if self._done is not None:
            torch.cuda.current_stream(self.ctx.device).wait_event(self._done)


def room_for(size: int) -> int:
    return 1 << max(12, (size - 1).bit_length())


def refuse_capture(ctx: Rank) -> None:
    """Raise while a CUDA graph is captured: memory would have to grow."""
    if platform.is_capturing(ctx.device):
        raise CaptureError(
            "the first call of a problem sets up its workspace and cannot be captured; call it once before capturing"
        )
