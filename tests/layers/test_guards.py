"""Methods that a split model inherits from its class: right on parts, or refused with what to do in their place."""

from __future__ import annotations

import copy
from pathlib import Path

from iris.errors import ArgumentError, DeviceError, DtypeError
import layers
from layers.hf.parallelize import parallelize
import pytest
import torch
from torch import nn

from tests.harness import UNDER_TORCHRUN, WORLDS, agreed, both, run_ranks
from tests.layers import models

pytest.importorskip("transformers")
pytestmark = both
two_ranks = pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])

BEFORE, ITS_OWN, MERGED = "on the unsplit model, and split that", "each rank would draw", "merge the adapter"
UNFIT = {
    "resize_token_embeddings": ((130,), BEFORE),
    "set_input_embeddings": ((nn.Embedding(120, 36),), BEFORE),
    "set_output_embeddings": ((nn.Linear(36, 120),), BEFORE),
    "init_weights": ((), ITS_OWN),
    "initialize_weights": ((), ITS_OWN),
    "post_init": ((), ITS_OWN),
    "add_adapter": ((None,), MERGED),
    "load_adapter": (("adapter",), MERGED),
    "gradient_checkpointing_enable": ((), "train it unsplit"),
    "enable_input_require_grads": ((), "train it unsplit"),
    "push_to_hub": (("somebody/something",), "save_pretrained"),
}


def inherited_body(ctx, folder: str) -> None:
    for name in ("tied", "plain"):
        models.build(name).save_pretrained(f"{folder}/{name}") if ctx.cur_rank == 0 else None
        ctx.barrier()
        split = models.build(name)
        parallelize(split, ctx)
        for model in (split, layers.from_pretrained(f"{folder}/{name}", ctx)):
            for each in (model, copy.deepcopy(model)):
                for method, (arguments, remedy) in UNFIT.items():
                    with pytest.raises(ArgumentError, match=f"{method} cannot be called on a split model.*{remedy}"):
                        getattr(each, method)(*arguments)
                with pytest.raises(DeviceError, match="device is meta: expected .*, the context's"):
                    each.to("meta")
                with pytest.raises(DtypeError, match="dtype is torch.float64: expected"):
                    each.double()
                each.tie_weights()
                held, rows = (of.weight.untyped_storage() for of in (each.lm_head, each.get_input_embeddings()))
                assert (held.data_ptr() == rows.data_ptr()) == (name == "tied")
                models.assert_logits(models.logits(each, ctx.device), name)
        for method, arguments in (("set_input_embeddings", (nn.Embedding(120, 36),)), ("train", ())):
            with pytest.raises(ArgumentError):
                getattr(model.model, method)(*arguments)  # a model inside of this one
        model.get_input_embeddings().weight = nn.Parameter(-model.get_input_embeddings().weight, requires_grad=False)
        held = model.lm_head.weight.clone()
        model.tie_weights()
        assert torch.equal(model.lm_head.weight, -held if name == "tied" else held)
        model.config.tie_word_embeddings = True
        if name == "plain":
            with pytest.raises(ArgumentError, match="lm_head.weight was not tied to model.embed_tokens"):
                model.tie_weights()


@two_ranks
def test_methods_that_would_break_a_split_model_are_refused_or_right(world_size: int, tmp_path: Path) -> None:
    run_ranks(world_size, inherited_body, str(agreed(tmp_path)))
