"""Which configurations a plan weighs: tiles that fit the device, for each kernel that may serve the problem."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product

import torch

from ..config import FusedConfig
from ..problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, REDUCE_SCATTER, Problem
from . import tritonblas
from .fp8_model import MOST_ROWS, MULTIPLE, fits
from .machine import INTERPRETER, Machine
from .tile_model import (
    COPY_GATHER_TILES,
    FP8_TILES,
    FP32_TILES,
    GPU_TILES,
    HOPPER_TILES,
    LAMPORT_TILES,
    PAIR_TILES,
    TWO_SHOT_TILES,
    gemm_us,
)
from .torch_ways import TORCH_WAYS
from .waves import cut_tiles, gemm_tiles, programs_of, shared_tiles

# Into how many parts a tile is cut at most that programs share.
_SHARES = 4
# Row blocks, of all owners together, that a round of 132 programs works on: then it reads least of A and B together.
_ROUND_HEIGHT = 16
# With weights in eight bits (`weight_stream.py`); or, where a rank's do not lie as they must, the tile in its place.
FP8_STREAM = FusedConfig(16, 64, 128, num_warps=4, num_stages=4, algorithm="one_shot")
# Of rows that copy engines bring; programs that share tiles are no faster there, by measurement.
COPY_GATHER_CONFIGS = tuple(
    FusedConfig(m, n, k, num_warps=w, num_stages=s, warp_specialised=True, algorithm="copy_gather")
    for (m, n, k, w), (s, _) in COPY_GATHER_TILES.items()
)


def candidates(problem: Problem, machine: Machine) -> list[FusedConfig]:
    """What a plan weighs."""
    if problem.fp8:
        return _in_eight_bits(problem, machine)
    if machine.name == INTERPRETER:
        tiles = tuple((m, n, k, 4, 1) for m, n, k in product(*(_powers(size) for size in problem.gemm)))
        few_rows, comm = tiles, 1
    else:
        tiles = tuple(tritonblas.tiles(problem, machine.name)) or fitting(problem.dtype.itemsize, machine, few=False)
        few_rows, comm = fitting(problem.dtype.itemsize, machine, few=True), FusedConfig.comm_programs
        few_rows = tuple(tile for tile in few_rows if tile[1] >= 64 or _narrow(problem, *tile[:2], machine))
        if problem.op == GATHER_MATMUL and problem.part_rows <= 128:
            comm *= 2  # little to move, and soon needed
    shots = ("one_shot", "two_shot") if problem.op == ALL_REDUCE else ("one_shot",)
    found = list(_tiled(few_rows, shots, tiles, comm))
    if problem.op == GATHER_MATMUL:
        splits = [_splits(problem, config, machine) for config in found]
        found = [replace(each, splits=s) if s > 1 else each for each, s in zip(found, splits, strict=True)]
    bits16 = problem.dtype.itemsize == 2
    width = problem.N // 2 if problem.gated else problem.N  # of out
    whole = problem.whole_vectors(problem.K) and problem.whole_vectors(width)  # else portable kernels would serve
    if machine.warp_specialised and problem.op != GATHER_MATMUL and bits16 and whole:
        found = [each for each in found if each.algorithm != "overlapped" or each.block_m < min(HOPPER_TILES)[0]]
        found += _hopper(problem, machine)
        found += _specialised_lamport(problem)
    if machine.warp_specialised and problem.op == GATHER_MATMUL and problem.form == "rows" and bits16 and whole:
        found += COPY_GATHER_CONFIGS
    if machine.name.startswith("NVIDIA") and bits16:  # where their times are known
        found += _unfused(problem.op, problem.world_size)
    return found


def _narrow(problem: Problem, block_m: int, block_n: int, machine: Machine) -> bool:
    """Whether tiles of so few columns may serve, by measurement: of an all-reduce, whole ones, one for a program.

    Lower ones come folded, and the tensor cores would take them from registers, where they are the rows.
    """
    whole = problem.M % block_m == 0 and problem.M // block_m * -(-problem.N // block_n) <= machine.num_programs
    return problem.op == ALL_REDUCE and problem.world_size <= 2 and whole and machine.name.startswith("NVIDIA")


def _in_eight_bits(problem: Problem, machine: Machine) -> list[FusedConfig]:
    """With B in eight bits: a stream of few rows as they are, else rows that are rounded, too."""
    unfused = _unfused(problem.op, problem.world_size)
    if problem.op == GATHER_MATMUL:  # rows travel as they are, and are rounded where they are multiplied
        return list(unfused)
    found = [each for each in unfused if each.algorithm == "sequential"]
    if not machine.warp_specialised or problem.dtype != torch.bfloat16:
        return found
    if problem.M <= MOST_ROWS:
        streams = problem.op == ALL_REDUCE and fits(problem.M, problem.K)
        return [FP8_STREAM] if streams else found
    if problem.K % MULTIPLE or problem.N % MULTIPLE:
        return found
    few = tuple((*tile, stages) for tile, (stages, _) in FP8_TILES.items())
    shots = ("one_shot", "two_shot") if problem.op == ALL_REDUCE else ("one_shot",)
    found += [*_tiled(few, shots, (), FusedConfig.comm_programs), *_hopper(problem, machine)]
    return [*found, *_specialised_lamport(problem)]


def _specialised_lamport(problem: Problem) -> tuple[FusedConfig, ...]:
    """Where words that specialised warps move may be faster than all else: between two ranks in one shot."""
    if problem.op == REDUCE_SCATTER and problem.form == "rows" and problem.world_size == 2 and not problem.fp8:
        return _lamport_configs("one_shot", False) if problem.M > 64 else ()
    if problem.op != ALL_REDUCE or problem.world_size < 2:
        return ()
    if problem.world_size == 2:
        return _lamport_configs("one_shot", problem.fp8) if problem.M > 64 else ()
    return _lamport_configs("two_shot", problem.fp8) if problem.M > 128 else ()


def _hopper(problem: Problem, machine: Machine) -> list[FusedConfig]:
    # owners take turns, so a round of programs works on this many row blocks of each
    group_m = FusedConfig.group_m if problem.op == MATMUL_GATHER else max(1, _ROUND_HEIGHT // problem.world_size)
    programs = machine.num_programs
    return [x for x in _hopper_configs(group_m) if x.splits == 1 or shared_tiles(problem, x, programs)[0]]


# Made once, as those below: to make them anew would take a plan longer than to weigh them.
@lru_cache(maxsize=256)
def _unfused(op: str, world_size: int) -> tuple[FusedConfig, ...]:
    found = tuple(FusedConfig(algorithm=algorithm) for algorithm in TORCH_WAYS)
    if op == GATHER_MATMUL and world_size > 2:
        found += (FusedConfig(algorithm="copy_gather", ranks_together=world_size - 1),)
    return found


@lru_cache(maxsize=256)
def fitting(itemsize: int, machine: Machine, few: bool) -> tuple[tuple[int, int, int, int, int], ...]:
    """(block_m, block_n, block_k, warps, stages) of tiles, for few rows or many, for which shared memory has room."""
    tiles = FP32_TILES if itemsize == 4 else LAMPORT_TILES if few else GPU_TILES
    fits = {tile: machine.stages((tile[0] + tile[1]) * tile[2] * itemsize) for tile in tiles}
    return tuple((*tile, min(stages, fits[tile])) for tile, (stages, _) in tiles.items() if fits[tile] > 1)


@lru_cache(maxsize=256)
def _tiled(few_rows: tuple, shots: tuple, tiles: tuple, comm_programs: int) -> tuple[FusedConfig, ...]:
    kinds = [*product(few_rows, shots), *((tile, "overlapped") for tile in tiles)]
    return tuple(
        FusedConfig(m, n, k, num_warps=w, num_stages=s, algorithm=algorithm, comm_programs=comm_programs)
        for (m, n, k, w, s), algorithm in kinds
    )


@lru_cache(maxsize=256)
def _hopper_configs(group_m: int) -> tuple[FusedConfig, ...]:
    kinds = product(HOPPER_TILES.items(), (1, _SHARES))
    return tuple(
        FusedConfig(m, n, k, group_m, w, s, splits=splits, warp_specialised=True)
        for ((m, n, k, w), (s, _)), splits in kinds
    )


@lru_cache(maxsize=4)
def _lamport_configs(algorithm: str, of_fp8: bool) -> tuple[FusedConfig, ...]:
    tiles = PAIR_TILES[of_fp8] if algorithm == "one_shot" else TWO_SHOT_TILES
    return tuple(
        FusedConfig(m, n, k, num_warps=w, num_stages=s, warp_specialised=True, algorithm=algorithm)
        for (m, n, k, w), (s, _) in tiles.items()
    )


def _splits(problem: Problem, config: FusedConfig, machine: Machine) -> int:
    """2 where the last tiles of an all_gather_matmul are better cut in two, so that fewer programs are without work.

    Of a single round of tiles all are cut: while some units move data, others multiply. By measurement: more parts,
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


def _powers(size: int) -> list[int]:
    """The powers of two worth trying for a dimension in the interpreter, where few large blocks are best."""
    whole = min(1024, max(16, 1 << max(0, size - 1).bit_length()))
    return [block for block in (whole, whole // 2, whole // 4) if 16 <= block <= 1024] or [1024]
