"""A gated product without an exchange: silu(A @ first) * (A @ second), for B = [first, second], as in gated MLPs.

In a warp-specialised kernel (`kernels/hopper/gather_matmul.py`) a tile has columns of both halves, and the mover warps
gate it on its way to memory: neither half is ever written or read. It serves where the model says that it takes less
time than torch's product and `gate_kernel` after it. Where a row's bits are promised the product is `matmul.py`'s.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from iris import platform, registry
from iris.device import arch
from iris.errors import DeviceError, DtypeError, ShapeError
from iris.machines import machine_of
import torch
import triton
import triton.language as tl

from ..checks import check_bias, check_gradient
from ..kernels.activations import joined_tiles
from ..kernels.descriptors import as_stored
from ..kernels.hopper import gather_matmul, operands
from ..operands import Operands
from ..operators import OPERATORS
from ..planning.candidates import copy_gather_configs
from ..planning.epilogues import GATE, Epilogue
from ..planning.product_model import local_problem
from ..planning.tile_model import gemm_us
from ..planning.torch_model import expected_us
from ..problem import DTYPES, Problem
from ..recording import is_recording
from ..with_torch import torch_matmul
from . import matmul

if TYPE_CHECKING:
    from iris.machines import Machine
    from iris.rank import Rank

    from ..config import FusedConfig


FEW = 256  # rows: from this number on, tiles of 128 leave most multiprocessors of a narrow product without work


# Rows and columns that a program gates; the interpreter is quicker with large blocks.
_BLOCK = {"cuda": (4, 1024), "cpu": (64, 256)}


@triton.jit
def gate_kernel(
    both, out, rows, N, stride_bm, stride_om, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, activation: tl.constexpr
):
    """Join the columns both[:, :N] and both[:, N:], which lie side by side, as `out` [rows, N]."""
    arch.follow()
    across = tl.cdiv(N, BLOCK_N)
    r = (tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    c = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (r < rows)[:, None] & (c < N)[None, :]
    first = both + (r * stride_bm)[:, None] + c[None, :]
    gate = tl.load(first, mask=inside, other=0.0)
    second = tl.load(first + N, mask=inside, other=0.0)
    values = joined_tiles(gate, second, activation)
    arch.lead()
    tl.store(out + (r * stride_om)[:, None] + c[None, :], values, mask=inside)


def gate(epilogue: Epilogue, out: torch.Tensor, both: torch.Tensor) -> None:
    """Join the halves of `both` [rows, 2 N], with contiguous rows, into `out` [rows, N]."""
    rows, N = out.shape
    if out.stride(1) != 1 and N > 1:
        fresh = out.new_empty(rows, N)
        gate(epilogue, fresh, both)
        out.copy_(fresh)
    elif out.numel():
        block_m, block_n = _BLOCK[out.device.type]
        grid = (triton.cdiv(rows, block_m) * triton.cdiv(N, block_n),)
        gate_kernel[grid](
            both, out, rows, N, both.stride(0), out.stride(0), BLOCK_M=block_m, BLOCK_N=block_n,
            activation=epilogue.activation, num_warps=8, **platform.launch_options(out.device),
        )  # fmt: skip


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
        matmul.multiply(ctx, out, A, B, bias, epilogue=GATE)
        return out
    problem = local_problem(A.shape[0], B.shape[1], B.shape[0], A.dtype, GATE)
    config = chosen(problem, machine_of(ctx.device))
    if config is None or as_stored(B) is B or operands.supports(A, B, out):
        torch_matmul.multiply(out, A, B, bias, epilogue=GATE)
        return out
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    gather_matmul.multiply_alone(ctx, problem, config, Operands(out, A, B, bias))
    return out


def gated(ctx: Rank, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Run `matmul_gated`, in eager or compiled code."""
    if is_recording():
        return torch.ops.iris_ops.matmul_gated(A, B, bias, ctx.group_name)
    return matmul_gated(ctx, A, B, bias)


def _fake(A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, group: str) -> torch.Tensor:
    check(A, B, bias)
    return A.new_empty(A.shape[0], B.shape[1] // 2)


OPERATORS.add(
    "matmul_gated(Tensor A, Tensor B, Tensor? bias, str group) -> Tensor",
    lambda A, B, bias, group: matmul_gated(registry.find(group), A, B, bias),
    _fake,
)
