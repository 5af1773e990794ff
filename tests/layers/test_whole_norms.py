"""Sums that norms take along in compiled layers, with the same bits promised: which, and that results stay."""

from __future__ import annotations

from collections.abc import Callable

import iris
from iris_ops.local import norm
import layers
from layers.serving import whole_norms
import pytest
import torch

from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import models

pytestmark = [*both, pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])]


def graphs_of(patch: pytest.MonkeyPatch) -> list[list]:
    """Of each graph that is compiled for an engine, what its nodes call."""
    actual, fold = [], whole_norms.fold

    def seen(graph):
        fold(graph)
        actual.append([node.target for node in graph.nodes])

    patch.setattr(whole_norms, "fold", seen)
    return actual


@torch.no_grad()
def engine_body(ctx: iris.Iris, invariant: str | None) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int]]]:
    ctx.invariant = invariant
    model = models.build("kv2").to(torch.bfloat16)
    layers.parallelize(model, ctx)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        graphs = graphs_of(patch)
        for compile in (False, "eager"):
            engine = layers.Engine(model, ctx, 2, 18, step_attention=True, graphs=False, compile=compile)
            logits = [engine.prefill(models.prompt().to(ctx.device)).clone()]
            engine.accept(torch.zeros_like(logits[0]).index_fill_(1, torch.tensor(7, device=ctx.device), 1.0))
            engine.decode(1)
            results.append(torch.stack([*logits, engine.logits.clone()]))
    counts = [(calls.count(norm.add_rms_norm), calls.count(norm.rms_norm)) for calls in graphs]
    return *results, counts


@pytest.mark.parametrize("invariant", ["batch", None])
@pytest.mark.some(1, on_gpus=2)
def test_a_compiled_layer_s_norms_take_their_sums_along(world_size: int, invariant: str | None) -> None:
    for whole, compiled, counts in run_ranks(world_size, engine_body, invariant):
        assert set(counts) <= {(2, 0), (0, 0)} and ((2, 0) in counts) == bool(invariant), counts
        error = (compiled.double() - whole.double()).norm()
        assert torch.equal(compiled, whole) if invariant else error <= 2**-6 * whole.double().norm()


@torch.no_grad()
def functions_body(ctx: iris.Iris) -> None:
    like = dict(dtype=torch.bfloat16, device=ctx.device)
    x, y, weight = torch.randn(2, 3, 64, **like), torch.randn(2, 3, 64, **like), torch.randn(64, **like)

    def normed(h: torch.Tensor, w: torch.Tensor = weight) -> torch.Tensor:
        return norm.rms_norm(h, w, 1e-6)

    def plain():
        h = x + y
        return normed(h), h * 2

    def twice():
        return normed(x + x)

    def sum_changed():
        h = x + y
        h[0] = 0
        return normed(h)

    def wider():
        return normed(x + y[:1])

    def other_dtype():
        return normed(x + y.float(), weight.float())

    def a_number():
        return normed(x + 1.0)

    def made_late():
        h = x + y
        return normed(h, weight * 2)

    def another_sum():
        h = torch.add(x, y, alpha=2)
        return normed(h)

    for function, folds in ((plain, 1), (twice, 1), (sum_changed, 0), (wider, 0), (other_dtype, 0), (a_number, 0),
                            (made_late, 0), (another_sum, 0)):  # fmt: skip
        assert_folds(function, folds)


def assert_folds(function: Callable, folds: int) -> None:
    """Check that compiled `function` has this number of norms with a residual sum, and bit-identical results."""
    torch.compiler.reset()
    actual = []

    def taken(graph, inputs):
        whole_norms.fold(graph.graph)
        graph.graph.lint()
        graph.recompile()
        actual.append([node.target for node in graph.graph.nodes].count(norm.add_rms_norm))
        return graph

    result = torch.compile(function, backend=taken, fullgraph=True)()
    assert actual == [folds], function.__name__
    for mine, whole in zip(*map(torch.utils._pytree.tree_leaves, (result, function())), strict=True):
        assert torch.equal(mine, whole), function.__name__


def test_only_a_sum_that_nothing_changes_is_folded(world_size: int) -> None:
    run_ranks(world_size, functions_body)
