"""Only models whose layers form a chain are divided into stages."""

from __future__ import annotations

from typing import Any

from iris.errors import StyleError
from layers.pipeline.cut import check_stages, cut
import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from tests.layers import models


@pytest.mark.parametrize("name", ["plain", "tied", "transposed", "gpt_oss"])
def test_language_models_are_chains(name: str) -> None:
    assert check_stages(models.build(name), 2).endswith((".layers", ".h"))


def test_a_layer_that_takes_more_is_refused() -> None:
    model: Any = models.build("plain")

    class Stack(type(model.model)):
        """Gives its second layer one more tensor: the embedding, or what the first layer returned."""

        def forward(self, input_ids: torch.Tensor, **_: Any) -> BaseModelOutputWithPast:
            hidden = self.embed_tokens(input_ids)
            rotary = self.rotary_emb(hidden, position_ids=torch.arange(input_ids.shape[1])[None])
            first = self.layers[0](hidden, position_embeddings=rotary)
            more = first if self.skips else hidden
            second = self.layers[1](first, position_embeddings=rotary, more=more)
            return BaseModelOutputWithPast(last_hidden_state=self.norm(second))

    model.model.__class__, model.model.skips = Stack, False
    assert check_stages(model, 2) == "model.layers"
    model.model.skips = True
    with pytest.raises(StyleError, match=r"layer 1 of LlamaForCausalLM takes outputs of the layers \[0, 0\]"):
        check_stages(model, 2)


def test_an_index_is_counted_from_the_stage() -> None:
    model: Any = models.build("plain")
    config = model.config
    part = cut(model, 1, 2)
    assert part.local("model.layers.1.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert part.local("model.layers.0.mlp.up_proj.weight") is None and part.local("lm_head.weight") == "lm_head.weight"
    assert part.whole("model.layers.0.mlp") == "model.layers.1.mlp"
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0]
    assert model.config.num_hidden_layers == 1 and config.num_hidden_layers == 2
    served = part.served({"plan": {"model.layers.*.mlp.up_proj": "colwise", "model.layers.0.mlp": "x", "lm_head": "y"}})
    assert served["plan"] == {"model.layers.*.mlp.up_proj": "colwise", "lm_head": "y"}
    seen: list[str] = []
    part.served({"filter_fn": lambda name, module: seen.append(name)})["filter_fn"]("model.layers.0.mlp", model)
    assert seen == ["model.layers.1.mlp"]
