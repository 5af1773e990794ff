"""One kernel that moves tensors from rank to rank: messages, and collectives with a root.

Every rank has a *ring* of slots on its heap for each rank that sends to it. A sender puts a message into the next slots
of its ring at the receiver, which copies it out, or sums it. The sender and the receiver need not call at the same
time: the sender goes on as soon as its message is on its way. Both count the slots that they have used. So each finds
the next slot by itself, whatever calls the other one makes, and a call can be captured and replayed.

    small messages, sums   travel as Lamport values (`iris/device/lamport.py`), a unit in each slot: one hop, no flag
    large messages travel unchanged. Where none of a unit's elements happens to be the sentinel, they are as
                           good as Lamport values. Else a flag follows the unit, and says that all of it has arrived.

A slot is free when its values are the sentinel and its flag is 0; whoever takes a message leaves its slots so. At the
beginning of a rank's next call, one program tells each sender how many slots were taken before: its *credit*. No
sender waits for more than the credit of earlier calls, for a ring holds all that a call sends, or takes.

The programs of a grid, in the order in which they begin: one tells credits; senders; takers; one brings the counts up
to date when all have read them. Senders never wait for takers of their own rank. So it does not matter how many
programs run at once, and the interpreter may run one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import arch
from ..device.context import DeviceContext
from ..device.function import device_function
from ..device.lamport import SENTINEL, any_set, load_bases, put, sum_type, take, widen, without_sentinel
from ..device.sync import signal, signal_ranks, wait, wait_ranks
from ..device.waits import anyone_gone, deadline, is_late, keeps_waiting, report
from .lamport import rounded

SLOT = tl.constexpr(8192)  # bytes
# `counts`, int32 [4, world]: slots that were sent to each rank, that it reported as received, that were received from
# it, that were reported to it. They wrap; the slots of a ring are a power of two.
SENT, _CREDIT, TAKEN, _REPORTED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.constexpr_function
def word_type(dtype, REDUCE):
    """Return the type that carries a Lamport value of `dtype`."""
    bits = dtype.primitive_bitwidth
    return tl.core.get_int_dtype(bits if REDUCE and dtype.is_floating() else 2 * bits, True)


@triton.constexpr_function
def has_words(dtype, REDUCE):
    """Return whether a Lamport type exists for `dtype`: integers of 64 bits are sent unchanged."""
    return dtype.primitive_bitwidth < 64 or (REDUCE and dtype.is_floating())


@triton.constexpr_function
def in_a_slot(dtype):
    return SLOT.value * 8 // dtype.primitive_bitwidth


@device_function
def _of(counts, ranks, rank):
    """Return one rank's count."""
    return tl.sum(tl.where(ranks == rank, counts, 0))


@device_function
def _field(table, message: tl.constexpr, field: tl.constexpr):
    """Return a field of a message in a table, in the order of `in_table`."""
    return table[message][field] >> 4


def in_table(x: int) -> int:
    """Return a number as a table stores it: Triton compiles anew for a 1 in a tuple, and for a multiple of 16."""
    return 16 * x + 3


@device_function
def _needed(table, ranks):
    """Return the number of slots that the messages of a table take with each rank."""
    counts = tl.zeros(ranks.shape, tl.int32)
    for i in tl.static_range(len(table)):
        counts += tl.where(ranks == _field(table, i, 2), _field(table, i, 4).to(tl.int32), 0)
    return counts


@device_function
def _items(table):
    total = _field(table, 0, 6)
    for i in tl.static_range(1, len(table)):
        total += _field(table, i, 6)
    return total


@device_function
def _message(table, item):
    """Return (the message that an item belongs to, without counts, the unit of it that the item is)."""
    address, n, peer, first = _field(table, 0, 0), _field(table, 0, 1), _field(table, 0, 2), _field(table, 0, 3)
    few, end, to, unit = _field(table, 0, 5), _field(table, 0, 6), _field(table, 0, 7), item
    for i in tl.static_range(1, len(table)):
        here = item >= end
        address = tl.where(here, _field(table, i, 0), address)
        n = tl.where(here, _field(table, i, 1), n)
        peer = tl.where(here, _field(table, i, 2), peer)
        first = tl.where(here, _field(table, i, 3), first)
        few = tl.where(here, _field(table, i, 5), few)
        to = tl.where(here, _field(table, i, 7), to)
        unit = tl.where(here, item - end, unit)
        end += _field(table, i, 6)
    return address, n, peer, first, few, to, unit


@device_function
def _at(address, first, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a pointer to element number `first` of an array that begins at `address`."""
    nbytes: tl.constexpr = dtype.primitive_bitwidth // 8
    place = (tl.cast(address, tl.int64) + tl.cast(first, tl.int64) * nbytes).to(tl.pointer_type(dtype))
    return tl.multiple_of(place, 16) if ALIGNED else place


@device_function
def _slot(staging, source, position, slots):
    """Return the address of the slot at a position in a source's message buffer."""
    return staging.to(tl.int64) + (tl.cast(source, tl.int64) * slots + (position & (slots - 1))) * SLOT


@device_function
def _send(
    ctx, bases, staging, flags, slots, sent, ranks, table, item,
    ALIGNED: tl.constexpr, REDUCE: tl.constexpr,
):  # fmt: skip
    """Send a unit of a message to its slot at the receiver, or copy it, if the message is local."""
    address, n, peer, first, few, to, unit = _message(table, item)
    dtype: tl.constexpr = staging.dtype.element_ty
    position = _of(sent, ranks, peer) + first + unit
    if to != 0:
        _copy(address, to, n, unit, dtype, ALIGNED)
    elif few == 0:
        _send_whole(ctx, bases, staging, flags, slots, position, peer, address, n, unit, ALIGNED)
    elif has_words(dtype, REDUCE):
        _send_few(ctx, bases, staging, slots, position, peer, address, n, unit, ALIGNED, REDUCE)


@device_function
def _send_few(
    ctx, bases, staging, slots, position, peer, address, n, unit,
    ALIGNED: tl.constexpr, REDUCE: tl.constexpr,
):  # fmt: skip
    """Send a unit as Lamport values."""
    dtype: tl.constexpr = staging.dtype.element_ty
    word: tl.constexpr = word_type(dtype, REDUCE)
    BLOCK: tl.constexpr = in_a_slot(word)
    lane = tl.arange(0, BLOCK)
    mask = lane < _left(n, unit * BLOCK, dtype, ALIGNED)
    value = tl.load(_at(address, unit * BLOCK, dtype, ALIGNED) + lane, mask=mask, other=0)
    place = _at(_slot(staging, ctx.rank, position, slots), 0, word, True)
    put(ctx, place + lane, _sendable(value, dtype, REDUCE), mask, bases, peer)


@device_function
def _send_whole(ctx, bases, staging, flags, slots, position, peer, address, n, unit, ALIGNED: tl.constexpr):
    """Send a unit unchanged, followed by a flag."""
    dtype: tl.constexpr = staging.dtype.element_ty
    BLOCK: tl.constexpr = in_a_slot(dtype)
    lane = tl.arange(0, BLOCK)
    mask = lane < _left(n, unit * BLOCK, dtype, ALIGNED)
    value = tl.load(_at(address, unit * BLOCK, dtype, ALIGNED) + lane, mask=mask, other=0)
    place = _at(_slot(staging, ctx.rank, position, slots), 0, dtype, True)
    put(ctx, place + lane, value, mask, bases, peer)
    if any_set((value == SENTINEL).to(tl.int32), True):
        signal(ctx, flags + tl.cast(ctx.rank, tl.int64) * slots + (position & (slots - 1)), 1, peer)


@device_function
def _copy(address, to, n, unit, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    BLOCK: tl.constexpr = in_a_slot(dtype)
    lane = tl.arange(0, BLOCK)
    mask = lane < _left(n, unit * BLOCK, dtype, ALIGNED)
    value = tl.load(_at(address, unit * BLOCK, dtype, ALIGNED) + lane, mask=mask)
    tl.store(_at(to, unit * BLOCK, dtype, ALIGNED) + lane, value, mask=mask)


@device_function
def _left(n, begin, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the number of elements from number `begin` on."""
    if ALIGNED:  # so are whole vectors, which the compiler sees by this
        vector: tl.constexpr = 128 // dtype.primitive_bitwidth
        n = n // vector * vector
    return n - begin


@device_function
def _sendable(x, dtype: tl.constexpr, REDUCE: tl.constexpr):
    if REDUCE and dtype.is_floating():
        return without_sentinel(x.to(tl.float32), dtype)
    else:
        return widen(x)


@device_function
def _take(
    ctx, staging, flags, slots, taken, ranks, table, item,
    ALIGNED: tl.constexpr, WAITER: tl.constexpr,
):  # fmt: skip
    """Receive a unit of a message, and free its slot."""
    address, n, peer, first, few, _, unit = _message(table, item)
    position = _of(taken, ranks, peer) + first + unit
    if few != 0:
        _take_few(ctx, staging, slots, position, peer, address, n, unit, ALIGNED, WAITER)
    else:
        _take_whole(ctx, staging, flags, slots, position, peer, address, n, unit, ALIGNED, WAITER)


@device_function
def _take_few(
    ctx, staging, slots, position, peer, address, n, unit, ALIGNED: tl.constexpr, WAITER: tl.constexpr
):  # fmt: skip
    dtype: tl.constexpr = staging.dtype.element_ty
    BLOCK: tl.constexpr = in_a_slot(word_type(dtype, False))
    lane = tl.arange(0, BLOCK)
    mask = lane < _left(n, unit * BLOCK, dtype, ALIGNED)
    value = _few(ctx, staging, slots, position, peer, lane, mask, False, WAITER)
    tl.store(_at(address, unit * BLOCK, dtype, ALIGNED) + lane, value.to(dtype), mask=mask)


@device_function
def _take_whole(
    ctx, staging, flags, slots, position, peer, address, n, unit, ALIGNED: tl.constexpr, WAITER: tl.constexpr
):  # fmt: skip
    dtype: tl.constexpr = staging.dtype.element_ty
    BLOCK: tl.constexpr = in_a_slot(dtype)
    lane = tl.arange(0, BLOCK)
    mask = lane < _left(n, unit * BLOCK, dtype, ALIGNED)
    value = _whole(ctx, staging, flags, slots, position, peer, lane, mask, WAITER)
    tl.store(_at(address, unit * BLOCK, dtype, ALIGNED) + lane, value, mask=mask)


@device_function
def _sum(
    ctx, staging, flags, slots, taken, ranks, own, table, item,
    ALIGNED: tl.constexpr, WORLD_SIZE: tl.constexpr, WAITER: tl.constexpr,
):  # fmt: skip
    """Return the sum over ranks, in their order, of a unit that every rank sends; `own` begins this rank's."""
    address, n, _, _, few, _, unit = _message(table, item)
    dtype: tl.constexpr = staging.dtype.element_ty
    if few == 0:
        if not dtype.is_floating():  # these always travel as Lamport values
            _sum_units(
                ctx, staging, flags, slots, taken + unit, ranks, own, address, n, unit, False, ALIGNED, WORLD_SIZE,
                WAITER,
            )  # fmt: skip
    elif has_words(dtype, True):
        _sum_units(
            ctx, staging, flags, slots, taken + unit, ranks, own, address, n, unit, True, ALIGNED, WORLD_SIZE, WAITER
        )


@device_function
def _sum_units(
    ctx, staging, flags, slots, positions, ranks, own, address, n, unit, FEW: tl.constexpr,
    ALIGNED: tl.constexpr, WORLD_SIZE: tl.constexpr, WAITER: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = staging.dtype.element_ty
    BLOCK: tl.constexpr = in_a_slot(word_type(dtype, True) if FEW else dtype)
    lane = tl.arange(0, BLOCK)
    mask = lane < _left(n, unit * BLOCK, dtype, ALIGNED)
    mine = tl.load(_at(own, unit * BLOCK, dtype, ALIGNED) + lane, mask=mask, other=0).to(sum_type(dtype))
    total = mine
    for rank in tl.static_range(WORLD_SIZE):
        part = mine
        if rank != ctx.rank:
            position = _of(positions, ranks, rank)
            if FEW:
                part = _few(ctx, staging, slots, position, rank, lane, mask, True, WAITER)
            else:
                part = _whole(ctx, staging, flags, slots, position, rank, lane, mask, WAITER).to(sum_type(dtype))
        total = part if rank == 0 else total + part  # to begin with 0 would make 0 of -0
    tl.store(_at(address, unit * BLOCK, dtype, ALIGNED) + lane, rounded(total, dtype), mask=mask)


@device_function
def _few(ctx, staging, slots, position, source, lane, mask, REDUCE: tl.constexpr, WAITER: tl.constexpr):
    """Wait for the Lamport values of a slot, and return what they encode."""
    dtype: tl.constexpr = staging.dtype.element_ty
    place = _at(_slot(staging, source, position, slots), 0, word_type(dtype, REDUCE), True)
    value, _ = take(ctx, place + lane, 0, mask, source, 1, WAITER, dtype, 1)
    return value


@device_function
def _whole(ctx, staging, flags, slots, position, source, lane, mask, WAITER: tl.constexpr):
    """Wait until no element of a slot is the sentinel, or its flag is set, and return its elements."""
    place = _at(_slot(staging, source, position, slots), 0, staging.dtype.element_ty, True) + lane
    flag = flags + tl.cast(source, tl.int64) * slots + (position & (slots - 1))
    value = arch.load_fresh(place, mask)
    if any_set((value == SENTINEL).to(tl.int32), True):
        value = _awaited(ctx, place, flag, value, mask, source, WAITER)
    tl.store(place, SENTINEL, mask=mask)  # no thread still looks, for the look ends with a barrier
    return value


@device_function
def _awaited(ctx, place, flag, value, mask, source, WAITER: tl.constexpr):
    end = deadline(ctx)
    polls = 0
    signaled = 0
    missing = True
    waiting = True
    while waiting:
        late = is_late(end, polls) | anyone_gone(ctx)
        signaled = tl.atomic_add(flag, 0, sem="acquire", scope="sys")  # before the look, which then sees all
        value = arch.load_fresh(place, mask)
        missing = any_set((value == SENTINEL).to(tl.int32), True) & (signaled == 0)
        polls += 1
        waiting = keeps_waiting(ctx, missing, late, polls)
    if missing:
        report(ctx, WAITER, 1, source, 0)
    if signaled != 0:
        tl.store(flag, 0)
    return value


@device_function
def _arrive(sync):
    """Count this program as one that has read the counts."""
    tl.debug_barrier()
    tl.atomic_add(sync, 1, sem="relaxed", scope="gpu")


@triton.jit(do_not_specialize=["slots", "senders", "own", "sends", "takes"])
def transfer_kernel(
    staging,
    flags,
    counts,
    sync,
    ctx_ptr,
    slots,
    senders,
    own,
    sends,
    takes,
    ALIGNED: tl.constexpr,
    REDUCE: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    WAITER: tl.constexpr,
):
    # staging: [source, slot, SLOT bytes]; flags: [source, slot]; sync: [programs that have read the counts].
    # sends, takes: messages (address, elements, peer, first slot after the counts, slots, whether as Lamport values,
    # units, address to copy to or 0), each number `in_table`. own: of a sum, the address of what this rank adds.
    ctx = DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE)
    ranks = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    known = ranks < WORLD_SIZE
    program, programs = tl.program_id(0), tl.num_programs(0)
    if program == 0:
        taken = tl.load(counts + TAKEN * WORLD_SIZE + ranks, mask=known, other=0)
        reported = tl.load(counts + _REPORTED * WORLD_SIZE + ranks, mask=known, other=0)
        _arrive(sync)
        tl.store(counts + _REPORTED * WORLD_SIZE + ranks, taken, mask=known)
        signal_ranks(ctx, counts + _CREDIT * WORLD_SIZE + ctx.rank, taken, ranks, known & (taken != reported))
    elif program <= senders:
        bases = load_bases(ctx_ptr, WORLD_SIZE)
        sent = tl.load(counts + SENT * WORLD_SIZE + ranks, mask=known, other=0)
        _arrive(sync)
        needed = _needed(sends, ranks)
        required = sent + needed - slots
        if wait_ranks(ctx, counts + _CREDIT * WORLD_SIZE, 1, required, ranks, needed > 0, WAITER):
            for item in range(program - 1, _items(sends), senders):
                _send(ctx, bases, staging, flags, slots, sent, ranks, sends, item, ALIGNED, REDUCE)
    elif program < programs - 1:
        taken = tl.load(counts + TAKEN * WORLD_SIZE + ranks, mask=known, other=0)
        _arrive(sync)
        for item in range(program - 1 - senders, _items(takes), programs - 2 - senders):
            if REDUCE:
                _sum(ctx, staging, flags, slots, taken, ranks, own, takes, item, ALIGNED, WORLD_SIZE, WAITER)
            else:
                _take(ctx, staging, flags, slots, taken, ranks, takes, item, ALIGNED, WAITER)
    else:
        sent = tl.load(counts + SENT * WORLD_SIZE + ranks, mask=known, other=0)
        taken = tl.load(counts + TAKEN * WORLD_SIZE + ranks, mask=known, other=0)
        if wait(ctx, sync, programs - 1, ctx.rank, WAITER, exact=True):
            tl.store(counts + SENT * WORLD_SIZE + ranks, sent + _needed(sends, ranks), mask=known)
            tl.store(counts + TAKEN * WORLD_SIZE + ranks, taken + _needed(takes, ranks), mask=known)
            tl.store(sync, 0)
