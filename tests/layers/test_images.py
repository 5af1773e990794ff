"""Models of text and images: the text's layers are split; a prompt with an image gives what the unsplit model gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from iris.errors import StyleError
import layers
import pytest
import torch

from tests.harness import UNDER_TORCHRUN, WORLDS, agreed, both, run_ranks

transformers = pytest.importorskip("transformers")
pytestmark = both

IMAGE, BEGIN, END, VIDEO = 95, 96, 97, 98
_TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100, "max_position_embeddings": 64, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_SEEN: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_OF_QWEN = {
    "text_config": {**_TEXT, "rope_parameters": _MROPE}, "image_token_id": IMAGE, "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN, "vision_end_token_id": END,
}  # fmt: skip
_VISION_OF_QWEN = {"depth": 2, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
# type of model: its configuration
FAMILIES: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"}, "image_token_index": IMAGE,
        "vision_config": {**_SEEN, "model_type": "clip_vision_model", "image_size": 8, "projection_dim": 16},
    },
    "gemma3": {
        "text_config": {**_TEXT, "sliding_window": 4}, "image_token_index": IMAGE, "mm_tokens_per_image": 4,
        "boi_token_index": BEGIN, "eoi_token_index": END, "vision_config": {**_SEEN, "image_size": 16},
    },
    "qwen2_vl": {**_OF_QWEN, "vision_config": {**_VISION_OF_QWEN, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}},
    "qwen2_5_vl": {
        **_OF_QWEN,
        "vision_config": {**_VISION_OF_QWEN, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32,
                          "window_size": 16, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        **_OF_QWEN,
        "vision_config": {**_VISION_OF_QWEN, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32,
                          "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
}  # fmt: skip


def build(kind: str) -> Any:
    """The whole model, the same wherever it is built."""
    state = torch.get_rng_state()
    torch.manual_seed(7)
    config = transformers.CONFIG_MAPPING[kind](**FAMILIES[kind])
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            else:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    torch.set_rng_state(state)
    return model


def inputs(kind: str, seed: int, device: Any = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A prompt of text, an image that becomes four tokens, and text."""
    text = torch.randint(2, 90, (7,), generator=torch.Generator().manual_seed(3)).tolist()
    tokens = torch.tensor([[*text[:3], BEGIN, *[IMAGE] * 4, END, *text[3:]]])
    random = torch.Generator().manual_seed(seed)
    if kind.startswith("qwen"):
        given = {"pixel_values": torch.randn(16, 3 * 2 * 4 * 4, generator=random)}
        given["image_grid_thw"] = torch.tensor([[1, 4, 4]])
        given["mm_token_type_ids"] = (tokens == IMAGE).long()
    else:
        size = FAMILIES[kind]["vision_config"]["image_size"]
        given = {"pixel_values": torch.randn(1, 3, size, size, generator=random)}
    if kind == "gemma3":
        given["token_type_ids"] = (tokens == IMAGE).long()
    given["pixel_values"] = given["pixel_values"].to(dtype)
    return {name: each.to(device) for name, each in {"input_ids": tokens, **given}.items()}


@torch.no_grad()
def answers(model: Any, kind: str, device: Any = "cpu") -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """Return the logits for two images, and the greedy tokens after the first."""
    first, second = (inputs(kind, seed, device, model.dtype) for seed in (1, 2))
    length = first["input_ids"].shape[1]
    words = model.generate(**first, max_new_tokens=4, do_sample=False)[:, length:].tolist()
    return model(**first).logits.cpu(), model(**second).logits.cpu(), words


def image_body(ctx: Any, kind: str) -> tuple[Any, str]:
    model = build(kind)
    report = layers.parallelize(model, ctx)
    with torch.backends.cudnn.flags(allow_tf32=False):  # a vision tower begins with a convolution
        return answers(model, kind, ctx.device), str(report)


@pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2, 3])
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.some(3)
def test_a_prompt_with_an_image_gives_the_unsplit_models_logits(world_size: int, kind: str) -> None:
    whole = build(kind)
    single = answers(whole, kind)
    double = answers(whole.double(), kind)
    assert (double[0] - double[1]).abs().max() > 0.05 * double[0].abs().max(), "the image counts for nothing"
    check(run_ranks(world_size, image_body, kind), single, double)


def check(results: list[Any], single: Any, double: Any) -> None:
    for (first, second, words), report in results:
        for actual, own, exact in zip((first, second), single, double, strict=False):
            error, allowed = (actual - exact).abs().max(), (own - exact).abs().max()
            assert error <= 4 * allowed + 1e-5 * exact.abs().max(), f"off by {error:.1e}, allowed {allowed:.1e}"
        assert words == single[2]
        rows = report.splitlines()
        for name, style in (("q_proj", "colwise"), ("o_proj", "rowwise"), ("down_proj", "rowwise")):
            assert any("language_model" in row and name in row and f" {style}" in row for row in rows), report


def loaded_body(ctx: Any, folder: Path, kind: str) -> tuple[Any, str]:
    model = layers.from_pretrained(folder, ctx)
    with torch.backends.cudnn.flags(allow_tf32=False):
        return answers(model, kind, ctx.device), str(model.parallel_report)


@pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])
@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])
def test_a_checkpoint_of_text_and_images_is_loaded(world_size: int, kind: str, tmp_path: Path) -> None:
    whole, folder = build(kind), agreed(tmp_path)
    whole.save_pretrained(folder)
    agreed(None)
    single = answers(whole, kind)
    check(run_ranks(world_size, loaded_body, folder, kind), single, answers(whole.double(), kind))


class Whole(torch.nn.Module):
    """A model whose own plan splits its head only."""

    tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layers, self.lm_head = torch.nn.ModuleList([model.model]), model.lm_head


def refused_body(ctx: Any) -> None:
    model = build("llava")
    with pytest.raises(StyleError, match=r"Whole's own plan splits lm_head only: .*pass plan=\{name: style\} to split"):
        layers.parallelize(Whole(model), ctx)
    llava = build("llava").to(ctx.device)
    plan = {"model.vision_tower.encoder.layers.*.self_attn.q_proj": "colwise"}
    with pytest.raises(StyleError, match="self_attn is a .* heads stay whole only in"):
        layers.parallelize(llava, ctx, plan=plan)


@pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])
def test_what_cannot_be_split_is_refused_by_name(world_size: int) -> None:
    run_ranks(world_size, refused_body)
