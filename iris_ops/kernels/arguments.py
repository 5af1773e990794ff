"""Arguments of kernels, in groups: constants as frozen dataclasses, values of one call as named tuples.

A kernel assigns a field of a constant to a name (`BLOCK_M: tl.constexpr = tile.BLOCK_M`) where it goes into a
tuple, such as a shape, or to `static_range`: the field alone is a plain number there.

Triton compiles a kernel once for each set of constants. Integers in a named tuple are specialised as arguments of their
own are: on 1, and on multiples of 16. So a size that must not be, such as M of a decode step, stays an argument of its
own (`do_not_specialize`). Tensor descriptors do, too: triton before 3.8 launches none inside a tuple.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Tile:
    """The block of a product that a program computes: BLOCK_M x BLOCK_N, BLOCK_K at a time along K.

    GROUP_M: row blocks that follow each other (`tile_orders.grouped`). B_TRANSPOSED: B's descriptor is of [N, K].
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int = 1
    B_TRANSPOSED: bool = False


@dataclass(frozen=True)
class World:
    """The number of ranks, who waits (`iris.device.waits.WAITERS`), and whether the kernel records events."""

    WORLD_SIZE: int
    WAITER: int
    TRACING: bool = False


class Strides(NamedTuple):
    """Elements from row to row, and from column to column, of A [M, K], B [K, N] and `out` [M, N]."""

    am: Any
    ak: Any
    bk: Any
    bn: Any
    om: Any
    on: Any


class TileEpilogue(NamedTuple):
    """Operations that end a tile; None for each step that does not apply.

    `bias` [N]. `a_scales` [M], `b_scales` [N]: of rounded operands. `block_scales` [N, ...], rows `block_stride` apart:
    of columns and blocks along K, which scale a block's products. `residual`, `weight`, `scaled`, `squares`: of
    an all-reduce that ends with the first half of an RMSNorm (`rmsnorm_epilogue.py`).
    """

    bias: Any = None
    a_scales: Any = None
    b_scales: Any = None
    residual: Any = None
    weight: Any = None
    scaled: Any = None
    squares: Any = None
    block_scales: Any = None
    block_stride: Any = None


class LamportMemory(NamedTuple):
    """Two buffers of `half_elements` Lamport values each, in rows of `ld`; a rank's part has `part_cols` columns."""

    staging: Any
    half_elements: Any
    part_cols: Any
    ld: Any


class Staged(NamedTuple):
    """Memory where owners' tiles are staged and signalled, and how the result is divided (`tile_orders.OwnedTiles`).

    At each owner `staging` is [source rank, owned tile, BLOCK_M, BLOCK_N], `flags` [source rank, owned tile].
    """

    staging: Any
    flags: Any
    part_rows: Any
    part_cols: Any
    early: Any


@dataclass(frozen=True)
class TreeSums:
    """An order of sums over all ranks' K, as lists in text (`sum_orders.py`).

    OWN: leaves of this rank; OWN_ROOTS: of each of its roots the leaves' list; JOINS, SOURCES: of all ranks' roots.
    PAIR: one or two ranks have one root each. ROOTLESS: a rank has none.
    """

    OWN: int
    OWN_ROOTS: str
    JOINS: str
    SOURCES: str
    PAIR: bool
    ROOTLESS: bool = False


class Tree(NamedTuple):
    """A rank's memory for the sums of its leaves: `sums` [programs, OWN, BLOCK_M * BLOCK_N].

    All ranks' K has `blocks` blocks in `leaves` leaves.
    """

    sums: Any
    blocks: Any
    leaves: Any


@dataclass(frozen=True)
class LamportForm:
    """The form of a Lamport kernel: who gets a tile (`lamport_matmul.py`), whether ranks divide columns, and the order
    of sums (None: by ranks).

    ONE_TILE: each program has one; then there are no loops, and of "all" this rank's own tile stays in registers.
    UNIT: the columns that the ranks divide are given in units of so many.
    """

    EXCHANGE: str
    BY_COLS: bool
    ONE_TILE: bool
    SUMS: TreeSums | None = None
    UNIT: int = 1


class Gathered(NamedTuple):
    """The buffer that gathers all ranks' parts of A: `data` [rank, part_rows, part_cols], rows `ld` apart.

    This rank's part is a_rows x a_cols.
    """

    data: Any
    a_rows: Any
    a_cols: Any
    part_rows: Any
    part_cols: Any
    ld: Any


@dataclass(frozen=True)
class Moves:
    """How the grid's first PROGRAMS gather A, along K or by rows, in PIECES for each row block.

    SPLITS: parts along K of the tiles that fill no wave (`stream_k.unit_tile`).
    """

    BY_K: bool
    PROGRAMS: int
    PIECES: int
    SPLITS: int


class Rows(NamedTuple):
    """A matrix whose rows lie `ld` elements apart."""

    data: Any
    ld: Any


@dataclass(frozen=True)
class Pieces:
    """The pieces, PIECE_M x PIECE_K, in which A is gathered before it is multiplied, along K or by rows."""

    PIECE_M: int
    PIECE_K: int
    BY_K: bool


@dataclass(frozen=True)
class StreamForm:
    """How a program streams the weights that it widens (`quantised/weight_stream.py`), T tiles at a time.

    BLOCK_M rows are loaded, and BLOCKS blocks of ROWS rows multiplied. COLUMN_WARPS: of the WARPS, those that divide a
    tile's columns; the others divide lines. GROUPS: scales of a line, 0 where they are of columns. ZEROS: whether a
    zero point follows each. BRANCHES: whether loads beyond the last are skipped by a branch. LATER: what sums are
    multiplied by. TAKE: which thread takes what of [BLOCK_M, 64] Lamport values. MATRICES: side by side in B. SPANS: of
    the sums of squares, a power of two at least as many.
    """

    BLOCK_M: int
    T: int
    STAGES: int
    ROWS: int
    BLOCKS: int = 1
    WARPS: int = 4
    COLUMN_WARPS: int = 1
    GROUPS: int = 0
    ZEROS: bool = False
    TAKE: Any = None
    MATRICES: int = 1
    SPANS: int = 1
    LATER: float = 1.0
    BRANCHES: bool = False


@dataclass(frozen=True)
class Pipeline:
    """The layouts of a warp-specialised program's tile (`hopper/operands.layouts`), and the sizes of its pipeline.

    STAGES: of the ring of operands, SLOTS: of B's where it has its own; PLACES: for finished tiles; ROWS: of a part of
    one. ACC, PRODUCT, MOVE: which thread of the MMA warps, which place in shared memory, and which thread of the mover
    warps has what of it. LOADER_WARPS: that load operands; with none, MMA warps do. TOGETHER: see
    `hopper/scaled_mma.py`. WIDENING, GROUPS, ZEROS, SCALES, WORDS: of
    B's codes (`hopper/widened_mma.py`).
    """

    STAGES: int
    ACC: Any
    PRODUCT: Any
    MOVE: Any
    ROWS: int
    MOVER_WARPS: int
    MOVER_REGISTERS: int
    LOADER_WARPS: int = 0
    LOADER_REGISTERS: int = 0
    SLOTS: int = 0
    PLACES: int = 1
    TOGETHER: int = 1
    WIDENING: Any = None
    GROUPS: int = 0
    ZEROS: bool = False
    SCALES: Any = None
    WORDS: int = 0


class SharedTiles(NamedTuple):
    """Memory for the sums of tiles that programs share: fp32 `parts` of tiles, and `left`, a flag for each."""

    parts: Any
    left: Any


@dataclass(frozen=True)
class ReduceForm:
    """The form of a reduction: who gets the owners' sums, whether owners have columns, and whether programs share tiles
    along K."""

    ALL_REDUCE: bool
    BY_COLS: bool
    SHARED: bool = False


class PartStep(NamedTuple):
    """The distance from one rank's part of a gathered matrix to the next rank's."""

    rows: Any
    cols: Any
