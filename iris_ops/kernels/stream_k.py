"""Units of work along K, for tiles that do not fill a wave of programs (stream-K: Osama et al., 2023).

The last tiles of a product may be fewer than the programs, and most programs would wait a tile's time for them. So
programs share those tiles. Each takes some steps of a tile along K, leaves its sum in memory and signals it. The
program that takes a tile's last steps adds up what the others have left. What it waits for stands earlier in the order
of units, and its maker waits for nobody. So it is right with any number of programs.

    unit_tile, join_parts   portable kernels, whose programs take units from a common count: after whole tiles, each
                            shared tile is split in SPLITS equal parts
    Units                   warp-specialised kernels, whose programs know their units beforehand: shared tiles come
                            first, and programs take unequal numbers of steps, so that they end in turn
"""

from iris.device.function import device_function
from iris.device.sync import signal, wait
from iris.triton_private import aggregate, base_value
import triton
import triton.language as tl

from .tiles import known, packed_rows


@device_function
def unit_tile(unit, rounded, K, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr):
    """Return (tile, first, depth) of a unit: its tile, and where its part of K begins and how long it is.

    Units are the first `rounded` tiles, which fill waves, then SPLITS parts of each of the others.
    """
    if SPLITS == 1:
        return unit, 0, K
    else:
        beyond = tl.maximum(unit - rounded, 0)
        step = tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K
        first = tl.minimum(beyond % SPLITS * step, K)
        depth = tl.where(unit < rounded, K, tl.minimum(step, K - first))
        return tl.where(unit < rounded, unit, rounded + beyond // SPLITS), first, depth


@device_function
def join_parts(ctx, acc, parts, arrived, unit, rounded, epoch, SPLITS: tl.constexpr, waiter: tl.constexpr):
    """Return (the whole tile's product, whether this unit computed it last, whether no wait failed).

    `parts` is fp32 [tile beyond `rounded`, SPLITS - 1, rows, columns]; `arrived` has a flag for each. Both are this
    rank's own.
    """
    whole = True
    ok = True
    if SPLITS > 1:
        if unit >= rounded:
            tile, part = (unit - rounded) // SPLITS, (unit - rounded) % SPLITS
            rows = tl.arange(0, acc.shape[0])
            if part < SPLITS - 1:
                whole = False
                number = tile * (SPLITS - 1) + part
                tl.store(packed_rows(parts, number, rows, acc.shape[0], acc.shape[1]), acc)
                signal(ctx, arrived + number, epoch, ctx.rank)
            else:
                for i in range(SPLITS - 1):
                    number = tile * (SPLITS - 1) + i
                    ok = wait(ctx, arrived + number, epoch, ctx.rank, waiter, exact=True) and ok
                    place = packed_rows(parts, number, rows, acc.shape[0], acc.shape[1])
                    acc += tl.load(place, cache_modifier=".cg")
    return acc, whole, ok


@aggregate
class Units:
    """Units of `tiles` tiles of `steps` steps along K; numbers 0 to P - 1 are heads, P to 2 P - 1 bodies of P programs.

    The first `shared` tiles are computed first, by `sharers` programs, one after the other along K: program p takes the
    steps from `begin(p)` on, each a little more than the one before, so that programs end, and push their last tiles,
    in turn. Where a program's steps cross into the next tile, it first computes its *head* there and leaves it in
    memory; then the *body*. Heads come first and wait for nobody.

    `skew`: how many steps more the last of `sharers` takes than the first; none takes more than a tile's.
    """

    tiles: base_value
    steps: base_value
    shared: base_value
    sharers: base_value
    skew: base_value
    SHARED: tl.constexpr

    @triton.constexpr_function
    def __init__(self, tiles, steps, shared, sharers, skew, SHARED):
        self.tiles, self.steps = known(tiles), known(steps)
        self.shared, self.sharers, self.skew = known(shared), known(sharers), known(skew)
        self.SHARED = known(SHARED)

    @device_function
    def count(self, programs):
        """Return the number of units of `programs` programs together."""
        if self.SHARED:
            return self.tiles - self.shared + 2 * programs
        else:
            return self.tiles

    @device_function
    def begin(self, p):
        """Return the first step of the shared tiles that program p takes; for program `sharers`, the number of
        steps."""
        p = tl.minimum(p, self.sharers)
        return (2 * p * self.shared * self.steps - self.skew * p * (self.sharers - p)) // (2 * self.sharers)

    @device_function
    def at(self, unit, programs):
        """Return (tile, first step, number of steps, whether they complete the tile) of a unit."""
        if not self.SHARED:
            return unit, 0, self.steps, True
        else:
            p = unit % programs
            begin, end = self.begin(p), self.begin(p + 1)
            tile = begin // self.steps
            border = (tile + 1) * self.steps
            is_head, is_whole = unit < programs, unit >= 2 * programs
            body = tl.minimum(end, border) - begin
            steps = tl.where(is_whole, self.steps, tl.where(is_head, end - begin - body, body))
            complete = is_whole | ((unit >= programs) & (body > 0) & (end >= border))
            first = tl.where(is_head | is_whole, 0, begin - tile * self.steps)
            tile = tl.where(is_whole, self.shared + unit - 2 * programs, tile + is_head.to(tl.int32))
            return tile, first, steps, complete
