"""Which kernel a configuration stands for, where its fields alone do not say so."""

from __future__ import annotations

from ..config import FusedConfig
from ..problem import ALL_REDUCE, NORM_SPAN, REDUCE_SCATTER, Problem
from .machine import Machine
from .waves import gemm_tiles


def exchanges(config: FusedConfig) -> bool:
    """Whether it is for few rows, by words that say themselves that they have arrived."""
    return config.algorithm in ("one_shot", "two_shot")


def keeps_own(problem: Problem, config: FusedConfig, machine: Machine) -> bool:
    """Whether it is an all-reduce in one shot by programs of one tile each, which keep their own part in registers."""
    one_shot = problem.op == ALL_REDUCE and config.algorithm == "one_shot" and not config.warp_roles
    return one_shot and gemm_tiles(problem, config) <= programs_of(config, machine)


def ends_ahead(problem: Problem, config: FusedConfig) -> bool:
    """Whether the kernel can end as `rmsnorm_epilogue.py` says."""
    few_rows = problem.op == ALL_REDUCE and exchanges(config) and not words_with_roles(problem, config)
    return few_rows and config.block_n % NORM_SPAN == 0


def sums_with_roles(problem: Problem, config: FusedConfig) -> bool:
    """Whether it is words that programs with roles send to the owners of rows, who sum them (`lamport_two_shot.py`)."""
    return problem.op == ALL_REDUCE and config.algorithm == "two_shot" and config.warp_roles


def swaps(problem: Problem, config: FusedConfig) -> bool:
    """Whether it is words that programs with roles send to the one peer, who does alike (`lamport_pair.py`)."""
    one_shot = config.algorithm == "one_shot" and config.warp_roles
    return one_shot and problem.op == ALL_REDUCE and problem.world_size == 2


def scatters(problem: Problem, config: FusedConfig) -> bool:
    """Whether it is words of its rows that programs with roles send to the one peer (`lamport_pair_scatter.py`)."""
    one_shot = config.algorithm == "one_shot" and config.warp_roles
    by_rows = problem.op == REDUCE_SCATTER and problem.form == "rows"
    return one_shot and by_rows and problem.world_size == 2 and not problem.fp8


def words_with_roles(problem: Problem, config: FusedConfig) -> bool:
    """Whether it is words that programs with roles send."""
    return sums_with_roles(problem, config) or swaps(problem, config) or scatters(problem, config)


def programs_of(config: FusedConfig, machine: Machine) -> int:
    """Programs of the persistent grid."""
    return min(config.num_programs or machine.num_programs, machine.num_programs)
