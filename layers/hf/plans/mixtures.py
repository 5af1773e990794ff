"""Plans of mixtures of experts, and of latent attention."""

from __future__ import annotations

from .rules import COLUMN, EXPERTS, GATHER, HEAD, LATENT, SLICE, attention, below, gathered, mlp

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
        **below("transformer.blocks.*", attention("norm_attn_norm.attn", ("Wqkv",), "out_proj")),
        **HEAD,
    },
    "jetmoe": {**below("model.layers.*", {"self_attention.kv_proj": GATHER}), **HEAD},
    "zaya": {  # convolutions over queries and keys stand between the projections and the heads
        **below("model.layers.*", gathered("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj_current",
                                                                  "v_proj_delayed")),
                {"mlp.experts": EXPERTS, "self_attn.o_proj": SLICE}),
        **HEAD,
    },
}  # fmt: skip
