"""`moe_down_all_reduce` of one token in one kernel: each program sums all of its experts for some columns.

    1. A program multiplies the rows of all of the token's experts at once, some columns of each expert's weight. The
       products of one row are no work for tensor cores: they are multiplied and added element by element, and a
       multiprocessor does that faster than memory gives the weights.
    2. It rounds each expert's product, adds them up in the order of the token's experts, and sends the sum to every
       rank as Lamport values (`lamport_steps.py`).
    3. It takes what the peers have sent of its columns, adds it in rank order and stores `out`.

So nothing passes between the programs of a rank. In `lamport_down.py`, whose tiles are wide enough for tensor cores, it
does: a store, a fence, a count and a load, which take as long as the weights of an expert of a small one.

No wait is circular: a program waits for what a peer's program of the same columns sends before it waits itself, and on
every rank programs begin in order. All run at once but for results of very many columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris.device import arch
from iris.device.context import DeviceContext
from iris.device.lamport import load_bases, settled, unwrapped, without_sentinel
from iris.device.sync import advance
from iris.device.waits import WAITERS
import triton
import triton.language as tl

from ..kernels.arguments import World
from ..kernels.lamport_steps import exchange_of
from ..kernels.launching import lamport_memory
from .arguments import TokenForm, bias_of, choice_of, combine_of, strides_of
from .grouped import check_pairs

if TYPE_CHECKING:
    from ..config import FusedConfig
    from ..problem import Problem
    from ..steps import Run
    from ..workspace import Workspace
    from .operands import Down


@triton.jit(do_not_specialize=["experts"])
def moe_lamport_token_kernel(
    a, b, bias, chosen, combine, out, lamport, sync, ctx_ptr, experts, N, K, strides, form: tl.constexpr,
    world: tl.constexpr,
):  # fmt: skip
    """Compute out [1, N] = the sum over ranks and j of weights [1, TOP_K] * (a [TOP_K, K] @ b [experts, K, N] + bias) +
    shared.

    lamport: two buffers (`lamport_steps.py`); sync: [epoch, finished].
    """
    arch.follow()
    TOP_K: tl.constexpr = form.TOP_K
    CHOICES: tl.constexpr = form.CHOICES
    BLOCK_N: tl.constexpr = form.BLOCK_N
    BLOCK_K: tl.constexpr = form.BLOCK_K
    WORLD_SIZE: tl.constexpr = world.WORLD_SIZE
    WAITER: tl.constexpr = world.WAITER
    dtype: tl.constexpr = out.dtype.element_ty
    own_rank = (tl.load(ctx_ptr), tl.load(sync))
    all_bases = load_bases(ctx_ptr, WORLD_SIZE)
    j, c = tl.arange(0, CHOICES), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(chosen + j, mask=j < TOP_K, other=-1)
    valid = (expert >= 0) & (expert < experts)
    of_expert = (tl.where(valid, expert, 0).to(tl.int64) * strides.be)[:, None, None]
    columns = b + of_expert + (c.to(tl.int64) * strides.bn)[None, :, None]
    in_range = valid[:, None, None] & (c < N)[None, :, None]
    acc = tl.zeros((CHOICES, BLOCK_N, BLOCK_K), tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=form.STAGES):
        k = first + tl.arange(0, BLOCK_K)
        y = tl.load(
            columns + (k.to(tl.int64) * strides.bk)[None, None, :], mask=in_range & (k < K)[None, None, :], other=0.0
        )
        places = a + (j.to(tl.int64) * strides.am)[:, None] + (k.to(tl.int64) * strides.ak)[None, :]
        x = tl.load(places, mask=(j < TOP_K)[:, None] & (k < K)[None, :], other=0.0)
        acc += x.to(tl.float32)[:, None, :] * y.to(tl.float32)
    products = tl.sum(acc, 2)
    if bias.data is not None:
        places = bias.data + (tl.where(valid, expert, 0).to(tl.int64) * bias.stride)[:, None] + c[None, :]
        products += tl.load(places, mask=valid[:, None] & (c < N)[None, :], other=0.0).to(tl.float32)
    products = arch.round_to(products, dtype).to(tl.float32)
    factors = tl.load(combine.weights + j, mask=j < TOP_K, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for i in tl.static_range(TOP_K):  # in order; a sum over all of which one is not zero is that one
        total += tl.sum(tl.where(j == i, factors, 0.0), 0) * tl.sum(tl.where((j == i)[:, None], products, 0.0), 0)
    if combine.shared is not None:
        total += tl.load(combine.shared + c.to(tl.int64) * combine.stride_sn, mask=c < N, other=0.0).to(tl.float32)
    my_rank, last_epoch = settled(own_rank)
    rank, epoch, bases = my_rank.to(tl.int32), last_epoch + 1, settled(all_bases)
    ctx = DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE)
    exchange = exchange_of(ctx, bases, epoch, lamport, 1, WAITER)
    t = tl.arange(0, 1)
    values = without_sentinel(total, dtype)[None, :]
    exchange.send_tile(values, t, c, t < 1, N, TO_SELF=False)
    arch.lead()
    check_pairs(ctx_ptr, chosen, TOP_K, experts, 1, WORLD_SIZE, WAITER)
    advance(sync, epoch)
    mask = (t < 1)[:, None] & (c < lamport.ld)[None, :]
    total, _ = exchange.sum_all(exchange.places(t, c), mask, dtype, unwrapped(values, dtype))
    places = out + (c.to(tl.int64) * strides.on)[None, :]
    tl.store(places, arch.round_to(total, dtype), mask=(c < N)[None, :])


def launch(run: Run, workspace: Workspace, problem: Problem, config: FusedConfig, tensors: Down) -> None:
    """Launch the kernel. The workspace has room in its exchange area."""
    ctx, (out, A, B, where, weights, bias, shared, _) = run.rank, tensors
    once, k = (bias if ctx.cur_rank == 0 else None), problem.experts.top_k
    args = dict(
        a=A, b=B, bias=bias_of(once), chosen=choice_of(where).chosen, combine=combine_of(weights, shared), out=out,
        lamport=lamport_memory(workspace, problem.dtype, problem.N), sync=workspace.exchange_sync,
        ctx_ptr=ctx.get_device_context(), experts=problem.experts.count, N=problem.N, K=problem.K,
        strides=strides_of(A, B, out),
        form=TokenForm(k, triton.next_power_of_2(k), config.block_n, config.block_k, config.num_stages),
        world=World(ctx.num_ranks, WAITERS.index(problem.op)),
    )  # fmt: skip
    grid = (triton.cdiv(problem.N, config.block_n), 1, 1)
    run.launch(moe_lamport_token_kernel, grid, args, num_warps=config.num_warps, num_stages=config.num_stages)
