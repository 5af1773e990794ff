"""Plans of mixtures of experts, and of latent attention."""

from __future__ import annotations

from .rules import COLUMN, EXPERTS, GATHER, HEAD, LATENT, attention, below, mlp

_EXPERTS = {"mlp.experts": EXPERTS, **mlp("mlp.shared_experts"), **mlp()}
_LATENT = {**below("model.layers.*", LATENT, _EXPERTS), **HEAD}

PLANS: dict[str, dict[str, str]] = {
    "gpt_oss": {
        **below("model.layers.*", attention(), {"self_attn.sinks": COLUMN, "mlp.experts": EXPERTS}),
        **HEAD,
    },
    **dict.fromkeys(("deepseek_v3", "axk1", "sarvam_mla", "youtu"), _LATENT),
    "afmoe": {**below("model.layers.*", attention(), {"self_attn.gate_proj": COLUMN}, _EXPERTS), **HEAD},
    "flint": {**below("model.layers.*", attention(), {"self_attn.sinks": COLUMN}, _EXPERTS), **HEAD},
    "hunyuan_v1_moe": {**below("model.layers.*", attention(), _EXPERTS, mlp("mlp.shared_mlp")), **HEAD},
    "dbrx": {
        **below("transformer.blocks.*", {"norm_attn_norm.attn.Wqkv": GATHER, "norm_attn_norm.attn.out_proj":
                "rowwise_split_input"}),
        **HEAD,
    },
    "jetmoe": {**below("model.layers.*", {"self_attention.kv_proj": GATHER}), **HEAD},
    "zaya": {**below("model.layers.*", {"mlp.experts": EXPERTS, "self_attn.o_proj": "rowwise_split_input"}), **HEAD},
}  # fmt: skip
