"""Record events inside kernels: what a program did, for which rank, from when to when.

`handle = ctx.tracing.record_event_start(...)`, the work, `ctx.tracing.record_event_end(handle)`. The buffer is local
memory that `Iris.tracing.enable` sets up: int64 `[events so far, 0 ...]`, then one `EVENT_WORDS` record an event. A
common counter gives each event its record; one beyond the capacity is counted and stored nowhere. Without the
constexpr flag of `DeviceContext.initialize` nothing of it is compiled.

The clock is read last at a start and first at an end, so a span holds the work alone. Taking a record is an atomic
whose result the program awaits, about a microsecond, just before the span.
"""

import triton
import triton.language as tl

from ..triton_private import aggregate, base_value
from . import arch
from .function import device_function

HEADER_WORDS = tl.constexpr(8)
EVENT_WORDS = tl.constexpr(8)

# Event ids; a user's own begin at USER.
LOAD = tl.constexpr(0)
STORE = tl.constexpr(1)
GET = tl.constexpr(2)
PUT = tl.constexpr(3)
COPY = tl.constexpr(4)
ATOMIC = tl.constexpr(5)
WAIT = tl.constexpr(6)
PRODUCT = tl.constexpr(7)
PUSH = tl.constexpr(8)
SUM = tl.constexpr(9)
SIGNAL = tl.constexpr(10)
USER = tl.constexpr(64)
NAMES = ("load", "store", "get", "put", "copy", "atomic", "wait", "product", "push", "sum", "signal")


@aggregate
class TraceEvent:
    """Name the event ids inside kernels: `iris.TraceEvent().put`. All atomics are one event here."""

    load: tl.constexpr
    store: tl.constexpr
    get: tl.constexpr
    put: tl.constexpr
    copy: tl.constexpr
    atomic_add: tl.constexpr
    atomic_sub: tl.constexpr
    atomic_cas: tl.constexpr
    atomic_xchg: tl.constexpr
    atomic_xor: tl.constexpr
    atomic_and: tl.constexpr
    atomic_or: tl.constexpr
    atomic_min: tl.constexpr
    atomic_max: tl.constexpr
    fetch: tl.constexpr
    compute: tl.constexpr
    reduce: tl.constexpr
    wait: tl.constexpr
    barrier: tl.constexpr

    @triton.constexpr_function
    def __init__(self):  # one name a line: triton 3.6 reads no other assignment
        self.load = LOAD
        self.fetch = LOAD
        self.store = STORE
        self.get = GET
        self.put = PUT
        self.copy = COPY
        self.atomic_add = ATOMIC
        self.atomic_sub = ATOMIC
        self.atomic_cas = ATOMIC
        self.atomic_xchg = ATOMIC
        self.atomic_xor = ATOMIC
        self.atomic_and = ATOMIC
        self.atomic_or = ATOMIC
        self.atomic_min = ATOMIC
        self.atomic_max = ATOMIC
        self.compute = PRODUCT
        self.reduce = SUM
        self.wait = WAIT
        self.barrier = WAIT


@aggregate
class DeviceTracing:
    """Record events of this program: `DeviceContext.tracing`."""

    buffer: base_value
    capacity: base_value
    ENABLED: tl.constexpr

    @triton.constexpr_function
    def __init__(self, buffer, capacity, ENABLED):
        self.buffer = buffer
        self.capacity = capacity
        self.ENABLED = tl.constexpr(getattr(ENABLED, "value", ENABLED))

    @device_function
    def record_event_start(self, event_id, target_rank, address, pid_m=0, pid_n=0, mask=None, nbytes=None):
        """Begin a span; return its handle.

        Args:
            event_id: the kind of event, from `iris.device.tracing`; your own begin at `USER`.
            target_rank: the peer, or -1 for all.
            address: a pointer, or a block of them, of which the lowest is stored.
            pid_m: the tile's row.
            pid_n: the tile's column.
            mask: which elements of `address` count; None for all.
            nbytes: the payload in bytes; by default as many as `address`, under `mask`, has.
        """
        if self.ENABLED:
            index = tl.atomic_add(self.buffer, 1, mask=self.capacity > 0, sem="relaxed", scope="gpu")
            stored = (index >= 0) & (index < self.capacity)
            record = self.buffer + HEADER_WORDS + index * EVENT_WORDS
            program = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
            tl.store(record + 1, 0, mask=stored)
            tl.store(record + 2, _pair(event_id, arch.multiprocessor()), mask=stored)
            tl.store(record + 3, _pair(program, target_rank), mask=stored)
            tl.store(record + 4, _lowest(address, mask), mask=stored)
            tl.store(record + 5, _pair(pid_m, pid_n), mask=stored)
            tl.store(record + 6, _payload(address, mask) if nbytes is None else nbytes, mask=stored)
            tl.store(record + 7, arch.thread(), mask=stored)  # the thread that stores the event
            tl.store(record, arch.clock(), mask=stored)
            return tl.where(stored, index, -1)
        else:
            return -1

    @device_function
    def record_event_end(self, handle):
        """End the span of `handle`.

        Args:
            handle: the result of `record_event_start`.
        """
        if self.ENABLED:
            now = arch.clock()
            tl.store(self.buffer + HEADER_WORDS + handle * EVENT_WORDS + 1, now, mask=handle >= 0)


@device_function
def tile_bytes(rows, cols, ROWS, COLS, dtype: tl.constexpr):
    """Return the bytes of the part of a tile [ROWS, COLS] that lies within `rows` and `cols`, for `nbytes`."""
    return max(0, min(rows, ROWS)) * max(0, min(cols, COLS)) * (dtype.primitive_bitwidth // 8)


@device_function
def device_tracing(ctx_ptr, enabled: tl.constexpr):
    """Return the tracing of a context tensor, whose entries 5 and 6 are its buffer's address and capacity in events."""
    if enabled:
        return DeviceTracing(tl.load(ctx_ptr + 5).to(tl.pointer_type(tl.int64)), tl.load(ctx_ptr + 6), True)
    else:
        return DeviceTracing(ctx_ptr, ctx_ptr, False)  # neither is read


@device_function
def _pair(low, high):
    """Return two int32 as one int64. Where both kinds stand side by side, LLVM joins their stores for AMD so that an
    int64 begins in an odd register, and then may refuse to go on.
    """
    return (tl.cast(high, tl.int64) << 32) | (tl.cast(low, tl.int64) & 0xFFFFFFFF)


@device_function
def _lowest(address, mask):
    places = address.to(tl.int64)
    if mask is not None:
        places = tl.where(mask, places, 2**63 - 1)
    if places.type.is_block():
        return tl.min(places)
    else:
        return places


@device_function
def _payload(address, mask):
    nbytes: tl.constexpr = max(1, address.dtype.scalar.element_ty.primitive_bitwidth // 8)
    if mask is None:
        return nbytes * address.numel
    else:
        inside = (tl.where(mask, address.to(tl.int64), 0) != 0).to(tl.int64)
        if inside.type.is_block():
            return nbytes * tl.sum(inside)
        else:
            return nbytes * inside
