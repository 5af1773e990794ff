"""The engine where a rotary embedding changes with the length: the tokens that the unsplit model's generate() gives."""

from __future__ import annotations

from typing import Any

import layers
from layers.serving.rope_switch import switch_length
import pytest
import torch

from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import models

transformers = pytest.importorskip("transformers")
pytestmark = both

ORIGINAL, NEW = 10, 9  # prompts of 7 tokens pass the former
_FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 4.0, 9.0, 20.0]}
_LONG: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 6.4, **_FACTORS}
_SIZES = {**models.PLAIN, "hidden_size": 32, "num_key_value_heads": 2}
_PHI = {"original_max_position_embeddings": ORIGINAL, "head_dim": 8}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3", {**_PHI, "rope_parameters": {**_LONG, "original_max_position_embeddings": ORIGINAL}}),
    "phimoe": (
        "Phimoe",
        {
            **_PHI,
            "num_local_experts": 4,
            "intermediate_size": 24,
            "rope_parameters": {
                **_LONG,
                "original_max_position_embeddings": ORIGINAL,
                "short_mscale": 1.0,
                "long_mscale": 1.7,
            },
        },
    ),
    # whose generate() keeps the cache
    "longrope": ("Llama", {"rope_parameters": {**_LONG, "original_max_position_embeddings": ORIGINAL}}),
    "dynamic": (
        "Llama",
        {
            "max_position_embeddings": ORIGINAL,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
}


def build(name: str):
    architecture, changes = CONFIGS[name]
    config = getattr(transformers, f"{architecture}Config")(**{**_SIZES, **changes})
    transformers.logging.set_verbosity_error()
    state = torch.get_rng_state()
    torch.manual_seed(12)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    torch.set_rng_state(state)
    return model


def expected(name: str, padded: bool) -> list[list[int]]:
    """Tokens of the unsplit model: of whole forwards where `generate` drops the cache, which not every release does."""
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, : 3 * padded] = 0
    model, tokens = build(name), models.prompt()
    if switch_length(model) is None:
        return model.generate(tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False)[:, 7:].tolist()
    for _ in range(NEW):
        seen = torch.nn.functional.pad(mask, (0, tokens.shape[1] - 7), value=1)
        positions = (seen.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(input_ids=tokens, attention_mask=seen, position_ids=positions, use_cache=False).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    return tokens[:, 7:].tolist()


def body(ctx, name: str) -> list:
    model = build(name)
    layers.parallelize(model, ctx)
    prompts = models.prompt().tolist()
    engine = layers.Engine(model, ctx, 2, 7 + NEW)
    short = [prompts[0], prompts[1][3:]]
    actual = [engine.generate(prompts, NEW), engine.generate(short, NEW), engine.generate(prompts, NEW)]
    if name == "phi3":
        engine.reset()
        engine.accept(engine.read(models.prompt().to(ctx.device)))
        for _ in range(NEW - 1):
            engine.step()
        actual.append(engine.output[:, :NEW].tolist())
        compiled = layers.Engine(model, ctx, 2, 7 + NEW, compile="eager")
        actual.append(compiled.generate(prompts, NEW))
    return actual


@pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.some(2, on_gpus=len(CONFIGS))
def test_tokens_past_the_length_are_those_of_generate(world_size: int, name: str) -> None:
    whole, padded = expected(name, False), expected(name, True)
    for plain, shorter, *again in run_ranks(world_size, body, name):
        assert plain == whole
        assert shorter == padded
        assert again == [whole] * len(again)


def test_only_models_that_drop_their_cache_read_again() -> None:
    assert {name: switch_length(build(name)) for name in CONFIGS} == {
        "phi3": ORIGINAL, "phimoe": ORIGINAL, "longrope": None, "dynamic": None,
    }  # fmt: skip
    fixed = transformers.Phi3Config(**{**_SIZES, "original_max_position_embeddings": ORIGINAL})
    assert switch_length(transformers.Phi3ForCausalLM(fixed)) is None, "whose embedding does not change"
