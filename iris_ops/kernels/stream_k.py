"""Units of work of warp-specialised programs: whole tiles, and before them the tiles that programs share.

Tiles that do not fill a round of programs would leave most of them idle for a tile's time. So `shared` of them are
computed first, by `sharers` programs, one after the other along K: program p takes the steps from `begin(p)` on, each a
little more than the one before, so that programs end, and push their last tiles, in turn. Where a program's steps cross
into the next tile, it first computes its *head* there and leaves it in memory; then the *body*. Who computes a tile's
last steps adds what others have left of it. Heads come first and wait for nobody, so it is right with any number of
programs. (Stream-K: Osama et al., 2023.)
"""

from iris.device.function import device_function
from iris.triton_private import aggregate, base_value
import triton
import triton.language as tl

from .tiles import known


@aggregate
class Units:
    """Of `tiles` tiles of `steps` steps along K; numbers 0 to P - 1 are heads, P to 2 P - 1 bodies of P programs.

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
        """Units of `programs` programs together."""
        if self.SHARED:
            return self.tiles - self.shared + 2 * programs
        else:
            return self.tiles

    @device_function
    def begin(self, p):
        """The first of all the shared tiles' steps that program p takes; of program `sharers`, their number."""
        p = tl.minimum(p, self.sharers)
        return (2 * p * self.shared * self.steps - self.skew * p * (self.sharers - p)) // (2 * self.sharers)

    @device_function
    def at(self, unit, programs):
        """(tile, first step, number of steps, whether with them the tile is complete) of a unit."""
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
