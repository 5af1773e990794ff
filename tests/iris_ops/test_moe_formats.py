"""Experts as codes with scales, against plain torch in float64 with the widened weights: every format, way and layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
import hashlib
from typing import Any

import iris
from iris.errors import ArgumentError, DtypeError, IrisError, ShapeError
from iris_ops import FusedConfig
from iris_ops.moe.activation import Activation
from iris_ops.planning.coded import group_of
from iris_ops.planning.moe_problem import DOWN_ALL_REDUCE, DOWN_REDUCE_SCATTER
from iris_ops.problem import part_of, part_size
import pytest
import torch

from tests.checks import Guarded
from tests.harness import WORLDS, both, run_ranks
from tests.reference import moe_down, moe_gate_up

pytestmark = both
FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


@dataclass(frozen=True)
class Stored:
    """A format: the kind of codes, numbers that share a scale along K (0: all of a column), and the scales' dtype."""

    kind: str
    group: int
    scales: torch.dtype


FORMATS = {
    "fp8_channel": Stored("e4m3", 0, torch.float32),
    "fp8_block": Stored("e4m3", 128, torch.float32),
    "fp8_cut_block": Stored("e4m3", 16, torch.bfloat16),
    "mxfp8": Stored("e4m3", 32, E8M0),
    "int4": Stored("int4", 32, torch.bfloat16),
    "int4_wide": Stored("int4", 128, torch.float16),
    "int4_channel": Stored("int4", 0, torch.float32),
    "mxfp4": Stored("e2m1", 32, E8M0),
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
    """Codes [E,N,K/packed], scales, and the weights [E,N,K] that they stand for, in float64, of about `size`."""
    groups = (experts, N) if not stored.group else (experts, N, -(-K // stored.group))
    scale = size * (0.5 + torch.rand(groups, generator=generator, dtype=torch.float64))
    if stored.scales == E8M0:
        exponent = scale.log2().round().to(torch.int32)
        numbers, scale = torch.exp2(exponent.double()), (exponent + 127).to(torch.uint8).view(E8M0)
    else:
        scale = scale.to(stored.scales)
        numbers = scale.double()
    if stored.kind == "e4m3":
        codes = torch.randn(experts, N, K, generator=generator).to(FP8)
        weight = codes.double()
    else:
        four = torch.randint(0, 16, (experts, N, K), generator=generator)
        weight = E2M1[four] / 3 if stored.kind == "e2m1" else (four.double() - 8) / 4
        numbers = numbers * (3 if stored.kind == "e2m1" else 4)
        codes = (four[..., 0::2] | four[..., 1::2] << 4).to(torch.uint8)
    factors = numbers[..., None] if not stored.group else numbers.repeat_interleave(stored.group, 2)[..., :K]
    return codes, scale, weight * factors


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
    block: tuple[int, int, int] = (16, 32, 64)
    seed: int = 0


class Layer:
    """The tensors of all ranks of a `Mixture`: codes, scales, and the weights that these stand for."""

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
        moe_down(middles, [layer.widened(each, dtype) for each in layer.second], layer.chosen, layer.weights, bias, shared,
                 exact=dtype is not case.dtype) for dtype in (torch.float64, case.dtype)
    )  # fmt: skip
    begin = rank * part_size(case.tokens, w) if case.scatter else 0
    codes, scale, _ = layer.second[rank]
    result = out.tensor[:own]
    getattr(ctx.ops, op)(
        result, middles[rank], codes.transpose(1, 2), layer.chosen, layer.weights, bias, shared and shared[rank], config,
        workspace, scale=scale,
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
    config = FusedConfig(16, 128, 64, num_warps=4, num_stages=2, algorithm="sequential")
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
    "many": dict(tokens=41, k=3, scatter=True, activation="gelu_tanh"),
}
OTHERS: dict[str, Mixture] = {
    "no_gate": Mixture("mxfp4", 7, gated=False, activation="relu2"),
    "fp16": Mixture("fp8_channel", 6, dtype=torch.float16, hidden=130),
    "fp32": Mixture("int4", 5, dtype=torch.float32, hidden=66, bias=True),
    "fp32_one_token": Mixture("mxfp4", 1, dtype=torch.float32),
    "in_steps": Mixture("int4", 23, algorithm="sequential", shared=True),
    "summed": Mixture("fp8_block", 11, algorithm="overlapped", bias=True, block=(16, 64, 32)),
    "none": Mixture("int4", 0),
    "narrow": Mixture("int4", 3, hidden=2, widths=(2, 2, 4, 2)),
}


@pytest.mark.parametrize("world_size, name, format", [
    pytest.param(w, name, format, marks=[pytest.mark.slow] * (w in (1, 3) and format not in ("int4", "fp8_channel")))
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
    fine = dict(
        out=torch.zeros(2 * T, width, dtype=torch.bfloat16, **new), A=torch.zeros(T, H, dtype=torch.bfloat16, **new),
        B=torch.zeros(E, 2 * width, H // 2, dtype=torch.uint8, **new).transpose(1, 2), experts=experts,
        scale=torch.ones(E, 2 * width, 2, **new),
    )  # fmt: skip
    cases: list[tuple[dict, type[IrisError], str]] = [
        (dict(scale=torch.ones(E, 2 * width, 2, dtype=torch.int32, **new)), DtypeError, "scale has torch.int32; expected"),
        (dict(scale=None), DtypeError, "B has dtype torch.uint8; expected one of .* with a scale"),
        (dict(scale=torch.ones(E, width, **new)), ShapeError, r"scale is \(3, 32\); expected \(3, 64\)"),
        (dict(scale=torch.ones(E, 2 * width, 3, **new)), ShapeError, r"scale is \(3, 64, 3\).* for K = 64; expected"),
        (dict(scale=torch.ones(2, 2 * width, E, **new).permute(2, 1, 0)), ShapeError, "strides"),
        (dict(scale=[1]), ArgumentError, "scale is list"),
        (dict(B=torch.zeros(E, H // 2, 2 * width, dtype=torch.uint8, **new)), ArgumentError, "B has strides"),
        (dict(B=torch.zeros(E, 2 * width, H // 2, dtype=torch.int8, **new).transpose(1, 2)), DtypeError, "B has dtype torch.int8"),
        (dict(B=torch.zeros(E, 2 * width, H, dtype=torch.uint8, **new).transpose(1, 2)), ShapeError, r"A is \(4, 64\)"),
    ]  # fmt: skip
    for change, error, message in cases:
        with pytest.raises(error, match=message):
            ctx.ops.moe_gate_up(**fine | change)


def test_what_is_no_format_is_refused_by_name() -> None:
    run_ranks(WORLDS[min(1, len(WORLDS) - 1)], refused_body)


@pytest.mark.skipif(bool(both), reason="needs no ranks")
def test_groups_are_found_by_their_number() -> None:
    for K in (2, 16, 33, 96, 736, 2880, 4096):
        for size in (8, 16, 32, 64, 128, 256):
            groups = -(-K // size)
            assert group_of(K, groups) == size or (groups == 1 and group_of(K, groups) >= K)
    assert group_of(64, 3) is None and group_of(0, 0) is not None
