"""How a plan names its candidates in the lines of `explain()`: the kernel, its form, and its times side by side."""

from __future__ import annotations

from ..config import FusedConfig, Prediction
from ..problem import ALL_REDUCE, Problem, owned_part
from .kernel_names import LAMPORT_FP8, WITH_TORCH, kernel_for


def label(problem: Problem, config: FusedConfig) -> str:
    """The kernel, and in which form."""
    kernel = kernel_for(problem, config)
    if kernel == LAMPORT_FP8:
        return kernel
    if kernel in WITH_TORCH.values():
        together = f", {config.ranks_together} ranks' rows together" if config.ranks_together > 1 else ""
        return f"{kernel}{together}" + (", in eight bits" if problem.fp8 else "")
    label = f"{kernel} {config.block_m}x{config.block_n}x{config.depth(problem.fp8)}"
    if config.lamport:
        label += f" {config.algorithm}, {config.num_warps} warps"
    elif problem.op == ALL_REDUCE:
        label += f", each rank sums {'columns' if owned_part(problem, config)[2] else 'rows'}"
    label += ", programs share first tiles" if config.warp_specialised and config.splits > 1 else ""
    return label + (", rows rounded to eight bits" if problem.fp8 else "")


def row(problem: Problem, config: FusedConfig, times: Prediction) -> str:
    """A candidate, its product's time, its exchange's, and both together."""
    return (
        f"{label(problem, config):<56} product {times.gemm_us:9.1f} us, link {times.link_us:9.1f} us, "
        f"together {times.total_us:9.1f} us"
    )
