"""Grouped products: each pair's row by its expert's weight, with the activation of `moe_gate_up` in the epilogue.

    moe_gate_up   rows are tokens, row t of A for each of its pairs; columns of gate and up are multiplied together
    moe_down      a pair has a row of its own, the result is the product rounded, with the bias where one is given

The result's row is the pair's, so what follows needs no order of its own. `grouped.py` has the steps. A program has one
tile, or with few pairs one expert's rows in all; none waits for another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris.device import arch
from iris.device.function import device_function
from iris.device.waits import WAITERS
import torch
import triton
import triton.language as tl

from .grouped import (
    LEAST_PAIRS,
    Experts,
    bias_of,
    check_pairs,
    gated,
    halves_product,
    pair_block,
    product,
    same_expert,
    sorted_block,
    two_products,
    ungated,
)
from .weights import can_be_described, is_transposed, weights_operand

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig
    from ..planning.moe_problem import MoeProblem
    from .activation import Activation
    from .routing import Routing
    from .steps import Steps


@device_function
def _tile(
    a, B, bias, out, expert, pair, own, col, divisor, N, stride_am, stride_ak, stride_bias, stride_om, stride_on,
    KIND: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    HAS_BIAS: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One block of an expert's pairs, columns of the result from `col` on."""
    r, c = pair // divisor, col + tl.arange(0, BLOCK_N)
    if GATE == "halves":
        if TOGETHER:
            gate, up = halves_product(
                a, r, own, stride_am, stride_ak, B, expert, col, BLOCK_M, BLOCK_N, BLOCK_K
            )  # fmt: skip
        else:
            gate, up = two_products(
                a, r, own, stride_am, stride_ak, B, expert, col, N + col, BLOCK_M, BLOCK_N, BLOCK_K
            )  # fmt: skip
        if HAS_BIAS:
            gate += bias_of(bias, expert, stride_bias, c, N)[None, :]
            up += bias_of(bias + N, expert, stride_bias, c, N)[None, :]
        value = gated(gate, up, KIND, ALPHA, LIMIT, SHIFT)
    elif GATE == "turns":
        both = product(a, r, own, stride_am, stride_ak, B, expert, 2 * col, BLOCK_M, 2 * BLOCK_N, BLOCK_K)
        if HAS_BIAS:
            both += bias_of(bias, expert, stride_bias, 2 * col + tl.arange(0, 2 * BLOCK_N), 2 * N)[None, :]
        gate, up = tl.split(tl.reshape(both, (BLOCK_M, BLOCK_N, 2)))
        value = gated(gate, up, KIND, ALPHA, LIMIT, SHIFT)
    else:
        value = product(a, r, own, stride_am, stride_ak, B, expert, col, BLOCK_M, BLOCK_N, BLOCK_K)
        if HAS_BIAS:
            value += bias_of(bias, expert, stride_bias, c, N)[None, :]
        if KIND is not None:
            value = ungated(value, KIND, ALPHA, LIMIT)
    places = out + (pair.to(tl.int64) * stride_om)[:, None] + (c.to(tl.int64) * stride_on)[None, :]
    tl.store(places, arch.round_to(value, out.dtype.element_ty), mask=own[:, None] & (c < N)[None, :])


@triton.jit(do_not_specialize=["pairs", "experts", "divisor", "blocks"])
def moe_matmul_kernel(
    a, b, bias, chosen, order, offsets, out, ctx_ptr, pairs, experts, divisor, blocks, N, K, stride_am, stride_ak,
    stride_be, stride_bk, stride_bn, stride_bias, stride_om, stride_on, KIND: tl.constexpr, GATE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, SORTED: tl.constexpr, SEARCHED: tl.constexpr,
    HAS_BIAS: tl.constexpr, TOGETHER: tl.constexpr, TMA_B: tl.constexpr,
    B_TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, WORLD_SIZE: tl.constexpr, WAITER: tl.constexpr,
):  # fmt: skip
    """out [pairs, N] = the activation of a [pairs // divisor, K] @ b [experts, K, N or 2 N] + bias, for each pair.

    SORTED: by order and offsets (`routing.py`), as many `blocks` at most; else by chosen [pairs]. SEARCHED: experts or
    pairs, as a power of two. GATE: "halves", "turns" or None; KIND: None for no activation. TOGETHER: a tile's columns
    of gate and of up, in halves, are loaded as one.
    """
    arch.follow()
    wide = 2 * N if GATE is not None else N
    B = Experts(b, K, wide, stride_be, stride_bk, stride_bn, TMA_B, B_TRANSPOSED)
    across = tl.cdiv(N, BLOCK_N)
    if SORTED:
        # neighbours share columns of the weight, GROUP_M blocks of rows at a time
        group = tl.program_id(0) // (GROUP_M * across)
        high = tl.minimum(blocks - group * GROUP_M, GROUP_M)
        within = tl.program_id(0) % (GROUP_M * across)
        block, col = group * GROUP_M + within % high, within // high * BLOCK_N
        expert, pair, own = sorted_block(order, offsets, block, experts, BLOCK_M, SEARCHED)
        if expert < experts:
            _tile(
                a, B, bias, out, expert, pair, own, col, divisor, N, stride_am, stride_ak, stride_bias, stride_om,
                stride_on, KIND, GATE, ALPHA, LIMIT, SHIFT, HAS_BIAS, TOGETHER, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    else:
        which, col = tl.program_id(0) // across, tl.program_id(0) % across * BLOCK_N
        expert, count, same = same_expert(chosen, which, pairs, experts, SEARCHED)
        for first in range(0, count, BLOCK_M):
            pair, own = pair_block(same, which, first, BLOCK_M, SEARCHED)
            _tile(
                a, B, bias, out, expert, pair, own, col, divisor, N, stride_am, stride_ak, stride_bias, stride_om,
                stride_on, KIND, GATE, ALPHA, LIMIT, SHIFT, HAS_BIAS, TOGETHER, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        check_pairs(ctx_ptr, chosen, pairs, experts, SEARCHED, WORLD_SIZE, WAITER)
    arch.lead()


def arguments(
    ctx: Rank, problem: MoeProblem, config: FusedConfig, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
    routing: Routing | torch.Tensor, bias: torch.Tensor | None, activation: Activation | None, interleaved: bool,
) -> tuple[tuple[int, int, int], dict]:  # fmt: skip
    """The grid and the arguments of `moe_matmul_kernel`. A plain tensor as `routing`: of few pairs, not sorted."""
    by_sorting = not isinstance(routing, torch.Tensor)
    chosen = routing if isinstance(routing, torch.Tensor) else routing.chosen
    block_n = config.block_n // 2 if problem.gated else config.block_n  # the tile of the product is `config`'s
    blocks = problem.blocks(config.block_m) if by_sorting else problem.pairs
    gate = None if not problem.gated else "turns" if interleaved else "halves"
    width = 2 * block_n if gate == "turns" else block_n
    halves = problem.N if gate == "halves" else 0
    together = bool(halves) and _together(config.block_m, block_n, B, halves)
    b, tma, transposed = weights_operand(B, width, config.block_k, halves, together)
    if by_sorting:
        searched = max(16, triton.next_power_of_2(problem.experts))
    elif problem.tokens == 1:
        searched = 1
    else:
        searched = max(LEAST_PAIRS.value, triton.next_power_of_2(problem.pairs))
    args = dict(
        a=A, b=b, bias=bias, chosen=chosen, out=out, ctx_ptr=ctx.get_device_context(),
        order=chosen if isinstance(routing, torch.Tensor) else routing.rows,
        offsets=chosen if isinstance(routing, torch.Tensor) else routing.offsets,
        pairs=problem.pairs, experts=problem.experts, divisor=1 if problem.reduces else problem.top_k, blocks=blocks,
        N=problem.N, K=problem.K, stride_am=A.stride(0), stride_ak=A.stride(1), stride_be=B.stride(0),
        stride_bk=B.stride(1), stride_bn=B.stride(2), stride_bias=0 if bias is None else bias.stride(0),
        stride_om=out.stride(0), stride_on=out.stride(1), KIND=activation and activation.kind, GATE=gate,
        ALPHA=activation.alpha if activation else 1.0, LIMIT=activation and activation.limit,
        SHIFT=activation.shift if activation else 0.0, SORTED=by_sorting,
        SEARCHED=searched, HAS_BIAS=bias is not None, TOGETHER=together, TMA_B=tma,
        B_TRANSPOSED=transposed, BLOCK_M=config.block_m, BLOCK_N=block_n, BLOCK_K=config.block_k,
        GROUP_M=config.group_m, WORLD_SIZE=ctx.num_ranks, WAITER=WAITERS.index(problem.op),
    )  # fmt: skip
    return (blocks * triton.cdiv(problem.N, block_n), 1, 1), args


def _together(block_m: int, block_n: int, B: torch.Tensor, n_step: int) -> bool:
    """Whether gate and up, in halves of B, are multiplied by one instruction.

    Of few rows so that columns fill the tensor cores' rows, of many so that these are read once for both. Only a
    descriptor of a transposed weight reads both halves as they are to lie for the latter.
    """
    if block_m < 64:
        return block_n < 64
    return is_transposed(B) and can_be_described(B, n_step)


def launch(steps: Steps, problem: MoeProblem, config: FusedConfig, *tensors: object) -> None:
    """Launches `moe_matmul_kernel`; tensors as in `arguments`."""
    grid, args = arguments(steps.ctx, problem, config, *tensors)  # type: ignore[arg-type]
    steps.launch(moe_matmul_kernel, grid, args, num_warps=config.num_warps, num_stages=config.num_stages)
