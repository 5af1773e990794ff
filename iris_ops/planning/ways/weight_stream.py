"""Few rows by quantised weights, widened in registers (`quantised/lamport_stream.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from iris.machines import Machine

from ...config import FusedConfig
from ...problem import ALL_REDUCE, Problem
from ..epilogues import Epilogue
from ..needs import LINE
from ..orders import Order
from ..sums import ANY_ORDER
from ..weights import FORMATS
from ..weights.streams import stream_refused, stream_us
from .lamport import LAMPORT, Lamport, norm_inside

LAMPORT_STREAM = "quantised.lamport_stream"
# What its kernel chooses for itself; or, where a rank's operands do not lie as they must, the tile in its place.
STREAM_CONFIG = FusedConfig(16, 64, 128, num_warps=4, num_stages=4, algorithm="one_shot", kernel=LAMPORT_STREAM)


class WeightStream(Lamport):
    """The rows of A are not rounded. Equal bits are not supported: more rows are multiplied differently."""

    kernel = LAMPORT_STREAM
    launcher = "quantised.lamport_stream:launcher"
    supports = "quantised.lamport_stream:supports"
    options = "quantised.lamport_stream:options"
    ops = frozenset((ALL_REDUCE,))
    algorithms = ("one_shot",)
    weights = frozenset(w for w in FORMATS if w.widening)
    sums = frozenset((ANY_ORDER,))
    fallback = LAMPORT

    def accepts(self, problem: Problem, machine: Machine) -> str | None:
        return stream_refused(problem, machine)

    def means(self, problem: Problem, config: FusedConfig) -> bool:
        own = config.algorithm == "one_shot" and config.kernel in ("", self.kernel)
        return own and problem.weights in self.weights and problem.weights.streams(problem)

    def rounds_rows(self, problem: Problem) -> bool:
        return False

    def tiles(self, problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
        return [STREAM_CONFIG]

    def product_us(self, problem: Problem, config: FusedConfig, machine: Machine) -> float:
        return stream_us(problem, machine)

    def order(self, problem: Problem, config: FusedConfig, machine: Machine) -> Order | None:
        return Order("stream", LINE)  # whose warps share K, a line of memory each

    def fuses(self, problem: Problem, config: FusedConfig) -> tuple[Epilogue, ...]:
        return norm_inside(problem, config)

    def label(self, problem: Problem, config: FusedConfig) -> str:
        return self.kernel
