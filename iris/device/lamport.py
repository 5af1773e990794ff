"""Lamport values: data that carries its own validity, so ranks exchange it in one hop, without fence or flag.

A receiver's memory holds a sentinel, all bits one, wherever nothing has arrived. It polls the values themselves until
none is the sentinel, and then puts the sentinel back. A sender must never send the sentinel:

    floating point  values keep their width. The sentinel is a NaN that no conversion and no sum makes;
                    `without_sentinel` turns one that was loaded into another NaN.
    integers        every bit pattern is a valid value, so `widen` sends values of twice the width.

Each value is stored and loaded at once (16 to 64 bits). So a value that is not the sentinel is complete, whatever the
order in which values arrive.

Two halves of the memory, chosen by the parity of an epoch that only these exchanges advance, are enough. A rank that
stores for call e + 2 has finished e + 1, so it has everyone's values of e + 1. Their senders had finished call e, with
the sentinel back in place. A rank has finished a call when its kernel has ended: a dependent launch touches no memory
until then (`arch.follow`).
"""

import triton
import triton.language as tl

from . import arch
from .context import HEADER
from .function import device_function
from .rma import moved
from .tracing import WAIT
from .waits import anyone_gone, deadline, is_late, keeps_waiting, report

SENTINEL = tl.constexpr(-1)
_THREADS = tl.constexpr(1024)  # the most of a program


@device_function
def without_sentinel(x, dtype: tl.constexpr):
    """Return fp32 `x`, rounded to `dtype`, as integers of that width that are never the sentinel."""
    bits: tl.constexpr = dtype.primitive_bitwidth
    values = arch.round_to(x, dtype).to(tl.core.get_int_dtype(bits, True), bitcast=True)
    return values ^ ((values == SENTINEL).to(values.dtype) << (bits - 1))  # another NaN, without the sign


@device_function
def widen(x):
    """Return integers of 8, 16 or 32 bits as integers of twice the width, which are never the sentinel."""
    bits: tl.constexpr = x.dtype.primitive_bitwidth
    unsigned: tl.constexpr = tl.core.get_int_dtype(bits, False)
    return x.to(unsigned, bitcast=True).to(tl.core.get_int_dtype(2 * bits, True))


@device_function
def unwrapped(values, dtype: tl.constexpr):
    """Return values of `dtype` from `without_sentinel` or `widen`, in the type that sums are kept in."""
    if values.dtype.primitive_bitwidth == dtype.primitive_bitwidth:
        return values.to(dtype, bitcast=True).to(sum_type(dtype))
    else:
        return values.to(dtype).to(sum_type(dtype))


@triton.constexpr_function
def sum_type(dtype):
    """Return fp32 for floating-point numbers, else integers of 32 bits or of as many as `dtype` has."""
    if dtype.is_floating():
        return tl.float32
    return tl.int64 if dtype.primitive_bitwidth == 64 else tl.int32


@device_function
def take(
    ctx,
    first,
    step,
    mask,
    source,
    epoch,
    waiter: tl.constexpr,
    dtype: tl.constexpr,
    COUNT: tl.constexpr,
    own=None,
    patience: tl.constexpr = 1,
    LANES: tl.constexpr = True,
    loaded=None,
):
    """Wait for COUNT blocks of Lamport values of `dtype`, and restore the sentinel in their places.

    The pointers `first` are those of the first block; the blocks lie `step` values apart. `source`: the rank that sends
    each value of the first block; the i-th rank after it sends block i. `own`: the block of number `ctx.rank`, which
    this rank does not send itself. `patience`: as in `deadline`. `LANES` is off in Gluon, as in `sync`; there, blocks
    must have no fewer values than threads. `loaded`: the result of `look` for these blocks. Returns (the blocks' sum in
    `sum_type(dtype)`, in order; whether all came in time).
    """
    if own is not None and COUNT == 2:  # load the peer's only: two terms give the same sum in either order
        peer = 1 - ctx.rank
        theirs, came = take(
            ctx, first + peer * step, 0, mask, source + peer, epoch, waiter, dtype, 1, None, patience, LANES, loaded
        )
        return own + theirs, came
    else:
        blocks = look(ctx, first, step, mask, COUNT, own) if loaded is None else loaded
        total, missing = _added(ctx, blocks, dtype, own, LANES)
        if missing:
            total, missing = _poll(
                ctx, total, first, step, mask, source, epoch, waiter, dtype, COUNT, own, patience, LANES
            )
        # `_added` ends with a barrier: no thread still loads
        for i in tl.static_range(COUNT):
            tl.store(first + i * step, SENTINEL, mask=_sent(ctx, mask, i, own))
        return total, not missing


@device_function
def take_loaded(
    ctx, loaded, values, mask, source, epoch, waiter: tl.constexpr, dtype: tl.constexpr, LANES: tl.constexpr = True
):
    """Take one block of values as `take` does; `loaded` holds the block as `arch.load_fresh` read it before.

    Returns (the block's values as by `unwrapped`, whether any had to be waited for).
    """
    total, missing = unwrapped(loaded, dtype), any_set((loaded == SENTINEL).to(tl.int32), LANES)
    waited = missing
    if missing:
        total, missing = _poll(ctx, total, values, 0, mask, source, epoch, waiter, dtype, 1, None, 1, LANES)
    tl.store(values, SENTINEL, mask=mask)
    return total, waited


@device_function
def _sent(ctx, mask, i, own):
    """Return the mask of block i as peers send it: empty for this rank's own block."""
    if own is None:
        return mask
    else:
        return mask & (i != ctx.rank)


@device_function
def look(ctx, first, step, mask, COUNT: tl.constexpr, own=None):
    """Load the places that `take` of these arguments would wait for; return a tuple of its blocks."""
    if own is not None and COUNT == 2:
        return (arch.load_fresh(first + (1 - ctx.rank) * step, mask),)
    else:
        blocks = (arch.load_fresh(first, _sent(ctx, mask, 0, own)),)
        for i in tl.static_range(1, COUNT):
            blocks += (arch.load_fresh(first + i * step, _sent(ctx, mask, i, own)),)
        return blocks


@device_function
def _added(ctx, blocks, dtype: tl.constexpr, own, LANES: tl.constexpr):
    """Return (the sum of the blocks that `look` gave, whether any of their values is missing)."""
    missing = (blocks[0] == SENTINEL).to(tl.int32)
    total = _value(ctx, blocks[0], dtype, 0, own)
    for i in tl.static_range(1, len(blocks)):
        missing |= (blocks[i] == SENTINEL).to(tl.int32)
        total += _value(ctx, blocks[i], dtype, i, own)
    return total, any_set(missing, LANES)


@device_function
def any_set(missing, LANES: tl.constexpr):
    """Return whether any of these is not zero; the same answer for all threads."""
    result = tl.max(missing)
    if LANES and missing.numel < _THREADS:
        # Where a block is small, each warp loads all of it, at a separate time. Reducing over more elements than
        # threads makes all warps agree.
        result = tl.max(tl.zeros((2 * _THREADS,), tl.int32) + result)
    return result != 0


@device_function
def _value(ctx, values, dtype: tl.constexpr, i, own):
    if own is None:
        return unwrapped(values, dtype)
    else:
        return tl.where(i == ctx.rank, own, unwrapped(values, dtype))


@device_function
def _poll(
    ctx,
    total,
    first,
    step,
    mask,
    source,
    epoch,
    waiter: tl.constexpr,
    dtype: tl.constexpr,
    COUNT: tl.constexpr,
    own,
    patience: tl.constexpr,
    LANES: tl.constexpr,
):
    span = ctx.tracing.record_event_start(WAIT, -1, first, mask=mask)
    end = deadline(ctx, patience)
    polls = 0
    missing = True
    waiting = True
    while waiting:
        late = is_late(end, polls)
        if LANES:
            late = late | anyone_gone(ctx)
        total, missing = _added(ctx, look(ctx, first, step, mask, COUNT, own), dtype, own, LANES)
        polls += 1
        waiting = keeps_waiting(ctx, missing, late, polls)
    if missing:
        peer = -1
        for i in tl.static_range(COUNT):
            values = arch.load_fresh(first + i * step, _sent(ctx, mask, i, own))
            peer = tl.maximum(peer, tl.max(tl.where(values == SENTINEL, source + i, -1)))
        report(ctx, waiter, epoch, peer, epoch - 1)
    ctx.tracing.record_event_end(span)
    return total, missing


# A program that computes before it sends would wait for the addresses of the peers' heaps after its product, one by
# one. It loads them at its start, and `settled` keeps the compiler from waiting for them there.


@device_function
def load_bases(ctx_ptr, WORLD_SIZE: tl.constexpr):
    """Start loading the heap bases of all ranks; return a tuple."""
    bases = ()
    for i in tl.static_range(WORLD_SIZE):
        bases += (tl.load(ctx_ptr + HEADER + i),)
    return bases


@device_function
def settled(values):
    """Return the same values, which the compiler must not touch before this point."""
    after = ()
    for i in tl.static_range(len(values)):
        after += (_opaque(values[i]),)
    return after


@device_function
def _opaque(x):
    if not arch.is_cuda():
        return x
    elif x.dtype.primitive_bitwidth == 64:
        return tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [x], dtype=tl.int64, is_pure=False, pack=1)
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)


@device_function
def remote(ctx, pointer, bases, to_rank):
    """Return `DeviceContext.remote` of `pointer` by the heap bases that `load_bases` gave."""
    target = _chosen(bases, to_rank)
    return moved(pointer, _chosen(bases, ctx.rank), target)


@device_function
def put(ctx, pointer, values, mask, bases, to_rank):
    """Send values, none of them the sentinel, to their place at `to_rank`."""
    tl.store(remote(ctx, pointer, bases, to_rank), values, mask=mask, cache_modifier=".wt")


@device_function
def _chosen(values, index):
    value = values[0]
    for i in tl.static_range(1, len(values)):
        value = tl.where(index == i, values[i], value)
    return value
