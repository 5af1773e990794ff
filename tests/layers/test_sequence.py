"""Sequence parallel: the unsplit model's logits and tokens, each rank holding its share of the tokens in between."""

from __future__ import annotations

import contextlib

from iris.errors import ShapeError, StyleError
import layers
from layers.hf import sequence
from layers.hf.parallelize import parallelize
import pytest
import torch

from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import models

pytestmark = both
# On GPUs as many ranks as there are; heads and widths need not divide.
CASES = [(world, "kv2") for world in WORLDS if world > 1] if UNDER_TORCHRUN else [(2, "bias"), (3, "kv2")]
LEAST = 6  # a prompt of seven tokens a row is shared, a step is not


def shared_body(ctx, name: str) -> tuple:
    model = models.build(name)
    parallelize(model, ctx, sequence_parallel=LEAST)
    seen = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
        layer.post_attention_layernorm.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    prompts = models.prompt(ctx.num_ranks).to(ctx.device)
    logits = model(prompts).logits
    assert len(seen) == 4 and set(seen) <= {(7, 36)}, seen
    tokens = model.generate(prompts, max_new_tokens=3, do_sample=False)
    odd = model(prompts[:, :5]).logits  # five a row are shared too
    few = model(prompts[:1, :5]).logits
    assert seen[-1] == (1, 5, 36), "too few to share"
    states = model(prompts, output_hidden_states=True).hidden_states
    plain = model.model(prompts, output_hidden_states=True, return_dict=False)
    assert any(isinstance(each, tuple) and torch.equal(each[1], states[1]) for each in plain), "as a tuple, too"
    alone = model.model.layers[0].mlp
    assert alone(torch.zeros(1, 12, 36, device=ctx.device)).shape == (1, 12, 36), "a part by itself has all tokens"
    with alone.register_forward_pre_hook(lambda module, args: args[0].new_zeros(1, 12, 36), prepend=True):
        with pytest.raises(ShapeError, match="first decoder layer"):
            model(prompts)
    assert torch.equal(model(prompts).logits, logits), "what failed leaves nothing behind"
    model.model.layers = model.model.layers[:1]
    return logits, tokens.cpu(), odd, few, states, model(prompts).logits


@pytest.mark.parametrize("world_size, name", CASES)
@pytest.mark.some(1, on_gpus=len(CASES))
def test_logits_and_tokens_are_the_unsplit_models(world_size: int, name: str) -> None:
    results = run_ranks(world_size, shared_body, name)
    whole = models.build(name)
    prompts = models.prompt(world_size)
    tokens = whole.generate(prompts, max_new_tokens=3, do_sample=False)
    with torch.no_grad():
        output = whole(prompts, output_hidden_states=True)
        single, states = output.logits, output.hidden_states
        double = whole.double()
        exact = [double(each).logits for each in (prompts, prompts[:, :5], prompts[:1, :5])]
        double.model.layers = double.model.layers[:1]
        exact.append(double(prompts).logits)
    own = (single - exact[0]).abs().max()
    for logits, generated, odd, few, whole_again, cut in results:
        assert torch.equal(logits, results[0][0]), "ranks differ"
        for state, expected in zip(whole_again, states, strict=True):
            torch.testing.assert_close(state.cpu(), expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(generated, tokens)
        for result, expected in zip((logits, odd, few, cut), exact, strict=True):
            assert (result.cpu() - expected).abs().max() <= 6 * own


def engine_body(ctx) -> list:
    """Read prompts whose length is no multiple of the ranks, plain and padded: ranks share all tokens."""
    model = models.build("kv2")
    parallelize(model, ctx, sequence_parallel=LEAST)
    seen = []
    model.model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    rows, built = models.prompt().tolist(), []
    for batch in ([rows[0]], [rows[0], rows[1][2:]]):  # 7 tokens; 14, with two of padding
        engine = layers.Engine(model, ctx, len(batch), 14)
        built.append((engine.generate(batch, models.NEW), engine.generate(batch, models.NEW)))
        assert len(seen[0]) == 2 and len(seen[1]) == 3, "prompts are shared, steps are not"
        seen.clear()
    engine = layers.Engine(model, ctx, 1, 8)  # no room behind
    built.append((engine.generate([rows[0]], 1), engine.generate([rows[0]], 1)))
    return built


@pytest.mark.parametrize("world_size", [world for world in WORLDS if world > 1] if UNDER_TORCHRUN else [3])
def test_an_engine_shares_any_number_of_tokens(world_size: int) -> None:
    whole, padded = (models.generate(models.build("kv2"), padded=padded)[:, 7:].tolist() for padded in (False, True))
    expected = [[whole[0]], padded, [whole[0][:1]]]
    for result in run_ranks(world_size, engine_body):
        assert result == [(each, each) for each in expected]


def growing() -> torch.nn.Module:
    """Its rotary embedding goes by the largest position of a call, from the seventh token on."""
    model = models.build("kv2")
    model.config.max_position_embeddings = 6
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(model.device)
    return model


def growing_body(ctx) -> torch.Tensor:
    model = growing()
    parallelize(model, ctx, sequence_parallel=LEAST)
    return layers.Engine(model, ctx, 1, 9).read(models.prompt(1).to(ctx.device)).cpu()


@pytest.mark.parametrize("world_size", [world for world in WORLDS if world > 1] if UNDER_TORCHRUN else [3])
def test_what_is_put_behind_prompts_changes_no_frequency(world_size: int) -> None:
    whole, prompt = growing(), models.prompt(1)
    with torch.no_grad():
        single, exact = whole(prompt).logits[:, -1], whole.double()(prompt).logits[:, -1]
    for result in run_ranks(world_size, growing_body):
        assert (result - exact).abs().max() <= 6 * (single - exact).abs().max()


def default_body(ctx) -> list[bool]:
    """Return whether calls run sequence parallel, by default and for models outside the tested families."""
    ways = [("bias", {}), ("bias", {"sequence_parallel": False}), ("bias", {"fuse": False})]
    ways += [("bias", {"weights": "fp8"}), ("bias", {"filter_fn": lambda name, module: "layers.1.mlp" not in name})]
    ways += [("bias", {"plan": models.build("bias").tp_plan}), ("fused", {})]
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence, "LEAST", LEAST)
        for name, options in ways:
            model, seen = models.build(name), []
            report = parallelize(model, ctx, **options)
            model.model.layers[1].register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0].dim()))
            prompts, sharing = models.prompt(ctx.num_ranks).to(ctx.device), sequence.sharing_of(model)
            with sharing.replaying() if sharing else contextlib.nullcontext():
                model(prompts)
            model(prompts)  # launched piece by piece, with tokens enough for a graph only
            assert seen[1] == 3
            calls.append(seen[0] == 2)
            assert ("sequence parallel all_gather_matmul" in str(report)) == calls[-1]
    return calls


@pytest.mark.parametrize("world_size", [world for world in WORLDS if world > 1] if UNDER_TORCHRUN else [2])
def test_known_families_share_their_tokens_by_default(world_size: int) -> None:
    for calls in run_ranks(world_size, default_body):
        assert calls == [True] + [False] * 6


def compiled_body(ctx) -> None:
    model = models.build("kv2")
    parallelize(model, ctx, sequence_parallel=LEAST)
    prompts = [rows.to(ctx.device) for rows in (models.prompt(ctx.num_ranks), models.prompt(1)[:, :5])]
    expected = [model(rows).logits for rows in prompts]
    torch.compiler.reset()
    model.compile(fullgraph=True, backend="aot_eager")
    for rows, logits in zip(2 * prompts, 2 * expected, strict=True):  # shared, and too few for that, twice
        torch.testing.assert_close(model(rows).logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("world_size", [world for world in WORLDS if world > 1] if UNDER_TORCHRUN else [2])
@pytest.mark.slow
def test_a_model_that_shares_tokens_compiles_to_one_graph(world_size: int) -> None:
    run_ranks(world_size, compiled_body)


REFUSED = {
    "packed": ("fused", "auto", "has style"),
    "gathered": ("gathered_qkv", "auto", "has style"),
    "a part": (
        "plain",
        {f"model.layers.*.mlp.{name}_proj": style for name, style in
         (("gate", "colwise"), ("up", "colwise"), ("down", "rowwise"))},
        "only a part",
    ),
}  # fmt: skip


def refused_body(ctx, name: str, plan, words: str) -> None:
    model = models.build(name)
    before = [type(module) for module in model.modules()]
    with pytest.raises(StyleError, match=words):
        parallelize(model, ctx, plan=plan, sequence_parallel=True)
    assert [type(module) for module in model.modules()] == before, "a refused model is left as it was"


@pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_share_its_tokens_is_refused(world_size: int, case: str) -> None:
    run_ranks(world_size, refused_body, *REFUSED[case])
