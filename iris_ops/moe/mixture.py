"""The steps of a mixture's op: sort pairs of token and expert, and launch the op's kernels.

Nothing waits for the device, and no shape depends on the routing, so a call can be captured in a CUDA graph once it
was made outside one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from ..launch import way_for_tensors
from ..named import named
from ..planning.moe_ways import need_sorting
from ..problem import Problem
from ..steps import Run, Step, ready
from .operands import Down, GateUp, parts_of
from .routing import Routing

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig


def steps_of(rank: Rank, problem: Problem, config: FusedConfig, tensors: GateUp | Down) -> tuple[Step, ...]:
    """Return the steps of a call; none where this rank has no columns."""
    way, chosen = way_for_tensors(rank, problem, config, tensors)
    if not problem.N:
        return ()
    launch = named(way.launcher)
    few = chosen.algorithm == "one_shot" and not need_sorting(problem.pairs, problem.experts.count)
    return (
        ready,
        _take_unsorted if few else partial(_sort, problem),
        lambda run: launch(run, run.workspace, problem, chosen, run.tensors),
    )


def _take_unsorted(run: Run) -> None:
    """Give the product the experts as they were chosen, among which its programs look for their rows."""
    run.tensors = run.tensors._replace(where=parts_of(run.tensors.where)[0])


def _sort(problem: Problem, run: Run) -> None:
    """Sort pairs by their experts, unless `moe_route` has."""
    chosen, ends = run.tensors.where, problem.experts.count + 1
    if isinstance(chosen, Routing):
        return
    room = run.workspace.local("moe routing", 4 * (problem.pairs + ends)).view(torch.int32)
    routing = Routing(chosen, room[ends:], room[:ends])
    routing.sort(run)
    run.tensors = run.tensors._replace(where=routing)
