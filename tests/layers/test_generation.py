"""transformers' ways to generate, on a split model: the unsplit one's tokens on all ranks, or a typed error."""

from __future__ import annotations

import builtins
import copy
from pathlib import Path
import tempfile

from iris.errors import ArgumentError
import layers
import pytest
import torch

from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import models

transformers = pytest.importorskip("transformers")
pytestmark = [*both, pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])]

SAMPLED = {"do_sample": True, "temperature": 3.0, "top_k": 0}


def by_hand(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
    """A decoding loop of a user's: one sampled token."""
    logits = model(input_ids).logits[:, -1]
    return torch.cat([input_ids, torch.multinomial(logits.softmax(-1), 1)], -1)


WAYS = {
    "sampled": SAMPLED,
    "sampled, prompts on the CPU": {"on_cpu": True, **SAMPLED},  # whose generator then draws
    "beams, sampled": {"num_beams": 2, "rows": 1, **SAMPLED},
    "prompt lookup, sampled": {"prompt_lookup_num_tokens": 2, "rows": 1, **SAMPLED},
    "assistant, sampled": {"assistant": "whole", "rows": 1, **SAMPLED},
    "split assistant": {"assistant": "split", "rows": 1},
    "early exit": {"assistant_early_exit": 1, "rows": 1},
    "static, chunked": {"cache_implementation": "static", "prefill_chunk_size": 4},
    "sliding": {"cache_implementation": "sliding_window"},
    "custom": {"custom_generate": by_hand},
}


def tokens_by(model, way: str, assistant, device) -> torch.Tensor:
    options = dict(WAYS[way])
    rows, device = options.pop("rows", 2), "cpu" if options.pop("on_cpu", False) else device
    if options.pop("assistant", None):
        options["assistant_model"] = assistant
    for each in filter(None, (model, assistant)):
        each.generation_config.num_assistant_tokens = 2
    output = model.generate(models.prompt(rows).to(device), max_new_tokens=3, **{"do_sample": False, **options})
    return output.cpu()


def ways_body(ctx) -> dict[str, torch.Tensor]:
    model, assistants = models.build("kv2"), {"whole": models.build("plain").to(ctx.device)}
    assistants["split"] = models.build("plain")
    for each in (model, assistants["split"]):
        layers.parallelize(each, ctx)
    actual = {}
    for index, (way, options) in enumerate(WAYS.items()):
        torch.manual_seed(100 * ctx.cur_rank + index)
        actual[way] = tokens_by(model, way, assistants.get(options.get("assistant")), ctx.device)
    return actual


def test_all_ranks_draw_the_unsplit_models_tokens(world_size: int) -> None:
    first, *others = run_ranks(world_size, ways_body)
    for other in others:
        differing = [way for way in WAYS if not torch.equal(first[way], other[way])]
        assert not differing, "other tokens on another rank"
    model, assistant = models.build("kv2"), models.build("plain")
    for index, way in enumerate(WAYS):
        if ON_GPU and WAYS[way].get("do_sample"):
            continue  # a GPU draws other numbers from the seed
        torch.manual_seed(index)  # rank 0's
        if way != "custom":
            assert torch.equal(first[way], tokens_by(model, way, assistant, "cpu")), way


def static_body(ctx) -> torch.Tensor:
    """With a plan that is not the model's own, by which transformers would count heads."""
    model = models.build("kv2")
    names = {f"self_attn.{name}_proj": "colwise" for name in "qkv"} | {"self_attn.o_proj": "rowwise"}
    layers.parallelize(model, ctx, plan={f"model.layers.*.{name}": style for name, style in names.items()})
    return tokens_by(model, "static, chunked", None, ctx.device)


def test_a_static_cache_has_the_heads_of_any_plan(world_size: int) -> None:
    expected = tokens_by(models.build("kv2"), "static, chunked", None, "cpu")
    assert all(torch.equal(output, expected) for output in run_ranks(world_size, static_body))


def refused_body(ctx) -> None:
    model, assistant = models.build("plain"), models.build("plain")
    for each in (model, assistant):
        layers.parallelize(each, ctx)
    ids = models.prompt().to(ctx.device)
    lists = ids.tolist()
    by_clock = models.build("plain").to(ctx.device)
    by_clock.generation_config.max_time = 5.0
    static = transformers.StaticCache(model.config, max_cache_len=8)
    batching = "use layers.Engine or generate"
    manager = transformers.generation.continuous_batching.ContinuousBatchingManager
    configs = model.generation_config, transformers.ContinuousBatchingConfig()
    beyond = ids.clone()
    beyond[1, 2] = 120
    for call, words in [
        (lambda: model.generate_batch(lists, max_new_tokens=3), f"^generate_batch cannot be called on .*{batching}"),
        (lambda: model.init_continuous_batching(), f"^init_continuous_batching cannot be called on .*{batching}"),
        (
            lambda: model.continuous_batching_context_manager().__enter__(),
            f"^continuous_batching_context_manager cannot be called on .*{batching}",
        ),
        (lambda: manager(model, *configs), batching),
        (
            lambda: model.generate(ids, max_new_tokens=3, cache_implementation="paged"),
            f"cache_implementation is 'paged': .*{batching}",
        ),
        (
            lambda: model.generate(ids, max_new_tokens=10**12, cache_implementation="static"),
            r"a static cache are 2, 10{11}7, for which a cache takes \d+ GiB: expected at most",
        ),
        (lambda: model.generate(ids, max_new_tokens=3, synced_gpus=True), "synced_gpus is True"),
        (lambda: model.generate(ids, assistant_model=by_clock), "max_time is 5"),
        (
            lambda: model.generate(ids, assistant_model=assistant, tokenizer=object(), assistant_tokenizer=object()),
            "assistant_model is split",
        ),
        (lambda: model.generate(beyond), "input_ids have tokens from .* to 120: expected 0 to 119, the vocabulary"),
        (lambda: model.generate(-ids - 1), "input_ids have tokens from -"),
        (lambda: model(beyond), "model.embed_tokens have tokens from .* to 120"),
        (lambda: model.model(-ids - 1), "model.embed_tokens have tokens from -"),
        (
            lambda: model.generate(ids, max_new_tokens=5, past_key_values=static),
            "prompts of 7 tokens become 12: expected at most 9, the cache has room for 8",
        ),
    ]:
        if ON_GPU and "embed_tokens" in words:
            continue  # the host does not wait for a forward's tokens
        with pytest.raises(ArgumentError, match=words):
            call()
    engine, last = layers.Engine(model, ctx, 2, 16), ctx.cur_rank == ctx.num_ranks - 1
    for call, words in [  # on one rank only
        (lambda: model.generate(ids, max_time=5.0 if last else None), "max_time is 5"),
        (lambda: model.generate(beyond if last else ids), "input_ids have tokens from"),
        (lambda: engine.generate(beyond if last else ids, 2), "prompts have tokens from"),
        (lambda: engine.generate(ids, -1 if last else 1), "max_new_tokens is -1"),
    ]:
        with pytest.raises(ArgumentError, match=words if last else f"rank {ctx.num_ranks - 1}: {words}"):
            call()
    requested: list[tuple] = []  # on stdin; transformers catches what is raised there
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(builtins, "input", lambda *words: requested.append(words) or "no")
        Path(folder, "custom_generate").mkdir()
        Path(folder, "custom_generate", "generate.py").touch()
        for options in ({"penalty_alpha": 0.6, "top_k": 4}, {"custom_generate": folder}):  # the first's is on the hub
            with pytest.raises(ValueError, match="trust_remote_code"):
                model.generate(ids, **options)
    assert not requested
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 10), "and goes on"


def test_what_would_part_the_ranks_or_end_a_gpu_is_refused_at_entry(world_size: int) -> None:
    run_ranks(world_size, refused_body)


def served_body(ctx) -> None:
    """What `transformers serve` does with its model: batching requests, or one after the other in a thread."""
    from transformers.cli.serving.utils import CBGenerateManager, GenerateManager

    model = models.build("plain")
    layers.parallelize(model, ctx)
    with pytest.raises(ArgumentError, match="use layers.Engine or generate"):
        CBGenerateManager().init_cb(model, model.generation_config)
    ids, options = models.prompt().to(ctx.device), {"max_new_tokens": 2, "do_sample": False}
    output = GenerateManager().submit(model.generate, ids, **options).result()
    assert torch.equal(output, model.generate(ids, **options))


def test_transformers_server_generates_in_a_thread_and_batches_nothing(world_size: int) -> None:
    pytest.importorskip("transformers.cli.serving.utils")
    run_ranks(world_size, served_body)


def positions_body(ctx) -> None:
    sizes = dict(vocab_size=96, n_embd=32, n_layer=1, n_head=4, n_positions=9)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=None))
    layers.parallelize(model.to(ctx.device), ctx, plan={"lm_head": "colwise_gather_output"}, partial=True)
    ids = models.prompt().to(ctx.device) % 96
    output = {"do_sample": False, "pad_token_id": 0}
    with pytest.raises(
        ArgumentError, match="prompts of 7 tokens become 10: expected at most 9, the positions that GPT"
    ):
        model.generate(ids, max_new_tokens=3, **output)
    mask = torch.ones_like(ids)
    mask[:, :1] = 0
    assert model.generate(ids, attention_mask=mask, max_new_tokens=3, **output).shape == (2, 10), "padding has none"
    if not ON_GPU:
        with pytest.raises(ArgumentError, match="inputs of transformer.wpe have tokens from 0 to 9: expected 0 to 8"):
            model(ids.repeat(1, 2)[:, :10])


def test_generation_ends_where_a_table_of_positions_does(world_size: int) -> None:
    run_ranks(world_size, positions_body)


def own_body(ctx) -> None:
    """As `from_pretrained(trust_remote_code=True)` leaves a model whose checkpoint brings its own generate()."""
    model = models.build("plain")
    model.generate = lambda ids, **_: ids + 1
    layers.parallelize(model, ctx)
    ids = models.prompt().to(ctx.device)
    assert torch.equal(model.generate(ids), ids + 1)
    assert torch.equal(copy.deepcopy(model).generate(ids), ids + 1)


def test_a_checkpoints_own_generate_is_kept(world_size: int) -> None:
    run_ranks(world_size, own_body)
