"""Model the time of torch's own product, cuBLAS's or hipBLASLt's, fitted to measurements.

It covers the products that a plan compares with its own kernels. It reckons with waves of the library's tiles, like the
model of our kernels, but the library chooses its tiles by rules that it does not tell.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, log

from iris.machines import Machine

from ..problem import GATHER_MATMUL, Problem
from .needs import PLAIN, WeightFormat

# Tiles that a library chooses from: by one side, with which others, and the share of the full rate that it reaches so.
_TILES = {
    64: {128: 0.69, 192: 0.77, 256: 0.82},
    128: {128: 0.93, 160: 0.95, 192: 0.97, 256: 1.0},
    192: {192: 1.0, 256: 1.0},
    256: {160: 1.0, 192: 1.0},
}
# cuBLAS' tiles on Hopper come in multiples of 8 rows: the rows from which one fits, and the share in between.
_LEAST_FITTED, _FITTED = 160, 0.95
_MOST_FITTED = 8  # blocks of rows, of more those of round numbers fit well enough
# Of a tile of 128 x 256, what it takes beside its product: until its first operands are there, and to store it.
_BESIDE_US = 2.5
# What joining parts along K takes, beside storing and loading them in float32 at the memory's rate.
_JOIN_US = 1.2
# The rate over the machine's: the chip slows as it comes to its power limit.
_FASTEST, _SLOWEST = (20.0, 1.27), (7000.0, 0.95)
_SHORTEST_SPLIT = 512
_NEITHER_HIDDEN = 5  # of a product and its stream of operands, the higher the more the longer one hides the other
# Of the memory's rate, what a stream of weights gets; and where its tiles, of so many columns, leave a tenth of the
# multiprocessors without one.
_STREAMED, _STREAMED_NARROW, _STREAM_COLUMNS, _WIDE = 0.95, 0.89, 64, 0.9
_HIDDEN = 0.2  # of a launch, where no other product of the call waits for its end


def expected_us(
    m: int, n: int, k: int, machine: Machine, most_splits: int = 16, weights: WeightFormat = PLAIN
) -> float:
    """Return the microseconds of torch's product [m, k] @ [k, n] in 16 bits: waves of its best tiles, or its stream.

    On an H200, from 128 rows on, it is within a tenth of cuBLAS's time on nine products of ten. `weights` is the format
    that the library multiplies.
    """
    return expected_in_turn([m], n, k, machine, most_splits, weights)[0] - _HIDDEN * machine.launch_us


def expected_in_turn(
    rows: list[int], n: int, k: int, machine: Machine, most_splits: int = 2, weights: WeightFormat = PLAIN
) -> list[float]:
    """Return the microseconds of each of several products in turn, with the given rows: they warm the chip together."""
    waves = [_waves_us(m, n, k, machine, most_splits) for m in rows]
    warm = _heated(sum(waves)) / max(sum(waves), 1e-9)
    wide = ceil(n / _STREAM_COLUMNS) >= _WIDE * machine.num_programs
    rate = (_STREAMED if wide else _STREAMED_NARROW) * machine.hbm_gbs * 1e3
    streams = ((m * k + k * n + m * n) * 2 / rate for m in rows)
    product_us = [both_us(us * warm, stream) + machine.launch_us for us, stream in zip(waves, streams, strict=True)]
    return [weights.library_us(us, m, k, machine) for us, m in zip(product_us, rows, strict=True)]


def both_us(compute: float, stream: float) -> float:
    """Return the microseconds of a product and its stream of operands, of which the longer hides most of the other."""
    longer = max(compute, stream)
    if not longer:
        return longer
    return longer * (1 + (min(compute, stream) / longer) ** _NEITHER_HIDDEN) ** (1 / _NEITHER_HIDDEN)


@lru_cache(maxsize=4096)
def _waves_us(m: int, n: int, k: int, machine: Machine, most_splits: int) -> float:
    waves = []
    for bm, bn, share in _tiles(m):
        tiles = ceil(m / bm) * ceil(n / bn)
        for splits in range(1, most_splits + 1):
            units = tiles * splits
            if splits > 1 and k < splits * _SHORTEST_SPLIT or splits > 2 and units > machine.num_programs:
                continue  # in three and more only where programs would be without a tile
            rate = (machine.library_tflops or machine.tflops) * share / machine.num_programs * 1e6
            tile_us = 2.0 * bm * bn * k / splits / rate + _BESIDE_US * bm * bn / (128 * 256)
            join_us = _JOIN_US + splits * m * n * 8 / (machine.hbm_gbs * 1e3) if splits > 1 else 0.0
            waves.append(ceil(units / machine.num_programs) * tile_us + join_us)
    return min(waves)


def _tiles(m: int) -> list[tuple[int, int, float]]:
    """Return (rows, columns, share): of tiles of round sizes, and of such as fill m rows best."""
    tiles = []
    for side, shares in _TILES.items():
        tiles += [(*tile, share) for other, share in shares.items() for tile in ((side, other), (other, side))]
        for blocks in range(max(1, m // 256), min(_MOST_FITTED, m // _LEAST_FITTED) + 1):
            fit = 8 * ceil(m / (8 * blocks))
            if max(_LEAST_FITTED, min(shares)) <= fit <= max(shares):
                tiles.append((fit, side, _FITTED * _between(fit, shares)))
    return tiles


def _between(size: int, shares: dict[int, float]) -> float:
    """Return the share of a size between two that are known."""
    low, high = max(s for s in shares if s <= size), min(s for s in shares if s >= size)
    part = (size - low) / max(1, high - low)
    return shares[low] + part * (shares[high] - shares[low])


def _heated(us: float) -> float:
    (short, fast), (long, slow) = _FASTEST, _SLOWEST
    warmth = log(min(max(us, short), long) / short) / log(long / short)
    return us / (fast + (slow - fast) * warmth)


def library_refused(problem: Problem, machine: Machine) -> str | None:
    """Return why a library's product is no candidate, or None: its time is unknown, or streaming weights is faster."""
    if problem.weights is not PLAIN:
        few = problem.weights.streams(problem, machine)
    elif not machine.name.startswith("NVIDIA") or problem.dtype.itemsize != 2:
        return "the time of the library's product is not known here"
    elif problem.world_size == 1:
        return "one rank: no collective to follow"
    else:  # what gathers rows first cannot stream weights meanwhile, and a library's stream is as fast as ours
        few = problem.gemm[0] <= 64 and problem.op != GATHER_MATMUL
    return "few rows: a stream of weights needs no library" if few else None
