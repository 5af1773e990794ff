"""Turn a call's tensors into a problem, and its plan into steps. This is the last choice: steps launch what they name.

A plan knows shapes only. Which kernel can load a rank's tensors depends on their layout, too. For example, if rows do
not begin at multiples of 16 bytes, the way's fallback runs, which sends the same values to the same places. The log
says why, once.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from iris.machines import machine_of

from .checks import check_bias, check_depth, check_tensors
from .config import FusedConfig
from .kernels import rmsnorm_epilogue
from .named import named
from .operands import Operands
from .planning.plan import way_for, way_named
from .planning.way import Way
from .problem import MATMUL_GATHER, Problem, describe
from .steps import Kernel, Several, Step, all_columns, changed, finished, part_of_nothing, ready

if TYPE_CHECKING:
    from iris.rank import Rank


def supports(way: Way, problem: Problem, config: FusedConfig, rank: int, tensors: Any) -> str | None:
    """Return the reason why the way's kernel cannot run on `tensors`, or None."""
    return named(way.supports)(problem, config, rank, tensors) if way.supports else None


def way_for_tensors(rank: Rank, problem: Problem, config: FusedConfig, tensors: Any) -> tuple[Way, FusedConfig]:
    """Return the way that runs on `tensors`: the one of `config`, or its fallback. Ranks may differ in this."""
    planned = way = way_for(problem, config)
    if reason := supports(planned, problem, config, rank.cur_rank, tensors):
        way, reported = way_named(planned.fallback_for(problem)), rank.once(_reported)
        if planned.kernel not in reported:
            reported.add(planned.kernel)
            rank.log.info(f"{problem.called_op}: {way.kernel} runs in place of {planned.kernel}: {reason}")
    return way, way.fallback_config(problem, config, machine_of(rank.device))


def described(rank: Rank, call: Any) -> Problem:
    """Return the problem of a product's call. Raises a typed error for tensors that describe none."""
    op, (out, A, B, bias, scale) = call.op, call.tensors
    check_tensors(op, out, A, B, bias, scale, rank.device)
    problem = describe(op, out, A, B, rank.cur_rank, rank.num_ranks, scale)
    problem = rank.level.promise(problem, call.k_per_rank, bias is not None)
    check_depth(op, A, call.k_per_rank, rank.cur_rank)
    check_bias(op, bias, B)
    if call.epilogue:
        rmsnorm_epilogue.check(call.epilogue, out)
    return problem


def steps_of(rank: Rank, problem: Problem, config: FusedConfig, tensors: Operands) -> tuple[Step, ...]:
    """Return the steps of a call."""
    planned, epilogue = way_for(problem, config), problem.epilogue
    fused = not epilogue.separate or epilogue in planned.fuses(problem, config)
    before: list[Step] = [ready]
    after = () if fused else (partial(finished, epilogue),)
    change = None
    if after and epilogue.matrices > 1:
        change = partial(all_columns, problem)
    elif problem.op == MATMUL_GATHER and problem.form == "rows" and tensors.B.shape[1] < problem.N:
        change = part_of_nothing
    if change:
        before, tensors = [ready, partial(changed, change)], change(tensors)
    way, chosen = planned, config
    if planned.several_launches or not planned.rounds_rows(problem):  # it takes rows unrounded
        way, chosen = way_for_tensors(rank, problem, config, tensors)
    if way.rounds_rows(problem) or problem.weights not in way.weights:
        more, tensors, problem = named(problem.weights.operands)(rank, problem, config, tensors)
        before += more
        way, chosen = way_for_tensors(rank, problem, config, tensors)
    if way.several_launches:
        return *before, Several(way, problem, chosen), *after
    # of the plan: the same on all ranks, also where another kernel loads a rank's tensors
    pieces = max(1, -(-problem.M // planned.most_rows(problem, config)))
    launches = (Kernel(way, problem, chosen, fused, piece, pieces) for piece in range(pieces))
    return *before, *launches, *after


def _reported(rank: Rank) -> set[str]:
    """Return the kernels whose fallback this rank's log has named: none yet."""
    return set()
