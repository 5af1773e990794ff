"""Plans of state spaces, linear attentions and convolutions, and of hybrids of them with attention.

Layers that keep a state for each head are split by whole heads; in the other ones, everything between their
products is replicated, and the products are split and gathered.
"""

from __future__ import annotations

from .rules import (
    COLUMN,
    EXPERTS,
    GATHER,
    HEAD,
    LATENT,
    PACKED,
    QKV,
    RECURRENT,
    ROW,
    SLICE,
    attention,
    below,
    gathered,
    mlp,
)

_MAMBA = ("mamba", "mixer")
# The first generation has no heads.
_MIXER = {key: style for name in _MAMBA for key, style in gathered(name, ("in_proj",), ("out_proj",)).items()}
_MIXER |= dict.fromkeys(_MAMBA, RECURRENT)
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
    **below(("model.layers.*", "model.language_model.layers.*"), {"linear_attn": RECURRENT}, attention(), mlp(),
            {"mlp.experts": EXPERTS}, mlp("mlp.shared_expert")),
    **HEAD,
}  # fmt: skip

PLANS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _DELTA),
    **dict.fromkeys(("bamba", "falcon_h1", "jamba"), _HYBRID),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), {**below("backbone.layers.*", _MIXER), **HEAD}),
    **dict.fromkeys(("lfm2", "lfm3", "lfm2_moe"), _LFM2),
    "olmo_hybrid": {  # norms of all heads together follow the projections of its attentions
        **below("model.layers.*", {"linear_attn": RECURRENT}, gathered("self_attn", QKV, ("o_proj",)), mlp()),
        **HEAD,
    },
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
                {"self_attn": RECURRENT, **LATENT, "self_attn.g_proj": COLUMN, "mlp.experts": EXPERTS}, mlp(),
                mlp("mlp.shared_experts")),
        **HEAD,
    }),
    "nemotron_h": {
        **below("model.layers.*", _MIXER, attention("mixer"),
                {"mixer.experts": EXPERTS}, mlp("mixer", ("up_proj",)), mlp("mixer.shared_experts", ("up_proj",))),
        **HEAD,
    },
    "granitemoehybrid": {
        **below("model.layers.*", _MIXER, attention(), {"block_sparse_moe.experts": EXPERTS},
                {"shared_mlp.input_linear": PACKED, "shared_mlp.output_linear": "rowwise"}),
        **HEAD,
    },
}  # fmt: skip
