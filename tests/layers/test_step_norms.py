"""Norms of a compiled step in two halves: the logits of whole norms, in which graphs, and what stays as it is."""

from __future__ import annotations

from collections.abc import Callable

from iris_ops.kernels.rmsnorm_epilogue import first_half, second_half
from iris_ops.local import skinny_matmul
from iris_ops.ops import Ops
from iris_ops.quantised.scaled_matmul import restored
import layers
from layers.serving import step_norms
from layers.sharded import ShardedLinear
from layers.weight_storage import LOCAL, REDUCED
import pytest
import torch
from torch import nn

from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import models

pytestmark = [*both, pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])]


def serve_anywhere(patch: pytest.MonkeyPatch) -> None:
    """Products of few rows by our kernel on CPUs too."""
    if not ON_GPU:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        few = skinny_matmul.has_few_rows
        patch.setattr(skinny_matmul, "is_eligible", lambda x, rows: x.dtype == torch.bfloat16 and few(x, rows or 16))


def counted(patch: pytest.MonkeyPatch) -> list[None]:
    """Of each all-reduce that ends with half of a norm, an item."""
    calls, op = [], Ops.matmul_all_reduce_norm

    def call(self, *args, **kwargs):
        calls.append(None)
        return op(self, *args, **kwargs)

    patch.setattr(Ops, "matmul_all_reduce_norm", call)
    return calls


CHOSEN = torch.tensor([[5, 6, 7], [70, 69, 68]])  # which tokens follow a prompt


def logits(model: nn.Module, ctx, **options) -> torch.Tensor:
    """[steps, rows, vocabulary]: after a prompt, and after each of the tokens that follow."""
    engine = layers.Engine(model, ctx, 2, 18, step_attention=True, **options)
    found = [engine.prefill(models.prompt().to(ctx.device)).clone()]
    for chosen in CHOSEN.to(ctx.device).split(1, 1):
        engine.accept(torch.zeros_like(found[0]).scatter_(1, chosen, 1.0))
        engine.decode(1)
        found.append(engine.logits.clone())
    return torch.stack(found)


def exact_logits(name: str) -> torch.Tensor:
    """Return the logits of the unsplit model in float64 with the bfloat16 weights."""
    model = models.build(name).to(torch.bfloat16).double()
    tokens = torch.cat((models.prompt(), CHOSEN), 1)
    return model(tokens).logits[:, -1 - CHOSEN.shape[1] :].transpose(0, 1)


def assert_as_close(result: torch.Tensor, plain: torch.Tensor, name: str) -> None:
    """Check that each step's logits are as close to the exact ones as those of an engine that is not compiled."""
    exact = exact_logits(name)
    errors = [
        (each.double().cpu() - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1) for each in (result, plain)
    ]
    assert (errors[0] <= 1.3 * errors[1] + 2**-8).all(), errors
    wrong = exact.roll(1, 0)
    assert (((wrong - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)) > 0.1).all(), "steps differ by more"


def backend(ctx) -> str:
    return "inductor" if ctx.device.type == "cuda" else "aot_eager"


@torch.no_grad()
def engine_body(ctx, name: str, sums: int) -> None:
    model = models.build(name).to(torch.bfloat16)
    layers.parallelize(model, ctx)
    expected = logits(model, ctx, graphs=False)
    with pytest.MonkeyPatch.context() as patch:
        serve_anywhere(patch)
        calls = counted(patch)
        result = logits(model, ctx, compile=backend(ctx), graphs=False)
        assert len(calls) == 3 * sums  # in three steps
        assert_as_close(result, expected, name)
        if ON_GPU:
            assert torch.equal(logits(model, ctx, compile=backend(ctx)), result), "captured"


# models of two layers, and how many of their four all-reduces end so
MODELS = {"kv2": 4, "bias": 4, "qk_norm": 4, "offset_norm": 0, "gathered_qkv": 0}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.some(1)
def test_logits_of_a_compiled_engine(world_size: int, name: str) -> None:
    run_ranks(world_size, engine_body, name, MODELS[name])


@torch.no_grad()
def apart_body(ctx) -> None:
    """Where a norm's result is seen by others, norms stay whole, and are right."""
    model = models.build("kv2").to(torch.bfloat16)
    layers.parallelize(model, ctx)
    expected = logits(model, ctx, graphs=False)
    with pytest.MonkeyPatch.context() as patch:
        serve_anywhere(patch)
        calls = counted(patch)
        handles = [
            layer.input_layernorm.register_forward_hook(lambda module, args, output: output * 1.0)
            for layer in model.model.layers
        ]
        result = logits(model, ctx, compile=backend(ctx), graphs=False)
        assert len(calls) == 3 * 2, "only what follows the attention"
        assert_as_close(result, expected, "kv2")
        for handle in handles:
            handle.remove()


@pytest.mark.some(on_gpus=0)
def test_a_hooked_norm_stays_whole(world_size: int) -> None:
    run_ranks(world_size, apart_body)


@torch.no_grad()
def other_products_body(ctx, weights: str | None) -> None:
    """Run without the library's products of few rows, as rivals are measured, or with fp8 weights that these refuse."""
    model = models.build("kv2").to(torch.bfloat16)
    layers.parallelize(model, ctx, weights=weights)
    expected = logits(model, ctx, graphs=False)
    for module in model.modules() if weights is None else ():
        if hasattr(module, "own_steps"):
            module.own_steps = False
    halves = []

    def fold(graph, fold=step_norms.fold):
        halves.extend(node for node in graph.nodes if node.target in (first_half, second_half))
        return fold(graph)

    with pytest.MonkeyPatch.context() as patch:
        serve_anywhere(patch)
        patch.setattr(step_norms, "fold", fold)
        calls = counted(patch)
        result = logits(model, ctx, compile=backend(ctx), graphs=False)
        if weights is None:
            assert_as_close(result, expected, "kv2")
        else:  # both with what fp8 rounds
            assert (result - expected).norm() <= 2**-5 * expected.norm()
        assert not calls and not halves


@pytest.mark.parametrize("weights", [None, "fp8"])
@pytest.mark.some(0, on_gpus=1)
def test_norms_before_other_products_stay_whole(world_size: int, weights: str | None) -> None:
    run_ranks(world_size, other_products_body, weights)


@torch.no_grad()
def fp8_body(ctx) -> None:
    """Run fp8 weights: a step keeps its input in bfloat16, and eager calls round it."""
    model = models.build("lines").to(torch.bfloat16)
    layers.parallelize(model, ctx, weights="fp8_all")
    rounding = logits(model, ctx, graphs=False)
    for module in model.modules():
        if isinstance(module, ShardedLinear) and module.weight_scale is not None:
            exact = restored(module.weight, module.weight_scale, torch.bfloat16)
            module.weight, module.weight_scale = nn.Parameter(exact, requires_grad=False), None
            module.op = LOCAL if module.dim == 0 else REDUCED
    exact = logits(model, ctx, graphs=False)
    model = models.build("lines").to(torch.bfloat16)
    layers.parallelize(model, ctx, weights="fp8_all")
    with pytest.MonkeyPatch.context() as patch:
        calls = counted(patch)
        result = logits(model, ctx, compile="inductor", graphs=False)
        assert len(calls) == 3 * 4
        captured = logits(model, ctx, compile="inductor", prompt_graphs=0)  # padded ones have rows enough to be rounded
        assert torch.equal(captured, result)
    own, theirs, other = (
        (each.double() - exact.double()).flatten(1).norm(dim=1) for each in (result, rounding, exact.roll(1, 0))
    )
    # of prompts, input is rounded in both, and steps see the prompt's keys and values
    assert (own < 1.3 * theirs).all() and (other > 3 * own).all(), (own, theirs, other)


@pytest.mark.skipif(not ON_GPU, reason="needs GPUs")
def test_steps_with_fp8_weights(world_size: int) -> None:
    run_ranks(world_size, fp8_body)


def assert_folds(function: Callable, folds: int) -> None:
    """Check that compiled `function` has this number of all-reduces with a norm's first half, and unchanged results."""
    torch.compiler.reset()
    found = []

    def taken(graph, inputs):
        step_norms.keep_in_graphs()
        assert step_norms.fold(graph.graph)
        graph.graph.lint()
        graph.recompile()
        ops = [node.target for node in graph.graph.nodes]
        found.append(ops.count(torch.ops.iris_ops.matmul_all_reduce_norm))
        assert found[0] != ops.count(torch.ops.iris_ops.matmul_all_reduce), "one or the other"
        return graph

    result = torch.compile(function, backend=taken, fullgraph=True)()
    assert found == [folds], function.__name__
    for mine, whole in zip(*map(torch.utils._pytree.tree_leaves, (result, function())), strict=True):
        assert (mine.double() - whole.double()).norm() <= 2**-6 * whole.double().norm(), function.__name__


@torch.no_grad()
def between_body(ctx) -> None:
    """What comes between an all-reduce and its norm, and calls that are written otherwise."""
    like = dict(dtype=torch.bfloat16, device=ctx.device)
    x, a, b = torch.randn(2, 1, 64, **like), torch.randn(2, 32, **like), torch.randn(64, 32, **like)
    weight, norm, wide = torch.randn(48, 64, **like), torch.randn(64, **like), torch.randn(128, **like)
    product, reduce, size = torch.ops.iris_ops.skinny_matmul, torch.ops.iris_ops.matmul_all_reduce, (2, 64)
    half, narrow = norm[:32].clone(), weight[:, :32].clone()

    def reduced(a: torch.Tensor = a) -> torch.Tensor:
        return reduce(a, b.t(), None, size, ctx.group_name, None)

    def normed(h: torch.Tensor, w: torch.Tensor = norm) -> torch.Tensor:
        return nn.functional.rms_norm(h, w.shape, w, 1e-6)

    def sum_changed():
        h = x + reduced().view(2, 1, 64)
        h[0] = 0
        return product(normed(h), weight, None, None, "")

    def operand_changed():
        mine = a.clone()
        r = reduced(mine)
        mine.zero_()
        return product(normed(x + r.view(2, 1, 64)), weight, None, None, "")

    def made_late():
        h = x + reduced().view(2, 1, 64)
        return product(normed(h, norm * 2), weight, None, None, "")

    def strided():
        w = wide[::2]
        return product(normed(x + reduced().view(2, 1, 64), w), weight, None, None, "")

    def shorter_rows():
        return product(normed(x.view(4, 32) + reduced().view(4, 32), half), narrow, None, None, "")

    def as_weight_too():
        n = normed(x.view(2, 64) + reduced().view(2, 64))
        return product(n, n, None, None, "")

    def norm_by_names():
        h = x + reduced().view(2, 1, 64)
        n = nn.functional.rms_norm(input=h, normalized_shape=(64,), weight=norm, eps=1e-6)
        return product(n, weight, None, None, "")

    def view_by_name():
        return product(normed(x + reduced().view(size=(2, 1, 64))), weight, None, None, "")

    def reduction_by_names():
        r = reduce(A=a, B=b.t(), bias=None, size=size, group=ctx.group_name)
        return product(normed(x + r.view(2, 1, 64)), weight, None, None, "")

    for function in (sum_changed, operand_changed, made_late, shorter_rows, as_weight_too, view_by_name,
                     reduction_by_names):  # fmt: skip
        assert_folds(function, 0)
    for function in (strided, norm_by_names):
        assert_folds(function, 1)


def test_only_what_follows_at_once_is_folded(world_size: int) -> None:
    run_ranks(world_size, between_body)
