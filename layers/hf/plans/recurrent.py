"""Plans of state spaces, linear attentions and convolutions, and of hybrids of them with attention.

What such a layer computes between its products stays whole; the products are split and gathered.
"""

from __future__ import annotations

from .rules import COLUMN, EXPERTS, GATHER, HEAD, PACKED, ROW, SLICE, attention, below, gathered, mlp

_MAMBA = ("mamba", "mixer")
_MIXER = {key: style for name in _MAMBA for key, style in gathered(name, ("in_proj",), ("out_proj",)).items()}
_HYBRID = {
    **below("model.layers.*", _MIXER, attention(), mlp("feed_forward"), {"feed_forward.experts": EXPERTS}),
    **HEAD,
}
_LFM2 = {
    **below("model.layers.*", gathered("conv", ("in_proj",), ("out_proj",)), attention(output="out_proj"),
            {"self_attn.g_proj": COLUMN, "self_attn.o_proj": ROW},  # of the third generation
            mlp("feed_forward", ("w1", "w3"), "w2"), {"feed_forward.experts": EXPERTS}),
    **HEAD,
}  # fmt: skip

_DELTA = {
    **below(("model.layers.*", "model.language_model.layers.*"), {"linear_attn": "delta_heads"}, attention(), mlp(),
            {"mlp.experts": EXPERTS}, mlp("mlp.shared_expert")),
    **HEAD,
}  # fmt: skip

PLANS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _DELTA),
    **dict.fromkeys(("bamba", "falcon_h1", "jamba"), _HYBRID),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), {**below("backbone.layers.*", _MIXER), **HEAD}),
    **dict.fromkeys(("lfm2", "lfm3", "lfm2_moe"), _LFM2),
    "recurrent_gemma": {
        **below("model.layers.*", gathered("temporal_block", ("linear_x", "linear_y"), ("linear_out",)),
                attention("temporal_block"), mlp("mlp_block")),
        **HEAD,
    },
    "rwkv": {
        # the model rescales the weights of `attention.output` and `feed_forward.value` itself
        **below("rwkv.blocks.*", gathered("attention", ("key", "value", "receptance")),
                gathered("feed_forward", ("key", "receptance"))),
        **HEAD,
    },
    "xlstm": {
        **below("backbone.blocks.*", gathered("mlstm_layer", ("q", "k", "v", "ogate_preact"), ("out_proj",)),
                mlp("ffn", ("proj_up_gate", "proj_up"), "proj_down")),
        **HEAD,
    },
    "zamba": {
        **below(("model.layers.*", "model.layers.*.mamba_decoder"), _MIXER),
        **below("model.layers.*.shared_transf", attention(), mlp("feed_forward")),
        **HEAD,
    },
    "zamba2": {
        **below(("model.layers.*", "model.layers.*.mamba_decoder"), _MIXER),
        **below("model.layers.*.shared_transformer", attention(),
                {"feed_forward.gate_up_proj": GATHER, "feed_forward.down_proj": SLICE}),
        **HEAD,
    },
    # delta attention in most layers, latent attention in the others, under the same names
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), {
        **below("model.layers.*",
                gathered("self_attn", ("q_proj", "k_proj", "v_proj", "g_proj", "g_b_proj", "kv_b_proj"), ("o_proj",)),
                {"mlp.experts": EXPERTS}, mlp(), mlp("mlp.shared_experts")),
        **HEAD,
    }),
    "nemotron_h": {
        **below("model.layers.*", gathered("mixer", ("in_proj",), ("out_proj",)), attention("mixer"),
                {"mixer.experts": EXPERTS}, mlp("mixer", ("up_proj",)), mlp("mixer.shared_experts", ("up_proj",))),
        **HEAD,
    },
    "granitemoehybrid": {
        **below("model.layers.*", _MIXER, attention(), {"block_sparse_moe.experts": EXPERTS},
                {"shared_mlp.input_linear": PACKED, "shared_mlp.output_linear": "rowwise"}),
        **HEAD,
    },
}  # fmt: skip
