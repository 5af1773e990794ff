"""The configurations that a plan weighs for each way (`ways.py`): tiles that fit the device.

More candidates would not make a better plan, only a slower one: a first call waits for it. So each way has a handful of
tiles whose rates are known (`tile_model.py`), in the algorithms that the way knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import gcd

from ..config import FusedConfig
from ..problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, Problem
from . import interpreted, tritonblas
from .machine import INTERPRETER, Machine
from .tile_model import (
    FP8_TILES,
    FP32_TILES,
    GPU_TILES,
    LAMPORT_TILES,
    gemm_us,
    specialised_tiles,
)
from .waves import cut_tiles, gemm_tiles, programs_of, shared_tiles

# Into how many parts a tile is cut at most that programs share.
_SHARES = 4
# Row blocks, of all owners together, that a wave of 132 programs works on: then it reads least of A and B together.
_WAVE_HEIGHT = 16
# With weights in eight bits (`weight_stream.py`); or, where a rank's do not lie as they must, the tile in its place.
FP8_STREAM = FusedConfig(16, 64, 128, num_warps=4, num_stages=4, algorithm="one_shot")


def lamport(problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
    """Tiles of few rows, in one shot and, of an all-reduce, in two."""
    shots = ("one_shot", "two_shot") if problem.op == ALL_REDUCE else ("one_shot",)
    if problem.fp8:
        tiles = tuple((*tile, stages) for tile, (stages, _) in FP8_TILES.items())
    elif machine.name == INTERPRETER:
        tiles = interpreted.tiles(problem)
    else:
        tiles = fitting(problem.dtype.itemsize, machine, few=True)
        tiles = tuple(tile for tile in tiles if tile[1] >= 64 or _narrow(problem, *tile[:2], machine))
    return _tiled(tiles, shots, FusedConfig.comm_programs if problem.fp8 else _movers(problem, machine))


def overlapped(problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
    """Portable tiles; where there are warp-specialised kernels, only those lower than theirs."""
    if machine.name == INTERPRETER:
        tiles = interpreted.tiles(problem)
    else:
        tiles = tuple(tritonblas.tiles(problem, machine.name)) or fitting(problem.dtype.itemsize, machine, few=False)
    found = _tiled(tiles, ("overlapped",), _movers(problem, machine))
    if problem.op == GATHER_MATMUL and not problem.invariant:  # which no cut of few tiles would be
        splits = [_splits(problem, config, machine) for config in found]
        return [replace(each, splits=s) if s > 1 else each for each, s in zip(found, splits, strict=True)]
    aligned = problem.op != GATHER_MATMUL and problem.whole_vectors(problem.K) and problem.whole_vectors(problem.N)
    if machine.warp_specialised and problem.dtype.itemsize == 2 and aligned:
        return [each for each in found if each.block_m < min(specialised_tiles(machine.architecture).overlapped)[0]]
    return found


def _movers(problem: Problem, machine: Machine) -> int:
    """How many programs first move what an `all_gather_matmul` gathers."""
    if machine.name == INTERPRETER:
        return 1
    few = problem.op == GATHER_MATMUL and problem.part_rows <= 128  # little to move, and soon needed
    return FusedConfig.comm_programs * (2 if few else 1)


def _narrow(problem: Problem, block_m: int, block_n: int, machine: Machine) -> bool:
    """Whether tiles of so few columns may serve, by measurement: of an all-reduce, whole ones, one for a program.

    Lower ones come folded, and the tensor cores would take them from registers, where they are the rows.
    """
    whole = problem.M % block_m == 0 and problem.M // block_m * -(-problem.N // block_n) <= machine.num_programs
    return problem.op == ALL_REDUCE and problem.world_size <= 2 and whole and machine.name.startswith("NVIDIA")


def specialised_lamport(problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
    """Tiles that specialised warps send: between two ranks in one shot, else in two."""
    algorithm = "one_shot" if problem.world_size == 2 else "two_shot"
    return _specialised(machine.architecture, algorithm, problem.fp8)


def brought(problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
    """Tiles of rows that copy engines bring: no higher than a rank's rows."""
    return [each for each in copy_gather_configs(machine) if each.block_m <= problem.part_rows]


def tree(problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
    """The tiles of few rows, of blocks of which leaves are multiples; less deep ones where they must be."""
    if machine.name == INTERPRETER:
        tiles = interpreted.tree_tiles(problem)
    else:
        tiles = tree_tiles(problem.tree.depth, problem.dtype.itemsize, machine)
        tiles = tuple(tile for tile in tiles if tile[1] >= 64 or _narrow(problem, *tile[:2], machine))
    one_shot = _tiled(tiles, ("one_shot",), FusedConfig.comm_programs)
    # each rank owns some rows then, and sends sums to all
    twice = problem.op == ALL_REDUCE and problem.world_size > 1 and problem.M >= problem.world_size**2
    return (*one_shot, *_tiled(tiles, ("two_shot",), FusedConfig.comm_programs)) if twice else one_shot


def tree_stand_in(problem: Problem, machine: Machine) -> FusedConfig:
    """The portable tile that is multiplied in place of those of specialised warps."""
    return min(tree(problem, machine), key=lambda each: (abs(each.block_m - 64), each.block_n))


@lru_cache(maxsize=256)
def tree_tiles(depth: int, itemsize: int, machine: Machine) -> tuple[tuple[int, int, int, int, int], ...]:
    """Tiles of few rows of whose blocks along K `depth` is a multiple, less deep than others where they must be.

    Beside the operands on their way, shared memory has room for the sum of a leaf, which is stored meanwhile.
    """
    found: dict[tuple[int, int, int, int], int] = {}
    for m, n, k, warps, stages in fitting(itemsize, machine, few=True):
        shallow = gcd(k, depth)
        beside = replace(machine, shared_bytes=machine.shared_bytes - itemsize * m * n)
        fits = min(8, stages * k // shallow, beside.stages((m + n) * shallow * itemsize))
        if fits > 1:
            found.setdefault((m, n, shallow, warps), fits)
    return tuple((*tile, stages) for tile, stages in found.items())


def streamed(problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
    """The stream of weights in eight bits, whose tiles its kernel chooses."""
    return [FP8_STREAM]


def sequential(problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
    """Torch's product, and a collective."""
    return [FusedConfig(algorithm="sequential")]


def copied(problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
    """Torch's product of one rank's rows after the other's, or of all others' together."""
    apart = FusedConfig(algorithm="copy_gather")
    return [apart, replace(apart, ranks_together=problem.world_size - 1)] if problem.world_size > 2 else [apart]


def hopper(problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
    """Tiles that specialised warps push, whole or, where they fill no wave, shared along K."""
    # owners take turns, so a wave of programs works on this many row blocks of each
    group_m = FusedConfig.group_m if problem.op == MATMUL_GATHER else max(1, _WAVE_HEIGHT // problem.world_size)
    programs = machine.num_programs
    return [x for x in _pushed(machine.architecture, group_m) if x.splits == 1 or shared_tiles(problem, x, programs)[0]]


@lru_cache(maxsize=256)
def fitting(itemsize: int, machine: Machine, few: bool) -> tuple[tuple[int, int, int, int, int], ...]:
    """(block_m, block_n, block_k, warps, stages) of tiles, for few rows or many, for which shared memory has room."""
    tiles = FP32_TILES if itemsize == 4 else LAMPORT_TILES if few else GPU_TILES
    fits = {tile: machine.stages((tile[0] + tile[1]) * tile[2] * itemsize) for tile in tiles}
    return tuple((*tile, min(stages, fits[tile])) for tile, (stages, _) in tiles.items() if fits[tile] > 1)


# Made once, as those below: to make them anew would take a plan longer than to weigh them.
@lru_cache(maxsize=256)
def _tiled(tiles: tuple, algorithms: tuple[str, ...], comm_programs: int) -> tuple[FusedConfig, ...]:
    return tuple(
        FusedConfig(m, n, k, num_warps=w, num_stages=s, algorithm=algorithm, comm_programs=comm_programs)
        for (m, n, k, w, s), algorithm in product(tiles, algorithms)
    )


@lru_cache(maxsize=256)
def _pushed(architecture: str, group_m: int) -> tuple[FusedConfig, ...]:
    kinds = product(specialised_tiles(architecture).overlapped.items(), (1, _SHARES))
    return tuple(
        FusedConfig(m, n, k, group_m, w, s, splits=splits, warp_specialised=True)
        for ((m, n, k, w), (s, _)), splits in kinds
    )


def copy_gather_configs(machine: Machine) -> tuple[FusedConfig, ...]:
    """Configurations for rows that copy engines bring. By measurement, sharing tiles makes them no faster."""
    return _specialised(machine.architecture, "copy_gather", False)


@lru_cache(maxsize=16)
def _specialised(architecture: str, kind: str, fp8: bool) -> tuple[FusedConfig, ...]:
    known = specialised_tiles(architecture)
    tables = {"one_shot": known.of_pair(fp8), "two_shot": known.two_shot, "copy_gather": known.copy_gather}
    return tuple(
        FusedConfig(m, n, k, num_warps=w, num_stages=s, warp_specialised=True, algorithm=kind)
        for (m, n, k, w), (s, _) in tables[kind].items()
    )


def _splits(problem: Problem, config: FusedConfig, machine: Machine) -> int:
    """2 where the last tiles of an all_gather_matmul are better cut in two, so that fewer programs are without work.

    Of a single wave of tiles all are cut: while some units move data, others multiply. By measurement: more parts,
    parts of larger tiles, and parts in reductions cost more to add up than they save.
    """
    if config.algorithm != "overlapped" or machine.name == INTERPRETER:
        return 1
    if config.block_m * config.block_n > 1 << 14 or problem.gemm[2] < 16 * config.block_k:
        return 1
    if not cut_tiles(problem, replace(config, splits=2), programs_of(config, machine.num_programs)):
        return 1
    if gemm_tiles(problem, config) <= programs_of(config, machine.num_programs):
        return 2
    return min((1, 2), key=lambda splits: gemm_us(problem, replace(config, splits=splits), machine))
