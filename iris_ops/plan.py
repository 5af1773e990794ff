"""Which configuration serves a problem: arithmetic on shapes, dtype, world size and device rates, nothing else.

So it is the same on every rank without talking, and it can explain itself. Candidates are whole configurations; each
is scored by an analytical model in the manner of tritonBLAS (https://github.com/ROCm/tritonBLAS): waves of tiles over
multiprocessors for the product, bytes over the link rate for the collective, and fixed latencies for hops.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import log

import torch

from . import tritonblas
from .config import FusedConfig, Prediction
from .problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, REDUCE_SCATTER, Problem, owned_part
from .unfused import UNFUSED


@dataclass(frozen=True)
class Machine:
    """Rates of one device, measured where the name says so."""

    name: str
    num_programs: int
    """Programs that run at once: multiprocessors."""
    tflops: float
    """bf16 products of the whole chip at large tiles."""
    hbm_gbs: float
    link_gbs: float
    """To all peers together, each way."""
    launch_us: float
    hop_us: float
    """Store, signal and poll between two devices."""
    exchange_us: float
    """Data that says itself that it has arrived (`iris/device/exchange.py`): store and poll."""


_MACHINES = {
    # One H200 of an NVLink host, torch 2.11, triton 3.6: benchmarks/results.
    "NVIDIA H200": Machine("NVIDIA H200", 132, 740.0, 4300.0, 380.0, 3.2, 5.5, 1.6),
    # Data sheet values scaled by what the H200 reaches of its own; not measured.
    "NVIDIA H100": Machine("NVIDIA H100", 132, 700.0, 3000.0, 380.0, 3.2, 6.5, 1.6),
    "AMD Instinct MI300X": Machine("AMD Instinct MI300X", 304, 600.0, 4000.0, 300.0, 5.0, 6.0, 3.0),
    "AMD Instinct MI350X": Machine("AMD Instinct MI350X", 256, 1000.0, 6000.0, 350.0, 5.0, 6.0, 3.0),
}
INTERPRETER = "interpreter"


def machine_named(name: str, num_programs: int) -> Machine:
    """The rates of a device by its name; of an unknown one, the H200's scaled by its multiprocessors."""
    if name in _MACHINES:
        return _MACHINES[name]
    if name == INTERPRETER:
        return Machine(INTERPRETER, 1, 0.05, 1.0, 1.0, 2000.0, 5000.0, 5000.0)
    scale = num_programs / 132
    return Machine(name, num_programs, 740.0 * scale, 4300.0 * scale, 380.0, 3.2, 6.5, 1.6)


# (block_m, block_n, block_k, warps, stages): share of the chip's rate that a full wave of such tiles reaches, bf16.
_GPU_TILES = {
    (128, 256, 64, 8, 3): 1.0,
    (128, 128, 64, 8, 4): 0.86,
    (64, 256, 64, 8, 4): 0.72,
    (64, 128, 64, 4, 4): 0.60,
    (64, 64, 128, 4, 4): 0.40,
    (32, 64, 128, 4, 4): 0.22,
    (16, 64, 128, 4, 5): 0.12,
    (16, 128, 128, 4, 4): 0.14,
}
_L2_BYTES = 50 << 20
# For few rows: enough weights under way for the memory's full rate; measured on H200s.
_EXCHANGE_TILES = {
    (16, 64, 256, 4, 4): 0.25,
    (16, 64, 128, 4, 8): 0.25,
    (32, 64, 128, 4, 6): 0.36,
    (64, 64, 128, 8, 6): 0.58,
    (128, 64, 128, 8, 4): 0.76,
    (128, 128, 64, 8, 4): 0.92,
}
_EXCHANGE_PROGRAMS = 60  # so many of them draw that rate
# Float32 blocks are half as deep and wide, so that they fit in shared memory; torch's fp32 has no tensor cores.
_FP32_TILES = {(64, 128, 32, 8, 2): 1.0, (64, 64, 32, 4, 3): 0.9, (32, 64, 32, 4, 3): 0.7, (16, 64, 64, 4, 3): 0.4}
_FP32_SHARE = 0.05


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
        candidate = replace(candidate, stagger_us=_stagger_us(problem, candidate, machine))
        prediction = predict(problem, candidate, machine)
        reasons.append(
            f"{label}: product {prediction.gemm_us:.1f} us, link {prediction.link_us:.1f} us, "
            f"together {prediction.total_us:.1f} us"
        )
        handicap = _HANDICAPS.get(candidate.algorithm, 1.0)
        scored.append((prediction.total_us * handicap, len(scored), replace(candidate, prediction=prediction)))
    chosen = min(scored)[2]
    reasons.append(f"chosen {_label(problem, chosen)}")
    if problem.op in (ALL_REDUCE, MATMUL_GATHER) and chosen.algorithm == "overlapped":
        reasons.append("peers write out directly when it lies on the heap; otherwise it is staged and copied once more")
    return replace(chosen, reasons=tuple(reasons))


# Our kernel, one launch, is taken unless several are this much faster in CUDA graphs, where no host time counts.
# `shard_sums` needs no lead, for its prediction errs by some 3 % either way.
_HANDICAPS = {"sequential": 1.02, "copy_engines": 1.01}


def _label(problem: Problem, config: FusedConfig) -> str:
    if config.algorithm in UNFUSED:
        return f"{config.algorithm}, torch's product"
    label = f"{config.block_m}x{config.block_n}x{config.block_k} {config.algorithm}"
    if config.algorithm == "overlapped" and problem.op == ALL_REDUCE:
        by_cols = owned_part(problem, config)[2]
        label += f", each rank sums {'columns' if by_cols else 'rows'}"
    return label


def _candidates(problem: Problem, machine: Machine) -> list[FusedConfig]:
    if machine.name == INTERPRETER:
        tiles = [(m, n, k, 4, 1) for m, n, k in product(*(_powers(size) for size in problem.gemm))]
    else:
        ours = _FP32_TILES if problem.dtype == torch.float32 else _GPU_TILES
        tiles = tritonblas.tiles(problem, machine.name) or list(ours)
    exchange = _FP32_TILES if problem.dtype == torch.float32 else _EXCHANGE_TILES
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
    found = [replace(config, splits=_splits(problem, config, machine)) for config in found]
    if problem.op == MATMUL_GATHER:  # by measurement, pairs gain nothing with lower tiles
        found += [replace(each, splits=2) for each in found if each.algorithm == "overlapped" and each.block_m >= 128]
    if machine.name.startswith("NVIDIA") and problem.dtype.itemsize == 2:  # where their times are known
        found += [FusedConfig(algorithm=algorithm) for algorithm in UNFUSED]
    return found


def _splits(problem: Problem, config: FusedConfig, machine: Machine) -> int:
    """2 where the last tiles of an all_gather_matmul are better cut in two, so that fewer programs are without work.

    Of a single round of tiles all are cut: while some units move data, others multiply. By measurement: more parts,
    parts of larger tiles, and parts in reductions cost more to add up than they save.
    """
    if config.algorithm != "overlapped" or machine.name == INTERPRETER:
        return 1
    if not cut_tiles(problem, replace(config, splits=2), _programs(config, machine)):
        return 1
    if config.block_m * config.block_n > 1 << 14 or problem.gemm[2] < 16 * config.block_k:
        return 1
    if gemm_tiles(problem, config) <= _programs(config, machine):
        return 2
    return min((1, 2), key=lambda splits: _gemm_us(problem, replace(config, splits=splits), machine))


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


def predict(problem: Problem, config: FusedConfig, machine: Machine) -> Prediction:
    """The time that `config` should take."""
    if config.algorithm in UNFUSED:
        return Prediction(*UNFUSED[config.algorithm].predict(problem, machine))
    gemm = _gemm_us(problem, config, machine)
    w, nbytes = problem.world_size, problem.link_bytes
    hops = 0 if w == 1 else 1
    tile_bytes = config.block_m * config.block_n * problem.dtype.itemsize
    if config.algorithm != "overlapped":
        # each word's way: in one shot of an all-reduce everyone gets everything
        shots = 2 if config.algorithm == "two_shot" else 1
        nbytes *= w / 2 if problem.op == ALL_REDUCE and shots == 1 else 1
        link = nbytes / (machine.link_gbs * _WORDS[problem.op] * 1e3)
        # nothing hides behind the product of a single wave
        total = gemm + link + hops * shots * machine.exchange_us
        if problem.op == GATHER_MATMUL:
            total += hops * machine.exchange_us  # until all programs know that all have come
    elif problem.op == MATMUL_GATHER and paired_tiles(problem, config, _programs(config, machine)):
        link = nbytes / (machine.link_gbs * 1e3)
        tile_us = _tile_us(problem, config, machine)
        # as a unit ends its program pushes without the others' company
        push = _paired_end(problem, config, machine) * (w - 1) * tile_bytes / (_PUSH_GBS * 1e3)
        joined = _PAIR_US * config.block_m * config.block_n / (128 * 256)
        total = max(gemm + push + joined, link / _PUSHED + 0.6 * tile_us) + hops * machine.hop_us
    elif config.stagger_us and problem.op == MATMUL_GATHER:
        link = nbytes / (machine.link_gbs * 1e3)
        tiles, programs = gemm_tiles(problem, config), _programs(config, machine)
        waves = -(-tiles // programs)
        # of the programs with most tiles the last starts latest, and each pushes without the others' company
        late = config.stagger_us * (tiles % programs or programs) / programs
        push = waves * (w - 1) * tile_bytes / (_PUSH_GBS * 1e3)
        total = max(gemm + late + push, link / _PUSHED + gemm / waves) + hops * machine.hop_us
    elif problem.op == ALL_REDUCE:
        rows, cols, _ = owned_part(problem, config)
        # the rank that owns most receives, sums and sends most
        link = nbytes / (machine.link_gbs * 1e3) * min(rows * cols * w / max(1, problem.M * problem.N), w)
        if early_tiles(problem, config, _programs(config, machine)) < _tiles(
            rows, cols, config.block_m, config.block_n
        ):
            # the link has about as much to do at any time
            total = max(gemm + 0.38 * link, 1.15 * link) + _MIXED_US
        else:
            # others' tiles are pushed while theirs and then our own are multiplied, the sums while our own are
            total = max(gemm * (w - 1) / w, link / 2) + max(gemm / w, link / 2)
            # at the end all programs push their sums, more or less at once
            last = 0.7 * (w - 1) * machine.num_programs * tile_bytes / (machine.link_gbs * 1e3)
            total += min(link, last)
        total += _HOPS[problem.op] * hops * machine.hop_us
    else:
        link = nbytes / (machine.link_gbs * 1e3)
        hops *= _HOPS[problem.op] + (0.5 * (w - 2) if problem.op == REDUCE_SCATTER else 0)
        # a single round of tiles that are pushed as they end, or wait for rows that they multiply, hides nothing
        rounds = gemm_tiles(problem, config) / _programs(config, machine)
        exposed = 1 if rounds <= 1 else 0.7 if rounds <= 2 else _EXPOSED[problem.op]
        exposed = _EXPOSED[problem.op] if problem.op == REDUCE_SCATTER else exposed
        total = max(gemm, link) + exposed * min(gemm, link) + hops * machine.hop_us
    return Prediction(gemm, link, total + machine.launch_us)


# Hops that nothing hides: the entry, then what the last tiles wait for.
_HOPS = {ALL_REDUCE: 2, REDUCE_SCATTER: 2, GATHER_MATMUL: 2, MATMUL_GATHER: 1}
# Of the link's rate, what words get that are polled, emptied and stored once more.
_WORDS = {ALL_REDUCE: 0.75, REDUCE_SCATTER: 1.0, GATHER_MATMUL: 0.85, MATMUL_GATHER: 0.85}
# How much of the shorter of product and transfer the longer one does not hide; measured on H200s.
_EXPOSED = {REDUCE_SCATTER: 0.35, GATHER_MATMUL: 0.3, MATMUL_GATHER: 0.7}
# What one program stores or loads of the parts of tiles, GB/s.
_PARTS_GBS = 28.0
# What one program stores to its peers, GB/s, while few others do.
_PUSH_GBS = 43.0
# Of the link's rate, what programs get that push tiles to everyone and then multiply the next.
_PUSHED = 0.75
# Until a pair of programs has joined the parts of a tile of 128 x 256.
_PAIR_US = 14.0
# Of an all-reduce with own tiles among others': until the first have arrived, and the last sums are everywhere.
_MIXED_US = 14.0


def _stagger_us(problem: Problem, config: FusedConfig, machine: Machine) -> int:
    """Over what time the programs of an op that pushes tiles from its epilogue start.

    Best is, by measurement, about the time that all of them take to push a tile at once; a third more where tiles go to
    everyone. With more than a tile's product the last would push with the first again. Programs that have one tile each
    gain nothing.
    """
    programs = _programs(config, machine)
    if problem.op == GATHER_MATMUL or config.algorithm != "overlapped":
        return 0
    if problem.world_size == 1 or machine.name == INTERPRETER:
        return 0
    paired = paired_tiles(problem, config, programs)
    if not paired and gemm_tiles(problem, config) <= programs:
        return 0
    copies = 1.35 * (problem.world_size - 1) if problem.op == MATMUL_GATHER else 1
    wave = copies * programs * config.block_m * config.block_n * problem.dtype.itemsize
    tile_us = int(_tile_us(problem, config, machine))
    least = min(int(wave / (machine.link_gbs * 1e3)), tile_us)
    # where nobody waits to begin, a whole tile's time costs nothing, and may let the last units end earlier
    choices = [replace(config, stagger_us=us) for us in ((least, tile_us) if paired else (least,))]
    return min(choices, key=lambda choice: predict(problem, choice, machine).total_us).stagger_us


def _gemm_us(problem: Problem, config: FusedConfig, machine: Machine) -> float:
    m, n, k = problem.gemm
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    tiles = gemm_tiles(problem, config)
    steps = -(-k // bk)
    if machine.name == INTERPRETER:
        elements = bm * bk + bk * bn
        return tiles * (4000.0 + steps * (1500.0 + elements * 0.02 + bm * bn * bk * 2e-5))
    programs = _programs(config, machine)
    tile_us = _tile_us(problem, config, machine)
    cut = cut_tiles(problem, config, programs)
    compute = -(-(tiles - cut) // programs) * tile_us
    if paired_tiles(problem, config, programs):
        compute = _paired_end(problem, config, machine) * tile_us
    elif cut:
        # each part of a tile is stored, and the last one loads the others
        store_us = bm * bn * 4 / _PARTS_GBS / 1e3
        units = -(-cut * config.splits // programs)
        compute += units * (tile_us / config.splits + store_us) + (config.splits - 1) * store_us
    stream = (m * k + k * n) * problem.dtype.itemsize / (machine.hbm_gbs * 1e3)
    # a program alone cannot draw its share of HBM when few of them run
    few_rows = config.algorithm != "overlapped"
    enough = _EXCHANGE_PROGRAMS * programs / machine.num_programs if few_rows else 0.9 * programs
    stream *= max(1.0, enough / max(1, min(tiles, programs)))
    # as the chip comes to its power limit
    warmth = log(min(max(compute, 500.0), 2000.0) / 500.0) / log(4.0)
    return max(compute * (1 + 0.07 * warmth), stream)


def _tile_us(problem: Problem, config: FusedConfig, machine: Machine) -> float:
    """The product of one tile in one program."""
    fp32 = problem.dtype == torch.float32
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    few_rows = config.algorithm != "overlapped"
    shares = _FP32_TILES if fp32 else _EXCHANGE_TILES if few_rows else _GPU_TILES
    unknown = min(1.0, bm * bn / max(m * n for m, n, *_ in shares))
    share = shares.get((bm, bn, bk, config.num_warps, config.num_stages), unknown)
    rate = machine.tflops * share * (_FP32_SHARE if fp32 else 1.0) / machine.num_programs  # TFLOP/s of one program
    return 2.0 * bm * bn * max(problem.gemm[2], bk) / (rate * 1e6) + 1.5


def _programs(config: FusedConfig, machine: Machine) -> int:
    return min(config.num_programs or machine.num_programs, machine.num_programs)


def gemm_tiles(problem: Problem, config: FusedConfig) -> int:
    """Tiles of one rank's product; they do not cross the borders of the ranks' parts."""
    m, n, _ = problem.gemm
    if config.algorithm == "overlapped" and problem.op in (REDUCE_SCATTER, ALL_REDUCE):
        rows, cols, _ = owned_part(problem, config)
        return problem.world_size * _tiles(rows, cols, config.block_m, config.block_n)
    if config.algorithm == "overlapped" and problem.op == GATHER_MATMUL and problem.form == "rows":
        return problem.world_size * _tiles(problem.part_rows, n, config.block_m, config.block_n)
    return _tiles(m, n, config.block_m, config.block_n)


def cut_tiles(problem: Problem, config: FusedConfig, programs: int) -> int:
    """How many tiles are cut along K: those that do not fill a round of programs; of few rounds all of them.

    Only all_gather_matmul by rows cuts tiles so.
    """
    if config.splits == 1 or problem.op != GATHER_MATMUL or problem.form != "rows":
        return 0
    tiles, programs = gemm_tiles(problem, config), config.num_programs or programs
    return tiles % programs if tiles >= 2 * programs else tiles


def paired_tiles(problem: Problem, config: FusedConfig, programs: int) -> int:
    """How many of the first tiles of a matmul_all_gather are shared by two programs; see `tiles.paired_tile`."""
    if config.splits == 1 or problem.op != MATMUL_GATHER or config.algorithm != "overlapped":
        return 0
    return min(gemm_tiles(problem, config), (config.num_programs or programs) // 2)


def _paired_end(problem: Problem, config: FusedConfig, machine: Machine) -> float:
    """When the last of paired programs ends, in times of a tile: each later unit is a whole tile."""
    programs, width = _programs(config, machine), spread(problem, config, machine) / 1024
    pairs = paired_tiles(problem, config, programs)
    rounds, left = divmod(gemm_tiles(problem, config) - pairs, programs)

    def first(unit: int) -> float:
        return 0.5 + width * ((unit + 0.5) / (2 * pairs) - 0.5)

    if pairs < programs // 2:
        return first(2 * pairs - 1)
    return max(first(left - 1) + rounds + 1 if left else 0.0, first(programs - 1) + rounds)


def spread(problem: Problem, config: FusedConfig, machine: Machine) -> int:
    """Over how much of a tile's time the first units of paired programs end, in 1/1024."""
    return min(1024, int(1024 * config.stagger_us / _tile_us(problem, config, machine)))


def early_tiles(problem: Problem, config: FusedConfig, programs: int) -> int:
    """How many tiles of each other owner a rank computes before the first of its own; see `matmul_reduce_scatter.turn`.

    All of them, but in an all-reduce among three or more: the sums of own tiles go to several peers each, and the link
    would be idle before and too narrow at the end. Two rounds ahead, others' tiles have arrived when they are summed.
    Mixed owners share less of their operands: what a round reads must fit in L2, unless there are few rounds.
    """
    rows, cols, _ = owned_part(problem, config)
    owned, programs = _tiles(rows, cols, config.block_m, config.block_n), config.num_programs or programs
    early = -(-2 * programs // problem.world_size)
    if problem.op != ALL_REDUCE or problem.world_size < 3 or owned <= early:
        return owned
    high = problem.world_size * config.group_m
    operands = (high * config.block_m + programs / high * config.block_n) * problem.K * problem.dtype.itemsize
    return early if owned <= 2 * programs or operands <= _L2_BYTES else owned


def _tiles(rows: int, cols: int, block_m: int, block_n: int) -> int:
    return -(-rows // block_m) * -(-cols // block_n)
