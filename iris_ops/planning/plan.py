"""Which configuration serves a problem: arithmetic on shapes, dtype, world size and device rates, nothing else.

So it is the same on every rank without talking, and it can explain itself. Candidates are whole configurations, and
the one that should take least time by the model of `overlap_model.py` is chosen.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product

from iris.errors import ArgumentError
import torch

from ..config import FusedConfig, Prediction
from ..problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, REDUCE_SCATTER, Problem, owned_part
from . import tritonblas
from .fp8_model import MOST_ROWS, MULTIPLE, fits
from .kernel_names import (
    LAMPORT_FP8,
    LAMPORT_PAIR,
    LAMPORT_PAIR_SCATTER,
    SPECIALISED_LAMPORT,
    STAND_INS,
    WITH_TORCH,
    kernel_for,
)
from .machine import INTERPRETER, Machine
from .overlap_model import predict, push_us
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
    tile_us,
)
from .torch_ways import TORCH_WAYS
from .waves import cut_tiles, gemm_tiles, programs_of, shared_tiles


def plan(problem: Problem, machine: Machine, explained: bool = True, algorithm: str | None = None) -> FusedConfig:
    """The fastest candidate by the model, with its prediction and, if `explained`, the reasons.

    `algorithm`: among those only. Raises `ArgumentError` where none of them serves the problem.
    """
    return _plan(problem, machine, explained, algorithm)


@lru_cache(maxsize=4096)
def _plan(problem: Problem, machine: Machine, explained: bool, algorithm: str | None) -> FusedConfig:
    if why := _converting(problem, machine):
        found = _plan(replace(problem, fp8=False), machine, explained, algorithm)
        return replace(found, reasons=(*found.reasons[:1], why, *found.reasons[1:])) if explained else found
    rejected: list[str] = []
    scored: list[tuple[float, int, FusedConfig, Prediction]] = []
    others: set[str] = set()
    for candidate in _candidates(problem, machine):
        if objection := _objection(problem, candidate):
            if explained:
                rejected.append(f"rejected {_label(problem, candidate)}: {objection}")
            continue
        if algorithm not in (None, candidate.algorithm):
            others.add(candidate.algorithm)
            continue
        if stagger_us := _stagger_us(problem, candidate, machine):
            candidate = replace(candidate, stagger_us=stagger_us)
        prediction = predict(problem, candidate, machine)
        lead, most = (0.0, 0.0) if candidate.warp_specialised else _LEADS.get(candidate.algorithm, (0.0, 0.0))
        weighed = prediction.total_us + min(lead * prediction.total_us, most)
        scored.append((weighed, len(scored), candidate, prediction))
    if not scored:
        raise ArgumentError(
            f"{problem.asked}: algorithm is {algorithm!r}; expected one that serves these sizes, dtype and ranks, "
            f"{', '.join(sorted(others))}"
        )
    scored.sort()
    *_, chosen, prediction = scored[0]
    reasons: tuple[str, ...] = ()
    if explained:
        asked = f"{problem.asked} {problem.form} M={problem.M} N={problem.N} K={problem.K} {problem.dtype}"
        asked += ", B in eight bits" if problem.fp8 else ""
        table = [_row(problem, candidate, times) for _, _, candidate, times in scored]
        named = tritonblas.reasons(problem, machine.name)
        reasons = (f"{asked} on {machine.name}", *named, *table, *rejected, f"chosen {_label(problem, chosen)}")
        if problem.op in (ALL_REDUCE, MATMUL_GATHER) and chosen.algorithm == "overlapped":
            said = "peers write out directly when it lies on the heap; otherwise it is staged and copied once more"
            reasons += (said,)
    return replace(chosen, kernel=kernel_for(problem, chosen), prediction=prediction, reasons=reasons)


def unaligned(problem: Problem, config: FusedConfig) -> FusedConfig:
    """The same for tensors whose rows do not all begin at multiples of 16 bytes: some kernels have a stand-in then."""
    kernel = STAND_INS.get(kernel_for(problem, config), kernel_for(problem, config))
    if kernel == config.kernel:
        return config
    said = f"{kernel} runs in its place, for rows that do not begin at multiples of 16 bytes"
    return replace(config, kernel=kernel, reasons=(*config.reasons, said) if config.reasons else ())


def _row(problem: Problem, config: FusedConfig, times: Prediction) -> str:
    return (
        f"{_label(problem, config):<56} product {times.gemm_us:9.1f} us, link {times.link_us:9.1f} us, "
        f"together {times.total_us:9.1f} us"
    )


# Our kernel, one launch, is taken unless several are this much faster in CUDA graphs, where no host time counts: a part
# of the time, and at most so many microseconds. `shard_sums` needs no lead, for its prediction errs by some 3 % either
# way.
_LEADS = {"sequential": (0.02, 7.0), "copy_gather": (0.01, float("inf"))}


_LEAST_SHARDED = 384  # rows, of all owners together
_DEEPEST_SCATTERED = 8192  # along K, of products whose rows two ranks send each other in words
# Into how many parts a tile is cut at most that programs share.
_SHARES = 4
# Row blocks, of all owners together, that a round of 132 programs works on: then it reads least of A and B together.
_ROUND_HEIGHT = 16


def _label(problem: Problem, config: FusedConfig) -> str:
    """The kernel, and in which form."""
    kernel = kernel_for(problem, config)
    if kernel == LAMPORT_FP8:
        return kernel
    if kernel in WITH_TORCH.values():
        together = f", {config.ranks_together} ranks' rows together" if config.ranks_together > 1 else ""
        return f"{kernel}{together}" + (", in eight bits" if problem.fp8 else "")
    label = f"{kernel} {config.block_m}x{config.block_n}x{config.depth(problem.fp8)}"
    if config.lamport:
        label += f" {config.algorithm}, {config.num_warps} warps"
    elif problem.op == ALL_REDUCE:
        label += f", each rank sums {'columns' if owned_part(problem, config)[2] else 'rows'}"
    label += ", programs share first tiles" if config.warp_specialised and config.splits > 1 else ""
    return label + (", rows rounded to eight bits" if problem.fp8 else "")


def _candidates(problem: Problem, machine: Machine) -> list[FusedConfig]:
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


def _converting(problem: Problem, machine: Machine) -> str | None:
    """Why a B in eight bits is converted in each call and the plan is that of what it becomes, if so.

    Of an all-reduce it never is: there `sequential` serves everywhere.
    """
    if not problem.fp8 or problem.op == ALL_REDUCE:
        return None
    if not machine.warp_specialised or problem.dtype != torch.bfloat16:
        return f"B is converted in each call: {problem.dtype} by eight bits is not multiplied on {machine.name}"
    if problem.form != "rows" or problem.K % MULTIPLE or problem.N % MULTIPLE:
        multiples = f"K and N multiples of {MULTIPLE}"
        return f"B is converted in each call: by rows, {multiples}, it would be multiplied"
    return None


def _in_eight_bits(problem: Problem, machine: Machine) -> list[FusedConfig]:
    """With B in eight bits: a stream of few rows as they are, else rows that are rounded, too."""
    unfused = _unfused(problem.op, problem.world_size)
    if problem.op == GATHER_MATMUL:  # rows travel as they are, and are rounded where they are multiplied
        return list(unfused)
    found = [each for each in unfused if each.algorithm == "sequential" or problem.op == REDUCE_SCATTER]
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


# With weights in eight bits (`weight_stream.py`); or, where a rank's do not lie as they must, the tile in its place.
FP8_STREAM = FusedConfig(16, 64, 128, num_warps=4, num_stages=4, algorithm="one_shot")
# Of rows that copy engines bring; programs that share tiles are no faster there, by measurement.
COPY_GATHER_CONFIGS = tuple(
    FusedConfig(m, n, k, num_warps=w, num_stages=s, warp_specialised=True, algorithm="copy_gather")
    for (m, n, k, w), (s, _) in COPY_GATHER_TILES.items()
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


def _objection(problem: Problem, config: FusedConfig) -> str | None:
    m, n, _ = problem.gemm
    if config.algorithm in TORCH_WAYS:
        if config.warp_specialised and problem.part_rows < config.block_m:
            return f"a rank has {problem.part_rows} rows, fewer than a tile"
        if config.algorithm == "copy_reduce" and problem.M < _LEAST_SHARDED:
            return "few rows: shards of them hide too little for what stands between them"
        if problem.fp8 and (config.algorithm == "sequential" or problem.op == GATHER_MATMUL):  # of few rows, too
            return TORCH_WAYS[config.algorithm].objection(problem)
        if problem.world_size == 1:
            return "one rank: no collective to follow"
        few = "few rows: a stream of weights needs no library" if m <= 64 else None
        return few or TORCH_WAYS[config.algorithm].objection(problem)
    if config.block_m * config.block_n > 1 << 19 or max(config.block_m, config.block_n) * config.block_k > 1 << 19:
        return "a block has more than half a million elements"
    largest = problem.M * problem.K << 1 if problem.op == GATHER_MATMUL else problem.M * problem.N
    # in eight bits a product hides less
    most = 1 << 20 if problem.fp8 else 1 << 22
    kernel = kernel_for(problem, config)
    if kernel in SPECIALISED_LAMPORT:
        most = 1 << 24 if kernel == LAMPORT_PAIR else 1 << 23
    if config.algorithm != "overlapped" and largest > most:
        return "nothing would hide the exchange of so large a result"
    if kernel == LAMPORT_PAIR_SCATTER and problem.K > _DEEPEST_SCATTERED:
        return "a product so deep hides all that follows it"
    return None


def _stagger_us(problem: Problem, config: FusedConfig, machine: Machine) -> int:
    """Over what time the programs of an op that pushes tiles start, or, warp-specialised, end what they share first.

    Best is, by measurement, about the time that all of them take to push a tile at once; a third more where tiles go to
    everyone. With more than a tile's product the last would push with the first again. Programs that have one tile each
    gain nothing. Where two ranks swap words, two fifths of what those of a round take, from three rounds on.
    """
    programs = programs_of(config, machine.num_programs)
    if kernel_for(problem, config) == LAMPORT_PAIR and not problem.fp8:
        rounds = -(-gemm_tiles(problem, config) // programs)
        round_us = problem.link_bytes / (machine.link_gbs * 1e3) / max(1, rounds)
        return round(0.4 * round_us) if rounds > 2 else 0
    if problem.op == GATHER_MATMUL or config.algorithm != "overlapped":
        return 0
    if config.warp_specialised and (problem.op == REDUCE_SCATTER or config.splits == 1 or config.block_n < 256):
        return 0  # what others sum is pushed while the next tile is multiplied; small tiles lose by unequal shares
    if problem.world_size == 1 or machine.name == INTERPRETER:
        return 0
    if gemm_tiles(problem, config) <= programs and not config.warp_specialised:
        return 0
    copies = 1.35 * (problem.world_size - 1) if problem.op == MATMUL_GATHER else 1
    wave_us = copies * push_us(problem, config, machine, programs)
    return min(int(wave_us), int(tile_us(problem, config, machine)))
