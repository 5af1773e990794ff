"""all_reduce in rings: each part travels once around to be summed, and once more, as the sum, to every rank.

The classic algorithm: a rank only ever stores into its neighbour's memory. Partial sums travel in fp32, so that a sum
is rounded once. The ring gives the order of the sum, the same in each run. Program number p of every rank works on the
same units of each part. RINGS divides the units, and every second ring runs the other way round.

Flags hold epochs, compared exactly, and the same staging memory is right for all calls. A rank that finishes call e has
got every part's sum. A sum exists only when all ranks have entered e and consumed all partial sums of that part and
lane.

A rank publishes to its successor where its `out` lies, and compares its predecessor's place before it adds to a partial
sum. Where places differ, at least two neighbours differ. The second of them publishes the first one's rank instead,
with all signals that its successor waits for, and so does each rank after it: all know before one stores a sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.context import DeviceContext
from ..device.lamport import load_bases, remote
from ..device.places import elsewhere, place_of, publish_elsewhere
from ..device.sync import advance, next_epoch, signal, wait
from .flags import LANES
from .lamport import rounded
from .view import equal_views


@triton.jit(do_not_specialize=["units"])
def ring_kernel(
    inp,
    out,
    staging,
    flags,
    sync,
    ctx_ptr,
    units,
    unit_form: tl.constexpr,
    RINGS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    WAITER: tl.constexpr,
):
    # staging: partial sums [step, unit, BLOCK]; flags: places [direction, LANES] of int64, then [ring, step, LANES],
    # w - 1 steps for partial sums, then for sums
    BLOCK: tl.constexpr = unit_form.BLOCK
    source, target = equal_views(inp, out, inp.share, inp.share, unit_form)
    STEPS: tl.constexpr = WORLD_SIZE - 1
    wide: tl.constexpr = staging.dtype.element_ty
    epoch = next_epoch(sync)
    bases = load_bases(ctx_ptr, WORLD_SIZE)
    ctx = DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE)
    rank = ctx.rank
    lane, lanes = tl.program_id(0), tl.num_programs(0)
    element = tl.arange(0, BLOCK)
    advance(sync, epoch)

    per_lane = tl.cdiv(units, lanes)
    per_ring = tl.cdiv(per_lane, RINGS)
    ok = True
    for ring in range(RINGS):
        first = min(lane * per_lane + ring * per_ring, units)
        end = min(min(first + per_ring, (lane + 1) * per_lane), units)
        forward = 1 - 2 * (ring % 2)
        following = (rank + forward + WORLD_SIZE) % WORLD_SIZE
        before = (rank - forward + WORLD_SIZE) % WORLD_SIZE
        place = flags.to(tl.pointer_type(tl.int64)) + (ring % 2) * LANES + lane
        arrived = flags + 4 * LANES + ring * (2 * STEPS * LANES) + lane
        if WORLD_SIZE > 1:
            if ring < 2:
                ctx.store(place, place_of(ctx, out.data), following)
        for step in range(WORLD_SIZE):
            # part `rank` goes first; at the last step, what arrives is the sum of all others
            part = (rank + step * (WORLD_SIZE - forward)) % WORLD_SIZE
            if step > 0:
                ok = wait(ctx, arrived + (step - 1) * LANES, epoch, before, WAITER, exact=True) and ok
                if ok & (ring < 2):
                    other = elsewhere(ctx, place, out.data, before, WAITER)
                    if other >= 0:
                        publish_elsewhere(ctx, place, other, following)
                        for later in range(step, 2 * STEPS):
                            signal(ctx, arrived + later * LANES, epoch, following)
                        ok = False
            if ok:
                for unit in range(first, end):
                    pointers, mask = source.place(part, unit, BLOCK, WORLD_SIZE)
                    total = tl.load(pointers, mask=mask, other=0).to(wide)
                    if step > 0:
                        spot = (tl.cast(step - 1, tl.int64) * units + unit) * BLOCK
                        total += tl.load(staging + spot + element, mask=mask, other=0, cache_modifier=".cg")
                    if step < STEPS:
                        spot = (tl.cast(step, tl.int64) * units + unit) * BLOCK
                        tl.store(remote(ctx, staging + spot + element, bases, following), total, mask=mask)
                    else:
                        result = rounded(total, inp.data.dtype.element_ty)
                        pointers, _ = target.place(part, unit, BLOCK, WORLD_SIZE)
                        tl.store(pointers, result, mask=mask)
                        tl.store(remote(ctx, pointers, bases, following), result, mask=mask)
                if WORLD_SIZE > 1:
                    signal(ctx, arrived + step * LANES, epoch, following)
        for step in range(WORLD_SIZE, 2 * STEPS + 1):
            # a sum that has come is passed on, but the last one
            ok = wait(ctx, arrived + (step - 1) * LANES, epoch, before, WAITER, exact=True) and ok
            part = (rank + step * (WORLD_SIZE - forward)) % WORLD_SIZE
            if ok:
                if step < 2 * STEPS:
                    for unit in range(first, end):
                        pointers, mask = target.place(part, unit, BLOCK, WORLD_SIZE)
                        value = tl.load(pointers, mask=mask, cache_modifier=".cg")
                        tl.store(remote(ctx, pointers, bases, following), value, mask=mask)
                    signal(ctx, arrived + step * LANES, epoch, following)
