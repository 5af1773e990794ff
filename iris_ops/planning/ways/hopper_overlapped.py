"""Many rows, warp-specialised: some warps of a program multiply while others move finished tiles."""

from __future__ import annotations

from collections.abc import Sequence

from iris.machines import Machine

from ...config import FusedConfig
from ...problem import ALL_REDUCE, MATMUL_GATHER, REDUCE_SCATTER, SUMS, Problem
from ..candidates import pushed
from ..needs import PLAIN
from ..overlap_model import apart_share, apart_us, hops, push_us, specialised_refused, staggered
from ..tile_model import tile_us
from ..waves import gemm_tiles, programs_of, shared_tiles, skew_steps
from ..way import Sizes, Way
from ..weights import SCALED_AT_END, SCALED_INSIDE, WIDENED
from .overlapped import GATHER, REDUCE, overlapped_sizes, reduced_label

HOPPER_REDUCE, HOPPER_GATHER = "hopper.matmul_reduce", "hopper.matmul_gather"
# Row blocks, of all owners together, that a wave of 132 programs works on: then it reads least of A and B together.
_WAVE_HEIGHT = 16
# What the sum of an own tile of 128 x 256 adds at the end; between two pushes of a program.
_LAST_SUM_US = 10.0
_BETWEEN_US = 5.0
# What a hop takes less where tiles are small; what each rank beyond two adds, of which one more is waited for.
_SMALL_HOP_US, _RANK_US = 1.5, 1.8


class HopperReduce(Way):
    """Reductions as `overlapped.Reduce`, by warp-specialised programs."""

    kernel = HOPPER_REDUCE
    launcher = "kernels.hopper.matmul_reduce:launcher"
    supports = "layouts:pushes_sums"
    ops = frozenset(SUMS)
    warp_specialised = True
    weights = frozenset((PLAIN, *SCALED_AT_END, *SCALED_INSIDE, *WIDENED))
    fallback = REDUCE

    def accepts(self, problem: Problem, machine: Machine) -> str | None:
        return specialised_refused(problem, machine)

    def tiles(self, problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
        """Return the tiles that specialised warps push, whole or, where they fill no wave, shared along K."""
        # owners take turns, so a wave of programs works on this many row blocks of each
        group_m = FusedConfig.group_m if problem.op == MATMUL_GATHER else max(1, _WAVE_HEIGHT // problem.world_size)
        programs = machine.num_programs
        configs = [
            config
            for config in pushed(self.kernel, machine.architecture, group_m, problem.weights)
            if config.splits == 1 or shared_tiles(problem, config, programs)[0]
        ]
        return staggered(configs, problem, machine)

    def together(self, problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
        link = problem.link_bytes / (machine.link_gbs * 1e3)
        tile, area = tile_us(problem, config, machine), config.block_m * config.block_n / (128 * 256)
        # where the link is full, a push of all programs takes this long, and then the link waits for the next
        push = push_us(problem, config, machine, machine.num_programs)
        waiting = _BETWEEN_US * max(0.0, link / push - 1)
        # at the end all programs push a tile, to one peer or to all; sums are pushed more or less at once
        ending = min(gemm_tiles(problem, config), programs_of(config, machine.num_programs))
        everyone = push_us(problem, config, machine, ending * (problem.world_size - 1))
        if problem.op == MATMUL_GATHER:
            programs, steps = programs_of(config, machine.num_programs), max(1, -(-problem.gemm[2] // config.block_k))
            turn = skew_steps(problem, config, programs, tile) * tile / steps  # over which programs end
            last = turn / 2 + max(everyone - turn, 0.1 * everyone)
            link /= apart_share(problem.gemm[1])
        else:
            last = _LAST_SUM_US * area
            last += 0.4 * everyone if problem.op == ALL_REDUCE else 0
        if problem.op == ALL_REDUCE:  # tiles are staged whole, but their sums are stored at the peers
            link *= 0.5 + 0.5 / apart_share(problem.N)
        last += apart_us(problem, config, 1 if problem.op == REDUCE_SCATTER else problem.world_size)
        hop = machine.hop_us - (_SMALL_HOP_US if area < 1 else 0) + _RANK_US * (problem.world_size - 2)
        return link, max(gemm + last, link + waiting + min(tile, gemm)) + hops(problem) * hop

    def workspace(self, problem: Problem, config: FusedConfig, programs: int) -> Sizes:
        return overlapped_sizes(problem, config, programs)

    def writes_to_peers(self, problem: Problem) -> bool:
        return problem.op in (ALL_REDUCE, MATMUL_GATHER)

    def label(self, problem: Problem, config: FusedConfig) -> str:
        label = f"{self.kernel} {config.block_m}x{config.block_n}x{config.depth(problem.itemsize)}"
        label = reduced_label(label, problem, config)
        label += ", programs share the first tiles" if config.splits > 1 else ""
        return label + (f", {problem.weights.rounding}" if self.rounds_rows(problem) else "")


class HopperGather(HopperReduce):
    """Gathers as `overlapped.Gather`, by warp-specialised programs."""

    kernel = HOPPER_GATHER
    launcher = "kernels.hopper.matmul_gather:launcher"
    supports = "layouts:pushes_products"
    ops = frozenset((MATMUL_GATHER,))
    fallback = GATHER
