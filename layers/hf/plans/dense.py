"""Plans of dense decoders."""

from __future__ import annotations

from .rules import COLUMN, GATHER, HEAD, LLAMA, LLAMA_PLAN, SLICE, attention, below, gathered, mlp

_FC = mlp("", ("fc1",), "fc2")
# BART, and families built like it, or like its decoder.
_BART_LAYER = {**attention(output="out_proj"), **attention("encoder_attn", output="out_proj"), **_FC}
_BART = {
    **below(("model.encoder.layers.*", "model.decoder.layers.*", "model.layers.*", "biogpt.layers.*"), _BART_LAYER),
    **HEAD,
}
_GPT2 = {
    **below("transformer.h.*", attention("attn", ("c_attn",), "c_proj"), mlp("mlp", ("c_fc",), "c_proj")),
    **HEAD,
}
# T5 and families built like it; their relative positions have a bias for each head.
_T5_LAYER = {
    **attention("layer.*.SelfAttention", ("q", "k", "v"), "o"),
    **attention("layer.*.EncDecAttention", ("q", "k", "v"), "o"),
    "layer.*.SelfAttention.relative_attention_bias.weight": COLUMN,
    **mlp("layer.*.DenseReluDense", ("wi", "wi_0", "wi_1"), "wo"),
}
_T5 = {
    **below(("encoder.block.*", "decoder.block.*", "transformer.encoder.block.*", "transformer.decoder.block.*"),
            _T5_LAYER),
    "lm_head": GATHER,
}  # fmt: skip
_4H = mlp("mlp", ("dense_h_to_4h",), "dense_4h_to_h")

PLANS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mvp",
                     "opt", "pegasus", "plbart", "whisper", "xglm", "biogpt", "musicgen", "musicgen_decoder",
                     "musicgen_melody", "musicgen_melody_decoder"), _BART),
    **dict.fromkeys(("stablelm", "hunyuan_v1_dense", "emu3", "emu3_text_model", "mllama", "mllama_text_model"),
                    LLAMA_PLAN),
    **dict.fromkeys(("t5", "mt5", "umt5"), _T5),
    # The text's layers; the vision tower stays whole.
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_text"),
                    {**below(("model.language_model.layers.*", "model.layers.*", "layers.*"), LLAMA), **HEAD}),
    "bitnet": {  # norms come before the second products
        **below("model.layers.*", gathered("self_attn", ("q_proj", "k_proj", "v_proj"), ("o_proj",)),
                gathered("mlp", ("gate_proj", "up_proj"), ("down_proj",))),
        **HEAD,
    },
    **dict.fromkeys(("gpt2", "gpt-sw3", "openai-gpt"), _GPT2),
    "trocr": {  # attention takes its shape from hidden states
        **below("model.decoder.layers.*", gathered("self_attn", ("q_proj", "k_proj", "v_proj"), ("out_proj",)),
                gathered("encoder_attn", ("q_proj", "k_proj", "v_proj"), ("out_proj",)), _FC),
        **HEAD,
    },
    "gpt_bigcode": {
        **below("transformer.h.*", attention("attn", ("c_attn",), "c_proj"), mlp("mlp", ("c_fc",), "c_proj")),
        **HEAD,
    },
    "gpt_neo": {
        **below("transformer.h.*", attention("attn.attention", output="out_proj"), mlp("mlp", ("c_fc",), "c_proj")),
        **HEAD,
    },
    "gpt_neox_japanese": {
        **below("gpt_neox_japanese.layers.*", attention("attention", ("query_key_value",), "dense"), _4H),
        **HEAD,
    },
    "codegen": {
        **below("transformer.h.*", attention("attn", ("qkv_proj",), "out_proj"), mlp("mlp", ("fc_in",), "fc_out")),
        **HEAD,
    },
    **dict.fromkeys(("bloom", "falcon"), {
        **below("transformer.h.*", attention("self_attention", ("query_key_value",), "dense"), _4H),
        **HEAD,
    }),
    "mpt": {
        **below("transformer.blocks.*", attention("attn", ("Wqkv",), "out_proj"), mlp("ffn", ("up_proj",))),
        **HEAD,
    },
    **dict.fromkeys(("persimmon", "fuyu"), {
        **below(("model.layers.*", "model.language_model.layers.*"),
                attention("self_attn", ("query_key_value",), "dense"), _4H),
        **HEAD,
    }),
    "cpmant": {
        **below("cpmant.encoder.layers.*",
                gathered("self_att.self_attention", ("project_q", "project_k", "project_v"), ("attention_out",)),
                {"ffn.ffn.w_in.w_0": GATHER, "ffn.ffn.w_in.w_1": GATHER, "ffn.ffn.w_out": SLICE}),
        **HEAD,
    },
    "ctrl": {
        **below("transformer.h.*", gathered("multi_head_attention", ("Wq", "Wk", "Wv"), ("dense",)),
                mlp("ffn", ("0",), "2")),
        **HEAD,
    },
    "diffllama": {
        **below("model.layers.*", gathered("self_attn", ("q_proj", "k_proj", "v_proj"), ("o_proj",)), mlp()),
        **HEAD,
    },
    "doge": {
        **below("model.layers.*", gathered("self_attn", ("q_proj", "k_proj", "v_proj"), ("o_proj",)), mlp()),
        **HEAD,
    },
    "dory": below("model.layers.*", gathered("self_attn", ("q_proj", "k_proj", "v_proj", "gate_proj"), ("o_proj",)),
                  gathered("mlp", ("gate_proj", "up_proj"), ("down_proj",))),
    **dict.fromkeys(("gemma3n_text", "gemma3n"), {  # an activation takes mean and deviation of all gates
        **below(("model.layers.*", "model.language_model.layers.*"), attention(),
                gathered("mlp", ("gate_proj", "up_proj"), ("down_proj",))),
        **HEAD,
    }),
    "git": {
        **below("git.encoder.layer.*", attention("attention.self", ("query", "key", "value")),
                {"attention.output.dense": "rowwise"}, mlp("", ("intermediate.dense",), "output.dense")),
        **HEAD,
    },
    "got_ocr2": {**below("model.language_model.layers.*", LLAMA), **HEAD},
    "moss_transcribe_diarize": {**below("model.language_model.layers.*", LLAMA), **HEAD},
    "modernbert-decoder": {
        **below("model.layers.*", attention("attn", output="Wo"), {"mlp.Wi": GATHER, "mlp.Wo": SLICE}),
        **{"decoder": GATHER, "lm_head.dense": GATHER},
    },
    "moshi": {
        **below("model.layers.*", gathered("self_attn", ("q_proj.linear", "k_proj.linear", "v_proj.linear"),
                                           ("o_proj.linear",)), gathered("mlp", ("fc1",), ("fc2",))),
        **HEAD,
    },
    "prophetnet": {
        **below("prophetnet.decoder.layers.*",
                gathered("self_attn", ("query_proj", "key_proj", "value_proj", "relative_pos_embeddings"),
                         ("out_proj",)),
                gathered("cross_attn", ("query_proj", "key_proj", "value_proj"), ("out_proj",)),
                mlp("feed_forward", ("intermediate",), "output")),
        **HEAD,
    },
    "xlm": {
        **below("transformer.attentions.*", gathered("", ("q_lin", "k_lin", "v_lin"), ("out_lin",))),
        **{f"transformer.attentions.*.{each}": GATHER for each in ("q_lin", "k_lin", "v_lin")},
        "transformer.attentions.*.out_lin": SLICE,
        **below("transformer.ffns.*", mlp("", ("lin1",), "lin2")),
        **HEAD,
    },
    "xlnet": {**below("transformer.layer.*.ff", mlp("", ("layer_1",), "layer_2")), **HEAD},
    "blt": {
        **below(("model.local_encoder.layers.*", "model.global_transformer.layers.*", "model.local_decoder.layers.*",
                 "model.patcher.layers.*"), LLAMA),
        **HEAD,
    },
}  # fmt: skip
