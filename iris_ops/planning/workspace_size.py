"""How much memory the ranks stage for each other in a call, and how it is laid out: arithmetic on shapes."""

from __future__ import annotations

from dataclasses import replace

from ..config import FusedConfig
from ..problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, TMA_ALIGNMENT, Problem, owned_part, part_size
from .torch_ways import TORCH_WAYS
from .waves import loose_tiles

# Elements of the exchange area: a row has a multiple of so many.
_EXCHANGE_GRANULE = 16
# What a launch of an all-reduce by tree stages of each of two buffers.
_TREE_ELEMENTS = 1 << 26
# What a mover of all_gather_matmul pushes before it signals: long against the signal, short against a tile's product.
_PIECE_BYTES = 1 << 19


def workspace_size(problem: Problem, config: FusedConfig, programs: int) -> tuple[int, int, int]:
    """(flags, bytes of staging, bytes of exchange) that a call needs on a device with so many programs at once."""
    problem = replace(problem, M=min(problem.M, most_rows(problem, config)))
    w, itemsize = problem.world_size, problem.dtype.itemsize
    if problem.empty:
        return 0, 0, 0
    if problem.by_tree and config.lamport:
        rows, cols = exchanged_part(problem, config)
        behind = rows * w if config.algorithm == "two_shot" else 1  # sums, or what ranks tell each other
        ld = exchange_ld(max(cols, w))
        return 0, 0, 2 * (problem.tree.num_roots * rows + behind) * ld * itemsize
    if config.algorithm in TORCH_WAYS:
        return 0, TORCH_WAYS[config.algorithm].elements(problem) * itemsize, 0
    if config.algorithm != "overlapped":
        rows, cols = exchanged_part(problem, config)
        behind = rows * w * exchange_ld(cols) if config.algorithm == "two_shot" else exchange_ld(w)
        if config.algorithm == "one_shot" and problem.op == ALL_REDUCE:
            behind = 0  # every rank gets values from every rank
        elements = w * rows * exchange_ld(cols) + behind
        gathered = problem.M * exchange_ld(problem.K) if problem.op == GATHER_MATMUL else 0
        return 0, gathered * itemsize, 2 * elements * itemsize
    flags, nbytes = staged(problem, config)
    cut = parts(problem, config, programs)
    return flags + cut, nbytes + cut * config.block_m * config.block_n * 4, 0


def most_rows(problem: Problem, config: FusedConfig) -> int:
    """How many rows one launch takes. More are multiplied one launch after the other, which makes no other bits.

    An all-reduce by tree stages each root of its result; rows of a reduce-scatter would be dealt out anew.
    """
    if not problem.by_tree or problem.op != ALL_REDUCE:
        return max(1, problem.M)
    blocks = problem.tree.num_roots
    if config.algorithm == "two_shot":
        blocks = blocks / problem.world_size + 1
    return max(2 * problem.world_size**2, int(_TREE_ELEMENTS / (exchange_ld(problem.N) * max(1, blocks))))


def staged(problem: Problem, config: FusedConfig) -> tuple[int, int]:
    """(flags, bytes) of what the ranks stage for each other in an overlapped call; parts of tiles come after."""
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
    """For how many parts of tiles, which the unit that has a tile's last part adds up, a rank has room.

    As many on ranks whose K, or N in a gather, differs, or their heaps would differ too.
    """
    if problem.op == GATHER_MATMUL:
        most = 2 * (config.num_programs or programs) - 1  # tiles that are cut, however many there are
        return most * (config.splits - 1) if problem.form == "rows" else 0
    return min(programs, config.splits * loose_tiles(problem, config, programs))


def exchanged_part(problem: Problem, config: FusedConfig) -> tuple[int, int]:
    """(rows, columns) of the Lamport values that one rank sends to another at most."""
    if problem.op == GATHER_MATMUL:
        return gathered_part(problem)[:2]
    shared = config.algorithm == "two_shot"
    return part_size(problem.M, problem.world_size) if shared else problem.part_rows, problem.part_cols


def exchange_ld(cols: int) -> int:
    """Elements of a row in the exchange area: whole vectors, also where the columns are odd."""
    return -(-cols // _EXCHANGE_GRANULE) * _EXCHANGE_GRANULE


def cdiv(a: int, b: int) -> int:
    """Rounded up; as an int, where Triton's is for kernels too and takes the host microseconds."""
    return -(-a // b)


def tiles_of(rows: int, cols: int, config: FusedConfig) -> int:
    return cdiv(rows, config.block_m) * cdiv(cols, config.block_n)


def gathered_part(problem: Problem) -> tuple[int, int, int]:
    """(rows, columns, row stride in elements) of one rank's part in the gathered A."""
    rows = problem.part_rows
    cols = -(-problem.K // problem.world_size) if problem.form == "k" else problem.K
    granule = TMA_ALIGNMENT // problem.dtype.itemsize
    return rows, cols, -(-cols // granule) * granule


def pieces(problem: Problem, config: FusedConfig) -> int:
    """Into how many pieces a block of gathered rows is cut: every mover has one, and none is long under way."""
    rows, _, ld = gathered_part(problem)
    blocks = cdiv(rows, config.block_m) * max(1, problem.world_size - 1)
    nbytes = min(rows, config.block_m) * ld * problem.dtype.itemsize
    return max(cdiv(config.comm_programs, blocks), nbytes // _PIECE_BYTES)
