"""Collectives on tiles, inside a kernel of one's own: a block of values goes to all ranks, and theirs come back.

    @triton.jit
    def kernel(ctx_ptr, space, ..., RANK: tl.constexpr, WORLD: tl.constexpr):
        ctx = iris.DeviceContext.initialize(ctx_ptr, RANK, WORLD)
        tiles = iris.tiles.open_tiles(ctx, space)
        for number in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
            total = tiles.all_reduce(tile, number)  # fp32 [M, N], the same bits on every rank
        tiles.close()

`space` comes from `ctx.ccl.tile_space(tiles, elements, dtype)`: memory for so many tiles of so many elements. A tile's
`number` says which part of it a tile uses, the same on all ranks. In one call of a kernel, each rank uses the same
numbers, each once and at least one, by the same programs in the same order. All programs of the grid open and close,
and the grid is at most as large as the chip, as of every kernel that waits.

How: values travel as Lamport values (`lamport.py`), so a tile takes one hop, without flag or fence, and a receiver
leaves its memory as it was. What is hidden here is the protocol around them. The epoch stands in the space, `close`
advances it, and its parity chooses between two halves; so calls need no reset and can be replayed. Waits are bounded:
past the time-out the sum means nothing, and the next call on the host raises `PeerLostError`.

No wait is circular: a program sends a tile before it waits for the same tile of its peers, which they send before they
wait for it; and what they did before, they did in the same order. Two halves are enough, for a rank that sends in call
e + 2 has ended e + 1, for which it took a tile from every peer. Each had then ended call e, with all it took.
"""

import triton
import triton.language as tl

from ..triton_private import aggregate, base_value
from . import arch
from .context import DeviceContext
from .function import device_function
from .lamport import load_bases, put, take, unwrapped, without_sentinel
from .sync import advance, next_epoch
from .waits import WAITERS

# int32 words before the values: [epoch, programs that finished, bytes of a half / 256, 0 ...].
HEADER = tl.constexpr(64)
_WAITER = tl.constexpr(WAITERS.index("a kernel"))


@aggregate
class Tiles:
    """The tiles of one call, as one program sees them. Make it with `open_tiles`."""

    ctx: DeviceContext
    bases: tl.tuple
    space: base_value
    half: base_value
    half_bytes: base_value
    epoch: base_value

    @triton.constexpr_function
    def __init__(self, ctx, bases, space, half, half_bytes, epoch):
        self.ctx, self.bases, self.space = ctx, tl.tuple(bases), space
        self.half, self.half_bytes, self.epoch = half, half_bytes, epoch

    @device_function
    def all_reduce(self, tile, number, dtype: tl.constexpr = None):
        """The sum over ranks of `tile`, fp32, in rank order: the same bits on every rank and in each run.

        `tile`: a block of one or two dimensions, floating point. `dtype`: what it is rounded to before it travels, by
        default its own dtype; the space is one of that dtype.
        """
        kind: tl.constexpr = tile.dtype if dtype is None else dtype
        values = without_sentinel(tile.to(tl.float32), kind)
        lane = _lanes(tile)
        first, step = self._blocks(values, number)
        self._send(values, first + self.ctx.rank * step + lane, lane >= 0)
        own = unwrapped(values, kind)
        total, _ = take(self.ctx, first + lane, step, lane >= 0, 0, self.epoch, _WAITER, kind, self.ctx.world_size, own)
        return total

    @device_function
    def all_gather(self, tile, number, pointers, stride, mask=None, dtype: tl.constexpr = None):
        """Every rank's `tile`, rounded to `dtype`, at `pointers + rank * stride` of this rank's own memory."""
        kind: tl.constexpr = tile.dtype if dtype is None else dtype
        values = without_sentinel(tile.to(tl.float32), kind)
        lane = _lanes(tile)
        first, step = self._blocks(values, number)
        self._send(values, first + self.ctx.rank * step + lane, lane >= 0)
        own = arch.round_to(unwrapped(values, kind), kind)
        tl.store(pointers + tl.cast(self.ctx.rank, tl.int64) * stride, own, mask=mask)
        for i in tl.static_range(1, self.ctx.world_size):
            source = (self.ctx.rank + i) % self.ctx.world_size
            theirs, _ = take(self.ctx, first + source * step + lane, 0, lane >= 0, source, self.epoch, _WAITER, kind, 1)
            tl.store(pointers + tl.cast(source, tl.int64) * stride, arch.round_to(theirs, kind), mask=mask)

    @device_function
    def close(self):
        """Ends the call; every program of the grid does so, behind its last tile."""
        advance(self.space, self.epoch)

    @device_function
    def _blocks(self, values, number):
        """(where the tile `number` of rank 0 stands, how far it is from one rank's to the next)."""
        size: tl.constexpr = values.numel
        nbytes: tl.constexpr = values.dtype.primitive_bitwidth // 8
        step = tl.multiple_of(self.half_bytes // (nbytes * self.ctx.world_size), 16)
        first = self.half.to(tl.pointer_type(values.dtype), bitcast=True)
        return first + tl.cast(number, tl.int64) * size, step

    @device_function
    def _send(self, values, place, mask):
        for i in tl.static_range(1, self.ctx.world_size):
            put(self.ctx, place, values, mask, self.bases, (self.ctx.rank + i) % self.ctx.world_size)


@device_function
def open_tiles(ctx, space):
    """Begins a call. `space`: int32, from `ctx.ccl.tile_space`."""
    epoch = next_epoch(space)
    half_bytes = tl.multiple_of(tl.load(space + 2).to(tl.int64) * 256, 256)
    half = space + HEADER + tl.cast(epoch & 1, tl.int64) * (half_bytes // 4)
    return Tiles(ctx, load_bases(ctx.ctx_ptr, ctx.world_size), space, half, half_bytes, epoch)


@device_function
def _lanes(tile):
    """The number of each element of a tile, in row-major order."""
    if len(tile.shape) == 2:
        rows, cols = tl.arange(0, tile.shape[0]), tl.arange(0, tile.shape[1])
        return rows[:, None] * tile.shape[1] + cols[None, :]
    else:
        return tl.arange(0, tile.shape[0])
