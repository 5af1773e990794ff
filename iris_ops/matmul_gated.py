"""A gated product without an exchange, such as a gated MLP's first half where its input is whole (see `gating`).

By programs with roles where they should take less time than torch's product and the gate behind it, by the model.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from . import all_gather_matmul_roles, gating, launch, torch_product, warp_roles
from .operands import as_stored
from .plan import BROUGHT
from .predict import gemm_us
from .problem import GATHER_MATMUL, Problem, check_gradient

if TYPE_CHECKING:
    from iris.context import Iris

    from .config import FusedConfig
    from .machine import Machine


FEW = 256  # rows: of so many, tiles of 128 leave most multiprocessors of a narrow product without work


@lru_cache(maxsize=4096)
def chosen(problem: Problem, machine: Machine) -> FusedConfig | None:
    """How programs with roles should multiply; None if torch should."""
    if not machine.warp_roles or problem.dtype.itemsize != 2 or problem.M <= FEW:
        return None
    ours = {config: gemm_us(problem, config, machine) for config in BROUGHT}
    config = min(ours, key=ours.get)
    theirs = torch_product.expected_us(*problem.gemm, machine) + gating.gate_us(problem, machine)
    return config if ours[config] + machine.launch_us < theirs else None


def matmul_gated(ctx: Iris, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """silu(C[:, :N/2]) * C[:, N/2:] of C = A [M,K] @ B [K,N] + bias [N], all of one dtype on the context's device.

    A new tensor [M,N/2]. This rank's affair alone. No gradient; one that is asked for is refused.
    """
    for name, t in (("A", A), ("B", B), ("bias", bias)):
        if t is not None:
            check_gradient("matmul_gated", name, t)
    out = A.new_empty(A.shape[0], B.shape[1] // 2)
    problem = Problem(GATHER_MATMUL, "rows", A.shape[0], B.shape[1], B.shape[0], 1, A.dtype, True)
    config = chosen(problem, launch.machine(ctx.device))
    if config is None or as_stored(B) is B or not warp_roles.serve(config, A, B, out):
        gating.multiply(out, A, B, bias)
        return out
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    ops, nothing = ctx.ops, ctx.ops.nothing  # arrives
    product = all_gather_matmul_roles.product
    product(ctx, ops.products, ops.kernels, problem, config, out, A, A, B, bias, nothing, nothing)()
    return out
