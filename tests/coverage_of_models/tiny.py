"""Tiny random models of every causal language model type that the installed transformers knows.

A type's default configuration is made small by the names of its settings: `SMALL` has the value of each setting, in
the configuration and in those inside it. Lists with an entry for each layer keep one layer of each kind. `CHANGES` has
further settings of single types. Experts, latent attention and linear attention stay on, so that a tiny model has all
kinds of layers of its type.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

VOCABULARY = 96
_MOST_LAYERS = 4
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 8

_COUNTS_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "depth",
                  "num_decoder_layers")  # fmt: skip
# What a setting becomes, wherever a configuration has it as a number.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "text_vocab_size", "decoder_vocab_size",
                     "unpadded_vocab_size"),
                    VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embed_dim", "embedding_size", "dim"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads",
                     "num_heads", "attention_heads", "swa_num_attention_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads", "kv_n_heads"), _KV_HEADS),
    **dict.fromkeys(("head_dim", "swa_head_dim", "d_head", "attention_head_dim", "kv_channels", "d_kv", "dim_head",
                     "global_head_dim"), _HEAD_DIM),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "n_inner",
                     "d_inner", "dim_ff", "d_ff", "mlp_dim", "intermediate_size_mlp", "dense_intermediate_size",
                     "feed_forward_size", "block_ff_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
                     "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size",
                     "expert_ffn_hidden_size"), 20),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 12),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    "qk_head_dim": 16,
    **dict.fromkeys(("index_n_heads",), 8),  # of few, all may score a token 0, and many tokens then are alike
    **dict.fromkeys(("index_head_dim",), 16),
    **dict.fromkeys(("index_topk",), 4),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    "linear_num_key_heads": 2,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 4),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size", "local_attention",
                     "window_size", "attention_window_size"), 4),
    **dict.fromkeys(_COUNTS_LAYERS, 2),
    "hidden_size_per_layer_input": 8,
    "rotary_dim": 8,
}  # fmt: skip
# By model type: settings of its configuration, a dot for those of one inside.
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8}
_QWEN4 = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
          "indexer_compress_ratio": 2, "ple_embed_dim": 32, "hc_lowrank": 8}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {
        each: {"rope_type": "default", "rope_theta": 1e4} for each in ("sliding_attention", "full_attention")}},
    "ctrl": {"dff": 48},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}, "num_key_value_heads": 2,
             "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 20, "moe_num_experts": 4, "moe_top_k": 2}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {"num_hidden_layers": 6, "n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 2,
             "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"]},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "dots3_note": {"text_config.per_layer_config": {}, "text_config.head_dim": 16, "text_config.num_key_value_heads": 4,
                   "vision_config.adapter_in_dim": 32, "vision_config.adapter_out_dim": 32,
                   "audio_config.adapter_out_dim": 32,
                   "audio_config.adapter_input_size": 32, 
                   "vision_config.per_layer_config": {}},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 16},
    "falcon_h1": {"mamba_d_ssm": 64, **_MAMBA2},
    "gemma3n_text": {"num_kv_shared_layers": 2, "intermediate_size": 48,
                     "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
                     "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4": {"text_config.per_layer_config": {"1": {"head_dim": 16}}},
    "gemma4_text": {"per_layer_config": {"1": {"head_dim": 16}}},
    "gemma4_unified": {"text_config.per_layer_config": {"1": {"head_dim": 16}}},
    "gemma4_unified_text": {"per_layer_config": {"1": {"head_dim": 16}}},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 10},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "opt": {"word_embed_proj_dim": 32},
    "qwen4_exp": {f"text_config.{key}": value for key, value in _QWEN4.items()},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "local_attn_chunk_length": 4, "attention_head_size": 8,
                 "lsh_attn_chunk_length": 4, "num_buckets": 4, "attn_layers": ["local", "lsh"]},
    "roc_bert": {"pronunciation_vocab_size": 96, "shape_vocab_size": 96, "pronunciation_embed_dim": 8,
                 "shape_embed_dim": 8},
    "rwkv": {"attention_hidden_size": 32},
    "xlstm": {"num_blocks": 2, "ffn_round_up_to_multiple_of": 16, "hidden_size": 64,
              "embedding_dim": 64, "chunk_size": 8, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "zamba": {"num_hidden_layers": 4, "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4,
              "n_mamba_heads": 2, "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "zamba2": {"num_hidden_layers": 4, "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4,
               "n_mamba_heads": 8, "mamba_headdim": 8, "adapter_rank": 8, "num_query_groups": 4,
               "hybrid_layer_ids": [1, 3],
               "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip
# Types that are not tried, and why.
UNTRIED = {
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"), "drafts for another model, whose states it takes"
    ),
    "gemma3n": "its vision tower is timm's, which is not installed; gemma3n_text is tried",
    "blt": "its five models of patches and bytes have no tiny configuration here",
}
_BY_DECODER = ("musicgen", "musicgen_melody")
_SPECIAL = re.compile(r"(_token_id|_token_index|_index|_idx)$")


def types() -> list[str]:
    """Every model type that transformers has a causal language model of."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def configuration(model_type: str, **others: Any) -> Any:
    """The tiny configuration of a type, with `others` of its settings."""
    import transformers

    kind = transformers.CONFIG_MAPPING[model_type]
    changes = CHANGES.get(model_type, {}) | others
    settings = _shrunk(kind(**_of_default(changes)).to_dict())
    if settings.get("kv_lora_rank") and "qk_rope_head_dim" in settings:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    for name, value in changes.items():
        *path, key = name.removeprefix("+").split(".")
        inside = settings
        for each in path:
            inside = inside[each]
        if value is _DROP:
            inside.pop(key, None)
        else:
            inside[key] = value
    settings.pop("model_type", None)
    return kind.from_dict(settings)


_DROP = object()


def _of_default(changes: dict[str, Any]) -> dict[str, Any]:
    """What even the type's default configuration cannot be made without: the changes marked `+`."""
    return {name[1:]: value for name, value in changes.items() if name.startswith("+")}


def _shrunk(settings: dict[str, Any]) -> dict[str, Any]:
    layers = next((settings[key] for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
                   if isinstance(settings.get(key), int)), None)  # fmt: skip
    by_layer = {key: each for key, each in settings.items()
                if isinstance(each, list) and layers and layers > 4 and len(each) == layers}  # fmt: skip
    kept = _one_of_each(by_layer)
    small: dict[str, Any] = {}
    for key, value in settings.items():
        if key in by_layer:
            small[key] = [value[i] for i in kept]
        elif not isinstance(key, str) or key in ("id2label", "label2id"):
            continue
        elif isinstance(value, dict):
            small[key] = _shrunk(value)
        elif key in ("bos_token_id", "decoder_start_token_id"):
            small[key] = 1
        elif key == "eos_token_id":
            small[key] = None
        elif key == "pad_token_id":
            small[key] = 0
        elif _SPECIAL.search(key) and isinstance(value, int) and value >= VOCABULARY:
            small[key] = VOCABULARY - 1 - len(small) % 8
        elif key in SMALL and isinstance(value, (int, float)) and not isinstance(value, bool):
            small[key] = len(kept) if kept and value == layers and key in _COUNTS_LAYERS else SMALL[key]
        else:
            small[key] = value
    return small


def _one_of_each(by_layer: dict[str, list]) -> list[int]:
    """The first layer of each kind, in order."""
    if not by_layer:
        return []
    rows = list(zip(*by_layer.values(), strict=True))
    kinds = [next(i for i, other in enumerate(rows) if other == row) for row in rows]
    kept = sorted(set(kinds))[:_MOST_LAYERS]
    return kept if len(kept) > 1 else [0, 1]


def build(model_type: str, **others: Any) -> nn.Module:
    """Build the tiny model of a type with the settings `others`, in float32 and eval mode.

    Its random weights are the same in every process.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    state = torch.get_rng_state()
    torch.manual_seed(11)
    try:
        config = configuration(model_type, **others)
        if model_type in _BY_DECODER:  # their class wants the decoder's configuration
            config = config.decoder
            kind = transformers.AutoModelForCausalLM._model_mapping[type(configuration(model_type))]
            model = kind(config).float().eval()
        else:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                _randomise(parameter)
    finally:
        torch.set_rng_state(state)
    return model


def _randomise(parameter: nn.Parameter) -> None:
    """Draw weights at a scale that keeps sums near 1, and add a random part to norms and biases."""
    if parameter.dim() < 2:
        parameter.add_(torch.randn_like(parameter), alpha=0.3)
    else:
        parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
