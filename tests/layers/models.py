"""Build seven tiny language models that together cover what makes splitting hard, and run split ones.

A model is drawn from its name alone, so that every rank and the test itself have the same weights without sending them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
import re
from typing import Any

import torch
from torch import nn

from tests.harness import UNDER_TORCHRUN, WORLDS


def transformers_is(major: int, minor: int, patch: int = 0) -> bool:
    """Whether transformers is of this version or newer."""
    return tuple(map(int, re.findall(r"\d+", version("transformers"))[:3])) >= (major, minor, patch)


PLAIN: dict[str, Any] = {
    "hidden_size": 36,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 120,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}

# name: (architecture, what differs from PLAIN)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Llama", {}),
    "bias": ("Qwen2", {}),
    "tied": ("Llama", {"tie_word_embeddings": True, "vocab_size": 121}),
    "width130": ("Llama", {"intermediate_size": 130, "mlp_bias": True}),
    "kv2": ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    "kv1": ("Llama", {"num_key_value_heads": 1}),
    "vocab257": ("Llama", {"vocab_size": 257}),
}
# Beyond the seven: three kv heads in nine query heads, fewer heads than ranks, and other families' plans.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "nine_heads": ("Llama", {"num_attention_heads": 9, "num_key_value_heads": 3}),
    "two_heads": ("Llama", {"num_attention_heads": 2, "num_key_value_heads": 2}),
    "qk_norm": ("Qwen3", {"num_key_value_heads": 2}),
    "fused": ("Phi3", {"num_key_value_heads": 2, "hidden_size": 32}),
    # whose K has leaves enough for uneven shares on three ranks (`iris_ops/sum_tree.py`)
    "leaves": (
        "Llama",
        {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32, "intermediate_size": 304},
    ),
    "leaves_tied": (
        "Qwen2",
        {"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 280, "tie_word_embeddings": True},
    ),
    "lines": (
        "Llama",
        {"num_attention_heads": 8, "head_dim": 64, "hidden_size": 128, "intermediate_size": 1024},
    ),  # of 128 weights in each rank's part
    "sliding": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 4}),
    "offset_norm": ("Gemma", {"num_key_value_heads": 2}),
    "gathered_qkv": ("Olmo2", {"num_key_value_heads": 2, "hidden_size": 32}),
}
# Mixtures of experts, whose intermediate sizes three ranks do not divide.
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "hidden_size": 32}
_OF_DEEPSEEK: dict[str, Any] = {
    "hidden_size": 32,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_experts_per_tok": 2,
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**_EXPERTS, "intermediate_size": 20, "num_hidden_layers": 1}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "num_hidden_layers": 1}),
    "gpt_oss": ("GptOss", {**_EXPERTS, "intermediate_size": 20, "sliding_window": 4}),
    "deepseek_v3": ("DeepseekV3", _OF_DEEPSEEK),
}
MORE["transposed"] = ("GPT2", {"hidden_size": 32, "n_inner": 40})


NEW = 4  # tokens that a model generates

# For what takes its time for each layer.
ONE_LAYER = "one_layer"
SHALLOW: dict[str, tuple[str, dict[str, Any]]] = {
    ONE_LAYER: (
        "Llama",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, "num_hidden_layers": 1},
    ),
}

# Whose heads or words run out on more ranks.
FEW = ("tied", "kv2", "kv1", "nine_heads", "two_heads", "vocab257")


def cases(names: Iterable[str]) -> list[tuple[int, str]]:
    """Return (world size, model) pairs: on CPUs all on two and three ranks, `FEW` on four, "plain" on one."""
    if UNDER_TORCHRUN:
        return [(world_size, name) for world_size in WORLDS for name in names]
    sizes = {name: (2, 3, 4) if name in FEW else (1, 2, 3) if name == "plain" else (2, 3) for name in names}
    return [(world_size, name) for world_size in WORLDS for name in names if world_size in sizes[name]]


def config_of(name: str):
    import transformers

    architecture, changes = (CONFIGS | MORE | MIXTURES | SHALLOW)[name]
    return getattr(transformers, f"{architecture}Config")(**{**PLAIN, **changes})


def build(name: str, attention: str = "sdpa") -> nn.Module:
    """The whole model, the same wherever it is built."""
    import transformers

    transformers.logging.set_verbosity_error()
    attention = "eager" if name == "gpt_oss" else attention  # the only one of torch's that knows of sinks
    state = torch.get_rng_state()
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(
        config_of(name), dtype=torch.float32, attn_implementation=attention
    ).eval()
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            nn.init.normal_(parameter)
    torch.set_rng_state(state)
    return model


def prompt(rows: int = 2) -> torch.Tensor:
    return torch.randint(0, 100, (rows, 7), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(model: nn.Module, device: torch.device | str = "cpu") -> torch.Tensor:
    return model(prompt().to(device)).logits


def generate(model: nn.Module, device: torch.device | str = "cpu", **options: Any) -> torch.Tensor:
    """`NEW` tokens after the prompt; with `padded=True`, as if the second row began with two tokens of padding."""
    if options.pop("padded", False):
        mask = torch.ones(2, 7, dtype=torch.long, device=device)
        mask[1, :2] = 0
        options["attention_mask"] = mask
    return model.generate(prompt().to(device), max_new_tokens=NEW, **{"do_sample": False, **options})


@cache
def expected(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the unsplit model: logits in float64, logits in float32, greedy tokens."""
    model = build(name)
    tokens, single = generate(model), logits(model)
    return logits(model.double()), single, tokens


def assert_logits(result: torch.Tensor, name: str) -> None:
    """`result` is the unsplit model's, up to float32 sums in another order.

    The error of a whole model is not that of one sum: it passes through its layers. So the bound is a small multiple of
    what the unsplit model itself is off, far below what a wrong head, slice or bias would be.
    """
    double, single, _ = expected(name)
    assert result.dtype == single.dtype and result.shape == single.shape
    own = (single - double).abs().max()
    error = (result.cpu() - double).abs().max()
    assert error <= 4 * own, f"error {error:.2e}, the unsplit model's own {own:.2e}"
