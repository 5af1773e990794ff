"""The tiles of a reduction: who sums which, where they stand, and in which order a rank computes them."""

from iris.device.function import device_function
from iris.triton_private import aggregate, base_value
import triton
import triton.language as tl

from .tiles import grouped, known


@aggregate
class OwnedTiles:
    """All ranks' tiles of `A @ B`, M by N: each rank owns `part_rows` rows or, with `BY_COLS`, `part_cols` columns.

    An owner's tiles are numbered by their place in its part; that number is the slot in which others stage theirs.
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
        """Tiles of each owner, counted alike though the last parts may be short."""
        return tl.cdiv(self.part_rows, self.BLOCK_M) * tl.cdiv(self.part_cols, self.BLOCK_N)

    @device_function
    def count(self):
        """Tiles of all owners."""
        return self.owned() * self.WORLD_SIZE

    @device_function
    def place(self, t):
        """(first row, first column, whether this rank owns it) of number t."""
        owner, _, _, _, row, col, _, _ = self.at(t)
        return row, col, owner == self.rank

    @device_function
    def at(self, t):
        """(owner, slot, block row and column in the owner's part, first row and column, where owner's end) of number t.

        A tile whose first row or column lies beyond the owner's is none: short parts have fewer.
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
    """(how many ranks on the owner is, the number of its tile) of the tile that is computed as number `t`.

    With `early == owned` owner by owner, the next rank first and the own one last. Else tile by tile: `early` tiles of
    each other owner, then in each group of WORLD_SIZE tiles one of each owner; the last `early` are own ones. Own tiles
    take longer, so from round to round of `programs` another place in the group is the own one's.
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
    """The order of num_m by num_n tiles: `group` columns of them after the other; in each, column by column, first
    those with rows of the peer's, then the `own` row blocks from number `begin` on.
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
        """(first row, first column, True) of number t."""
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
    """(number of the first row block, how many) of those that have nothing but the `rows` rows from `first` on."""
    begin, end = tl.cdiv(first, BLOCK_M), first + rows
    behind = tl.where(end == M, tl.cdiv(M, BLOCK_M), end // BLOCK_M)
    return begin, tl.maximum(behind - begin, 0)
