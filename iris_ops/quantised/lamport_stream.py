"""`matmul_all_reduce` of few rows with quantised weights, by the stream of `weight_stream.py`, on NVIDIA Hopper.

One shot: each rank sends its product to all ranks as Lamport values, and each adds up everyone's, in rank order. The
values lie in the same places as those of `lamport_matmul.py`. So ranks may even mix the two kernels, where one rank's
weight does not lie as this kernel needs it. Only the sums of squares of a norm are then added in another order.

A program sends all tiles that it multiplies before it waits for any. The columns that it sums are others than those
that it multiplied: 64 at a time, as the sums of squares need them (`rmsnorm_epilogue.py`). All programs run at once.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from iris import platform
from iris.device import arch
from iris.device.context import DeviceContext
from iris.device.lamport import load_bases, remote, settled, take, without_sentinel
from iris.device.sync import advance
from iris.device.tracing import PRODUCT, PUSH, SUM
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernels.arguments import TileEpilogue
from ..kernels.launching import lamport_memory, shared_arguments
from ..kernels.rmsnorm_epilogue import SPAN, add_residual, norm_first_half
from ..problem import Problem
from . import weight_stream

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig
    from ..kernels.launching import Launch
    from ..operands import Operands
    from ..workspace import Workspace


@gluon.jit(do_not_specialize=["M"])
def lamport_stream_kernel(
    a,
    b,
    scales,
    epilogue,
    out,
    lamport,
    sync,
    ctx_ptr,
    M,
    N,
    K,
    stride_om,
    stride_on,
    form: gl.constexpr,
    widen: gl.constexpr,
    world: gl.constexpr,
):
    """Multiply up to BLOCK_M rows by a streamed quantised weight, and all-reduce the products as Lamport values.

    a, b, scales, epilogue.b_scales: as in `weight_stream.py`; the others are as in `lamport_matmul_kernel`.
    """
    BLOCK_M: gl.constexpr = form.BLOCK_M
    TAKE: gl.constexpr = form.TAKE
    WORLD_SIZE: gl.constexpr = world.WORLD_SIZE
    TRACING: gl.constexpr = world.TRACING
    staging, ld = lamport.staging, lamport.ld
    dtype: gl.constexpr = out.dtype.element_ty
    arch.follow()
    stream, at = weight_stream.begin(a, b, scales, N, K, form)
    SUMS: gl.constexpr = weight_stream.layout_of_sums(stream.sums.shape[1], stream.sums.shape[0], gl.num_warps())
    own = (gl.load(ctx_ptr), gl.load(sync))
    all_bases = load_bases(ctx_ptr, WORLD_SIZE)
    rank, epoch, bases = 0, 0, all_bases  # every program has tiles and learns them there
    tracing = DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE, TRACING).tracing
    step = M.to(gl.int64) * ld
    for group in range(gl.program_id(0), gl.cdiv(N, stream.WIDTH), gl.num_programs(0)):
        span = tracing.record_event_start(PRODUCT, -1, out, 0, group, nbytes=0)
        at = weight_stream.multiply(stream, at, widen, BLOCK_M)
        col, inside = weight_stream.columns_of(stream, group, ld, SUMS)
        partial = without_sentinel(weight_stream.total(stream, epilogue.b_scales, 0, col, 0, SUMS), dtype)
        tracing.record_event_end(span)
        own_rank, last_epoch = settled(own)
        rank, epoch, bases = own_rank.to(gl.int32), last_epoch + 1, settled(all_bases)
        ctx = DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE, TRACING)
        r = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))
        mine = staging + (epoch & 1).to(gl.int64) * lamport.half_elements + rank * step
        mask = inside[:, None] & (r < M)[None, :]
        nbytes = M * (min(N, (group + 1) * stream.WIDTH) - group * stream.WIDTH) * (dtype.primitive_bitwidth // 8)
        span = tracing.record_event_start(PUSH, -1, staging, 0, group, nbytes=nbytes)
        for i in gl.static_range(1, WORLD_SIZE + 1):  # our own too: every rank sums the same numbers
            target = remote(ctx, mine, bases, (rank + i) % WORLD_SIZE)
            gl.store(target + (r * ld)[None, :] + col[:, None], partial, mask=mask, cache_modifier=".wt")
        tracing.record_event_end(span)

    arch.lead()
    advance(sync, epoch)  # which all programs have read
    ctx = DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE, TRACING)
    half = staging + (epoch & 1).to(gl.int64) * lamport.half_elements
    r = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, TAKE))
    for t in range(gl.program_id(0), gl.cdiv(N, SPAN), gl.num_programs(0)):
        c = t * SPAN + gl.arange(0, SPAN, layout=gl.SliceLayout(0, TAKE))
        if epilogue.scaled is not None:
            added = add_residual(epilogue.residual, epilogue.weight, r, c, M, N)
        place, mask = (r * ld)[:, None] + c[None, :], (r < M)[:, None] & (c < ld)[None, :]
        span = ctx.tracing.record_event_start(SUM, rank, staging, 0, t, nbytes=0)
        total, _ok = take(ctx, half + place, step, mask, 0, epoch, world.WAITER, dtype, WORLD_SIZE, LANES=False)
        ctx.tracing.record_event_end(span)
        if epilogue.bias is not None:
            total += gl.load(epilogue.bias + c, mask=c < N, other=0.0).to(gl.float32)[None, :]
        if epilogue.scaled is not None:
            total = norm_first_half(total, added, epilogue.scaled, epilogue.squares, r, c, t * SPAN, M, N, SPAN)
        target = out + (r.to(gl.int64) * stride_om)[:, None] + (c.to(gl.int64) * stride_on)[None, :]
        gl.store(target, total.to(dtype), mask=(r < M)[:, None] & (c < N)[None, :])


def supports(problem: Problem, config: "FusedConfig", rank: int, tensors: "Operands") -> str | None:
    """Return the reason why the kernel cannot load these tensors, or None."""
    return weight_stream.supports(tensors.A, tensors.B, tensors.scale)


def taken(block_m: int, warps: int) -> gl.BlockedLayout:
    """Return which thread takes what of [block_m, 64] Lamport values: a vector of 16 bytes of a row at most."""
    held = min(8, block_m * SPAN.value // (32 * warps))
    across = SPAN.value // held
    return gl.BlockedLayout([1, held], [32 // across, across], [warps, 1], [1, 0])


def options(grid: int, programs: int, args: dict) -> dict[str, int]:
    """Return more options of a launch."""
    return weight_stream.options(grid, programs, args["form"].WARPS)


def launcher(
    rank: "Rank", workspace: "Workspace", problem: Problem, config: "FusedConfig", tensors: "Operands"
) -> "Launch":
    out, A, B, bias, scale = tensors
    assert scale is not None
    M, N = out.shape
    programs = min(config.num_programs or platform.num_programs(rank.device), platform.num_programs(rank.device))
    stream = weight_stream.prepared(A, B, scale, programs)
    args = dict(
        **stream.operands,
        form=replace(stream.form, TAKE=taken(stream.form.BLOCK_M, stream.form.WARPS)),
        epilogue=TileEpilogue(bias, b_scales=scale if scale.ndim == 1 else None),
        lamport=lamport_memory(workspace, problem.dtype, N),
        M=M,
        N=N,
        stride_om=out.stride(0),
        stride_on=out.stride(1),
        **shared_arguments(rank, workspace.exchange_sync, problem, out),
    )
    return lamport_stream_kernel, (stream.grid, 1, 1), args
