"""Steps before a product with weights in fp8, whose kernel takes rounded rows or a weight in A's dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..config import MOST_ELEMENTS
from ..kernels.descriptors import in_whole_vectors
from ..launch import supports
from ..operands import Operands
from ..planning.needs import PLAIN
from ..planning.plan import way_for
from ..planning.weights.fp8 import FP8
from ..problem import GATHER_MATMUL, TMA_ALIGNMENT
from . import scaled_matmul
from .restoring import restored

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig
    from ..problem import Problem
    from ..steps import Run, Step
    from ..workspace import Workspace


@dataclass(frozen=True)
class Round:
    """Rows of A are rounded to fp8, with a scale each, to memory of the workspace."""

    def __call__(self, run: Run) -> None:
        out, A, B, bias, scale = run.tensors
        weight, rows = in_whole_vectors(B.t()).t(), A if A.stride(1) == 1 else A.contiguous()
        rounded, scales = _room(run.workspace, *A.shape)
        launch = scaled_matmul.launch_rounding(run.kernels, rounded, scales, rows, run.moving)
        copied = rows is not A or weight.data_ptr() != B.data_ptr()  # copies are for now
        run.launches.append(None if copied else launch)
        assert scale is not None
        of_weight = dict(b_scales=scale) if scale.ndim == 1 else dict(block_scales=scale, block_stride=scale.stride(0))
        run.tensors, run.scales = Operands(out, rounded, weight, bias), dict(a_scales=scales, **of_weight)


@dataclass(frozen=True)
class Restore:
    """Compute the weight [N, K] that B and its scales represent, in A's dtype. K: None for a weight of no padding."""

    K: int | None = None

    def __call__(self, run: Run) -> None:
        out, A, B, bias, scale = run.tensors
        assert scale is not None
        run.launches.append(None)
        run.tensors = Operands(out, A, restored(B.t(), scale, self.K or B.shape[0], A.dtype).t(), bias)


def operands(
    rank: Rank, problem: Problem, config: FusedConfig, tensors: Operands
) -> tuple[list[Step], Operands, Problem]:
    """Return the steps before the product, and what its kernel is given: tensors like these, of that problem."""
    out, A, B, bias, _ = tensors
    weight = _rounded_weight(rank, problem, config, tensors)
    if weight is None:
        weight = out.new_empty(B.shape[1], problem.K).t()
        return [Restore(problem.K)], Operands(out, A, weight, bias), replace(problem, weights=PLAIN)
    return [Round()], Operands(out, weight.t(), weight, bias), problem  # rounded rows lie as those of the weight do


def restored_operands(
    rank: Rank, problem: Problem, config: FusedConfig, tensors: Operands
) -> tuple[list[Step], Operands, Problem]:
    """Restore B to A's dtype, for formats that only the stream of few rows multiplies directly."""
    out, A, B, bias, _ = tensors
    weight = out.new_empty(B.shape[1], problem.K).t()
    return [Restore(problem.K)], Operands(out, A, weight, bias), replace(problem, weights=PLAIN)


def _rounded_weight(rank: Rank, problem: Problem, config: FusedConfig, tensors: Operands) -> torch.Tensor | None:
    """Return B in the form that is multiplied by rounded rows of A, or None where rows are not rounded."""
    out, A, B, bias, _ = tensors
    rounds = problem.op != GATHER_MATMUL and not problem.weights.unrounded(problem)
    if not rounds or not scaled_matmul.multiplies_in_fp8(B.shape, B.device, A.dtype):
        return None
    if max(config.block_m, config.block_n) * config.depth(problem.itemsize) > MOST_ELEMENTS:
        return None
    B = in_whole_vectors(B.t()).t()
    way = way_for(problem, config)
    if config.algorithm != "overlapped" and not way.warp_specialised:
        return B
    # a portable kernel of tiles that overlap takes no scales
    rows = Operands(out, B.t(), B, bias)
    specialised = way.warp_specialised and supports(way, problem, config, rank.cur_rank, rows) is None
    return B if specialised else None


def _room(workspace: Workspace, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for rows in fp8 and a scale of each: this rank's own, for calls that follow each other."""
    scales = -(-4 * rows // TMA_ALIGNMENT) * TMA_ALIGNMENT
    room = workspace.local("rounded rows", scales + rows * cols)
    return room[scales:].view(FP8).view(rows, cols), room[: 4 * rows].view(torch.float32)
