"""Models with adapters that are not merged are refused, with the way to merge them; merged ones are split."""

from __future__ import annotations

import copy
from typing import Any

import iris
from iris.errors import StyleError
import layers
import pytest
import torch
from torch import nn

from tests.harness import WORLDS, both, run_ranks
from tests.layers import models

pytest.importorskip("transformers")
pytestmark = both


class LowRank(nn.Module):
    """A linear and a product of low rank, as adapters are."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def adapted_body(ctx: iris.Iris) -> None:
    model: Any = models.build("plain")
    for layer in model.model.layers:
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj)
    match = (
        r"LlamaForCausalLM has an adapter that is not merged .*model.layers.0.self_attn.v_proj,"
        r" model.layers.1.self_attn.v_proj: expected plain linears; merge it by peft's merge_and_unload\(\)"
    )
    for plan in ("auto", {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}):
        with pytest.raises(StyleError, match=match):
            layers.parallelize(model, ctx, plan=plan)


@pytest.mark.parametrize("world_size", WORLDS[:2])
def test_an_adapter_inside_is_refused_by_the_names_of_its_layers(world_size: int) -> None:
    run_ranks(world_size, adapted_body)


def peft_body(ctx: iris.Iris) -> tuple[torch.Tensor, torch.Tensor]:
    import peft

    lora = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(3)
    model: Any = peft.get_peft_model(models.build("plain"), lora)
    with pytest.raises(StyleError, match=r"^PeftModelForCausalLM .* and 1 more: .*pass what its merge_and_unload\(\)"):
        layers.parallelize(model, ctx)
    with pytest.raises(StyleError, match=r"LlamaForCausalLM .*not merged.*peft's merge_and_unload\(\)"):
        layers.parallelize(model.get_base_model(), ctx)
    prompt = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    prompted: Any = peft.get_peft_model(models.build("plain"), prompt)
    with pytest.raises(
        StyleError, match=r"^PeftModelForCausalLM has an adapter that peft cannot merge.*learned prompt"
    ):
        layers.parallelize(prompted, ctx)
    whole = copy.deepcopy(model).merge_and_unload()
    merged = model.merge_and_unload()
    layers.parallelize(merged, ctx)
    return models.logits(merged, ctx.device).cpu(), models.logits(whole)


@pytest.mark.parametrize("world_size", WORLDS[:2])
def test_a_model_of_peft_is_split_once_it_is_merged(world_size: int) -> None:
    pytest.importorskip("peft")
    for split, whole in run_ranks(world_size, peft_body):
        torch.testing.assert_close(split, whole, rtol=2e-4, atol=2e-4)
