"""Warp-specialised programs: MMA warps multiply tiles, mover warps move finished ones.

In the portable kernels all warps of a program do everything, so a tile's product waits while the last tile is pushed,
signalled or summed. Here a finished tile goes through shared memory to the mover warps. The next product begins at
once: its first operands were loaded meanwhile. A kernel of this folder stages, signals and orders its tiles as the
portable one does, so ranks may even mix the two. The product itself is `mma.Mma`'s.

    MMA warps     accumulate the products of operands that come through a ring in shared memory (`loading.py`);
                  round the sums into `product` in shared memory, once that is `free`
    mover warps   wait until `product` is `ready`, and do with it what the op's own function does

Only Gluon, Triton's language with explicit layouts, gives warps different work. It has no interpreter.

Stores that queue for the link hold up the loads of the next product behind them. So the mover warps `pace` a push: it
takes as long as the link takes for a tile of every program. A program's last push, after which nothing is loaded, and
the sums of an all-reduce go at once.

Waits between warps have no deadline. They are for loads, or for warps of the same program. The waits of those for peers
all end (`iris/device/waits.py`), and when one has failed the warps take tiles all the same.

The work is cut into `stream_k.Units`. An op's own object says where a tile lies: `place(tile)` gives its first row,
its first column, and whether to add the bias. What a tile has beyond a short part, or beyond the matrix, is not
stored.
"""

from iris.device import arch
from iris.device.tracing import PRODUCT
from iris.triton_private import (
    aggregate,
    base_value,
    mbarrier,
    program_barrier,
    reinterpret,
)
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..tiles import first_row, known, rows_from
from .loading import after, before, give_place_back, load_first, load_next
from .tile_sums import bias_of, join, scaled


@aggregate
class Shared:
    """A program's shared memory: the ring of operands, the finished tiles, and the barriers between its warps.

    The ring has STAGES places for blocks of A, and SLOTS for those of B. With a LOADER, `freed` says which places of A
    may be loaded. `product` has PLACES for finished tiles, which take turns. A tile lies there in PARTS of some rows.
    """

    a_parts: base_value
    b_parts: base_value
    product: base_value
    loaded: base_value
    freed: base_value
    ready: base_value
    free: base_value
    STAGES: gl.constexpr
    SLOTS: gl.constexpr
    LOADER: gl.constexpr
    PLACES: gl.constexpr
    PARTS: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    FOLDED: gl.constexpr

    @triton.constexpr_function
    def __init__(self, a_parts, b_parts, product, loaded, freed, ready, free, PLACES, FOLDED):
        self.a_parts, self.b_parts, self.product = a_parts, b_parts, product
        self.loaded, self.ready, self.free = loaded, ready, free
        self.LOADER = known(freed is not None)
        self.freed = gl.constexpr(None) if freed is None else freed
        self.STAGES, self.SLOTS = known(a_parts.shape[0]), known(b_parts.shape[0])
        self.PLACES, self.FOLDED = known(PLACES), known(FOLDED)
        parts, rows, cols = (int(known(size).value) for size in product.shape)
        self.PARTS = known(parts // self.PLACES.value)
        self.BLOCK_M, self.BLOCK_N = known(self.PARTS.value * rows), known(cols)


@gluon.jit
def allocate(a, b, dtype: gl.constexpr, tile: gl.constexpr, pipeline: gl.constexpr):
    """Allocate the shared memory of one program that loads operands by the descriptors a and b.

    A finished tile, in `dtype`, is stored in parts of a few rows. If `a` has three dimensions, its rows are folded
    (`tiles.first_row`).
    """
    STAGES: gl.constexpr = pipeline.STAGES
    PLACES: gl.constexpr = pipeline.PLACES
    ROWS: gl.constexpr = pipeline.ROWS
    SLOTS: gl.constexpr = pipeline.SLOTS if pipeline.SLOTS > 0 else STAGES
    a_parts = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    b_parts = gl.allocate_shared_memory(b.dtype, [SLOTS] + b.block_type.shape, b.layout)
    product = gl.allocate_shared_memory(dtype, [PLACES * tile.BLOCK_M // ROWS, ROWS, tile.BLOCK_N], pipeline.PRODUCT)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
    for i in gl.static_range(PLACES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    freed: gl.constexpr = None
    if pipeline.LOADER_WARPS > 0:
        freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(freed.index(i), count=1)
    return Shared(a_parts, b_parts, product, loaded, freed, ready, free, PLACES, len(a.block_shape) == 3)


@triton.constexpr_function
def _sums_that_end_with(leaf):
    """Return how many sums end with leaf number `leaf`, out of a power of two, beside the leaf's own."""
    leaf = getattr(leaf, "value", leaf)
    return (~leaf & leaf + 1).bit_length() - 1


@gluon.jit
def _multiply_steps(ctx, work, shared, count, col, first, steps, at, WAITER: gl.constexpr):
    """Return the sum of `steps` blocks along K from `first` on, of columns from `col` on, and the position from which
    loads and waits continue."""
    acc = work.mma.begin(col, first)
    TOGETHER: gl.constexpr = work.mma.TOGETHER
    for _i in range(steps // TOGETHER):
        for j in gl.static_range(TOGETHER):
            acc, at = _multiply_step(ctx, work, shared, count, acc, at, j, WAITER)
    if TOGETHER > 1:
        for _i in range(steps % TOGETHER):
            acc, at = _multiply_step(ctx, work, shared, count, acc, at, 0, WAITER)
    return work.mma.result(acc), at


@gluon.jit
def _multiply_step(ctx, work, shared, count, acc, at, NUMBER: gl.constexpr, WAITER: gl.constexpr):
    """Add the next block along K, number NUMBER of those without a branch between."""
    stage, phase, slot, coming = at
    for i in gl.static_range(work.mma.BLOCKS):
        mbarrier.wait(shared.loaded.index(stage), phase)
        columns = shared.b_parts.index(slot if work.mma.BLOCKS > 1 else stage)
        acc = work.mma.issue(shared.a_parts.index(stage), columns, acc, NUMBER + i)
        acc = work.mma.await_last_but_one(acc)
        if shared.LOADER:
            coming = give_place_back(shared, before(stage, shared.STAGES), coming)
        elif coming[0] < count:
            program_barrier()  # all warps have multiplied the block before, whose place is free now
            coming = load_next(ctx, work, shared, before(stage, shared.STAGES), coming, count, WAITER)
        stage, phase = after(stage, phase, shared.STAGES)
    if work.mma.BLOCKS > 1:
        slot = gl.where(slot == shared.SLOTS - 1, 0, slot + 1)
    return acc, (stage, phase, slot, coming)


@gluon.jit
def multiply_tiles(
    ctx, work, shared, joins, epilogue, C, epoch, ADDS_BIAS: gl.constexpr, WAITER: gl.constexpr, leaves=None,
    LEAVES: gl.constexpr = 1,
):  # fmt: skip
    """Run the MMA warps: multiply each unit in fp32, and pass finished tiles, rounded, to the mover warps.

    `epilogue` holds the scales of rounded operands, and the bias if `ADDS_BIAS`. `C` is `out` as a matrix. With
    `leaves`, a tile is the sum of LEAVES leaves, a power of two (`sum_tree.py`); partial sums wait for their other half
    in registers, rounded.
    """
    tiles, units = work.tiles, work.units
    finished = reinterpret(
        shared.product, shared.product.dtype, [shared.PLACES, shared.BLOCK_M, shared.BLOCK_N], shared.product.layout
    )
    programs = gl.num_programs(0)
    count = units.count(programs)
    if shared.LOADER:
        at = (0, 0, 0, False)  # no block before the first is freed
    else:
        at = (0, 0, 0, load_first(ctx, work, shared, count, WAITER))
    done = 0
    for u in range(gl.program_id(0), count, programs):
        tile, first, steps, complete = units.at(u, programs)
        _row, col, _bias = tiles.place(tile)
        span = ctx.tracing.record_event_start(PRODUCT, -1, joins.parts, tile, nbytes=0)
        steps = leaves.steps(0) if LEAVES > 1 else steps
        product, at = _multiply_steps(ctx, work, shared, count, col, first, steps, at, WAITER)
        if LEAVES > 1:
            waiting = (product.to(finished.dtype),)
            for leaf in gl.static_range(1, LEAVES):
                first, steps = first + steps, leaves.steps(leaf)
                product, at = _multiply_steps(ctx, work, shared, count, col, first, steps, at, WAITER)
                total = product.to(finished.dtype)
                for _j in gl.static_range(_sums_that_end_with(leaf)):
                    total = (waiting[0].to(gl.float32) + total.to(gl.float32)).to(finished.dtype)
                    waiting = waiting[1:]
                waiting = (total,) + waiting
            product = waiting[0]
        ctx.tracing.record_event_end(span)
        product = join(ctx, units, joins, epoch, u, tile, steps, complete, product, WAITER)
        if complete:
            if epilogue.a_scales is not None or epilogue.b_scales is not None:
                product = scaled(product, tiles, tile, epilogue, C, shared.FOLDED)
            if ADDS_BIAS:
                if epilogue.bias is not None:
                    product += bias_of(product, tiles, tile, epilogue.bias, C.cols, work.mma.MATRICES)
            place = done % shared.PLACES
            mbarrier.wait(shared.free.index(place), done // shared.PLACES & 1 ^ 1)
            finished.index(place).store(product.to(finished.dtype))
            program_barrier()
            mbarrier.arrive(shared.ready.index(place), count=1)
            done += 1


@gluon.jit
def await_tile(shared, done):
    """Wait until the program's tile number `done` is finished."""
    mbarrier.wait(shared.ready.index(done % shared.PLACES), done // shared.PLACES & 1)


@gluon.jit
def part_of(shared, done, part):
    """Return the shared memory of part number `part` of the finished tile number `done`."""
    return shared.product.index(done % shared.PLACES * shared.PARTS + part)


@gluon.jit
def give_back(shared, done, part):
    """Free the place of tile number `done` once the last of its parts has been loaded."""
    if part == shared.PARTS - 1:
        program_barrier()
        mbarrier.arrive(shared.free.index(done % shared.PLACES), count=1)


@gluon.jit
def rows_of(shared, done, part, MOVE: gl.constexpr):
    """Load the part that `part_of` returns into registers; the last part frees the tile's place."""
    values = part_of(shared, done, part).load(MOVE)
    give_back(shared, done, part)
    return values


@gluon.jit
def pace(begin, spread, part, parts):
    """Wait until part number `part` of `parts` is due: the first was at `begin`, and all take `spread` ticks."""
    while arch.clock() - begin < spread * part // parts:
        pass


@gluon.jit
def places_of(shared, part, row, rows, MOVE: gl.constexpr):
    """Return (rows of A, columns in the tile, which rows belong to the tile) of the values that `rows_of` returns.

    `row` is the tile's first row; `rows` is the number of rows of A.
    """
    ROWS: gl.constexpr = shared.BLOCK_M // shared.PARTS
    i = part * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MOVE))
    r, own = rows_from(first_row(row, rows, shared.BLOCK_M), row, rows, i, shared.BLOCK_M, shared.FOLDED)
    return r, gl.arange(0, shared.BLOCK_N, layout=gl.SliceLayout(0, MOVE)), own
