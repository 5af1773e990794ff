"""`moe_gate_up` of few tokens and quantised experts, as a stream of the experts that are touched, on NVIDIA Hopper.

A program's items are groups of columns of one expert each. It multiplies the tokens of the expert, and stores the
activation as rows of the pairs. A step reads each touched expert once, and nothing passes between programs.
`touched.py` has the loop over the weights, `touched_down.py` the way back. `grouped_matmul.py` serves tensors that the
hardware cannot load by blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris import platform
from iris.device import arch
from iris.device.context import DeviceContext
from iris.device.waits import WAITERS
from iris.triton_private import warp_specialize, word_descriptor
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernels.activations import activated, joined
from ..kernels.arguments import World
from ..planning.ways.touched import COLUMNS, RESIDENT, ROWS, too_many
from ..quantised import stream_form, weight_stream
from .arguments import StreamedForm, bias_of, choice_of
from .routing import report_experts
from .touched import (
    LINES,
    LOADER_REGISTERS,
    LOADER_WARPS,
    WARPS,
    across,
    as_rows,
    find,
    item_of,
    load_ahead,
    load_rows,
    multiply,
    ring_of,
)  # fmt: skip

if TYPE_CHECKING:
    from ..config import FusedConfig
    from ..problem import Problem
    from ..steps import Run
    from ..workspace import Workspace
    from .operands import Down, GateUp

_STAGES, _MOVED = 12, 2048  # of a ring at most; bytes of shared memory through which values move between warps


@gluon.jit
def touched_blocks(chosen, ctx_ptr, tokens, experts, form: gl.constexpr, world: gl.constexpr):
    """Return the blocks of a step, and their experts for the loader. The first program reports experts that are out of
    range."""
    touched, experts_of, given, wrong = find(chosen, tokens * form.TOP_K, experts, form.PAIRS)
    if gl.program_id(0) == 0:
        ctx = DeviceContext.initialize(ctx_ptr, gl.load(ctx_ptr).to(gl.int32), world.WORLD_SIZE)
        report_experts(ctx, given, wrong, experts, world.WAITER)
    return touched, experts_of


@gluon.jit
def terms_of(factors, bias, expert, col, N):
    """Load what `finished` needs of columns `col`, ahead of the product: their scales and bias, if there are any."""
    terms = ()
    if factors is not None:
        terms = terms + (gl.load(factors + expert * N + col, mask=col < N, other=0.0),)
    if bias.data is not None:
        places = bias.data + expert.to(gl.int64) * bias.stride + col
        terms = terms + (gl.load(places, mask=col < N, other=0.0).to(gl.float32),)
    return terms


@gluon.jit
def finished(total, terms, factors, bias, form: gl.constexpr):
    """Return a sum [columns, rows] times the scales of its columns, plus the bias."""
    total = total * form.LATER
    if factors is not None:
        total = total * terms[0][:, None]
    if bias.data is not None:
        total = total + terms[len(terms) - 1][:, None]
    return total


@gluon.jit(do_not_specialize=["tokens", "experts"])
def moe_stream_gate_up_kernel(
    a, b, scales, factors, bias, chosen, out, ctx_ptr, tokens, experts, N, K, stride_am, stride_om, stride_on,
    form: gl.constexpr, widen: gl.constexpr, activation: gl.constexpr, world: gl.constexpr,
):  # fmt: skip
    """Compute what `moe_matmul_kernel` computes with an activation.

    a: A by numbers or by words of four. b, scales: descriptors of all experts (`touched.py`). factors: the scales of
    columns, or None. N: columns of an expert's weight.
    """
    HALVES: gl.constexpr = form.MATRICES == 2 and not form.INTERLEAVED
    COLUMNS: gl.constexpr = b.block_type.shape[1]
    GIVEN: gl.constexpr = COLUMNS // 2 if form.INTERLEAVED else COLUMNS  # columns of the result
    ring = ring_of(b, scales, N, K, HALVES, form.STAGES, form.ZEROS)
    arch.follow()
    touched, experts_of = touched_blocks(chosen, ctx_ptr, tokens, experts, form, world)
    groups = gl.cdiv(N // form.MATRICES, GIVEN)
    warp_specialize(
        [
            (
                _multiply_gate_up,
                (ring, touched, groups, a, factors, bias, out, N, K, stride_am, stride_om, stride_on, form, widen,
                 activation, HALVES, GIVEN),
            ),
            (load_ahead, (ring, experts_of, touched.count, groups)),
        ],
        [LOADER_WARPS],
        [LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _multiply_gate_up(
    ring, touched, groups, a, factors, bias, out, N, K, stride_am, stride_om, stride_on, form: gl.constexpr,
    widen: gl.constexpr, activation: gl.constexpr, HALVES: gl.constexpr, GIVEN: gl.constexpr,
):  # fmt: skip
    """Run the MMA warps: multiply this program's items, and store their activations."""
    COLUMNS: gl.constexpr = ring.b.block_type.shape[1]
    SUMS: gl.constexpr = weight_stream.layout_of_sums(COLUMNS, LINES, gl.num_warps())
    OUT: gl.constexpr = gl.SliceLayout(0, weight_stream.layout_of_sums(GIVEN, LINES, gl.num_warps()))
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1, 1], [1, 16, 8])
    dtype: gl.constexpr = out.dtype.element_ty
    width = N // form.MATRICES
    stage, phase = gl.program_id(0) * 0, gl.program_id(0) * 0
    block, group = item_of(0, groups)
    pairs = touched.pairs_of(block)
    x = load_rows(a, pairs, 0, K, stride_am, form.TOP_K, widen)
    items = gl.cdiv(gl.maximum(touched.count * groups - gl.program_id(0), 0), gl.num_programs(0))
    for i in range(items):
        if i == items - 1:
            arch.lead()
        block, group = item_of(i, groups)
        after_block, after_group = item_of(i + 1, groups)
        after = touched.pairs_of(after_block)
        expert = touched.expert_of(block)
        col = group * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))
        terms = terms_of(factors, bias, expert, col, N)
        if HALVES:
            second_terms = terms_of(factors, bias, expert, width + col, N)
        sums, x, stage, phase = multiply(
            ring, a, x, pairs, after, stage, phase, K, stride_am, form.TOP_K, widen, MMA
        )  # fmt: skip
        totals = across(ring, sums, SUMS)
        first = finished(totals[0], terms, factors, bias, form)
        if HALVES:
            second = finished(totals[1], second_terms, factors, bias, form)
            value = joined(first, second, activation)
        elif form.INTERLEAVED:
            both = gl.permute(gl.reshape(first, (GIVEN, 2, first.shape[1])), (0, 2, 1))
            first, second = gl.split(both)
            value = joined(first, second, activation)
        else:
            value = activated(first, activation)
        value = gl.convert_layout(value, OUT)
        c = group * GIVEN + gl.arange(0, GIVEN, layout=gl.SliceLayout(1, OUT))
        row = as_rows(pairs, gl.SliceLayout(0, OUT))
        places = out + (row * stride_om)[None, :] + (c * stride_on)[:, None]
        gl.store(places, value.to(dtype), mask=(c < width)[:, None] & (row >= 0)[None, :])
        pairs = after


def supports(problem: Problem, config: FusedConfig, rank: int, tensors: GateUp | Down) -> str | None:
    """Return the reason why the kernels cannot load rows of A [rows, K] and the stored B [E, K, N] with its scale, or
    None."""
    A, B, scale = tensors.A, tensors.B, tensors.scale
    assert scale is not None
    weights = B.transpose(1, 2)
    if not platform.has_warp_specialisation(A.device) or A.dtype != torch.bfloat16:
        return "it needs a Hopper GPU and bf16"
    if reason := too_many(problem):
        return reason
    if not weights.is_contiguous() or not scale.is_contiguous():
        return "experts or their scales do not follow each other in memory"
    word = A.itemsize if weight_stream.widening_of(B[0], scale[0]).RUNS else 4 * A.itemsize
    if A.stride(1) != 1 or A.stride(0) * A.itemsize % word or A.data_ptr() % word:
        return "rows of A begin between words of four numbers"
    row, row_of_scales = weights.shape[2] * weights.itemsize, scale[0, 0].nbytes
    aligned = weights.data_ptr() % 16 == 0 and scale.data_ptr() % 16 == 0
    if not aligned or row % 16 or scale.ndim > 2 and row_of_scales % 16:
        return "columns of B or their scales begin between vectors of 16 bytes"
    return None


def launch(run: Run, workspace: Workspace, problem: Problem, config: FusedConfig, tensors: GateUp) -> None:
    """Launch `moe_stream_gate_up_kernel`."""
    out, A, B, where, bias, activation, interleaved, scale = tensors
    assert scale is not None
    grid, args, options = streamed(problem, A, B, scale, platform.num_programs(A.device), interleaved)
    args |= dict(
        bias=bias_of(bias), chosen=choice_of(where).chosen, out=out, ctx_ptr=run.rank.get_device_context(),
        stride_om=out.stride(0), stride_on=out.stride(1), activation=activation,
        world=World(run.rank.num_ranks, WAITERS.index(problem.op)),
    )  # fmt: skip
    run.launch(moe_stream_gate_up_kernel, (grid, 1, 1), args, **options)


def streamed(
    problem: Problem, A: torch.Tensor, B: torch.Tensor, scale: torch.Tensor, programs: int, interleaved: bool = False
) -> tuple[int, dict, dict[str, int]]:  # fmt: skip
    """Return (the programs of a launch, the arguments of what it multiplies, its options)."""
    E, _, N = B.shape
    words = B.transpose(1, 2).reshape(E * N, -1).view(torch.int32)
    flat = scale.reshape(E * N, -1) if scale.ndim > 2 else scale.flatten()
    widen = weight_stream.widening_of(B[0], scale[0])
    tiles = 1 if interleaved else problem.epilogue.matrices
    columns, scales, nbytes = COLUMNS // tiles, None, 0  # of a tile, bytes of a column's scales in a stage
    if scale.ndim > 2:
        lines = words.shape[1] // widen.WORDS
        per_stage = WARPS * (flat.shape[1] // (triton.cdiv(lines, 4) * 4))  # as packed
        nbytes = per_stage * flat.itemsize
        layout = weight_stream.block_layout(nbytes, flat.itemsize, 2)
        scales = word_descriptor(flat, [columns, per_stage], layout)
    stage = stream_form.stage_bytes(0, COLUMNS, widen.WORDS, nbytes)
    others = stream_form.RESERVED + _MOVED + stream_form.sums_bytes(ROWS, COLUMNS)
    items = triton.cdiv(N, COLUMNS) * min(problem.pairs, E)
    resident = min(RESIDENT, triton.cdiv(items, programs))
    stages = max(2, min(_STAGES, (stream_form.SHARED // resident - others) // stage))
    args = dict(
        a=A if widen.RUNS else A.view(torch.int64), b=weight_stream.described(words, widen.WORDS, WARPS, columns),
        scales=scales, factors=flat if scales is None else None, tokens=problem.M, experts=E, N=N, K=problem.K,
        stride_am=A.stride(0) // (1 if widen.RUNS else 4),
        form=StreamedForm(
            problem.experts.top_k, max(32, triton.next_power_of_2(problem.pairs)), stages, problem.epilogue.matrices,
            interleaved, scale.ndim > 3, widen.later,
        ),
        widen=widen,
    )  # fmt: skip
    grid = min(items, resident * programs)
    options = stream_form.options(grid, programs, 2 * WARPS)  # registers for four warps more: the loader's group
    return grid, args, options | {"num_warps": WARPS}
