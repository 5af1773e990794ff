"""all_reduce by adding into every rank's sum, in the order of arrival: variants "atomic" and "spinlock".

Every rank keeps a sum for each element, in fp32 or wide integers, zero at rest. All ranks add their elements to all
sums, by remote atomics or, with LOCKED, unit after unit under a lock. Then each rank takes its own sum and leaves zero.
A floating-point sum depends on the order, so results may differ in their last bits between runs, and between ranks.

Two halves of the staging memory, chosen by the epoch's parity, are enough. A rank that adds for call e + 2 has finished
e + 1, so it has everyone's signals of e + 1. Their senders had finished e, with its sums taken and zero again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.context import DeviceContext
from ..device.function import device_function
from ..device.lamport import load_bases, remote
from ..device.lock import lock, unlock
from ..device.sync import advance, next_epoch, signal_others, wait_others
from .flags import LANES
from .lamport import rounded
from .view import equal_views


@device_function
def _add(ctx, bases, sums, value, locks, to_rank, WAITER: tl.constexpr, LOCKED: tl.constexpr):
    """Add to the sums at `to_rank`. Return whether it could."""
    theirs = remote(ctx, sums, bases, to_rank)
    if LOCKED:
        ok = lock(ctx, locks, to_rank, WAITER)
        if ok:
            tl.store(theirs, tl.load(theirs, volatile=True) + value)
            unlock(ctx, locks, to_rank)
        return ok
    else:
        tl.atomic_add(theirs, value, sem="relaxed", scope="sys")
        return True


@triton.jit(do_not_specialize=["units"])
def accumulate_kernel(
    inp,
    out,
    staging,
    flags,
    sync,
    ctx_ptr,
    units,
    half_elements,
    unit_form: tl.constexpr,
    LOCKED: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    WAITER: tl.constexpr,
):
    # staging: sums [parity][unit, BLOCK]; flags: arrived [parity][source rank, LANES], then locks [unit]
    BLOCK: tl.constexpr = unit_form.BLOCK
    source, target = equal_views(inp, out, 0, inp.n, unit_form)
    epoch = next_epoch(sync)
    bases = load_bases(ctx_ptr, WORLD_SIZE)
    ctx = DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE)
    parity = epoch & 1
    sums = staging + tl.cast(parity, tl.int64) * half_elements + tl.arange(0, BLOCK)
    arrived = flags + parity * (WORLD_SIZE * LANES)
    locks = flags + 2 * WORLD_SIZE * LANES
    lane, lanes = tl.program_id(0), tl.num_programs(0)
    advance(sync, epoch)

    ok = True
    for unit in range(lane, units, lanes):
        pointers, mask = source.place(0, unit, BLOCK, WORLD_SIZE)
        value = tl.load(pointers, mask=mask, other=0).to(staging.dtype.element_ty)
        for i in tl.static_range(1, WORLD_SIZE + 1):
            place = sums + tl.cast(unit, tl.int64) * BLOCK
            ok = _add(ctx, bases, place, value, locks + unit, (ctx.rank + i) % WORLD_SIZE, WAITER, LOCKED) and ok
    if ok:
        signal_others(ctx, arrived + ctx.rank * LANES + lane, epoch)
    ok = wait_others(ctx, arrived + lane, LANES, epoch, WAITER) and ok
    if ok:
        for unit in range(lane, units, lanes):
            place = sums + tl.cast(unit, tl.int64) * BLOCK
            total = tl.load(place, cache_modifier=".cg")
            tl.debug_barrier()  # before zero is stored: where a unit is small, several threads load an element
            tl.store(place, tl.zeros((BLOCK,), staging.dtype.element_ty))
            pointers, mask = target.place(0, unit, BLOCK, WORLD_SIZE)
            tl.store(pointers, rounded(total, inp.data.dtype.element_ty), mask=mask)
