"""From a plan to a launch: one kernel, torch's product and a collective, or a kernel behind one that rounds rows.

A plan knows shapes, a launch knows tensors. Where a tensor cannot be loaded as the planned kernel loads it, because its
rows begin between vectors of 16 bytes, for one, the launch takes the kernel's stand-in (`kernel_names.STAND_INS`). A
stand-in sends the same values to the same places, so ranks may even differ in this. `supports` says why a kernel cannot
run on tensors, and the log repeats that once. No other module runs another kernel than the plan names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from iris import platform
from iris.errors import ArgumentError
from iris.launch import relaunch
import torch
import triton

from .config import MOST_ELEMENTS, FusedConfig
from .fp8 import lamport_stream, scaled_matmul, weight_stream
from .fp8.lamport_stream import lamport_stream_kernel
from .kernels import (
    gather_matmul,
    hopper,
    lamport_gather_matmul,
    lamport_matmul,
    matmul_gather,
    matmul_reduce,
    tree_matmul,
)
from .kernels.descriptors import as_stored, in_whole_vectors
from .kernels.hopper import operands
from .kernels.lamport_gather_matmul import lamport_gather_matmul_kernel
from .kernels.lamport_matmul import lamport_matmul_kernel
from .kernels.launching import Launch
from .kernels.matmul_reduce import column_step
from .kernels.rmsnorm_epilogue import EPILOGUE_NAMES, Epilogue
from .operands import Operands
from .planning import kernel_names as names
from .planning.candidates import tree_stand_in
from .planning.kernel_names import STAND_INS, kernel_for, stand_in
from .planning.machine import machine_of
from .planning.workspace_size import most_rows
from .problem import ALL_REDUCE, FP8, GATHER_MATMUL, MATMUL_GATHER, Problem, part_of
from .with_torch import copy_gather, sequential

if TYPE_CHECKING:
    from iris.rank import Rank

    from .workspace import Workspace

# What names a kernel's arguments, and says on which grid it runs.
LAUNCHERS: dict[str, Callable[..., Launch]] = {
    names.LAMPORT: lamport_matmul.launcher,
    names.LAMPORT_GATHER: lamport_gather_matmul.launcher,
    names.LAMPORT_FP8: lamport_stream.launcher,
    names.TREE: tree_matmul.launcher,
    names.LAMPORT_TWO_SHOT: hopper.lamport_two_shot.launcher,
    names.LAMPORT_PAIR: hopper.lamport_pair.launcher,
    names.LAMPORT_PAIR_SCATTER: hopper.lamport_pair.scatter_launcher,
    names.REDUCE: matmul_reduce.launcher,
    names.GATHER: matmul_gather.launcher,
    names.GATHER_FIRST: gather_matmul.launcher,
    names.HOPPER_REDUCE: hopper.matmul_reduce.launcher,
    names.HOPPER_GATHER: hopper.matmul_gather.launcher,
}
# What prepares a call of several launches. The function that it returns launches them, now and whenever the call is
# repeated, and says True as `relaunch.Launch.again` does. It keeps the tensors that it is given.
PREPARERS: dict[str, Callable[..., Callable[[], bool]]] = {
    names.SEQUENTIAL: sequential.prepare,
    names.COPY_GATHER: copy_gather.prepare,
    names.HOPPER_GATHER_FIRST: copy_gather.prepare,
}
# Which begin by `arch.follow`.
_FOLLOWING = lamport_matmul_kernel, lamport_stream_kernel, lamport_gather_matmul_kernel


def writes_to_peers(problem: Problem, config: FusedConfig) -> bool:
    """Whether the op stores into the peers' `out`, which must then lie on the heap."""
    return problem.op in (ALL_REDUCE, MATMUL_GATHER) and config.algorithm == "overlapped"


def gates(config: FusedConfig) -> bool:
    """Whether a gated product is gated where it is multiplied."""
    return config.algorithm == "copy_gather"


def kernel_of(problem: Problem, config: FusedConfig, rank: int, tensors: Operands) -> str:
    """The kernel that runs on `tensors` of a `rank`: the one that `config` stands for, or its stand-in.

    Ranks may differ in this.
    """
    planned = kernel_for(problem, config)
    return planned if supports(planned, problem, config, rank, tensors) is None else stand_in(problem, planned)


def supports(kernel: str, problem: Problem, config: FusedConfig, rank: int, tensors: Operands) -> str | None:
    """Why `kernel` cannot run on `tensors`, or None; only kernels in `STAND_INS` may be unable to.

    Of weights in eight bits, a kernel that multiplies rounded rows is asked once A has been rounded.
    """
    out, A, B, _, _ = tensors
    if kernel not in STAND_INS:
        return None
    if problem.fp8 and A.dtype != FP8 and kernel not in (names.LAMPORT_FP8, names.HOPPER_GATHER_FIRST):
        return None
    if kernel == names.LAMPORT_FP8:
        return weight_stream.supports(A, B)
    if kernel == names.HOPPER_GATHER_FIRST:
        if problem.fp8:
            return "it multiplies no weights in eight bits"
        if not A.is_contiguous():  # a kernel would copy A's rows, and may find no room beside one that waits for copies
            return "rows of A stand apart"
        if problem.gated and as_stored(B) is B:
            return "B is not the transpose of a contiguous tensor"
        if not problem.whole_vectors(problem.K):
            return "rows of A begin between vectors of 16 bytes"
        return operands.supports(config, A, B, out)
    if kernel == names.HOPPER_REDUCE:
        return operands.supports(config, A, B, out, column_step(problem, config))
    if kernel == names.HOPPER_GATHER:
        by_cols = problem.form == "cols"
        if not part_of(problem.N if by_cols else problem.M, problem.world_size, rank):
            return "this rank has nothing to multiply"
        return operands.supports(config, A, B, out, problem.part_cols if by_cols else 0)
    return operands.supports(config, A, B, out)


def _eight_bits(problem: Problem, config: FusedConfig, rank: int, tensors: Operands) -> torch.Tensor | None:
    """B as it is multiplied with rounded rows of A, of which there are more than few; None where that cannot be."""
    out, A, B, bias, _ = tensors
    few = problem.M <= weight_stream.MOST_ROWS and not problem.invariant
    rounds = problem.op != GATHER_MATMUL and not few
    if not rounds or not scaled_matmul.multiplies_in_fp8(B.shape, B.device, A.dtype):
        return None
    if max(config.block_m, config.block_n) * config.depth(True) > MOST_ELEMENTS:
        return None
    B = in_whole_vectors(B.t()).t()
    kernel = kernel_for(problem, config)
    if config.algorithm != "overlapped" and kernel not in names.SPECIALISED_LAMPORT:
        return B
    # rounded rows lie as those of the weight do; a portable kernel takes no scales
    specialised = kernel in STAND_INS and kernel_of(problem, config, rank, Operands(out, B.t(), B, bias)) == kernel
    return B if specialised else None


def launch(
    kernels: dict,
    rank: Rank,
    workspace: Workspace,
    problem: Problem,
    config: FusedConfig,
    tensors: Operands,
    moving: Sequence[int] = (),
    came_before: bool = True,
    epilogue: Epilogue | None = None,
) -> relaunch.Launch | None:
    """Launches what serves `problem` on `tensors` in the current stream; see `relaunch.launch`.

    A call that takes torch's product is prepared to be repeated only if it `came_before`. `epilogue` is given to
    kernels that end with a norm (`kernel_names.ends_with_norm`).
    """
    out, A, B, bias, scale = tensors
    kernel = _said_kernel(rank, problem, config, tensors)
    rounding = a_scales = None
    if problem.fp8 and kernel not in PREPARERS and kernel != names.LAMPORT_FP8:
        weight = _eight_bits(problem, config, rank.cur_rank, tensors)
        if weight is None:
            assert scale is not None
            weight = scaled_matmul.restored(B.t(), scale, A.dtype).t()
            restored, tensors = replace(problem, fp8=False), Operands(out, A, weight, bias)
            launch(kernels, rank, workspace, restored, config, tensors, epilogue=epilogue)
            return None  # the weight that was made now is for now
        rows = A if A.stride(1) == 1 else A.contiguous()
        rounded, a_scales = workspace.rounded(*A.shape)
        rounding = scaled_matmul.launch_rounding(kernels, rounded, a_scales, rows, moving)
        if rows is not A or weight.data_ptr() != B.data_ptr():
            rounding = None  # copies are for now, too
        tensors = Operands(out, rounded, weight, bias)
        kernel = _said_kernel(rank, problem, config, tensors)
    if config.kernel != kernel:
        config = replace(config, kernel=kernel)
    if kernel == names.TREE and config.warp_specialised:  # whose tiles it does not know
        config = replace(tree_stand_in(problem, machine_of(rank.device)), kernel=kernel)
    if kernel in PREPARERS:
        prepare = PREPARERS[kernel]
        if not came_before:
            prepare(workspace, problem, config, tensors)()
            return None
        kept = Operands._make([relaunch.alias(each) for each in tensors])
        again = workspace.graphs.of(prepare(workspace, problem, config, kept))
        again()
        return relaunch.Launch(again)
    if problem.M > (most := most_rows(problem, config)):
        pieces = -(-problem.M // most)  # alike: where two shots serve, every rank has rows of each
        for rows, factor in zip(out.tensor_split(pieces), A.tensor_split(pieces), strict=True):
            piece = replace(problem, M=rows.shape[0])
            launch(kernels, rank, workspace, piece, config, Operands(rows, factor, B, bias))
        return None
    function, grid, args = LAUNCHERS[kernel](rank, workspace, problem, config, tensors)
    if "TRACING" in function.arg_names:
        args["TRACING"] = rank.recording
    if a_scales is not None:
        args["epilogue"] = args["epilogue"]._replace(a_scales=a_scales, b_scales=scale)
    if epilogue is not None:
        args["epilogue"] = args["epilogue"]._replace(**dict(zip(EPILOGUE_NAMES, epilogue, strict=True)))
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    if function in _FOLLOWING:
        options |= platform.beside(rank.device)
    if function is lamport_stream_kernel:
        options |= weight_stream.options(grid[0], platform.num_programs(rank.device))
    try:
        launched = relaunch.launch(kernels, rank.device, function, grid, args, moving, **options)
    except triton.OutOfResources as error:  # before anything was sent; ranks whose calls are alike all come here
        raise ArgumentError(
            f"{problem.asked}: config has blocks of {config.block_m} x {config.block_n} x {config.block_k}, "
            f"{config.num_stages} stages and {config.num_warps} warps, which take {error.required} of {error.name} for "
            f"{problem.dtype}; expected at most {error.limit}, what the device has"
        ) from error
    return launched if a_scales is None else relaunch.in_turn(rounding, launched)


def _said_kernel(rank: Rank, problem: Problem, config: FusedConfig, tensors: Operands) -> str:
    """`kernel_of` a call. Where it is a stand-in, the log says why, once for each planned kernel of a context."""
    planned = kernel_for(problem, config)
    reason = supports(planned, problem, config, rank.cur_rank, tensors)
    if reason is None:
        return planned
    taken, said = stand_in(problem, planned), rank.once(_Said).planned
    if planned not in said:
        said.add(planned)
        rank.log.info(f"{problem.asked}: {taken} runs in place of {planned}: {reason}")
    return taken


class _Said:
    def __init__(self, rank: Rank) -> None:
        self.planned: set[str] = set()
