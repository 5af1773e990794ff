"""Models of an encoder and a decoder: split, they give the unsplit model's logits and tokens, from files, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import iris
from iris.errors import StyleError
import layers
import pytest
import torch

from tests.harness import UNDER_TORCHRUN, WORLDS, agreed, both, run_ranks

transformers = pytest.importorskip("transformers")
pytestmark = both

_T5: dict[str, Any] = {
    "d_model": 36, "d_kv": 8, "d_ff": 52, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 6, "vocab_size": 97,
    "relative_attention_num_buckets": 6, "relative_attention_max_distance": 12, "decoder_start_token_id": 0,
    "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
_BART: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 52, "decoder_ffn_dim": 52, "vocab_size": 97, "max_position_embeddings": 64,
    "decoder_start_token_id": 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": None,
    "forced_eos_token_id": None,
}  # fmt: skip
# name: (type of model, its configuration). As many buckets as heads, so that a split of the wrong dimension would fit.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", {**_T5, "feed_forward_proj": "relu", "tie_word_embeddings": True}),
    "flan-t5": ("t5", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("mt5", {**_T5, "num_heads": 4}),
    "umt5": ("umt5", {**_T5, "num_heads": 2}),  # on three ranks, one has no heads of its own
    "bart": ("bart", _BART),
}


def build(name: str) -> Any:
    """The whole model, the same wherever it is built."""
    kind, settings = MODELS[name]
    transformers.logging.set_verbosity_error()
    state = torch.get_rng_state()
    torch.manual_seed(13)
    config = transformers.CONFIG_MAPPING[kind](**settings)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            else:
                parameter.normal_(std=1.2 * parameter[0].numel() ** -0.5)
    torch.set_rng_state(state)
    return model


@torch.no_grad()
def answers(model: Any, device: Any = "cpu") -> tuple[torch.Tensor, list[list[int]], list[list[int]]]:
    """Return the logits of two texts, one padded, the greedy tokens, and those of two beams."""
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 97, (2, 9), generator=random).to(device)
    mask = torch.ones_like(tokens)
    mask[1, 7:] = 0
    given = {"input_ids": tokens, "attention_mask": mask}
    decoder = torch.randint(3, 97, (2, 8), generator=random).to(device)
    logits = model(**given, decoder_input_ids=decoder).logits.cpu()
    options = {"max_new_tokens": 10, "do_sample": False}
    greedy, beams = model.generate(**given, **options), model.generate(**given, **options, num_beams=2)
    return logits, greedy.tolist(), beams.tolist()


def split_body(ctx: iris.Iris, name: str) -> tuple[Any, str]:
    model = build(name)
    report = layers.parallelize(model, ctx)
    return answers(model, ctx.device), str(report)


def loaded_body(ctx: iris.Iris, folder: Path) -> tuple[Any, str]:
    model = layers.from_pretrained(folder, ctx)
    return answers(model, ctx.device), str(model.parallel_report)


def check(results: list[tuple[Any, str]], name: str) -> None:
    whole = build(name)
    single = answers(whole)
    double = answers(whole.double())
    own = (single[0] - double[0]).abs().max()
    for (logits, greedy, beams), report in results:
        error = (logits - double[0]).abs().max()
        assert error <= 4 * own + 1e-5 * double[0].abs().max(), f"off by {error:.1e}, the unsplit model by {own:.1e}"
        assert (greedy, beams) == single[1:]
        rows = report.splitlines()
        names = ("out_proj", "fc1", "fc2") if name == "bart" else ("SelfAttention.q", "EncDecAttention.o", ".wo")
        for part in names:
            assert any("decoder" in row and part in row and (" colwise" in row or " rowwise" in row) for row in rows)
        inside = [row for row in rows if row.startswith(("encoder.", "model.encoder.")) and names[0] in row]
        assert inside and all(" rowwise" in row or " colwise" in row for row in inside), report


@pytest.mark.parametrize("world_size", [each for each in WORLDS if each > 1])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.some(2)
def test_a_split_model_gives_the_unsplit_models_logits_and_tokens(world_size: int, name: str) -> None:
    check(run_ranks(world_size, split_body, name), name)


@pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2, 3])
@pytest.mark.parametrize("name", ["t5", "flan-t5", "bart"])
@pytest.mark.some(1)
def test_a_checkpoint_of_an_encoder_and_a_decoder_is_loaded(world_size: int, name: str, tmp_path: Path) -> None:
    folder = agreed(tmp_path)
    build(name).save_pretrained(folder, max_shard_size="20KB")
    agreed(None)
    check(run_ranks(world_size, loaded_body, folder), name)


def table_body(ctx: iris.Iris) -> list[tuple[int, ...]]:
    model = build("t5")
    plan = {"encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": "colwise"}
    plan |= {f"encoder.block.0.layer.0.SelfAttention.{each}": "colwise" for each in "qkv"}
    wrong: Any = model.get_submodule("encoder.block.0.layer.0.SelfAttention")
    wrong.relative_attention_bias = torch.nn.Embedding(6, 5)
    plan["encoder.block.0.layer.0.SelfAttention.o"] = "rowwise"
    with pytest.raises(
        StyleError, match=r"relative_attention_bias.weight is a .*\(6, 5\).* one column for each of the"
    ):
        layers.parallelize(model, ctx, plan=plan)
    model = build("t5")
    layers.parallelize(model, ctx)
    tables = [each for each in model.modules() if isinstance(each, torch.nn.Embedding) and each.num_embeddings == 6]
    return [tuple(each.weight.shape) for each in tables]


@pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])
def test_a_bias_by_head_is_split_by_its_columns(world_size: int) -> None:
    sizes = run_ranks(world_size, table_body)
    assert all(rows == 6 for each in sizes for rows, _ in each)
    assert [sum(of) for of in zip(*([columns for _, columns in each] for each in sizes), strict=True)] == [6, 6]
