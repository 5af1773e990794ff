"""Any collective of a small tensor, and between two ranks also of a large one, by Lamport values.

A Lamport value shows by itself whether it has arrived (`iris/device/lamport.py`). Every rank sends its values into the
others' staging memory, then takes those that came from each of them: one hop, without fence, flag or hand-shake. With
GATHER, the rank that has summed a part sends the sums in a second hop.

No wait is circular: a program makes all its sends before its first wait, and those of the second hop before its last
waits. Between two ranks a program first sends one unit. Then, in each turn, it sends the next unit and takes the one
before, which the peer's program of the same number sent in an earlier turn. So sums and stores go on while values are
under way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import arch
from ..device.context import DeviceContext
from ..device.function import device_function
from ..device.lamport import load_bases, put, sum_type, take, widen, without_sentinel
from ..device.sync import advance, next_epoch
from .view import views


@device_function
def _sendable(x, dtype: tl.constexpr, REDUCE: tl.constexpr):
    if REDUCE and dtype.is_floating():
        return without_sentinel(x.to(tl.float32), dtype)
    else:
        return widen(x.to(dtype))


@device_function
def rounded(x, dtype: tl.constexpr):
    """Round a sum to `dtype`."""
    if dtype.is_floating():
        return arch.round_to(x, dtype)
    else:
        return x.to(dtype)


@triton.constexpr_function
def _divisor(world_size):
    return max(1, world_size - 1)  # a rank alone has no items, but is compiled


@device_function
def _unit_and_part(ctx, item, WORLD_SIZE: tl.constexpr):
    """Return (unit, part) of an item: items take turns among the parts of the other ranks, a unit each."""
    OTHERS: tl.constexpr = _divisor(WORLD_SIZE)
    return item // OTHERS, (ctx.rank + 1 + item % OTHERS) % WORLD_SIZE


@device_function
def _place(area, source, unit, units, BLOCK: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Return where the values of a rank's unit lie.

    Between two ranks only the peer's values arrive, so there is one block.
    """
    first = unit if WORLD_SIZE == 2 else tl.cast(source, tl.int64) * units + unit
    return area + first * BLOCK + tl.arange(0, BLOCK)


@device_function
def _send(
    ctx, bases, source, target, half, item, units,
    BLOCK: tl.constexpr, SCATTER: tl.constexpr, REDUCE: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Send a unit: with SCATTER, a unit of one other rank's part to that rank, else to all other ranks."""
    dtype: tl.constexpr = source.data.dtype.element_ty
    if SCATTER:
        unit, part = _unit_and_part(ctx, item, WORLD_SIZE)
    else:
        unit, part = item, 0
    pointers, mask = source.place(part, unit, BLOCK, WORLD_SIZE)
    value = tl.load(pointers, mask=mask, other=0)
    if not (SCATTER or REDUCE):
        places, _ = target.place(ctx.rank, unit, BLOCK, WORLD_SIZE)
        tl.store(places, value, mask=mask)
    values, place = _sendable(value, dtype, REDUCE), _place(half, ctx.rank, unit, units, BLOCK, WORLD_SIZE)
    if SCATTER:
        put(ctx, place, values, mask, bases, part)
    else:
        for i in tl.static_range(1, WORLD_SIZE):
            put(ctx, place, values, mask, bases, (ctx.rank + i) % WORLD_SIZE)


@device_function
def _keep(ctx, source, target, unit, BLOCK: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Copy a unit of this rank's own part from `inp` to `out`."""
    pointers, mask = source.place(ctx.rank, unit, BLOCK, WORLD_SIZE)
    places, _ = target.place(ctx.rank, unit, BLOCK, WORLD_SIZE)
    tl.store(places, tl.load(pointers, mask=mask, other=0), mask=mask)


@device_function
def _sum(
    ctx, bases, source, target, half, sums, unit, units, epoch,
    BLOCK: tl.constexpr, SCATTER: tl.constexpr, GATHER: tl.constexpr, ONE_OUT: tl.constexpr,
    WORLD_SIZE: tl.constexpr, WAITER: tl.constexpr,
):  # fmt: skip
    """Put the sum of all ranks' values of a unit into `out`, once they are here; with GATHER send it to all."""
    dtype: tl.constexpr = source.data.dtype.element_ty
    mine = ctx.rank if SCATTER else 0
    pointers, mask = source.place(mine, unit, BLOCK, WORLD_SIZE)
    own = tl.load(pointers, mask=mask, other=0).to(sum_type(dtype))
    first = _place(half, 0, unit, units, BLOCK, WORLD_SIZE)
    step = 0 if WORLD_SIZE == 2 else tl.cast(units, tl.int64) * BLOCK
    total, ok = take(ctx, first, step, mask, 0, epoch, WAITER, dtype, WORLD_SIZE, own)
    if GATHER:
        if ok:
            value, place = _sendable(total, dtype, True), _place(sums, ctx.rank, unit, units, BLOCK, WORLD_SIZE)
            for i in tl.static_range(1, WORLD_SIZE):
                put(ctx, place, value, mask, bases, (ctx.rank + i) % WORLD_SIZE)
    places, _ = target.place(0 if ONE_OUT else mine, unit, BLOCK, WORLD_SIZE)
    tl.store(places, rounded(total, dtype), mask=mask)


@device_function
def _receive(
    ctx, target, area, item, units, epoch,
    BLOCK: tl.constexpr, PATIENCE: tl.constexpr, WORLD_SIZE: tl.constexpr, WAITER: tl.constexpr,
):  # fmt: skip
    """Wait for a unit of another rank's part, and store it in `out`."""
    dtype: tl.constexpr = target.data.dtype.element_ty
    unit, part = _unit_and_part(ctx, item, WORLD_SIZE)
    places, mask = target.place(part, unit, BLOCK, WORLD_SIZE)
    place = _place(area, part, unit, units, BLOCK, WORLD_SIZE)
    value, _ = take(ctx, place, 0, mask, part, epoch, WAITER, dtype, 1, patience=PATIENCE)
    tl.store(places, rounded(value, dtype), mask=mask)


@triton.jit(do_not_specialize=["units"])
def lamport_kernel(
    inp,
    out,
    staging,
    sync,
    ctx_ptr,
    units,
    half_elements,
    unit_form: tl.constexpr,
    form: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    WAITER: tl.constexpr,
):
    # staging: two halves, by the epoch's parity. Each holds [source rank, unit, BLOCK], and then with GATHER the sums
    # [owner, unit, BLOCK]; between two ranks [unit, BLOCK].
    OTHERS: tl.constexpr = WORLD_SIZE - 1
    SOURCES: tl.constexpr = 1 if WORLD_SIZE == 2 else WORLD_SIZE
    BLOCK: tl.constexpr = unit_form.BLOCK
    ONE_OUT: tl.constexpr = unit_form.ONE_OUT
    SCATTER: tl.constexpr = form.SCATTER
    REDUCE: tl.constexpr = form.REDUCE
    GATHER: tl.constexpr = form.GATHER
    source, target = views(inp, out, unit_form)
    epoch = next_epoch(sync)
    bases = load_bases(ctx_ptr, WORLD_SIZE)
    ctx = DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE)
    half = staging + tl.cast(epoch & 1, tl.int64) * half_elements
    sums = half + SOURCES * tl.cast(units, tl.int64) * BLOCK

    # Item t of this program is a unit of the same part here and at the end, so a call in place has sent it before it
    # overwrites it. A rank sends itself nothing: it reads its own values in `inp`, and writes them to `out`.
    first, step = tl.program_id(0), tl.num_programs(0)
    sends, takes = units * (OTHERS if SCATTER else 1), units * (1 if REDUCE else OTHERS)
    early_end = min(first + step, sends) if WORLD_SIZE == 2 else sends
    for item in range(first, early_end, step):
        _send(ctx, bases, source, target, half, item, units, BLOCK, SCATTER, REDUCE, WORLD_SIZE)
    if SCATTER and not REDUCE:
        for unit in range(first, units, step):
            _keep(ctx, source, target, unit, BLOCK, WORLD_SIZE)
    advance(sync, epoch)  # while the values are under way
    for item in range(first, takes, step):
        if WORLD_SIZE == 2:
            if item + step < sends:
                _send(ctx, bases, source, target, half, item + step, units, BLOCK, SCATTER, REDUCE, WORLD_SIZE)
        if REDUCE:
            _sum(
                ctx, bases, source, target, half, sums, item, units, epoch,
                BLOCK, SCATTER, GATHER, ONE_OUT, WORLD_SIZE, WAITER,
            )  # fmt: skip
        else:
            _receive(ctx, target, half, item, units, epoch, BLOCK, 1, WORLD_SIZE, WAITER)
    if GATHER:  # the sums come after a wait of their owner's
        for item in range(first, units * OTHERS, step):
            _receive(ctx, target, sums, item, units, epoch, BLOCK, 2, WORLD_SIZE, WAITER)
