"""Gated products: silu(A @ first) * (A @ second), for B = [first, second], as gated MLPs have them.

In a warp-specialised kernel (`kernels/hopper/gather_matmul.py`) a tile has columns of both halves, and the mover warps
gate it on its way to memory: neither half is ever written or read. Elsewhere torch multiplies, and a small kernel gates
the result.
"""

from __future__ import annotations

from collections.abc import Callable

from iris import platform
from iris.device import arch
import torch
import triton
import triton.language as tl

from ..operands import Operands
from ..problem import Problem
from ..steps import Do
from ..with_torch import torch_matmul

# Rows and columns that a program gates; the interpreter is quicker with large blocks.
_BLOCK = {"cuda": (4, 1024), "cpu": (64, 256)}


@triton.jit
def gate_kernel(both, out, rows, N, stride_bm, stride_om, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute `out` [rows, N] = silu(both[:, :N]) * both[:, N:], whose factors lie side by side."""
    arch.follow()
    across = tl.cdiv(N, BLOCK_N)
    r = (tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    c = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (r < rows)[:, None] & (c < N)[None, :]
    first = both + (r * stride_bm)[:, None] + c[None, :]
    gate = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(first + N, mask=inside, other=0.0).to(tl.float32)
    values = arch.round_to(gate / (1.0 + tl.exp(-gate)) * second, out.dtype.element_ty)
    arch.lead()
    tl.store(out + (r * stride_om)[:, None] + c[None, :], values, mask=inside)


def gate(out: torch.Tensor, both: torch.Tensor) -> None:
    """Gate `both` [rows, 2 N], with contiguous rows, into `out` [rows, N]."""
    rows, N = out.shape
    if out.stride(1) != 1 and N > 1:
        fresh = out.new_empty(rows, N)
        gate(fresh, both)
        out.copy_(fresh)
    elif out.numel():
        block_m, block_n = _BLOCK[out.device.type]
        grid = (triton.cdiv(rows, block_m) * triton.cdiv(N, block_n),)
        gate_kernel[grid](
            both, out, rows, N, both.stride(0), out.stride(0), BLOCK_M=block_m, BLOCK_N=block_n, num_warps=8,
            **platform.launch_options(out.device),
        )  # fmt: skip


def multiply(
    out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None
) -> None:
    """Store silu(A @ first + ...) * (A @ second + ...) in `out`, computed by torch; `scale` is as in
    `matmul.multiply`."""
    both = A.new_empty(A.shape[0], B.shape[1])
    torch_matmul.multiply(both, A, B, bias, scale)
    gate(out, both)


def apart(problem: Problem) -> tuple[Callable[[Operands], Operands], Do]:
    """Return what a product without its gate writes, both halves to memory of their own, and the gate after it."""

    def halves(tensors: Operands) -> Operands:
        return tensors._replace(out=tensors.out.new_empty(problem.M, problem.N))

    return halves, Do(lambda run: gate(run.out, run.tensors.out))
