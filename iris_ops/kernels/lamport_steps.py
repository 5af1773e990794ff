"""Steps of kernels whose ranks exchange Lamport values: where values lie, and how ranks send and receive them.

A Lamport value shows by itself whether it has arrived (`iris/device/lamport.py`). Every rank has two buffers for them,
and the parity of the epoch says which one a call uses. All ranks lay a buffer out alike:

    [source rank, part_rows, ld]   what each rank has sent
    [M, ld]                        all-reduces in two shots: the sums that owners send
    [source rank]                  scatters and gathers: a value from each peer

A rank sends by storing into its own block of a peer's buffer. It takes by polling a peer's block of its own buffer,
where it leaves the sentinel behind. No step here waits for anything but values, so a kernel that sends all of its own
before it takes any cannot wait in a circle.

    send_tile, send_to_owners     a tile goes to every rank, or each of its rows or columns to its owner
    sum_all, take_sums            a rank sums what all ranks have sent, or takes sums that owners have sent
    take_parts                    a rank puts what peers have sent into its place in a gathered matrix
    tell_peers, wait_for_peers   each rank learns that its peers have begun this call
"""

from iris.device import arch
from iris.device.context import DeviceContext
from iris.device.function import device_function
from iris.device.lamport import put, take
from iris.triton_private import aggregate, base_value
import triton
import triton.language as tl

from .tiles import known


@device_function
def part_at(whole, part, rank):
    """Return how much of `whole` belongs to `rank`, when parts have the size `part` except for the last ones."""
    return max(0, min(part, whole - rank * part))


@aggregate
class Exchange:
    """A call's exchange as one rank sees it: its context, the peers' heaps, and the buffer of this epoch's parity.

    Make it with `exchange_of`. `bases`: the heap bases that `load_bases` gave. `own_block`: where this rank's block
    begins, in every rank's buffer; `step`: from one block to the next; `after_blocks`: what follows all blocks. A
    rank's part has `part_rows` rows or, where ranks divide columns (`BY_COLS`), `part_cols` columns.
    """

    ctx: DeviceContext
    bases: tl.tuple
    buffer: base_value
    own_block: base_value
    step: base_value
    after_blocks: base_value
    epoch: base_value
    part_rows: base_value
    part_cols: base_value
    ld: base_value
    WAITER: tl.constexpr

    @triton.constexpr_function
    def __init__(self, ctx, bases, buffer, own_block, step, after_blocks, epoch, part_rows, part_cols, ld, WAITER):
        self.ctx, self.bases = ctx, tl.tuple(bases)
        self.buffer, self.own_block, self.after_blocks = buffer, own_block, after_blocks
        self.step, self.epoch = known(step), epoch
        self.part_rows, self.part_cols, self.ld = known(part_rows), known(part_cols), known(ld)
        self.WAITER = known(WAITER)

    @device_function
    def own_sums(self):
        """Return where the sums that this rank sends begin, in every rank's buffer."""
        return self.after_blocks + (self.ctx.rank * self.part_rows).to(tl.int64) * self.ld

    @device_function
    def places(self, r, c):
        """Return the offsets of rows r and columns c in a block."""
        return (r.to(tl.int64) * self.ld)[:, None] + c[None, :]

    @device_function
    def pointers(self, source, r, c):
        """Return pointers to rows r and columns c of the block of `source`."""
        return self.buffer + source * self.step + (r.to(tl.int64) * self.ld)[:, None] + c[None, :]

    @device_function
    def corner(self, rank, BY_COLS: tl.constexpr):
        """Return (first row, first column) of a rank's part in the whole."""
        if BY_COLS:
            return 0, rank * self.part_cols
        else:
            return rank * self.part_rows, 0

    @device_function
    def send_to_all(self, values, place, mask, TO_SELF: tl.constexpr):
        """Send values to the same place on every rank, starting with the next rank."""
        for i in tl.static_range(1, self.ctx.world_size + TO_SELF):
            put(self.ctx, place, values, mask, self.bases, (self.ctx.rank + i) % self.ctx.world_size)

    @device_function
    def send_tile(self, values, r, c, own_row, N, TO_SELF: tl.constexpr):
        """Send a tile of rows r and columns c of this rank's part, which has N columns, to every rank.

        `own_row` marks the tile's own rows; other rows were loaded with it and belong to another tile or to none.
        """
        mask = own_row[:, None] & (c < tl.where(N > 0, self.ld, 0))[None, :]
        self.send_to_all(values, self.own_block + self.places(r, c), mask, TO_SELF)

    @device_function
    def send_to_owners(self, values, r, c, own_row, M, N, BY_COLS: tl.constexpr):
        """Send to each rank the rows that it owns of a tile (rows r, columns c) of an M by N product.

        `own_row` is as in `send_tile`. This rank sends its own rows to itself, so that it sums them rounded, like its
        peers'.
        """
        for i in tl.static_range(1, self.ctx.world_size + 1):
            owner = (self.ctx.rank + i) % self.ctx.world_size
            if BY_COLS:
                across = c - owner * self.part_cols
                theirs = (across >= 0) & (across < part_at(N, self.part_cols, owner))
                mask = own_row[:, None] & theirs[None, :]
                put(self.ctx, self.own_block + self.places(r, across), values, mask, self.bases, owner)
            else:
                down = r - owner * self.part_rows
                theirs = own_row & (down >= 0) & (down < part_at(M, self.part_rows, owner))
                mask = theirs[:, None] & (c < self.ld)[None, :]
                put(self.ctx, self.own_block + self.places(down, c), values, mask, self.bases, owner)

    @device_function
    def sum_all(self, place, mask, dtype: tl.constexpr, own=None):
        """Return (the sum, in rank order, of what all ranks have sent to `place`, whether all of it came in time).

        `own` holds this rank's values, if it has not sent them to itself.
        """
        first = self.buffer + place
        return take(self.ctx, first, self.step, mask, 0, self.epoch, self.WAITER, dtype, self.ctx.world_size, own)

    @device_function
    def take_sums(self, r, c, mask, dtype: tl.constexpr):
        """Receive rows r and columns c of the sums that their owners have sent to all."""
        place, owner = self.after_blocks + self.places(r, c), (r // self.part_rows)[:, None]
        total, _ = take(self.ctx, place, self.step, mask, owner, self.epoch, self.WAITER, dtype, 1, patience=2)
        return total

    @device_function
    def take_parts(self, whole, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, BY_COLS: tl.constexpr, ok=True):
        """Take from each peer the tile at (row, col) of its part, to its place in the matrix `whole` that all gather.

        Returns whether `ok`, and all came in time.
        """
        dtype: tl.constexpr = whole.data.dtype.element_ty
        r, c = row + tl.arange(0, ROWS), col + tl.arange(0, COLS)
        for i in tl.static_range(1, self.ctx.world_size):
            source = (self.ctx.rank + i) % self.ctx.world_size
            above, before = self.corner(source, BY_COLS)
            rows, cols = whole.rows, whole.cols
            if BY_COLS:
                cols = part_at(cols, self.part_cols, source)
            else:
                rows = part_at(rows, self.part_rows, source)
            mask = (r < rows)[:, None] & (c < tl.where(cols > 0, self.ld, 0))[None, :]
            place = self.pointers(source, r, c)
            tile, came = take(self.ctx, place, self.step, mask, source, self.epoch, self.WAITER, dtype, 1)
            ok = ok and came
            part = whole.until(above + rows, before + cols)
            target, inside = part.pointers(above + row, before + col, ROWS, COLS)
            tl.store(target, arch.round_to(tile, dtype), mask=inside)
        return ok

    # Parts may be empty. A rank that gets nothing from a peer would not know that the peer is in this call.

    @device_function
    def tell_peers(self):
        """Send a value to each peer, from the first program of the grid."""
        ranks = tl.arange(0, triton.next_power_of_2(self.ctx.world_size))
        if tl.program_id(0) == 0:
            here = tl.zeros(ranks.shape, self.buffer.dtype.element_ty)
            self.send_to_all(here, self.after_blocks + ranks, ranks == self.ctx.rank, TO_SELF=False)

    @device_function
    def wait_for_peers(self, dtype: tl.constexpr):
        """Wait, in the first program, for every peer's signal. Return whether all came in time."""
        ranks = tl.arange(0, triton.next_power_of_2(self.ctx.world_size))
        arrived = True
        if tl.program_id(0) == 0:
            peers = (ranks < self.ctx.world_size) & (ranks != self.ctx.rank)
            place = self.after_blocks + ranks
            _, arrived = take(self.ctx, place, self.step, peers, ranks, self.epoch, self.WAITER, dtype, 1)
        return arrived


@device_function
def exchange_of(ctx, bases, epoch, lamport, part_rows, WAITER: tl.constexpr):
    """Return the `Exchange` of call number `epoch`, in which every rank has a block of the `LamportMemory`."""
    buffer = lamport.staging + tl.cast(epoch & 1, tl.int64) * lamport.half_elements
    own_block = buffer + (ctx.rank * part_rows).to(tl.int64) * lamport.ld
    step = tl.cast(part_rows, tl.int64) * lamport.ld
    after_blocks = buffer + ctx.world_size * step
    return Exchange(
        ctx, bases, buffer, own_block, step, after_blocks, epoch, part_rows, lamport.part_cols, lamport.ld, WAITER
    )


@device_function
def block_exchange(ctx, bases, epoch, lamport, part_rows, number, count, WAITER: tl.constexpr):
    """Return the `Exchange` of call `epoch` in which this rank sends block `number` of `count`."""
    buffer = lamport.staging + tl.cast(epoch & 1, tl.int64) * lamport.half_elements
    step = tl.cast(part_rows, tl.int64) * lamport.ld
    own_block, after_blocks = buffer + number * step, buffer + count * step
    return Exchange(
        ctx, bases, buffer, own_block, step, after_blocks, epoch, part_rows, lamport.part_cols, lamport.ld, WAITER
    )
