"""Model the hops, the pushes, and the overlap with a product, which the ways' times share, and the hardware that they
need.

An analytical model in the manner of tritonBLAS (https://github.com/ROCm/tritonBLAS). The product takes waves of tiles
(`tile_model.py`). The exchange takes its bytes over the link's rate, and a fixed latency for each hop. How much of one
overlaps with the other was measured on H200s; each way's own file in `ways/` has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from iris.machines import INTERPRETER, Machine

from ..config import FusedConfig
from ..problem import GATHER_MATMUL, MATMUL_GATHER, REDUCE_SCATTER, Problem
from .tile_model import tile_us
from .waves import gemm_tiles, programs_of

# What the end of a leaf takes of a program's time, 64 x 128 of it. Estimated.
_LEAF_US = 0.1
# Of a tile's product, the part over which the tile before may be pushed: then there is its signal.
_SPREAD = 0.8
# Where a width is no multiple of as many elements, the compiler knows of no aligned rows, and kernels store elements
# one by one: the time of 128 x 128 of them, and the rate of such stores to peers over the link's.
_WHOLE_STORES, _STORED_APART_US, _STORED_APART = 16, 6.0, 0.06
# The most elements whose transfer a product hides; a product of rounded rows hides less.
_MOST_UNHIDDEN, _MOST_ROUNDED = 1 << 22, 1 << 20


def hops(problem: Problem, count: float = 1) -> float:
    """Return `count` hops, or 0 for a single rank."""
    return 0 if problem.world_size == 1 else count


def tile_bytes(problem: Problem, config: FusedConfig) -> int:
    """Return the bytes of a finished tile."""
    return config.block_m * config.block_n * problem.dtype.itemsize


def push_us(problem: Problem, config: FusedConfig, machine: Machine, tiles: int) -> float:
    """Return the microseconds of pushing `tiles` tiles at the link's rate."""
    return tiles * tile_bytes(problem, config) / (machine.link_gbs * 1e3)


def spread_us(problem: Problem, config: FusedConfig, machine: Machine) -> float:
    """Return the time over which a warp-specialised program pushes a tile while it multiplies the next.

    It is as long as the link takes for a tile of every program, in products first to all peers: faster pushes would
    queue for the link and delay the loads after them. Sums of an all-reduce are not paced, by measurement.
    """
    copies = problem.world_size - 1 if problem.op == MATMUL_GATHER else min(1, problem.world_size - 1)
    together = push_us(problem, config, machine, copies * programs_of(config, machine.num_programs))
    # in two shots, a tile and sums take turns
    most = _SPREAD / 2 if config.algorithm == "two_shot" else _SPREAD
    return min(together, most * tile_us(problem, config, machine))


def leaf_ends(problem: Problem, config: FusedConfig) -> float:
    """Return what the ends of leaves take of a program's time for a tile."""
    if not problem.tree:
        return 0.0
    leaves = max(last - first for first, last in problem.tree.spans)
    return leaves * _LEAF_US * config.block_m * config.block_n / (64 * 128)


def staggered(configs: Sequence[FusedConfig], problem: Problem, machine: Machine) -> list[FusedConfig]:
    """Return `configs`, each with the time over which its programs start, or end what they share first."""
    result = []
    for config in configs:
        over_us = _stagger_us(problem, config, machine)
        result.append(replace(config, stagger_us=over_us) if over_us else config)
    return result


def _stagger_us(problem: Problem, config: FusedConfig, machine: Machine) -> int:
    """Return the time over which the programs of an op that pushes tiles start, or, if warp-specialised, end what they
    share first.

    By measurement, the best value is about the time that all of them take to push a tile at once, and a third more
    where tiles go to every rank. With more than a tile's product the last program would push together with the first
    again. Programs that have one tile each gain nothing.
    """
    if config.warp_specialised and (problem.op == REDUCE_SCATTER or config.splits == 1 or config.block_n < 256):
        return 0  # what others sum is pushed while the next tile is multiplied; small tiles lose by unequal shares
    if problem.world_size == 1 or machine.name == INTERPRETER:
        return 0
    programs = programs_of(config, machine.num_programs)
    if gemm_tiles(problem, config) <= programs and not config.warp_specialised:
        return 0
    copies = 1.35 * (problem.world_size - 1) if problem.op == MATMUL_GATHER else 1
    wave_us = copies * push_us(problem, config, machine, programs)
    return min(int(wave_us), int(tile_us(problem, config, machine)))


def apart_us(problem: Problem, config: FusedConfig, stores: int) -> float:
    """Return what a program takes for `stores` of a tile into `out` where it must store its rows by single elements.

    Rows of a result that is scattered by columns are as wide as a rank's part.
    """
    width = problem.part_cols if problem.op == REDUCE_SCATTER else problem.gemm[1] // problem.epilogue.matrices
    if apart_share(width) == 1:
        return 0.0
    return stores * _STORED_APART_US * config.block_m * config.block_n / (128 * 128)


def apart_share(width: int) -> float:
    """Return the rate of pushes to peers over the link's: 1, or less where rows of this width go element by element."""
    return _STORED_APART if width % _WHOLE_STORES else 1.0


def unhidden(problem: Problem, most: int | None = None) -> str | None:
    """Return why a product hides too little of the exchange, if it does. A sum by tree has no other way.

    `most`: elements of the largest result whose exchange it hides.
    """
    if most is None:
        most = _MOST_ROUNDED if problem.weights.rounds_rows else _MOST_UNHIDDEN
    travels = problem.M * problem.K << 1 if problem.op == GATHER_MATMUL else problem.M * problem.N
    if problem.tree or travels <= most:
        return None
    return "the exchange of a result this large would not overlap"


def specialised_refused(problem: Problem, machine: Machine) -> str | None:
    """Return why warp-specialised kernels cannot serve a problem; elsewhere their portable fallbacks would run."""
    if problem.weights.rounds_rows:
        return problem.weights.refused(problem, machine)
    if not machine.warp_specialised:
        return "it needs a Hopper GPU"
    if problem.dtype.itemsize != 2:
        return f"it does not multiply {problem.dtype}"
    width = problem.out_cols
    if not (problem.whole_vectors(problem.K) and problem.whole_vectors(width)):
        return "rows begin between vectors of 16 bytes"
    return None
