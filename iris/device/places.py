"""Publish where a result lies on each rank, so that peers can store into it.

Everything on the heap lies at the same offset on all ranks, except the results that the library allocates: each rank
allocates and frees those by itself (`iris/memory/outputs.py`). So kernels store at the place that a peer published for
its `out`. A difference between results that users allocated is an error, and ends the rank's waits.

There are two tables. Collectives index theirs by rank; the ops index theirs by the offset from the receiver's rank to
the sender's. The offset is known when a kernel is compiled, and takes no register.
"""

import triton.language as tl

from . import arch, rma
from .function import device_function
from .waits import OUT_DIFFERS, report_difference

# Bytes: results that the library handed out are multiples of it apart, so stores to all of them are equally wide.
_APART = tl.constexpr(256)


@device_function
def place_of(ctx, pointer):
    """Return the offset of a scalar pointer from the beginning of this rank's heap, in bytes, int64."""
    return pointer.to(tl.int64) - tl.load(ctx.heap_bases() + ctx.rank)


@device_function
def send_place(ctx, places, step, out):
    """Store the place of `out` into `places + rank * step` at every other rank; the next signal orders it."""
    for i in tl.static_range(1, ctx.world_size):
        ctx.store(places + ctx.rank * step, place_of(ctx, out), (ctx.rank + i) % ctx.world_size)


@device_function
def publish_out(ctx, places, out):
    """Store the place of `out` at every other rank, into `places` + the offset from that rank to this one."""
    for i in tl.static_range(1, ctx.world_size):
        ctx.store(places + ctx.world_size - i, place_of(ctx, out), (ctx.rank + i) % ctx.world_size)


@device_function
def same_places(ctx, places, step, out, waiter: tl.constexpr):
    """Return whether every other rank r, which has signalled, published our place of `out` at `places + r * step`.

    Until the call has ended here, peers must be unable to enter the next one. On False, the rank's waits end.
    """
    differing = -1
    for i in tl.static_range(1, ctx.world_size):
        peer = (ctx.rank + i) % ctx.world_size
        differing = tl.where(_published(places + peer * step) == place_of(ctx, out), differing, peer)
    return _all_same(ctx, out, differing, waiter)


@device_function
def elsewhere(ctx, place, out, peer, waiter: tl.constexpr):
    """Return a rank whose `out` lies at another place than this one's, by what `peer` published at `place`; -1: none.

    A peer that knows of such a rank may publish that one (`publish_elsewhere`). Then, too, the rank's waits end.
    """
    theirs = _published(place)
    known = tl.where(theirs < 0, (-1 - theirs).to(tl.int32), peer)
    differing = tl.where(theirs == place_of(ctx, out), -1, known)
    _all_same(ctx, out, differing, waiter)
    return differing


@device_function
def publish_elsewhere(ctx, place, rank, peer):
    """Store at `peer` in `place`, instead of this rank's place, that `rank` has `out` elsewhere."""
    ctx.store(place, (-1 - rank).to(tl.int64), peer)


@device_function
def matching_places(ctx, places, out, waiter: tl.constexpr):
    """Return whether peers published the place of `out`, or both tensors lie in results that the library hands out.

    After the `places` it keeps how far each peer's `out` lies from this one. Every program stores the same, so that
    `moved_out`, which is called where registers are few, loads one word a peer.
    """
    own, begin = place_of(ctx, out), ctx.results_begin()
    differing = -1
    for i in tl.static_range(1, ctx.world_size):
        peer = (ctx.rank + i) % ctx.world_size
        theirs = _published(places + i)
        handed_out = (own >= begin) & (theirs >= begin) & (((theirs - own) & (_APART - 1)) == 0)
        differing = tl.where((theirs == own) | handed_out, differing, peer)
        tl.store(places + ctx.world_size + i, tl.load(ctx.heap_bases() + peer) + theirs - out.to(tl.int64))
    arch.drain_stores()
    tl.debug_barrier()  # one thread stores, all load
    return _all_same(ctx, out, differing, waiter)


@device_function
def moved_out(ctx, places, pointer, offset: tl.constexpr):
    """Return `pointer`, into this rank's `out`, moved to that of rank + `offset`; needs `matching_places` before."""
    return rma.moved(pointer, 0, arch.load_word(places + ctx.world_size + offset), _APART)


@device_function
def _published(place):
    # an atomic's result is the same for all threads; those of loads may differ, and threads would diverge
    return tl.atomic_add(place, tl.cast(0, tl.int64), sem="relaxed", scope="sys")


@device_function
def _all_same(ctx, out, differing, waiter: tl.constexpr):
    if differing >= 0:
        report_difference(ctx, waiter, place_of(ctx, out), differing, -1, OUT_DIFFERS)
    return differing < 0
