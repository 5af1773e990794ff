"""Grouped products: each pair's row by its expert's weight, with the activation of `moe_gate_up` in the epilogue.

    moe_gate_up   rows are tokens, row t of A for each of its pairs; columns that are joined are multiplied together
    moe_down      a pair has a separate row, the result is the product rounded, with the bias where one is given

The result's row is the pair's, so later steps need no separate order. `grouped.py` has the steps. A program has one
tile, or with few pairs one expert's rows in all; none waits for another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris.device import arch
from iris.device.function import device_function
from iris.device.waits import WAITERS
from iris.machines import machine_of
import torch
import triton
import triton.language as tl

from ..kernels.activations import activated, joined
from ..kernels.arguments import Tile, World
from ..planning.moe_ways import widened
from . import widened_matmul
from .arguments import GroupedForm, choice_of, strides_of
from .arguments import bias_of as expert_bias
from .coded import experts_of
from .grouped import (
    LEAST_PAIRS,
    PairRows,
    bias_of,
    check_pairs,
    halves_product,
    pair_block,
    product,
    same_expert,
    sorted_block,
    two_products,
)
from .weights import can_be_described, is_transposed, stored, weights_operand

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig
    from ..problem import Problem
    from ..steps import Run
    from ..workspace import Workspace
    from .operands import GateUp


@device_function
def _tile(
    rows, B, bias, out, expert, pair, col, N, stride_om, stride_on, tile: tl.constexpr, form: tl.constexpr,
    activation: tl.constexpr,
):  # fmt: skip
    """Compute one block of an expert's pairs, columns of the result from `col` on."""
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    c = col + tl.arange(0, BLOCK_N)
    if form.INTERLEAVED:
        both = product(rows, B, expert, 2 * col, 2 * BLOCK_N, BLOCK_K)
        if bias.data is not None:
            both += bias_of(bias, expert, 2 * col + tl.arange(0, 2 * BLOCK_N), 2 * N)[None, :]
        first, second = tl.split(tl.reshape(both, (BLOCK_M, BLOCK_N, 2)))
        value = joined(first, second, activation)
    elif form.MATRICES == 2:
        if form.TOGETHER:
            first, second = halves_product(rows, B, expert, col, BLOCK_N, BLOCK_K)
        else:
            first, second = two_products(rows, B, expert, col, N + col, BLOCK_N, BLOCK_K)
        if bias.data is not None:
            first += bias_of(bias, expert, c, N)[None, :]
            second += bias_of(bias, expert, c, N, N)[None, :]
        value = joined(first, second, activation)
    else:
        value = product(rows, B, expert, col, BLOCK_N, BLOCK_K)
        if bias.data is not None:
            value += bias_of(bias, expert, c, N)[None, :]
        if activation is not None:
            value = activated(value, activation)
    places = out + (pair.to(tl.int64) * stride_om)[:, None] + (c.to(tl.int64) * stride_on)[None, :]
    tl.store(places, arch.round_to(value, out.dtype.element_ty), mask=rows.own[:, None] & (c < N)[None, :])


@triton.jit(do_not_specialize=["pairs", "experts", "divisor", "blocks"])
def moe_matmul_kernel(
    a, b, scale, bias, choice, out, ctx_ptr, pairs, experts, divisor, blocks, N, K, strides, tile: tl.constexpr,
    form: tl.constexpr, codes: tl.constexpr, widen: tl.constexpr, activation: tl.constexpr, world: tl.constexpr,
):  # fmt: skip
    """Compute, for each pair, out [pairs, N] = the activation of a [pairs // divisor, K] @ b [experts, K, N or 2 N] +
    bias.

    scale, codes, widen: of a quantised weight (`coded.py`), else None. `blocks`: the most blocks of rows, where pairs
    are sorted. `activation`: an `Activation`, or None for the product.
    """
    arch.follow()
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    GROUP_M: tl.constexpr = tile.GROUP_M
    SEARCHED: tl.constexpr = form.SEARCHED
    B = experts_of(b, scale, K, form.MATRICES * N, strides, tile.B_TRANSPOSED, codes, widen, a.dtype.element_ty)
    across = tl.cdiv(N, BLOCK_N)
    if form.SORTED:
        # neighbours share columns of the weight, GROUP_M blocks of rows at a time
        group = tl.program_id(0) // (GROUP_M * across)
        high = tl.minimum(blocks - group * GROUP_M, GROUP_M)
        within = tl.program_id(0) % (GROUP_M * across)
        block, col = group * GROUP_M + within % high, within // high * BLOCK_N
        expert, pair, own = sorted_block(choice.order, choice.offsets, block, experts, BLOCK_M, SEARCHED)
        if expert < experts:
            rows = PairRows(a, pair // divisor, own, strides.am, strides.ak)
            _tile(rows, B, bias, out, expert, pair, col, N, strides.om, strides.on, tile, form, activation)
    else:
        which, col = tl.program_id(0) // across, tl.program_id(0) % across * BLOCK_N
        expert, count, same = same_expert(choice.chosen, which, pairs, experts, SEARCHED)
        for first in range(0, count, BLOCK_M):
            pair, own = pair_block(same, which, first, BLOCK_M, SEARCHED)
            rows = PairRows(a, pair // divisor, own, strides.am, strides.ak)
            _tile(rows, B, bias, out, expert, pair, col, N, strides.om, strides.on, tile, form, activation)
        check_pairs(ctx_ptr, choice.chosen, pairs, experts, SEARCHED, world.WORLD_SIZE, world.WAITER)
    arch.lead()


def arguments(
    ctx: Rank, problem: Problem, config: FusedConfig, tensors: GateUp
) -> tuple[tuple[int, int, int], dict]:  # fmt: skip
    """Return the grid and the arguments of `moe_matmul_kernel`. A plain tensor as `where`: of few pairs, not sorted."""
    out, A, _, routing, bias, activation, interleaved, _ = tensors
    weight = stored(tensors.B, tensors.scale)
    B, N, count, matrices = weight.B, problem.out_cols, problem.experts.count, problem.epilogue.matrices
    by_sorting = not isinstance(routing, torch.Tensor)
    block_n = config.block_n // matrices  # the tile of the product is `config`'s
    blocks = problem.experts.blocks(problem.pairs, config.block_m) if by_sorting else problem.pairs
    width = config.block_n if interleaved else block_n
    halves = N if matrices > 1 and not interleaved else 0
    together = bool(halves) and _together(config.block_m, block_n, B, halves)
    b, _, transposed = weights_operand(B, width, config.block_k // weight.packed, halves, together)
    if by_sorting:
        searched = max(16, triton.next_power_of_2(count))
    elif problem.M == 1:
        searched = 1
    else:
        searched = max(LEAST_PAIRS.value, triton.next_power_of_2(problem.pairs))
    args = dict(
        a=A, b=b, bias=expert_bias(bias), choice=choice_of(routing), out=out, ctx_ptr=ctx.get_device_context(),
        pairs=problem.pairs, experts=count, divisor=1 if problem.operation.sums else problem.experts.top_k,
        blocks=blocks, N=N, K=problem.K, strides=strides_of(A, B, out),
        tile=Tile(config.block_m, block_n, config.block_k, config.group_m, transposed),
        form=GroupedForm(by_sorting, searched, matrices, interleaved, together), activation=activation,
        **weight.arguments, world=World(ctx.num_ranks, WAITERS.index(problem.op)),
    )  # fmt: skip
    return (blocks * triton.cdiv(N, block_n), 1, 1), args


def _together(block_m: int, block_n: int, B: torch.Tensor, n_step: int) -> bool:
    """Return whether the halves of B are multiplied by one instruction.

    With few rows, columns then fill the tensor cores' rows; with many, rows are read once for both. Only a descriptor
    of a transposed weight reads both halves in the layout that the latter needs.
    """
    if block_m < 64:
        return block_n < 64
    return is_transposed(B) and can_be_described(B, n_step)


def launch(run: Run, workspace: Workspace, problem: Problem, config: FusedConfig, tensors: GateUp) -> None:
    """Launch `moe_matmul_kernel`, which needs no workspace."""
    grid, args = arguments(run.rank, problem, config, tensors)
    run.launch(moe_matmul_kernel, grid, args, num_warps=config.num_warps, num_stages=config.num_stages)


def launch_down(run: Run, workspace: Workspace, problem: Problem, config: FusedConfig, tensors: GateUp) -> None:
    """Launch the product of a way back, of sorted pairs: by widened codes if the plan's tile is theirs."""
    widens = widened(problem, machine_of(run.rank.device))
    widens = widens and widened_matmul.supports(problem, config, run.rank.cur_rank, tensors) is None
    (widened_matmul.launch if widens else launch)(run, workspace, problem, config, tensors)
