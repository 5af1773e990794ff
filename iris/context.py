"""`Iris`: one rank's handle on the symmetric heap.

It is the host side of everything: tensors on the heap, barriers, broadcast, failure reports. It owns three pieces of
memory besides the heap: the context tensor that kernels read, the status that stops waiting kernels, and the record
through which a failed wait reaches the host.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager, suppress
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

from . import agreement, aliases, platform, registry
from .barrier import DeviceBarrier
from .creation import agree, refusal, requested
from .device import bounds, waits
from .device.context import HEADER, pack
from .errors import (
    ArgumentError,
    CaptureError,
    NotSymmetricError,
)
from .group import Ranks
from .heap import GRANULE, Heap
from .joining import join
from .launch.streams import SideStream
from .log import rank_logger
from .memory.allocators import map_segment
from .memory.offsets import rounded
from .peers import PeerMethods
from .tracing import Tracing

if TYPE_CHECKING:
    from iris_ops.ops import Ops

    from .ccl.collectives import Collectives
    from .group import Members
    from .memory.pool import Pool


def iris(
    heap_size: int = 1 << 30, allocator_type: str = "torch", group: Members = None, invariant: str | None = None,
    copy_engine: str | None = None, across: Members = None,
) -> Iris:  # fmt: skip
    """Create the symmetric heap and return this rank's handle on it. Collective: every rank calls it.

    Args:
        heap_size: bytes on each rank, the same on all, rounded up to a multiple of 256.
        allocator_type: "torch" (PyTorch symmetric memory on GPUs, shared memory between processes on CPUs) or "vmem"
            (reserves addresses, maps memory on demand, imports outside tensors; also "vmem_chunked"). The environment
            variable IRIS_ALLOCATOR overrides it.
        group: a process group or one dimension of a DeviceMesh, whose ranks become the world. Default: the default
            group, else the one of torchrun's environment, or on one host srun's or mpirun's, else a world of one.
        invariant: "batch": a row of a result has the same bits whatever the number of rows and its position; "ranks":
            also on any number of ranks; None: whatever is fastest (docs/concepts/determinism.md).
        across: with a context on each of several hosts, the group of this rank's counterparts on all of them, such as
            mesh["hosts"] with `group=mesh["tp"]`; `ctx.ops` then adds over the ranks of all hosts
            (docs/guides/several-hosts.md).
        copy_engine: must be None; accepted for code written for ROCm/iris.

    Returns:
        The context.

    Raises:
        ArgumentError: for bad arguments.
        PlatformError: if the machine does not fit, for example with fewer GPUs than ranks, or if the ranks run on
            several hosts.
        HeapExhausted: if the memory cannot be allocated.

    Errors are raised on every rank.
    """
    return Iris(heap_size, allocator_type, group, invariant, copy_engine, across)


class Iris(PeerMethods):
    """Hold one rank's end of the symmetric heap. Use it as a context manager, or call `close()`.

    Make it with `iris.iris`, which documents the parameters. Attributes: `cur_rank`, `num_ranks`; `comm`, which
    connects their processes; `device` and its index, `gpu_id`; `heap_size` in bytes; `heap_bases` as `get_heap_bases()`
    gives them; `group_name`, by which compiled graphs find the context; `invariant`, the guarantee for a row's bits;
    `across`, this rank's counterparts on other hosts, and `across_rate`, how fast data travels to them, or None.
    """

    def __init__(
        self, heap_size: int = 1 << 30, allocator_type: str = "torch", group: Members = None,
        invariant: str | None = None, copy_engine: str | None = None, across: Members = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._closed = True  # until it is built
        self._thread = threading.get_ident()
        self.hosts = self.comm = Ranks(group)
        try:
            allocator = os.environ.get("IRIS_ALLOCATOR", allocator_type)
            self._make(heap_size, allocator, invariant, copy_engine, across)
        except BaseException:
            self.hosts.close()
            raise
        self.group_name = self.hosts.name  # by which compiled graphs find this context
        registry.add(self.group_name, self)
        self._closed = False

    def _make(
        self, heap_size: int, allocator: str, invariant: str | None, copy_engine: str | None, across: Members
    ) -> None:  # fmt: skip
        """Build the context in steps of all ranks: where a step fails on one, it fails on all."""
        ranks = self.hosts
        self.cur_rank, self.num_ranks = ranks.rank, ranks.size
        self.log = rank_logger(self.cur_rank, self.num_ranks)
        self.device = ranks.together("the device", self._own_device)
        self.gpu_id = self.device.index or 0
        settings = str(heap_size), str(allocator), os.environ.get(agreement.ENV_DEBUG) or "0", repr(invariant)
        requests = ranks.all_gather(
            requested(self.device, self._device_name(), settings, refusal(heap_size, copy_engine, invariant, across)),
            "the creation of a context",
        )
        agree(requests)
        self.invariant = invariant
        gpus = [request.gpu for request in requests if request.gpu]
        if self.cur_rank == 0 and len(set(gpus)) < len(gpus):
            self.log.warning(f"{len(gpus)} ranks take turns on {len(set(gpus))} GPU(s): right, but no time tells")
        if (joined := join(across, ranks, self)) is not None:
            self.across, self.across_rate = joined
        self.heap_size = rounded(int(heap_size), GRANULE)
        self._segment = map_segment(allocator, self.heap_size, self.device, ranks)
        try:
            ranks.together("the memory", self._furnish)  # every heap is mapped and zeroed before any rank writes to it
        except BaseException:
            self._segment.close()
            raise

    def _own_device(self) -> torch.device:
        device = platform.device(self.cur_rank, self.num_ranks)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return device

    def _furnish(self) -> None:
        """Create the heap and all else that the context owns."""
        self.heap = Heap(self._segment)
        # both in one block, for they are small
        memory = self.heap.reserve((DeviceBarrier.WORDS * self.num_ranks + 1,), torch.int32).zero_()
        self._status = memory[-1:]
        self._record = torch.zeros(
            waits.RECORD_WORDS, dtype=torch.int64, device="cpu", pin_memory=self.device.type == "cuda"
        )
        self._record_view = self._record.numpy().data
        fields = pack(
            self.cur_rank,
            self._segment.bases,
            self._segment.span,
            self.hosts.pids,
            self._status.data_ptr(),
            self._record.data_ptr(),
            platform.timeout_ticks(),
        )
        self._context_tensor = torch.tensor(fields, dtype=torch.int64, device=self.device)
        self._barrier = DeviceBarrier(self.device, self._context_tensor, self.num_ranks, memory[:-1])
        self.heap_bases = self._context_tensor[HEADER.value : HEADER.value + self.num_ranks].view(torch.uint64)
        bounds.add(self._segment.bases, self._segment.span)
        self.heap.heap_bases = self.heap_bases
        self._difference = ""  # between heaps, once it is known
        self._refused = ""  # the error of the last call that this rank refused
        self._handed_out = fields[-1]
        self.agreement = agreement.Agreement(self.hosts) if agreement.enabled() and self.num_ranks > 1 else None
        self._pool: Pool | None = None
        self.side = SideStream(self.device)
        platform.synchronize(self.device)

    def get_rank(self) -> int:
        """Return this rank, from 0; also `ctx.cur_rank`."""
        return self.cur_rank

    def get_num_ranks(self) -> int:
        """Return how many ranks the context has; also `ctx.num_ranks`."""
        return self.num_ranks

    def get_device(self) -> torch.device:
        """Return the device of this rank, on which its heap lies; also `ctx.device`."""
        return self.device

    def get_device_id(self) -> int:
        """Return the index of this rank's GPU among those that the process sees; 0 on a CPU. Also `ctx.gpu_id`."""
        return self.gpu_id

    def get_cu_count(self) -> int:
        """Return how many multiprocessors (compute units) the device has; 1 in the interpreter."""
        return platform.num_programs(self.device)

    @aliases.keywords(source_rank="src")
    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Return rank `src`'s `value` on every rank. Collective.

        Args:
            value: tensors, arrays, numbers, lists, any object that can be pickled; ignored on other ranks.
            src: the rank that has the value.

        Returns:
            The value, with its type. A tensor arrives on the device where `src` has it (the rank's own, for a GPU).

        Raises:
            ArgumentError: for a `src` outside the ranks or a value that cannot be pickled.
        """
        self.check()
        if isinstance(src, bool) or not isinstance(src, int) or not 0 <= src < self.num_ranks:
            raise ArgumentError(f"src is {src!r}; expected a rank from 0 to {self.num_ranks - 1}")
        self.barrier()  # whatever the value, all earlier launches have completed
        with self.exchanging():
            return self.hosts.broadcast(value, src)

    @contextmanager
    def memory_pool(self) -> Iterator[None]:
        """Make torch allocate device memory on the heap inside `with ctx.memory_pool():`. Collective.

        Every rank makes the same allocations in it, from one thread (`iris/memory/pool.py`).

        Returns:
            A context manager.

        Raises:
            HeapExhausted: when the heap is full.
            NotSymmetricError: at the end of a block whose tensors lie elsewhere on other ranks.
        """
        self.check()
        if platform.is_capturing(self.device):
            raise CaptureError("memory_pool() is collective and cannot be entered while a graph is captured")
        if self._pool is None:
            from .memory.pool import pool_of

            self._pool = pool_of(self.heap, self.device)
        with self._pool.use():
            yield
        self.barrier()
        with self.exchanging():
            layouts = self.hosts.all_gather(self._pool.layout(), "the end of memory_pool()")
        if len(set(layouts)) > 1:
            raise NotSymmetricError(
                "allocations of memory_pool() lie at different offsets on different ranks; expected the same "
                "allocations, and the same tensors alive, on every rank at the end of the block"
            )

    def trim(self) -> int:
        """Return unused memory of the heap to the system; return how many bytes. Collective.

        With the allocator "torch", whose memory is one piece, the result is 0.
        """
        self.barrier()  # no peer may still use the unmapped memory
        return self.heap.trim()

    @property
    def ops(self) -> Ops:
        """Return the fused operations of `iris_ops`; with `across`, those of `iris_ops.hierarchical`."""
        from iris_ops.hierarchical import ops_of  # which imports this package

        return self.once(ops_of)

    @property
    def ccl(self) -> Collectives:
        """Return the collectives of `iris.ccl`."""
        from .ccl.collectives import Collectives

        return self.once(Collectives)

    @property
    def tracing(self) -> Tracing:
        """Return the recorder of events inside kernels, which exports a timeline (`iris/tracing.py`)."""
        self.check()
        return self.once(Tracing)

    def close(self) -> None:
        """Free the heap. Collective; using the context afterwards raises `ClosedError`. Closing twice is harmless.

        Waits for a `generate` in another thread. Raises `ThreadError` if the context belongs to another running thread.
        """
        if self._closed:
            return
        self._await_thread()
        try:
            if not self._record_view[0] and self.hosts.lost is None:
                self.barrier()  # no peer may still be writing here
                for look in self.on_close:
                    look()
        finally:
            self._end()

    def _end(self) -> None:
        self._closed = True
        registry.remove(self.group_name)
        if self._pool is not None:
            self._pool.close()
        self._components.clear()  # they hold heap memory
        self.on_change.clear()
        self.on_close.clear()
        self.on_leave.clear()
        self._pool = None
        del self._barrier  # it does, too
        self.agreement = None
        bounds.remove(self._segment.bases)
        self.hosts.close()
        self._segment.close()

    def _leave(self, error: BaseException) -> None:
        """Close without the other ranks, which an `error` keeps this one from waiting for; their waits end at once."""
        self._await_thread()
        self._announce_departure(error)
        self._end()

    def __enter__(self) -> Iris:
        self.check()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or self._closed:
            self.close()
        else:
            self._leave(error)

    def __deepcopy__(self, memo: dict) -> Iris:
        return self  # the copy of a model runs on the same ranks

    def __reduce__(self) -> Any:
        raise ArgumentError(
            "a context, or a model split over one, cannot be pickled; expected data that another process can use: this"
            " rank's state_dict() of a split model, or a folder that its save_pretrained(folder) wrote"
        )

    def debug(self, message: str) -> None:
        """Log `message` with this rank at level DEBUG. `iris.set_logger_level` sets the lowest level that is shown.

        Args:
            message: the text of the line.
        """
        self.log.debug(message)

    def info(self, message: str) -> None:
        """Log `message` with this rank at level INFO, the default level.

        Args:
            message: the text of the line.
        """
        self.log.info(message)

    def warning(self, message: str) -> None:
        """Log `message` with this rank at level WARNING.

        Args:
            message: the text of the line.
        """
        self.log.warning(message)

    def error(self, message: str) -> None:
        """Log `message` with this rank at level ERROR. It raises nothing.

        Args:
            message: the text of the line.
        """
        self.log.error(message)

    def _device_name(self) -> str | None:
        if self.device.type == "cpu":
            return None
        return str(torch.cuda.get_device_properties(self.device).uuid)


@atexit.register
def _leave_by_exception() -> None:
    """End the peers' waits where an exception ends this process outside of any `with` block of an open context.

    Python keeps the exception that ended the main program in `sys.last_value`, before exit functions run; it keeps no
    `SystemExit`. By now all threads but daemons have ended, so no call of this rank is under way.
    """
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException):
        for ctx in registry.opened():
            if ctx.hosts.pids[ctx.cur_rank] == os.getpid():  # not in a fork of the rank
                with suppress(Exception):  # the error that ends the process may be the device's
                    ctx._announce_departure(error)


def _close_in_a_fork() -> None:
    """Close the contexts of a forked process without their ranks: it has a copy of the book-keeping of their heaps.

    It would allocate what the rank itself allocates next, and signal to peers in the rank's place. A rank without peers
    keeps its context: a fork of it may save a model, say.
    """
    for ctx in registry.opened():
        if ctx.num_ranks == 1:
            continue
        ctx._closed = True
        ctx._closed_because = (
            f"this process was forked from rank {ctx.cur_rank}, which has the context; expected calls of the rank's own"
            " process only"
        )


os.register_at_fork(after_in_child=_close_in_a_fork)
