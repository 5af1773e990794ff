"""Code that launchers share: the grid, and arguments of several kernels.

Each kernel's own launcher is defined below it, in its module. It names the kernel's arguments and says on which grid it
runs: `launcher(rank, workspace, problem, config, tensors) -> (kernel, grid, arguments)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris import platform
from iris.device.waits import waiter_number
import torch
import triton

from ..planning.workspace_size import exchange_ld, staged
from ..problem import Problem
from .arguments import LamportMemory, Strides, Tile, TileEpilogue, World
from .descriptors import as_stored, operand, rows_operand

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig
    from ..workspace import Workspace

# A kernel, its grid and its arguments by name.
Launch = tuple[triton.JITFunction, tuple[int, int, int], dict]


def grid_of(device: torch.device, config: FusedConfig, units: int) -> tuple[int, int, int]:
    """Return a grid of at most one program a multiprocessor, so that all programs are resident and may wait for
    peers."""
    limit = platform.num_programs(device)
    return max(1, min(units, config.num_programs or limit, limit)), 1, 1


def product_arguments(
    out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, config: FusedConfig,
    k_step: int = 0, n_step: int = 0, folds: bool = True,
) -> dict:  # fmt: skip
    """Return the arguments that say how what is multiplied lies in memory. `k_step`, `n_step`: where in B parts begin.

    `folds`: see `descriptors.rows_operand`.
    """
    depth = config.depth(A.dtype.itemsize)
    stored = as_stored(B)
    transposed = stored is not B
    block_b = (config.block_n, depth) if transposed else (depth, config.block_n)
    b, tma_b = operand(stored, block_b, k_step if transposed else n_step)
    return dict(
        a=rows_operand(A, (config.block_m, depth), folds)[0],
        b=b if tma_b else B,
        epilogue=TileEpilogue(bias),
        strides=Strides(*A.stride(), *B.stride(), *out.stride()),
        tile=Tile(config.block_m, config.block_n, depth, config.group_m, transposed),
    )


def parts_memory(workspace: Workspace, problem: Problem, config: FusedConfig, count: int) -> torch.Tensor:
    """Return the float32 memory of `count` parts of tiles, after the ranks' staged tiles."""
    first = staged(problem, config)[1]
    return workspace.staging[first : first + count * config.block_m * config.block_n * 4].view(torch.float32)


def shared_arguments(rank: Rank, sync: torch.Tensor, problem: Problem, out: torch.Tensor) -> dict:
    """Return what every kernel is given."""
    world = World(problem.world_size, waiter_number(problem.called_op), rank.recording)
    return dict(out=out, sync=sync, ctx_ptr=rank.get_device_context(), K=problem.K, world=world)


def lamport_memory(workspace: Workspace, dtype: torch.dtype, cols: int) -> LamportMemory:
    """Return the workspace's two buffers of Lamport values, of parts of `cols` columns."""
    values = workspace.exchange.view(torch.int32 if dtype == torch.float32 else torch.int16)
    return LamportMemory(values, values.numel() // 2, cols, exchange_ld(cols))
