"""Ranks that are given other tokens, masks or options: an error before anything runs, in a forward in debug mode."""

from __future__ import annotations

from functools import partial

import iris
from iris.errors import ArgumentError
import layers
import pytest
import torch

from tests.layers import models
from tests.processes import run_fresh

transformers = pytest.importorskip("transformers")


def differing(rank: int, ctx) -> list[tuple]:
    """List calls whose arguments differ on rank 1, with the expected messages."""
    model = models.build("plain")
    layers.parallelize(model, ctx)
    engine = layers.Engine(model, ctx, 2, 16)
    ids, mask = models.prompt(), torch.ones(2, 7, dtype=torch.long)
    other, shorter = ids.clone(), mask.clone()
    if rank:
        other[1, 3] += 1
        shorter[0, 0] = 0
    warmer = transformers.GenerationConfig(max_new_tokens=2, do_sample=True, temperature=1.0 + rank)
    options = {"max_new_tokens": 2, "do_sample": False}

    def after(call) -> None:
        engine.reset()
        logits = engine.prefill(ids)
        call(logits)

    return [
        (partial(model.generate, other, **options), "generate: inputs differs"),
        (partial(model.generate, input_ids=other, **options), "generate: input_ids differs"),
        (partial(model.generate, ids, attention_mask=shorter, **options), "generate: attention_mask differs"),
        (partial(model.generate, ids, generation_config=warmer), "generate: generation_config.temperature differs"),
        (partial(model.generate, ids, do_sample=True, temperature=1.0 + rank), "generate: temperature differs"),
        (partial(model.generate, ids, bad_words_ids=[[5 + rank]], **options), "generate: bad_words_ids differs"),
        (partial(model, other), "LlamaForCausalLM's forward: argument 0 differs"),
        (partial(model, ids, attention_mask=shorter), "forward: attention_mask differs"),
        (partial(model, ids, position_ids=shorter.cumsum(-1)), "forward: position_ids differs"),
        (partial(model, ids, logits_to_keep=1 + rank), "forward: logits_to_keep differs"),
        (partial(model, inputs_embeds=torch.randn(1, 3, 36) + rank), "forward: inputs_embeds differs"),
        (partial(model.model, other), "model.embed_tokens: input differs"),
        (partial(layers.Engine, model, ctx, 2, 8 + rank), "Engine: max_length differs"),
        (partial(engine.generate, other, 2), "Engine.generate: tokens differs"),
        (partial(engine.generate, ids, 2, top_p=0.5 + 0.1 * rank, temperature=1.0), "Engine.generate: top_p differs"),
        (partial(engine.read, other), "Engine: prompts differs"),
        (partial(engine.prefill, ids, shorter), "Engine: mask differs"),
        (partial(after, lambda logits: engine.accept(logits + rank)), "Engine.accept: logits differs"),
        (partial(after, lambda logits: (engine.accept(logits), engine.decode(1 + rank))), "Engine.decode: steps diff"),
    ]


def body(rank: int, world_size: int) -> list[str]:
    wrong = []
    with iris.iris(1 << 26) as ctx:
        for call, words in differing(rank, ctx):
            try:
                call()
            except ArgumentError as error:
                if words not in str(error) or "on rank 1" not in str(error):
                    wrong.append(f"{words}: {error}")
            else:
                wrong.append(f"{words}: nothing was raised")
    return wrong


def test_other_inputs_on_a_rank_are_found() -> None:
    for end in run_fresh(2, body, env={"IRIS_DEBUG": "1", "IRIS_TIMEOUT": "20"}, timeout=100):
        assert end.result == [], (end.result, end.traceback)


def changed_weights(rank: int, world_size: int) -> list[str]:
    messages = []
    with iris.iris(1 << 26) as ctx:
        for through_data in (False, True):
            model = models.build("bias")
            layers.parallelize(model, ctx)
            with torch.no_grad():
                for parameter in model.parameters():  # the same change on all ranks
                    parameter.mul_(1.05)
                model(models.prompt())
                norm = model.get_submodule("model.layers.1.input_layernorm").weight
                (norm.data if through_data else norm).add_(0.1 * rank)
                try:
                    model(models.prompt())
                except ArgumentError as error:
                    messages.append(str(error))
    return messages


def test_replicated_weights_that_part_ways_are_found() -> None:
    for end in run_fresh(2, changed_weights, env={"IRIS_DEBUG": "1", "IRIS_TIMEOUT": "20"}, timeout=100):
        assert len(end.result) == 2, (end.result, end.traceback)
        for message in end.result:
            assert "weights: model.layers.1.input_layernorm.weight differs" in message and "on rank 1" in message


def always(rank: int, ctx) -> list[tuple]:
    """Calls that compare their arguments without debug mode, too."""
    model = models.build("plain")
    layers.parallelize(model, ctx)
    engine = layers.Engine(model, ctx, 2, 16)
    ids, mask = models.prompt(), torch.ones(2, 7, dtype=torch.long)
    other, masked = ids.clone(), mask.clone()
    if rank:
        other[1, 3] += 1
        masked[0, 0] = 0
    longer = models.prompt()[:, : 7 - rank]
    embedded = model.get_input_embeddings()(ids).detach()
    own = transformers.GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=5 + rank)
    options = {"max_new_tokens": 2, "do_sample": False}
    return [
        (partial(model.generate, other, **options), "generate: inputs differs"),
        (partial(model.generate, longer, **options), "generate: inputs differs"),
        (partial(model.generate, ids, attention_mask=masked, **options), "generate: attention_mask differs"),
        (partial(model.generate, inputs_embeds=embedded + rank, **options), "generate: inputs_embeds differs"),
        (partial(model.generate, ids, max_new_tokens=2 + rank), "generate: max_new_tokens differs"),
        (partial(model.generate, ids, **options, eos_token_id=5 + rank), "generate: eos_token_id differs"),
        (partial(model.generate, ids, generation_config=own), "generate: generation_config.eos_token_id differs"),
        (partial(model.generate, ids, do_sample=True, top_k=5 + rank), "generate: top_k differs"),
        (partial(model.generate, ids, **options, **({"use_cache": False} if rank else {})), "generate: use_cache diff"),
        (partial(engine.generate, other, 2), "Engine.generate: tokens differs"),
        (partial(engine.generate, longer, 2), "Engine.generate: lengths differs"),
        (partial(engine.generate, ids, 2 + rank), "Engine.generate: max_new_tokens differs"),
        (partial(engine.generate, ids, 2, temperature=1.0 + rank), "Engine.generate: temperature differs"),
        (partial(engine.generate, ids, 2, stop=5 + rank), "Engine.generate: stop differs"),
        (partial((model, engine)[rank].generate, ids, max_new_tokens=2), "the call differs"),
    ]


def always_body(rank: int, world_size: int) -> list[str]:
    wrong = []
    with iris.iris(1 << 26) as ctx:
        for call, words in always(rank, ctx):
            try:
                call()
            except ArgumentError as error:
                if words not in str(error) or "on rank 0" not in str(error) or "on rank 1" not in str(error):
                    wrong.append(f"{words}: {error}")
            else:
                wrong.append(f"{words}: nothing was raised")
        model = models.build("plain")
        layers.parallelize(model, ctx)
        model.generation_config.eos_token_id = 5 + rank
        with pytest.raises(ArgumentError, match=r"model.generation_config.eos_token_id differs between ranks: it is 5"):
            model.generate(models.prompt(), max_new_tokens=1)
        model.generation_config.eos_token_id = None
        # what may differ: seeds, of which rank 0's counts, and what is a process's own
        torch.manual_seed(rank)
        private = {"streamer": Ignoring() if rank else None, "tokenizer": object()}
        drawn = model.generate(models.prompt(1), do_sample=True, max_new_tokens=3, **private)
        # functions, which cannot be compared, decide differently
        with pytest.raises(
            ArgumentError, match=r"the end of generate: tokens differs between ranks: it is int64\[1, 9\]"
        ):
            model.generate(models.prompt(1), prefix_allowed_tokens_fn=lambda *_: [3 + rank], max_new_tokens=2)
        if rank:
            model.to(torch.bfloat16)
        with pytest.raises(ArgumentError, match=r"generate: model.dtype differs between ranks: it is torch.float32 on"):
            model.generate(models.prompt(1), max_new_tokens=2)
        model.to(torch.float32)
        seeded = layers.Engine(model, ctx, 2, 16).generate(models.prompt(), 3, temperature=2.0, seed=rank)
    return [*wrong, str(drawn.tolist()), str(seeded)]


class Ignoring:
    def put(self, value) -> None:
        pass

    def end(self) -> None:
        pass


def test_generate_always_compares_what_ranks_are_given() -> None:
    """In processes started apart, each with its own seed of hashes."""
    first, second = run_fresh(2, always_body, env={"IRIS_DEBUG": "0", "IRIS_TIMEOUT": "20"}, timeout=100)
    assert first.exitcode == second.exitcode == 0, (first.traceback, second.traceback)
    assert len(first.result) == 2 and first.result == second.result, (first.result, second.result)


def silent_body(rank: int, world_size: int) -> None:
    with iris.iris(1 << 26) as ctx:
        model = models.build("plain")
        layers.parallelize(model, ctx)
        assert not model._forward_pre_hooks
        assert model((models.prompt() + rank) % 100).logits.shape == (2, 7, 120)


def test_nothing_is_compared_without_debug_mode() -> None:
    for end in run_fresh(2, silent_body, timeout=100):
        assert end.exitcode == 0, end.traceback
