"""Attention to the tokens that an indexer chooses, in an engine: its keys are a part of the cache."""

from __future__ import annotations

from iris.errors import ArgumentError
import layers
from layers.serving import attention
from layers.serving.cache import drop_last_tokens
import pytest
import torch

from tests.coverage_of_models import tiny
from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import engine_steps as steps

transformers = pytest.importorskip("transformers")
pytestmark = both
two_ranks = pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS, scope="session")


def engine_body(ctx, model_type: str) -> list[steps.Batch]:
    return steps.served(ctx, tiny.build(model_type))


@two_ranks
@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "deepseek_v32"])
@pytest.mark.some(1, on_gpus=2)
def test_an_engines_steps_are_the_unsplit_models(world_size: int, model_type: str) -> None:
    assert tiny.configuration(model_type).index_topk < steps.prompts("cpu")[0].shape[1], "some tokens are left out"
    steps.judge(run_ranks(world_size, engine_body, model_type), tiny.build(model_type), tiny.build(model_type))


def refused_body(ctx) -> None:
    model = tiny.build("deepseek_v32")
    layers.parallelize(model, ctx)
    with pytest.raises(ArgumentError, match="layer 0 of DeepseekV32ForCausalLM keeps a StaticIndexedLayer: expected F"):
        layers.Engine(model, ctx, compile=True)


@two_ranks
def test_compiled_layers_are_refused(world_size: int) -> None:
    run_ranks(world_size, refused_body)


@pytest.mark.skipif(UNDER_TORCHRUN, reason="has no ranks")
def test_a_model_that_asks_for_sdpa_among_other_names_keeps_it() -> None:
    """Under another name than one of `("eager", "sdpa")` it would attend to all tokens."""
    model = tiny.build("deepseek_v32")
    assert model.config._attn_implementation == "sdpa"
    assert not attention.use(model) and model.config._attn_implementation == "sdpa"
    plain = tiny.build("llama")
    assert attention.use(plain) and plain.config._attn_implementation == attention.NAME


@pytest.mark.skipif(UNDER_TORCHRUN, reason="has no ranks")
def test_what_is_forgotten_is_so_by_the_indexer_too() -> None:
    cache = transformers.StaticCache(tiny.configuration("deepseek_v32"), 16)
    for index in range(len(cache.layers)):
        cache.update(torch.ones(1, 1, 9, 8), torch.ones(1, 1, 9, 8), index)
        cache.update_indexer(torch.ones(1, 9, 16), index)
    drop_last_tokens(cache, torch.tensor([3]))
    assert [int(layer.cumulative_length) for layer in cache.layers] == [6] * len(cache.layers)
    assert [int(layer.indexer_cumulative_length) for layer in cache.layers] == [6] * len(cache.layers)
