"""The engine on mixtures, hybrids and others of the tiny models: the unsplit logits, or a refusal with a remedy.
`python -m tests.coverage_of_models --engine` tries all types.
"""

from __future__ import annotations

from typing import Any

from iris.errors import ArgumentError
import layers
import pytest
import torch

from tests.coverage_of_models import engine, tiny
from tests.harness import UNDER_TORCHRUN, run_ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own")

MIXTURES = ["gpt_oss", "qwen3_moe", "mixtral", "deepseek_v3"]
# Whose layers keep a state: gated delta nets, state spaces beside attention, short convolutions, delta attention.
HYBRIDS = ["qwen3_next", "falcon_h1", "bamba", "nemotron_h", "lfm2_moe", "jamba", "kimi_linear", "mamba"]
INDEXED = ["deepseek_v32", "glm_moe_dsa"]  # whose attentions choose the tokens that they attend to
BIASED = ["bloom", "mpt", "falcon"]
# Other tests serve qwen3_next (below) and glm_moe_dsa (test_indexed_attention.py).
QUICK = ["lfm2_moe", "gpt_oss"]
REFUSED = {
    "gpt_neo": "GPTNeoForCausalLM, which has an attention to the latest tokens, .* use its generate()",
    "bert": "BertLMHeadModel, whose tokens attend to later ones: expected is_decoder=True .*, or use its gen",
    "minimax": "MiniMaxForCausalLM, which keeps its own cache: use its generate()",
    "deepseek_v4": "DeepseekV4ForCausalLM has layers of 'heavily_compressed_attention', .* use the model's generate()",
    "xlm": "XLMWithLMHeadModel, which cannot be run over a static cache .*: use its generate()",
    "openai-gpt": "OpenAIGPTLMHeadModel stores nothing in the cache that it receives: use its generate()",
}
ONE_LENGTH = {
    "recurrent_gemma": "RecurrentGemmaForCausalLM takes padding into its state: expected prompts of one length",
    "bart": "BartForCausalLM counts positions by the cache, padding included: expected prompts of one length",
}


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK))
        for name in [*HYBRIDS, *MIXTURES, *INDEXED, *BIASED]
    ],
)
def test_the_engine_gives_the_unsplit_models_logits(model_type: str) -> None:
    outcomes = run_ranks(2, engine.served_body, model_type, timeout=400)
    assert engine.judge(model_type, outcomes) == "yes"


@pytest.mark.parametrize("model_type", REFUSED)
@pytest.mark.some(2)
def test_a_type_that_an_engine_cannot_serve_is_refused(model_type: str) -> None:
    for outcome in run_ranks(2, engine.served_body, model_type, timeout=400):
        with pytest.raises(ArgumentError, match=REFUSED[model_type].replace("()", r"\(\)")):
            raise ArgumentError(outcome.refusals["of one length"])
        assert not outcome.answers


@pytest.mark.parametrize("model_type", ONE_LENGTH)
@pytest.mark.some(1)
def test_padding_is_refused_where_the_model_does_not_pass_over_it(model_type: str) -> None:
    outcomes = run_ranks(2, engine.served_body, model_type, timeout=400)
    assert engine.judge(model_type, outcomes) == "one length"
    assert all(ONE_LENGTH[model_type] in each.refusals["padded"] for each in outcomes)


BIASED_STATES = {
    "mamba2": {"use_bias": True},
    "bamba": {"mamba_proj_bias": True},
    "lfm2": {"conv_bias": True, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
}


def biased_body(ctx: Any, model_type: str) -> None:
    model = tiny.build(model_type, **BIASED_STATES[model_type])
    layers.parallelize(model, ctx)
    engine = layers.Engine(model, ctx, batch_size=2, max_length=16)
    with pytest.raises(ArgumentError, match="takes padding into its state, for .*in_proj has a bias: expected prompts"):
        engine.generate([[5, 6, 7], [8, 9]], 2)
    assert len(engine.generate([[5, 6, 7], [8, 9, 10]], 2)) == 2


@pytest.mark.parametrize("model_type", BIASED_STATES)
@pytest.mark.some(1)
def test_padding_is_refused_where_a_bias_would_bring_it_into_a_state(model_type: str) -> None:
    run_ranks(2, biased_body, model_type)


# An index that is None in MLPs, a cache that is no keyword, layers that return tuples.
COMPILED = {"hunyuan_v1_dense": {}, "gpt2": {}, "falcon": {}, "falcon, with ALiBi": {"alibi": True}}


def compiled_body(ctx: Any, case: str) -> tuple[list, list]:
    model = tiny.build(case.partition(",")[0], **COMPILED[case])
    layers.parallelize(model, ctx)
    rows = [engine.prompts((9, 9)), *map(engine.prompts, engine.LENGTHS.values())]
    eager, compiled = (layers.Engine(model, ctx, 2, 16, compile=each) for each in (False, "eager"))
    actual = []
    for each in (eager, compiled):
        logits, result = engine._answer(each, rows[2])[1], [each.generate(prompts, 4) for prompts in rows]
        actual.append((logits, result))
    (expected, words), (logits, others) = actual
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    return words, others


@pytest.mark.parametrize("case", COMPILED)
@pytest.mark.some(1)
def test_layers_are_compiled_however_they_are_given_the_cache_and_return_hidden_states(case: str) -> None:
    for words, others in run_ranks(2, compiled_body, case, timeout=400):
        assert words == others


def hybrid_body(ctx: Any) -> list:
    model = tiny.build("qwen3_next")
    layers.parallelize(model, ctx)
    with pytest.raises(ArgumentError, match=r"compile is 'eager', but layer 0 of Qwen3NextForCausalLM keeps a Linear"):
        layers.Engine(model, ctx, 2, 16, compile="eager")
    first = layers.Engine(model, ctx, 2, 16)
    second = layers.Engine(model, ctx, 2, 16, cache=first.cache)
    rows, others = (engine.prompts(lengths) for lengths in engine.LENGTHS.values())
    actual = [
        first.generate(rows, 4),
        second.generate(others, 4),
        first.generate(rows[::-1], 4),
        first.generate(rows, 4),
    ]
    assert actual[0] == actual[2][::-1] == actual[3], "a state is left over"
    return actual


def test_states_are_forgotten_and_shared_like_keys_and_values() -> None:
    whole: Any = tiny.build("qwen3_next")
    expected = []
    for lengths in engine.LENGTHS.values():
        rows = [torch.tensor([row]) for row in engine.prompts(lengths)]
        result = [whole.generate(row, max_new_tokens=4, do_sample=False)[0, row.shape[1] :].tolist() for row in rows]
        expected.append(result)
    for actual in run_ranks(2, hybrid_body, timeout=400):
        assert actual[:2] == expected
