"""The names of the kernels, and which of them a configuration stands for.

A name is the module's below `iris_ops/` in which the kernel stands, as grep finds it: "hopper.lamport_pair" is
`kernels/hopper/lamport_pair.py`. One module has two kernels: "hopper.lamport_pair_scatter" is its
`lamport_pair_scatter_kernel`. Ranks whose configurations are equal take kernels that signal and stage alike.
"""

from __future__ import annotations

from ..config import FusedConfig
from ..problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, NORM_SPAN, REDUCE_SCATTER, Problem
from .fp8_model import fits
from .machine import Machine
from .waves import gemm_tiles, programs_of

# Few rows: each value says itself whether it has arrived.
LAMPORT, LAMPORT_GATHER, LAMPORT_FP8 = "lamport_matmul", "lamport_gather_matmul", "fp8.lamport_stream"
LAMPORT_TWO_SHOT, LAMPORT_PAIR = "hopper.lamport_two_shot", "hopper.lamport_pair"
LAMPORT_PAIR_SCATTER = "hopper.lamport_pair_scatter"
# Sums that are the same on any number of ranks.
TREE = "tree_matmul"
# Many rows: tiles travel while others are multiplied.
REDUCE, GATHER, GATHER_FIRST = "matmul_reduce", "matmul_gather", "gather_matmul"
HOPPER_REDUCE, HOPPER_GATHER, HOPPER_GATHER_FIRST = (
    "hopper.matmul_reduce",
    "hopper.matmul_gather",
    "hopper.gather_matmul",
)
# torch's product.
SEQUENTIAL, COPY_GATHER = "with_torch.sequential", "with_torch.copy_gather"

WITH_TORCH = {"sequential": SEQUENTIAL, "copy_gather": COPY_GATHER}
_OVERLAPPED = {
    ALL_REDUCE: (REDUCE, HOPPER_REDUCE),
    REDUCE_SCATTER: (REDUCE, HOPPER_REDUCE),
    MATMUL_GATHER: (GATHER, HOPPER_GATHER),
    GATHER_MATMUL: (GATHER_FIRST, GATHER_FIRST),
}
# What runs in place of a kernel where rows do not begin at whole vectors: it sends the same to the same places, so that
# ranks may even differ in it.
STAND_INS = {
    HOPPER_REDUCE: REDUCE,
    HOPPER_GATHER: GATHER,
    HOPPER_GATHER_FIRST: COPY_GATHER,
    LAMPORT_TWO_SHOT: LAMPORT,
    LAMPORT_PAIR: LAMPORT,
    LAMPORT_PAIR_SCATTER: LAMPORT,
    LAMPORT_FP8: LAMPORT,
}
SPECIALISED_LAMPORT = (LAMPORT_TWO_SHOT, LAMPORT_PAIR, LAMPORT_PAIR_SCATTER)


def kernel_for(problem: Problem, config: FusedConfig) -> str:
    """The kernel that `config` stands for, on tensors whose rows all begin at whole vectors."""
    if problem.by_tree and config.lamport and not (config.warp_specialised and problem.by_halves):
        return TREE
    if config.algorithm in WITH_TORCH:
        brought = config.algorithm == "copy_gather" and config.warp_specialised
        return HOPPER_GATHER_FIRST if brought else WITH_TORCH[config.algorithm]
    if config.algorithm == "overlapped":
        return _OVERLAPPED[problem.op][config.warp_specialised]
    if problem.op == GATHER_MATMUL:
        return LAMPORT_GATHER
    streams = problem.op == ALL_REDUCE and problem.fp8 and not problem.invariant and fits(problem.M, problem.K)
    if streams and config.algorithm == "one_shot":
        return LAMPORT_FP8
    if config.warp_specialised and config.algorithm == "two_shot" and problem.op == ALL_REDUCE:
        return LAMPORT_TWO_SHOT
    if config.warp_specialised and config.algorithm == "one_shot" and problem.world_size == 2:
        if problem.op == ALL_REDUCE:
            return LAMPORT_PAIR
        if problem.op == REDUCE_SCATTER and problem.form == "rows" and not problem.fp8:
            return LAMPORT_PAIR_SCATTER
    return LAMPORT


def stand_in(problem: Problem, kernel: str) -> str:
    """What runs in place of `kernel` where it cannot run on tensors: itself, if there is nothing else."""
    return TREE if problem.by_tree else STAND_INS.get(kernel, kernel)


def keeps_own(problem: Problem, config: FusedConfig, machine: Machine) -> bool:
    """Whether it is an all-reduce in one shot by programs of one tile each, which keep their own part in registers."""
    one_shot = problem.op == ALL_REDUCE and config.algorithm == "one_shot" and not config.warp_specialised
    return one_shot and gemm_tiles(problem, config) <= programs_of(config, machine.num_programs)


def ends_with_norm(problem: Problem, config: FusedConfig) -> bool:
    """Whether the kernel itself can add the residual and end with an RMSNorm's first half (`rmsnorm_epilogue.py`)."""
    if problem.invariant:  # where rows are many no kernel does, and a tile sums squares in an order of its own
        return False
    ends = problem.op == ALL_REDUCE and kernel_for(problem, config) in (LAMPORT, LAMPORT_FP8)
    return ends and config.block_n % NORM_SPAN == 0
