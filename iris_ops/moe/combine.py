"""Combine a token's experts: the weighted sum of its pairs' products, and a shared expert's part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris.device import arch
from iris.device.function import device_function
import torch
import triton
import triton.language as tl

from .arguments import combine_of

if TYPE_CHECKING:
    from ..problem import Problem
    from ..steps import Run

# Tokens and columns of a program; the interpreter is quicker with large blocks.
_BLOCK = {"cuda": (4, 512), "cpu": (64, 256)}


@device_function
def combined(total, products, combine, t, c, tokens, N, ld, TOP_K: tl.constexpr):
    """Return, in fp32, tokens t and columns c of the combined result: weights [t, j] * products [t * TOP_K + j], summed
    over j in order, plus `shared`.

    `total` [t, c] holds zeros, in the layout of a caller in Gluon. `products` is [pairs, N], with rows `ld` apart.
    Other programs may have written it, so it is not read through L1.
    """
    inside = (t < tokens)[:, None] & (c < N)[None, :]
    for j in tl.static_range(TOP_K):
        factor = tl.load(combine.weights + t.to(tl.int64) * combine.stride_wt + j, mask=t < tokens, other=0.0).to(
            tl.float32
        )
        places = products + ((t.to(tl.int64) * TOP_K + j) * ld)[:, None] + c[None, :]
        total += factor[:, None] * tl.load(places, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    if combine.shared is not None:
        down, across = t.to(tl.int64) * combine.stride_st, c.to(tl.int64) * combine.stride_sn
        places = combine.shared + down[:, None] + across[None, :]
        total += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["tokens"])
def moe_combine_kernel(
    products, combine, out, tokens, N, ld, stride_om, stride_on, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store `combined`, rounded, in out [tokens, N]."""
    arch.follow()
    across = tl.cdiv(N, BLOCK_N)
    t = tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = combined(total, products, combine, t, c, tokens, N, ld, TOP_K)
    arch.lead()
    places = out + (t.to(tl.int64) * stride_om)[:, None] + (c.to(tl.int64) * stride_on)[None, :]
    tl.store(places, arch.round_to(total, out.dtype.element_ty), mask=(t < tokens)[:, None] & (c < N)[None, :])


def launch(
    run: Run, problem: Problem, out: torch.Tensor, products: torch.Tensor, weights: torch.Tensor,
    shared: torch.Tensor | None,
) -> None:  # fmt: skip
    block_m, block_n = _BLOCK[run.rank.device.type]
    args = dict(
        products=products, combine=combine_of(weights, shared), out=out, tokens=problem.M, N=problem.N,
        ld=products.stride(0), stride_om=out.stride(0), stride_on=out.stride(1), TOP_K=problem.experts.top_k,
        BLOCK_M=block_m, BLOCK_N=block_n,
    )  # fmt: skip
    grid = (triton.cdiv(problem.M, block_m) * triton.cdiv(problem.N, block_n), 1, 1)
    run.launch(moe_combine_kernel, grid, args, num_warps=4, num_stages=1)
