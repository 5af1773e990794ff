"""Mixtures whose own plan leaves attention or shared experts whole, split by a built-in one: logits, tokens that
`generate` gives over its caches, and the engine's logits. Heads divide by the ranks, or do not.
"""

from __future__ import annotations

from typing import Any

import layers
from layers.hf.plans import completed
import pytest
import torch

from tests.coverage_of_models import compare, engine, tiny
from tests.harness import UNDER_TORCHRUN, run_ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own")

# Ranks, query heads, kv heads. A rank's share of kv heads: 2 or 1; 1; one for two ranks; 2 or 1.
SIZES = [(2, 6, 3), (3, 6, 3), (3, 4, 2), (3, 8, 4)]
TYPES = [*completed.PLANS, "dbrx", "zaya"]
QUICK = {("granitemoe", SIZES[0])}
CASES = [
    pytest.param(name, *sizes, marks=[] if (name, sizes) in QUICK else pytest.mark.slow)
    for name in TYPES
    for sizes in SIZES
]
SERVED = {"minimax": "no", "deepseek_v4": "no", "inkling_text": "no"}
WITHOUT_STATIC = ("deepseek_v4", "inkling")  # a static cache is not for them, whole or split
# Whose heads are as wide as the configuration says, whatever the hidden size.
OWN_WIDTH = ("lara_mini", "qwen4_exp", "solar_open", "minimax_m3", "deepseek_v4", "inkling", "zaya", "glm4_moe_lite")


def settings(model_type: str, heads: int, kv_heads: int) -> dict[str, Any]:
    """Return settings of a type's tiny model with this number of heads, with biases where the type has them."""
    actual = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    if not model_type.startswith(OWN_WIDTH):
        actual["hidden_size"] = 8 * heads
    if model_type in ("granitemoe", "granitemoeshared", "granitemoe_swa", "phimoe", "solar_open"):
        actual["attention_bias"] = True
    if model_type == "glm4_moe_lite":
        actual["num_key_value_heads"] = heads
    if model_type.startswith(("lara_mini", "qwen4_exp")):
        actual |= {"linear_num_value_heads": heads, "linear_num_key_heads": kv_heads}
    if model_type == "minimax_m3_vl_text":
        actual["index_n_heads"] = kv_heads
    if model_type == "deepseek_v4":
        actual["o_groups"] = 2
    if model_type.startswith("inkling"):
        actual |= {"swa_num_attention_heads": heads, "swa_num_key_value_heads": kv_heads}
    if model_type == "dbrx":
        own = tiny.CHANGES["dbrx"]
        return {
            "n_heads": heads, "d_model": 8 * heads, "num_key_value_heads": kv_heads,
            "attn_config": {**own["attn_config"], "kv_n_heads": kv_heads},
            "ffn_config": {**own["ffn_config"], "hidden_size": 8 * heads},
        }  # fmt: skip
    return {f"text_config.{key}": value for key, value in actual.items()} if model_type == "qwen4_exp" else actual


def generated(model: Any, device: torch.device | str = "cpu") -> list[list[int]]:
    """Greedy tokens over a cache that grows and, where the family takes one, over a static one."""
    tokens = torch.tensor(engine.prompts((6, 6)), device=device)
    ways: list[dict[str, Any]] = [{}, {"cache_implementation": "static"}]
    if model.config.model_type.startswith(WITHOUT_STATIC):
        ways = ways[:1]
    return [model.generate(tokens, max_new_tokens=4, do_sample=False, **each).tolist() for each in ways]


def generate_body(ctx: Any, model_type: str, others: dict[str, Any]) -> tuple[list[list[int]], str]:
    model = tiny.build(model_type, **others)
    report = layers.parallelize(model, ctx)
    return generated(model, ctx.device), report.plan


@pytest.mark.parametrize("model_type, world_size, heads, kv_heads", CASES)
def test_a_plan_that_completes_a_familys_own_gives_the_unsplit_answers(
    model_type: str, world_size: int, heads: int, kv_heads: int
) -> None:
    others = settings(model_type, heads, kv_heads)
    outcomes = run_ranks(world_size, compare.split_body, model_type, others, timeout=400)
    single, double, _ = compare.reference(model_type, others)
    assert not outcomes[0].refusal and not compare.judge(single, double, outcomes)
    model: Any = tiny.build(model_type, **others)
    expected = generated(model)
    for tokens, plan in run_ranks(world_size, generate_body, model_type, others, timeout=400):
        assert tokens == expected and plan == f"the built-in plan of {model.config.model_type}"
    served = run_ranks(world_size, engine.served_body, model_type, others, timeout=400)
    assert engine.judge(model_type, served, others).partition(":")[0] == SERVED.get(model_type, "yes")
