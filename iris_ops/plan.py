"""Which configuration serves a problem: arithmetic on shapes, dtype, world size and device rates, nothing else.

So it is the same on every rank without talking, and it can explain itself. Candidates are whole configurations, and
the one that should take least time by the model of `predict.py` is chosen.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product

import torch

from . import tritonblas
from .config import FusedConfig
from .machine import INTERPRETER, Machine
from .predict import EXCHANGE_TILES, FP32_TILES, GPU_TILES, ROLES_TILES, gemm_us, predict, programs_of, tile_us
from .problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, REDUCE_SCATTER, Problem, owned_part
from .rounds import cut_tiles, gemm_tiles, shared_tiles
from .unfused import UNFUSED


def plan(problem: Problem, machine: Machine) -> FusedConfig:
    """The fastest candidate by the model, with its prediction and the reasons."""
    return _plan(problem, machine)


@lru_cache(maxsize=4096)
def _plan(problem: Problem, machine: Machine) -> FusedConfig:
    reasons = [
        f"{problem.op} {problem.form} M={problem.M} N={problem.N} K={problem.K} {problem.dtype} on {machine.name}"
    ]
    reasons += tritonblas.reasons(problem, machine.name)
    scored = []
    for candidate in _candidates(problem, machine):
        objection = _objection(problem, candidate)
        label = _label(problem, candidate)
        if objection:
            reasons.append(f"rejected {label}: {objection}")
            continue
        if stagger_us := _stagger_us(problem, candidate, machine):
            candidate = replace(candidate, stagger_us=stagger_us)
        prediction = predict(problem, candidate, machine)
        reasons.append(
            f"{label}: product {prediction.gemm_us:.1f} us, link {prediction.link_us:.1f} us, "
            f"together {prediction.total_us:.1f} us"
        )
        handicap = _HANDICAPS.get(candidate.algorithm, 1.0)
        scored.append((prediction.total_us * handicap, len(scored), candidate, prediction))
    *_, chosen, prediction = min(scored)
    reasons.append(f"chosen {_label(problem, chosen)}")
    if problem.op in (ALL_REDUCE, MATMUL_GATHER) and chosen.algorithm == "overlapped":
        reasons.append("peers write out directly when it lies on the heap; otherwise it is staged and copied once more")
    return replace(chosen, prediction=prediction, reasons=tuple(reasons))


# Our kernel, one launch, is taken unless several are this much faster in CUDA graphs, where no host time counts.
# `shard_sums` needs no lead, for its prediction errs by some 3 % either way.
_HANDICAPS = {"sequential": 1.02, "copy_engines": 1.01}


# Into how many parts a tile is cut at most that programs share.
_SHARES = 4
# Row blocks, of all owners together, that a round of 132 programs works on: then it reads least of A and B together.
_ROUND_HEIGHT = 16


def _label(problem: Problem, config: FusedConfig) -> str:
    if config.algorithm in UNFUSED:
        return f"{config.algorithm}, torch's product"
    label = f"{config.block_m}x{config.block_n}x{config.block_k} {config.algorithm}"
    if config.algorithm == "overlapped" and problem.op == ALL_REDUCE:
        by_cols = owned_part(problem, config)[2]
        label += f", each rank sums {'columns' if by_cols else 'rows'}"
    if config.warp_roles:
        label += ", warps with roles" + (", programs share first tiles" if config.splits > 1 else "")
    return label


def _candidates(problem: Problem, machine: Machine) -> list[FusedConfig]:
    if machine.name == INTERPRETER:
        tiles = [(m, n, k, 4, 1) for m, n, k in product(*(_powers(size) for size in problem.gemm))]
    else:
        ours = FP32_TILES if problem.dtype == torch.float32 else GPU_TILES
        tiles = tritonblas.tiles(problem, machine.name) or list(ours)
    exchange = FP32_TILES if problem.dtype == torch.float32 else EXCHANGE_TILES
    few_rows = tiles if machine.name == INTERPRETER else list(exchange)
    shots = ("one_shot", "two_shot") if problem.op == ALL_REDUCE else ("one_shot",)
    kinds = [*product(few_rows, shots), *((tile, "overlapped") for tile in tiles)]
    comm = 1 if machine.name == INTERPRETER else FusedConfig.comm_programs
    found = [
        FusedConfig(m, n, k, num_warps=w, num_stages=s, algorithm=algorithm, comm_programs=comm)
        for (m, n, k, w, s), algorithm in kinds
    ]
    if problem.op == GATHER_MATMUL and problem.part_rows <= 128 and comm > 1:
        found = [replace(config, comm_programs=2 * comm) for config in found]  # little to move, and soon needed
    if problem.op == GATHER_MATMUL:
        found = [replace(config, splits=_splits(problem, config, machine)) for config in found]
    bits16 = problem.dtype.itemsize == 2
    whole = problem.whole_vectors(problem.K) and problem.whole_vectors(problem.N)  # else portable kernels would serve
    if machine.warp_roles and problem.op != GATHER_MATMUL and bits16 and whole:
        found = [each for each in found if each.algorithm != "overlapped" or each.block_m < min(ROLES_TILES)[0]]
        # owners take turns, so a round of programs works on this many row blocks of each
        group_m = FusedConfig.group_m if problem.op == MATMUL_GATHER else max(1, _ROUND_HEIGHT // problem.world_size)
        for (m, n, k, w, s), splits in product(ROLES_TILES, (1, _SHARES)):
            config = FusedConfig(m, n, k, group_m, w, s, splits=splits, warp_roles=True)
            if splits == 1 or shared_tiles(problem, config, machine.num_programs)[0]:
                found.append(config)
    if machine.name.startswith("NVIDIA") and bits16:  # where their times are known
        found += [FusedConfig(algorithm=algorithm) for algorithm in UNFUSED]
    return found


def _splits(problem: Problem, config: FusedConfig, machine: Machine) -> int:
    """2 where the last tiles of an all_gather_matmul are better cut in two, so that fewer programs are without work.

    Of a single round of tiles all are cut: while some units move data, others multiply. By measurement: more parts,
    parts of larger tiles, and parts in reductions cost more to add up than they save.
    """
    if config.algorithm != "overlapped" or machine.name == INTERPRETER:
        return 1
    if not cut_tiles(problem, replace(config, splits=2), programs_of(config, machine)):
        return 1
    if config.block_m * config.block_n > 1 << 14 or problem.gemm[2] < 16 * config.block_k:
        return 1
    if gemm_tiles(problem, config) <= programs_of(config, machine):
        return 2
    return min((1, 2), key=lambda splits: gemm_us(problem, replace(config, splits=splits), machine))


def _powers(size: int) -> list[int]:
    """The powers of two worth trying for a dimension in the interpreter, where few large blocks are best."""
    whole = min(1024, max(16, 1 << max(0, size - 1).bit_length()))
    return [block for block in (whole, whole // 2, whole // 4) if 16 <= block <= 1024] or [1024]


def _objection(problem: Problem, config: FusedConfig) -> str | None:
    m, n, _ = problem.gemm
    if config.algorithm in UNFUSED:
        if problem.world_size == 1:
            return "one rank: no collective to follow"
        few = "few rows: a stream of weights needs no library" if m < 128 else None
        return few or UNFUSED[config.algorithm].objection(problem)
    if config.block_m * config.block_n > 1 << 19 or max(config.block_m, config.block_n) * config.block_k > 1 << 19:
        return "a block has more than half a million elements"
    largest = problem.M * problem.K << 1 if problem.op == GATHER_MATMUL else problem.M * problem.N
    if config.algorithm != "overlapped" and largest > 1 << 22:
        return "nothing would hide the exchange of so large a result"
    return None


def _stagger_us(problem: Problem, config: FusedConfig, machine: Machine) -> int:
    """Over what time the programs of an op that pushes tiles start, or, with roles, end what they share first.

    Best is, by measurement, about the time that all of them take to push a tile at once; a third more where tiles go to
    everyone. With more than a tile's product the last would push with the first again. Programs that have one tile each
    gain nothing.
    """
    programs = programs_of(config, machine)
    if problem.op == GATHER_MATMUL or config.algorithm != "overlapped":
        return 0
    if config.warp_roles and (problem.op == REDUCE_SCATTER or config.splits == 1 or config.block_n < 256):
        return 0  # what others sum is pushed while the next tile is multiplied; small tiles lose by unequal shares
    if problem.world_size == 1 or machine.name == INTERPRETER:
        return 0
    if gemm_tiles(problem, config) <= programs and not config.warp_roles:
        return 0
    copies = 1.35 * (problem.world_size - 1) if problem.op == MATMUL_GATHER else 1
    wave = copies * programs * config.block_m * config.block_n * problem.dtype.itemsize
    return min(int(wave / (machine.link_gbs * 1e3)), int(tile_us(problem, config, machine)))
