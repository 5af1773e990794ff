"""With IRIS_DEBUG=1, ranks that are given other tokens, masks or options learn it before anything runs."""

from __future__ import annotations

from functools import partial

import iris
from iris.errors import ArgumentError
import layers
from layers.digests import digest
import pytest
import torch

from tests.layers import models
from tests.processes import run_fresh

transformers = pytest.importorskip("transformers")


def differing(rank: int, ctx) -> list[tuple]:
    """Calls whose arguments are rank 1's own, and what is said of them."""
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

    def behind(call) -> None:
        engine.reset()
        logits = engine.prefill(ids)
        call(logits)

    return [
        (partial(model.generate, other, **options), "generate: inputs differs"),
        (partial(model.generate, input_ids=other, **options), "generate: input_ids differs"),
        (partial(model.generate, ids, attention_mask=shorter, **options), "generate: attention_mask differs"),
        (partial(model.generate, ids, generation_config=warmer), "generate: generation_config differs"),
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
        (partial(behind, lambda logits: engine.accept(logits + rank)), "Engine.accept: logits differs"),
        (partial(behind, lambda logits: (engine.accept(logits), engine.decode(1 + rank))), "Engine.decode: steps diff"),
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


def silent_body(rank: int, world_size: int) -> None:
    with iris.iris(1 << 26) as ctx:
        model = models.build("plain")
        layers.parallelize(model, ctx)
        assert not model._forward_pre_hooks
        assert model((models.prompt() + rank) % 100).logits.shape == (2, 7, 120)


def test_nothing_is_compared_without_debug_mode() -> None:
    for end in run_fresh(2, silent_body, timeout=100):
        assert end.exitcode == 0, end.traceback


def test_digests_tell_values_apart() -> None:
    config = transformers.GenerationConfig
    processors = [transformers.LogitsProcessorList([transformers.TopKLogitsWarper(k)]) for k in (3, 4)]
    values = [
        torch.zeros(4), torch.zeros(2, 2), torch.zeros(4).bfloat16(), torch.tensor([0.0, 0, 0, -0.0]),
        torch.ones(4)[::2], 1, 1.0, True, "1", [1], (1,), {"a": 1}, {"a": 2}, None, [[5, 6]], [[5], [6]],
        config(top_p=0.5), config(top_p=0.6), *processors, torch.nn.Linear(2, 2), list(range(500)), list(range(1, 501)),
    ]  # fmt: skip
    found = [digest(each) for each in values]
    assert len(set(found)) == len(values) and found == [digest(each) for each in values]
    assert len(found[-1]) < 200
