"""What follows the product of a tile in warp-specialised programs (`pipeline.py`), before the tile is finished: sums of
other programs that share it, scales of rounded operands, and the bias.
"""

from iris.device.sync import signal, wait
from iris.triton_private import aggregate, base_value
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..tiles import first_row, rows_from


@aggregate
class Unshared:
    """Replacement of `arguments.SharedTiles` where programs share no tiles. `parts`: the tensor that events name."""

    parts: base_value

    @triton.constexpr_function
    def __init__(self, parts):
        self.parts = parts


@gluon.jit
def join(ctx, units, joins, epoch, unit, tile, steps, complete, acc, WAITER: gl.constexpr):
    """Add the sums of other programs to the unit of a shared tile; return units of other tiles unchanged.

    The program that has the tile's last steps adds what the others stored. Any other program stores its own sum and
    signals. `joins` is a `SharedTiles` in this rank's own memory. A failed wait has marked the rank, which then vouches
    for no result (`sync.leave`).
    """
    programs = gl.num_programs(0)
    if units.SHARED:
        if unit < 2 * programs:
            p = unit % programs
            if complete:
                q = p
                while units.begin(q) > tile * units.steps:  # the program before had earlier steps of this tile
                    q -= 1
                    wait(ctx, joins.left + q, epoch, ctx.rank, WAITER, exact=True)
                    acc += gl.load(_place_of(acc, joins.parts, q), cache_modifier=".cg")
            else:
                if steps > 0:
                    gl.store(_place_of(acc, joins.parts, p), acc)
                    signal(ctx, joins.left + p, epoch, ctx.rank)
    return acc


@gluon.jit
def _place_of(acc, parts, number):
    ACC: gl.constexpr = acc.type.layout
    r = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, ACC))
    c = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, ACC))
    # by blocks of 8 x 8, which the threads of one warp hold together
    place = (r // 8 * (8 * acc.shape[1]) + r % 8 * 8)[:, None] + (c // 8 * 64 + c % 8)[None, :]
    return parts + number.to(gl.int64) * (acc.shape[0] * acc.shape[1]) + place


@gluon.jit
def scaled(product, tiles, tile, epilogue, C, FOLDED: gl.constexpr):
    """Scale the product of a tile of rounded operands, as `tiles.scale_transposed` does."""
    ACC: gl.constexpr = product.type.layout
    row, col, _own = tiles.place(tile)
    i = gl.arange(0, product.shape[0], layout=gl.SliceLayout(1, ACC))
    r, _own = rows_from(first_row(row, C.rows, product.shape[0]), row, C.rows, i, product.shape[0], FOLDED)
    c = col + gl.arange(0, product.shape[1], layout=gl.SliceLayout(0, ACC))
    if epilogue.a_scales is not None:
        product *= gl.load(epilogue.a_scales + r, mask=r < C.rows, other=0.0)[:, None]
    if epilogue.b_scales is not None:
        product *= gl.load(epilogue.b_scales + c, mask=c < C.cols, other=0.0)[None, :]
    return product


@gluon.jit
def bias_of(product, tiles, tile, bias, N, MATRICES: gl.constexpr):
    """Return the bias of a tile's columns, in fp32. All kernels add it after the product."""
    BLOCK_N: gl.constexpr = product.shape[1]
    _row, col, _own = tiles.place(tile)
    c = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, product.type.layout))
    if MATRICES > 1:
        number = c // (BLOCK_N // MATRICES)
        c = col + c % (BLOCK_N // MATRICES)
        return gl.load(bias + number * N + c, mask=c < N, other=0.0).to(gl.float32)[None, :]
    else:
        c += col
        return gl.load(bias + c, mask=c < N, other=0.0).to(gl.float32)[None, :]
