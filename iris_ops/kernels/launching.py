"""What launchers share: the grid, and the arguments that several kernels are given.

Each kernel's own launcher stands below it, in its module. It names the kernel's arguments and says on which grid it
runs: `launcher(rank, workspace, problem, config, tensors) -> (kernel, grid, arguments)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris import platform
from iris.device.waits import WAITERS
import torch
import triton

from ..planning.workspace_size import exchange_ld, gathered_part, staged
from ..problem import FP8, Problem
from .descriptors import as_stored, operand, rows_operand

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig
    from ..workspace import Workspace

# A kernel, its grid and its arguments by name.
Launch = tuple[triton.JITFunction, tuple[int, int, int], dict]
# Where no operand is in eight bits.
NO_SCALES = {"a_scales": None, "b_scales": None}


def grid_of(device: torch.device, config: FusedConfig, units: int) -> tuple[int, int, int]:
    """At most one program a multiprocessor: all of them are resident, so they may wait for peers."""
    limit = platform.num_programs(device)
    return max(1, min(units, config.num_programs or limit, limit)), 1, 1


def product_arguments(
    out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, config: FusedConfig,
    k_step: int = 0, n_step: int = 0, folds: bool = True,
) -> dict:  # fmt: skip
    """The arguments that say how what is multiplied lies in memory. `k_step`, `n_step`: where in B parts begin.

    `folds`: see `descriptors.rows_operand`.
    """
    depth = config.depth(A.dtype == FP8)
    a, tma_a = rows_operand(A, (config.block_m, depth), folds)
    stored = as_stored(B)
    transposed = stored is not B
    block_b = (config.block_n, depth) if transposed else (depth, config.block_n)
    b, tma_b = operand(stored, block_b, k_step if transposed else n_step)
    return dict(
        a=a,
        b=b if tma_b else B,
        bias=bias,
        stride_am=A.stride(0),
        stride_ak=A.stride(1),
        stride_bk=B.stride(0),
        stride_bn=B.stride(1),
        stride_on=out.stride(1),
        HAS_BIAS=bias is not None,
        TMA_A=tma_a,
        TMA_B=tma_b,
        B_TRANSPOSED=transposed,
    )


def parts_memory(workspace: Workspace, problem: Problem, config: FusedConfig, count: int) -> torch.Tensor:
    """Where `count` parts of tiles meet: float32, behind what the ranks stage for each other."""
    first = staged(problem, config)[1]
    return workspace.staging[first : first + count * config.block_m * config.block_n * 4].view(torch.float32)


def shared_arguments(rank: Rank, sync: torch.Tensor, problem: Problem, config: FusedConfig, out: torch.Tensor) -> dict:
    return dict(
        **call_arguments(rank, sync, problem, out),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.depth(problem.fp8),
    )


def call_arguments(rank: Rank, sync: torch.Tensor, problem: Problem, out: torch.Tensor) -> dict:
    """What every kernel is given."""
    return dict(
        out=out,
        sync=sync,
        ctx_ptr=rank.get_device_context(),
        K=problem.K,
        stride_om=out.stride(0),
        WORLD_SIZE=problem.world_size,
        WAITER=WAITERS.index(problem.asked),
    )


def exchange_memory(workspace: Workspace, problem: Problem, cols: int) -> dict:
    values = workspace.exchange.view(torch.int32 if problem.dtype == torch.float32 else torch.int16)
    return dict(staging=values, ld=exchange_ld(cols), half_elements=values.numel() // 2)


def gathered_arguments(problem: Problem, A: torch.Tensor, gathered: torch.Tensor, tile: object, tma: bool) -> dict:
    """What gathers first are given: this rank's part of A, and where all ranks' meet."""
    rows, cols, _ = gathered_part(problem)
    return dict(
        a=A,
        a_rows=A.shape[0],
        a_cols=A.shape[1],
        gathered=gathered,
        gathered_tile=tile,
        M=problem.M,
        N=problem.N,
        part_rows=rows,
        part_cols=cols,
        BY_K=problem.form == "k",
        TMA_G=tma,
    )
