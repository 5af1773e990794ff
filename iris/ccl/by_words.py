"""Any collective of a small tensor: words that say themselves whether they have arrived (`iris/device/exchange.py`).

Every rank sends its words into the others' staging memory, then takes those that came from each of them: one hop,
without fence, flag or hand-shake. With GATHER, whoever has summed a part sends the sums in a second hop.

All sends of a program come before its first wait, and the second hop's before the last waits: no wait is circular.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import arch
from ..device.context import DeviceContext
from ..device.exchange import load_bases, put, seal, sum_type, take, widen
from ..device.function import device_function
from ..device.sync import advance, next_epoch
from .view import views


@device_function
def _words(x, dtype: tl.constexpr, REDUCE: tl.constexpr):
    if REDUCE and dtype.is_floating():
        return seal(x.to(tl.float32), dtype)
    else:
        return widen(x.to(dtype))


@device_function
def rounded(x, dtype: tl.constexpr):
    """A sum as `dtype`."""
    if dtype.is_floating():
        return arch.round_to(x, dtype)
    else:
        return x.to(dtype)


@triton.jit(do_not_specialize=["units"])
def words_kernel(
    inp,
    out,
    staging,
    sync,
    words,
    units,
    slot_words,
    in_n,
    in_cols,
    stride_im,
    stride_in,
    in_share,
    in_limit,
    in_step,
    out_n,
    out_cols,
    stride_om,
    stride_on,
    out_share,
    out_limit,
    out_step,
    BLOCK: tl.constexpr,
    IN_LAYOUT: tl.constexpr,
    OUT_LAYOUT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TILE_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    SCATTER: tl.constexpr,
    REDUCE: tl.constexpr,
    GATHER: tl.constexpr,
    ONE_OUT: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    WAITER: tl.constexpr,
):
    # staging: [2 slots], each [source rank, unit, BLOCK] words, then with GATHER the sums [owner, unit, BLOCK].
    dtype: tl.constexpr = inp.dtype.element_ty
    source, target = views(
        (inp, in_n, in_cols, stride_im, stride_in, in_share, in_limit, in_step),
        (out, out_n, out_cols, stride_om, stride_on, out_share, out_limit, out_step),
        IN_LAYOUT,
        OUT_LAYOUT,
        INTERLEAVED,
        ONE_OUT,
        TILE_N,
        GROUP_M,
    )
    epoch = next_epoch(sync)
    bases = load_bases(words, WORLD_SIZE)
    ctx = DeviceContext.initialize(words, tl.load(words), WORLD_SIZE)
    rank = ctx.rank
    lane = tl.arange(0, BLOCK)
    slot = staging + tl.cast(epoch & 1, tl.int64) * slot_words
    source_step = tl.cast(units, tl.int64) * BLOCK
    sums = slot + WORLD_SIZE * source_step

    # Unit t of this program's is, here and at the end, a unit of the same part: in place, it has been sent before it
    # is overwritten. A rank's own words go nowhere: what they say is read, or written, where it belongs.
    if SCATTER:
        for t in range(tl.program_id(0), WORLD_SIZE * units, tl.num_programs(0)):
            part, unit = (rank + 1 + t % WORLD_SIZE) % WORLD_SIZE, t // WORLD_SIZE
            pointers, mask = source.place(part, unit, BLOCK, WORLD_SIZE)
            if part != rank:
                value = _words(tl.load(pointers, mask=mask, other=0), dtype, REDUCE)
                put(ctx, slot + rank * source_step + unit * BLOCK + lane, value, mask, bases, part)
            elif not REDUCE:
                places, _ = target.place(part, unit, BLOCK, WORLD_SIZE)
                tl.store(places, tl.load(pointers, mask=mask, other=0), mask=mask)
    else:
        for unit in range(tl.program_id(0), units, tl.num_programs(0)):
            pointers, mask = source.place(0, unit, BLOCK, WORLD_SIZE)
            value = tl.load(pointers, mask=mask, other=0)
            if not REDUCE:
                places, _ = target.place(rank, unit, BLOCK, WORLD_SIZE)
                tl.store(places, value, mask=mask)
            sealed = _words(value, dtype, REDUCE)
            place = slot + rank * source_step + unit * BLOCK + lane
            for i in tl.static_range(1, WORLD_SIZE):
                put(ctx, place, sealed, mask, bases, (rank + i) % WORLD_SIZE)
    advance(sync, epoch)  # while the words are under way

    if REDUCE:
        mine = rank if SCATTER else 0
        for unit in range(tl.program_id(0), units, tl.num_programs(0)):
            pointers, mask = source.place(mine, unit, BLOCK, WORLD_SIZE)
            own = tl.load(pointers, mask=mask, other=0).to(sum_type(dtype))
            place = slot + unit * BLOCK + lane
            total, ok = take(ctx, place, source_step, mask, 0, epoch, WAITER, dtype, WORLD_SIZE, own)
            if GATHER:
                if ok:
                    value = _words(total, dtype, REDUCE)
                    place = sums + rank * source_step + unit * BLOCK + lane
                    for i in tl.static_range(1, WORLD_SIZE):
                        put(ctx, place, value, mask, bases, (rank + i) % WORLD_SIZE)
            pointers, _ = target.place(0 if ONE_OUT else mine, unit, BLOCK, WORLD_SIZE)
            tl.store(pointers, rounded(total, dtype), mask=mask)
    if GATHER or not REDUCE:
        for t in range(tl.program_id(0), WORLD_SIZE * units, tl.num_programs(0)):
            part, unit = (rank + 1 + t % WORLD_SIZE) % WORLD_SIZE, t // WORLD_SIZE
            if part != rank:
                pointers, mask = target.place(part, unit, BLOCK, WORLD_SIZE)
                place = (sums if GATHER else slot) + part * source_step + unit * BLOCK + lane
                # sums come behind a wait of their owner's
                total, _ = take(ctx, place, 0, mask, part, epoch, WAITER, dtype, 1, patience=1 + GATHER * REDUCE)
                tl.store(pointers, rounded(total, dtype), mask=mask)
