"""Find the experts that a step touches, and stream their weights, in Gluon.

`quantised/weight_stream.py` does this for one weight. Here the weights and scales of all experts are one tensor each
[lines, experts * N, words], and a program loads tiles of the experts that have tokens.

    pair     A token and one of its experts, number t * top_k + j.
    block    Up to eight pairs of one expert, each a row of a product.
    item     A block and a group of columns. The ring of weights keeps loading across a program's items.
    loader   A warp of its own loads the weights. In one partition with the others, each load would wait for what they
             have read, A from memory included.
    A        Each thread loads the numbers that its products need, one step ahead, and only those of a block's rows.
"""

from iris.triton_private import aggregate, async_load, base_value, mbarrier, mma_v2, program_barrier
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernels.tiles import known
from ..planning.needs import LINE
from ..planning.ways.touched import ROWS as _ROWS
from ..quantised.line_products import add_groups, begins_of, products_of, rows_layout, scales_of

WARPS = 4
LOADER_WARPS, LOADER_REGISTERS = gl.constexpr(1), gl.constexpr(24)

LINES = gl.constexpr(WARPS)  # of a step: one for each warp
ROWS = gl.constexpr(_ROWS)  # of a product: an instruction's fewest
_LINE = gl.constexpr(LINE)


@triton.constexpr_function
def pairs_layout(pairs, warps):
    """Return the layout of a step's pairs: each warp has all of them."""
    held = [[32 << i] for i in range(pairs.bit_length() - 6)]
    return gl.DistributedLinearLayout(
        held, [[1 << i] for i in range(5)], [[0]] * (warps.bit_length() - 1), [], [pairs]
    )  # fmt: skip


@aggregate
class Touched:
    """The blocks of a step, by its pairs: each pair's block or -1, its row there, its expert, and its number.

    `count` is the number of blocks: at least one, which has no pair if no expert is in range.
    """

    block: gl.tensor
    row: gl.tensor
    expert: gl.tensor
    pair: gl.tensor
    count: gl.tensor

    @triton.constexpr_function
    def __init__(self, block, row, expert, pair, count):
        self.block, self.row, self.expert, self.pair, self.count = block, row, expert, pair, count

    @gluon.jit
    def expert_of(self, block):
        """Return the expert of a block; 0 beyond the last."""
        return gl.max(gl.where(self.block == block, self.expert, 0), 0)

    @gluon.jit
    def pairs_of(self, block):
        """Return each row's pair in a block, or -1, as a tuple of numbers."""
        pairs = ()
        for r in gl.static_range(ROWS):
            pairs = pairs + (gl.max(gl.where((self.block == block) & (self.row == r), self.pair, -1), 0),)
        return pairs


@gluon.jit
def as_rows(pairs, layout: gl.constexpr):
    """Return a block's pairs as a block [ROWS]."""
    r = gl.arange(0, ROWS, layout=layout)
    rows = gl.full((ROWS,), -1, gl.int32, layout=layout)
    for i in gl.static_range(ROWS):
        rows = gl.where(r == i, pairs[i], rows)
    return rows


@gluon.jit
def find(chosen, pairs, experts, PAIRS: gl.constexpr):
    """Return (the blocks of `chosen` [pairs], each block's expert in shared memory, each pair's expert as given, which
    of these are out of range).

    Blocks are ordered by expert. Each pair is compared with all others, so pairs must be few.
    """
    WITH: gl.constexpr = gl.BlockedLayout([1, PAIRS // 32], [1, 32], [gl.num_warps(), 1], [1, 0])
    OTHER: gl.constexpr = gl.SliceLayout(1, WITH)
    p, q = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, WITH)), gl.arange(0, PAIRS, layout=OTHER)
    given = gl.load(chosen + p, mask=p < pairs, other=-1)
    valid = (given >= 0) & (given < experts)
    expert = gl.where(valid, given, -1).to(gl.int32)
    alike = (q[:, None] < p[None, :]) & (gl.convert_layout(expert, OTHER)[:, None] == expert[None, :])
    place = gl.sum(alike.to(gl.int32), 0)  # among its expert's pairs
    key = gl.where(valid, expert * PAIRS + place // ROWS, -1)
    leads = (valid & (place % ROWS == 0)).to(gl.int32)
    lower = gl.convert_layout(key, OTHER)[:, None] < key[None, :]
    block = gl.sum(gl.where(lower, gl.convert_layout(leads, OTHER)[:, None], 0), 0)
    first_of = (block[None, :] == q[:, None]) & (leads[None, :] > 0)
    experts_of = gl.allocate_shared_memory(gl.int32, [PAIRS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    experts_of.store(gl.sum(gl.where(first_of, expert[None, :], 0), 1))
    HELD: gl.constexpr = pairs_layout(PAIRS, gl.num_warps())
    touched = Touched(
        gl.convert_layout(gl.where(valid, block, -1), HELD), gl.convert_layout(place % ROWS, HELD),
        gl.convert_layout(gl.where(valid, expert, 0), HELD), gl.arange(0, PAIRS, layout=HELD),
        gl.maximum(gl.sum(leads, 0), 1),
    )  # fmt: skip
    return touched, experts_of, given, (p < pairs) & (valid == 0)


@aggregate
class Ring:
    """The ring of a program's weights: descriptors of all experts, and stages in shared memory.

    N: columns of an expert. HALVES: a step has a tile of the first half of them and one of the second; else one tile.
    ZEROS: whether each scale is followed by its zero point.
    Waits for a stage have no deadline, because they are for loads and products of the program itself.
    """

    b: base_value
    scales: base_value
    codes: base_value
    factors: base_value
    loaded: base_value
    freed: base_value
    sums: base_value
    N: base_value
    steps: base_value
    HALVES: gl.constexpr
    STAGES: gl.constexpr
    ZEROS: gl.constexpr

    @triton.constexpr_function
    def __init__(self, b, scales, codes, factors, loaded, freed, sums, N, steps, HALVES, STAGES, ZEROS):
        self.b, self.codes, self.loaded, self.freed, self.sums = b, codes, loaded, freed, sums
        self.scales, self.factors = (gl.constexpr(None) if each is None else each for each in (scales, factors))
        self.N, self.steps = known(N), known(steps)
        self.HALVES, self.STAGES, self.ZEROS = known(HALVES), known(STAGES), known(ZEROS)

    @gluon.jit
    def load(self, stage, expert, col, step):
        """Request a step's tiles of an expert, of columns from `col` on."""
        TILES: gl.constexpr = 2 if self.HALVES else 1
        OF_SCALES: gl.constexpr = 0 if self.scales is None else self.scales.block_type.nbytes
        nbytes: gl.constexpr = TILES * (self.b.block_type.nbytes + OF_SCALES)
        loaded = self.loaded.index(stage)
        mbarrier.expect(loaded, nbytes)
        for t in gl.static_range(TILES):
            c, at = expert * self.N + col + t * (self.N // 2), stage * TILES + t
            async_load(self.b, [step * LINES, c, 0], loaded, self.codes.index(at))
            if self.scales is not None:
                first = step * self.factors.shape[2]
                async_load(self.scales, [c, first], loaded, self.factors.index(at))


@gluon.jit
def ring_of(b, scales, N, K, HALVES: gl.constexpr, STAGES: gl.constexpr, ZEROS: gl.constexpr):
    """Return an empty ring for experts of N columns."""
    TILES: gl.constexpr = 2 if HALVES else 1
    COLUMNS: gl.constexpr = b.block_type.shape[1]
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 2, 0])  # columns follow each other, four at a time
    codes = gl.allocate_shared_memory(gl.int32, [STAGES * TILES] + b.block_type.shape, b.layout)
    factors = None
    if scales is not None:
        factors = gl.allocate_shared_memory(scales.dtype, [STAGES * TILES] + scales.block_type.shape, scales.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    sums = gl.allocate_shared_memory(gl.float32, [LINES, TILES * COLUMNS, ROWS], SUMS)
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(freed.index(i), count=1)
    return Ring(b, scales, codes, factors, loaded, freed, sums, N, gl.cdiv(K, _LINE * LINES), HALVES, STAGES, ZEROS)


@gluon.jit
def item_of(number, groups):
    """Return (block, group of columns) of this program's item `number`."""
    at = gl.program_id(0) + number * gl.num_programs(0)
    return at // groups, at % groups


@gluon.jit
def load_ahead(ring, experts_of, blocks, groups):
    """Run the loader: load all tiles of this program's items in turn, each once its place is free."""
    COLUMNS: gl.constexpr = ring.b.block_type.shape[1]
    PAIRS: gl.constexpr = experts_of.shape[0]
    NUMBERS: gl.constexpr = gl.BlockedLayout([PAIRS // 32], [32], [gl.num_warps()], [0])
    numbers, experts = gl.arange(0, PAIRS, layout=NUMBERS), experts_of.load(NUMBERS)
    stage = 0
    phase = 1  # the first places are free
    for at in range(gl.program_id(0), blocks * groups, gl.num_programs(0)):
        expert = gl.max(gl.where(numbers == at // groups, experts, 0), 0)
        for step in range(ring.steps):
            mbarrier.wait(ring.freed.index(stage), phase)
            ring.load(stage, expert, at % groups * COLUMNS, step)
            last = stage == ring.STAGES - 1
            stage, phase = gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def load_rows(a, pairs, step, K, stride, TOP_K: gl.constexpr, widen: gl.constexpr):
    """Load a step's numbers of A's rows as `products_of` takes them: row pair // TOP_K, or zeros for a pair of -1.

    `a` points to numbers, or to words of four for a policy that is not `RUNS`; `stride` counts the same.
    """
    HIGH: gl.constexpr = 4 * LINES if widen.RUNS else LINES
    LOADED: gl.constexpr = rows_layout(LINES, ROWS, widen.RUNS, widen.WORDS // 8)
    limit = K if widen.RUNS else K // 4
    first = 32 * (step * HIGH + gl.arange(0, HIGH, layout=gl.SliceLayout(1, gl.SliceLayout(2, LOADED))))
    k = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, LOADED)))
    pair = as_rows(pairs, gl.SliceLayout(0, gl.SliceLayout(1, LOADED)))
    places = a + (pair // TOP_K * stride)[None, None, :] + (first[:, None, None] + k[None, :, None])
    return gl.load(places, mask=(first < limit)[:, None, None] & (pair >= 0)[None, None, :], other=0)


@gluon.jit
def multiply(
    ring, a, x, pairs, after, stage, phase, K, stride, TOP_K: gl.constexpr, widen: gl.constexpr, MMA: gl.constexpr
):  # fmt: skip
    """Multiply an item. Return a sum [lines, columns, rows] of each tile, and the state to continue from.

    `x` has A's numbers of the first step; `pairs` and `after` are those of this item and of the next one.
    """
    COLUMNS: gl.constexpr = ring.codes.shape[2]
    TILES: gl.constexpr = 2 if ring.HALVES else 1
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, MMA, widen.WORDS // 8)
    PRODUCTS: gl.constexpr = widen.PRODUCTS
    BY_GROUPS: gl.constexpr = ring.scales is not None or widen.ADDED != 0
    SUMS: gl.constexpr = 1 if BY_GROUPS else 2
    EACH: gl.constexpr = 2 if ring.ZEROS else 1
    ZERO: gl.constexpr = -1.0 / widen.ADDED if ring.ZEROS else 0.0
    accs = ()
    for _t in gl.static_range(SUMS * TILES):
        accs = accs + (gl.zeros((LINES, COLUMNS, ROWS), gl.float32, layout=MMA),)
    for i in range(ring.steps):
        last = i == ring.steps - 1
        next_pairs = ()
        for r in gl.static_range(ROWS):
            next_pairs = next_pairs + (gl.where(last, after[r], pairs[r]),)
        next_x = load_rows(a, next_pairs, gl.where(last, 0, i + 1), K, stride, TOP_K, widen)
        mbarrier.wait(ring.loaded.index(stage), phase)
        parts = products_of(x, widen, MMA)
        begins = ()
        if BY_GROUPS:
            GROUPS: gl.constexpr = 1 if ring.scales is None else ring.factors.shape[2] // (LINES * EACH)
            begins = begins_of(parts, widen, GROUPS, COLUMNS, 1, widen.ADDED != 0, MMA)
        so_far = ()
        for t in gl.static_range(TILES):
            y = widen.words(ring.codes.index(stage * TILES + t).load(WEIGHTS))
            if BY_GROUPS:
                scales = ()
                if ring.scales is not None:
                    scales = scales_of(ring.factors.index(stage * TILES + t), 0, 0, 1, GROUPS * EACH, LINES, 1, MMA)
                so_far = so_far + (add_groups(accs[t], y, parts, begins, scales, ring.scales is not None, ZERO),)
            else:  # two sums each: half as long a chain of products that wait for another
                even, odd = accs[2 * t], accs[2 * t + 1]
                for n in gl.static_range(0, PRODUCTS, 2):
                    even, odd = mma_v2(y[n], parts[n], even), mma_v2(y[n + 1], parts[n + 1], odd)
                so_far = so_far + (even, odd)
        accs = so_far
        x = next_x
        program_barrier()  # all warps have read this stage
        mbarrier.arrive(ring.freed.index(stage), count=1)
        last = stage == ring.STAGES - 1
        stage, phase = gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)
    sums = ()
    for t in gl.static_range(TILES):
        sums = sums + ((accs[t] if SUMS == 1 else accs[2 * t] + accs[2 * t + 1]),)
    return sums, x, stage, phase


@gluon.jit
def across(ring, sums, SUMS: gl.constexpr):
    """Add up each tile's sums over all lines; return them as [columns, rows], in the layout `SUMS` without lines."""
    COLUMNS: gl.constexpr = ring.codes.shape[2]
    for t in gl.static_range(len(sums)):
        ring.sums.slice(t * COLUMNS, COLUMNS, dim=1).store(sums[t])
    program_barrier()
    result = ()
    for t in gl.static_range(len(sums)):
        result = result + (gl.sum(ring.sums.slice(t * COLUMNS, COLUMNS, dim=1).load(SUMS), 0),)
    return result
