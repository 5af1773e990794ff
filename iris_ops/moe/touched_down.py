"""`moe_down_all_reduce` of few tokens and quantised experts, as a stream of the experts touched, on NVIDIA Hopper.

    1. A program's items are groups of columns of one expert each, as in `touched_stream.py`. It leaves their products,
       rounded, in this rank's memory.
    2. Then it counts its items among those of their columns, all at once: a count after each item would cost as long as
       a short product. Who counts the last item of some columns adds their products up for each token, in the order of
       the token's experts, and sends the sums to every rank, its own included, as Lamport values.
    3. Then it takes some columns of all ranks, adds them in rank order and stores `out`.

Values lie where `lamport_down.py` has them, so ranks may mix the two kernels.

All programs run at once, and none waits before it has sent all that it has to send. So no wait is circular.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris import platform
from iris.device import arch
from iris.device.context import DeviceContext
from iris.device.lamport import load_bases, put, settled, take, without_sentinel
from iris.device.sync import advance
from iris.device.waits import WAITERS
from iris.triton_private import program_barrier, warp_specialize
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernels.arguments import World
from ..kernels.launching import lamport_memory
from ..planning.ways.touched import COLUMNS
from ..planning.workspace_size import exchange_ld
from ..quantised import weight_stream
from .arguments import DownMemory, bias_of, choice_of, combine_of
from .combine import combined
from .touched import (
    LINES,
    LOADER_REGISTERS,
    LOADER_WARPS,
    across,
    as_rows,
    item_of,
    load_ahead,
    load_rows,
    multiply,
    ring_of,
)
from .touched_stream import finished, streamed, terms_of, touched_blocks

if TYPE_CHECKING:
    from ..config import FusedConfig
    from ..problem import Problem
    from ..steps import Run
    from ..workspace import Workspace
    from .operands import Down


@gluon.jit(do_not_specialize=["tokens", "experts"])
def moe_stream_down_kernel(
    a, b, scales, factors, bias, chosen, combine, out, memory, ctx_ptr, tokens, experts, N, K, stride_am, stride_om,
    stride_on, form: gl.constexpr, widen: gl.constexpr, world: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Compute what `moe_lamport_down_kernel` computes, by the stream of `moe_stream_gate_up_kernel`.

    a: A [tokens * TOP_K, K] by numbers or by words of four. memory: a `DownMemory`. TOKENS: a power of two, at least
    as many as there are.
    """
    ring = ring_of(b, scales, N, K, False, form.STAGES, form.ZEROS)
    arch.follow()
    touched, experts_of = touched_blocks(chosen, ctx_ptr, tokens, experts, form, world)
    groups = gl.cdiv(N, b.block_type.shape[1])
    warp_specialize(
        [
            (
                _multiply_and_exchange,
                (ring, touched, groups, a, factors, bias, combine, out, memory, ctx_ptr, tokens, N, K, stride_am,
                 stride_om, stride_on, form, widen, world, TOKENS),
            ),
            (load_ahead, (ring, experts_of, touched.count, groups)),
        ],
        [LOADER_WARPS],
        [LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _multiply_and_exchange(
    ring, touched, groups, a, factors, bias, combine, out, memory, ctx_ptr, tokens, N, K, stride_am, stride_om,
    stride_on, form: gl.constexpr, widen: gl.constexpr, world: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Run the MMA warps: multiply this program's items, and exchange the sums of columns."""
    COLUMNS: gl.constexpr = ring.b.block_type.shape[1]
    WORLD_SIZE: gl.constexpr = world.WORLD_SIZE
    SUMS: gl.constexpr = weight_stream.layout_of_sums(COLUMNS, LINES, gl.num_warps())
    OUT: gl.constexpr = gl.SliceLayout(0, SUMS)
    TAKE: gl.constexpr = gl.BlockedLayout([1, 8], [4, COLUMNS // 8], [gl.num_warps(), 1], [1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1, 1], [1, 16, 8])
    THREADS: gl.constexpr = 32 * gl.num_warps()
    COUNTED: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    products, counts, lamport, sync = memory.products, memory.counts, memory.lamport, memory.sync
    dtype: gl.constexpr = out.dtype.element_ty
    ld = lamport.ld
    own = (gl.load(ctx_ptr), gl.load(sync))
    all_bases = load_bases(ctx_ptr, WORLD_SIZE)
    stage, phase = gl.program_id(0) * 0, gl.program_id(0) * 0
    block, group = item_of(0, groups)
    pairs = touched.pairs_of(block)
    x = load_rows(a, pairs, 0, K, stride_am, 1, widen)
    items = gl.cdiv(gl.maximum(touched.count * groups - gl.program_id(0), 0), gl.num_programs(0))
    for i in range(items):
        block, group = item_of(i, groups)
        after_block, after_group = item_of(i + 1, groups)
        after = touched.pairs_of(after_block)
        col = group * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, OUT))
        terms = terms_of(factors, bias, touched.expert_of(block), col, N)
        sums, x, stage, phase = multiply(ring, a, x, pairs, after, stage, phase, K, stride_am, 1, widen, MMA)
        value = finished(across(ring, sums, SUMS)[0], terms, factors, bias, form)
        row = as_rows(pairs, gl.SliceLayout(0, OUT))
        places = products + (row * ld)[None, :] + col[:, None]
        gl.store(places, value.to(dtype), mask=(col < N)[:, None] & (row >= 0)[None, :])
        pairs = after

    own_rank, last_epoch = settled(own)
    rank, epoch, bases = own_rank.to(gl.int32), last_epoch + 1, settled(all_bases)
    ctx = DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE)
    block_step = tokens.to(gl.int64) * ld
    half = lamport.staging + (epoch & 1).to(gl.int64) * lamport.half_elements
    t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, TAKE))
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, TAKE))
    arch.drain_stores()
    program_barrier()
    for first in range(0, items, THREADS):
        item = first + gl.arange(0, THREADS, layout=COUNTED)
        of_item = (gl.program_id(0) + item * gl.num_programs(0)) % groups
        one = gl.full((THREADS,), 1, gl.int32, layout=COUNTED)
        before = gl.atomic_add(counts + of_item, one, mask=item < items, sem="acq_rel", scope="gpu")
        whole = (item < items) & (before == touched.count - 1)
        for _n in range(gl.sum(whole.to(gl.int32), 0)):
            group = gl.max(gl.where(whole, of_item, -1), 0)
            whole = whole & (of_item != group)
            gl.store(counts + group, 0)
            total = gl.zeros((TOKENS, COLUMNS), gl.float32, layout=TAKE)
            here = group * COLUMNS + c
            total = combined(total, products, combine, t, here, tokens, N, ld, form.TOP_K)
            values = without_sentinel(total, dtype)
            place = half + rank * block_step + (t * ld)[:, None] + here[None, :]
            for r in gl.static_range(1, WORLD_SIZE + 1):
                inside = (t < tokens)[:, None] & (here < ld)[None, :]
                put(ctx, place, values, inside, bases, (rank + r) % WORLD_SIZE)

    arch.lead()
    advance(sync, epoch)
    for group in range(gl.program_id(0), groups, gl.num_programs(0)):
        here = group * COLUMNS + c
        place, mask = half + (t * ld)[:, None] + here[None, :], (t < tokens)[:, None] & (here < ld)[None, :]
        total, _ok = take(ctx, place, block_step, mask, 0, epoch, world.WAITER, dtype, WORLD_SIZE, LANES=False)
        target = out + (t.to(gl.int64) * stride_om)[:, None] + (here.to(gl.int64) * stride_on)[None, :]
        gl.store(target, total.to(dtype), mask=(t < tokens)[:, None] & (here < N)[None, :])


def launch(run: Run, workspace: Workspace, problem: Problem, config: FusedConfig, tensors: Down) -> None:
    """Launch the kernel. The workspace has room in its exchange area."""
    ctx, (out, A, B, where, weights, bias, shared, scale) = run.rank, tensors
    assert scale is not None
    ld, size = exchange_ld(problem.N), problem.dtype.itemsize
    products = workspace.local("moe products", problem.pairs * ld * size).view(problem.dtype).view(problem.pairs, ld)
    counts = workspace.local("moe stream counts", 4 * triton.cdiv(problem.N, COLUMNS)).view(torch.int32)
    grid, args, options = streamed(problem, A, B, scale, platform.num_programs(A.device))
    args |= dict(
        bias=bias_of(bias if ctx.cur_rank == 0 else None), chosen=choice_of(where).chosen,
        combine=combine_of(weights, shared), out=out,
        memory=DownMemory(
            products, counts, lamport_memory(workspace, problem.dtype, problem.N), workspace.exchange_sync
        ),
        ctx_ptr=ctx.get_device_context(), stride_om=out.stride(0), stride_on=out.stride(1),
        world=World(ctx.num_ranks, WAITERS.index(problem.op)), TOKENS=max(8, triton.next_power_of_2(problem.M)),
    )  # fmt: skip
    run.launch(moe_stream_down_kernel, (grid, 1, 1), args, **options)
