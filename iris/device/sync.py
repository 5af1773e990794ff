"""Signals, waits and epochs: ranks agree, inside a kernel, on what has arrived.

A *signal* makes this program's earlier stores visible to a peer and then sets a flag there. A *wait* polls one of this
rank's own flags, never longer than the context's time-out (`waits.py`), and nobody signals work that was skipped. Flags
carry epochs, which only ever advance, so nothing is reset and a captured kernel can be replayed.
"""

import triton
import triton.language as tl

from . import arch, atomics
from .context import own_context
from .function import device_function
from .places import matching_places, moved_out, publish_out
from .tracing import SIGNAL, WAIT
from .waits import (
    HEAPS_DIFFER,
    WAITERS,
    deadline,
    healthy,
    is_late,
    keeps_waiting,
    report,
    report_difference,
)

_USER = tl.constexpr(WAITERS.index("a kernel"))
_BARRIER = tl.constexpr(WAITERS.index("device_barrier"))
# The sync block of a communicator, int32 on the heap: [epoch, programs that finished, next tile, 0 ...,
# entered[world_size], completed[world_size], and as int64 the places of peers' results, as they publish them,
# [world_size], and their distances from this rank's [world_size]].
_FINISHED = tl.constexpr(1)
_NEXT_TILE = tl.constexpr(2)
_ENTERED = tl.constexpr(16)


def sync_words(world_size: int) -> int:
    """Return the number of int32 elements in a sync block.

    Allocate it on the host: `ctx.zeros(sync_words(n), dtype=torch.int32)`.

    Args:
        world_size: the number of ranks.
    """
    return _ENTERED.value + 6 * world_size


@device_function
def signal(ctx, flag, value, to_rank):
    """Set `flag` to `value` at `to_rank`, after all stores that this program has made so far.

    Every thread of the program must call it, because it contains a barrier of the program.


    Guarantee: a rank that sees `value` by `wait`, or by an atomic with acquire at system scope, also sees all stores
    that this program made before the signal, to any rank, and all that this program had observed by `wait`. A barrier
    of the program comes first, then one release at system scope; on AMD outstanding stores are awaited before. Nothing
    is guaranteed about stores of other programs, later stores, or when the flag arrives. The call waits for no rank.

    Args:
        ctx: the device context.
        flag: a scalar pointer to an int32 on the heap, this rank's own address.
        value: int32, usually the epoch of the call.
        to_rank: the rank whose flag is set.
    """
    span = ctx.tracing.record_event_start(SIGNAL, to_rank, flag)
    arch.drain_stores()
    tl.debug_barrier()  # a release covers one thread; the barrier brings every thread's stores before it
    atomics.atomic_xchg(flag, value, ctx.rank, to_rank, ctx.heap_bases(), sem="release", scope="sys")
    ctx.tracing.record_event_end(span)


@device_function
def wait(ctx, flag, expected, peer, waiter: tl.constexpr = _USER, exact: tl.constexpr = False):
    """Wait until this rank's own `flag` has reached `expected`, which `peer` signals.


    Guarantee: if it returns True, all threads of this program see what `peer` stored before it signalled, and what
    `peer` had observed before that. Each poll is an acquire at system scope. The wait always ends: after IRIS_TIMEOUT
    seconds, or earlier if another wait of this rank has failed or, on CPUs, the peer's process has ended. Then it
    returns False, the first failure of the rank is recorded, and the next host call on the context raises
    `PeerLostError`. A program that gets False must neither use the data nor signal results that depend on it.

    Wait only for work that comes earlier in the same order on every rank; otherwise two ranks could wait for each
    other.

    Args:
        ctx: the device context.
        flag: a scalar pointer to an int32 on the heap. It has reached `expected` if their difference, which wraps, is
            at least zero.
        expected: int32, usually the epoch of the call.
        peer: the rank that signals.
        waiter: the number of the op that an error names.
        exact: wait for equality, for flags that may not have changed for 2^31 epochs. The peer must not be able to
            signal again before this wait ends.

    Returns:
        Whether the signal arrived in time.
    """
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    arrived = _reached(seen, expected, exact)
    if not arrived:
        span = ctx.tracing.record_event_start(WAIT, peer, flag)
        arrived = _poll(ctx, flag, expected, peer, waiter, exact)
        ctx.tracing.record_event_end(span)
    return arrived


@device_function
def _reached(seen, expected, exact: tl.constexpr):
    if exact:
        return seen == expected
    else:
        return (seen - expected) >= 0  # the difference wraps where the values do


@device_function
def _poll(ctx, flag, expected, peer, waiter: tl.constexpr, exact: tl.constexpr):
    end = deadline(ctx)
    polls = 0
    seen = expected
    arrived = False
    waiting = True
    while waiting:
        late = is_late(end, polls) | arch.any_gone(ctx.pid(peer))
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        arrived = _reached(seen, expected, exact)
        polls += 1
        waiting = keeps_waiting(ctx, not arrived, late, polls)
    if not arrived:
        report(ctx, waiter, expected, peer, seen)
    return arrived


@device_function
def next_epoch(sync):
    """Return the epoch of this call, int32, one more than that of the last call which `leave` or `advance` ended.

    It is never 0, the initial value of flags, and odd and even epochs always alternate. All programs of a call get the
    same epoch, because only the last of them advances it.

    Args:
        sync: a pointer to the sync block.
    """
    return epoch_after(tl.load(sync))


@device_function
def epoch_after(last):
    """Return the epoch of the call that follows that of epoch `last`."""
    epoch = last + 1
    return epoch + 2 * (epoch == 0).to(tl.int32)


@device_function
def enter(ctx, sync, out=None, LANES: tl.constexpr = True):
    """Begin a call: signal the peers that this rank is in it, and return the call's epoch.

    Kernels of one stream run one after the other, so a rank that has entered a call has read all data that earlier
    calls staged for it. A rank calls `await_entered` before it stores into a peer's memory, so all calls can share
    staging memory.

    Args:
        ctx: the device context.
        sync: a pointer to a sync block of `sync_words` int32 on the heap, initially zero, which calls of one stream
            share.
        out: a pointer to the tensor into which peers will store; its offset is published too.
        LANES: whether to signal, or await, all peers at once; not in Gluon, whose tensors need layouts.

    Returns:
        The epoch, int32.
    """
    epoch = next_epoch(sync)
    if tl.program_id(0) == 0:
        if out is not None:
            publish_out(ctx, _places(ctx, sync), out)
        _signal_all(ctx, sync + _ENTERED + ctx.rank, epoch, LANES)
    return epoch


@device_function
def await_entered(ctx, sync, epoch, waiter: tl.constexpr, out=None, LANES: tl.constexpr = True):
    """Wait until every peer has entered this call, or a later one; return whether they did.

    Args:
        ctx: the device context.
        sync: a pointer to the sync block.
        epoch: the result of `enter`.
        waiter: the number of the op that an error names.
        out: for calls that `leave` with `TOGETHER`: also check that this rank may store into every peer's `out`.
        LANES: as in `enter`.

    Returns:
        Whether all peers entered in time.
    """
    ok = _wait_all(ctx, sync + _ENTERED, epoch, waiter, False, LANES)
    if out is not None:
        if ok:
            ok = matching_places(ctx, _places(ctx, sync), out, waiter)
    return ok


@device_function
def out_at(ctx, sync, pointer, offset: tl.constexpr):
    """Return the address of `pointer`, which points into this rank's `out`, in that of rank + `offset`.

    For programs that have awaited the peers' entry, by which each peer has published the place of its `out`.
    """
    return moved_out(ctx, _places(ctx, sync), pointer, offset)


@device_function
def _places(ctx, sync):
    return (sync + _ENTERED + 2 * ctx.world_size).to(tl.pointer_type(tl.int64))


@device_function
def next_tile(sync):
    """Return the next number, from 0, of a counter that all programs of the grid share; `leave` resets it.

    Args:
        sync: a pointer to the sync block.
    """
    return tl.atomic_add(sync + _NEXT_TILE, 1, sem="relaxed", scope="gpu")


@device_function
def leave(ctx, sync, epoch, complete, waiter: tl.constexpr, TOGETHER: tl.constexpr = False, LANES: tl.constexpr = True):
    """End a call: the last program of the grid to reach this advances the epoch.

    With `TOGETHER`, some program of this rank must have awaited the peers' entry. Then no peer still waits here in an
    earlier call, and flags can be compared exactly even after 2^31 epochs.

    Args:
        ctx: the device context.
        sync: a pointer to the sync block.
        epoch: the result of `enter`.
        complete: whether this program did all of its work; a rank that skipped some sends no signal.
        waiter: the number of the op that an error names.
        TOGETHER: whether the last program also signals the peers that all of this rank's stores are done, and waits for
            their signals. Then all stores have arrived when the kernel ends.
        LANES: as in `enter`.
    """
    arch.drain_stores()
    tl.debug_barrier()
    # sys, not gpu: the last program vouches to peers for what all programs stored there
    if tl.atomic_add(sync + _FINISHED, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1:
        if TOGETHER:
            if complete and healthy(ctx):
                completed = sync + _ENTERED + ctx.world_size
                _signal_all(ctx, completed + ctx.rank, epoch, LANES)
                _wait_all(ctx, completed, epoch, waiter, True, LANES)
        tl.store(sync + _FINISHED, 0)
        tl.store(sync + _NEXT_TILE, 0)
        tl.store(sync, epoch)


# --- several ranks at once, a lane each -------------------------------------------------------------------------------


@device_function
def _peers(ctx):
    ranks = tl.arange(0, triton.next_power_of_2(ctx.world_size))
    return ranks, (ranks < ctx.world_size) & (ranks != ctx.rank)


@device_function
def signal_others(ctx, flag, value):
    """Signal every other rank, as `signal` does; on NVIDIA GPUs this takes as long as one signal.

    Args:
        ctx: the device context.
        flag: a scalar pointer to an int32 on the heap.
        value: int32.
    """
    _signal_all(ctx, flag, value, True)


@device_function
def _signal_all(ctx, flag, value, LANES: tl.constexpr):
    if LANES and not arch.is_hip():
        ranks, peers = _peers(ctx)
        _signal_ranks(ctx, flag, value, ranks, peers)
    else:
        for i in tl.static_range(1, ctx.world_size):
            signal(ctx, flag, value, (ctx.rank + i) % ctx.world_size)


@device_function
def signal_ranks(ctx, flag, values, ranks, mask):
    """Signal each of the `ranks`, a block of all in order, that `mask` selects; `values`: int32, one for each."""
    if arch.is_hip():
        for rank in tl.static_range(ctx.world_size):
            if tl.max((mask & (ranks == rank)).to(tl.int32)) != 0:
                signal(ctx, flag, tl.sum(tl.where(ranks == rank, values, 0)), rank)
    else:
        _signal_ranks(ctx, flag, values, ranks, mask)


@device_function
def _signal_ranks(ctx, flag, values, ranks, mask):
    bases = ctx.heap_bases()
    distance = tl.load(bases + ranks, mask=mask, other=0) - tl.load(bases + ctx.rank)
    flags = flag + distance // 4
    span = ctx.tracing.record_event_start(SIGNAL, -1, flag)
    tl.debug_barrier()  # a release covers one thread; the barrier brings every thread's stores before it
    tl.atomic_xchg(flags, tl.zeros(flags.shape, tl.int32) + values, mask=mask, sem="release", scope="sys")
    ctx.tracing.record_event_end(span)


@device_function
def wait_others(ctx, flags, step, expected, waiter: tl.constexpr):
    """Wait until the flag of every other rank r, at `flags + r * step`, is `expected`; return whether all arrived.

    Args:
        ctx: the device context.
        flags: a scalar pointer to the flag of rank 0, int32 on the heap.
        step: elements between the flags of two ranks.
        expected: int32, as in `wait`.
        waiter: the number of the op that an error names.
    """
    ranks, peers = _peers(ctx)
    return _wait_ranks(ctx, flags, step, expected, ranks, peers, waiter, True)


@device_function
def wait_ranks(ctx, flags, step, expected, ranks, mask, waiter: tl.constexpr):
    """Wait as `wait` does for the flags of the `ranks`, a block, that `mask` selects; `expected`: int32, one a rank."""
    return _wait_ranks(ctx, flags, step, expected, ranks, mask, waiter, False)


@device_function
def _wait_all(ctx, flags, expected, waiter: tl.constexpr, exact: tl.constexpr, LANES: tl.constexpr):
    if LANES:
        ranks, peers = _peers(ctx)
        seen = _wait_ranks(ctx, flags, 1, expected, ranks, peers, waiter, exact)
    else:
        seen = True
        for i in tl.static_range(1, ctx.world_size):
            peer = (ctx.rank + i) % ctx.world_size
            seen = wait(ctx, flags + peer, expected, peer, waiter, exact) and seen
    return seen


@device_function
def _wait_ranks(ctx, flags, step, expected, ranks, mask, waiter: tl.constexpr, exact: tl.constexpr):
    expected = tl.zeros(ranks.shape, tl.int32) + expected
    missing = _missing(flags, step, expected, ranks, mask, exact)
    if missing:
        span = ctx.tracing.record_event_start(WAIT, -1, flags)
        missing = _poll_ranks(ctx, flags, step, expected, ranks, mask, waiter, exact)
        ctx.tracing.record_event_end(span)
    return not missing


@device_function
def _missing(flags, step, expected, ranks, mask, exact: tl.constexpr):
    seen = tl.atomic_add(flags + ranks * step, tl.zeros(ranks.shape, tl.int32), mask=mask, sem="acquire", scope="sys")
    # One lane performs an atomic on a flag and its result goes to all threads, after a barrier: they agree, and their
    # later loads come after what the flags signal.
    return tl.max((mask & (_reached(seen, expected, exact) == 0)).to(tl.int32)) != 0


@device_function
def _poll_ranks(ctx, flags, step, expected, ranks, mask, waiter: tl.constexpr, exact: tl.constexpr):
    end = deadline(ctx)
    polls = 0
    missing = True
    waiting = True
    while waiting:
        late = is_late(end, polls) | arch.any_gone(ctx.pids(ranks, mask))
        missing = _missing(flags, step, expected, ranks, mask, exact)
        polls += 1
        waiting = keeps_waiting(ctx, missing, late, polls)
    if missing:
        # first peers that are known to be gone, then those that may only have given up; the first report counts
        for turn in range(2 * ctx.world_size):
            peer = (ctx.rank + turn) % ctx.world_size
            awaited = tl.max((mask & (ranks == peer)).to(tl.int32)) != 0
            target = tl.sum(tl.where(ranks == peer, expected, 0))
            seen = tl.load(flags + peer * step, volatile=True)
            gone = (turn >= ctx.world_size) | arch.any_gone(ctx.pid(peer))
            if awaited & gone & (_reached(seen, target, exact) == 0):
                report(ctx, waiter, target, peer, seen)
    return missing


@device_function
def advance(sync, epoch, programs=None):
    """End a call that sent no signals: the last program of the grid to reach this advances the epoch.

    Every program must have read the epoch (`next_epoch`) before, and calls this once.

    Args:
        sync: a pointer to the sync block.
        epoch: the result of `next_epoch`.
        programs: how many programs of the grid call this; None for all.
    """
    count = tl.num_programs(0) if programs is None else programs
    tl.debug_barrier()
    if tl.atomic_add(sync + _FINISHED, 1, sem="relaxed", scope="gpu") == count - 1:
        tl.store(sync + _FINISHED, 0)
        tl.store(sync, epoch)


@triton.jit(do_not_specialize=["digest"])
def device_barrier_kernel(
    ctx_ptr, members, num_members, sent, arrived, passed, digests, digest, WORLD_SIZE: tl.constexpr
):
    """Wait until every rank in `members` [num_members] is here. `sent`, `arrived`: int32 [world], counts for each peer.

    `passed`: this rank's own count, once all have come. `digest`: int64, the same on all ranks or their heaps differ;
    `digests`: int64 [2, world], the peers' digests, by the parity of the count. Two are enough: a peer that sends its
    digest of count n + 2 has passed n + 1, for which this rank signalled after it had read that of n.

    Counts are kept for each pair of ranks, so barriers of different groups can share them. One program. A rank whose
    wait has failed cannot answer for later stores: it signals nobody, and its peers give up too.
    """
    ctx = own_context(ctx_ptr, WORLD_SIZE)
    ranks = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    awaited = ranks < 0
    for i in range(num_members):
        awaited = awaited | (ranks == tl.load(members + i))
    counts = tl.load(sent + ranks, mask=awaited, other=0) + 1
    tl.store(sent + ranks, counts, mask=awaited)
    row = digests + (counts & 1) * WORLD_SIZE  # where the digests of each rank's count lie, on every rank
    if healthy(ctx):
        bases = ctx.heap_bases()
        distance = tl.load(bases + ranks, mask=awaited, other=0) - tl.load(bases + ctx.rank)
        tl.store(row + ctx.rank + distance // 8, tl.zeros(ranks.shape, tl.int64) + digest, mask=awaited)
        if arch.is_hip():
            for i in range(num_members):
                peer = tl.load(members + i)
                signal(ctx, arrived + ctx.rank, tl.sum(tl.where(ranks == peer, counts, 0)), peer)
        else:
            _signal_ranks(ctx, arrived + ctx.rank, counts, ranks, awaited)
    if _wait_ranks(ctx, arrived, 1, counts, ranks, awaited, _BARRIER, False):
        seen = arch.load_fresh(row + ranks, awaited)
        differing = tl.max(tl.where(awaited & (seen != digest), ranks, -1))
        if differing >= 0:
            theirs = tl.sum(tl.where(ranks == differing, seen, 0))
            report_difference(ctx, _BARRIER, digest, differing, theirs, HEAPS_DIFFER)
        tl.store(passed, tl.sum(tl.where(ranks == ctx.rank, counts, 0)))
