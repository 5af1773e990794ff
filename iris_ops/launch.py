"""From a plan and a rank's tensors to the steps of a call. This is the last choice: steps launch what they name.

A plan knows shapes. Which kernel loads a rank's tensors depends on their layout too. Where rows begin between vectors
of 16 bytes, for one, the way's stand-in runs, which sends the same values to the same places. The log says why, once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .config import MOST_ELEMENTS, FusedConfig
from .fp8 import scaled_matmul, weight_stream
from .kernels.descriptors import in_whole_vectors
from .operands import Operands
from .planning.machine import machine_of
from .planning.needs import GATE, NORM
from .planning.plan import way_for, way_named
from .planning.way import Way
from .problem import GATHER_MATMUL, MATMUL_GATHER, Problem
from .steps import BiasTogether, Gate, Halves, Kernel, Norm, PartOfNothing, Restore, Round, Several, Step, named

if TYPE_CHECKING:
    from iris.rank import Rank


def supports(way: Way, problem: Problem, config: FusedConfig, rank: int, tensors: Operands) -> str | None:
    """The reason why the way's kernel cannot run on `tensors`, or None."""
    return named(way.supports)(problem, config, rank, tensors) if way.supports else None


def loading(rank: Rank, problem: Problem, config: FusedConfig, tensors: Operands) -> tuple[Way, FusedConfig]:
    """The way that runs on `tensors`: the one that `config` stands for, or its stand-in. Ranks may differ in this."""
    planned = way = way_for(problem, config)
    if reason := supports(planned, problem, config, rank.cur_rank, tensors):
        way, told = way_named(planned.standing(problem)), rank.once(_Told).planned
        if planned.kernel not in told:
            told.add(planned.kernel)
            rank.log.info(f"{problem.asked}: {way.kernel} runs in place of {planned.kernel}: {reason}")
    config = way.standing_in(problem, config, machine_of(rank.device))
    return way, config if config.kernel == way.kernel else replace(config, kernel=way.kernel)


def steps_of(
    rank: Rank, problem: Problem, config: FusedConfig, tensors: Operands, normed: bool
) -> tuple[Step, ...]:  # fmt: skip
    """The steps of a call. `normed`: whether a norm follows it."""
    before: list[Step] = []
    out, A, B, bias, scale = tensors
    if bias is not None and bias.stride(0) != 1:
        before.append(BiasTogether())
        bias = bias.contiguous()
    if problem.op == MATMUL_GATHER and problem.form == "rows" and B.shape[1] < problem.N:
        before.append(PartOfNothing())
        A, B, bias = A[:0], A.t(), None
    tensors, planned = Operands(out, A, B, bias, scale), way_for(problem, config)
    ends_with_norm = NORM in planned.fuses(problem, config)
    halves = problem.gated and GATE not in planned.fuses(problem, config)
    if halves:
        before.append(Halves(problem))
        tensors = tensors._replace(out=out.new_empty(problem.M, problem.N))
    # the product of several launches rounds by itself, and a stream takes rows as they are
    as_it_is = problem.fp8 and (planned.several_launches or not planned.rounds_rows(problem))
    way, chosen = loading(rank, problem, config, tensors) if as_it_is or not problem.fp8 else (planned, config)
    if problem.fp8 and way.rounds_rows(problem):
        weight = _rounded_weight(rank, problem, config, tensors)
        if weight is None:
            weight, problem = out.new_empty(B.shape[1], B.shape[0]).t(), replace(problem, fp8=False)
            before.append(Restore())
            tensors = Operands(tensors.out, A, weight, bias)
        else:
            before.append(Round())
            tensors = Operands(tensors.out, weight.t(), weight, bias)  # rounded rows lie as those of the weight do
        way, chosen = loading(rank, problem, config, tensors)
    config, fused = chosen, normed and ends_with_norm
    step: Step = Several(way, problem, config)
    if not way.several_launches:
        pieces = -(-problem.M // way.most_rows(problem, config))
        step = Kernel(way, problem, config, fused, max(1, pieces))
    behind: list[Step] = [Gate()] if halves else []
    if normed and not fused:
        behind.append(Norm())
    return (*before, step, *behind)


def _rounded_weight(rank: Rank, problem: Problem, config: FusedConfig, tensors: Operands) -> torch.Tensor | None:
    """B as it is multiplied with rounded rows of A, of which there are more than few; None where that cannot be."""
    out, A, B, bias, _ = tensors
    few = problem.M <= weight_stream.MOST_ROWS and not problem.invariant
    rounds = problem.op != GATHER_MATMUL and not few
    if not rounds or not scaled_matmul.multiplies_in_fp8(B.shape, B.device, A.dtype):
        return None
    if max(config.block_m, config.block_n) * config.depth(True) > MOST_ELEMENTS:
        return None
    B = in_whole_vectors(B.t()).t()
    way = way_for(problem, config)
    if config.algorithm != "overlapped" and not way.warp_specialised:
        return B
    # a portable kernel of tiles that overlap takes no scales
    rows = Operands(out, B.t(), B, bias)
    specialised = way.warp_specialised and supports(way, problem, config, rank.cur_rank, rows) is None
    return B if specialised else None


class _Told:
    def __init__(self, rank: Rank) -> None:
        self.planned: set[str] = set()
