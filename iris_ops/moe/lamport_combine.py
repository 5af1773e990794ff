"""Finish a mixture of many tokens in one kernel: each token's sum, which is sent at once, and the sum over the ranks.
`lamport_down.py` is for few tokens, `sequential.py` for what is too large for this kernel.

    EXCHANGE    a rank's sums go to    then
    "all"       every rank             each adds everyone's, in rank order
    "owners"    their tokens' owners   they add them and send the result to everyone
    "scatter"   their tokens' owners   they add them: reduce-scatter

A launch exchanges the sums of as many tokens as the exchange area has room for (`moe_ways.tokens_at_once`).

Sums are Lamport values (`lamport_steps.py`), so what a program reads of its memory and what it sends overlap, and no
rank waits for a peer's last value before it begins. A program sends all that it has before it takes any: no wait is
circular. With "all", this rank's own sums are in `out` meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris import platform
from iris.device import arch
from iris.device.context import DeviceContext
from iris.device.lamport import load_bases, without_sentinel
from iris.device.sync import advance
from iris.device.waits import WAITERS
import torch
import triton
import triton.language as tl

from ..kernels.arguments import World
from ..kernels.lamport_matmul import sum_own_part
from ..kernels.lamport_steps import exchange_of
from ..kernels.launching import lamport_memory
from ..kernels.sum_orders import RankOrder
from ..kernels.tiles import Matrix
from ..planning.moe_ways import exchange_form, tokens_at_once
from ..planning.operations import DOWN_REDUCE_SCATTER
from . import grouped_matmul
from .arguments import combine_of
from .combine import combined

if TYPE_CHECKING:
    from ..config import FusedConfig
    from ..problem import Problem
    from ..steps import Run
    from ..workspace import Workspace
    from .operands import Down

# Tokens and columns that are added up at once, and programs to a multiprocessor, of 4 warps: all of them are resident.
# The interpreter is quicker with large blocks.
_BLOCK = {"cuda": (8, 256, 2), "cpu": (64, 256, 1)}


@triton.jit(do_not_specialize=["tokens", "part_rows"])
def moe_lamport_combine_kernel(
    products, combine, out, lamport, sync, ctx_ptr, tokens, N, stride_pm, stride_om, stride_on, part_rows,
    TOP_K: tl.constexpr, EXCHANGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, world: tl.constexpr,
):  # fmt: skip
    """Combine products [tokens * TOP_K, N], and all-reduce or reduce-scatter them as Lamport values.

    lamport: two buffers (`lamport_steps.py`); sync: [epoch, finished].
    """
    arch.follow()
    dtype: tl.constexpr = out.dtype.element_ty
    TO_OWNERS: tl.constexpr = EXCHANGE != "all"
    rank, epoch = tl.load(ctx_ptr).to(tl.int32), tl.load(sync) + 1
    ctx = DeviceContext.initialize(ctx_ptr, rank, world.WORLD_SIZE)
    bases = load_bases(ctx_ptr, world.WORLD_SIZE)
    exchange = exchange_of(ctx, bases, epoch, lamport, part_rows, world.WAITER)
    C = Matrix(out, tokens, N, stride_om, stride_on)
    across = tl.cdiv(N, BLOCK_N)
    count = tl.cdiv(tokens, BLOCK_M) * across
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        t = tile // across * BLOCK_M + tl.arange(0, BLOCK_M)
        c = tile % across * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        total = combined(total, products, combine, t, c, tokens, N, stride_pm, TOP_K)
        values = without_sentinel(total, dtype)
        if TO_OWNERS:
            exchange.send_to_owners(values, t, c, t < tokens, tokens, N, False)
        else:
            exchange.send_tile(values, t, c, t < tokens, N, TO_SELF=False)
            target, inside = C.places(t, c)
            tl.store(target, arch.round_to(total, dtype), mask=inside)
    if EXCHANGE == "scatter":
        exchange.tell_peers()
    arch.lead()
    advance(sync, epoch)
    if TO_OWNERS:
        sum_own_part(exchange, RankOrder(None, None), None, C, BLOCK_M, BLOCK_N, False, TO_ALL=EXCHANGE == "owners")
    if EXCHANGE != "scatter":
        for tile in range(tl.program_id(0), count, tl.num_programs(0)):
            t = tile // across * BLOCK_M + tl.arange(0, BLOCK_M)
            c = tile % across * BLOCK_N + tl.arange(0, BLOCK_N)
            mask = (t < tokens)[:, None] & (c < lamport.ld)[None, :]
            target, inside = C.places(t, c)
            if TO_OWNERS:
                total = exchange.take_sums(t, c, mask, dtype)
            else:
                own = tl.load(target, mask=inside, other=0.0).to(tl.float32)
                total, _ = exchange.sum_all(exchange.places(t, c), mask, dtype, own)
            tl.store(target, arch.round_to(total, dtype), mask=inside)
    else:
        exchange.wait_for_peers(dtype)


def launch(run: Run, workspace: Workspace, problem: Problem, config: FusedConfig, tensors: Down) -> None:
    """Launch product and sums. The workspace has room in its exchange area."""
    size = problem.pairs * problem.N * problem.dtype.itemsize
    products = workspace.local("moe products", size).view(problem.dtype).view(problem.pairs, problem.N)
    grouped_matmul.launch_down(run, workspace, problem, config, tensors.product(products, run.rank.cur_rank))
    out, weights, shared = tensors.out, tensors.weights, tensors.shared
    at_once, k = tokens_at_once(problem), problem.experts.top_k
    for begin in range(0, problem.M, at_once):
        some = slice(begin, begin + at_once)
        _launch_sums(
            run, workspace, problem, out if problem.op == DOWN_REDUCE_SCATTER else out[some],
            products[begin * k : (begin + at_once) * k], weights[some], None if shared is None else shared[some],
        )  # fmt: skip


def _launch_sums(
    run: Run, workspace: Workspace, problem: Problem, out: torch.Tensor, products: torch.Tensor,
    weights: torch.Tensor, shared: torch.Tensor | None,
) -> None:  # fmt: skip
    """Launch the kernel that combines and sums the tokens that have `weights`."""
    device, tokens, form = run.rank.device, weights.shape[0], exchange_form(problem)
    block_m, block_n, at_once = _BLOCK[device.type]
    args = dict(
        products=products, combine=combine_of(weights, shared), out=out,
        lamport=lamport_memory(workspace, problem.dtype, problem.N), sync=workspace.exchange_sync,
        ctx_ptr=run.rank.get_device_context(), tokens=tokens, N=problem.N, stride_pm=products.stride(0),
        stride_om=out.stride(0), stride_on=out.stride(1),
        part_rows=tokens if form == "all" else -(-tokens // problem.world_size),
        TOP_K=problem.experts.top_k, EXCHANGE=form, BLOCK_M=block_m, BLOCK_N=block_n,
        world=World(problem.world_size, WAITERS.index(problem.op)),
    )  # fmt: skip
    tiles = triton.cdiv(tokens, block_m) * triton.cdiv(problem.N, block_n)
    grid = (min(tiles, at_once * platform.num_programs(device)), 1, 1)
    run.launch(moe_lamport_combine_kernel, grid, args, num_warps=4, num_stages=1)
