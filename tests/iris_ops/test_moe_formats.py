"""Experts as codes with scales, against plain torch in float64 with the widened weights: every format and way."""

from __future__ import annotations

from dataclasses import dataclass, replace
import hashlib
from typing import Any

import iris
from iris.errors import ArgumentError, DtypeError, IrisError, ShapeError
from iris_ops import FusedConfig
from iris_ops.activation import Activation
from iris_ops.planning.operations import DOWN_ALL_REDUCE, DOWN_REDUCE_SCATTER
from iris_ops.problem import part_of, part_size
from iris_ops.quantised.packing import (
    FP8,
    FP8_BLOCK,
    INT4,
    INT4_ZEROS,
    INT8,
    INT8_ZEROS,
    MXFP4,
    NVFP4,
    Packing,
)
import pytest
import torch

from tests.checks import Guarded
from tests.harness import WORLDS, both, run_ranks
from tests.reference import moe_down, moe_gate_up

pytestmark = both
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


@dataclass(frozen=True)
class Stored:
    """A format: its packing, numbers that share a scale along K (None: all of a column), and the scales' dtype."""

    packing: Packing
    group: int | None = None
    scales: torch.dtype | None = None


FORMATS = {
    "fp8": Stored(FP8),
    "fp8_block": Stored(FP8_BLOCK, 128),
    "fp8_cut_block": Stored(FP8_BLOCK, 32),
    "int4": Stored(INT4, 32, torch.bfloat16),
    "int4_half": Stored(INT4, 64, torch.float16),
    "int4_wide": Stored(INT4, 128),
    "int4_channel": Stored(INT4),
    "mxfp4": Stored(MXFP4, 32),
    "nvfp4": Stored(NVFP4, 16),
    "int4_narrow": Stored(INT4, 16, torch.bfloat16),
    "mxfp4_narrow": Stored(MXFP4, 16),
    "int4_zeros_narrow": Stored(INT4_ZEROS, 16, torch.float16),
    "int8": Stored(INT8, 128),
    "int8_narrow": Stored(INT8, 32, torch.bfloat16),
    "int8_channel": Stored(INT8),
    "int4_zeros": Stored(INT4_ZEROS, 32, torch.float16),
    "int4_zeros_wide": Stored(INT4_ZEROS, 128, torch.bfloat16),
    "int8_zeros": Stored(INT8_ZEROS, 64, torch.bfloat16),
}


def assert_close(out: torch.Tensor, exact: torch.Tensor, torchs: torch.Tensor) -> None:
    """Check that `out` is about as far from the product in float64 as torch's in its dtype, with the same weights."""
    assert out.shape == exact.shape == torchs.shape and out.isfinite().all()
    rounding = (exact.to(out.dtype).double() - exact).abs()
    error, theirs = (out.double() - exact).abs(), torch.maximum((torchs.double() - exact).abs(), rounding)
    slack = 2 * torch.finfo(torch.float32).eps * float(exact.abs().max()) if out.numel() else 0.0
    assert float(error.norm()) <= 1.5 * float(theirs.norm()) + slack * out.numel() ** 0.5, (error.norm(), theirs.norm())
    assert not out.numel() or float(error.max()) <= 4 * float(theirs.max()) + slack, (error.max(), theirs.max())


def drawn(
    stored: Stored, experts: int, N: int, K: int, size: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw a weight and its scale as kernels read them. Return them and the decoded weights [E,N,K] in float64."""
    packing, group = stored.packing, stored.group
    scale = size * (0.5 + torch.rand(experts * N, -(-K // group) if group else 1, generator=generator))
    if packing is MXFP4:
        scale = scale.log2().round().exp2()
    scale = scale.to(stored.scales or torch.float32).float()
    if packing.dtype == torch.float8_e4m3fn:
        codes = torch.randn(experts * N, K, generator=generator).to(packing.dtype)
        numbers = codes.double()
    else:
        count = 256 if packing.dtype == torch.int8 else 16
        codes = torch.randint(0, count, (experts * N, K), generator=generator, dtype=torch.uint8)
        numbers = E2M1[codes.long()] if packing in (MXFP4, NVFP4) else codes.double() - count // 2
        scale = scale if count == 16 else (scale / 16).to(scale.dtype)
    if packing.zeros:
        half = 128 if packing.dtype == torch.int8 else 8
        zeros = torch.randint(-half, half, scale.shape, generator=generator).float()
        numbers = numbers - zeros.double().repeat_interleave(group or max(1, K), 1)[:, :K]
    exact = numbers * scale.double().repeat_interleave(group or max(1, K), 1)[:, :K]
    if packing.zeros:
        scale = torch.stack((scale, zeros), 2)
    weight, scale = packing.pack(codes, scale if group else scale[:, 0], group, stored.scales)
    return weight.view(experts, N, weight.shape[1]), scale.view(experts, N, *scale.shape[1:]), exact.view(experts, N, K)


@dataclass(frozen=True)
class Mixture:
    """One layer in a format. `widths`: each rank's part of an expert's intermediate size."""

    format: str
    tokens: int
    k: int = 2
    experts: int = 5
    hidden: int = 144
    widths: tuple[int, ...] = (80, 34, 16, 0)
    dtype: torch.dtype = torch.bfloat16
    activation: str | Activation = "silu"
    interleaved: bool = False
    gated: bool = True
    bias: bool = False
    shared: bool = False
    scatter: bool = False
    algorithm: str | None = None
    block: tuple[int, int, int] = (16, 32, 128)
    seed: int = 0


class Layer:
    """The tensors of all ranks of a `Mixture`: codes, scales, and the decoded weights."""

    def __init__(self, case: Mixture, world_size: int, device: torch.device) -> None:
        generator, stored = torch.Generator().manual_seed(case.seed), FORMATS[case.format]

        def draw(*sizes: int, scale: float = 1.0) -> torch.Tensor:
            return (scale * torch.randn(*sizes, generator=generator)).to(device, case.dtype)

        def weight(N: int, K: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            made = drawn(stored, case.experts, N, K, max(1, K) ** -0.5 / 2, generator)
            return tuple(each.to(device) for each in made)

        self.A = draw(case.tokens, case.hidden)
        logits = torch.randn(case.tokens, case.experts, generator=generator)
        logits[:, case.experts - 1] = -torch.inf  # nobody chooses the last expert
        self.chosen = logits.topk(case.k, dim=1).indices.to(device)
        self.weights = torch.rand(case.tokens, case.k, generator=generator).to(device)
        gates = 2 if case.gated else 1
        widths = case.widths[:world_size]
        self.first = [weight(gates * width, case.hidden) for width in widths]
        self.second = [weight(case.hidden, width) for width in widths]
        self.first_bias = [draw(case.experts, gates * width) for width in widths]
        self.second_bias = draw(case.experts, case.hidden)
        self.shared = [draw(case.tokens, case.hidden) for _ in widths]

    def widened(self, weight: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        return weight[2].transpose(1, 2).to(dtype)


@torch.no_grad()
def mixture_body(ctx: iris.Iris, case: Mixture) -> str:
    w, rank = ctx.num_ranks, ctx.cur_rank
    layer, width, pairs = Layer(case, w, ctx.device), case.widths[rank], case.tokens * case.k
    config = None
    if case.algorithm:
        m, n, k = case.block
        config = FusedConfig(m, n, k, num_warps=4, num_stages=2, algorithm=case.algorithm)
    bias = layer.first_bias[rank] if case.bias else None
    codes, scale, _ = layer.first[rank]
    middle = Guarded(ctx, (pairs, max(case.widths)), case.dtype)
    rows = middle.tensor[:, :width]
    first_config = config and replace(config, algorithm="sequential")
    workspace = ctx.ops.moe_gate_up(
        rows, layer.A, codes.transpose(1, 2), layer.chosen, bias, case.activation, case.interleaved, first_config,
        scale=scale,
    )  # fmt: skip
    middle.check()
    kind = dict(activation=case.activation, interleaved=case.interleaved, gated=case.gated)
    exact, torchs = (
        moe_gate_up(
            layer.A, layer.widened(layer.first[rank], dtype), layer.chosen, bias, **kind, exact=dtype is not case.dtype
        )
        for dtype in (torch.float64, case.dtype)
    )
    assert_close(rows, exact, torchs)

    middles = [
        moe_gate_up(layer.A, layer.widened(layer.first[r], case.dtype), layer.chosen,
                    layer.first_bias[r] if case.bias else None, **kind, exact=False) for r in range(w)
    ]  # fmt: skip
    op = DOWN_REDUCE_SCATTER if case.scatter else DOWN_ALL_REDUCE
    own = part_of(case.tokens, w, rank) if case.scatter else case.tokens
    out = Guarded(ctx, (part_size(case.tokens, w) if case.scatter else case.tokens, case.hidden), case.dtype)
    bias, shared = layer.second_bias if case.bias else None, layer.shared if case.shared else None
    exact, torchs = (
        moe_down(middles, [layer.widened(each, dtype) for each in layer.second], layer.chosen, layer.weights, bias,
                 shared, exact=dtype is not case.dtype) for dtype in (torch.float64, case.dtype)
    )  # fmt: skip
    begin = rank * part_size(case.tokens, w) if case.scatter else 0
    codes, scale, _ = layer.second[rank]
    result = out.tensor[:own]
    getattr(ctx.ops, op)(
        result, middles[rank], codes.transpose(1, 2), layer.chosen, layer.weights, bias, shared and shared[rank],
        config, workspace, scale=scale,
    )  # fmt: skip
    out.check()
    assert_close(result, exact[begin : begin + own], torchs[begin : begin + own])
    return hashlib.sha256(result.float().cpu().numpy().tobytes()).hexdigest()


def check(world_size: int, case: Mixture) -> None:
    digests = run_ranks(world_size, mixture_body, case)
    assert case.scatter or len(set(digests)) == 1, "bits differ between ranks"


@torch.no_grad()
def widened_body(ctx: iris.Iris, format: str, tokens: int) -> None:
    case = Mixture(format, tokens, seed=tokens)
    layer, rank = Layer(case, ctx.num_ranks, ctx.device), ctx.cur_rank
    codes, scale, _ = weight = layer.first[rank]
    plain = layer.widened(weight, case.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    outs = [layer.A.new_empty(tokens * case.k, case.widths[rank]) for _ in range(2)]
    config = FusedConfig(16, 128, 128, num_warps=4, num_stages=2, algorithm="sequential")
    ctx.ops.moe_gate_up(outs[0], layer.A, plain, layer.chosen, config=config)
    ctx.ops.moe_gate_up(outs[1], layer.A, codes.transpose(1, 2), layer.chosen, config=config, scale=scale)
    assert torch.equal(*outs)


@pytest.mark.parametrize("world_size", WORLDS[:1])
@pytest.mark.parametrize("format", [name for name, stored in FORMATS.items() if stored.group])
def test_scales_of_groups_give_the_bits_of_the_widened_weights(world_size: int, format: str) -> None:
    run_ranks(world_size, widened_body, format, 9)


CASES: dict[str, Any] = {
    "one_token": dict(tokens=1, k=3, bias=True, shared=True),
    "few": dict(tokens=5, bias=True),
    "interleaved": dict(tokens=3, interleaved=True, bias=True, activation="gpt_oss"),
    "high_tiles": dict(tokens=9, shared=True, algorithm="one_shot", block=(64, 128, 128)),
    "streamed": dict(tokens=12, k=3, hidden=256, bias=True),  # on Hopper
    "many": dict(tokens=41, k=3, scatter=True, activation="gelu_tanh"),
}
OTHERS: dict[str, Mixture] = {
    "no_gate": Mixture("mxfp4", 7, gated=False, activation="relu2"),
    "fp16": Mixture("fp8", 6, dtype=torch.float16, hidden=130),
    "fp32": Mixture("int4", 5, dtype=torch.float32, hidden=66, bias=True),
    "fp32_one_token": Mixture("mxfp4", 1, dtype=torch.float32),
    "in_steps": Mixture("int4", 23, algorithm="sequential", shared=True),
    "summed": Mixture("fp8_block", 11, algorithm="overlapped", bias=True, block=(16, 64, 128)),
    "none": Mixture("int4", 0),
    "no_share": Mixture("int4", 3, widths=(34, 0, 16, 0)),
    "no_share_mxfp4": Mixture("mxfp4", 1, widths=(0, 34, 0, 16), bias=True),
    **{
        f"no_share_{name}": Mixture(name, 4, widths=widths, bias=True)
        for name in ("nvfp4", "int8", "int8_narrow", "int8_channel", "int4_zeros", "int4_zeros_wide", "int8_zeros")
        for widths in ((0, 34, 0, 16),)
    },
    "fp32_zeros": Mixture("int8_zeros", 5, dtype=torch.float32, hidden=66),
    "fp16_nvfp4": Mixture("nvfp4", 6, dtype=torch.float16, hidden=130, scatter=True),
    "no_share_streamed": Mixture("int4", 12, k=3, hidden=256, widths=(96, 0, 0, 64)),  # on Hopper
    # on Hopper by codes that are widened in registers; a rank whose rows are no whole vectors does the same in tiles
    "sorted": Mixture("int4", 70, hidden=264, bias=True, shared=True),
    "sorted_turns": Mixture("mxfp4", 67, hidden=160, interleaved=True, activation="gpt_oss", bias=True),
    "sorted_channel": Mixture("int8_channel", 90, hidden=136, widths=(72, 48, 16, 8), scatter=True),
    "sorted_zeros": Mixture("int4_zeros", 66, hidden=264, widths=(136, 0, 64, 8), bias=True),
    "narrow": Mixture("int4", 3, hidden=2, widths=(2, 2, 4, 2)),
}


@pytest.mark.parametrize("world_size, name, format", [
    pytest.param(w, name, format, marks=[pytest.mark.slow] * (w in (1, 3) and format not in ("int4", "fp8")))
    for w in WORLDS for name in CASES for format in FORMATS
])  # fmt: skip
def test_a_mixture_in_a_format_is_right(world_size: int, name: str, format: str) -> None:
    seed = sum(map(ord, name + format)) + world_size
    check(world_size, Mixture(format, **CASES[name], seed=seed))


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
@pytest.mark.parametrize("name", OTHERS)
def test_other_mixtures_in_formats_are_right(world_size: int, name: str) -> None:
    check(world_size, OTHERS[name])


def refused_body(ctx: iris.Iris) -> None:
    E, T, H, width = 3, 4, 64, 32
    experts = torch.zeros(T, 2, dtype=torch.int64, device=ctx.device)
    new = dict(device=ctx.device)
    int4 = torch.zeros(E, 2 * width, 128 // 8, dtype=torch.int32, **new).transpose(1, 2)
    half, scale = torch.bfloat16, torch.ones(E, 2 * width, 16, dtype=torch.bfloat16, **new)
    fine = dict(
        out=torch.zeros(2 * T, width, dtype=half, **new), A=torch.zeros(T, H, dtype=half, **new), B=int4,
        experts=experts, scale=scale,
    )  # fmt: skip
    fp8 = torch.zeros(E, 2 * width, H, **new).to(torch.float8_e4m3fn).transpose(1, 2)
    coarse = FusedConfig(16, 64, 64, num_warps=4, num_stages=2, algorithm="one_shot")
    cases: list[tuple[dict, type[IrisError], str]] = [
        (dict(scale=scale.int()), DtypeError, "scale has dtype torch.int32; expected torch.bfloat16 or"),
        (dict(scale=None), DtypeError, "B has dtype torch.int32; expected one of .* with a scale"),
        (dict(scale=scale[:, :width]), ShapeError, r"scale is \(3, 32, 16\); expected \(3, 64, 16\), in int4, groups"),
        (dict(scale=scale[:, :, :3]), ShapeError, r"scale is \(3, 64, 3\); expected \(3, 64, 16\), in int4, groups"),
        (dict(scale=scale[0, 0]), ShapeError, r"scale is \(16,\); expected \(3, 64, 16\), in int4, groups"),
        (dict(scale=scale.transpose(1, 2).contiguous().transpose(1, 2)), ArgumentError, "scale has strides"),
        (dict(scale=[1]), ArgumentError, "scale is list"),
        (dict(B=int4.contiguous()), ArgumentError, "B has strides"),
        (dict(B=int4.to(torch.int16)), DtypeError, "B has dtype torch.int16 and there is a scale"),
        (dict(A=torch.zeros(T, 130, dtype=half, **new)), ShapeError, r"B is \(3, 16, 64\) for K = 130; expected 32"),
        (dict(B=fp8[:, 1:], scale=scale[:, :, 0].float()), ShapeError, r"B is \(3, 63, 64\) for K = 64; expected 64"),
        (dict(B=fp8, scale=scale[:, :, 0]), DtypeError, "scale has dtype torch.bfloat16; expected torch.float32"),
        (dict(config=coarse), ArgumentError, "config.block_k is 64; expected at least 128: experts are in int4"),
    ]  # fmt: skip
    for change, error, message in cases:
        with pytest.raises(error, match=message):
            ctx.ops.moe_gate_up(**fine | change)


def test_what_is_no_format_is_refused_by_name() -> None:
    run_ranks(WORLDS[min(1, len(WORLDS) - 1)], refused_body)
