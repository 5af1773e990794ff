"""The ways in which a problem can be served, a row each: which kernel, for what, and in which configurations.

A plan asks each row of the problem's op for its configurations and takes the fastest (`plan.py`). `supports` gives the
reason why a row cannot serve a problem, or None. The reasons stand in the plan's trace. `predict` gives the time of a
configuration, by the row's function of `overlap_model.py`. `workspace_size.py` gives its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..config import FusedConfig, Prediction
from ..problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, OPS, REDUCE_SCATTER, SUMS, Problem
from . import candidates
from . import kernel_names as names
from . import overlap_model as model
from .fp8_model import MOST_ROWS, MULTIPLE, fits, rounding_us, stream_us
from .machine import Machine
from .orders import Order, of_library, of_stream, of_tiles
from .tile_model import gemm_us
from .torch_model import gate_us
from .torch_ways import TORCH_WAYS

Supports = Callable[[Problem, Machine], str | None]
_NORM_US = 2.5  # a residual sum and a norm of few rows, by a kernel of their own
_DEEPEST_SCATTERED = 8192  # along K, of products whose rows two ranks send each other
_MOST_UNHIDDEN, _MOST_ROUNDED = 1 << 22, 1 << 20  # elements that travel behind a product; in eight bits it hides less


@dataclass(frozen=True)
class Way:
    """`ops`: those that it may serve. `together`: given the product's microseconds, those of what travels and of both.

    Where torch multiplies it is None, for `TORCH_WAYS` knows. `most`: elements of the largest result whose exchange it
    hides; None: any. `order`: in which a configuration adds up a row's products; None where that depends on how many
    rows there are. `by_tree`: whether it knows sums that are the same on any number of ranks.
    """

    kernel: str
    ops: tuple[str, ...]
    supports: Supports
    configs: Callable[[Problem, Machine], Sequence[FusedConfig]]
    together: Callable[[Problem, FusedConfig, Machine, float], tuple[float, float]] | None = None
    most: Callable[[Problem], int] | None = None
    order: Callable[[Problem, FusedConfig, Machine], Order | None] = of_tiles
    by_tree: bool = False

    def asked(self, problem: Problem) -> Problem:
        """`problem` as this way would serve it: what knows nothing of the tree, without its promise."""
        return problem if self.by_tree or not problem.by_tree else replace(problem, invariant=None, depths=())


def _any(problem: Problem, machine: Machine) -> str | None:
    return None


def _of_16_bits(problem: Problem, machine: Machine) -> str | None:
    return "it multiplies no weights in eight bits" if problem.fp8 else None


def _rounded(problem: Problem, machine: Machine) -> str | None:
    """For weights in eight bits, whose rows of A are rounded, too: only what Hopper's tensor cores take."""
    if not problem.fp8:
        return None
    if not machine.warp_specialised or problem.dtype != torch.bfloat16:
        return "it multiplies rows rounded to eight bits on Hopper only, of bf16"
    if problem.M <= MOST_ROWS and not problem.invariant:
        return f"up to {MOST_ROWS} rows are not rounded"
    if problem.K % MULTIPLE or problem.N % MULTIPLE:
        return f"K and N are no multiples of {MULTIPLE}"
    return None


def _specialised(problem: Problem, machine: Machine) -> str | None:
    """What all warp-specialised kernels need; elsewhere their portable stand-ins would run."""
    if problem.fp8:
        return _rounded(problem, machine)
    if not machine.warp_specialised:
        return "it needs a Hopper GPU"
    if problem.dtype.itemsize != 2:
        return f"it does not multiply {problem.dtype}"
    width = problem.N // 2 if problem.gated else problem.N  # of out
    if not (problem.whole_vectors(problem.K) and problem.whole_vectors(width)):
        return "rows begin between vectors of 16 bytes"
    return None


def _two_shot(problem: Problem, machine: Machine) -> str | None:
    if problem.world_size < 3 or problem.M <= 128:
        return "it is for 129 rows and more, among three ranks and more"
    return _specialised(problem, machine)


def _pair(problem: Problem, machine: Machine) -> str | None:
    if problem.world_size != 2 or problem.M <= 64:
        return "it is for 65 rows and more, between two ranks"
    if problem.by_tree and not problem.by_halves:
        return "not each of the ranks has half of the leaves of K"
    return _specialised(problem, machine)


def _pair_scatter(problem: Problem, machine: Machine) -> str | None:
    if problem.form != "rows" or problem.fp8:
        return "it scatters rows, with weights in 16 bits"
    if problem.K > _DEEPEST_SCATTERED:
        return "a product so deep hides all that follows it"
    return _pair(problem, machine)


def _stream(problem: Problem, machine: Machine) -> str | None:
    if problem.invariant:
        return "more rows are rounded to eight bits, and few must not differ"
    if not problem.fp8 or not fits(problem.M, problem.K):
        return f"it is for weights in eight bits and up to {MOST_ROWS} rows, K a multiple of 128"
    return None if machine.warp_specialised and problem.dtype == torch.bfloat16 else "it needs a Hopper GPU and bf16"


def _brought(problem: Problem, machine: Machine) -> str | None:
    if problem.form != "rows" or problem.fp8:
        return "copy engines bring rows, to weights in 16 bits"
    return _specialised(problem, machine)


def _torch(algorithm: str) -> Supports:
    def supports(problem: Problem, machine: Machine) -> str | None:
        reason = TORCH_WAYS[algorithm].supports(problem)
        if problem.fp8:
            streams = problem.op == ALL_REDUCE and _stream(problem, machine) is None
            return "few rows: a stream of weights needs no library" if streams else reason
        if not machine.name.startswith("NVIDIA") or problem.dtype.itemsize != 2:
            return "the time of the library's product is not known here"
        if problem.world_size == 1:
            return "one rank: no collective to follow"
        few = problem.gemm[0] <= 64
        return "few rows: a stream of weights needs no library" if few else reason

    return supports


def _by_tree(problem: Problem, machine: Machine) -> str | None:
    return None if problem.by_tree else "it is for sums that are the same on any number of ranks"


def _unhidden(problem: Problem) -> int:
    return _MOST_ROUNDED if problem.fp8 else _MOST_UNHIDDEN


WAYS = (
    Way(names.LAMPORT, (*SUMS, MATMUL_GATHER), _rounded, candidates.lamport, model.lamport, _unhidden),
    Way(names.LAMPORT_GATHER, (GATHER_MATMUL,), _of_16_bits, candidates.lamport, model.lamport, _unhidden),
    Way(names.TREE, SUMS, _by_tree, candidates.tree, model.tree, by_tree=True),
    Way(names.LAMPORT_FP8, (ALL_REDUCE,), _stream, candidates.streamed, model.lamport, _unhidden, of_stream),
    Way(names.REDUCE, SUMS, _of_16_bits, candidates.overlapped, model.reduced),
    Way(names.GATHER, (MATMUL_GATHER,), _of_16_bits, candidates.overlapped, model.gathered),
    Way(names.GATHER_FIRST, (GATHER_MATMUL,), _of_16_bits, candidates.overlapped, model.overlapped),
    Way(names.HOPPER_REDUCE, SUMS, _specialised, candidates.hopper, model.hopper_overlapped),
    Way(names.HOPPER_GATHER, (MATMUL_GATHER,), _specialised, candidates.hopper, model.hopper_overlapped),
    Way(
        names.LAMPORT_TWO_SHOT, (ALL_REDUCE,), _two_shot, candidates.specialised_lamport, model.lamport_two_shot,
        lambda problem: 1 << 23,
    ),
    Way(
        names.LAMPORT_PAIR, (ALL_REDUCE,), _pair, candidates.specialised_lamport, model.lamport_pair,
        lambda problem: 1 << 24, by_tree=True,
    ),
    Way(
        names.LAMPORT_PAIR_SCATTER, (REDUCE_SCATTER,), _pair_scatter, candidates.specialised_lamport,
        model.lamport_pair_scatter, lambda problem: 1 << 23, by_tree=True,
    ),
    Way(names.HOPPER_GATHER_FIRST, (GATHER_MATMUL,), _brought, candidates.brought, model.copy_gathered),
    Way(names.SEQUENTIAL, OPS, _torch("sequential"), candidates.sequential, order=of_library),
    Way(names.COPY_GATHER, (GATHER_MATMUL,), _torch("copy_gather"), candidates.copied, order=of_library),
)  # fmt: skip
_BY_KERNEL = {way.kernel: way for way in WAYS}


def hides(way: Way, problem: Problem) -> bool:
    """Whether the product hides enough of the exchange; a sum by tree has no other way."""
    travels = problem.M * problem.K << 1 if problem.op == GATHER_MATMUL else problem.M * problem.N
    return way.most is None or problem.by_tree or travels <= way.most(problem)


def predict(problem: Problem, config: FusedConfig, machine: Machine) -> Prediction:
    """The time that `config` should take."""
    kernel = names.kernel_for(problem, config)
    behind = gate_us(problem, machine) if problem.gated and kernel != names.HOPPER_GATHER_FIRST else 0.0
    behind += _NORM_US if problem.normed and not names.ends_with_norm(problem, config) else 0.0
    together = _BY_KERNEL[kernel].together
    if together is None:
        gemm, link, total = TORCH_WAYS[config.algorithm].times(problem, config, machine)
        return Prediction(gemm, link, total + behind)
    streams = kernel == names.LAMPORT_FP8
    gemm = stream_us(problem, machine) if streams else gemm_us(problem, config, machine)
    link, total = together(problem, config, machine, gemm)
    if problem.fp8 and not streams:
        behind += rounding_us(problem.M, problem.K, machine)
    return Prediction(gemm, link, total + machine.launch_us + behind)
