"""The two products of a mixture of few tokens and quantised experts, as a stream of the experts that are touched.

    moe_gate_up           A program's items are some columns of one expert each. It multiplies all tokens of the expert,
                          and stores the activation as rows of the pairs.
    moe_down_all_reduce   A program has some columns of the result, and sums all experts of all tokens for them: each
                          expert's product in fp32, times its factor. The sums go to every rank as Lamport values, which
                          the program takes, as in `quantised/lamport_stream.py`.

So a step reads each touched expert once, and nothing passes between the programs of a rank. `touched.py` has the loop.
The exchange is the one of `lamport_down.py`, which serves a rank whose tensors the hardware cannot load by blocks.

No wait is circular: all programs run at once, and each sends all that it has before it takes any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from iris import platform
from iris.device import arch
from iris.device.context import DeviceContext
from iris.device.lamport import load_bases, remote, settled, take, without_sentinel
from iris.device.sync import advance
from iris.device.waits import WAITERS
from iris.triton_private import word_descriptor
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernels.arguments import World
from ..kernels.launching import lamport_memory
from ..kernels.rmsnorm_epilogue import SPAN
from ..planning.needs import GATE
from ..planning.ways.touched import columns_at_once, too_many
from ..planning.weights import format_of
from ..quantised import stream_form, weight_stream
from ..quantised.lamport_stream import taken
from .arguments import StreamedForm, bias_of, choice_of, combine_of
from .grouped import gated, ungated
from .routing import report_experts
from .touched import LINES, WARPS, across, begin, choices_layout, find, item_of, load_rows, multiply, ring_of

if TYPE_CHECKING:
    from ..config import FusedConfig
    from ..problem import Problem
    from ..workspace import Workspace
    from .operands import Down, GateUp
    from .steps import Steps

# Of a ring at most; programs on a multiprocessor at once; bytes of shared memory for what moves between warps.
_STAGES, _RESIDENT, _MOVED = 12, 2, 1024


@gluon.jit
def _found(chosen, ctx_ptr, tokens, experts, form: gl.constexpr, world: gl.constexpr):
    """The blocks of a step. The first program reports experts that are out of range."""
    touched, given, wrong = find(chosen, tokens, experts, form.TOP_K, form.BLOCK_M, form.CHOICES)
    if gl.program_id(0) == 0:
        ctx = DeviceContext.initialize(ctx_ptr, gl.load(ctx_ptr).to(gl.int32), world.WORLD_SIZE)
        report_experts(ctx, given, wrong, experts, world.WAITER)
    return touched


@gluon.jit
def _finished(total, factors, bias, expert, col, N, form: gl.constexpr):
    """A sum [columns, rows] times the scales of its columns, with the bias."""
    total = total * form.LATER
    if factors is not None:
        scales = gl.load(factors + expert * N + col, mask=col < N, other=0.0)
        total = total * scales[:, None]
    if bias.data is not None:
        more = gl.load(bias.data + expert.to(gl.int64) * bias.stride + col, mask=col < N, other=0.0)
        total = total + more.to(gl.float32)[:, None]
    return total


@gluon.jit(do_not_specialize=["tokens", "experts"])
def moe_stream_gate_up_kernel(
    a, b, scales, factors, bias, chosen, out, ctx_ptr, tokens, experts, N, K, stride_am, stride_om, stride_on,
    form: gl.constexpr, widen: gl.constexpr, activation: gl.constexpr, world: gl.constexpr,
):  # fmt: skip
    """As `moe_matmul_kernel`; N columns of an expert's weight. b, scales: of all experts, as `touched.py` says.

    a: A by numbers or by words of four. factors: the scales of columns, or None.
    """
    BLOCK_M: gl.constexpr = form.BLOCK_M
    GATE: gl.constexpr = form.GATE
    HALVES: gl.constexpr = GATE == "halves"
    COLUMNS: gl.constexpr = b.block_type.shape[1]
    GIVEN: gl.constexpr = COLUMNS // 2 if GATE == "turns" else COLUMNS  # columns of the result
    SUMS: gl.constexpr = weight_stream.layout_of_sums(COLUMNS, LINES, gl.num_warps())
    OUT: gl.constexpr = gl.SliceLayout(0, weight_stream.layout_of_sums(GIVEN, LINES, gl.num_warps()))
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1, 1], [1, 16, 8])
    dtype: gl.constexpr = out.dtype.element_ty
    arch.follow()
    touched = _found(chosen, ctx_ptr, tokens, experts, form, world)
    ring = ring_of(b, scales, N, K, BLOCK_M, HALVES, form.STAGES)
    width = N if GATE is None else N // 2
    groups = gl.cdiv(width, GIVEN)
    number, step, next_expert, next_col, wanted = begin(ring, touched, groups, False)
    stage, phase = gl.program_id(0) * 0, gl.program_id(0) * 0
    block, group, there = item_of(touched, 0, groups, False)
    pairs = touched.pairs_of(block)
    t = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, choices_layout(BLOCK_M, form.CHOICES, gl.num_warps())))
    x = load_rows(a, gl.where(pairs >= 0, t, -1), 0, K, stride_am, widen)
    items = gl.cdiv(gl.maximum(touched.count * groups - gl.program_id(0), 0), gl.num_programs(0))
    for i in range(items):
        if i == items - 1:
            arch.lead()
        block, group, there = item_of(touched, i, groups, False)
        after_block, after_group, there = item_of(touched, i + 1, groups, False)
        after = touched.pairs_of(after_block)
        sums, x, stage, phase, number, step, next_expert, next_col, wanted = multiply(
            ring, touched, a, x, gl.where(pairs >= 0, t, -1), gl.where(after >= 0, t, -1), stage, phase, number, step,
            next_expert, next_col, wanted, groups, K, stride_am, widen, MMA, False,
        )  # fmt: skip
        expert = touched.expert_of(block)
        totals = across(ring, sums, SUMS)
        col = group * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))
        first = _finished(totals[0], factors, bias, expert, col, N, form)
        if HALVES:
            second = _finished(totals[1], factors, bias, expert, width + col, N, form)
            value = gated(first, second, activation)
        elif GATE == "turns":
            both = gl.permute(gl.reshape(first, (GIVEN, 2, BLOCK_M)), (0, 2, 1))
            gate, up = gl.split(both)
            value = gated(gate, up, activation)
        else:
            value = ungated(first, activation)
        value = gl.convert_layout(value, OUT)
        c = group * GIVEN + gl.arange(0, GIVEN, layout=gl.SliceLayout(1, OUT))
        row = gl.convert_layout(pairs, gl.SliceLayout(0, OUT))
        places = out + (row * stride_om)[None, :] + (c * stride_on)[:, None]
        gl.store(places, value.to(dtype), mask=(c < width)[:, None] & (row >= 0)[None, :])
        pairs = after


@gluon.jit(do_not_specialize=["tokens", "experts"])
def moe_stream_down_kernel(
    a, b, scales, factors, bias, chosen, combine, out, lamport, sync, ctx_ptr, tokens, experts, N, K, stride_am,
    stride_om, stride_on, form: gl.constexpr, widen: gl.constexpr, world: gl.constexpr,
):  # fmt: skip
    """As `moe_lamport_down_kernel`; a, b, scales, factors: as in `moe_stream_gate_up_kernel`."""
    BLOCK_M: gl.constexpr = form.BLOCK_M
    TAKE: gl.constexpr = form.TAKE
    WORLD_SIZE: gl.constexpr = world.WORLD_SIZE
    COLUMNS: gl.constexpr = b.block_type.shape[1]
    SUMS: gl.constexpr = weight_stream.layout_of_sums(COLUMNS, LINES, gl.num_warps())
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1, 1], [1, 16, 8])
    OF_COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, MMA))
    staging, ld = lamport.staging, lamport.ld
    dtype: gl.constexpr = out.dtype.element_ty
    arch.follow()
    touched = _found(chosen, ctx_ptr, tokens, experts, form, world)
    ring = ring_of(b, scales, N, K, BLOCK_M, False, form.STAGES)
    groups = gl.cdiv(N, COLUMNS)
    number, step, next_expert, next_col, wanted = begin(ring, touched, groups, True)
    stage, phase = gl.program_id(0) * 0, gl.program_id(0) * 0
    own = (gl.load(ctx_ptr), gl.load(sync))
    all_bases = load_bases(ctx_ptr, WORLD_SIZE)
    pairs = touched.pairs_of(0)
    x = load_rows(a, pairs, 0, K, stride_am, widen)
    weights = _weights(touched, combine, tokens, form)
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    rank, epoch, bases = 0, 0, all_bases  # every program has columns and learns them there
    rows_step = tokens.to(gl.int64) * ld
    for group in range(gl.program_id(0), groups, gl.num_programs(0)):
        col = group * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))
        r = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))
        if combine.shared is not None:
            places = combine.shared + (r * combine.stride_st)[None, :] + (col * combine.stride_sn)[:, None]
            shared = gl.load(places, mask=(col < N)[:, None] & (r < tokens)[None, :], other=0.0).to(gl.float32)
        total = gl.zeros((LINES, COLUMNS, BLOCK_M), gl.float32, layout=MMA)
        for block in range(touched.count):
            after = touched.pairs_of(gl.where(block + 1 == touched.count, 0, block + 1))
            expert = touched.expert_of(block)
            c = group * COLUMNS + gl.arange(0, COLUMNS, layout=OF_COLUMN)
            factor = gl.sum(gl.where(touched.block == block, weights, 0.0), 1)
            factor = gl.convert_layout(factor, gl.SliceLayout(0, gl.SliceLayout(1, MMA)))
            if factors is not None:
                of_columns = gl.load(factors + expert * N + c, mask=c < N, other=0.0)
            if bias.data is not None:
                of_bias = bias.data + expert.to(gl.int64) * bias.stride + c
                more = gl.load(of_bias, mask=c < N, other=0.0).to(gl.float32)
            sums, x, stage, phase, number, step, next_expert, next_col, wanted = multiply(
                ring, touched, a, x, pairs, after, stage, phase, number, step, next_expert, next_col, wanted, groups,
                K, stride_am, widen, MMA, True,
            )  # fmt: skip
            product = sums[0] * form.LATER
            if factors is not None:
                product = product * of_columns[None, :, None]
            if bias.data is not None:  # once, with the first line's
                product += gl.where((line == 0)[:, None, None], more[None, :, None], 0.0)
            here = gl.convert_layout(pairs, gl.SliceLayout(0, gl.SliceLayout(1, MMA))) >= 0
            total += gl.where(here[None, None, :], product * factor[None, None, :], 0.0)
            pairs = after
        partial = across(ring, (total,), SUMS)[0]
        if combine.shared is not None:
            partial += shared
        values = without_sentinel(partial, dtype)
        own_rank, last_epoch = settled(own)
        rank, epoch, bases = own_rank.to(gl.int32), last_epoch + 1, settled(all_bases)
        ctx = DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE)
        mine = staging + (epoch & 1).to(gl.int64) * lamport.half_elements + rank * rows_step
        mask = (col < ld)[:, None] & (r < tokens)[None, :]
        for i in gl.static_range(1, WORLD_SIZE + 1):  # our own too: every rank sums the same numbers
            target = remote(ctx, mine, bases, (rank + i) % WORLD_SIZE)
            gl.store(target + (r * ld)[None, :] + col[:, None], values, mask=mask, cache_modifier=".wt")

    arch.lead()
    advance(sync, epoch)  # which all programs have read
    ctx = DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE)
    half = staging + (epoch & 1).to(gl.int64) * lamport.half_elements
    r = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, TAKE))
    for t in range(gl.program_id(0), gl.cdiv(N, SPAN), gl.num_programs(0)):
        c = t * SPAN + gl.arange(0, SPAN, layout=gl.SliceLayout(0, TAKE))
        place, mask = (r * ld)[:, None] + c[None, :], (r < tokens)[:, None] & (c < ld)[None, :]
        total, _ok = take(ctx, half + place, rows_step, mask, 0, epoch, world.WAITER, dtype, WORLD_SIZE, LANES=False)
        target = out + (r.to(gl.int64) * stride_om)[:, None] + (c.to(gl.int64) * stride_on)[None, :]
        gl.store(target, total.to(dtype), mask=(r < tokens)[:, None] & (c < N)[None, :])


@gluon.jit
def _weights(touched, combine, tokens, form: gl.constexpr):
    """The router's factor of each pair, as `Touched` has pairs."""
    PLACES: gl.constexpr = choices_layout(form.BLOCK_M, form.CHOICES, gl.num_warps())
    t = gl.arange(0, form.BLOCK_M, layout=gl.SliceLayout(1, PLACES))[:, None]
    j = gl.arange(0, form.CHOICES, layout=gl.SliceLayout(0, PLACES))[None, :]
    mask = (t < tokens) & (j < form.TOP_K)
    return gl.load(combine.weights + t * combine.stride_wt + j, mask=mask, other=0.0).to(gl.float32)


class _Prepared(NamedTuple):
    """A product as both kernels take it: its grid, launch options, and arguments."""

    grid: tuple[int, int, int]
    options: dict[str, int]
    args: dict


def supports(problem: Problem, config: FusedConfig, rank: int, tensors: GateUp | Down) -> str | None:
    """Return the reason why the kernels cannot load A [M, K] and the stored B [E, K, N] with its scale, or None."""
    A, B, scale = tensors.A, tensors.B, tensors.scale
    assert scale is not None
    weights, stored = B.transpose(1, 2), format_of(B[0], scale[0])
    if not platform.has_warp_specialisation(A.device) or A.dtype != torch.bfloat16:
        return "it needs a Hopper GPU and bf16"
    if reason := too_many(problem):
        return reason
    if not weights.is_contiguous() or not scale.is_contiguous():
        return "experts or their scales do not follow each other in memory"
    word = 8 if stored.group in (0, 128) and stored.packing.startswith("fp8") else 2
    if A.stride(1) != 1 or A.stride(0) * A.itemsize % word or A.data_ptr() % word:
        return "rows of A begin between words of four numbers"
    row, row_of_scales = weights.shape[2] * weights.itemsize, scale.shape[-1] * scale.itemsize
    aligned = weights.data_ptr() % 16 == 0 and scale.data_ptr() % 16 == 0
    if not aligned or row % 16 or scale.ndim == 3 and row_of_scales % 16:
        return "columns of B or their scales begin between vectors of 16 bytes"
    return None


def _prepared(
    problem: Problem, A: torch.Tensor, B: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
    gate: str | None, world: World, **more: object,
) -> _Prepared:  # fmt: skip
    """Return what both kernels are given of a product."""
    E, _, N = B.shape
    programs = platform.num_programs(A.device)
    stored, by_group = B.transpose(1, 2).reshape(E * N, -1), scale.ndim == 3
    flat = scale.reshape(E * N, *scale.shape[2:])
    widen = weight_stream.widening_of(stored.t(), flat)
    halves, rows = gate == "halves", stream_form.loaded_rows(problem.M)
    columns = columns_at_once(problem, programs) // (2 if halves else 1)
    words = stored.view(torch.int32)
    lines, nbytes, scales = words.shape[1] // widen.WORDS, 0, None
    if by_group:
        per_line = flat.shape[1] // (triton.cdiv(lines, 4) * 4)  # as packed
        nbytes = per_line * flat.itemsize
        layout = weight_stream.block_layout(WARPS * nbytes, flat.itemsize, 2)
        scales = word_descriptor(flat, [columns, WARPS * per_line], layout)
    tiles = 2 if halves else 1
    stage = stream_form.stage_bytes(0, tiles * columns, widen.WORDS, WARPS * nbytes)
    others = stream_form.RESERVED + _MOVED + stream_form.sums_bytes(rows, tiles * columns)
    groups = triton.cdiv(problem.out_cols if halves else N, columns)
    items = groups if problem.operation.sums else groups * min(problem.pairs, E)
    resident = min(_RESIDENT, triton.cdiv(items, programs))
    stages = max(2, min(_STAGES, (stream_form.SHARED // resident - others) // stage))
    top_k = problem.experts.top_k
    form = StreamedForm(rows, top_k, max(4, triton.next_power_of_2(top_k)), stages, gate, widen.later, **more)
    grid = min(items, resident * programs)
    args = dict(
        a=A if widen.RUNS else A.view(torch.int64), stride_am=A.stride(0) // (1 if widen.RUNS else 4),
        b=weight_stream.described(words, widen.WORDS, WARPS, columns), scales=scales,
        factors=None if by_group else flat, bias=bias_of(bias), tokens=problem.M, experts=E, N=N, K=problem.K,
        form=form, widen=widen, world=world,
    )  # fmt: skip
    return _Prepared((grid, 1, 1), stream_form.options(grid, programs, WARPS), args)


def launch_gate_up(
    steps: Steps, workspace: Workspace, problem: Problem, config: FusedConfig, tensors: GateUp
) -> None:  # fmt: skip
    """Launch `moe_stream_gate_up_kernel`."""
    out, A, B, where, bias, activation, interleaved, scale = tensors
    assert scale is not None
    gate = None if problem.epilogue is not GATE else "turns" if interleaved else "halves"
    world = World(steps.ctx.num_ranks, WAITERS.index(problem.op))
    made = _prepared(problem, A, B, scale, bias, gate, world)
    more = dict(
        chosen=choice_of(where).chosen, out=out, ctx_ptr=steps.ctx.get_device_context(), stride_om=out.stride(0),
        stride_on=out.stride(1), activation=activation,
    )  # fmt: skip
    steps.launch(moe_stream_gate_up_kernel, made.grid, made.args | more, **made.options)


def launch_down(steps: Steps, workspace: Workspace, problem: Problem, config: FusedConfig, tensors: Down) -> None:
    """Launch `moe_stream_down_kernel`. The workspace has room in its exchange area."""
    out, A, B, where, weights, bias, shared, scale = tensors
    assert scale is not None
    world = World(steps.ctx.num_ranks, WAITERS.index(problem.op))
    once = bias if steps.ctx.cur_rank == 0 else None
    rows = taken(stream_form.loaded_rows(problem.M), WARPS)
    made = _prepared(problem, A, B, scale, once, None, world, TAKE=rows)
    more = dict(
        chosen=choice_of(where).chosen, combine=combine_of(weights, shared), out=out,
        lamport=lamport_memory(workspace, problem.dtype, problem.N), sync=workspace.exchange_sync,
        ctx_ptr=steps.ctx.get_device_context(), stride_om=out.stride(0), stride_on=out.stride(1),
    )  # fmt: skip
    steps.launch(moe_stream_down_kernel, made.grid, made.args | more, **made.options)
