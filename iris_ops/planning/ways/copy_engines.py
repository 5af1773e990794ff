"""Gathered rows that copy engines bring while others are multiplied, by our kernel or by torch's product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from iris.machines import Machine

from ...config import FusedConfig, Prediction
from ...problem import GATHER_MATMUL, Problem, part_of
from ..candidates import copy_gather_configs
from ..epilogues import Epilogue
from ..needs import PLAIN
from ..orders import Order, of_library
from ..overlap_model import apart_us, specialised_refused
from ..product_model import library_us_in_turn
from ..tile_model import tile_us
from ..torch_model import library_refused
from ..way import Sizes, Way
from ..weights import SCALED_AT_END

COPY_GATHER = "with_torch.copy_gather"
# Microseconds, by fit: of a barrier and the wait for room to run it, for each rank; what a copy takes beside its bytes.
_BARRIER_US = 1.5
_COPY_US = 8.0
# What torch's products take beside copies, over what they take alone.
_BESIDE_COPIES = 1.03
# Rows from which on a product is worth reading B for.
_LEAST_ROWS = 512


class Brought(Way):
    """One kernel multiplies all rows as they come, and joins two matrices' columns on their way out."""

    kernel = "hopper.gather_matmul"
    launcher = "with_torch.copy_gather:prepare_at_once"
    supports = "layouts:brought"
    several_launches = True
    ops = frozenset((GATHER_MATMUL,))
    algorithms = ("copy_gather",)
    warp_specialised = True
    fallback = COPY_GATHER

    def accepts(self, problem: Problem, machine: Machine) -> str | None:
        return self.refuses(problem) or specialised_refused(problem, machine)

    def refuses(self, problem: Problem) -> str | None:
        if problem.op != GATHER_MATMUL or problem.form != "rows":
            return "copy engines serve all_gather_matmul by rows"
        return None

    def means(self, problem: Problem, config: FusedConfig) -> bool:
        return config.algorithm in self.algorithms and config.warp_specialised

    def tiles(self, problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
        """Return the tiles, no higher than a rank's rows."""
        return [config for config in copy_gather_configs(machine) if config.block_m <= problem.part_rows]

    def together(self, problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
        w, entry = problem.world_size, _BARRIER_US * problem.world_size
        copy = problem.part_rows * problem.K * problem.dtype.itemsize / (machine.link_gbs * 1e3) + _COPY_US
        # rows come late, or when those before them are multiplied; then all that is left is, one tile at least
        tile = tile_us(problem, config, machine)
        late = max((i * copy + max(gemm * (w - i) / w, tile) for i in range(1, w)), default=0.0)
        return (w - 1) * copy, entry + max(gemm, late) + apart_us(problem, config, 2)

    def workspace(self, problem: Problem, config: FusedConfig, programs: int) -> Sizes:
        """Return the gathered rows: one element at least, so that they have a place."""
        return Sizes(staging=max(1, problem.M * problem.K) * problem.dtype.itemsize)

    def fuses(self, problem: Problem, config: FusedConfig) -> tuple[Epilogue, ...]:
        return problem.epilogue.of_tiles


class CopyGather(Brought):
    """Torch multiplies one rank's rows after the other's, or several ranks' together; the epilogue follows each."""

    kernel = COPY_GATHER
    launcher = "with_torch.copy_gather:prepare_in_steps"
    supports = ""
    warp_specialised = False
    weights = frozenset((PLAIN, *SCALED_AT_END))
    fallback = ""
    lead = 0.01, float("inf")

    def accepts(self, problem: Problem, machine: Machine) -> str | None:
        return library_refused(problem, machine) or self.refuses(problem)

    def means(self, problem: Problem, config: FusedConfig) -> bool:
        return config.algorithm in self.algorithms and not config.warp_specialised

    def rounds_rows(self, problem: Problem) -> bool:
        return False  # the product does

    def order(self, problem: Problem, config: FusedConfig, machine: Machine) -> Order | None:
        return of_library(problem, config, machine)

    def tiles(self, problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
        apart = FusedConfig(algorithm="copy_gather", kernel=self.kernel)
        if problem.world_size <= 2:
            return [apart]
        return [apart, replace(apart, ranks_together=problem.world_size - 1)]

    def times(self, problem: Problem, config: FusedConfig, machine: Machine) -> Prediction:
        """Return the times of the rank that takes longest."""
        product, link, total = _copied_us(problem, config, machine)
        return Prediction(product, link, total + problem.epilogue.us(problem, machine))

    def label(self, problem: Problem, config: FusedConfig) -> str:
        together = f", {config.ranks_together} ranks' rows together" if config.ranks_together > 1 else ""
        return f"{self.kernel}{together}" + ("" if problem.weights is PLAIN else f", {problem.weights.name}")


def steps_of(problem: Problem, config: FusedConfig) -> list[range]:
    """Return the ranks whose rows are multiplied together, counted from the rank itself on; the same on all ranks."""
    peers = problem.world_size - 1
    together = min(peers, max(config.ranks_together, -(-_LEAST_ROWS // max(1, problem.part_rows))))
    if peers == 0:
        return []
    first = peers % together or together  # the smallest group, which the fewest rows hide
    begins = [1, *range(1 + first, peers + 1, together)]
    return [range(begin, end) for begin, end in zip(begins, [*begins[1:], peers + 1], strict=True)]


def rows_of(problem: Problem, rank: int, step: range) -> list[tuple[int, int]]:
    """Return the rows [begin, end) that arrive at `rank` in a step: neighbours but where they begin anew at 0."""
    w, part, M = problem.world_size, problem.part_rows, problem.M
    first, last = (rank + step[0]) % w, (rank + step[-1]) % w
    ranks = [(first, last)] if first <= last else [(first, w - 1), (0, last)]
    spans = [(min(M, low * part), min(M, (high + 1) * part)) for low, high in ranks]
    return [(begin, end) for begin, end in spans if begin < end]


def _copied_us(problem: Problem, config: FusedConfig, machine: Machine) -> tuple[float, float, float]:
    """Return the microseconds of the products, of the copies, and of all, on the rank that takes longest."""
    w = problem.world_size
    copy = problem.part_rows * problem.K * problem.dtype.itemsize / (machine.link_gbs * 1e3) + _COPY_US
    barrier = _BARRIER_US * w
    times = []
    for rank in range(w):
        steps = [rows_of(problem, rank, step) for step in steps_of(problem, config)]
        rows = [part_of(problem.M, w, rank), *(end - begin for step in steps for begin, end in step)]
        products = [_BESIDE_COPIES * us for us in library_us_in_turn(rows, problem, machine)]
        us, sent, done = barrier + products[0], barrier, 1
        for step, there in zip(steps_of(problem, config), steps, strict=True):
            sent += len(step) * copy
            # a barrier beside a product that fills the chip waits for its end
            us = max(us, sent) + barrier + sum(products[done : done + len(there)])
            done += len(there)
        times.append((us, sum(products)))
    total, gemm = max(times)
    return gemm, copy * (w - 1), total
