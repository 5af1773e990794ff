"""A tensor as the kernels see it: elements in row-major order, cut into parts, which are moved in units of BLOCK.

The place of element number `index` follows from the number alone, so ranks whose tensors have different strides still
mean the same elements. `LAYOUT` says how:

    FLAT     one after the other
    ROWS     rows of `cols` elements, each row and each column a stride apart
    TILES    as ROWS, but a unit is a tile of BLOCK // TILE_N x TILE_N elements
"""

import triton
import triton.language as tl

from ..device.function import device_function
from ..triton_private import aggregate, base_value

FLAT, ROWS, TILES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.constexpr_function
def _value(x):
    """Return `x` as a constexpr if the compiler knows it, such as a stride of 1."""
    return tl.constexpr(x) if isinstance(x, int) else x


@aggregate
class View:
    """`n` elements; part p begins at p * `share` (in TILES: in tiles) and has `limit` of them, and p * `part_step`
    further on in memory. INTERLEAVED: the parts take turns, a unit each.
    """

    data: base_value
    n: base_value
    cols: base_value
    stride_row: base_value
    stride_col: base_value
    share: base_value
    limit: base_value
    part_step: base_value
    LAYOUT: tl.constexpr
    INTERLEAVED: tl.constexpr
    TILE_N: tl.constexpr
    GROUP_M: tl.constexpr

    @triton.constexpr_function
    def __init__(
        self, data, n, cols, stride_row, stride_col, share, limit, part_step, LAYOUT, INTERLEAVED, TILE_N, GROUP_M
    ):
        self.data = data
        self.n = _value(n)
        self.cols = _value(cols)
        self.stride_row = _value(stride_row)
        self.stride_col = _value(stride_col)
        self.share = _value(share)
        self.limit = _value(limit)
        self.part_step = _value(part_step)
        self.LAYOUT = tl.constexpr(getattr(LAYOUT, "value", LAYOUT))
        self.INTERLEAVED = tl.constexpr(getattr(INTERLEAVED, "value", INTERLEAVED))
        self.TILE_N = tl.constexpr(getattr(TILE_N, "value", TILE_N))
        self.GROUP_M = tl.constexpr(getattr(GROUP_M, "value", GROUP_M))

    @device_function
    def place(self, part, unit, BLOCK: tl.constexpr, WORLD_SIZE: tl.constexpr):
        """Return pointers to the elements of a part's unit, and which of them exist."""
        lane = tl.arange(0, BLOCK)
        if self.LAYOUT == TILES:
            tile = unit * WORLD_SIZE + part if self.INTERLEAVED else part * self.share + unit
            tile_m, tile_n = self._tile(tile, BLOCK)
            row, col = tile_m * (BLOCK // self.TILE_N) + lane // self.TILE_N, tile_n * self.TILE_N + lane % self.TILE_N
            mask = (row < self.n // self.cols) & (col < self.cols)
            return self.data + row.to(tl.int64) * self.stride_row + col.to(tl.int64) * self.stride_col, mask
        else:
            if self.INTERLEAVED:
                index = (unit * WORLD_SIZE + part) * BLOCK + lane
                mask = index < self.n
            else:
                index = part * self.share + unit * BLOCK + lane
                # two comparisons with run-time multiples of 16 keep accesses wide where one with a minimum would not
                mask = (index < self.n) & (unit * BLOCK + lane < self.limit)
            first = self.data + tl.cast(part, tl.int64) * self.part_step
            if self.LAYOUT == FLAT:
                return first + index, mask
            else:
                row, col = index // self.cols, index % self.cols
                return first + row.to(tl.int64) * self.stride_row + col.to(tl.int64) * self.stride_col, mask

    @device_function
    def _tile(self, tile, BLOCK: tl.constexpr):
        """Return (row block, column block) of a tile, in groups of GROUP_M row blocks; beyond the last tile, beyond the
        last row."""
        num_m = tl.cdiv(self.n // self.cols, BLOCK // self.TILE_N)
        num_n = tl.cdiv(self.cols, self.TILE_N)
        first = tile // (self.GROUP_M * num_n) * self.GROUP_M
        height = tl.maximum(min(num_m - first, self.GROUP_M), 1)
        inside = tile % (self.GROUP_M * num_n)
        over = tl.where(tile < num_m * num_n, 0, num_m)
        return first + inside % height + over, inside // height


@device_function
def views(inp, out, form: tl.constexpr):
    """Return the views of `inp` and `out`, two `TensorParts`, in units of `form`, a `UnitForm`."""
    INTERLEAVED: tl.constexpr = form.INTERLEAVED
    ONE_OUT: tl.constexpr = form.ONE_OUT
    source = View(*inp, form.IN_LAYOUT, INTERLEAVED, form.TILE_N, form.GROUP_M)
    target = View(*out, form.OUT_LAYOUT, INTERLEAVED and not ONE_OUT, form.TILE_N, form.GROUP_M)
    return source, target


@device_function
def equal_views(inp, out, share, limit, form: tl.constexpr):
    """Return the views of an all-reduce, whose two tensors have the same parts; the compiler then compares once."""
    source = View(
        inp.data, inp.n, inp.cols, inp.stride_row, inp.stride_col, share, limit, 0,
        form.IN_LAYOUT, form.INTERLEAVED, form.TILE_N, form.GROUP_M,
    )  # fmt: skip
    target = View(
        out.data, inp.n, out.cols, out.stride_row, out.stride_col, share, limit, 0,
        form.OUT_LAYOUT, form.INTERLEAVED, form.TILE_N, form.GROUP_M,
    )  # fmt: skip
    return source, target
