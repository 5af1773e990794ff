"""The ways of a mixture's ops: a grouped product, and what follows it."""

from __future__ import annotations

from collections.abc import Sequence

from iris.machines import Machine

from ...config import FusedConfig, Prediction
from ...problem import Problem
from ..epilogues import Epilogue
from ..experts import least_k
from ..moe_ways import (
    DEEP,
    DEEP_COLUMNS,
    FEW_TILES,
    MOST_CODED_COLUMNS,
    MOST_EXCHANGED,
    MOST_STREAMED_PAIRS,
    MOST_TOKENS,
    NOT_BACK,
    ONE_PROGRAM_GBS,
    ROWS_US,
    SORT_US,
    TOKEN_COLUMNS,
    TOKEN_ELEMENTS,
    TOKEN_STAGES,
    WIDENED_TILES,
    link_us,
    need_sorting,
    one_token,
    product_us,
    sort_us,
    sums_bytes,
    tiles_of,
    tokens_at_once,
    waits_too_wide,
    weight_bytes,
    widened,
    widened_us,
)  # fmt: skip
from ..needs import PLAIN
from ..operations import DOWN_ALL_REDUCE, DOWN_REDUCE_SCATTER, GATE_UP
from ..way import Sizes, Way
from ..weights import FORMATS
from ..workspace_size import exchange_ld

GROUPED, LAMPORT, SEQUENTIAL = "moe.grouped_matmul", "moe.lamport_down", "moe.sequential"
TOKEN, COMBINE = "moe.lamport_token", "moe.lamport_combine"

_WIDENED = f"more than {MOST_STREAMED_PAIRS} pairs take less time by codes that are widened in registers"


class Mixture(Way):
    """A grouped product in tiles that suit the number of pairs of token and expert."""

    weights = frozenset((PLAIN, *FORMATS))
    multiplies_sorted = False  # by `moe/widened_matmul.py`, where that serves a problem

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.algorithms[0]}"

    def means(self, problem: Problem, config: FusedConfig) -> bool:
        return config.algorithm in self.algorithms

    def refuses_tile(self, problem: Problem, block_n: int, machine: Machine) -> str | None:
        """Return the reason why blocks of this width are not supported, or None."""
        return None

    def refuses_config(self, problem: Problem, config: FusedConfig, machine: Machine) -> str | None:
        if config.block_k < (least := least_k(problem.weights)):
            return f"config.block_k is {config.block_k}; expected at least {least}: experts are {problem.weights.name}"
        wide = self.refuses_tile(problem, config.block_n, machine)
        return f"config.block_n is {config.block_n}; expected more, for {wide}" if wide else None

    def fuses(self, problem: Problem, config: FusedConfig) -> tuple[Epilogue, ...]:
        return problem.epilogue.of_tiles

    def rounds_rows(self, problem: Problem) -> bool:
        return False  # kernels widen experts to the tokens' dtype

    def rest_us(self, problem: Problem, machine: Machine) -> float:
        """Return the microseconds of what a call takes beside its product."""
        raise NotImplementedError

    def times(self, problem: Problem, config: FusedConfig, machine: Machine) -> Prediction:
        product = self.product_us(problem, config, machine)
        link = link_us(problem, machine)
        return Prediction(product, link, product + self.rest_us(problem, machine) + machine.launch_us)

    def product_us(self, problem: Problem, config: FusedConfig, machine: Machine) -> float:
        model = widened_us if self.widens(problem, machine) else product_us
        return model(problem, config.block_m, config.block_n, machine)

    def widens(self, problem: Problem, machine: Machine) -> bool:
        """Return whether the product is that of `moe/widened_matmul.py`."""
        return self.multiplies_sorted and widened(problem, machine)

    def most_rows(self, problem: Problem, config: FusedConfig) -> int:
        return max(1, problem.M)

    def tiles(self, problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
        configs, least = [], least_k(problem.weights)
        tiles = WIDENED_TILES if self.widens(problem, machine) else tiles_of(problem, machine)
        for m, n, k, warps, stages, *_ in tiles:
            if not problem.sums.promised and problem.operation.sums and m == NOT_BACK and tiles is not WIDENED_TILES:
                continue
            if (
                not problem.sums.promised
                and not problem.operation.sums
                and problem.M > 1
                and m < 64
                and n >= DEEP_COLUMNS
            ):
                k = DEEP
            if self.refuses_tile(problem, n, machine):
                continue
            if least > 1 and n > MOST_CODED_COLUMNS:
                continue
            k = max(k, least)
            fit = _stages(problem, m, n, k, machine)
            while fit < 2 and k > max(32, least):
                k //= 2
                fit = _stages(problem, m, n, k, machine)
            configs.append(
                FusedConfig(
                    m, n, k, group_m=8, num_warps=warps, num_stages=max(1, min(stages, fit)),
                    algorithm=self.algorithms[0], kernel=self.kernel,
                )
            )  # fmt: skip
        return configs

    def label(self, problem: Problem, config: FusedConfig) -> str:
        return f"{config.kernel} {config.block_m}x{config.block_n}x{config.block_k} {config.algorithm}"


def _stages(problem: Problem, m: int, n: int, k: int, machine: Machine) -> int:
    """Return how many stages of a tile fit, beside the widened tile of codes."""
    size = problem.dtype.itemsize
    block = round((m * size + n * weight_bytes(problem)) * k)
    widened = 0 if problem.weights is PLAIN else n * k * size
    return machine.stages(block) - -(-widened // block)


class GroupedFew(Mixture):
    """The first product of so few pairs that each program looks for its rows by itself."""

    kernel = GROUPED
    launcher = "moe.grouped_matmul:launch"
    ops = frozenset((GATE_UP,))
    algorithms = ("one_shot",)

    def accepts(self, problem: Problem, machine: Machine) -> str | None:
        if widened(problem, machine):
            return _WIDENED
        sorted_first = need_sorting(problem.pairs, problem.experts.count)
        return f"{problem.pairs} pairs of token and expert are sorted first" if sorted_first else None

    def rest_us(self, problem: Problem, machine: Machine) -> float:
        return 0.0


class GroupedMany(GroupedFew):
    """The first product of tokens that are sorted before it."""

    algorithms = ("sequential",)

    def accepts(self, problem: Problem, machine: Machine) -> str | None:
        if widened(problem, machine):
            return _WIDENED
        return None if need_sorting(problem.pairs, problem.experts.count) else "few pairs need not be sorted"

    def rest_us(self, problem: Problem, machine: Machine) -> float:
        return SORT_US


class Down(Mixture):
    """The way back in one hop: a program adds up what the experts give of its columns."""

    kernel = LAMPORT
    launcher = "moe.lamport_down:launch"
    ops = frozenset((DOWN_ALL_REDUCE,))
    algorithms = ("one_shot",)

    def accepts(self, problem: Problem, machine: Machine) -> str | None:
        if not one_token(problem):
            return f"{TOKEN} computes a single token"
        if widened(problem, machine):
            return _WIDENED
        if problem.M > MOST_TOKENS:
            return f"one program would add more than {MOST_TOKENS} tokens of its columns"
        return waits_too_wide(problem, max(n for _, n, *_ in FEW_TILES), machine)

    def means(self, problem: Problem, config: FusedConfig) -> bool:
        return super().means(problem, config) and one_token(problem) is not None

    def refuses_tile(self, problem: Problem, block_n: int, machine: Machine) -> str | None:
        return waits_too_wide(problem, block_n, machine)

    def workspace(self, problem: Problem, config: FusedConfig, programs: int) -> Sizes:
        elements = problem.world_size * problem.M * exchange_ld(problem.N)
        return Sizes(exchange=2 * elements * problem.dtype.itemsize)

    def rest_us(self, problem: Problem, machine: Machine) -> float:
        block_n = max(n for _, n, *_ in FEW_TILES)
        sums = (problem.pairs + problem.M) * block_n * problem.dtype.itemsize / (ONE_PROGRAM_GBS * 1e3)
        copies = problem.world_size - 1
        link = copies * problem.M * problem.N * problem.dtype.itemsize / (machine.link_gbs * 1e3)
        sort = sort_us(problem)
        return machine.exchange_us + -(-problem.M // 16) + sums + link + sort  # a microsecond for 16 tokens


class Token(Down):
    """The way back of one token, whose weights are streamed."""

    kernel = TOKEN
    launcher = "moe.lamport_token:launch"

    def accepts(self, problem: Problem, machine: Machine) -> str | None:
        return one_token(problem)

    def means(self, problem: Problem, config: FusedConfig) -> bool:
        return config.algorithm in self.algorithms and one_token(problem) is None

    def refuses_tile(self, problem: Problem, block_n: int, machine: Machine) -> str | None:
        return None

    def tiles(self, problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
        """Return the tiles, with the fewest columns for which at most two programs run on each multiprocessor."""
        n = next((n for n in TOKEN_COLUMNS if -(-problem.N // n) <= 2 * machine.num_programs), TOKEN_COLUMNS[-1])
        choices = 1 << (problem.experts.top_k - 1).bit_length()
        k = min(256, max(16, TOKEN_ELEMENTS // (n * choices)))
        stages = TOKEN_STAGES[-(-problem.N // n) > machine.num_programs]
        fit = machine.stages(choices * (n + 1) * k * problem.dtype.itemsize)
        config = FusedConfig(
            16, n, k, num_warps=4, num_stages=max(1, min(stages, fit)), algorithm="one_shot", kernel=TOKEN
        )  # fmt: skip
        return [config]

    def product_us(self, problem: Problem, config: FusedConfig, machine: Machine) -> float:
        """Return the time of the best tile, because the choice of the way must not depend on a rank's K."""
        return min(product_us(problem, m, n, machine) for m, n, *_ in FEW_TILES)

    def rest_us(self, problem: Problem, machine: Machine) -> float:
        return machine.exchange_us


class Combine(Mixture):
    """The way back of many tokens, whose sums travel while others are added up."""

    kernel = COMBINE
    launcher = "moe.lamport_combine:launch"
    multiplies_sorted = True
    ops = frozenset((DOWN_ALL_REDUCE, DOWN_REDUCE_SCATTER))

    def accepts(self, problem: Problem, machine: Machine) -> str | None:
        nbytes = sums_bytes(problem, tokens_at_once(problem))
        if nbytes > MOST_EXCHANGED:
            return f"its exchange would take {nbytes >> 20} MiB; at most {MOST_EXCHANGED >> 20}"
        return None

    def workspace(self, problem: Problem, config: FusedConfig, programs: int) -> Sizes:
        return Sizes(exchange=sums_bytes(problem, tokens_at_once(problem)))

    def rest_us(self, problem: Problem, machine: Machine) -> float:
        size = problem.dtype.itemsize
        again = (problem.pairs + 3 * problem.M) * problem.N * size / (machine.hbm_gbs * 1e3)
        link = link_us(problem, machine)
        sort = sort_us(problem)
        launches = -(-problem.M // max(1, tokens_at_once(problem)))
        fixed = ROWS_US + launches * (machine.launch_us + machine.exchange_us) + sort
        return fixed + max(again, link) + 0.2 * min(again, link)


class DownInSteps(Mixture):
    """The way back as a product, a kernel that adds up, and a collective of `iris.ccl`."""

    kernel = SEQUENTIAL
    launcher = "moe.sequential:launch"
    multiplies_sorted = True
    ops = frozenset((DOWN_ALL_REDUCE, DOWN_REDUCE_SCATTER))
    algorithms = ("sequential",)

    def rest_us(self, problem: Problem, machine: Machine) -> float:
        size = problem.dtype.itemsize
        again = (problem.pairs + problem.M) * problem.N * size / (machine.hbm_gbs * 1e3)
        sort = sort_us(problem)
        return ROWS_US + again + link_us(problem, machine) + 2 * machine.exchange_us + machine.launch_us + sort
