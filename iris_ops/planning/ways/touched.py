"""The products of few tokens and quantised experts: a stream of the experts touched.

`moe/touched_stream.py` is the first one, `moe/touched_down.py` the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from iris.machines import Machine

from ...config import FusedConfig
from ...problem import Problem
from ..moe_ways import MOST_STREAMED_PAIRS, need_sorting, waits_too_wide, weight_bytes
from ..needs import LINE
from ..sums import ANY_ORDER
from ..weights import FORMATS
from ..weights.streams import on_hopper
from .mixtures import GROUPED, LAMPORT, Combine, Down, DownInSteps, GroupedFew, Mixture

STREAM, STREAM_DOWN = "moe.touched_stream", "moe.touched_down"
MOST_TOKENS = 32
ROWS, COLUMNS, RESIDENT = 8, 64, 2  # of a program's item: pairs, columns; programs on a multiprocessor at once
# The kernel chooses all of it itself. Where it cannot load a rank's tensors, another takes this tile.
_TILE = FusedConfig(16, 128, 128, num_warps=4, num_stages=3, algorithm="one_shot")
# Microseconds until the first weights arrive and after the last, beside a launch. Microseconds of an item beside its
# steps, which have `_DEPTH` numbers along K each; their time over that of their bytes, of 8-bit and of 4-bit codes.
# Measured on H200 (`benchmarks/results/experts_touched_h200_x2.json`).
_ENDS_US, _ITEM_US, _LONGER, _HALF_LONGER, _DEPTH = 1.8, 0.7, 1.02, 1.16, 4 * LINE


def too_many(problem: Problem) -> str | None:
    """Return why the stream serves no problem of these sizes on any machine, or None."""
    if problem.M > MOST_TOKENS or not problem.weights.streamable(1, problem.K):
        return f"it is for up to {MOST_TOKENS} tokens, and K a multiple of {problem.weights.granule}"
    if problem.pairs > MOST_STREAMED_PAIRS or need_sorting(problem.pairs, problem.experts.count):
        return f"each program finds the experts of at most {MOST_STREAMED_PAIRS} pairs"
    if problem.experts.count * problem.N >= 1 << 31:
        return "columns of all experts are 2**31 or more"
    return None


class Touched(Mixture):
    """Experts stay codes until they are in registers. More tokens are summed in another order."""

    supports = "moe.touched_stream:supports"
    weights = frozenset(w for w in FORMATS if w.widening)
    sums = frozenset((ANY_ORDER,))

    def accepts(self, problem: Problem, machine: Machine) -> str | None:
        return too_many(problem) or (None if on_hopper(problem, machine) else "it needs a Hopper GPU and bf16")

    def means(self, problem: Problem, config: FusedConfig) -> bool:
        alike = config.kernel == self.kernel and config.algorithm in self.algorithms
        return alike and problem.weights in self.weights and problem.sums.kind in self.sums

    def tiles(self, problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
        return [replace(_TILE, kernel=self.kernel)]

    def product_us(self, problem: Problem, config: FusedConfig, machine: Machine) -> float:
        """Return the time of the multiprocessors that have most items, which load whole steps along K."""
        items = problem.experts.touched(problem.pairs) * -(-problem.N // COLUMNS)
        step = COLUMNS * _DEPTH * weight_bytes(problem) * machine.num_programs / (machine.hbm_gbs * 1e3)
        longer = _LONGER if weight_bytes(problem) >= 1 else _HALF_LONGER
        item = _ITEM_US + -(-problem.K // _DEPTH) * step * longer
        return _ENDS_US + -(-items // machine.num_programs) * item

    def label(self, problem: Problem, config: FusedConfig) -> str:
        return self.kernel


class TouchedStream(Touched, GroupedFew):
    """The first product."""

    kernel = STREAM
    launcher = "moe.touched_stream:launch"
    fallback = GROUPED


class TouchedDown(Touched, Down):
    """The way back, which ends as `moe/lamport_down.py` does."""

    kernel = STREAM_DOWN
    launcher = "moe.touched_down:launch"
    fallback = LAMPORT

    def accepts(self, problem: Problem, machine: Machine) -> str | None:
        if reason := super().accepts(problem, machine) or waits_too_wide(problem, _TILE.block_n, machine):
            return reason
        # Ranks with other parts of K must choose the same exchange: where this one wins, it does without the product.
        rest, others = self.rest_us(problem, machine), (Combine(), DownInSteps())
        slower = any(way.rest_us(problem, machine) < rest for way in others)
        return "sums that travel while others are added up take less time" if slower else None
