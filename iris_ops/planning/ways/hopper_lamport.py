"""Some hundred rows, warp-specialised: specialised warps exchange Lamport values while others multiply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from iris.machines import Machine

from ...config import FusedConfig
from ...problem import ALL_REDUCE, REDUCE_SCATTER, Problem
from ..candidates import specialised
from ..needs import PLAIN
from ..overlap_model import apart_us, leaf_ends, specialised_refused, unhidden
from ..sums import ANY_ORDER, RANKS_ALIKE, ROWS_ALIKE
from ..tile_model import tile_us
from ..waves import gemm_tiles, programs_of
from ..way import Sizes
from ..weights import SCALED_AT_END, SCALED_INSIDE, WIDENED
from ..weights.grouped import LEAST_WIDENED
from .lamport import LAMPORT, PAIR, Lamport
from .tree import TREE, exchanged, most_rows

LAMPORT_TWO_SHOT, LAMPORT_PAIR = "hopper.lamport_two_shot", "hopper.lamport_pair"
LAMPORT_PAIR_SCATTER = "hopper.lamport_pair_scatter"
_DEEPEST_SCATTERED = 8192  # along K, of products whose rows two ranks send each other
# In two shots, for each 64 x 128 of a tile: how long the link rests between two waves, and the time after the last.
# Programs drift apart: each wave adds that part to the rest.
_BETWEEN_US, _LAST_US, _DRIFT = 3.0, 3.5, 0.15
# Between two ranks: the time after the last wave, as above; what a single wave adds, before which nothing came.
# Programs drift apart: beyond a number of waves, each adds that part of a product in 16 bits; rounded rows add none.
_PAIR_LAST_US, _PAIR_ALONE_US, _PAIR_WAVES, _PAIR_DRIFT = 1.5, 1.3, 4, 0.014
# The same two times for a reduce-scatter, in which each rank sums its own rows of a tile.
_PAIR_SCATTER_LAST_US, _PAIR_SCATTER_ALONE_US = 2.5, 1.5


class LamportTwoShot(Lamport):
    """Among three ranks and more: values go to owners, and the sums to everyone."""

    kernel = LAMPORT_TWO_SHOT
    launcher = "kernels.hopper.lamport_two_shot:launcher"
    supports = "layouts:specialised"
    follows = False
    ops = frozenset((ALL_REDUCE,))
    algorithms = ("two_shot",)
    warp_specialised = True
    weights = frozenset((PLAIN, *SCALED_AT_END, *SCALED_INSIDE, *WIDENED))
    fallback = LAMPORT
    most = 1 << 23
    """Elements of the largest result whose exchange it hides."""

    def accepts(self, problem: Problem, machine: Machine) -> str | None:
        if problem.world_size < 3 or problem.M <= 128:
            return "it needs at least 129 rows and three ranks"
        return specialised_refused(problem, machine) or unhidden(problem, self.most)

    def means(self, problem: Problem, config: FusedConfig) -> bool:
        alike = config.warp_specialised and config.algorithm in self.algorithms and problem.op in self.ops
        return alike and not (problem.tree and not problem.tree.halved)

    def fuses(self, problem: Problem, config: FusedConfig) -> tuple:
        return ()

    def tiles(self, problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
        return specialised(
            self.kernel, machine.architecture, self.algorithms[0], problem.itemsize, problem.weights
        )  # fmt: skip

    def together(self, problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
        link = problem.link_bytes / (machine.link_gbs * 1e3)
        tiles, programs = gemm_tiles(problem, config), programs_of(config, machine.num_programs)
        waves = -(-tiles // programs)
        last = (tiles - (waves - 1) * programs) / tiles if tiles else 0
        area = config.block_m * config.block_n / (64 * 128)
        # where the link is full, it rests while the values of a wave are summed
        rests = (waves - 1) * area * _BETWEEN_US * (1 + _DRIFT * (waves - 2))
        full = tile_us(problem, config, machine) + link + rests
        return link, max(gemm + link * last, full) + area * _LAST_US


class LamportPair(LamportTwoShot):
    """Between two ranks in one shot. It knows sums by tree, if each rank has half of the leaves."""

    kernel = LAMPORT_PAIR
    launcher = "kernels.hopper.lamport_pair:launcher"
    algorithms = ("one_shot",)
    sums = frozenset((ANY_ORDER, ROWS_ALIKE, RANKS_ALIKE))
    most = 1 << 24

    def accepts(self, problem: Problem, machine: Machine) -> str | None:
        least = LEAST_WIDENED if problem.weights.widened_in_tiles else 65
        if problem.world_size != 2 or problem.M < least:
            return f"it needs at least {least} rows and exactly two ranks"
        if problem.tree and not problem.tree.halved:
            return "the two ranks do not have half of the leaves of K each"
        return specialised_refused(problem, machine) or unhidden(problem, self.most)

    def means(self, problem: Problem, config: FusedConfig) -> bool:
        named = config.kernel == self.kernel or not problem.weights.streams(problem)
        return super().means(problem, config) and problem.world_size == 2 and named

    def fallback_for(self, problem: Problem) -> str:
        return TREE if problem.tree else LAMPORT

    def tiles(self, problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
        return [_staggered(config, problem, machine) for config in super().tiles(problem, machine)]

    def together(self, problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
        link = problem.link_bytes / (machine.link_gbs * 1e3)
        waves = max(1, -(-gemm_tiles(problem, config) // programs_of(config, machine.num_programs)))
        gemm += waves * leaf_ends(problem, config)
        if problem.weights is PLAIN:
            gemm *= 1 + _PAIR_DRIFT * max(0, waves - _PAIR_WAVES)
        full = tile_us(problem, config, machine) + link / PAIR
        area = config.block_m * config.block_n / (64 * 128)
        # the last wave sends as much as each, full or not: programs without a tile there do not hold back their values
        alone = _PAIR_ALONE_US if waves == 1 else 0.0
        rest = area * _PAIR_LAST_US + alone + waves * apart_us(problem, config, 1)
        return link, max(gemm + link / waves, full) + rest

    def workspace(self, problem: Problem, config: FusedConfig, programs: int) -> Sizes:
        return exchanged(problem, config) if problem.tree else super().workspace(problem, config, programs)

    def most_rows(self, problem: Problem, config: FusedConfig) -> int:
        return most_rows(problem, config) if problem.tree else super().most_rows(problem, config)


class LamportPairScatter(LamportPair):
    """The same of a reduce-scatter by rows."""

    kernel = LAMPORT_PAIR_SCATTER
    launcher = "kernels.hopper.lamport_pair:scatter_launcher"
    ops = frozenset((REDUCE_SCATTER,))
    weights = frozenset((PLAIN,))
    most = 1 << 23

    def accepts(self, problem: Problem, machine: Machine) -> str | None:
        if problem.form != "rows":
            return "it scatters rows"
        if problem.K > _DEEPEST_SCATTERED:
            return "a product with this K already hides its exchange"
        return super().accepts(problem, machine)

    def means(self, problem: Problem, config: FusedConfig) -> bool:
        return super().means(problem, config) and problem.form == "rows" and problem.weights is PLAIN

    def tiles(self, problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
        return specialised(self.kernel, machine.architecture, self.algorithms[0], 2)

    def together(self, problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
        link = problem.link_bytes / (machine.link_gbs * 1e3)
        tiles, programs = gemm_tiles(problem, config), programs_of(config, machine.num_programs)
        waves = max(1, -(-tiles // programs))
        gemm += waves * leaf_ends(problem, config)
        sending = max(1, -(-tiles // 2 // programs))
        area = config.block_m * config.block_n / (64 * 128)
        sent = gemm * sending / waves + link / PAIR / sending
        alone = _PAIR_SCATTER_ALONE_US if waves == 1 else 0.0
        return link, max(gemm, sent) + area * (_PAIR_SCATTER_LAST_US + alone)


def _staggered(config: FusedConfig, problem: Problem, machine: Machine) -> FusedConfig:
    """Return `config` with programs that start over two fifths of the time of a wave's values, from three waves on."""
    waves = -(-gemm_tiles(problem, config) // programs_of(config, machine.num_programs))
    wave_us = problem.link_bytes / (machine.link_gbs * 1e3) / max(1, waves)
    over_us = round(0.4 * wave_us) if waves > 2 and problem.weights is PLAIN else 0
    return replace(config, stagger_us=over_us) if over_us else config
