"""From a problem and its configuration to what is launched: a kernel, torch's product and a collective, or a kernel
behind another that rounds rows to eight bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from iris import platform
from iris.errors import ArgumentError
from iris.launch import relaunch
import torch
import triton

from . import arguments
from .config import MOST_ELEMENTS, FusedConfig
from .fp8 import scaled_matmul, weight_stream
from .fp8.lamport_stream import few_rows_fp8_kernel
from .kernels.descriptors import in_whole_vectors
from .kernels.hopper import operands
from .kernels.lamport_gather_matmul import few_rows_gather_kernel
from .kernels.lamport_matmul import few_rows_kernel
from .kernels.rmsnorm_epilogue import AHEAD_NAMES, Ahead
from .planning.kinds import words_with_roles
from .problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, Problem, owned_part
from .with_torch import copy_gather, copy_reduce, sequential

if TYPE_CHECKING:
    from iris.rank import Rank

    from .workspace import Workspace

# What `prepare` returns launches the call, now and whenever it is repeated, and says True as `relaunch.Launch.again`
# does. It keeps the tensors that it is given.
_WITH_TORCH = {"sequential": sequential, "copy_engines": copy_gather, "shard_sums": copy_reduce}
_FOLLOWING = few_rows_kernel, few_rows_fp8_kernel, few_rows_gather_kernel  # which begin by `arch.follow`


def writes_to_peers(problem: Problem, config: FusedConfig) -> bool:
    """Whether the op stores into the peers' `out`, which must then lie on the heap."""
    return problem.op in (ALL_REDUCE, MATMUL_GATHER) and config.algorithm == "overlapped"


def gates(config: FusedConfig) -> bool:
    """Whether a gated product is gated where it is multiplied."""
    return config.algorithm == "copy_engines"


def _eight_bits(
    problem: Problem, config: FusedConfig, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor
) -> torch.Tensor | None:
    """B as it is multiplied with rounded rows of A, of which there are more than few; None where that cannot be."""
    rounds = problem.op != GATHER_MATMUL and problem.M > weight_stream.MOST_ROWS
    if not rounds or not scaled_matmul.multiplies_in_fp8(B.shape, B.device, A.dtype):
        return None
    if max(config.block_m, config.block_n) * config.depth(True) > MOST_ELEMENTS:
        return None
    B = in_whole_vectors(B.t()).t()
    if config.algorithm == "overlapped" or words_with_roles(problem, config):
        rows, cols, by_cols = owned_part(problem, config)
        # rounded rows lie as those of the weight do
        return B if operands.serve(config, B.t(), B, out, cols if by_cols else 0) else None
    return B


def launch(
    kernels: dict,
    ctx: Rank,
    workspace: Workspace,
    problem: Problem,
    config: FusedConfig,
    tensors: tuple,
    moving: Sequence[int] = (),
    came_before: bool = True,
    ahead: Ahead | None = None,
) -> relaunch.Launch | None:
    """Launches what serves `problem` on `tensors` (out, A, B, bias, scale) in the current stream; see `repeat.launch`.

    What takes torch's product is prepared to be repeated only where it `came_before`. `ahead`: where the kernel ends
    as `rmsnorm_epilogue.py` says (`kinds.ends_ahead`).
    """
    out, A, B, bias, scale = tensors
    streams = problem.op == ALL_REDUCE and problem.fp8 and config.algorithm == "one_shot" and weight_stream.serves(A, B)
    rounding = a_scales = None
    if not problem.fp8:
        tensors = tensors[:-1]
    elif config.algorithm not in _WITH_TORCH and not streams:
        weight = _eight_bits(problem, config, out, A, B)
        if weight is None:
            weight = scaled_matmul.restored(B.t(), scale, A.dtype).t()
            tensors = out, A, weight, bias, None
            launch(kernels, ctx, workspace, replace(problem, fp8=False), config, tensors, ahead=ahead)
            return None  # the weight that was made now is for now
        rows = A if A.stride(1) == 1 else A.contiguous()
        rounded, a_scales = workspace.rounded(*A.shape)
        rounding = scaled_matmul.launch_rounding(kernels, rounded, a_scales, rows, moving)
        if rows is not A or weight.data_ptr() != B.data_ptr():
            rounding = None  # copies are for now, too
        tensors = out, rounded, weight, bias
    if config.algorithm in _WITH_TORCH:
        prepare = _WITH_TORCH[config.algorithm].prepare
        if not came_before:
            prepare(workspace, problem, config, *tensors)()
            return None
        again = workspace.graphs.of(prepare(workspace, problem, config, *map(relaunch.alias, tensors)))
        again()
        return relaunch.Launch(again)
    named = arguments.streamed if streams else arguments.way_of(problem, config)
    kernel, grid, args = named(ctx, workspace, problem, config, *tensors)
    if "TRACING" in kernel.arg_names:
        args["TRACING"] = ctx.recording
    if a_scales is not None:
        args |= dict(a_scales=a_scales, b_scales=scale)
    if ahead is not None:
        args |= dict(zip(AHEAD_NAMES, ahead, strict=True))
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    if kernel in _FOLLOWING:
        options |= platform.beside(ctx.device)
    if kernel is few_rows_fp8_kernel:
        options |= weight_stream.options(grid[0], platform.num_programs(ctx.device))
    try:
        launched = relaunch.launch(kernels, ctx.device, kernel, grid, args, moving, **options)
    except triton.OutOfResources as error:  # before anything was sent; ranks whose calls are alike all come here
        raise ArgumentError(
            f"{problem.asked}: config has blocks of {config.block_m} x {config.block_n} x {config.block_k}, "
            f"{config.num_stages} stages and {config.num_warps} warps, which take {error.required} of {error.name} for "
            f"{problem.dtype}; expected at most {error.limit}, what the device has"
        ) from error
    return launched if a_scales is None else relaunch.in_turn(rounding, launched)
