"""Plans of BERT and families of its structure: its projections are in two sibling modules."""

from __future__ import annotations

from .rules import COLUMN, GATHER, ROW, SLICE, below, mlp

_LAYER = {
    **{f"attention.self.{each}": COLUMN for each in ("query", "key", "value")},
    **{f"crossattention.self.{each}": COLUMN for each in ("query", "key", "value")},
    "attention.output.dense": ROW,
    "crossattention.output.dense": ROW,
    **mlp("", ("intermediate.dense",), "output.dense"),
}
_GATHERED = {
    **{f"attention.self.{each}": GATHER for each in ("query", "key", "value")},
    "attention.output.dense": SLICE,
    **mlp("", ("intermediate.dense",), "output.dense"),
}
_HEAD = dict.fromkeys(("lm_head.decoder", "cls.predictions.decoder", "generator_lm_head"), GATHER)
_BERT = {**below("*.encoder.layer.*", _LAYER), **_HEAD}

PLANS: dict[str, dict[str, str]] = {
    **dict.fromkeys(
        ("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
         "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"), _BERT
    ),
    "big_bird": {**below("*.encoder.layer.*", _GATHERED), **_HEAD},
    "reformer": {
        **below(
            "reformer.encoder.layers.*",
            {"attention.output.dense": SLICE},  # a layer that hashes reads its projections' weights itself
            mlp("", ("feed_forward.dense.dense",), "feed_forward.output.dense"),
        ),
        **_HEAD,
    },
}  # fmt: skip
