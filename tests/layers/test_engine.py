"""The engine against Hugging Face's own generate() on the unsplit model: greedy, padded, sliding, sampled, stopped."""

from __future__ import annotations

from contextlib import nullcontext

from iris.errors import ArgumentError
import layers
from layers.serving.cache import cache_name
import pytest
import torch

from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import models

transformers = pytest.importorskip("transformers")
pytestmark = both


def on(ranks: int):
    """One world of ranks is enough: the engine itself does not ask how many there are."""
    return pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [ranks])


def greedy_body(ctx, name: str) -> list:
    model = models.build(name)
    layers.parallelize(model, ctx)
    engine = layers.Engine(model, ctx, batch_size=3, max_length=16)
    prompts = models.prompt().tolist()
    return [
        engine.generate(prompts, models.NEW),  # a row is left over
        engine.generate([prompts[0], prompts[1][2:]], models.NEW),  # two tokens of padding
        engine.generate(models.prompt(), models.NEW),  # the padding is forgotten
        engine.generate(prompts, 4, stop=7),
    ]


@on(3)
@pytest.mark.parametrize("name", ["kv2", "sliding"])
def test_greedy_tokens_are_those_of_the_unsplit_model(world_size: int, name: str) -> None:
    whole, padded = (models.generate(models.build(name), padded=padded)[:, 7:].tolist() for padded in (False, True))
    for plain, shorter, again, stopped in run_ranks(world_size, greedy_body, name):
        assert plain == again == whole
        assert shorter == padded
        for row, expected in zip(stopped, whole, strict=True):
            end = expected.index(7) + 1 if 7 in expected else 4
            assert row == expected[: min(end, 4)]


class PassesOn(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class OfBefore(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, past_key_values=None, **kwargs):
        raise NotImplementedError


class OfNow(OfBefore):
    def forward(self, input_ids=None, cache=None, **kwargs):
        raise NotImplementedError


def test_the_cache_has_the_name_that_the_model_gives_it() -> None:
    """And so no warning that the name is of before."""
    config = transformers.LlamaConfig(**models.PLAIN)
    assert cache_name(OfBefore(config)) == "past_key_values"
    assert cache_name(OfNow(config)) == "cache"
    assert cache_name(PassesOn(config)) == cache_name(transformers.LlamaForCausalLM(config))


def sampled_body(ctx) -> list:
    model = models.build("kv2")
    layers.parallelize(model, ctx)
    engine = layers.Engine(model, ctx, batch_size=2, max_length=13)
    torch.manual_seed(100 + ctx.cur_rank)
    options = [
        {"temperature": 3.0, "seed": 5 + ctx.cur_rank},
        {"temperature": 3.0, "seed": 5 + ctx.cur_rank},
        {"temperature": 3.0, "seed": 6 + ctx.cur_rank},
        {"temperature": 3.0, "top_p": 1e-6, "seed": 5},
        {},
        {"temperature": 3.0},  # each rank's own seed, of which rank 0's counts
    ]
    results = [engine.generate(models.prompt(), 4, **each) for each in options]
    for _ in range(2):
        torch.manual_seed(100 + ctx.cur_rank)
        results += [engine.generate(models.prompt(), 4, temperature=3.0) for _ in range(2)]
    return results


@on(2)
def test_samples_agree_follow_rank_0s_seed_and_top_p(world_size: int) -> None:
    results = run_ranks(world_size, sampled_body)
    assert all(result == results[0] for result in results)
    first, again, other, likeliest, greedy, _, drawn, next_drawn, *same = results[0]
    assert drawn != next_drawn and same == [drawn, next_drawn], "without a seed, torch's counts"
    assert first == again and first != other and first != greedy
    assert likeliest == greedy, "among the likeliest that hold 1e-6 there is one"


def refused_body(ctx) -> None:
    model = models.build("plain")
    layers.parallelize(model, ctx)
    engine = layers.Engine(model, ctx, batch_size=2, max_length=8)
    for arguments, words in [
        (([[1]] * 3, 2), "prompts has 3 rows"),
        (([[1], []], 2), "none empty"),
        (([[1, 2, 3, 4, 5]], 4), "need 9: expected at most 8"),
        (([[1]], 0), "max_new_tokens is 0"),
        (([[1]], True), "max_new_tokens is True"),
        (([1, 2], 2), "prompts are a list: expected integers"),
        ((torch.ones(2), 2), "prompts are a Tensor: expected integers"),
        (([[1.5]], 2), "prompts are a list: expected integers"),
        ((["text"], 2), "prompts are a list: expected integers"),
        (({"input_ids": [[1]]}, 2), "prompts are a dict: expected integers"),
        (([[1, 120]], 2), "prompts have tokens from 1 to 120: expected 0 to 119"),
        (([[-1]], 2), "prompts have tokens from -1 to -1"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            engine.generate(*arguments)
    for options, words in [
        ({"top_p": 0}, "top_p"),
        ({"temperature": "hot"}, "temperature, top_p are 'hot'"),
        ({"temperature": 1.0, "seed": True}, "seed is True: expected None or an integer"),
        ({"temperature": 1.0, "seed": "seven"}, "seed is 'seven' on rank 0"),
        ({"temperature": 1.0, "seed": 1 << 70}, "seed is 11"),
        ({"stop": 1.0}, "stop is 1.0"),
        ({"stop": ["."]}, r"stop is \['.'\]"),
        ({"stop": True}, "stop is True"),
        ({"stop": b"7"}, "stop is b'7'"),
        ({"stop": [7, 120]}, "stop has 120: expected tokens from 0 to 119, the vocabulary"),
        ({"stop": -1}, "stop has -1"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            engine.generate([[1]], 2, **options)
    for options, words in [
        ({"cache": 7}, "cache is a int"),
        ({"max_length": 9, "cache": engine.cache}, "cache is a StaticCache"),
        ({"compile": 7}, "compile is 7"),
        ({"compile": ""}, "compile is '': expected a bool, or the name"),
        ({"batch_size": True}, "batch_size is True"),
        (
            {"max_length": 10**9, "batch_size": 10**6},
            r"are 1000000, 1000000000, for which a cache takes \d+ GiB: expected",
        ),
        ({"batch_size": 2**80}, "for which a cache takes"),
        ({"graphs": "no"}, "graphs is 'no': expected None or a bool"),
        ({"step_attention": "no"}, "step_attention is 'no': expected None or a bool"),
        ({"prompt_graphs": True}, "prompt_graphs is True: expected 0 or a positive integer"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            layers.Engine(model, ctx, **{"batch_size": 2, "max_length": 8, **options})
    two = torch.ones(2, 3, dtype=torch.long, device=ctx.device)
    for call, words in [
        (lambda: engine.prefill([[1], [2]]), "prompts is a list: expected a tensor of torch.int64"),
        (lambda: engine.prefill(two[:1]), r"prompts is \[1, 3\] of torch.int64 .* expected \[2, 1 to 8\]"),
        (lambda: engine.prefill(two[0]), r"prompts is \[3\]"),
        (lambda: engine.prefill(two.repeat(1, 3)), r"prompts is \[2, 9\]"),
        (lambda: engine.read(two.float()), "prompts is .* of torch.float32"),
        (lambda: engine.prefill(two, two[:, :2] > 0), r"mask is \[2, 2\] .* expected \[2, 3\] of torch.bool"),
        (lambda: engine.prefill(two, two.float()), "mask is .* of torch.float32"),
        (lambda: engine.read(two, two.cumsum(1) < 3), "mask is False at the end of a row: expected padding in front"),
        (lambda: engine.prefill(two * 120), "prompts have tokens from 120 to 120: expected 0 to 119, the vocabulary"),
        (lambda: engine.read(-two), "prompts have tokens from -1 to -1"),
        (lambda: engine.decode(-1), "steps is -1"),
        (lambda: engine.decode("2"), "steps is '2'"),
        (lambda: engine.decode(), "the engine holds no prompts: expected prefill"),
        (lambda: engine.step(), "the engine holds no prompts"),
        (lambda: engine.accept(two), "the engine holds no prompts"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            call()
    for read in (engine.prefill, engine.read):
        first = read(two)
        for logits, words in [
            (5, "logits is a int: expected a tensor"),
            (first[:, :-1], r"logits is \[2, 119\] on .*: expected \[2, 120\] on"),
            (first[:1], r"logits is \[1, 120\]"),
            (first[:, None], r"logits is \[2, 1, 120\]"),
            (first.long(), "logits is torch.strided of torch.int64: expected a strided tensor of floats"),
            (first.to_sparse(), "logits is torch.sparse_coo of"),
            (first.to("meta"), f"logits is .* on meta: expected .* on {ctx.device}"),
        ]:
            with pytest.raises(ArgumentError, match=words):
                engine.accept(logits)
        assert not engine.count.item(), "nothing was accepted"
        for call in (engine.prefill, engine.read):
            with pytest.raises(ArgumentError, match=r"the engine's cache still holds earlier prompts: expected reset"):
                call(two)
        engine.reset()
        with pytest.raises(ArgumentError, match="the engine holds no prompts"):
            engine.decode()
        assert torch.equal(read(two), first)
        engine.accept(first)
        with pytest.raises(ArgumentError, match="steps is 6 after 3 tokens: expected at most 5, max_length is 8"):
            engine.decode(6)
        engine.decode(5)
        for past_the_end in (engine.step, engine.decode):
            with pytest.raises(ArgumentError, match="steps is 1 after 8 tokens: expected at most 0"):
                past_the_end()
        assert engine.count.item() == 6, "of what was refused nothing was made"
        engine.reset()
    with pytest.raises(ArgumentError, match=f"model has parameters on meta: expected all on {ctx.device}"):
        layers.Engine(models.build("plain").to("meta"), ctx)
    with pytest.raises(ArgumentError, match="batch_size is 0"):
        layers.Engine(model, ctx, 0)
    if not ON_GPU:
        with pytest.raises(ArgumentError, match="graphs is True"):
            layers.Engine(model, ctx, graphs=True)
    whole = engine.generate([[1]], 7)
    assert len(whole[0]) == 7
    with pytest.raises(ArgumentError, match="cache is a StaticCache"):  # filled, by two rows
        layers.Engine(model, ctx, 1, 8, cache=engine.cache)
    ended = engine.generate([[1]], 7, stop=torch.tensor(whole[0][2:3]))[0]
    assert engine.generate([[1]], 7, stop=torch.tensor(whole[0][2]))[0] == ended, "so does one without a dimension"
    assert ended == whole[0][: whole[0].index(ended[-1]) + 1] and ended[-1] == whole[0][2], "a tensor of tokens stops"
    assert engine.generate([[1]], 7, temperature=1e-40) == whole, "logits that overflow would draw token 0"
    assert len(engine.generate([[1]], 7, temperature=1e300)[0]) == 7


def counting_body(ctx) -> None:
    text = {**models.PLAIN, "model_type": "gemma", "pad_token_id": 0}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 8, "patch_size": 4}  # fmt: skip
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=vision, projection_dim=36)
    torch.manual_seed(5)
    model = transformers.PaliGemmaForConditionalGeneration(config)
    layers.parallelize(model, ctx)
    with pytest.raises(ArgumentError, match="PaliGemmaForConditionalGeneration, whose positions do not begin at 0"):
        layers.Engine(model, ctx)


def table_body(ctx) -> None:
    """Check that a model with a position table has a limited length, and a model that computes positions has none."""
    sizes = dict(vocab_size=96, hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=4)
    opt = transformers.OPTForCausalLM(
        transformers.OPTConfig(**sizes, word_embed_proj_dim=32, max_position_embeddings=9)
    )
    opt.to(ctx.device)
    with pytest.raises(ArgumentError, match="max_length is 10: expected at most 9, the positions that OPTForCausalLM"):
        layers.Engine(opt, ctx, 1, 10)
    assert len(layers.Engine(opt, ctx, 1, 9).generate([[5, 6]], 7)[0]) == 7
    llama = models.build("plain").to(ctx.device)
    layers.Engine(llama, ctx, 1, llama.config.max_position_embeddings + 1)


@on(2)
def test_positions_that_are_looked_up_end(world_size: int) -> None:
    run_ranks(world_size, table_body)


@on(3)
def test_a_model_that_counts_positions_from_one_is_refused(world_size: int) -> None:
    run_ranks(world_size, counting_body)


@on(2)
def test_bad_arguments(world_size: int) -> None:
    run_ranks(world_size, refused_body)


def positions_body(ctx) -> None:
    """Rotary embeddings do not see a shift of all positions, so what the engine counts is looked at."""
    model = models.build("plain")
    layers.parallelize(model, ctx)
    engine = layers.Engine(model, ctx, 2, 16)
    mask = torch.tensor([[False, False, True, True], [True] * 4], device=ctx.device)
    for read in (engine.prefill, engine.read):
        engine.reset()
        engine.accept(read(torch.ones(2, 4, dtype=torch.long, device=ctx.device), mask))
        assert engine.positions.tolist() == [[2], [4]] and engine.filled.item() == 4
        engine.decode(3)
        assert engine.positions.tolist() == [[5], [7]] and engine.filled.item() == 7


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_padding_has_no_positions(world_size: int) -> None:
    run_ranks(world_size, positions_body)


def shared_cache_body(ctx) -> None:
    model, prompt = models.build("plain"), models.prompt().to(ctx.device)
    layers.parallelize(model, ctx)
    first = layers.Engine(model, ctx, 2, 16)
    other = layers.Engine(model, ctx, 2, 16, cache=first.cache)
    first.accept(first.prefill(prompt))
    with pytest.raises(ArgumentError, match="the engine's cache still holds earlier prompts"):
        other.prefill(prompt.flip(0))
    tokens = other.generate(prompt.flip(0), 3)
    for call in (first.decode, first.step, lambda: first.accept(first._shape and torch.zeros(first._shape))):
        with pytest.raises(ArgumentError, match="another engine has overwritten the shared cache: expected reset"):
            call()
    assert first.generate(prompt.flip(0), 3) == tokens
    for name, dtype in (("kv1", torch.float32), ("plain", torch.float16)):
        unlike = models.build(name).to(dtype)
        layers.parallelize(unlike, ctx)
        with pytest.raises(ArgumentError, match="cache is a StaticCache: expected that .* with an equal model"):
            layers.Engine(unlike, ctx, 2, 16, cache=first.cache)
    encoder = transformers.T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=50)
    with pytest.raises(ArgumentError, match="model is a T5ForConditionalGeneration: expected a decoder"):
        layers.Engine(transformers.T5ForConditionalGeneration(encoder).to(ctx.device), ctx)


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_a_shared_cache_holds_the_batch_of_one_engine(world_size: int) -> None:
    run_ranks(world_size, shared_cache_body)


def inference_body(ctx) -> None:
    model, prompt = models.build("plain"), models.prompt().to(ctx.device)
    layers.parallelize(model, ctx)
    expected = layers.Engine(model, ctx, 2, 16).generate(prompt, 4)
    with torch.inference_mode():
        engine = layers.Engine(model, ctx, 2, 16)
    for context in (nullcontext, torch.inference_mode, nullcontext, torch.inference_mode):
        with context():
            assert engine.generate(prompt.clone(), 4) == expected
            engine.reset()
            engine.accept(engine.read(prompt.clone()))
            engine.decode(2)


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_an_engine_serves_in_and_out_of_inference_mode(world_size: int) -> None:
    run_ranks(world_size, inference_body)
