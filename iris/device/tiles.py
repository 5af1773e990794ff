"""Collectives on tiles, inside a user's kernel: ranks exchange blocks of values.

    @triton.jit
    def kernel(ctx_ptr, space, ..., RANK: tl.constexpr, WORLD: tl.constexpr):
        ctx = iris.DeviceContext.initialize(ctx_ptr, RANK, WORLD)
        tiles = iris.tiles.open_tiles(ctx, space)
        for number in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
            total = tiles.all_reduce(tile, number)  # fp32 [M, N], the same bits on every rank
        tiles.close()

`reduce_scatter`, `all_gather` and `all_to_all` can replace `all_reduce`, or alternate with it. `send` and `sum` are the
two halves of the reductions: a program that computes its next tile between them does not wait for a tile that is still
on its way. `space` comes from `ctx.ccl.tile_space(tiles, elements, dtype)`: memory for `tiles` tiles of `elements`
elements. A tile's `number` selects the part of it that the tile uses, the same on all ranks. In one call of a kernel,
each rank uses the same numbers, each once and at least one, in the same functions, by the same programs in the same
order. Every program of the grid opens and closes. As for every kernel that waits, the grid has at most as many programs
as the GPU has multiprocessors.

In Gluon the functions are the same. Blocks bring their layouts and have no fewer elements than a program has threads;
`ctx` is an `iris.DeviceContext`, for the number of ranks must be known when the kernel is compiled.

How: values travel as Lamport values (`lamport.py`), so a tile takes one hop, without flag or fence, and a receiver
restores its memory. This module hides the protocol around them. The epoch lies in the space, `close`
advances it, and its parity chooses between two halves; so calls need no reset and can be replayed. Waits are bounded:
past the time-out the sum is meaningless, and the next call on the host raises `PeerLostError`.

No wait is circular: a program sends a tile before it waits for the same tile of its peers, which they send before they
wait for it; and all earlier work, `send` and `sum` too, came in the same order on every rank. Two halves are enough: a
rank that sends in call e + 2 has ended e + 1, for which it took values from every peer, or in two shots a sum of all
ranks' values. Each peer had then ended call e and taken all values of it. For this proof a rank takes a few elements
even of tiles whose sum belongs to another rank.
"""

import triton
from triton.experimental.gluon import language as gl
import triton.language as tl

from ..errors import ShapeError
from ..triton_private import aggregate, base_value
from . import arch
from .context import DeviceContext
from .function import device_function
from .lamport import load_bases, look, put, settled, take, unwrapped, without_sentinel
from .sync import advance, epoch_after
from .waits import WAITERS

# int32 words before the values: [epoch, programs that finished, bytes of a half / 256, 0 ...].
SPACE_HEADER = tl.constexpr(64)
_WAITER = tl.constexpr(WAITERS.index("a kernel"))


@aggregate
class Tiles:
    """Send and sum the tiles of one call, as one program sees them. Make it with `open_tiles`.

    Its fields were loaded there, and nothing reads them before a tile is sent or taken (`_here`). So a program does not
    wait for these loads before its product.
    """

    ctx: DeviceContext
    bases: tl.tuple
    space: base_value
    last: base_value  # the previous call's epoch
    size: base_value  # of a half of the space, in 256 bytes

    @triton.constexpr_function
    def __init__(self, ctx, bases, space, last, size):
        self.ctx, self.bases, self.space = ctx, tl.tuple(bases), space
        self.last, self.size = last, size

    @device_function
    def _here(self):
        """Return the same, for the compiler to use from here on."""
        rank, last, size = settled((self.ctx.rank, self.last, self.size))
        ctx = DeviceContext(rank, self.ctx.world_size, self.ctx.ctx_ptr, self.ctx.tracing)
        return Tiles(ctx, settled(self.bases), self.space, last, size)

    @device_function
    def all_reduce(self, tile, number, dtype: tl.constexpr = None, two_shot: tl.constexpr = False, mask=None):
        """Return the sum over ranks of `tile`, fp32, in rank order: the same bits on every rank and in each run.

        Args:
            tile: a block of one or two dimensions, floating point, of the same shape on every rank.
            number: the tile's number, an integer below the space's `tiles`.
            dtype: the dtype in which the tile travels, equal to the space's. Default: the tile's.
            two_shot: each rank sums a part of the tile, rounds the sum and sends it to the others. This needs two hops,
                and each link carries 2 (w - 1) / w of the tile instead of w - 1. Use it for large tiles on many ranks.
            mask: the elements, or the rows [M, 1], that one-shot sends and sums. It is the same on every rank and has
                at least one element of each tile. The sums of other elements are undefined.
        """
        here = self._here()
        kind: tl.constexpr = tile.dtype if dtype is None else dtype
        values = without_sentinel(tile.to(tl.float32), kind)
        if two_shot and here.ctx.world_size > 1:
            return here._in_two_shots(values, number, kind)
        else:
            there = _there(values, mask)
            return here._sum(values, number, there, there, kind)

    @device_function
    def reduce_scatter(self, tile, number, owner, dtype: tl.constexpr = None):
        """Return, on rank `owner`, the sum over ranks of `tile`, as `all_reduce` gives it; undefined elsewhere.

        Every rank calls it for every number, with the same `owner`. The tile travels to its owner. Other ranks wait for
        16 elements of every peer, so that no rank can be one call ahead of another.

        Args:
            tile: as in `all_reduce`.
            number: the tile's number, an integer below the space's `tiles`.
            owner: the rank that gets the sum, an integer from 0 to w - 1, such as `number % w`.
            dtype: as in `all_reduce`.
        """
        here = self._here()
        kind: tl.constexpr = tile.dtype if dtype is None else dtype
        values = without_sentinel(tile.to(tl.float32), kind)
        few = lanes(tile) < 16  # a whole vector of each thread, or accesses would be of single elements
        return here._sum(values, number, few | (here.ctx.rank == owner), few, kind, owner)

    @device_function
    def send(self, tile, number, dtype: tl.constexpr = None, owner=None, kept: tl.constexpr = False, mask=None):
        """Send `tile` without waiting, as the first half of `all_reduce` or, with an `owner`, of `reduce_scatter`.

        A call of `sum` with the same `number`, `owner`, `kept` and `mask` must follow in the same call of the kernel.

        Args:
            tile: as in `all_reduce`.
            number: the tile's number, an integer below the space's `tiles`.
            dtype: as in `all_reduce`.
            owner: None, or the rank that gets the sum.
            kept: whether the caller keeps the tile in registers; otherwise it is also stored in this rank's memory.
            mask: as in `all_reduce`.
        """
        here = self._here()
        kind: tl.constexpr = tile.dtype if dtype is None else dtype
        values = without_sentinel(tile.to(tl.float32), kind)
        there, few = _there(values, mask), lanes(tile) < 16
        first, step = here._blocks(values, number)
        place = first + here.ctx.rank * step + lanes(tile)
        for i in tl.static_range(1, here.ctx.world_size if kept else here.ctx.world_size + 1):
            to = (here.ctx.rank + i) % here.ctx.world_size
            put(here.ctx, place, values, there if owner is None else few | (there & (to == owner)), here.bases, to)

    @device_function
    def look(self, number, like, dtype: tl.constexpr = None, kept: tl.constexpr = False, mask=None):
        """Return the values that have arrived of the tiles that `sum` adds, without waiting; its argument `found`.

        If the program does other work in between, such as sending its next tile, `sum` does not wait for these loads.
        It loads missing values again.

        Args:
            number: the tile's number, an integer below the space's `tiles`.
            like: a block of the tile's shape, whose values are not used.
            dtype, kept, mask: as in `sum`.
        """
        here = self._here()
        kind: tl.constexpr = like.dtype if dtype is None else dtype
        values = without_sentinel(like.to(tl.float32), kind)
        first, step = here._blocks(values, number)
        own = unwrapped(values, kind) if kept else None
        return look(here.ctx, first + lanes(like), step, _there(values, mask), here.ctx.world_size, own)

    @device_function
    def sum(self, number, like, dtype: tl.constexpr = None, owner=None, part: tl.constexpr = 0,
            parts: tl.constexpr = 1, kept: tl.constexpr = False, mask=None, found=None):  # fmt: skip
        """Wait for all ranks' tiles `number` and return their sum, fp32: the second half of `all_reduce`.

        Args:
            number: the tile's number, an integer below the space's `tiles`.
            like: a block of the tile's shape and, in Gluon, layout. With `kept` it is this rank's tile; otherwise its
                values are not used.
            dtype: as in `send`, by default that of `like`.
            owner, kept, mask: as in `send`.
            part: which of the `parts` the result is; each part is requested once.
            parts: into how many equal parts the tile's rows are split, which takes fewer registers. `like` and `mask`
                then have the shape of a part.
            found: the result of `look` for this tile, without `owner` and `parts`.
        """
        here = self._here()
        kind: tl.constexpr = like.dtype if dtype is None else dtype
        values = without_sentinel(like.to(tl.float32), kind)
        lane = lanes(like)
        # elements that every rank sends to all ranks lie in the first part
        there, few = _there(values, mask), lane < (16 if part == 0 else 0)
        taken = there if owner is None else few | (there & (here.ctx.rank == owner))
        first, step = here._blocks(values, number * parts + part)
        in_triton: tl.constexpr = arch.layout_of(like.type) is None
        own = unwrapped(values, kind) if kept else None
        total, _ = here._take(first + lane, step, taken, 0, kind, here.ctx.world_size, in_triton, own, found=found)
        return total

    @device_function
    def all_gather(self, tile, number, pointers, stride, mask=None, dtype: tl.constexpr = None):
        """Store every rank's `tile`, rounded to `dtype`, at `pointers + rank * stride` of this rank's own memory.

        Args:
            tile: as in `all_reduce`.
            number: the tile's number, an integer below the space's `tiles`.
            pointers: a block of the tile's shape, into any memory.
            stride: an integer, in elements.
            mask: which elements are stored.
            dtype: as in `all_reduce`.
        """
        here = self._here()
        kind: tl.constexpr = tile.dtype if dtype is None else dtype
        values = without_sentinel(tile.to(tl.float32), kind)
        first, step = here._blocks(values, number)
        place = first + here.ctx.rank * step + lanes(tile)
        for i in tl.static_range(1, here.ctx.world_size):
            put(here.ctx, place, values, lanes(tile) >= 0, here.bases, (here.ctx.rank + i) % here.ctx.world_size)
        here._store(values, first, step, pointers, stride, mask, kind)

    @device_function
    def all_to_all(self, source, source_stride, number, pointers, stride, mask=None, dtype: tl.constexpr = None):
        """Send every rank the tile at `source + rank * source_stride`; store theirs at `pointers + rank * stride`.

        Args:
            source: a block of pointers of one or two dimensions, into any memory of this rank.
            source_stride: an integer, in elements.
            number: the tile's number, an integer below the space's `tiles`.
            pointers: a block of pointers of the same shape; the memory must not overlap that of `source`.
            stride: an integer, in elements.
            mask: which elements are loaded and stored, the same on every rank.
            dtype: the floating-point dtype in which values travel, by default the source's.
        """
        here = self._here()
        kind: tl.constexpr = source.dtype.element_ty if dtype is None else dtype
        own = here._tile_for(here.ctx.rank, source, source_stride, mask, kind)
        first, step = here._blocks(own, number)
        place = first + here.ctx.rank * step + lanes(own)
        for i in tl.static_range(1, here.ctx.world_size):
            to = (here.ctx.rank + i) % here.ctx.world_size
            values = here._tile_for(to, source, source_stride, mask, kind)
            put(here.ctx, place, values, lanes(own) >= 0, here.bases, to)
        here._store(own, first, step, pointers, stride, mask, kind)

    @device_function
    def close(self):
        """End the call. Every program of the grid calls this after it has sent its last tile; `sum` may follow."""
        advance(self.space, epoch_after(self.last))

    @device_function
    def _blocks(self, values, number):
        """Return (the pointer to the tile `number` of rank 0, the distance from one rank's to the next)."""
        size: tl.constexpr = values.numel
        nbytes: tl.constexpr = values.dtype.primitive_bitwidth // 8
        half_bytes = tl.multiple_of(self.size.to(tl.int64) * 256, 256)
        half = self.space + SPACE_HEADER + (epoch_after(self.last) & 1).to(tl.int64) * (half_bytes // 4)
        step = tl.multiple_of(half_bytes // (nbytes * self.ctx.world_size), 16)
        first = half.to(tl.pointer_type(values.dtype), bitcast=True)
        return first + tl.cast(number, tl.int64) * size, step

    @device_function
    def _take(self, first, step, mask, source, kind: tl.constexpr, COUNT: tl.constexpr, LANES: tl.constexpr, own=None,
              patience: tl.constexpr = 1, found=None):  # fmt: skip
        """Take values by `lamport.take`; from now on, the stream's next kernel may start if launched as dependent."""
        arch.lead()
        epoch = epoch_after(self.last)
        return take(self.ctx, first, step, mask, source, epoch, _WAITER, kind, COUNT, own, patience, LANES, found)

    @device_function
    def _sum(self, values, number, taken, sent, kind: tl.constexpr, owner=None):
        """Return the sum of elements `taken` of all ranks' tiles; `sent` go to each peer, all of them to `owner`."""
        lane = lanes(values)
        first, step = self._blocks(values, number)
        place = first + self.ctx.rank * step + lane
        for i in tl.static_range(1, self.ctx.world_size):
            to = (self.ctx.rank + i) % self.ctx.world_size
            put(self.ctx, place, values, sent if owner is None else sent | (to == owner), self.bases, to)
        in_triton: tl.constexpr = arch.layout_of(values.type) is None
        own = unwrapped(values, kind)
        total, _ = self._take(first + lane, step, taken, 0, kind, self.ctx.world_size, in_triton, own)
        return total

    @device_function
    def _in_two_shots(self, values, number, kind: tl.constexpr):
        """Sum elements r * part to (r + 1) * part on rank r. In its slot at a peer, terms come first, then the sum."""
        part: tl.constexpr = part_size(values.numel, self.ctx.world_size)
        in_triton: tl.constexpr = arch.layout_of(values.type) is None
        lane = lanes(values)
        first, step = self._blocks(values, number)
        place = first + self.ctx.rank * step
        for i in tl.static_range(1, self.ctx.world_size + 1):  # to itself, too: elements change threads in memory
            owner = (self.ctx.rank + i) % self.ctx.world_size
            put(self.ctx, place + lane - owner * part, values, lane // part == owner, self.bases, owner)
        flat = tl.arange(0, triton.next_power_of_2(part)) if in_triton else lane
        mine = (flat < part) & (self.ctx.rank * part + flat < values.numel)
        total, came = self._take(first + flat, step, mine, 0, kind, self.ctx.world_size, in_triton)
        summed = without_sentinel(total, kind)
        for i in tl.static_range(1, self.ctx.world_size + 1):
            to = (self.ctx.rank + i) % self.ctx.world_size
            put(self.ctx, place + part + flat, summed, mine & came, self.bases, to)
        owner = lane // part
        place = first + owner * step + part + lane % part
        return self._take(place, 0, lane >= 0, owner, kind, 1, in_triton, patience=2)[0]

    @device_function
    def _tile_for(self, to, source, stride, mask, kind: tl.constexpr):
        """Return this rank's tile for the rank `to`, as it travels."""
        pointers = source + tl.cast(to, tl.int64) * stride
        if mask is None:
            return without_sentinel(tl.load(pointers).to(tl.float32), kind)
        else:
            return without_sentinel(tl.load(pointers, mask=mask, other=0.0).to(tl.float32), kind)

    @device_function
    def _store(self, values, first, step, pointers, stride, mask, kind: tl.constexpr):
        """Store `values`, this rank's own, and those that every peer sends, each in its place."""
        in_triton: tl.constexpr = arch.layout_of(values.type) is None
        lane = lanes(values)
        own = arch.round_to(unwrapped(values, kind), kind)
        tl.store(pointers + tl.cast(self.ctx.rank, tl.int64) * stride, own, mask=mask)
        for i in tl.static_range(1, self.ctx.world_size):
            peer = (self.ctx.rank + i) % self.ctx.world_size
            theirs, _ = self._take(first + peer * step + lane, 0, lane >= 0, peer, kind, 1, in_triton)
            tl.store(pointers + tl.cast(peer, tl.int64) * stride, arch.round_to(theirs, kind), mask=mask)


@device_function
def open_tiles(ctx, space):
    """Begin a call.

    If a kernel begins with this call, the host may launch it with `**iris.platform.pdl_options(ctx.device)`. A Hopper
    GPU then launches it while the previous kernel still runs, and this call waits for the end of that kernel.

    Args:
        ctx: the device context.
        space: int32, from `ctx.ccl.tile_space`.

    Returns:
        The `Tiles` of this program.
    """
    arch.follow()
    return Tiles(ctx, load_bases(ctx.ctx_ptr, ctx.world_size), space, tl.load(space), tl.load(space + 2))


@device_function
def _there(values, mask):
    """Return the given mask of a block, or one of all elements."""
    if mask is None:
        return lanes(values) >= 0
    else:
        return mask


@device_function
def lanes(tile):
    """Return the number of each element of a tile, in row-major order; in Gluon, with the tile's layout."""
    layout: tl.constexpr = arch.layout_of(tile.type)
    if layout is None:
        if len(tile.shape) == 2:
            rows, cols = tl.arange(0, tile.shape[0]), tl.arange(0, tile.shape[1])
            return rows[:, None] * tile.shape[1] + cols[None, :]
        else:
            return tl.arange(0, tile.shape[0])
    elif len(tile.shape) == 2:
        rows = gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, layout))
        cols = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, layout))
        return rows[:, None] * tile.shape[1] + cols[None, :]
    else:
        return gl.arange(0, tile.shape[0], layout=layout)


@triton.constexpr_function
def part_size(size, world_size):
    """Return how many of a tile's elements a rank sums: terms and sum share a slot of `size` elements."""
    part = -(-size // world_size)
    part = -(-part // 16) * 16 if part > 16 else part  # whole vectors
    if 2 * part > size:
        raise ShapeError(f"all_reduce: tile has {size} elements; expected 2 or more with two_shot=True")
    return part
