"""Configurations that several ways share: tiles that fit the device.

More candidates would not make a better plan, only a slower one: a first call waits for it. So each way has a handful of
tiles whose rates are known (`tile_model.py`), in the algorithms that the way knows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import gcd

from iris.machines import INTERPRETER, Machine

from ..config import FusedConfig
from ..problem import ALL_REDUCE, GATHER_MATMUL, Problem
from .needs import PLAIN, WeightFormat
from .tile_model import FP32_TILES, GPU_TILES, LAMPORT_TILES, gemm_us, specialised_tiles
from .waves import cut_tiles, gemm_tiles, programs_of

# Into how many parts a tile is cut at most that programs share.
_SHARES = 4


def movers(problem: Problem, machine: Machine) -> int:
    """Return how many programs first move what an `all_gather_matmul` gathers."""
    if machine.name == INTERPRETER:
        return 1
    few = problem.op == GATHER_MATMUL and problem.part_rows <= 128  # little to move, and soon needed
    return FusedConfig.comm_programs * (2 if few else 1)


def narrow(problem: Problem, block_m: int, block_n: int, machine: Machine) -> bool:
    """Return whether tiles with so few columns may serve, by measurement: whole ones of an all-reduce, one for each
    program.

    Lower tiles come folded, and the tensor cores would read them from registers, where they are the rows.
    """
    one_each = problem.M % block_m == 0 and problem.M // block_m * -(-problem.N // block_n) <= machine.num_programs
    return problem.op == ALL_REDUCE and problem.world_size <= 2 and one_each and machine.name.startswith("NVIDIA")


@lru_cache(maxsize=256)
def tree_tiles(depth: int, itemsize: int, machine: Machine) -> tuple[tuple[int, int, int, int, int], ...]:
    """Return the tiles of few rows whose blocks along K divide `depth`, less deep than other tiles where they must be.

    Besides the operands in flight, shared memory has room for the sum of a leaf, which is stored meanwhile.
    """
    stages_of: dict[tuple[int, int, int, int], int] = {}
    for m, n, k, warps, stages in fitting(itemsize, machine, few=True):
        shallow = gcd(k, depth)
        room = replace(machine, shared_bytes=machine.shared_bytes - itemsize * m * n)
        most = min(8, stages * k // shallow, room.stages((m + n) * shallow * itemsize))
        if most > 1:
            stages_of.setdefault((m, n, shallow, warps), most)
    return tuple((*tile, stages) for tile, stages in stages_of.items())


@lru_cache(maxsize=256)
def fitting(itemsize: int, machine: Machine, few: bool) -> tuple[tuple[int, int, int, int, int], ...]:
    """Return (block_m, block_n, block_k, warps, stages) of the tiles, for few rows or many, that fit in shared
    memory."""
    tiles = FP32_TILES if itemsize == 4 else LAMPORT_TILES if few else GPU_TILES
    most = {tile: machine.stages((tile[0] + tile[1]) * tile[2] * itemsize) for tile in tiles}
    return tuple((*tile, min(stages, most[tile])) for tile, (stages, _) in tiles.items() if most[tile] > 1)


# Made once, as those below: to make them anew would take a plan longer than to compare them.
@lru_cache(maxsize=256)
def tiled(kernel: str, tiles: tuple, algorithms: tuple[str, ...], comm_programs: int) -> tuple[FusedConfig, ...]:
    return tuple(
        FusedConfig(m, n, k, num_warps=w, num_stages=s, algorithm=algorithm, comm_programs=comm_programs, kernel=kernel)
        for (m, n, k, w, s), algorithm in product(tiles, algorithms)
    )


@lru_cache(maxsize=256)
def pushed(kernel: str, architecture: str, group_m: int, weights: WeightFormat = PLAIN) -> tuple[FusedConfig, ...]:
    known = specialised_tiles(architecture)
    of_codes = known.of_codes(weights)
    kinds = product((of_codes["overlapped"] if of_codes else known.overlapped).items(), (1, _SHARES))
    return tuple(
        FusedConfig(m, n, k, group_m, w, s, splits=splits, warp_specialised=True, kernel=kernel)
        for ((m, n, k, w), (s, _)), splits in kinds
    )


def copy_gather_configs(machine: Machine, weights: WeightFormat = PLAIN) -> tuple[FusedConfig, ...]:
    """Return configurations for rows that copy engines bring. By measurement, sharing tiles makes them no faster."""
    return specialised("hopper.gather_matmul", machine.architecture, "copy_gather", 2, weights)


@lru_cache(maxsize=64)
def specialised(
    kernel: str, architecture: str, kind: str, itemsize: int, weights: WeightFormat = PLAIN
) -> tuple[FusedConfig, ...]:  # fmt: skip
    known = specialised_tiles(architecture)
    tables = {"one_shot": known.pair[itemsize], "two_shot": known.two_shot, "copy_gather": known.copy_gather}
    tables = known.of_codes(weights) or tables
    return tuple(
        FusedConfig(m, n, k, num_warps=w, num_stages=s, warp_specialised=True, algorithm=kind, kernel=kernel)
        for (m, n, k, w), (s, _) in tables[kind].items()
    )


def splits(problem: Problem, config: FusedConfig, machine: Machine) -> int:
    """Return 2 if the last tiles of an all_gather_matmul are better cut in two, so that fewer programs are idle, else
    1.

    In a single wave, all tiles are cut: while some units move data, others multiply. By measurement, more parts, parts
    of larger tiles and parts in reductions cost more to add up than they save.
    """
    if config.algorithm != "overlapped" or machine.name == INTERPRETER:
        return 1
    if config.block_m * config.block_n > 1 << 14 or problem.gemm[2] < 16 * config.block_k:
        return 1
    if not cut_tiles(problem, replace(config, splits=2), programs_of(config, machine.num_programs)):
        return 1
    if gemm_tiles(problem, config) <= programs_of(config, machine.num_programs):
        return 2
    return min((1, 2), key=lambda parts: gemm_us(problem, replace(config, splits=parts), machine))
