"""The first product of many tokens and quantised experts by codes that tensor cores take from registers."""

from __future__ import annotations

from iris.machines import Machine

from ...config import FusedConfig
from ...problem import Problem
from ..moe_ways import MOST_STREAMED_PAIRS, widened
from ..sums import ANY_ORDER
from ..weights import WIDENED as FORMATS
from .mixtures import GROUPED, GroupedMany

WIDENED = "moe.widened_matmul"


class WidenedMatmul(GroupedMany):
    """Tokens are sorted before it, also where they are so few that other products search for theirs."""

    kernel = WIDENED
    launcher = "moe.widened_matmul:launch"
    supports = "moe.widened_matmul:supports"
    fallback = GROUPED
    weights = frozenset(FORMATS)
    sums = frozenset((ANY_ORDER,))
    multiplies_sorted = True

    def accepts(self, problem: Problem, machine: Machine) -> str | None:
        if widened(problem, machine):
            return None
        return f"it is for bf16, a Hopper GPU and more than {MOST_STREAMED_PAIRS} pairs of token and expert"

    def means(self, problem: Problem, config: FusedConfig) -> bool:
        alike = config.kernel == self.kernel and config.algorithm in self.algorithms
        return alike and problem.weights in self.weights and problem.sums.kind in self.sums
