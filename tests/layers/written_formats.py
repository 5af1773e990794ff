"""Checkpoints as quantising libraries publish them, written from the definitions of their layouts.

Each writer quantises one matrix and returns what a file holds of it, by the end of the tensor's name, and the numbers
that this stands for, in float64. These come from the codes before they are packed, so they share no code with the
reader. `tests/layers/test_formats_by_their_libraries.py` compares the writers with the libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import json
from pathlib import Path
import re
from typing import Any

from safetensors.torch import load_file, save_file
import torch

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, torch.Tensor]


def spread(per_block: torch.Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    """[N, K] with the number of each entry's block, by loops over blocks."""
    out = torch.empty(shape, dtype=torch.float64)
    for i in range(per_block.shape[0]):
        for j in range(per_block.shape[1]):
            out[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]] = per_block[i, j].double()
    return out


def largest(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    rows, columns = (range(0, size, step) for size, step in zip(weight.shape, block, strict=True))
    return torch.stack(
        [torch.stack([weight[i : i + block[0], j : j + block[1]].abs().max() for j in columns]) for i in rows]
    ).float()


def power_above(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(scale.float())))


def exponents(power: torch.Tensor) -> torch.Tensor:
    return (torch.log2(power).round().to(torch.int32) + 127).to(torch.uint8)


def fp8(
    weight: torch.Tensor, block: tuple[int, int], dtype: Any, end: str, shape: Callable = lambda s: s.shape
) -> Written:
    scale = largest(weight, block) / 448
    if dtype in (torch.float8_e8m0fnu, torch.uint8):
        scale = power_above(scale)
        stored = exponents(scale) if dtype == torch.uint8 else exponents(scale).view(dtype)
    else:
        stored = scale.to(dtype)
        scale = stored.float()
    by_entry = spread(scale, block, tuple(weight.shape))
    codes = (weight.double() / by_entry).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    return {".weight": codes, end: stored.reshape(shape(stored))}, codes.double() * by_entry


def fp8_tensor(weight: torch.Tensor, end: str, shape: tuple[int, ...] = ()) -> Written:
    return fp8(weight, tuple(weight.shape), torch.float32, end, lambda _: shape)


def fp8_channel(weight: torch.Tensor, end: str) -> Written:
    return fp8(weight, (1, weight.shape[1]), torch.bfloat16, end)


def e2m1_codes(scaled: torch.Tensor) -> torch.Tensor:
    """The nearest of sixteen codes."""
    distance = (scaled.double().unsqueeze(-1) - E2M1).abs()
    distance[..., 8] = torch.inf  # not minus zero
    return distance.argmin(-1).to(torch.uint8)


def by_pairs(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., 0::2] | codes[..., 1::2] << 4


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed, bytes of scales, and the numbers."""
    scale = power_above(largest(weight, (1, 32)).clamp(min=1e-6) / 6)
    by_entry = spread(scale, (1, 32), tuple(weight.shape))
    codes = e2m1_codes(weight.double() / by_entry)
    return by_pairs(codes), exponents(scale), E2M1[codes.long()] * by_entry


def mxfp4_packed(weight: torch.Tensor) -> Written:
    packed, scale, exact = mxfp4(weight)
    return {".weight_packed": packed, ".weight_scale": scale}, exact


def fp4_of_deepseek(weight: torch.Tensor, end: str = ".scale") -> Written:
    packed, scale, exact = mxfp4(weight)
    return {".weight": packed.view(torch.int8), end: scale.view(torch.float8_e8m0fnu)}, exact


def nvfp4(weight: torch.Tensor, divides: bool) -> Written:
    whole = weight.abs().max().float() / (6 * 448)
    scale = (largest(weight, (1, 16)) / 6 / whole).to(torch.float8_e4m3fn)
    exactly = 1 / (1 / whole).double() if divides else whole.double()
    by_entry = spread(scale.double() * exactly, (1, 16), tuple(weight.shape))
    codes = e2m1_codes(weight.double() / by_entry.clamp(min=1e-12))
    exact = E2M1[codes.long()] * by_entry
    if divides:
        names = {".weight_packed": by_pairs(codes), ".weight_global_scale": (1 / whole).reshape(1)}
        names[".input_global_scale"] = torch.tensor([7.0])
    else:
        names = {".weight": by_pairs(codes), ".weight_scale_2": whole, ".input_scale": torch.tensor(0.5)}
    return {**names, ".weight_scale": scale}, exact


def grouped(
    weight: torch.Tensor, bits: int, order: torch.Tensor, symmetric: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes from 0 on [N, K], zeros and scales [N, groups], and the numbers; `order` is the group of each column."""
    groups, top = int(order.max()) + 1, 2**bits - 1
    codes = torch.empty(weight.shape, dtype=torch.int64)
    zeros = torch.empty(weight.shape[0], groups, dtype=torch.int64)
    scales = torch.empty(weight.shape[0], groups, dtype=dtype)
    exact = torch.empty(weight.shape, dtype=torch.float64)
    for group in range(groups):
        of = order == group
        part = weight[:, of].double()
        if symmetric:
            zeros[:, group] = 2 ** (bits - 1)
            scales[:, group] = (part.abs().amax(1) / (2 ** (bits - 1) - 0.5)).to(dtype)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, group] = ((high - low) / top).to(dtype)
            zeros[:, group] = (-low / scales[:, group].double()).round().clamp(0, top).long()
        scale, zero = scales[:, group].double().unsqueeze(1), zeros[:, group].unsqueeze(1)
        codes[:, of] = ((part / scale).round() + zero).clamp(0, top).long()
        exact[:, of] = (codes[:, of] - zero) * scale
    return codes, zeros, scales, exact


def words(codes: torch.Tensor, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes packed along the last dimension into int32, `places` the field of each column of a word."""
    each = 32 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % each)).unflatten(-1, (-1, each))
    out = torch.zeros(codes.shape[:-1], dtype=torch.int64)
    for column, place in enumerate(places or range(each)):
        out |= codes[..., column] << bits * place
    return torch.where(out >= 2**31, out - 2**32, out).to(torch.int32)


def even_order(columns: int, group: int) -> torch.Tensor:
    return torch.arange(columns) // group


def packed(weight: torch.Tensor, bits: int, group: int | None, symmetric: bool = True) -> Written:
    """compressed-tensors' `pack-quantized`."""
    order = even_order(weight.shape[1], group or weight.shape[1])
    codes, zeros, scales, exact = grouped(weight, bits, order, symmetric, torch.bfloat16)
    tensors = {
        ".weight_packed": words(codes, bits),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors[".weight_zero_point"] = words(zeros.t(), bits).t().contiguous()
    return tensors, exact


def int4_in_bytes(weight: torch.Tensor) -> Written:
    """compressed-tensors' `int-quantized` with 4 bits, as W4A8 models have them: one to a byte."""
    codes, _, scales, exact = grouped(weight, 4, even_order(weight.shape[1], 32), True, torch.bfloat16)
    return {".weight": (codes - 8).to(torch.int8), ".weight_scale": scales}, exact


def int8(weight: torch.Tensor) -> Written:
    """compressed-tensors' `int-quantized`: a scale for each channel."""
    codes, _, scales, exact = grouped(weight, 8, even_order(weight.shape[1], weight.shape[1]), True, torch.bfloat16)
    return {".weight": (codes - 128).to(torch.int8), ".weight_scale": scales}, exact


def awq(weight: torch.Tensor, group: int, symmetric: bool = False) -> Written:
    codes, zeros, scales, exact = grouped(weight, 4, even_order(weight.shape[1], group), symmetric, torch.float16)
    places = (0, 4, 1, 5, 2, 6, 3, 7)
    return {
        ".qweight": words(codes.t(), 4, places),
        ".qzeros": words(zeros.t(), 4, places),
        ".scales": scales.t().contiguous(),
    }, exact


def gptq(weight: torch.Tensor, bits: int, group: int, version: int, by_activation: bool) -> Written:
    order = even_order(weight.shape[1], group)
    if by_activation:
        order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(5))]
    codes, zeros, scales, exact = grouped(weight, bits, order, version == 1, torch.float16)
    return {
        ".qweight": words(codes, bits).t().contiguous(),
        ".qzeros": words(zeros.t() - int(version == 1), bits),
        ".scales": scales.t().contiguous(),
        ".g_idx": order.to(torch.int32),
    }, exact


@dataclass(frozen=True)
class Format:
    """A writer, and the configuration that names its layout. `experts`: the writer of experts, if that is another."""

    write: Callable[[torch.Tensor], Written]
    config: dict[str, Any]
    experts: Callable[[torch.Tensor], Written] | None = None


def compressed(format: str, args: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False} | args} | more
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _int(bits: int, group: int | None, symmetric: bool = True) -> dict[str, Any]:
    kind = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, **kind}


def _float(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": strategy, **more}


_BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
_DYNAMIC = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token", "symmetric": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "lm_head": False, "pack_dtype": "int32"}
FORMATS: dict[str, Format] = {
    "fp8_block": Format(lambda w: fp8(w, (128, 128), torch.float32, ".weight_scale_inv"), _BLOCK),
    "fp8_block_bf16": Format(
        lambda w: fp8(w, (128, 128), torch.bfloat16, ".weight_scale_inv"),
        _BLOCK | {"modules_to_not_convert": ["lm_head", "model.embed_tokens", "mlp.gate"]},
    ),
    "fp8_block_e8m0": Format(
        lambda w: fp8(w, (128, 128), torch.float8_e8m0fnu, ".scale"), _BLOCK | {"scale_fmt": "ue8m0"}
    ),
    "fp8_with_fp4_experts": Format(
        lambda w: fp8(w, (128, 128), torch.float8_e8m0fnu, ".weight_scale_inv"),
        _BLOCK | {"scale_fmt": "ue8m0", "expert_dtype": "fp4"},
        experts=lambda w: fp4_of_deepseek(w, ".weight_scale_inv"),
    ),
    "fp8_tensor_static": Format(
        lambda w: _with(fp8_tensor(w, ".weight_scale_inv"), ".activation_scale", torch.tensor(0.25)),
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    ),
    "fbgemm_fp8": Format(
        lambda w: fp8(w, (1, w.shape[1]), torch.float32, ".weight_scale"),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    ),
    "ct_fp8_channel": Format(
        lambda w: fp8_channel(w, ".weight_scale"),
        compressed("float-quantized", _float(8, "channel"), input_activations=_DYNAMIC),
    ),
    "ct_fp8_tensor": Format(
        lambda w: _with(fp8_tensor(w, ".weight_scale", (1,)), ".input_scale", torch.tensor([0.5])),
        compressed(
            "float-quantized",
            _float(8, "tensor"),
            input_activations=_DYNAMIC | {"dynamic": False, "strategy": "tensor"},
        ),
    ),
    "ct_fp8_block": Format(
        lambda w: fp8(w, (128, 128), torch.bfloat16, ".weight_scale"),
        compressed("float-quantized", _float(8, "block", block_structure=[128, 128])),
    ),
    "ct_mxfp8": Format(
        lambda w: fp8(w, (1, 32), torch.uint8, ".weight_scale"),
        compressed("mxfp8-quantized", _float(8, "group", group_size=32)),
    ),
    "ct_mxfp4": Format(mxfp4_packed, compressed("mxfp4-pack-quantized", _float(4, "group", group_size=32))),
    "ct_nvfp4": Format(
        lambda w: nvfp4(w, True), compressed("nvfp4-pack-quantized", _float(4, "tensor_group", group_size=16))
    ),
    "ct_int4_32": Format(lambda w: packed(w, 4, 32), compressed("pack-quantized", _int(4, 32))),
    "ct_int4_zeros": Format(lambda w: packed(w, 4, 64, False), compressed("pack-quantized", _int(4, 64, False))),
    "ct_int4_channel": Format(lambda w: packed(w, 4, None), compressed("pack-quantized", _int(4, None))),
    "ct_int8_128": Format(lambda w: packed(w, 8, 128), compressed("pack-quantized", _int(8, 128))),
    "ct_int4_in_bytes": Format(
        int4_in_bytes, compressed("int-quantized", _int(4, 32), input_activations=_DYNAMIC | {"type": "int"})
    ),
    "ct_int8": Format(int8, compressed("int-quantized", _int(8, None), input_activations=_DYNAMIC | {"type": "int"})),
    "modelopt_fp8": Format(
        lambda w: _with(fp8_tensor(w, ".weight_scale"), ".input_scale", torch.tensor(0.5)),
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}},
    ),
    "modelopt_mxfp8": Format(
        lambda w: fp8(w, (1, 32), torch.uint8, ".weight_scale"),
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"], "group_size": 32},
    ),
    "modelopt_nvfp4": Format(
        lambda w: nvfp4(w, False),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.embed*"], "group_size": 16},
    ),
    "awq": Format(
        lambda w: awq(w, 32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    ),
    "awq_symmetric": Format(
        lambda w: awq(w, 32, True),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    ),
    "gptq": Format(lambda w: gptq(w, 4, 32, 1, False), _GPTQ | {"desc_act": False, "checkpoint_format": "gptq"}),
    "gptq_v2": Format(
        lambda w: gptq(w, 8, 64, 2, False),
        _GPTQ | {"desc_act": False, "checkpoint_format": "gptq_v2", "sym": False, "bits": 8, "group_size": 64},
    ),
    "gptq_ordered": Format(lambda w: gptq(w, 4, 32, 1, True), _GPTQ | {"desc_act": True}),
    "gptq_ordered_128": Format(lambda w: gptq(w, 4, 128, 1, True), _GPTQ | {"desc_act": True, "group_size": 128}),
    "gptq_ordered_zeros": Format(
        lambda w: gptq(w, 8, 64, 2, True),
        _GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2", "sym": False, "bits": 8, "group_size": 64},
    ),
}


def _with(written: Written, end: str, tensor: torch.Tensor) -> Written:
    return written[0] | {end: tensor}, written[1]


# Types of models whose publishers have checkpoints with a scale for each block of 128 x 128.
PUBLISHED_IN_FP8 = (
    "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm4_moe", "glm_moe_dsa", "minimax_m2", "mistral", "qwen3",
    "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
)  # fmt: skip
_LINEAR = re.compile(r"\.\d+\..*(?:_proj|\.w[123]|\.w[qko]\w*|\.experts\.\d+\.\w+)\.weight$")


def write(model: Any, folder: Path, name: str, of: re.Pattern = _LINEAR) -> Path:
    """Saves `model` in `folder`, its linears in the format `name`; returns a folder with the exact numbers."""
    format, exact = FORMATS[name], folder.with_name(f"{folder.name}-exact")
    model.save_pretrained(exact)
    tensors, plain = load_file(exact / "model.safetensors"), {}
    stored: Tensors = {}
    for key, tensor in tensors.items():
        if of.search(key):
            parts, numbers = (format.experts if format.experts and ".experts." in key else format.write)(tensor)
            stored |= {key.removesuffix(".weight") + end: part for end, part in parts.items()}
            plain[key] = numbers.float()
        else:
            stored[key] = plain[key] = tensor
    return save(folder, exact, stored, plain, format.config)


def write_gpt_oss(model: Any, folder: Path) -> Path:
    """As `write`, with the experts as gpt-oss has them."""
    exact = folder.with_name(f"{folder.name}-exact")
    model.save_pretrained(exact)
    stored: Tensors = {}
    plain: Tensors = {}
    for key, tensor in load_file(exact / "model.safetensors").items():
        if key.endswith(("gate_up_proj", "down_proj")):
            written = [mxfp4(each.t()) for each in tensor]
            blocks = torch.stack([each[0] for each in written])
            stored[f"{key}_blocks"] = blocks.unflatten(-1, (-1, 16)).contiguous()
            stored[f"{key}_scales"] = torch.stack([each[1] for each in written])
            plain[key] = torch.stack([each[2].t() for each in written]).float().contiguous()
        else:
            stored[key] = plain[key] = tensor
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return save(folder, exact, stored, plain, {"quant_method": "mxfp4", "modules_to_not_convert": left})


def save(folder: Path, exact: Path, stored: Tensors, plain: Tensors, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for path in exact.glob("*.json"):
        (folder / path.name).write_text(path.read_text())
    save_file({key: each.contiguous() for key, each in stored.items()}, folder / "model.safetensors", {"format": "pt"})
    save_file(plain, exact / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    return exact
