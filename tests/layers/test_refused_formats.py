"""Quantised checkpoints that are refused by name, on every rank, and those that load only on request."""

from __future__ import annotations

from collections.abc import Callable
import json
from pathlib import Path
from typing import Any

from iris.errors import CheckpointError
import layers
import pytest
from safetensors.torch import load_file, save_file
import torch

from tests.harness import WORLDS, both, once, run_ranks
from tests.layers import models, written_formats
from tests.layers.test_quantised_models import loaded_body, written

pytest.importorskip("transformers")
pytestmark = both


def changed(**settings: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= settings
        (folder / "config.json").write_text(json.dumps(config))

    return change


def with_scales(dtype: torch.dtype) -> Callable[[Path], None]:
    return with_tensors(lambda t: t.update({f"{UP}.scales": t[f"{UP}.scales"].to(dtype)}))


def with_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = {key: each.clone() for key, each in load_file(folder / "model.safetensors").items()}
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return rewrite


UP = "model.layers.0.mlp.up_proj"
CACHED = with_tensors(lambda t: t.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}))
REFUSED: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "method": ("fp8_block", changed(quant_method="bitsandbytes"), "quantised .quantization_config, 'bitsandbytes'"),
    "blocks": ("fp8_block", changed(weight_block_size=[128]), "weight_block_size is .128.: expected two positive"),
    "activations": ("fp8_block", changed(activation_scheme="odd"), "activation_scheme is 'odd': expected 'dynamic'"),
    "left out": ("fp8_block", changed(modules_to_not_convert=["up_proj"]), f"{UP}.weight is quantised, but the conf"),
    "no scale": ("fp8_block", with_tensors(lambda t: t.pop(f"{UP}.weight_scale_inv")), f"{UP}.weight has no stored sc"),
    "no weight": (
        "fp8_block",
        with_tensors(lambda t: t.pop(f"{UP}.weight")),
        f"{UP}.weight has no stored weight, only",
    ),
    "scale's shape": (
        "fp8_block",
        with_tensors(lambda t: t.update({f"{UP}.weight_scale_inv": torch.ones(2, 2)})),
        r"up_proj.weight .352, 160. has scales of shape .2, 2.: expected one, one for each row, or one for each",
    ),
    "kv cache": ("fp8_block", CACHED, "scales of a quantised KV cache.*self_attn.k_scale; strict=False loads"),
    "no configuration": (
        "fp8_block",
        lambda folder: (folder / "config.json").write_text(
            json.dumps({k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k[:5] != "quant"})
        ),
        "the weights are quantised, and config.json has no quantization_config",
    ),
    "bits": ("gptq", changed(bits=3), "bits is 3: expected 4 or 8"),
    "marlin": ("gptq", changed(checkpoint_format="marlin"), "checkpoint_format is 'marlin': expected 'gptq'"),
    "dynamic": (
        "gptq",
        changed(dynamic={"+:.*up.*": {"bits": 8}}),
        "dynamic gives '.*up.*' separate settings",
    ),
    "not quantised": (
        "fp8_block",
        with_tensors(
            lambda t: (
                [t.update({k: t[k].float()}) for k in t if k.endswith("weight")]
                + [t.pop(k) for k in list(t) if k.endswith("scale_inv")]
            )
        ),
        "says that weights are quantised .fp8., and no stored weight is",
    ),
    "group": ("gptq", changed(group_size=64), r"expected .3, 352. and .3, 44., for 4 bits in groups of 64"),
    "group of integers": (
        "ct_int4_32",
        changed(**written_formats.compressed("pack-quantized", written_formats._int(4, 80))),
        r"up_proj.weight .352, 160. has scales of shape .352, 5.: expected .352, 2., for groups of 80",
    ),
    "size of groups": (
        "ct_int4_32",
        changed(**written_formats.compressed("pack-quantized", written_formats._int(4, 32) | {"group_size": "32"})),
        "group_size is '32': expected -1 or a positive integer",
    ),
    "gemv": ("awq", changed(version="gemv"), "version is 'gemv': expected 'gemm'"),
    "gemv of GPTQModel": (
        "awq",
        changed(version=None, checkpoint_format="gemv"),
        "checkpoint_format is 'gemv': expected",
    ),
    "status": ("ct_int4_32", changed(quantization_status="calibration"), "quantization_status is 'calibration'"),
    "rotation": ("ct_int4_32", changed(transform_config={"config_groups": {"a": 1}}), "transform_config rotates"),
    "fewer experts": (
        "ct_int4_32",
        changed(moe_sparsity_config={"method": "prune", "num_experts": [3]}),
        "moe_sparsity_config leaves out experts: expected none",
    ),
    "sparsity": ("ct_int4_32", changed(sparsity_config={"format": "sparse-24"}), "sparsity_config .* 'sparse-24'"),
    "three bits": (
        "ct_int4_32",
        changed(**written_formats.compressed("pack-quantized", written_formats._int(3, 32))),
        "num_bits is 3: expected 8 or 4",
    ),
    "algorithm": ("modelopt_fp8", changed(quant_algo="INT4_AWQ"), "quant_algo is 'INT4_AWQ': expected one of FP8"),
    "smoothing": (
        "modelopt_nvfp4",
        with_tensors(lambda t: t.update({f"{UP}.pre_quant_scale": torch.ones(160)})),
        "up_proj.weight has a pre_quant_scale",
    ),
    "scale of NaN": (
        "fp8_block",
        with_tensors(lambda t: t[f"{UP}.weight_scale_inv"].fill_(torch.nan)),
        f"rank 0: {UP}.weight has scales that are NaN or infinite: expected finite ones",
    ),
    "two scales": (
        "fp8_block",
        with_tensors(lambda t: t.update({f"{UP}.weight_scale": torch.ones(1)})),
        f"{UP}.weight_scale.* and {UP}.weight_scale.* are both the scale of {UP}.weight",
    ),
    "two weights": (
        "gptq",
        with_tensors(lambda t: t.update({f"{UP}.weight": torch.ones(352, 160)})),
        f"{UP}.weight is stored more than once: {UP}.qweight; {UP}.weight: expected one",
    ),
    "scales in fp8 of GPTQ": (
        "gptq",
        with_scales(torch.float8_e4m3fn),
        "has scales in torch.float8_e4m3",
    ),
    "scales in bytes of AWQ": (
        "awq",
        with_scales(torch.uint8),
        "has scales in torch.uint8: expected one",
    ),
    "pattern": ("ct_int4_32", changed(ignore=["re:(["]), "ignore has 're:..', which is not a pattern"),
}


def refused_body(ctx, folder: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        layers.from_pretrained(folder, ctx)
    return str(caught.value)


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_what_is_not_read_is_refused_by_name_on_every_rank(tmp_path: Path, world_size: int) -> None:
    for number, (format, change, message) in enumerate(REFUSED.values()):
        folder, _ = written(tmp_path / str(number), format, "dense")
        once(lambda folder=folder, change=change: change(folder))
        texts = run_ranks(world_size, refused_body, str(folder))
        with pytest.raises(CheckpointError, match=message):
            raise CheckpointError(texts[0])
        assert len(set(texts)) == 1, texts


def cached_body(ctx, folder: str) -> torch.Tensor:
    return models.logits(layers.from_pretrained(folder, ctx, dtype=torch.float32, strict=False), ctx.device).cpu()


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_without_strict_a_model_loads_without_the_scales_of_its_cache(tmp_path: Path, world_size: int) -> None:
    folder, _ = written(tmp_path, "fp8_block", "dense")
    expected = run_ranks(world_size, loaded_body, str(folder))[0][0]
    once(lambda: CACHED(folder))
    assert torch.equal(run_ranks(world_size, cached_body, str(folder))[0], expected)


def unscaled_body(ctx, folder: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        layers.from_pretrained(folder, ctx, strict=False)
    return str(caught.value)


UNSCALED = {
    "fp8_block_e8m0": ({}, "the weights are quantised, and config.json has no quantization_config that says how: "),
    "fp8_tensor_static": (
        {"quant_method": "mxfp4"},
        "quantised, and mxfp4 has no scales of these names",
    ),
}


@pytest.mark.parametrize("format", UNSCALED)
@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_fp8_is_never_read_without_its_scales(tmp_path: Path, world_size: int, format: str) -> None:
    folder, _ = written(tmp_path, format, "dense")
    config, message = UNSCALED[format]
    settings = json.loads((folder / "config.json").read_text())
    once(lambda: (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config})))
    for text in run_ranks(world_size, unscaled_body, str(folder)):
        with pytest.raises(CheckpointError, match=message):
            raise CheckpointError(text)
