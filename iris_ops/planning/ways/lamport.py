"""Few rows: each value that travels says itself whether it has arrived (`kernels/lamport_matmul.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from iris.machines import INTERPRETER, Machine

from ...config import FusedConfig
from ...problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, NORM_SPAN, REDUCE_SCATTER, SUMS, Problem
from .. import interpreted
from ..candidates import fitting, movers, narrow, tiled
from ..epilogues import NORM, Epilogue
from ..needs import PLAIN
from ..overlap_model import apart_us, hops, unhidden
from ..tile_model import EXCHANGED_TILES
from ..waves import gemm_tiles, programs_of
from ..way import Sizes, Way
from ..weights import SCALED_AT_END, SCALED_INSIDE
from ..workspace_size import exchange_ld, exchanged_part

LAMPORT, LAMPORT_GATHER = "lamport_matmul", "lamport_gather_matmul"
# Of the link's rate, what Lamport values get, which are polled, overwritten by the sentinel and stored once more.
_LAMPORT = {ALL_REDUCE: 0.75, REDUCE_SCATTER: 0.85, GATHER_MATMUL: 0.85, MATMUL_GATHER: 0.85}
TWICE, PAIR = 0.8, 0.9  # in two shots; between two ranks whose link is full
_OWN_PART_US = 0.6  # what one shot of an all-reduce takes less where a rank's own part stays in registers
_ONE_GROUP_US = 0.3  # what one warp group takes longer than two for the values of 64 x 64
_HIGH_US = 1.0  # what tiles of 128 rows take longer to begin where rows are gathered
_APART_MOVES = 4  # of a value that is summed, if elements move one by one: sent, polled, overwritten, stored
_WIDE_US = 2.0  # what tiles of 128 x 128 take longer: a program sends and sums all of their values after its product
_HIDDEN_BY_MORE = 0.3  # how much of the values' way more than two waves of products hide


class Lamport(Way):
    """One shot: each rank sends its product to all that need it. An all-reduce may take two."""

    kernel = LAMPORT
    launcher = "kernels.lamport_matmul:launcher"
    follows = True
    ops = frozenset((*SUMS, MATMUL_GATHER))
    algorithms: tuple[str, ...] = ("one_shot", "two_shot")
    weights = frozenset((PLAIN, *SCALED_AT_END, *SCALED_INSIDE))

    def accepts(self, problem: Problem, machine: Machine) -> str | None:
        return problem.weights.refused(problem, machine) or unhidden(problem)

    def means(self, problem: Problem, config: FusedConfig) -> bool:
        return config.lamport and problem.op in self.ops

    def fuses(self, problem: Problem, config: FusedConfig) -> tuple[Epilogue, ...]:
        return norm_inside(problem, config)

    def tiles(self, problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
        """Return the tiles of few rows, in one shot and, of an all-reduce, in two."""
        shots = ("one_shot", "two_shot") if problem.op == ALL_REDUCE else ("one_shot",)
        if problem.weights.rounds_rows:
            tiles = tuple(
                (*tile, stages)
                for tile, (stages, _) in EXCHANGED_TILES[problem.itemsize].items()
                if problem.weights.group in (0, 2 * tile[2])  # a block has one scale
            )
        elif machine.name == INTERPRETER:
            tiles = interpreted.tiles(problem)
        else:
            tiles = fitting(problem.dtype.itemsize, machine, few=True)
            tiles = tuple(tile for tile in tiles if tile[1] >= 64 or narrow(problem, *tile[:2], machine))
        rounds = problem.weights.rounds_rows
        return tiled(self.kernel, tiles, shots, FusedConfig.comm_programs if rounds else movers(problem, machine))

    def together(self, problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
        """Return (link, total): values travel after the product; the last wave hides those of the waves before."""
        # in one shot of an all-reduce every rank gets everything
        shots = 2 if config.algorithm == "two_shot" else 1
        waves = max(1, -(-gemm_tiles(problem, config) // programs_of(config, machine.num_programs)))
        nbytes = problem.link_bytes * (problem.world_size / 2 if problem.op == ALL_REDUCE and shots == 1 else 1)
        keeps_own = _keeps_own(problem, config, machine)
        rate = TWICE if shots == 2 else PAIR if keeps_own and problem.world_size == 2 else _LAMPORT[problem.op]
        link = nbytes / (machine.link_gbs * rate * 1e3)
        if problem.op in (ALL_REDUCE, REDUCE_SCATTER) and config.block_m >= 64:  # else there is little to hide
            # sums, which are the second shot, begin after all products
            hidden = 1 - 1 / waves
            if problem.op == ALL_REDUCE and waves > 2:  # many values slow the products after them
                hidden = _HIDDEN_BY_MORE
            gemm -= min(link / shots, gemm) * hidden
        shots += problem.op == GATHER_MATMUL  # until all programs know that all have come
        one_group = config.num_warps == 4 and config.block_m >= 64 and not problem.weights.rounds_rows
        rest = _ONE_GROUP_US * config.block_m / 64 if one_group else 0.0
        if problem.op == GATHER_MATMUL and config.block_m == 128:
            rest += _HIGH_US
        if keeps_own:
            rest -= _OWN_PART_US
        if config.block_m * config.block_n == 128 * 128:
            rest += _WIDE_US
        if problem.op == MATMUL_GATHER:
            rest += waves * apart_us(problem, config, problem.world_size)
        if problem.op == REDUCE_SCATTER:
            rest += waves * apart_us(problem, config, _APART_MOVES)
        return link, gemm + link + rest + hops(problem, shots) * machine.exchange_us

    def workspace(self, problem: Problem, config: FusedConfig, programs: int) -> Sizes:
        rows, cols = exchanged_part(problem, config)
        w, ld, itemsize = problem.world_size, exchange_ld(cols), problem.dtype.itemsize
        second_shot = rows * w * ld if config.algorithm == "two_shot" else exchange_ld(w)
        if config.algorithm == "one_shot" and problem.op == ALL_REDUCE:
            second_shot = 0  # every rank gets values from every rank
        gathered = problem.M * exchange_ld(problem.K) if problem.op == GATHER_MATMUL else 0
        return Sizes(0, gathered * itemsize, 2 * (w * rows * ld + second_shot) * itemsize)


class LamportGather(Lamport):
    """Rows of A, or columns, travel as Lamport values before they are multiplied."""

    kernel = LAMPORT_GATHER
    launcher = "kernels.lamport_gather_matmul:launcher"
    ops = frozenset((GATHER_MATMUL,))
    weights = frozenset((PLAIN,))

    def fuses(self, problem: Problem, config: FusedConfig) -> tuple[Epilogue, ...]:
        return ()


def norm_inside(problem: Problem, config: FusedConfig) -> tuple[Epilogue, ...]:
    """Return the norm, where a kernel itself can add the residual and end with an RMSNorm's first half.

    Not where rows are to be alike: if they are many no kernel does, and a tile sums squares in another order.
    """
    inside = problem.op == ALL_REDUCE and not problem.sums.promised and config.block_n % NORM_SPAN == 0
    return (NORM,) if inside else ()


def _keeps_own(problem: Problem, config: FusedConfig, machine: Machine) -> bool:
    """Return whether this is a one-shot all-reduce by programs with one tile each, which keep their own part in
    registers."""
    one_shot = problem.op == ALL_REDUCE and config.algorithm == "one_shot" and not config.warp_specialised
    return one_shot and gemm_tiles(problem, config) <= programs_of(config, machine.num_programs)
