"""Lay out what the ranks stage for each other, and compute its size: arithmetic on shapes."""

from __future__ import annotations

from ..config import FusedConfig
from ..problem import GATHER_MATMUL, MATMUL_GATHER, TMA_ALIGNMENT, Problem, owned_part, part_size
from .waves import loose_tiles

# Elements of the exchange area: a row has a multiple of this number.
_EXCHANGE_GRANULE = 16
# What a mover of all_gather_matmul pushes before it signals: long against the signal, short against a tile's product.
_PIECE_BYTES = 1 << 19


def staged(problem: Problem, config: FusedConfig) -> tuple[int, int]:
    """Return (flags, bytes) of what the ranks stage for each other in an overlapped call; parts of tiles come after."""
    w, itemsize = problem.world_size, problem.dtype.itemsize
    if problem.op == MATMUL_GATHER:
        return 0, 0
    if problem.op == GATHER_MATMUL:
        rows, _, ld = gathered_part(problem)
        flags, nbytes = w * cdiv(rows, config.block_m) * pieces(problem, config), w * rows * ld * itemsize
    else:
        rows, cols, _ = owned_part(problem, config)
        flags = w * tiles_of(rows, cols, config)
        nbytes = flags * config.block_m * config.block_n * itemsize
    return flags, -(-nbytes // TMA_ALIGNMENT) * TMA_ALIGNMENT


def parts(problem: Problem, config: FusedConfig, programs: int) -> int:
    """Return the number of parts of tiles for which a rank has room, which the unit with a tile's last part adds up.

    It is equal on ranks whose K, or N in a gather, differs; otherwise their heaps would differ, too.
    """
    if problem.op == GATHER_MATMUL:
        most = 2 * (config.num_programs or programs) - 1  # tiles that are cut, however many there are
        return most * (config.splits - 1) if problem.form == "rows" else 0
    return min(programs, config.splits * loose_tiles(problem, config, programs))


def exchanged_part(problem: Problem, config: FusedConfig) -> tuple[int, int]:
    """Return (rows, columns) of the Lamport values that one rank sends to another at most."""
    if problem.op == GATHER_MATMUL:
        return gathered_part(problem)[:2]
    shared = config.algorithm == "two_shot"
    return part_size(problem.M, problem.world_size) if shared else problem.part_rows, problem.part_cols


def exchange_ld(cols: int) -> int:
    """Return the elements of a row in the exchange area: whole vectors, also where the columns are odd."""
    return -(-cols // _EXCHANGE_GRANULE) * _EXCHANGE_GRANULE


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up, as an int; Triton's `cdiv` takes the host microseconds."""
    return -(-a // b)


def tiles_of(rows: int, cols: int, config: FusedConfig) -> int:
    return cdiv(rows, config.block_m) * cdiv(cols, config.block_n)


def gathered_part(problem: Problem) -> tuple[int, int, int]:
    """Return (rows, columns, row stride in elements) of one rank's part in the gathered A."""
    rows = problem.part_rows
    cols = -(-problem.K // problem.world_size) if problem.form == "k" else problem.K
    granule = TMA_ALIGNMENT // problem.dtype.itemsize
    return rows, cols, -(-cols // granule) * granule


def pieces(problem: Problem, config: FusedConfig) -> int:
    """Return into how many pieces a block of gathered rows is cut: every mover has one, and none is long under way."""
    rows, _, ld = gathered_part(problem)
    blocks = cdiv(rows, config.block_m) * max(1, problem.world_size - 1)
    nbytes = min(rows, config.block_m) * ld * problem.dtype.itemsize
    return max(cdiv(config.comm_programs, blocks), nbytes // _PIECE_BYTES)
