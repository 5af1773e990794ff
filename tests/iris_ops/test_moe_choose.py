"""`moe_choose`: experts, weights and order compared with float64, for each scoring, with ties and odd values."""

from __future__ import annotations

import math
from typing import Any

import iris
from iris.errors import ArgumentError, DtypeError, ShapeError
from iris_ops import Scoring
from iris_ops.moe.router_ops import choose_experts
from iris_ops.moe.scoring import SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN, from_text
import pytest
import torch

from tests.harness import WORLDS, both, run_ranks

pytestmark = both
one = WORLDS[0]
SCORINGS = {
    "Qwen3, Mixtral": Scoring(),
    "OLMoE": Scoring(SOFTMAX, normalised=False),
    "gpt-oss": Scoring(SOFTMAX_OF_CHOSEN, normalised=False),
    "DeepSeek-V3": Scoring(SIGMOID, True, 1e-20, 2.5, 8, 4, 2),
    "DeepSeek-V2": Scoring(SOFTMAX, False, 0.0, 16.0, 4, 2, 1),
    "GLM, Kimi": Scoring(SIGMOID, True, 1e-20, 1.8),
}
SIZES = ((1, 128, 8), (3, 64, 5), (64, 128, 8), (70, 32, 4), (300, 256, 8), (2, 16, 2), (0, 32, 2))


def expected(
    logits: torch.Tensor, top_k: int, scoring: Scoring, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return experts and weights in float64 by token: the best first, and of equal scores the lowest index first."""
    chosen, weights = [], []
    for row in logits.double().tolist():
        scores = [1 / (1 + math.exp(-x)) for x in row] if scoring.kind == SIGMOID else row
        # what decides is rounded as the kernel rounds it: float32
        values = torch.tensor(row).sigmoid().tolist() if scoring.kind == SIGMOID else list(row)
        if bias is not None:
            values = (torch.tensor(values) + bias.float().cpu()).tolist()
        size = len(row) // scoring.groups
        of_groups = [
            torch.tensor(sorted(values[g * size : (g + 1) * size])[-scoring.group_best :]).sum().item()
            for g in range(scoring.groups)
        ]
        kept = sorted(range(scoring.groups), key=lambda g: (-of_groups[g], g))[: scoring.kept_groups]
        open_ = [e for e in range(len(row)) if e // size in kept]
        best = sorted(open_, key=lambda e: (-values[e], e))[:top_k]
        if scoring.kind == SIGMOID:
            own = [scores[e] for e in best]
        else:
            among = row if scoring.kind == SOFTMAX else [row[e] for e in best]
            total = sum(math.exp(x - max(among)) for x in among)
            own = [math.exp(row[e] - max(among)) / total for e in best]
        total = sum(own) + scoring.epsilon if scoring.normalised else 1.0
        chosen.append(best)
        weights.append([w / total * scoring.scale for w in own])
    shape = len(logits), top_k
    return torch.tensor(chosen).view(shape).long(), torch.tensor(weights, dtype=torch.float64).view(shape)


def choosing(ctx: iris.Iris, name: str, ties: bool) -> None:
    scoring, generator = SCORINGS[name], torch.Generator().manual_seed(len(name) + ties)
    for tokens, experts, top_k in SIZES:
        assert scoring.refusal(experts, top_k) is None
        logits = torch.randn(tokens, experts, generator=generator)
        bias = torch.randn(experts, generator=generator) / 8 if scoring.kind == SIGMOID else None
        if ties:  # most scores stand several times in a row
            logits, bias = (logits * 2).round() / 2, None if bias is None else (bias * 4).round() / 4
        for dtype, wide in ((torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)):
            given = logits.to(dtype)
            best, weights = expected(given, top_k, scoring, bias)
            padded = torch.full((tokens, experts + 8), 99.0, dtype=dtype)  # rows need not touch
            padded[:, :experts] = given
            moved = None if bias is None else bias.to(ctx.device)
            out = torch.float32 if wide else dtype
            routing, result = ctx.ops.moe_choose(padded.to(ctx.device)[:, :experts], top_k, scoring, moved, out)
            assert torch.equal(routing.chosen.cpu(), best), (name, tokens, experts)
            assert result.dtype == out
            torch.testing.assert_close(
                result.cpu().double(), weights, rtol=1e-5 if wide else 2**-8, atol=1e-9, msg=f"{name} {tokens}"
            )
            pairs = best.flatten()
            assert torch.equal(routing.rows.cpu().long(), pairs.argsort(stable=True))
            counts = torch.bincount(pairs, minlength=experts)
            assert routing.offsets.tolist() == [0, *counts.cumsum(0).tolist()]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", SCORINGS)
@pytest.mark.some(5, on_gpus=2 * len(SCORINGS))
def test_experts_weights_and_order_are_those_of_float64(name: str, ties: bool) -> None:
    run_ranks(one, choosing, name, ties)


def odd(ctx: iris.Iris) -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[0.0, -inf, 5.0, -inf], [-inf] * 4, [nan, 1.0, nan, 2.0], [inf, 1.0, inf, 0.0], [-0.0, 0.0, -0.0, 0.0]]
    logits = torch.tensor(rows, device=ctx.device)
    routing, weights = ctx.ops.moe_choose(logits, 3)
    assert routing.chosen.tolist() == [[2, 0, 1], [0, 1, 2], [0, 2, 3], [0, 2, 1], [0, 1, 2]]
    assert weights[0].tolist() == pytest.approx([1 / (1 + math.exp(-5)), 1 / (1 + math.exp(5)), 0.0])
    assert weights[1:4].isnan().any(1).all(), "as torch's softmax has it"
    assert weights[4].tolist() == pytest.approx([1 / 3] * 3)


def test_infinities_and_nan_choose_experts_that_exist() -> None:
    run_ranks(one, odd)


def refused(ctx: iris.Iris) -> None:
    logits = torch.zeros(4, 64, device=ctx.device)
    cases: list[tuple[type, str, tuple, dict[str, Any]]] = [
        (ShapeError, r"moe_choose: logits is \(4, 2, 32\); expected \(T,E\)", (logits.view(4, 2, 32), 2), {}),
        (DtypeError, "logits has dtype torch.int64; expected one of torch.bf", (logits.long(), 2), {}),
        (ArgumentError, r"logits has strides \(1, 4\); expected contiguous rows", (torch.zeros(64, 4).t(), 2), {}),
        (ArgumentError, "top_k is 65; expected an integer from 1 to 64", (logits, 65), {}),
        (ArgumentError, "top_k is True; expected an integer", (logits, True), {}),
        (ArgumentError, "scoring is 'softmax'; expected an iris_ops.Scoring", (logits, 2, "softmax"), {}),
        (ShapeError, r"bias is \(63,\); expected \(64,\)", (logits, 2, None, torch.zeros(63)), {}),
        (DtypeError, "dtype is torch.int32; expected one of", (logits, 2), dict(dtype=torch.int32)),
        (ArgumentError, "64 experts are in 3 groups; expected powers of two", (logits, 2, Scoring(groups=3)), {}),
        (ArgumentError, "groups have 8 experts, and 9 are chosen from 1 groups", (logits, 9, Scoring(groups=8)), {}),
    ]
    for kind, reason, args, options in cases:
        args = tuple(each.to(ctx.device) if isinstance(each, torch.Tensor) else each for each in args)
        with pytest.raises(kind, match=reason):
            ctx.ops.moe_choose(*args, **options)


def test_bad_arguments_are_refused_by_name() -> None:
    run_ranks(one, refused)
    for options, reason in (
        (dict(kind="tanh"), "scoring.kind is 'tanh'; expected one of 'softmax'"),
        (dict(groups=4, kept_groups=5), "scoring.kept_groups is 5, scoring.groups 4"),
        (dict(group_best=3), "scoring.group_best 3; expected"),
    ):
        with pytest.raises(ArgumentError, match=reason):
            Scoring(**options)
    assert all(from_text(scoring.text) == scoring for scoring in SCORINGS.values())


def alike(ctx: iris.Iris) -> None:
    generator = torch.Generator().manual_seed(5)
    logits, scoring = torch.randn(600, 128, generator=generator).to(ctx.device), SCORINGS["OLMoE"]
    whole = choose_experts(ctx, logits, 8, scoring, None, True)
    for tokens in (1, 5, 64, 599):
        some = choose_experts(ctx, logits[:tokens], 8, scoring, None, True)
        assert torch.equal(some.weights, whole.weights[:tokens]) and torch.equal(some.experts, whole.experts[:tokens])


def invariant(ctx: iris.Iris) -> None:
    with iris.iris(1 << 22, invariant="batch") as own:
        alike(own)


def test_bits_do_not_depend_on_the_batch_where_that_is_promised() -> None:
    run_ranks(one, invariant)
