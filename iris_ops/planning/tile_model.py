"""Predict how long a rank's product takes in tiles of our kernels: waves of tiles, or the stream of its operands.

A product takes as many waves as its tiles need programs, each as long as one tile takes. A product of few rows takes as
long as its weights take from memory. The tables here say which tiles there are and what share of the chip's rate a full
wave of them reaches, measured on H200s, an architecture's tables side by side. `overlap_model.py` adds the transfer.
"""

from __future__ import annotations

from math import log

from iris.machines import INTERPRETER, Machine

from ..config import FusedConfig
from ..problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, REDUCE_SCATTER, Problem
from .hopper_tiles import HOPPER
from .needs import PLAIN
from .tiles import SpecialisedTiles, Tiles
from .torch_model import both_us
from .waves import L2_BYTES, cut_tiles, gemm_tiles, programs_of, shared_tiles

# The tiles of warp-specialised kernels, by the name of their architecture (`Machine.architecture`).
SPECIALISED_TILES = {"hopper": HOPPER}
# The tiles of portable kernels whose transfers overlap.
GPU_TILES: Tiles = {
    (128, 256, 64, 8): (3, 1.0),
    (128, 128, 64, 8): (4, 0.86),
    (64, 256, 64, 8): (4, 0.85),
    (64, 128, 64, 4): (4, 0.60),
    (64, 64, 128, 4): (4, 0.48),
    (32, 64, 128, 4): (4, 0.22),
    (16, 64, 128, 4): (5, 0.12),
    (16, 128, 128, 4): (4, 0.14),
}
# For few rows: enough weights are under way for the memory's full rate; measured on H200s. Tiles that are 64 wide are
# bound by memory or by shared memory, which is written and read at 128 bytes a cycle. There a second warp group reads A
# once more, but sends and takes Lamport values sooner.
LAMPORT_TILES: Tiles = {
    (16, 64, 256, 4): (5, 0.25),
    (16, 64, 128, 4): (8, 0.25),
    (32, 64, 256, 4): (4, 0.43),
    (64, 32, 128, 4): (8, 0.5),
    (64, 64, 128, 8): (6, 0.58),
    (64, 64, 128, 4): (7, 0.74),
    (128, 64, 128, 8): (4, 0.73),
    (128, 128, 64, 8): (6, 0.95),
}
# The same of operands of one byte, twice as deep (`FusedConfig.depth`).
BYTE_TILES: Tiles = {
    (32, 64, 128, 4): (8, 0.36),
    (64, 64, 128, 4): (6, 0.58),
    (128, 64, 128, 4): (4, 0.75),
    (32, 64, 64, 4): (12, 0.34),
    (64, 64, 64, 4): (10, 0.55),
    (128, 64, 64, 4): (8, 0.7),
}
_EXCHANGE_PROGRAMS = 60  # this number of them reaches that rate
_READ_AGAIN = 0.2  # of the time that weights take, what each further block of few rows adds
_SOONER = 0.3  # of a low tile, what is saved in an empty last wave: where few multiply, each gets its operands sooner
_ANEW = 1.15  # of products in tiles of 64 columns by programs that take several, for loads begin anew with each
# Float32 blocks are half as deep and wide, so that they fit in shared memory; torch's fp32 has no tensor cores.
FP32_TILES: Tiles = {
    (64, 128, 32, 8): (2, 1.0),
    (64, 64, 32, 4): (3, 0.9),
    (32, 64, 32, 4): (3, 0.7),
    (16, 64, 64, 4): (3, 0.4),
}
# Of tiles of few rows, by bytes of an operand.
EXCHANGED_TILES = {1: BYTE_TILES, 2: LAMPORT_TILES, 4: FP32_TILES}
# As the chip comes to its power limit: what products take more, over those of 500 us, by which tiles' shares are meant;
# from when on it warms, and until when.
_WARMED, _MEANT_US, _COOLEST_US, _WARMEST_US = 0.05, 500.0, 125.0, 2000.0
_ENOUGH = 0.7  # of the programs, how many draw the memory's full rate; few of Lamport kernels do (above)
# What is left of the rate where rows do not begin at whole vectors: of tiles of 128 x 256, of smaller ones.
_POINTERS = 0.15, 0.38
# What all programs of an H200 load from L2, GB/s in whole lines: by descriptors, and by the copies of portable Lamport
# kernels.
_L2_GBS, _COPIED_GBS = 14000.0, 11500.0
_LINE_BYTES, _SECTOR_BYTES = 128, 32
# What a step loads more, in lines, of rows that begin within lines, but at sectors: they touch another line, yet no
# sector more.
_ANOTHER_LINE = 0.5
# Of a whole tile's time, what the last wave takes less, the fewer of the programs have a tile: clocks and L2 are free.
_FASTER_ALONE = 0.4
# What one program stores or loads of the parts of tiles, GB/s.
_PARTS_GBS = 28.0
# Until the parts of shared tiles of 128 x 256 are joined, before other tiles; where there are no others. There sharing
# keeps all programs busy in place of few, whose clocks would be higher: what that adds to a wave's time, by the part of
# a wave that is shared.
_JOIN_US = {MATMUL_GATHER: 16.0, REDUCE_SCATTER: 17.0, ALL_REDUCE: 17.0}
_JOIN_ALONE_US, _BUSY_ALONE = 12.0, 0.2
# The same in gathers of fewer blocks of rows than this, as part of a tile's time: programs on one column of tiles drift
# apart and read B anew. And the part of the programs below which as many shared tiles save nothing.
_FEW_BLOCKS, _JOIN_FEW_BLOCKS, _FEW_SHARED = 8, 0.37, 0.3
# In gathers, of a tile of 128 x 128 the time of what is shared, by the part of the programs that it fills: least, most
# and slope; and until its parts are joined.
_SHARED_LEAST, _SHARED_MOST, _SHARED_SLOPE, _SHARED_FROM, _SHARED_JOIN_US = 0.1, 0.95, 2.6, 0.2, 4.0
# What it takes more in all-reduces of less than three waves of 128 x 256: 128 x 128, for each thousand along K, and
# 128 x 256.
_FEW_WAVES, _JOIN_DEEP_US, _JOIN_WIDE_US = 3, 4.0, 18.0


def specialised_tiles(architecture: str) -> SpecialisedTiles:
    """Return the tables of `Machine.architecture`; Hopper's if no kernel is warp-specialised, for questions about
    it."""
    return SPECIALISED_TILES.get(architecture, HOPPER)


def gemm_us(problem: Problem, config: FusedConfig, machine: Machine) -> float:
    """Return the microseconds of one rank's product."""
    m, n, k = problem.gemm
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    tiles = gemm_tiles(problem, config)
    if not tiles:
        return 0.0
    steps = -(-k // bk)
    if machine.name == INTERPRETER:
        elements = bm * bk + bk * bn
        return tiles * (4000.0 + steps * (1500.0 + elements * 0.02 + bm * bn * bk * 2e-5))
    programs = programs_of(config, machine.num_programs)
    whole_us = tile_us(problem, config, machine)
    cut = cut_tiles(problem, config, programs)
    waves = -(-(tiles - cut) // programs)
    if bm == 64 and config.warp_specialised and config.algorithm == "one_shot":
        waves -= _SOONER * (1 - ((tiles - 1) % programs + 1) / programs)
    elif _clocks_rise(problem, config):
        waves -= _FASTER_ALONE * (1 - ((tiles - 1) % programs + 1) / programs) ** 1.5
    compute = waves * whole_us
    pair = problem.op == MATMUL_GATHER and problem.world_size == 2  # which was measured in more shapes
    shared, sharers = shared_tiles(problem, config, programs)
    if shared:
        join = _JOIN_US[problem.op] if tiles > programs else _JOIN_ALONE_US * bm * bn / (128 * 256)
        if problem.op == ALL_REDUCE and tiles > programs and tiles * bm * bn < _FEW_WAVES * programs * 128 * 256:
            join += _JOIN_WIDE_US if bn == 256 else _JOIN_DEEP_US * max(0.0, k - 2560) / 1e3
        compute = (tiles // programs + shared / sharers) * whole_us + join
        if pair and bn == 128 and tiles > programs:
            part = _SHARED_LEAST + _SHARED_SLOPE * max(0.0, shared / programs - _SHARED_FROM)
            compute = (tiles // programs + min(part, _SHARED_MOST)) * whole_us + _SHARED_JOIN_US
        elif pair and bn == 256 and shared < _FEW_SHARED * programs < tiles:
            compute = (tiles // programs + 1) * whole_us
        elif pair and bn == 256 and -(-m // bm) < _FEW_BLOCKS:
            compute += _JOIN_FEW_BLOCKS * whole_us - join
        if tiles < programs:
            compute += _BUSY_ALONE * shared / programs * whole_us
    elif cut:
        # each part of a tile is stored, and the last one loads the others
        store_us = bm * bn * 4 / _PARTS_GBS / 1e3
        units = -(-cut * config.splits // programs)
        compute += units * (whole_us / config.splits + store_us) + (config.splits - 1) * store_us
    lamport = config.lamport
    if lamport and bn == 64 and bm >= 64 and tiles > programs:
        compute *= _ANEW
    # most of what is read again comes from L2, all of it where row blocks are multiplied at once
    again = 1 + _READ_AGAIN * (-(-m // bm) - 1) if lamport and not config.warp_specialised else 1
    if _by_ranks(problem, config) and k * n * problem.itemsize > L2_BYTES:
        again = min(problem.world_size, -(-m // bm))
    stream = (m * k + k * n * again) * problem.itemsize / (machine.hbm_gbs * 1e3)
    # a program alone cannot draw its share of HBM when few of them run
    enough = _EXCHANGE_PROGRAMS * programs / machine.num_programs if lamport else _ENOUGH * programs
    stream *= max(1.0, enough / max(1, min(max(tiles, sharers), programs)))
    warmth = log(min(max(compute, _COOLEST_US), _WARMEST_US) / _MEANT_US)
    compute = max(compute * (1 + _WARMED * warmth), _from_l2_us(problem, config, machine, tiles))
    return both_us(compute, stream)


def _by_ranks(problem: Problem, config: FusedConfig) -> bool:
    """Return whether one rank's rows are multiplied after the other's, which reads B for each of them: as they come, or
    the peer's first."""
    if problem.op == GATHER_MATMUL:
        return problem.form == "rows" and not config.lamport
    return problem.op == REDUCE_SCATTER and config.lamport and config.warp_specialised


def _clocks_rise(problem: Problem, config: FusedConfig) -> bool:
    """Return whether a last wave of fewer tiles is known to be faster: by measurement, of warp-specialised gathers and
    reduce-scatters between two ranks."""
    if not config.warp_specialised or config.algorithm != "overlapped" or problem.weights is not PLAIN:
        return False
    return problem.world_size == 2 and problem.op in (REDUCE_SCATTER, MATMUL_GATHER)


def _from_l2_us(problem: Problem, config: FusedConfig, machine: Machine, tiles: int) -> float:
    """Return the microseconds in which `tiles` tiles load their operands from L2, in whole lines.

    Where rows begin within sectors, a step of each takes one line more; within lines, part of one.
    """
    if problem.weights is not PLAIN or not machine.name.startswith("NVIDIA"):
        return 0.0
    lines = max(1, config.depth(problem.itemsize) * problem.itemsize // _LINE_BYTES)
    begins = problem.K * problem.itemsize
    more = 1.0 if begins % _SECTOR_BYTES else _ANOTHER_LINE if begins % _LINE_BYTES else 0.0
    copied = config.lamport and not config.warp_specialised
    rate = (_COPIED_GBS if copied else _L2_GBS) * machine.num_programs / 132 * 1e3
    return tiles * (config.block_m + config.block_n) * problem.gemm[2] * problem.itemsize * (1 + more / lines) / rate


def tile_us(problem: Problem, config: FusedConfig, machine: Machine) -> float:
    """Return the microseconds of one tile's product in one program."""
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    lamport, specialised = config.lamport, specialised_tiles(machine.architecture)
    if problem.itemsize == 4:
        shares = FP32_TILES
    elif config.warp_specialised and (of_codes := specialised.of_codes(problem.weights)):
        shares = of_codes[config.algorithm]
    elif lamport:
        exchanged = specialised.two_shot if config.algorithm == "two_shot" else specialised.pair[problem.itemsize]
        shares = exchanged if config.warp_specialised else EXCHANGED_TILES[problem.itemsize]
    else:
        moved = specialised.copy_gather if problem.op == GATHER_MATMUL else specialised.overlapped
        shares = moved if config.warp_specialised else GPU_TILES
    unknown = 0, min(1.0, bm * bn / max(m * n for m, n, *_ in shares))
    _, share = shares.get((bm, bn, bk, config.num_warps), unknown)
    share *= problem.weights.tile_share
    if not (problem.whole_vectors(problem.K) or lamport) and machine.name.startswith("NVIDIA"):
        share *= _POINTERS[bm * bn < 128 * 256]
    rate = machine.product_tflops(problem.itemsize) * share / machine.num_programs  # TFLOP/s of one program
    return 2.0 * bm * bn * max(problem.gemm[2], config.depth(problem.itemsize)) / (rate * 1e6) + 1.5
