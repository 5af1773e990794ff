"""A gated product without an exchange, such as the first half of a gated MLP whose input is whole (see `gating`).

Warp-specialised programs compute it where the model says that they take less time than torch's product and the gate
after it. Where a row's bits are promised the product is `matmul.py`'s.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from iris.errors import DeviceError, DtypeError, ShapeError
from iris.machines import machine_of
import torch

from ..checks import check_bias, check_gradient
from ..kernels.descriptors import as_stored
from ..kernels.hopper import gather_matmul, operands
from ..operands import Operands
from ..planning.candidates import copy_gather_configs
from ..planning.needs import GATE
from ..planning.product_model import local_problem
from ..planning.tile_model import gemm_us
from ..planning.torch_model import expected_us
from ..problem import DTYPES, Problem
from . import gating, matmul

if TYPE_CHECKING:
    from iris.machines import Machine
    from iris.rank import Rank

    from ..config import FusedConfig


FEW = 256  # rows: from this number on, tiles of 128 leave most multiprocessors of a narrow product without work


@lru_cache(maxsize=4096)
def chosen(problem: Problem, machine: Machine) -> FusedConfig | None:
    """Return how warp-specialised programs should multiply; None if torch should."""
    if not machine.warp_specialised or problem.dtype.itemsize != 2 or problem.M <= FEW:
        return None
    ours = {config: gemm_us(problem, config, machine) for config in copy_gather_configs(machine)}
    config = min(ours, key=ours.__getitem__)
    theirs = expected_us(*problem.gemm, machine) + GATE.us(problem, machine)
    return config if ours[config] + machine.launch_us < theirs else None


def check(A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise a typed error for what `gated_matmul` does not take."""
    for name, t in (("A", A), ("B", B), ("bias", bias)):
        if t is None:
            continue
        check_gradient("matmul_gated", name, t)
        if t.dtype != A.dtype or t.dtype not in DTYPES:
            expected = f"A's, {A.dtype}" if A.dtype in DTYPES else f"one of {', '.join(map(str, DTYPES))}"
            raise DtypeError(f"matmul_gated: {name} has dtype {t.dtype}; expected {expected}")
        if t.device != A.device:
            raise DeviceError(f"matmul_gated: {name} is on {t.device}; expected {A.device}, where A is")
    if A.ndim != 2 or B.ndim != 2 or A.shape[1] != B.shape[0] or B.shape[1] % 2:
        given = f"A is {tuple(A.shape)}, B is {tuple(B.shape)}"
        raise ShapeError(f"matmul_gated: {given}; expected A (M,K), B (K,N), N even")
    if bias is not None:
        if bias.ndim != 1:
            raise ShapeError(f"matmul_gated: bias is {tuple(bias.shape)}; expected {(B.shape[1],)}")
        check_bias("matmul_gated", bias, B)


def matmul_gated(ctx: Rank, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return silu(C[:, :N/2]) * C[:, N/2:] [M, N/2] for C = A [M, K] @ B [K, N] + bias [N].

    All operands have one dtype and lie on the context's device. No peer takes part. Raises `ShapeError`, `DtypeError`
    or `DeviceError` where operands do not match, and `ArgumentError` for a gradient.
    """
    check(A, B, bias)
    out = A.new_empty(A.shape[0], B.shape[1] // 2)
    if ctx.level.rows_alike:
        matmul.gated(ctx, out, A, B, bias)
        return out
    problem = local_problem(A.shape[0], B.shape[1], B.shape[0], A.dtype, GATE)
    config = chosen(problem, machine_of(ctx.device))
    if config is None or as_stored(B) is B or operands.supports(config, A, B, out):
        gating.multiply(out, A, B, bias)
        return out
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    gather_matmul.multiply_alone(ctx, problem, config, Operands(out, A, B, bias))
    return out
