"""Only models whose layers form a chain are divided into stages."""

from __future__ import annotations

from typing import Any

from iris.errors import StyleError
from layers.pipeline.cut import check_stages
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
