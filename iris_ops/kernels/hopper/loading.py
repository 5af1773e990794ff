"""The ring in shared memory through which a warp-specialised program's operands come (`pipeline.py`).

A load is one instruction of one thread, STAGES - 1 blocks ahead and across tiles. Either the MMA warps load: they know
when a place is free. Or a loader does, a warp of its own. Then MMA warps only say which places are free, and nothing
that they do is ordered with a load: neither their reads of shared memory nor those of memory. So products that read
scales or codes need a loader. Beside large tiles it takes the place of two mover warps, for want of registers.

A step along K has a block of B and BLOCKS blocks of A, each with its own place.
"""

from iris.triton_private import aggregate, async_load, base_value, mbarrier, program_barrier
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..stream_k import Units
from ..tiles import first_row

NOWHERE = gl.constexpr(None)  # for `gathered` where all rows lie in `a`, and for scales where there are none


@aggregate
class Work:
    """The work of a program's MMA warps: `units` of `tiles` of the operands that a and b describe.

    `gathered` loads rows that are not in `a`, by its `first`, `await_rows` and `load`, or is None. A `b` of three
    dimensions, [2, N, K], is two matrices of N columns, and a tile has as many columns of each.
    """

    a: base_value
    b: base_value
    gathered: base_value
    mma: base_value
    units: Units
    tiles: base_value

    @triton.constexpr_function
    def __init__(self, a, b, gathered, mma, units, tiles):
        self.a, self.b = a, b
        self.gathered = gl.constexpr(None) if gathered is None else gathered
        self.mma, self.units, self.tiles = mma, units, tiles


@gluon.jit
def before(stage, STAGES: gl.constexpr):
    """Return the place before `stage` in a ring."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def after(stage, phase, STAGES: gl.constexpr):
    """Return the place after `stage`, and the phase of its barriers."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _load_block(ctx, work, shared, stage, slot, row, col, k, NUMBER: gl.constexpr):
    """Load block number NUMBER of the step from `k` on along K, and with the first one B's."""
    loaded = shared.loaded.index(stage)
    DEPTH: gl.constexpr = work.mma.BLOCK_K // work.mma.BLOCKS
    if NUMBER == 0:
        mbarrier.expect(loaded, work.a.block_type.nbytes + work.b.block_type.nbytes)
    else:
        mbarrier.expect(loaded, work.a.block_type.nbytes)
    rows = shared.a_parts.index(stage)
    if work.gathered is not None:
        work.gathered.load(ctx, work.a, row, k + NUMBER * DEPTH, loaded, rows)
    elif shared.FOLDED:
        async_load(work.a, [0, 0, k + NUMBER * DEPTH], loaded, rows)
    else:
        async_load(work.a, [row, k + NUMBER * DEPTH], loaded, rows)
    if NUMBER == 0:
        async_load(work.b, work.mma.columns_at(col, k), loaded, shared.b_parts.index(slot))


@gluon.jit
def _begin_unit(work, unit):
    """Return (unit, row, column, begin along K, end along K) of the first unit from `unit` on that has steps.

    The row is the first one that is loaded for the unit's tile.
    """
    programs = gl.num_programs(0)
    tile, first, steps, _ = work.units.at(unit, programs)
    if work.units.SHARED:
        for _i in gl.static_range(2):  # a head and a body may be empty
            if (steps == 0) & (unit < 2 * programs):
                unit += programs
                tile, first, steps, _complete = work.units.at(unit, programs)
    row, col, _bias = work.tiles.place(tile)
    if work.gathered is not None:
        row = work.gathered.first(row)
    elif len(work.a.block_shape) == 2:
        row = first_row(row, work.a.shape[0], work.mma.BLOCK_M)
    return unit, row, col, first * work.mma.BLOCK_K, (first + steps) * work.mma.BLOCK_K


@gluon.jit
def _begin(ctx, work, unit, ready, count, WAITER: gl.constexpr):
    """Return (unit, row, column, begin along K, end along K, how many ranks' rows are here) from `unit` on."""
    unit, row, col, k, end = _begin_unit(work, unit)
    if work.gathered is not None:
        ready = work.gathered.await_rows(ctx, row, ready, unit < count, WAITER)
    return unit, row, col, k, end, ready


@gluon.jit
def load_next(ctx, work, shared, stage, at, count, WAITER: gl.constexpr):
    """Load the block that comes next, if there is one, and return what comes after it.

    `at`: the unit, the row and the column of the block, where along K it is, where the unit ends, how many ranks' rows
    are here. `count`: of units.
    """
    unit, row, col, k, end, ready = at
    if unit < count:
        _load_block(ctx, work, shared, stage, stage, row, col, k, 0)
        k += work.mma.BLOCK_K
        if k >= end:
            unit, row, col, k, end, ready = _begin(ctx, work, unit + gl.num_programs(0), ready, count, WAITER)
    return unit, row, col, k, end, ready


@gluon.jit
def load_first(ctx, work, shared, count, WAITER: gl.constexpr):
    """Load the first blocks, all but one place of the ring, and return what comes after them."""
    ready = 0
    at = _begin(ctx, work, gl.program_id(0), ready, count, WAITER)
    for i in gl.static_range(shared.STAGES - 1):
        at = load_next(ctx, work, shared, i, at, count, WAITER)
    return at


@gluon.jit
def give_place_back(shared, stage, loaded):
    """Tell the loader that all warps have multiplied the block at `stage`, where one was loaded. Returns True: the next
    place has one."""
    program_barrier()
    mbarrier.arrive(shared.freed.index(stage), count=1, pred=loaded)
    return True


@gluon.jit
def load_ahead(ctx, work, shared, WAITER: gl.constexpr):
    """Run the loader: load all blocks in turn, each once its place is free."""
    programs = gl.num_programs(0)
    count = work.units.count(programs)
    ready = 0
    unit, row, col, k, end, ready = _begin(ctx, work, gl.program_id(0), ready, count, WAITER)
    stage = 0
    phase = 1  # the first places are free
    slot = 0
    while unit < count:
        for i in gl.static_range(work.mma.BLOCKS):
            mbarrier.wait(shared.freed.index(stage), phase)
            _load_block(ctx, work, shared, stage, slot if work.mma.BLOCKS > 1 else stage, row, col, k, i)
            stage, phase = after(stage, phase, shared.STAGES)
        if work.mma.BLOCKS > 1:
            slot = gl.where(slot == shared.SLOTS - 1, 0, slot + 1)
        k += work.mma.BLOCK_K
        if k >= end:
            unit, row, col, k, end, ready = _begin(ctx, work, unit + programs, ready, count, WAITER)
