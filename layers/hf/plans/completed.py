"""Plans of families whose own plan, in transformers, splits the experts and leaves attention or shared experts whole.

Left whole here, too:

    indexers (DeepSeek-V3.2, GLM MoE DSA, AXK2, HY-V4, dots3)   scores are summed over an indexer's heads, which have
                                                                no output projection whose sum the ranks could share
    hyper connections (DeepSeek-V4, HY-V4, Qwen4)               they mix whole hidden states
    JetMoE's query and output projections                       they are separate experts, which a router chooses
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

_LAYERS = "model.layers.*"
_EXPERTS = {"mlp.experts": EXPERTS, **mlp("mlp.shared_experts"), **mlp("mlp.shared_expert"), **mlp()}
_GRANITE = {
    "self_attn.sinks": COLUMN,
    "block_sparse_moe.experts": EXPERTS,
    "shared_mlp.input_linear": PACKED,
    "shared_mlp.output_linear": ROW,
}
# The indexer chooses tokens for all heads at once; the hyper connections are split as the family's own plan does.
_QWEN4 = {
    "linear_attn": RECURRENT,
    "self_attn.indexer.index_qk_proj": GATHER,
    "attn_hyper_connection.input_mix_weight_down": SLICE,
    "mlp_hyper_connection.input_mix_weight_down": SLICE,
}
_MIXER = "hyper_connection_mixer.input_mix_weight_down"

PLANS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("phimoe", "qwen2_moe", "exaone_moe", "solar_open"),
                    {**below(_LAYERS, attention(), _EXPERTS), **HEAD}),
    "glm4_moe_lite": {**below(_LAYERS, LATENT, _EXPERTS), **HEAD},
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoe_swa"),
                    {**below(_LAYERS, attention(), _GRANITE), **HEAD}),
    "lara_mini": {**below(_LAYERS, attention(), {"linear_attn": RECURRENT}, _EXPERTS), **HEAD},
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), {
        **below((_LAYERS, "model.language_model.layers.*"), attention(), _QWEN4, _EXPERTS),
        **{f"model.{_MIXER}": SLICE, f"model.language_model.{_MIXER}": SLICE},
        **HEAD,
    }),
    # A norm over all heads together follows the lightning attention, which other layers do not have.
    "minimax": {
        **below(_LAYERS, attention(), gathered("self_attn", ("qkv_proj", "output_gate"), ("out_proj",)), _EXPERTS),
        **HEAD,
    },
    # Each kv head has blocks of tokens of its own, chosen by an indexer that stays whole.
    "minimax_m3_vl_text": {
        **below(_LAYERS, gathered("self_attn", QKV, ("o_proj",)), {"mlp.experts": EXPERTS},
                {"mlp.gate_up_proj": PACKED, "mlp.down_proj": ROW},
                {"mlp.shared_experts.gate_up_proj": PACKED, "mlp.shared_experts.down_proj": ROW}),
        **HEAD,
    },
    # One kv head for all, and an output projection by groups of heads whose number the configuration gives.
    "deepseek_v4": {
        **below(_LAYERS, {"self_attn.q_b_proj": GATHER, "self_attn.o_b_proj": SLICE}, _EXPERTS),
        **HEAD,
    },
    # Convolutions over all kv heads' channels stand between the projections and the heads.
    "inkling_text": {
        **below(_LAYERS, gathered("self_attn", (*QKV, "r_proj"), ("o_proj",)),
                {"mlp.experts": EXPERTS, "mlp.experts.gate_up_proj": COLUMN, "mlp.experts.down_proj": ROW},
                {"mlp.shared_experts": "all_reduce"}, mlp("mlp.shared_experts"), mlp()),
        "lm_head": SLICE,
    },
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), {
        **below(_LAYERS, gathered("self_attn", (*(f"{each}.linear" for each in QKV), "o_proj.gate_proj",
                                                "relative_position_bias.linear"), ("o_proj.linear",)),
                {"mlp.experts": EXPERTS, "mlp.experts.gate_up_proj": COLUMN, "mlp.experts.down_proj": ROW}),
        "lm_head": SLICE,
    }),
}  # fmt: skip
