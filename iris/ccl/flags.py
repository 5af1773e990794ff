"""Any collective of a large tensor: stores straight into the peers' memory, and one signal for many of them.

Program number p of every rank works on the same units of every part, its *lane*, so that it only ever waits for
programs p of the peers. Without a sum it loads a first unit, waits until the peers have entered the call, and stores
into their `out`. With a sum (REDUCE) it pushes units into their owner's staging memory, chunk after chunk, and signals
each chunk. Meanwhile the owner sums the chunk before in fp32, in rank order, and with GATHER stores the sums into
everyone's `out`. So the links are busy from the first chunk to the last. Rank r begins with destination r + 1, so that
no two ranks begin on the same link.

At the end each lane tells the peers that it is done, and waits for theirs, so the kernel ends with everything in place.
Without GATHER no rank stores into a peer's `out`, and the chunks' signals say what has arrived.

Flags hold epochs and are compared exactly. No flag is set again before its wait has ended, and no staged data is
overwritten before it was read, because:
  GATHER: a rank that stores for call e + 1 has had all done signals of call e, which come after the lane's waits and
  reads.
  REDUCE alone: two halves by parity. A rank that stores for e + 2 has finished e + 1, so it has everyone's chunks of
  e + 1, and their senders had finished e.
  No REDUCE: a rank sets an entry or done flag of e + 1 when it has had all done signals of e, which come after the
  entry waits; and it sets the done flag after this rank's entry into e + 1.
Each rank tells its peers where its `out` lies before its first signal of a lane. They read it after their first wait.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.context import DeviceContext
from ..device.function import device_function
from ..device.lamport import load_bases, remote, sum_type
from ..device.places import same_places, send_place
from ..device.sync import advance, next_epoch, signal_others, wait_others
from .lamport import rounded
from .view import views

# Lanes of the fixed table of done flags: more than any chip has multiprocessors.
LANES = tl.constexpr(512)


@device_function
def _push(ctx, bases, source, staging, first, end, units, BLOCK: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Store units `first` to `end` of the peers' parts in this rank's place of their staging memory."""
    lane = tl.arange(0, BLOCK)
    mine = staging + tl.cast(ctx.rank, tl.int64) * units * BLOCK + lane
    for unit in range(first, end):
        for i in tl.static_range(1, WORLD_SIZE):
            owner = (ctx.rank + i) % WORLD_SIZE
            pointers, mask = source.place(owner, unit, BLOCK, WORLD_SIZE)
            value = tl.load(pointers, mask=mask)
            tl.store(remote(ctx, mine + tl.cast(unit, tl.int64) * BLOCK, bases, owner), value, mask=mask)


@device_function
def _sum(
    ctx,
    bases,
    source,
    target,
    staging,
    first,
    end,
    units,
    BLOCK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    GATHER: tl.constexpr,
    ONE_OUT: tl.constexpr,
):
    """Sum units `first` to `end` of this rank's part into `out`; with GATHER, into every rank's `out`."""
    dtype: tl.constexpr = staging.dtype.element_ty
    lane = tl.arange(0, BLOCK)
    for unit in range(first, end):
        places, mask = source.place(ctx.rank, unit, BLOCK, WORLD_SIZE)
        own = tl.load(places, mask=mask, other=0).to(sum_type(dtype))
        total = tl.zeros((BLOCK,), sum_type(dtype))
        for i in tl.static_range(WORLD_SIZE):
            staged = staging + (tl.cast(i, tl.int64) * units + unit) * BLOCK + lane
            theirs = tl.load(staged, mask=mask & (i != ctx.rank), other=0, cache_modifier=".cg").to(total.dtype)
            part = tl.where(i == ctx.rank, own, theirs)
            total = part if i == 0 else total + part  # as in words: to begin with 0 would make 0 of -0
        result = rounded(total, dtype)
        pointers, _ = target.place(0 if ONE_OUT else ctx.rank, unit, BLOCK, WORLD_SIZE)
        if GATHER:
            for i in tl.static_range(1, WORLD_SIZE + 1):
                tl.store(remote(ctx, pointers, bases, (ctx.rank + i) % WORLD_SIZE), result, mask=mask)
        else:
            tl.store(pointers, result, mask=mask)


@device_function
def _load(ctx, source, i, unit, BLOCK: tl.constexpr, WORLD_SIZE: tl.constexpr, SCATTER: tl.constexpr):
    """Load a unit as the i-th rank after this one receives it."""
    pointers, mask = source.place((ctx.rank + i) % WORLD_SIZE if SCATTER else 0, unit, BLOCK, WORLD_SIZE)
    return tl.load(pointers, mask=mask)


@device_function
def _copy(
    ctx, bases, source, target, unit, value, BLOCK: tl.constexpr, WORLD_SIZE: tl.constexpr, SCATTER: tl.constexpr
):
    """Store a unit in every rank's `out`, including this rank's. `value` is what the next rank receives, loaded
    before."""
    places, mask = target.place(ctx.rank, unit, BLOCK, WORLD_SIZE)
    for i in tl.static_range(1, WORLD_SIZE + 1):
        if SCATTER and i > 1:
            value = _load(ctx, source, i, unit, BLOCK, WORLD_SIZE, SCATTER)
        tl.store(remote(ctx, places, bases, (ctx.rank + i) % WORLD_SIZE), value, mask=mask)


@triton.jit(do_not_specialize=["units", "chunk_units", "half_flags"])
def flags_kernel(
    inp,
    out,
    staging,
    flags,
    sync,
    ctx_ptr,
    units,
    chunk_units,
    half_elements,
    half_flags,
    unit_form: tl.constexpr,
    form: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    WAITER: tl.constexpr,
):
    # flags: places of `out` [rank, LANES] of int64, entered [rank], done [rank, LANES],
    # arrived [parity][source rank, lane, chunk];
    # staging: [parity][source rank, unit, BLOCK].
    BLOCK: tl.constexpr = unit_form.BLOCK
    ONE_OUT: tl.constexpr = unit_form.ONE_OUT
    SCATTER: tl.constexpr = form.SCATTER
    REDUCE: tl.constexpr = form.REDUCE
    GATHER: tl.constexpr = form.GATHER
    source, target = views(inp, out, unit_form)
    epoch = next_epoch(sync)
    bases = load_bases(ctx_ptr, WORLD_SIZE)
    ctx = DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE)
    rank = ctx.rank
    lane, lanes = tl.program_id(0), tl.num_programs(0)
    places = flags.to(tl.pointer_type(tl.int64)) + lane
    entered = flags + 2 * WORLD_SIZE * LANES
    done = entered + WORLD_SIZE
    per_lane = tl.cdiv(units, lanes)
    begin = min(lane * per_lane, units)
    end = min(begin + per_lane, units)
    ok = True
    if REDUCE:
        advance(sync, epoch)
        parity = 0 if GATHER else epoch & 1
        staged = staging + tl.cast(parity, tl.int64) * half_elements
        chunks = tl.cdiv(per_lane, chunk_units)
        arrived = done + WORLD_SIZE * LANES + parity * half_flags + lane * chunks
        if GATHER:
            send_place(ctx, places, LANES, out.data)
        for c in range(0, chunks + 1):
            first = begin + c * chunk_units
            if c < chunks:
                if ok:
                    _push(ctx, bases, source, staged, first, min(first + chunk_units, end), units, BLOCK, WORLD_SIZE)
                    signal_others(ctx, arrived + rank * lanes * chunks + c, epoch)
            if c > 0:
                ok = wait_others(ctx, arrived + c - 1, lanes * chunks, epoch, WAITER) and ok
                if GATHER:
                    if ok & (c == 1):
                        ok = same_places(ctx, places, LANES, out.data, WAITER)
                if ok:
                    _sum(
                        ctx,
                        bases,
                        source,
                        target,
                        staged,
                        first - chunk_units,
                        min(first, end),
                        units,
                        BLOCK,
                        WORLD_SIZE,
                        GATHER,
                        ONE_OUT,
                    )
    else:
        if lane == 0:
            send_place(ctx, places, LANES, out.data)
            signal_others(ctx, entered + rank, epoch)
        # `inp` is this rank's to read: the first unit, if the lane has one, comes while the entries travel
        value = _load(ctx, source, 1, begin, BLOCK, WORLD_SIZE, SCATTER)
        advance(sync, epoch)
        ok = wait_others(ctx, entered, 1, epoch, WAITER)
        if ok:
            ok = same_places(ctx, places - lane, LANES, out.data, WAITER)  # published by lane 0
        if ok:
            _copy(ctx, bases, source, target, begin, value, BLOCK, WORLD_SIZE, SCATTER)
            for unit in range(begin + 1, end):
                value = _load(ctx, source, 1, unit, BLOCK, WORLD_SIZE, SCATTER)
                _copy(ctx, bases, source, target, unit, value, BLOCK, WORLD_SIZE, SCATTER)
    if GATHER or not REDUCE:
        if ok:
            signal_others(ctx, done + rank * LANES + lane, epoch)
        wait_others(ctx, done + lane, LANES, epoch, WAITER)
