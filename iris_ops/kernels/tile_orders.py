"""The orders in which a rank computes its tiles: each order says which tile is number t, and why it is.

A program takes tiles t = its number, then as many on as there are programs. So programs side by side compute tiles
whose numbers follow each other, at about the same time.

    order                     kernels                      which tiles come first
    by_columns                few rows (Lamport)           one column of tiles: programs side by side share columns of B
    grouped, PartTiles        gathers of products          some rows of tiles, column by column: programs share A and B
    OwnedTiles                reductions                   others', then own ones: owners sum what has long arrived
    OthersFirst               reduce-scatter of two ranks  the peer's rows: they travel while own ones are multiplied
    sources_in_turn           gathers, portable            own rows, then others' as they arrive, some columns at a time
    SourceTiles               gathers by copy engines      own rows, then others' as they arrive

A wait must look at tiles that lie earlier in the peers' order, or two ranks could wait for each other. Each kernel
says why its waits do.
"""

from iris.device.function import device_function
from iris.triton_private import aggregate, base_value
import triton
import triton.language as tl

from .tiles import known


@device_function
def by_columns(t, num_m):
    """Return (row block, column block) of tile number t, column by column of num_m blocks.

    With few rows, a product mostly reads B; in this order, programs side by side read the same columns of it.
    """
    return t % num_m, t // num_m


@device_function
def grouped(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """Return (row block, column block) of a tile, in groups of about GROUP_M row blocks, each column by column.

    Programs side by side then read few rows of A and few columns of B, which they share in L2. Groups are about equally
    high: a group of one or two row blocks would read all of B for little.
    """
    group_m = tl.cdiv(num_m, tl.cdiv(num_m, GROUP_M))
    per_group = group_m * num_n
    first = (tile // per_group) * group_m
    height = tl.minimum(num_m - first, group_m)
    inside = tile % per_group
    return first + inside % height, inside // height


@aggregate
class PartTiles:
    """The positions of the num_m by num_n tiles of a matrix, or of this rank's part of one."""

    num_m: base_value
    num_n: base_value
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    GROUP_M: tl.constexpr

    @triton.constexpr_function
    def __init__(self, num_m, num_n, BLOCK_M, BLOCK_N, GROUP_M):
        self.num_m, self.num_n = known(num_m), known(num_n)
        self.BLOCK_M, self.BLOCK_N, self.GROUP_M = known(BLOCK_M), known(BLOCK_N), known(GROUP_M)

    @device_function
    def place(self, tile):
        """Return (first row, first column, True) of a tile; the True means that every rank adds the bias."""
        tile_m, tile_n = grouped(tile, self.num_m, self.num_n, self.GROUP_M)
        return tile_m * self.BLOCK_M, tile_n * self.BLOCK_N, True


@aggregate
class OwnedTiles:
    """All ranks' tiles of `A @ B`, M by N: each rank owns `part_rows` rows or, with `BY_COLS`, `part_cols` columns.

    An owner sums its own tiles with what its peers send. So a rank computes others' tiles early and its own ones late,
    when its peers' have arrived; each rank begins with the next rank's, so that no two send to the same one (`turn`).

    An owner's tiles are numbered by their place in its part; by that index others stage theirs.
    """

    rank: tl.tensor
    M: base_value
    N: base_value
    part_rows: base_value
    part_cols: base_value
    early: base_value
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    GROUP_M: tl.constexpr
    WORLD_SIZE: tl.constexpr
    BY_COLS: tl.constexpr

    @triton.constexpr_function
    def __init__(
        self, rank, M, N, part_rows, part_cols, early, BLOCK_M, BLOCK_N, GROUP_M, WORLD_SIZE, BY_COLS
    ):  # fmt: skip
        self.rank = rank
        self.M, self.N = known(M), known(N)
        self.part_rows, self.part_cols = known(part_rows), known(part_cols)
        self.early = known(early)
        self.BLOCK_M, self.BLOCK_N = known(BLOCK_M), known(BLOCK_N)
        self.GROUP_M, self.WORLD_SIZE, self.BY_COLS = known(GROUP_M), known(WORLD_SIZE), known(BY_COLS)

    @device_function
    def owned(self):
        """Return the number of tiles of each owner, counted alike though the last parts may be short."""
        return tl.cdiv(self.part_rows, self.BLOCK_M) * tl.cdiv(self.part_cols, self.BLOCK_N)

    @device_function
    def count(self):
        """Return the number of tiles of all owners."""
        return self.owned() * self.WORLD_SIZE

    @device_function
    def place(self, t):
        """Return (first row, first column, whether this rank owns it) of tile number t."""
        owner, _, _, _, row, col, _, _ = self.at(t)
        return row, col, owner == self.rank

    @device_function
    def at(self, t):
        """Return where tile number t lies: (owner, index at the owner, block row and column in the owner's part, first
        row and column, where the owner's rows and columns end).

        A tile that begins beyond the owner's last row or column is empty, because short parts have fewer tiles.
        """
        num_m = tl.cdiv(self.part_rows, self.BLOCK_M)
        num_n = tl.cdiv(self.part_cols, self.BLOCK_N)
        step, number = turn(t, num_m * num_n, self.early, tl.num_programs(0), self.WORLD_SIZE)
        owner = (self.rank + step) % self.WORLD_SIZE
        tile_m, tile_n = grouped(number, num_m, num_n, self.GROUP_M)
        if self.BY_COLS:
            row, col = tile_m * self.BLOCK_M, owner * self.part_cols + tile_n * self.BLOCK_N
            rows, cols = self.M, min(self.N, (owner + 1) * self.part_cols)
        else:
            row, col = owner * self.part_rows + tile_m * self.BLOCK_M, tile_n * self.BLOCK_N
            rows, cols = min(self.M, (owner + 1) * self.part_rows), self.N
        return owner, tile_m * num_n + tile_n, tile_m, tile_n, row, col, rows, cols


@device_function
def turn(t, owned, early, programs, WORLD_SIZE: tl.constexpr):
    """Return (how many ranks on the owner is, the number of its tile) of the tile that is computed as number `t`.

    With `early == owned`, tiles go owner by owner, the next rank first and this rank last. Otherwise `early` tiles of
    each peer come first, then groups of WORLD_SIZE tiles, one of each owner; the last `early` tiles are this rank's.
    Own tiles take longer, so their place in the group changes with each wave of `programs`.
    """
    if WORLD_SIZE == 1:
        return 0, t
    others: tl.constexpr = WORLD_SIZE - 1
    late = t - early * others
    mixed = (owned - early) * WORLD_SIZE
    group, place = late // WORLD_SIZE, late % WORLD_SIZE
    # moves on by one more than a program's place does
    own_place = group // tl.cdiv(programs, WORLD_SIZE) * (programs % WORLD_SIZE + 1) % WORLD_SIZE
    before = tl.where(late < 0, t, early * others + group * others + place - (place > own_place).to(tl.int32))
    own = tl.where(late < mixed, group, late - mixed + owned - early)
    is_own = (late >= mixed) | ((late >= 0) & (place == own_place))
    by_owner = early == owned
    step = tl.where(by_owner, (1 + t // owned) % WORLD_SIZE, tl.where(is_own, 0, 1 + before % others))
    return step, tl.where(by_owner, t % owned, tl.where(is_own, own, before // others))


@aggregate
class OthersFirst:
    """The order of num_m by num_n tiles between two ranks: those with rows of the peer's come first.

    Those travel while this rank multiplies its own, and after its last tile it has nothing to send. `group` columns of
    tiles at a time, column by column: the peer's of a group, then its `own` row blocks from number `begin` on, which
    read the same columns of B, best from L2.
    """

    num_m: base_value
    num_n: base_value
    begin: base_value
    own: base_value
    group: base_value
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr

    @triton.constexpr_function
    def __init__(self, num_m, num_n, begin, own, group, BLOCK_M, BLOCK_N):
        self.num_m, self.num_n = known(num_m), known(num_n)
        self.begin, self.own, self.group = map(known, (begin, own, group))
        self.BLOCK_M, self.BLOCK_N = known(BLOCK_M), known(BLOCK_N)

    @device_function
    def place(self, t):
        """Return (first row, first column, True) of tile number t."""
        before = t // (self.num_m * self.group) * self.group
        t -= before * self.num_m
        others = self.num_m - self.own
        sent = others * tl.minimum(self.group, self.num_n - before)
        is_own = t >= sent
        high = tl.maximum(tl.where(is_own, self.own, others), 1)
        t -= tl.where(is_own, sent, 0)
        row = t % high
        row += tl.where(is_own, self.begin, tl.where(row < self.begin, 0, self.own))
        return row * self.BLOCK_M, (before + t // high) * self.BLOCK_N, True


@device_function
def own_blocks(first, rows, M, BLOCK_M: tl.constexpr):
    """Return (number of the first row block, how many) of the blocks that have only the `rows` rows from `first` on."""
    begin, end = tl.cdiv(first, BLOCK_M), first + rows
    after_last = tl.where(end == M, tl.cdiv(M, BLOCK_M), end // BLOCK_M)
    return begin, tl.maximum(after_last - begin, 0)


@device_function
def sources_in_turn(
    t, rank, num_m, num_n, columns, sources, GROUP_M: tl.constexpr, WORLD_SIZE: tl.constexpr
):  # fmt: skip
    """Return (owner of the rows, row block in them, column block) of tile number t, of `sources` ranks' num_m by num_n
    tiles.

    This rank's rows come first, because they are local; then those of the rank before it and so on, in the order in
    which they are pushed here. All ranks' rows are multiplied by some `columns` of tiles, then by the next. If a rank
    has few rows, a wave of programs thus reads these columns of B once for all ranks.
    """
    group = t // (num_m * columns * sources)
    width = min(columns, num_n - group * columns)
    inside = t - group * num_m * columns * sources
    per_part = num_m * width
    tile_m, tile_n = grouped(inside % per_part, num_m, width, GROUP_M)
    part = (rank + WORLD_SIZE - inside // per_part) % WORLD_SIZE
    return part, tile_m, group * columns + tile_n


@aggregate
class SourceTiles:
    """The tiles of all ranks' rows, `part_rows` each, num_m by num_n of them a rank.

    This rank's come first, which are there; then the next rank's and so on, as copy engines bring them.
    """

    rank: base_value
    part_rows: base_value
    num_m: base_value
    num_n: base_value
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    GROUP_M: tl.constexpr
    WORLD_SIZE: tl.constexpr

    @triton.constexpr_function
    def __init__(self, rank, part_rows, num_m, num_n, BLOCK_M, BLOCK_N, GROUP_M, WORLD_SIZE):
        self.rank, self.part_rows, self.num_m, self.num_n = rank, known(part_rows), known(num_m), known(num_n)
        self.BLOCK_M, self.BLOCK_N, self.GROUP_M = known(BLOCK_M), known(BLOCK_N), known(GROUP_M)
        self.WORLD_SIZE = known(WORLD_SIZE)

    @device_function
    def count(self):
        return self.WORLD_SIZE * self.num_m * self.num_n

    @device_function
    def place(self, tile):
        """Return (first row, first column, True) of a tile; the True means that every rank adds the bias."""
        each = self.num_m * self.num_n
        source = (self.rank + tile // each) % self.WORLD_SIZE
        tile_m, tile_n = grouped(tile % each, self.num_m, self.num_n, self.GROUP_M)
        return source * self.part_rows + tile_m * self.BLOCK_M, tile_n * self.BLOCK_N, True
