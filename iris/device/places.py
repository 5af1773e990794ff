"""Where a result lies on each rank, which peers store into: told by a rank as it enters a call, looked at by all.

Everything on the heap lies at the same offset on all ranks, but for what the library hands out for results: each rank
does that as tensors come and go, in its own time (`iris/memory/outputs.py`). So kernels store where a peer told that
its `out` lies. A difference between results that users made is a mistake, and ends the rank's waits.

Two tables serve. In that of the collectives a rank has its place by its own number; the ops have it by how many ranks
it comes behind the one that it tells. That number is known when a kernel is compiled, and no register holds it.
"""

import triton.language as tl

from . import arch, rma
from .function import device_function
from .waits import OUT_DIFFERS, report_difference

# Bytes: results that the library handed out lie whole multiples of it apart, so stores to all of them are as wide.
_APART = tl.constexpr(256)


@device_function
def place_of(ctx, pointer):
    """How far from the beginning of this rank's heap a scalar pointer points, in bytes, int64."""
    return pointer.to(tl.int64) - tl.load(ctx.heap_bases() + ctx.rank)


@device_function
def tell_place(ctx, places, step, out):
    """Stores where `out` lies into `places + rank * step` at every other rank; the next signal vouches for it."""
    for i in tl.static_range(1, ctx.world_size):
        ctx.store(places + ctx.rank * step, place_of(ctx, out), (ctx.rank + i) % ctx.world_size)


@device_function
def tell_out(ctx, places, out):
    """Stores where `out` lies at every other rank, into `places` + how far this rank comes behind that one."""
    for i in tl.static_range(1, ctx.world_size):
        ctx.store(places + ctx.world_size - i, place_of(ctx, out), (ctx.rank + i) % ctx.world_size)


@device_function
def same_places(ctx, places, step, out, waiter: tl.constexpr):
    """Whether every other rank r, which has signalled, told at `places + r * step` that its `out` lies where ours does.

    Until the call has ended here, peers must be unable to enter the next one. If not, the rank's waits end.
    """
    differing = -1
    for i in tl.static_range(1, ctx.world_size):
        peer = (ctx.rank + i) % ctx.world_size
        differing = tl.where(_told(places + peer * step) == place_of(ctx, out), differing, peer)
    return _all_same(ctx, out, differing, waiter)


@device_function
def same_place(ctx, place, out, peer, waiter: tl.constexpr):
    """The same of one peer, which told at `place`."""
    return _all_same(ctx, out, tl.where(_told(place) == place_of(ctx, out), -1, peer), waiter)


@device_function
def matching_places(ctx, places, out, waiter: tl.constexpr):
    """`same_places`, or else both tensors lie in what the library hands out for results: anywhere else a user erred.

    Behind the `places` it keeps how far each peer's `out` lies from this one. Every program stores the same, so that
    `moved_out`, which stands where registers are few, loads one word a peer.
    """
    own, begin = place_of(ctx, out), ctx.results_begin()
    differing = -1
    for i in tl.static_range(1, ctx.world_size):
        peer = (ctx.rank + i) % ctx.world_size
        told = _told(places + i)
        handed_out = (own >= begin) & (told >= begin) & (((told - own) & (_APART - 1)) == 0)
        differing = tl.where((told == own) | handed_out, differing, peer)
        tl.store(places + ctx.world_size + i, tl.load(ctx.heap_bases() + peer) + told - out.to(tl.int64))
    arch.drain_stores()
    tl.debug_barrier()  # one thread stores, all load
    return _all_same(ctx, out, differing, waiter)


@device_function
def moved_out(ctx, places, pointer, behind: tl.constexpr):
    """The address of `pointer`, into this rank's `out`, in that of the rank so many `behind`: by `matching_places`."""
    return rma.moved(pointer, 0, arch.load_word(places + ctx.world_size + behind), _APART)


@device_function
def _told(place):
    # an atomic's result is the same for all threads, which part company where a load's is not
    return tl.atomic_add(place, tl.cast(0, tl.int64), sem="relaxed", scope="sys")


@device_function
def _all_same(ctx, out, differing, waiter: tl.constexpr):
    if differing >= 0:
        report_difference(ctx, waiter, place_of(ctx, out), differing, -1, OUT_DIFFERS)
    return differing < 0
