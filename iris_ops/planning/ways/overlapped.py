"""Many rows: finished tiles travel while a program multiplies the next ones, by portable kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from iris.machines import INTERPRETER, Machine

from ...config import FusedConfig
from ...problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, REDUCE_SCATTER, SUMS, Problem, owned_part
from .. import interpreted, tritonblas
from ..candidates import fitting, movers, splits, tiled
from ..overlap_model import apart_share, apart_us, hops, push_us, staggered, tile_bytes
from ..tile_model import specialised_tiles
from ..waves import early_tiles, gemm_tiles, programs_of
from ..way import Sizes, Way
from ..workspace_size import gathered_part, parts, staged

REDUCE, GATHER, GATHER_FIRST = "matmul_reduce", "matmul_gather", "gather_matmul"
# Hops that nothing hides: the entry, then what the last tiles wait for.
_HOPS = {ALL_REDUCE: 2, REDUCE_SCATTER: 2, GATHER_MATMUL: 2, MATMUL_GATHER: 1}
# How much of the shorter of product and transfer the longer one does not hide; measured on H200s.
_EXPOSED = {REDUCE_SCATTER: 0.35, GATHER_MATMUL: 0.3, MATMUL_GATHER: 0.7}
# What one program stores to its peers, GB/s, while few others do.
_PUSH_GBS = 43.0
# Of the link's rate, what programs get that push tiles to everyone and then multiply the next.
_PUSHED = 0.75
# Of an all-reduce's product, what its pushes do not hide where the link is full.
_BESIDE = 0.5
# Of an all-reduce with own tiles among others': until the first have arrived, and the last sums are everywhere.
_MIXED_US = 14.0


class Overlapped(Way):
    """Code that the three ways share: tiles, memory, and how much of the exchange overlaps."""

    def tiles(self, problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
        """Return portable tiles; where warp-specialised kernels exist, only tiles lower than theirs."""
        if machine.name == INTERPRETER:
            tiles = interpreted.tiles(problem)
        else:
            tiles = tuple(tritonblas.tiles(problem, machine.name)) or fitting(
                problem.dtype.itemsize, machine, few=False
            )
        configs = tiled(self.kernel, tiles, ("overlapped",), movers(problem, machine))
        if problem.op == GATHER_MATMUL and not problem.sums.promised:  # which no cut of few tiles would be
            cuts = [splits(problem, config, machine) for config in configs]
            cuttable = zip(configs, cuts, strict=True)
            return [replace(config, splits=cut) if cut > 1 else config for config, cut in cuttable]
        aligned = problem.op != GATHER_MATMUL and problem.whole_vectors(problem.K) and problem.whole_vectors(problem.N)
        if machine.warp_specialised and problem.dtype.itemsize == 2 and aligned:
            most = min(specialised_tiles(machine.architecture).overlapped)[0]
            return [config for config in configs if config.block_m < most]
        return configs

    def together(self, problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
        link = problem.link_bytes / (machine.link_gbs * 1e3)
        if problem.op == GATHER_MATMUL and machine.name != INTERPRETER:
            link /= apart_share(gathered_part(problem)[1])
        hidden, exposed = _HOPS[problem.op], _EXPOSED[problem.op]
        if problem.op == REDUCE_SCATTER:
            hidden += 0.5 * (problem.world_size - 2)
        else:
            # a single wave of tiles that are pushed as they end, or wait for rows that they multiply, hides nothing
            waves = gemm_tiles(problem, config) / programs_of(config, machine.num_programs)
            exposed = 1 if waves <= 1 else 0.7 if waves <= 2 else exposed
        return link, max(gemm, link) + exposed * min(gemm, link) + hops(problem, hidden) * machine.hop_us

    def workspace(self, problem: Problem, config: FusedConfig, programs: int) -> Sizes:
        return overlapped_sizes(problem, config, programs)


class Reduce(Overlapped):
    """Tiles go to the rank that owns them, which adds them up; of an all-reduce the sums go to everyone."""

    kernel = REDUCE
    launcher = "kernels.matmul_reduce:launcher"
    ops = frozenset(SUMS)

    def tiles(self, problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
        return staggered(super().tiles(problem, machine), problem, machine)

    def together(self, problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
        if problem.op == ALL_REDUCE:
            return _summed_for_all(problem, config, machine, gemm)
        return super().together(problem, config, machine, gemm)

    def writes_to_peers(self, problem: Problem) -> bool:
        return problem.op == ALL_REDUCE

    def label(self, problem: Problem, config: FusedConfig) -> str:
        return reduced_label(super().label(problem, config), problem, config)


class Gather(Overlapped):
    """Tiles go to everyone as they are finished."""

    kernel = GATHER
    launcher = "kernels.matmul_gather:launcher"
    ops = frozenset((MATMUL_GATHER,))

    def tiles(self, problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
        return staggered(super().tiles(problem, machine), problem, machine)

    def together(self, problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
        if config.stagger_us:
            return _pushed_in_turn(problem, config, machine, gemm)
        return super().together(problem, config, machine, gemm)

    def writes_to_peers(self, problem: Problem) -> bool:
        return True


class GatherFirst(Overlapped):
    """Some programs move rows of A before they multiply, others multiply what has come."""

    kernel = GATHER_FIRST
    launcher = "kernels.gather_matmul:launcher"
    ops = frozenset((GATHER_MATMUL,))

    def means(self, problem: Problem, config: FusedConfig) -> bool:
        return problem.op == GATHER_MATMUL and config.algorithm == "overlapped"

    def label(self, problem: Problem, config: FusedConfig) -> str:
        shared = ", programs share the first tiles" if config.warp_specialised and config.splits > 1 else ""
        return super().label(problem, config) + shared


def overlapped_sizes(problem: Problem, config: FusedConfig, programs: int) -> Sizes:
    """Return the sizes of what ranks stage for each other, then of parts of tiles."""
    flags, nbytes = staged(problem, config)
    cut = parts(problem, config, programs)
    return Sizes(flags + cut, nbytes + cut * config.block_m * config.block_n * 4)


def reduced_label(label: str, problem: Problem, config: FusedConfig) -> str:
    """Return `label` with what an all-reduce sums."""
    if problem.op == ALL_REDUCE:
        return f"{label}, each rank sums {'columns' if owned_part(problem, config)[2] else 'rows'}"
    return label


def _pushed_in_turn(problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
    link = problem.link_bytes / (machine.link_gbs * 1e3)
    tiles, programs = gemm_tiles(problem, config), programs_of(config, machine.num_programs)
    waves = -(-tiles // programs)
    # of the programs with most tiles the last starts latest, and each pushes without the others' company
    late = config.stagger_us * (tiles % programs or programs) / programs
    # one tile, by one program to all peers
    push = waves * (problem.world_size - 1) * tile_bytes(problem, config) / (_PUSH_GBS * 1e3)
    return link, max(gemm + late + push, link / _PUSHED + gemm / waves) + hops(problem) * machine.hop_us


def _summed_for_all(problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
    w, (rows, cols, _) = problem.world_size, owned_part(problem, config)
    # the rank that owns most receives, sums and sends most
    link = problem.link_bytes / (machine.link_gbs * 1e3) * min(rows * cols * w / max(1, problem.M * problem.N), w)
    if early_tiles(problem, config, programs_of(config, machine.num_programs)) < gemm_tiles(problem, config) // w:
        # the link has about as much to do at any time
        total = max(gemm + 0.38 * link, 1.15 * link) + _MIXED_US
    else:
        # others' tiles are pushed while theirs and then our own are multiplied, the sums while our own are
        total = max(gemm * (w - 1) / w, link / 2) + max(gemm / w, link / 2)
        # at the end all programs push their sums, more or less at once
        total += min(link, 0.7 * push_us(problem, config, machine, (w - 1) * machine.num_programs))
        total = max(total, link + _BESIDE * gemm)
    waves = -(-gemm_tiles(problem, config) // programs_of(config, machine.num_programs))
    total += waves * apart_us(problem, config, 1)
    return link, total + hops(problem, _HOPS[problem.op]) * machine.hop_us
