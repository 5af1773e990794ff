"""Families of transformers: split by its own plan or a built-in one, each gives the unsplit model's logits.

One body runs all families, so that a family costs what its kernels cost. Norms and biases are drawn at random too:
with the ones and zeros of a fresh model, one on the wrong head would change nothing.
"""

from __future__ import annotations

import math
from typing import Any

from iris.errors import PlatformError, StyleError
from layers.hf import sequence
from layers.hf.parallelize import parallelize
from layers.hf.styles import resolve_plan
import pytest
import torch
from torch import nn

from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers.models import transformers_is

pytest.importorskip("transformers")
pytestmark = both

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SLIDING_THEN_FULL = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
}
LINEAR_THEN_FULL = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SMALL_GEMMA4 = {
    **SLIDING_THEN_FULL,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": 100,
    "hidden_size_per_layer_input": 8,
}

TOKENS = (4, 6)  # which two, three, four and eight ranks can share

# model_type in transformers: what differs from TINY
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {},
    "gemma2": SLIDING_THEN_FULL,
    "gemma3_text": SLIDING_THEN_FULL,
    "phi": {"qk_layernorm": True},
    "phi3": {},
    "olmo": {"clip_qkv": 2.0},
    "olmo2": {},
    "granite": {"residual_multiplier": 0.7},
    "granite_swa": {},  # a learned sink for each head
    "cohere": {"use_qk_norm": True},  # a norm of its own for each head
    "starcoder2": {"use_bias": True},
    "glm": {},
    "glm4": {},
    "smollm3": {},
    "gpt_neox": {"num_key_value_heads": 4},  # q, k and v of a head side by side in one weight
    "hrm_text": {"num_key_value_heads": 4},  # a gate beside q, k and v
    "qwen3_5_text": LINEAR_THEN_FULL,
    "gemma4_text": SMALL_GEMMA4,
}
if transformers_is(5, 23):
    FAMILIES |= {"internlm3": {"bias": True, "qkv_bias": True}, "iquestcoder": {}}
# At three ranks: query heads that do not divide, kv heads that do not, and one kv head copied to all.
THREE_RANKS: dict[str, dict[str, Any]] = {
    "llama": {},
    "cohere": {"use_qk_norm": True, "num_attention_heads": 8, "num_key_value_heads": 4},
    "gemma": {"num_key_value_heads": 1},
    "gpt_neox": {"num_key_value_heads": 4},
}


def build(family: str, changes: dict[str, Any]) -> nn.Module:
    """The model of that family, the same wherever it is built."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.CONFIG_MAPPING[family](**{**TINY, **changes})
    state = torch.get_rng_state()
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2 or parameter.shape[1] == TINY["head_dim"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    torch.set_rng_state(state)
    return model


@torch.no_grad()
def logits(model: nn.Module, device: torch.device | str = "cpu") -> torch.Tensor:
    tokens = torch.randint(2, 100, TOKENS, generator=torch.Generator().manual_seed(3))
    return model(tokens.to(device)).logits


def split_body(ctx, families: dict[str, dict[str, Any]]) -> dict[str, tuple[torch.Tensor, int]]:
    """Those that by default share the tokens of long calls do so here in short ones, too."""
    results = {}
    for family, changes in families.items():
        known = family in sequence.KNOWN
        for least in (False, math.prod(TOKENS)) if known else ("auto",):
            model, scattered = build(family, changes), []
            report = parallelize(model, ctx, sequence_parallel=least)
            for module in model.modules():
                if isinstance(module, sequence.ScatteringRow):
                    module.register_forward_hook(lambda module, args, out, seen=scattered: seen.append(out.dim() == 2))
            name = f"{family}, tokens shared" if known and least else family
            results[name] = logits(model, ctx.device), sum(row.op != "-" for row in report.rows)
            assert all(scattered) and bool(scattered) == (known and bool(least)), name
    return results


# Of each kind one: plain, windows, merged and fused projections, sinks, norms by head and of all, linear attention.
QUICK = ("llama", "gemma2", "phi3", "gpt_neox", "granite_swa", "cohere", "hrm_text", "olmo2", "qwen3_5_text")
QUICK += ("gemma4_text",)
RUNS = {"whole": (WORLDS[0], FAMILIES)}
if not UNDER_TORCHRUN:
    RUNS = {
        "2": (2, {name: FAMILIES[name] for name in QUICK}),
        "2, others": (2, {name: changes for name, changes in FAMILIES.items() if name not in QUICK}),
        "3": (3, THREE_RANKS),
    }


@pytest.mark.parametrize("world_size, families", RUNS.values(), ids=RUNS)
@pytest.mark.some(1)
def test_a_familys_own_plan_gives_the_unsplit_logits(world_size: int, families: dict[str, dict[str, Any]]) -> None:
    results = run_ranks(world_size, split_body, families)
    wrong = []
    for family, changes in families.items():
        model = build(family, changes)
        single, double = logits(model), logits(model.double())
        own = (single - double).abs().max()
        for name in (name for name in results[0] if name.partition(",")[0] == family):
            for result, linears in (of_rank[name] for of_rank in results):
                error = (result.cpu() - double).abs().max()
                if not error <= 4 * own or linears < 4 or not torch.equal(result, results[0][name][0]):
                    wrong.append(f"{name}: error {error:.2e}, unsplit {own:.2e}, {linears} linears")
    assert not wrong, "\n".join(wrong)


def refused_body(ctx) -> None:
    model = build("llama", {})
    before = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    holder: Any = model
    holder._tp_plan = {**model.tp_plan, "model.layers.*.mlp.up_proj": "diagonal"}
    with pytest.raises(StyleError, match="'diagonal' of model.layers.0.mlp.up_proj is not supported: expected one"):
        parallelize(model, ctx)
    after = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    assert after.keys() == before.keys() and all(after[name][0] is before[name][0] for name in before)
    model = build("llama", {})
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(StyleError, match=r"LlamaForCausalLM is quantised \(bitsandbytes\)"):
        parallelize(model, ctx)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_what_no_layer_serves_is_refused_by_name(world_size: int) -> None:
    run_ranks(world_size, refused_body)


@pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
def test_an_old_transformers_is_refused(monkeypatch) -> None:
    model = build("llama", {})
    resolve_plan(model, "auto")
    monkeypatch.setattr("transformers.__version__", "5.14.1")
    with pytest.raises(PlatformError, match=r"transformers is 5\.14\.1: expected 5\.15 or newer"):
        resolve_plan(model, "auto")
    monkeypatch.setattr("transformers.__version__", "5.15.0.dev0")
    resolve_plan(model, "auto")


# --- families whose own plan is missing ------------------------------------------------------------------------------

BLOCK = "model.layers.*."
PLANS = {
    "stablelm": {
        **{f"{BLOCK}self_attn.{p}_proj": "colwise" for p in "qkv"},
        BLOCK + "self_attn.o_proj": "rowwise",
        **{f"{BLOCK}mlp.{p}_proj": "colwise" for p in ("gate", "up")},
        BLOCK + "mlp.down_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    },
    "opt": {
        **{f"model.decoder.layers.*.self_attn.{p}_proj": "colwise" for p in "qkv"},
        "model.decoder.layers.*.self_attn.out_proj": "rowwise",
        "model.decoder.layers.*.fc1": "colwise",
        "model.decoder.layers.*.fc2": "rowwise",
    },
}
CHANGES = {"stablelm": {}, "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1}}


def dict_body(ctx) -> dict[str, torch.Tensor]:
    results = {}
    for family, plan in PLANS.items():
        model = build(family, CHANGES[family])
        assert "split by the plan that was given" in str(parallelize(model, ctx, plan=plan))
        results[family] = logits(model, ctx.device)
        built_in = build(family, CHANGES[family])
        assert parallelize(built_in, ctx).plan == f"the built-in plan of {family}"
        assert torch.equal(logits(built_in, ctx.device), results[family])
    without: Any = build("llama", {})
    without._tp_plan = {}
    with pytest.raises(StyleError, match="has no tensor-parallel plan, and none is built in: pass plan="):
        parallelize(without, ctx)
    model = build("granite_swa", {})  # in older versions its plan splits the sinks without saying local_params
    plan = {name: style for name, style in model.tp_plan.items() if style != "local_params"}
    model.model.layers[0].self_attn.gains = nn.Parameter(torch.ones(3))
    with pytest.raises(StyleError, match=r"gains is a parameter of \(3,\): style 'colwise' expects one entry"):
        parallelize(model, ctx, plan=plan | {BLOCK + "self_attn.gains": "colwise"})
    parallelize(model, ctx, plan=plan)
    results["granite_swa"] = logits(model, ctx.device)
    by_head = build("stablelm", {"qk_layernorm": True})
    with pytest.raises(StyleError, match="q_layernorm.norms holds 4 modules, one for each head"):
        parallelize(by_head, ctx, plan=PLANS["stablelm"])
    return results


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_a_plan_given_as_a_dict_serves_a_family_without_one(world_size: int) -> None:
    results = run_ranks(world_size, dict_body)
    for family in [*PLANS, "granite_swa"]:
        model = build(family, CHANGES.get(family, {}))
        single, double = logits(model), logits(model.double())
        own = (single - double).abs().max()
        for of_rank in results:
            assert (of_rank[family].cpu() - double).abs().max() <= 4 * own, family
