"""Few tokens by quantised experts: a stream of the experts that are touched (`moe/touched_stream.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from iris.machines import Machine

from ...config import FusedConfig
from ...problem import Problem
from ..moe_ways import need_sorting, waits_too_wide, weight_bytes
from ..operations import DOWN_ALL_REDUCE, GATE_UP
from ..sums import ANY_ORDER
from ..way import Sizes
from ..weights import FORMATS
from ..weights.streams import on_hopper
from ..workspace_size import exchange_ld
from .mixtures import GROUPED, LAMPORT, Mixture

STREAM_GATE_UP, STREAM_DOWN = "moe.stream_gate_up", "moe.stream_down"
MOST_TOKENS = 16
MOST_PAIRS = 256  # that are all compared with each other: tokens and experts of a token, rounded up
# What its kernels choose for themselves; or, where the hardware cannot load a rank's tensors, the tile in their place.
_TILE = dict(block_m=16, block_n=128, block_k=128, num_warps=4, num_stages=3, algorithm="one_shot")
# Columns of a program's item, and what reading A and adding up lines cost, in columns.
_WIDTHS, _SHARED_WORK = {GATE_UP: (32, 64), DOWN_ALL_REDUCE: (16, 32)}, 6
_DRAWN, _FIRST_US = 0.8, 1.5  # of what memory gives; until the first weights are there, and after the last


def columns_at_once(problem: Problem, programs: int) -> int:
    """Return of how many columns of the weights a program's item is, so that multiprocessors end together."""

    def most(width: int) -> float:
        groups = -(-problem.N // width) * (1 if problem.operation.sums else problem.experts.touched(problem.pairs))
        return -(-groups // programs) * (width + _SHARED_WORK)

    return min(reversed(_WIDTHS[problem.op]), key=most)


def too_many(problem: Problem) -> str | None:
    """Return why the stream serves no problem of these sizes on any machine, or None."""
    if problem.M > MOST_TOKENS or not problem.weights.streamable(problem.M, problem.K):
        return f"it is for up to {MOST_TOKENS} tokens, and K a multiple of {problem.weights.granule}"
    rows, choices = 8 if problem.M <= 8 else MOST_TOKENS, 1 << (problem.experts.top_k - 1).bit_length()
    if rows * choices > MOST_PAIRS or need_sorting(problem.pairs, problem.experts.count):
        return f"each program finds the experts of at most {MOST_PAIRS} pairs"
    if problem.experts.count * problem.N >= 1 << 31:
        return "columns of all experts are 2**31 or more"
    return None


class TouchedStream(Mixture):
    """Experts as codes stay so until they are in registers. More tokens are summed otherwise."""

    algorithms = ("one_shot",)
    supports = "moe.touched_stream:supports"
    weights = frozenset(w for w in FORMATS if w.widening)
    sums = frozenset((ANY_ORDER,))

    def accepts(self, problem: Problem, machine: Machine) -> str | None:
        return too_many(problem) or (None if on_hopper(problem, machine) else "it needs a Hopper GPU and bf16")

    def means(self, problem: Problem, config: FusedConfig) -> bool:
        alike = config.kernel == self.kernel and config.algorithm in self.algorithms
        return alike and problem.weights in self.weights and problem.sums.kind in self.sums

    def tiles(self, problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
        return [FusedConfig(**_TILE, kernel=self.kernel)]

    def product_us(self, problem: Problem, config: FusedConfig, machine: Machine) -> float:
        width = columns_at_once(problem, machine.num_programs)
        touched = problem.experts.touched(problem.pairs)
        items = -(-problem.N // width) * (1 if problem.operation.sums else touched)
        # the fullest multiprocessors are the last to end, once there are fewer than draw all that memory gives
        rounds = -(-items // machine.num_programs)
        drawing = max(min(1.0, items / (_DRAWN * machine.num_programs)), items / (rounds * machine.num_programs))
        streamed = touched * problem.N * problem.K * weight_bytes(problem)
        return streamed / (_DRAWN * min(1.0, drawing) * machine.hbm_gbs * 1e3) + _FIRST_US

    def rest_us(self, problem: Problem, machine: Machine) -> float:
        return machine.exchange_us if problem.operation.sums else 0.0

    def label(self, problem: Problem, config: FusedConfig) -> str:
        return self.kernel


class StreamGateUp(TouchedStream):
    """Gate and up."""

    kernel = STREAM_GATE_UP
    launcher = "moe.touched_stream:launch_gate_up"
    fallback = GROUPED
    ops = frozenset((GATE_UP,))


class StreamDown(TouchedStream):
    """The way back: a program sums all experts for its columns."""

    kernel = STREAM_DOWN
    launcher = "moe.touched_stream:launch_down"
    fallback = LAMPORT
    ops = frozenset((DOWN_ALL_REDUCE,))

    def accepts(self, problem: Problem, machine: Machine) -> str | None:
        return super().accepts(problem, machine) or waits_too_wide(problem, _TILE["block_n"], machine)

    def workspace(self, problem: Problem, config: FusedConfig, programs: int) -> Sizes:
        elements = problem.world_size * problem.M * exchange_ld(problem.N)
        return Sizes(exchange=2 * elements * problem.dtype.itemsize)
